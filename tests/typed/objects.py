"""Objects of other ranks are of their class, or of a Protocol, to a type checker."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, assert_type

from rankwire import RpcAgent, RpcFuture

T_co = TypeVar("T_co", covariant=True)


class Learner:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def pull(self, name: str, *, newer_than: int = 0) -> float:
        return self.rate

    async def later(self, name: str) -> bytes:
        return name.encode()

    def deferred(self) -> Future[list[int]]:
        return Future()

    def episodes(self, count: int = 1) -> Iterator[str]:
        yield from map(str, range(count))

    async def frames(self) -> AsyncIterator[bytes]:
        yield b""


class Pulls(Protocol):
    def pull(self, name: str) -> float: ...


class Abstract(ABC):
    @abstractmethod
    def pull(self, name: str) -> float: ...


class Source(Protocol[T_co]):
    def next(self) -> T_co: ...


def use(learner: Learner) -> float:
    return learner.pull("a")


async def call(agent: RpcAgent) -> None:
    learner = agent.to(0, Learner, timeout=5)
    assert_type(learner, Learner)
    assert_type(learner.pull("a", newer_than=3), float)
    assert_type(await learner.later("a"), bytes)
    assert_type(use(learner), float)
    assert_type(agent.to(0, Pulls, name="learner"), Pulls)
    assert_type(agent.to(0, Abstract, name="learner").pull("a"), float)
    assert_type(agent.to(0, Source[int], name="numbers").next(), int)
    learner.pull(5)  # error: Argument 1 to "pull" of "Learner"
    learner.pull("a", older_than=3)  # error: Unexpected keyword argument "older_than"
    learner.pul("a")  # error: "Learner" has no attribute "pul"
    agent.to(0, "Learner")  # error: No overload variant of "to"
    agent.to(0, name="learner")  # error: No overload variant of "to"
    agent.to(0, Learner, window=3)  # error: Unexpected keyword argument "window"


def start(agent: RpcAgent) -> None:
    learner = agent.to_async(0, Learner)
    assert_type(learner(Learner.pull, "a", newer_than=3), RpcFuture[float])
    assert_type(learner(Learner.later, "a"), RpcFuture[bytes])
    assert_type(learner(Learner.deferred), RpcFuture[list[int]])
    assert_type(agent.to_async(0, Pulls, name="learner")(Pulls.pull, "a"), RpcFuture[float])
    assert_type(learner.pull("a"), RpcFuture[Any])
    learner(Learner.pull, 5)  # error: No overload variant of "__call__"
    learner(use, "a")  # error: No overload variant of "__call__"
    learner("pull", "a")  # error: No overload variant of "__call__"


def read(agent: RpcAgent) -> None:
    learner = agent.to_stream(0, Learner, window=8, total_timeout=60)
    assert_type(learner.episodes(count=5), Iterator[str])
    assert_type(learner.frames(), AsyncIterator[bytes])
    assert_type([len(episode) for episode in learner.episodes()], list[int])
    learner.episodes("5")  # error: Argument 1 to "episodes"
