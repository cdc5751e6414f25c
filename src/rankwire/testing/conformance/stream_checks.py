"""Conformance checks of streams: they behave the same on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial

import numpy as np

from rankwire import runtime
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    FunctionNotFoundError,
    PeerLostError,
    RankwireError,
    RemoteError,
)
from rankwire.testing.conformance.tools import agents_of, expect, leave, until
from rankwire.testing.ranks import MakeWorld


class Producer:
    """A generator that notes what happens to it."""

    def __init__(self) -> None:
        self.yielded = 0
        self.ended = runtime.Event()
        self.exited = False

    def count(self, stop: int) -> Iterator[int]:
        """Yield the numbers below ``stop``."""
        try:
            for number in range(stop):
                self.yielded = number + 1
                yield number
        except GeneratorExit:
            self.exited = True
            raise
        finally:
            self.ended.set()

    async def count_async(self, stop: int) -> AsyncIterator[int]:
        """Yield the numbers below ``stop``, on the event loop."""
        try:
            for number in range(stop):
                self.yielded = number + 1
                yield number
        finally:
            self.ended.set()


def a_stream_has_all_items_in_order(make_world: MakeWorld) -> None:
    producer = Producer()
    with agents_of(make_world, 2) as agents:
        for agent in agents:
            agent.register("p", producer)
        for dst in (0, 1):
            for window in (1, 3, 64):
                for name in ("p.count", "p.count_async"):
                    stream = agents[0].stream(dst, name, 200, window=window)
                    assert list(stream) == list(range(200))
                    assert (stream.count, stream.closed) == (200, True)
        assert list(agents[0].stream(1, "p.count", 0)) == []


def items_are_of_all_types_and_sizes(make_world: MakeWorld) -> None:
    items = [None, 2**70, "text", b"x" * 10_000, {"a": [1, 2]}, ("t",)]
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 1000, 300_000, 1_500_000)]

    def mixed() -> Iterator[object]:
        yield from items
        for array in arrays:
            yield array
            array[:] = -1  # it was sent
        yield from range(100)

    expected = [array.copy() for array in arrays]
    with agents_of(make_world, 2) as (reader, producer):
        producer.register("mixed", mixed)
        came = list(reader.stream(1, "mixed"))
    assert came[: len(items)] == items
    for found, wanted in zip(came[len(items) :], expected, strict=False):
        assert np.array_equal(found, wanted)
    assert came[len(items) + len(arrays) :] == list(range(100))


def a_slow_reader_stops_the_producer(make_world: MakeWorld) -> None:
    producer = Producer()
    with agents_of(make_world, 2) as (reader, agent):
        agent.register("p", producer)
        with reader.stream(1, "p.count", 10**9, window=8) as stream:
            assert next(stream) == 0
            until(lambda: producer.yielded >= 8)
            for taken in range(1, 100):
                assert next(stream) == taken
                assert producer.yielded <= taken + 8 + 1
        assert producer.ended.wait(10.0)
        assert producer.exited


def a_dropped_stream_ends_its_producer(make_world: MakeWorld) -> None:
    for name in ("p.count", "p.count_async"):
        producer = Producer()
        with agents_of(make_world, 2) as (reader, agent):
            agent.register("p", producer)
            for number in reader.stream(1, name, 10**9):
                if number == 10:
                    break
            assert producer.ended.wait(10.0)
            until(lambda: not agent.activity().in_service)


def an_error_comes_after_the_items(make_world: MakeWorld) -> None:
    def fail(count: int) -> Iterator[int]:
        yield from range(count)
        raise KeyError("why")

    came: list[int] = []
    with agents_of(make_world, 2) as (reader, agent):
        agent.register("fail", fail)
        agent.register("plain", lambda: 7)
        stream = reader.stream(1, "fail", 5)
        assert [next(stream) for _ in range(5)] == list(range(5))
        error = expect(RemoteError, partial(next, stream))
        assert isinstance(error, KeyError)
        assert "after 5 items" in str(error)
        assert error.peer == 1
        assert list(stream) == []
        agent.register("unsendable", lambda: iter([1, 2, object()]))
        error = expect(RemoteError, lambda: came.extend(reader.stream(1, "unsendable")))
        assert came == [1, 2]
        assert "item: type object" in str(error)
        error = expect(RemoteError, lambda: list(reader.stream(1, "plain")))
        assert "'plain' is no stream" in str(error)
        expect(FunctionNotFoundError, lambda: list(reader.stream(1, "unknown")))
        expect(ConfigurationError, lambda: reader.stream(1, "fail", 5, window=0))


def a_stream_has_two_limits(make_world: MakeWorld) -> None:
    release = runtime.Event()
    producer = Producer()

    def stall() -> Iterator[int]:
        yield 1
        release.wait(10.0)
        yield 2

    with agents_of(make_world, 2) as (reader, agent):
        agent.register("stall", stall)
        agent.register("p", producer)
        stream = reader.stream(1, "stall", timeout=0.2)
        assert next(stream) == 1
        error = expect(DeadlineExceededError, partial(next, stream))
        release.set()
        assert "after 1 items" in str(error)
        assert error.may_have_run
        assert error.waiting_for == [1]
        # One that is never read ends by itself.
        unread = reader.to_stream(1, total_timeout=0.2)("p.count", 10**6)
        assert producer.ended.wait(10.0)
        until(lambda: not agent.activity().in_service)
        error = expect(DeadlineExceededError, lambda: list(unread))
        assert "after 64 items" in str(error)


def a_lost_producer_is_named_after_what_came(make_world: MakeWorld) -> None:
    producer = Producer()
    with agents_of(make_world, 2) as (reader, agent):
        agent.register("p", producer)
        stream = reader.stream(1, "p.count", 10**9, window=4)
        assert next(stream) == 0
        until(lambda: producer.yielded >= 4)
        leave(agent.backend, error=ValueError("this rank fails"))
        came: list[int] = []
        error = expect(RankwireError, lambda: came.extend(stream))
        assert isinstance(error, (PeerLostError, ChannelClosedError))
        assert f"after {stream.count} items" in str(error)
        assert came == list(range(1, stream.count))
        assert stream.count <= 5
        assert producer.ended.wait(10.0)


def a_lost_reader_ends_the_producer(make_world: MakeWorld) -> None:
    producer = Producer()
    with agents_of(make_world, 2) as (reader, agent):
        agent.register("p", producer)
        stream = reader.stream(1, "p.count", 10**9, window=4)
        until(lambda: producer.yielded >= 4)
        leave(reader.backend, error=ValueError("this rank fails"))
        assert producer.ended.wait(10.0)
        assert producer.exited
        until(lambda: not agent.activity().in_service)
        expect(RankwireError, lambda: list(stream))


def a_stream_can_be_read_in_an_event_loop(make_world: MakeWorld) -> None:
    producer = Producer()

    async def read(reader: object, name: str, stop: int) -> int:
        total = 0
        async for number in reader.stream(1, name, 500, window=16):  # type: ignore[attr-defined]
            total += number
            if number == stop:
                break
        return total

    async def read_several(reader: object) -> list[int]:
        names = ("p.count", "p.count_async", "p.count")
        return await asyncio.gather(*(read(reader, name, 499) for name in names))

    with agents_of(make_world, 2) as (reader, agent):
        agent.register("p", producer)
        assert asyncio.run(read_several(reader)) == [sum(range(500))] * 3


def a_served_function_may_read_a_stream(make_world: MakeWorld) -> None:
    with agents_of(make_world, 3) as agents:

        def relay(dst: int, stop: int) -> Iterator[int]:
            for number in agents[1].stream(dst, "count", stop):
                yield number + 1

        agents[1].register("relay", relay)
        agents[2].register("count", Producer().count)
        assert list(agents[0].stream(1, "relay", 2, 300)) == list(range(1, 301))


def an_iterator_is_an_argument(make_world: MakeWorld) -> None:
    def total(numbers: Iterator[int], start: int = 0) -> int:
        return sum(numbers, start)

    def first(count: int, numbers: Iterator[int]) -> list[int]:
        return [next(numbers) for _ in range(count)]

    async def total_async(numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    def doubled(numbers: Iterator[int]) -> Iterator[int]:
        yield from (2 * number for number in numbers)

    def ignored(numbers: Iterator[int]) -> None:
        return None

    with agents_of(make_world, 2) as (caller, callee):
        for function in (total, first, total_async, doubled, ignored):
            callee.register(function.__name__, function)
        producer = Producer()
        for dst, who in ((1, caller), (1, callee)):
            assert who.rpc_sync(dst, "total", iter(range(500)), start=1) == sum(range(500)) + 1
            assert who.rpc_sync(dst, "total", producer.count(300)) == sum(range(300))
            assert who.rpc_async(dst, "total_async", producer.count_async(9)).result(10.0) == 36
            doubles = list(who.stream(dst, "doubled", iter(range(200))))
            assert doubles == [2 * number for number in range(200)]
        # The caller's generator ends with the call, whether its items were read or not.
        for name, args in (("first", (5,)), ("ignored", ())):
            producer = Producer()
            numbers = producer.count(10**9)
            next(numbers)
            caller.rpc_sync(1, name, *args, numbers)
            assert producer.ended.wait(10.0)
            assert producer.exited
        until(lambda: not (caller.activity().in_service or callee.activity().in_service))


def an_error_of_an_argument_reaches_the_callee(make_world: MakeWorld) -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise KeyError("why")

    def keep(numbers: Iterator[int]) -> None:
        kept.append(numbers)

    kept: list[Iterator[int]] = []
    with agents_of(make_world, 2) as (caller, callee):
        callee.register("total", lambda numbers: sum(numbers))
        callee.register("keep", keep)
        callee.register("later", lambda: next(kept.pop()))
        error = expect(RemoteError, lambda: caller.rpc_sync(1, "total", fail()))
        assert isinstance(error, KeyError)
        caller.rpc_sync(1, "keep", fail())
        expect(ConfigurationError, lambda: next(kept[0]))
        error = expect(RemoteError, lambda: caller.rpc_sync(1, "later"))
        assert "has ended" in str(error)
        # Only the rank that was called may read.
        refusal = expect(RankwireError, lambda: caller.rpc_sync(1, "total", [object()]))
        assert "object" in str(refusal)
