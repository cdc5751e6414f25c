"""Only registered functions can be called."""

import functools
import math
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


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1025, 7])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ConfigurationError):
        Registry().add(name, echo, replace=False)


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


class Base:
    def inherited(self):
        return "inherited"

    def replaced(self):
        return "old"

    def hidden(self):
        return "never"


class Thing(Base):
    limit = 5
    hidden = None

    def __init__(self):
        self.value = 3
        self.function = len

    def pull(self):
        return self.value

    def replaced(self):
        return "new"

    async def later(self):
        return self.value

    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls.__name__

    @functools.cache  # noqa: B019
    def cached(self):
        return "cached"

    @property
    def prop(self):
        raise AssertionError("a property is not looked at")

    def _private(self):
        return "never"

    class Inner:
        pass


METHODS = ["cached", "inherited", "later", "of_class", "pull", "replaced", "static"]


def test_an_object_is_registered_by_its_public_methods():
    registry = Registry()
    registry.add("thing", Thing(), replace=False)
    assert registry.names() == [f"thing.{name}" for name in METHODS]
    results = {
        name: registry.functions[f"thing.{name}"].target() for name in METHODS if name != "later"
    }
    assert results["pull"] == 3
    assert (results["replaced"], results["of_class"]) == ("new", "Thing")
    assert registry.functions["thing.later"].is_async


def test_a_method_of_a_registered_object_stands_for_its_name():
    registry, thing = Registry(), Thing()
    registry.add("thing", thing, replace=False)
    assert registry.name_of(thing.pull) == "thing.pull"
    with pytest.raises(ConfigurationError):
        registry.name_of(Thing().pull)


def test_an_object_is_registered_whole_or_not_at_all():
    registry = Registry()
    registry.add("thing.pull", echo, replace=False)
    with pytest.raises(ConfigurationError, match=r"'thing\.pull' is registered already"):
        registry.add("thing", Thing(), replace=False)
    assert registry.names() == ["thing.pull"]
    registry.add("thing", Thing(), replace=True)
    assert len(registry.names()) == len(METHODS)
    registry.add("thing", Base(), replace=True)
    assert registry.names() == ["thing.hidden", "thing.inherited", "thing.replaced"]


def test_an_object_is_unregistered_whole_or_by_method():
    registry = Registry()
    registry.add("thing", Thing(), replace=False)
    registry.add("thing.other", echo, replace=False)
    registry.remove("thing.pull")
    assert "thing.pull" not in registry.functions
    registry.remove("thing")
    assert registry.names() == ["thing.other"]
    with pytest.raises(FunctionNotFoundError):
        registry.remove("thing")


@pytest.mark.parametrize("thing", [7, "text", [1], {"a": 1}, None, math, object(), 3.5])
def test_what_has_no_methods_of_its_own_is_refused(thing):
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        Registry().add("thing", thing, replace=False)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1024, 7])
def test_a_wrong_name_of_an_object_is_refused(name):
    with pytest.raises(ConfigurationError, match="printable text"):
        Registry().add(name, Thing(), replace=False)
