"""An object of another rank, described by its class or a Protocol."""

import copy
import pickle
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from functools import wraps
from typing import Generic, Protocol, TypeVar, runtime_checkable

import pytest

from rankwire import ConfigurationError, FunctionNotFoundError, RpcFuture, current_call
from rankwire.rpc.stream import Stream
from rankwire.testing import simulated_world
from rpc.agents import agents_of

T = TypeVar("T")


def traced(function):
    @wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Base:
    def inherited(self) -> str:
        return "inherited"


class Learner(Base, Generic[T]):
    rate = 5

    def __init__(self) -> None:
        self.callback = print

    @property
    def version(self) -> int:
        return 1

    def pull(self, name: str, *, timeout: float = 0) -> list:
        return [name, timeout]

    def limit(self) -> float:
        return current_call().deadline.limit

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @traced
    def decorated(self) -> str:
        return "decorated"

    async def later(self, value: int) -> int:
        return value

    def deferred(self) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(7)
        return future

    def episodes(self, count: int = 2) -> Iterator[int]:
        yield from range(count)

    async def frames(self) -> AsyncIterator[bytes]:
        yield b"frame"

    def _private(self) -> None: ...


@runtime_checkable
class Pulls(Protocol):
    def pull(self, name: str) -> list: ...


@pytest.fixture
def caller():
    """An agent whose peer has registered a ``Learner``, also as ``"rollout/0"``."""
    with simulated_world(2) as world, agents_of(world) as agents:
        agents[1].register(Learner())
        agents[1].register("rollout/0", Learner())
        yield agents[0]


def test_its_methods_are_called_by_the_name_of_the_class(caller):
    learner = caller.to(1, Learner)
    assert learner.pull("a", timeout=3) == ["a", 3]
    assert [learner.inherited(), learner.static(), learner.made(), learner.decorated()] == [
        *("inherited", "static", "Learner", "decorated")
    ]
    assert learner.deferred() == 7
    assert caller.to(1, Learner[int]).pull("a") == ["a", 0]


def test_another_name_is_that_of_the_registered_object(caller):
    assert caller.to(1, Pulls, name="rollout/0").pull("a") == ["a", 0]
    assert caller.to_async(1, Pulls, name="rollout/0").pull("a").result(10) == ["a", 0]
    assert list(caller.to_stream(1, Learner, name="rollout/0").episodes(3)) == [0, 1, 2]
    with pytest.raises(FunctionNotFoundError, match=r"'Pulls\.pull'"):
        caller.to(1, Pulls).pull("a")


def test_settings_are_those_of_each_call(caller):
    assert caller.to(1, Learner, timeout=5).limit() == pytest.approx(5, abs=1)
    future = caller.to_async(1, Learner, timeout=5).limit()
    assert future.result(10) == pytest.approx(5, abs=1)


def test_an_async_method_is_awaited_as_its_type_says(caller):
    later = caller.to(1, Learner).later(3)
    assert isinstance(later, RpcFuture)
    assert later.result(10) == 3


def test_futures_are_had_by_name_or_by_the_method_itself(caller):
    learner = caller.to_async(1, Learner)
    futures = [learner.pull("a", timeout=3), learner(Learner.pull, "a", timeout=3)]
    assert all(isinstance(future, RpcFuture) for future in futures)
    assert [future.result(10) for future in futures] == [["a", 3]] * 2
    assert learner(Learner.later, 4).result(10) == 4
    assert learner(Learner.static).result(10) == "static"
    assert learner(Learner.deferred).result(10) == 7


def test_generators_are_read_as_streams(caller):
    learner = caller.to_stream(1, Learner, window=4)
    episodes = learner.episodes(count=3)
    assert isinstance(episodes, Stream)
    assert list(episodes) == [0, 1, 2]
    assert list(learner.frames()) == [b"frame"]


@pytest.mark.parametrize("form", ["to", "to_async", "to_stream"])
@pytest.mark.parametrize("name", ["pul", "rate", "version", "callback", "name"])
def test_what_is_no_method_is_noticed_at_the_caller(caller, form, name):
    learner = getattr(caller, form)(1, Learner)
    with pytest.raises(AttributeError, match=f"Learner has no public method '{name}'; it has dec"):
        getattr(learner, name)


def test_a_method_of_something_else_is_noticed_at_the_caller(caller):
    learner = caller.to_async(1, Pulls, name="rollout/0")
    for method in (Learner.limit, print, "pull", 5):
        with pytest.raises(AttributeError, match="Pulls has no public method"):
            learner(method)


@pytest.mark.parametrize("form", ["to", "to_async", "to_stream"])
def test_no_method_is_hidden_by_an_attribute(caller, form):
    learner = getattr(caller, form)(1, Learner)
    assert not [name for name in dir(learner) if not name.startswith("_")]
    assert not hasattr(learner, "_repr_html_")
    assert not hasattr(learner, "_private")
    assert isinstance(learner, Pulls)
    copy.copy(learner)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pickle.dumps(learner)


@pytest.mark.parametrize("form", ["to", "to_async", "to_stream"])
@pytest.mark.parametrize(
    ("interface", "options", "text"),
    [
        ("Learner", {}, "described by its class or a Protocol, not by 'Learner'"),
        (Learner(), {}, "described by its class or a Protocol, not by <"),
        (5, {}, "not by 5"),
        (None, {"name": "learner"}, "not by None"),
        (int, {}, "int has no public methods to call"),
        (Learner, {"name": ""}, "name is printable text, not ''"),
        (Learner, {"name": 5}, "name is printable text, not 5"),
        (Learner, {"timeout": -1}, "time limit"),
    ],
)
def test_a_wrong_description_is_refused(caller, form, interface, options, text):
    with pytest.raises(ConfigurationError, match=text):
        getattr(caller, form)(1, interface, **options)


def test_repr_tells(caller):
    assert repr(caller.to(1, Learner, timeout=5)) == (
        "<remote object 'Learner' of rank 1, each call within 5 s>"
    )
