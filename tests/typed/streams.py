"""Streams know the types of their items, and functions keep their keywords and defaults."""

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, assert_type

from rankwire import RpcAgent
from rankwire.rpc.stream import Stream


def count(first: int, last: int = 9, *, step: int = 1) -> Iterator[int]:
    yield from range(first, last, step)


def words(text: str) -> Generator[str, None, None]:
    yield from text.split()


async def frames(window: str) -> AsyncIterator[bytes]:
    yield window.encode()


class Loader:
    def batches(self, size: int) -> Iterator[list[float]]:
        yield [0.0] * size


def no_generator(a: int) -> int:
    return a


async def read(agent: RpcAgent, loader: Loader) -> None:
    assert_type(agent.stream(1, count, 3), Stream[int])
    assert_type(agent.stream(1, count, 3, step=2), Stream[int])
    assert_type(agent.stream(1, words, "a b"), Stream[str])
    assert_type(agent.stream(1, loader.batches, 3), Stream[list[float]])
    assert_type(agent.stream(1, "count", 3, anything=5), Stream[Any])
    assert_type(agent.stream(1, count, 3, window=8), Stream[int])
    assert_type(agent.stream(1, count, 3, timeout=5), Stream[int])
    assert_type(agent.stream(1, count, 3, timeout=5, window=8), Stream[int])
    assert_type(list(agent.stream(1, words, "a b")), list[str])
    assert_type([item async for item in agent.stream(1, words, "a b")], list[str])
    assert_type(agent.to_stream(1, window=8)(count, 3, last=5), Stream[int])
    assert_type(agent.to_stream(1)(frames, window="a"), Stream[bytes])
    assert_type(agent.to_stream(1).count(3), Stream[Any])
    with agent.to_stream(1)(loader.batches, size=3) as batches:
        assert_type(next(batches), list[float])
    agent.stream(1, count, "a")  # error: No overload variant of "stream"
    agent.stream(1, count, 3, steps=2)  # error: Unexpected keyword argument "steps"
    agent.stream(1, no_generator, 3)  # error: No overload variant of "stream"
    agent.to_stream(1)(count)  # error: No overload variant of "__call__"
    agent.to_stream(1)(no_generator, 3)  # error: No overload variant of "__call__"
