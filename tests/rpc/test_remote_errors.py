"""What a function raised at another rank can be caught by its class, and nothing else happens."""

import builtins
import copy
import json
import pickle
import traceback

import pytest

from rankwire import (
    ConfigurationError,
    PeerLostError,
    RankwireError,
    RemoteError,
)
from rankwire.rpc.registry import RemoteErrors
from rankwire.testing import simulated_world
from rpc.agents import agents_of

NEVER = [
    "SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "StopIteration",
    "StopAsyncIteration", "SyntaxError", "IndentationError", "TabError", "ExceptionGroup",
    "BaseExceptionGroup",
]  # fmt: skip
ON_REQUEST = [
    "TimeoutError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError",
    "ConnectionAbortedError", "BrokenPipeError",
]  # fmt: skip
EXCEPTIONS = [
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ == name
]
USUAL = sorted({*EXCEPTIONS} - {*NEVER} - {*ON_REQUEST})


class AppError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code


class WorseError(AppError):
    pass


class BusyError(RuntimeError):
    def __init__(self, first, second):
        super().__init__(first, second)


def remote(name, bases=()):
    return RemoteError(name, "what happened", "far away", remote_bases=bases)


@pytest.mark.parametrize("name", USUAL)
def test_a_builtin_exception_can_be_caught_as_such(name):
    kind = getattr(builtins, name)
    error = RemoteErrors().typed(remote(name))
    with pytest.raises(kind) as info:
        raise error.during(op="rpc_sync", peer=3)
    assert isinstance(info.value, RemoteError)
    assert "what happened" in str(info.value)
    printed = "".join(traceback.format_exception(info.value))
    assert "far away" in printed
    assert f"rankwire.errors.RemoteError: {name}: what happened" in printed
    assert (info.value.remote_type, info.value.peer) == (name, 3)


