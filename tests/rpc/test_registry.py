"""Only registered functions can be called."""

import threading

import pytest

from rankwire.errors import ConfigurationError, FunctionNotFoundError
from rankwire.rpc.registry import Registry


def echo(value):
    return value


async def later():
    return None


class Callable:
    async def __call__(self):
        return None


def test_a_registered_function_is_found_and_returns_its_input():
    registry = Registry()
    registry.add("echo", echo, replace=False)
    assert registry.functions["echo"].target("hello") == "hello"
    assert registry.names() == ["echo"]


def test_an_unknown_name_is_not_found():
    assert "echo" not in Registry().functions


def test_a_name_is_registered_once_unless_replaced():
    registry = Registry()
    registry.add("echo", echo, replace=False)
    with pytest.raises(ConfigurationError, match="registered already"):
        registry.add("echo", len, replace=False)
    registry.add("echo", len, replace=True)
    assert registry.functions["echo"].target is len


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1025, 7, None])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ConfigurationError):
        Registry().add(name, echo, replace=False)


def test_only_callables_are_taken():
    with pytest.raises(ConfigurationError, match="needs a function"):
        Registry().add("seven", 7, replace=False)


def test_removing_an_unknown_name_says_what_is_known():
    registry = Registry()
    registry.add("echo", echo, replace=False)
    with pytest.raises(FunctionNotFoundError) as info:
        registry.remove("other")
    assert info.value.known == ["echo"]


def test_a_function_stands_for_its_name():
    registry = Registry()
    registry.add("say", echo, replace=False)
    assert registry.name_of(echo) == "say"
    assert registry.name_of("anything") == "anything"
    with pytest.raises(ConfigurationError, match="not registered on this rank"):
        registry.name_of(len)


def test_bound_methods_stand_for_their_names():
    class Server:
        def pull(self):
            return 1

    server = Server()
    registry = Registry()
    registry.add("pull", server.pull, replace=False)
    assert registry.name_of(server.pull) == "pull"


def test_coroutine_functions_are_recognised():
    registry = Registry()
    registry.add("later", later, replace=False)
    registry.add("object", Callable(), replace=False)
    registry.add("echo", echo, replace=False)
    assert [registry.functions[name].is_async for name in ("later", "object", "echo")] == [
        True,
        True,
        False,
    ]


def test_registering_from_many_threads_loses_nothing():
    registry = Registry()
    threads = [
        threading.Thread(
            target=lambda i=i: [registry.add(f"{i}/{j}", echo, replace=False) for j in range(50)]
        )
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.names()) == 400
