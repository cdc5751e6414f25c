"""Iterators as arguments: who may read them, how often, and when they end."""

import gc
import io
import threading
from contextlib import suppress

import pytest

from interrupts import Interrupt, every_interrupt
from rankwire import SimulatedBackend
from rankwire.codec.codec import Codec
from rankwire.errors import InvalidMessageError, RemoteError, UnsupportedTypeError
from rankwire.rpc.argument_streams import ITEMS, ArgumentStream, _IteratorPlace, is_iterator
from rpc.agents import agents_of
from rpc.test_stream import SHOWN_ELSEWHERE, is_idle
from worlds import PATIENCE, eventually


class Numbers:
    """A generator that notes that it has ended."""

    def __init__(self):
        self.open = 0

    def count(self, stop):
        self.open += 1
        try:
            yield from range(stop)
        finally:
            self.open -= 1


@pytest.fixture
def agents():
    world = SimulatedBackend.create_group(3, timeout=PATIENCE)
    with agents_of(world) as agents:
        for agent in agents:
            agent.register("total", lambda numbers: sum(numbers))
            agent.register("first", lambda numbers: next(numbers))
        yield agents
    for backend in world:
        backend.close()


def ended(agents, numbers):
    eventually(lambda: numbers.open == 0)
    eventually(lambda: is_idle(*agents))
    gc.collect()
    assert not agents[0]._caller.offered._offers


def outcome(started):
    """Return what an operation ends with: a future, or the items of a stream."""
    return started.result(PATIENCE) if hasattr(started, "result") else list(started)


def test_iterators_are_sent_and_files_and_lists_are_not():
    assert all(map(is_iterator, (iter([]), (n for n in ()), map(str, []), enumerate([]))))
    assert not any(map(is_iterator, ([], (), {}, "text", io.StringIO(), range(3))))


def test_an_iterator_inside_another_argument_is_refused(agents):
    with pytest.raises(UnsupportedTypeError, match=r"args\[0\]\[0\]"):
        agents[0].rpc_sync(1, "total", [iter([1])])


@pytest.mark.parametrize("number", ["1", None, -1.5, [1]])
def test_only_two_numbers_stand_for_an_iterator(number):
    codec = Codec()
    for forged in (_IteratorPlace(1, number), _IteratorPlace(number, 1)):
        with pytest.raises(InvalidMessageError, match="two integers"):
            codec.decode(bytearray().join(codec.encode(forged)[0]), peer=1)


def test_a_place_that_was_never_offered_is_refused(agents):
    numbers = Numbers()
    agents[1].register("foreign", lambda items: next(ArgumentStream(0, (items._place[0], 5))))
    with pytest.raises(RemoteError, match="has ended"):
        agents[0].rpc_sync(1, "foreign", numbers.count(3))
    ended(agents, numbers)


def test_only_the_called_rank_reads_and_only_once(agents):
    numbers, reading = Numbers(), threading.Event()
    go_on = threading.Event()

    def hold(items):
        reading.set()
        assert go_on.wait(PATIENCE)
        return next(items)

    agents[1].register("hold", hold)
    future = agents[0].rpc_async(1, "hold", numbers.count(10**6))
    assert reading.wait(PATIENCE)
    (number,) = agents[0]._caller.offered._offers
    with pytest.raises(RemoteError, match="has ended"):
        next(agents[2].stream(0, ITEMS, number, 0))
    go_on.set()
    assert future.result(PATIENCE) == 0
    with pytest.raises(RemoteError, match="has ended"):
        next(agents[1].stream(0, ITEMS, number, 0))
    ended(agents, numbers)


def test_an_iterator_that_came_as_an_argument_is_passed_on(agents):
    def relay(items):
        return agents[1].rpc_sync(2, "total", (2 * item for item in items))

    agents[1].register("relay", relay)
    assert agents[0].rpc_sync(1, "relay", iter(range(100))) == 9900


@pytest.mark.parametrize("verb", ["rpc_sync", "rpc_async", "stream"])
def test_a_call_that_fails_ends_its_iterators(agents, verb):
    numbers = Numbers()
    items = numbers.count(10)
    next(items)
    with pytest.raises(LookupError):  # there is no such function
        outcome(getattr(agents[0], verb)(1, "absent", items))
    ended(agents, numbers)


def test_a_callee_that_is_killed_ends_the_iterator(agents):
    numbers, begun = Numbers(), threading.Event()

    def read(items):
        for _ in items:
            begun.set()

    agents[1].register("read", read)
    future = agents[0].rpc_async(1, "read", numbers.count(10**9))
    assert begun.wait(PATIENCE)
    agents[0].backend.network.kill(1)
    assert future.exception(PATIENCE).peer == 1
    ended(agents[:1], numbers)


def test_an_interrupt_anywhere_in_a_call_ends_its_iterator(agents):
    numbers = Numbers()

    def run(interrupting):
        call(interrupting)
        if numbers.open:  # the frames of an error may hold it in a cycle
            gc.collect()
        eventually(lambda: numbers.open == 0)

    def call(interrupting):
        items = numbers.count(3)
        next(items)
        with suppress(Interrupt), interrupting:
            assert agents[0].rpc_sync(1, "total", items) == 3

    assert agents[0].rpc_sync(1, "total", numbers.count(3)) == 3
    assert every_interrupt(run, step=3, apart_from=SHOWN_ELSEWHERE) >= 5
    ended(agents, numbers)


def test_what_came_shows_where_from():
    assert "rank 3, 0 items" in repr(ArgumentStream(3, (7, 0)))
    ArgumentStream(3, (7, 0)).close()