@pytest.mark.parametrize("name", USUAL)
def test_it_is_copied_and_pickled_like_every_error(name):
    error = RemoteErrors().typed(remote(name)).during(op="rpc_sync", peer=3)
    for twin in (error.copy(), copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert repr(twin) == repr(error)
        assert twin.remote_traceback == "far away"


@pytest.mark.parametrize("name", NEVER)
def test_what_would_end_more_than_the_call_is_a_remote_error_alone(name):
    assert type(RemoteErrors().typed(remote(name))) is RemoteError
    with pytest.raises(ConfigurationError):
        RemoteErrors().add(getattr(builtins, name), None)


@pytest.mark.parametrize("name", ON_REQUEST)
def test_what_would_pass_for_the_end_of_the_call_itself_has_to_be_registered(name):
    kind = getattr(builtins, name)
    bases = [base.__name__ for base in kind.__mro__[1:-3]]
    errors = RemoteErrors()
    error = errors.typed(remote(name, bases))
    assert isinstance(error, OSError)
    assert not isinstance(error, (TimeoutError, ConnectionError))
    errors.add(kind, None)
    assert isinstance(errors.typed(remote(name, bases)), kind)


def test_nothing_is_looked_up_by_import():
    for name in ("json.JSONDecodeError", "os.error", "rankwire.errors.PeerLostError", "print"):
        assert type(RemoteErrors().typed(remote(name))) is RemoteError


@pytest.mark.parametrize("kind", [AppError, BusyError])
def test_a_class_of_the_program_is_known_once_it_is_registered(kind):
    name = f"{kind.__module__}.{kind.__qualname__}"
    errors = RemoteErrors()
    assert not isinstance(errors.typed(remote(name)), kind)
    errors.add(kind, None)
    errors.add(kind, None)
    error = errors.typed(remote(name))
    assert isinstance(error, kind)
    assert isinstance(error, RemoteError)
    assert "what happened" in str(error)
    twin = pickle.loads(pickle.dumps(error))
    assert isinstance(twin, kind)
    assert not isinstance(RemoteErrors().typed(remote(name)), kind)  # of another agent


def test_a_class_may_have_another_name_at_the_callee():
    errors = RemoteErrors()
    errors.add(AppError, "app.errors.AppError")
    assert isinstance(errors.typed(remote("app.errors.AppError")), AppError)


class Silent(Exception):
    @property
    def message(self):
        raise LookupError("no message")


@pytest.mark.parametrize("kind", [7, "KeyError", int, Silent, PeerLostError, RankwireError])
def test_what_cannot_stand_for_a_remote_error_is_refused(kind):
    with pytest.raises(ConfigurationError):
        RemoteErrors().add(kind, None)


def test_a_name_has_one_class():
    errors = RemoteErrors()
    errors.add(AppError, "app")
    for name in ("app", "KeyError", 7):
        with pytest.raises(ConfigurationError, match="another class"):
            errors.add(BusyError, name)


@pytest.fixture
def agents():
    with simulated_world(3) as world, agents_of(world) as agents:
        for agent in agents:
            agent.register("fail", fail)
        yield agents


def fail(kind):
    match kind:
        case "key":
            return {}["missing"]
        case "file":
            return open("/nonexistent/file")
        case "text":
            return b"\xff".decode()
        case "json":
            return json.loads("{")
        case "app":
            raise WorseError(5, detail="broken")
        case "peer":
            raise PeerLostError(7, "not this one")
        case "exit":
            raise SystemExit(3)
        case "stop":
            raise StopIteration("over")


@pytest.mark.parametrize(
    ("what", "kind", "remote_type"),
    [
        ("key", KeyError, "KeyError"),
        ("key", LookupError, "KeyError"),
        ("file", FileNotFoundError, "FileNotFoundError"),
        ("text", UnicodeDecodeError, "UnicodeDecodeError"),
        ("json", ValueError, "json.decoder.JSONDecodeError"),
    ],
)
def test_a_call_raises_what_the_function_raised(agents, what, kind, remote_type):
    for call in (
        lambda: agents[0].rpc_sync(1, "fail", what),
        lambda: agents[0].rpc_async(1, "fail", what).result(),
        lambda: agents[0].rpc_sync(0, "fail", what),
        lambda: agents[0].to(1).fail(what),
    ):
        with pytest.raises(kind) as info:
            call()
        assert isinstance(info.value, RemoteError)
        assert info.value.remote_type == remote_type
        assert "test_remote_errors.py" in info.value.remote_traceback
        assert info.value.peer in (0, 1)
        assert info.value.rank == 0


def test_an_error_keeps_its_class_however_many_ranks_it_passes(agents):
    agents[1].register("pass_on", lambda: agents[1].rpc_sync(2, "fail", "json"))
    agents[1].register("pass_key", lambda: agents[1].rpc_sync(2, "fail", "key"))
    with pytest.raises(ValueError, match="Expecting") as info:
        agents[0].rpc_sync(1, "pass_on")
    assert info.value.remote_type == "json.decoder.JSONDecodeError"
    with pytest.raises(KeyError):
        agents[0].rpc_sync(1, "pass_key")


def test_a_class_of_the_program_and_what_is_derived_from_it(agents):
    with pytest.raises(RemoteError) as info:
        agents[0].rpc_sync(1, "fail", "app")
    assert not isinstance(info.value, AppError)
    assert agents[0].register_error(AppError) is AppError
    with pytest.raises(AppError, match="5: broken") as info:
        agents[0].rpc_sync(1, "fail", "app")
    assert info.value.remote_type.endswith(".WorseError")


@pytest.mark.parametrize("what", ["peer", "exit", "stop"])
def test_what_tells_of_the_callee_or_ends_loops_stays_a_remote_error(agents, what):
    with pytest.raises(RemoteError) as info:
        agents[0].rpc_sync(1, "fail", what)
    assert type(info.value) is RemoteError
