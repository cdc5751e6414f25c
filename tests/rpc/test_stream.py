"""Streams: items in order and once, whatever ends them, and nothing left over at either end."""

import asyncio
import resource
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from faults.sizes import examples, trials
from interrupts import Interrupt, every_interrupt
from rankwire import FaultPlan, PeerLostError, RpcAgent, SimulatedBackend, current_call
from rankwire.errors import (
    CallCancelledError,
    CircularCallError,
    DeadlineExceededError,
    OverloadedError,
    RankwireError,
    RemoteError,
)
from rankwire.rpc.served_stream import Phase, ServedStreams
from rankwire.testing import simulated_world, tcp_world
from rpc.agents import agents_of
from worlds import PATIENCE, Running, eventually, process_world, runtime_folder_of_its_own

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# The tests of the wire and the links interrupt these. A thread that polls comes by often.
SHOWN_ELSEWHERE = ("ring.py", "spin.py", "parser.py", "frame_reader.py", "reading_role.py")


class Producer:
    """Generators that note how far they came and that they have ended."""

    def __init__(self):
        self.yielded = 0
        self.open = 0

    def count(self, stop, nbytes=0):
        self.open += 1
        try:
            for number in range(stop):
                self.yielded = number + 1
                yield (number, bytes(nbytes)) if nbytes else number
        finally:
            self.open -= 1

    async def count_async(self, stop):
        self.open += 1
        try:
            for number in range(stop):
                self.yielded = number + 1
                yield number
        finally:
            self.open -= 1


def is_idle(*agents):
    return not any(a.activity().in_service or a.activity().in_flight for a in agents)


@pytest.fixture(params=["unix", "tcp", "simulated"])
def pair(request):
    """Two agents, the second with a producer."""
    make = simulated_world if request.param == "simulated" else tcp_world
    options = {} if request.param == "simulated" else {"transport": request.param}
    with make(2, **options) as world, agents_of(world) as agents:
        agents[1].producer = Producer()
        agents[1].register("p", agents[1].producer)
        yield agents


def ended(agents):
    """Wait until nothing is left of any stream."""
    eventually(lambda: agents[1].producer.open == 0)
    eventually(lambda: is_idle(*agents))
    eventually(lambda: not any(agent._caller.open_streams for agent in agents))
    for agent in agents:
        assert not agent._server.streams._open
        for inbox in (*agent._port._calls.inboxes(), agent._port._calls.own):
            assert not inbox._arrived.kept
            assert not inbox.wanted()


# -- interrupts ------------------------------------------------------------------------------------


def test_an_interrupt_anywhere_in_a_read_loses_and_repeats_nothing(pair):
    """But the item that was just being returned."""

    def run(interrupting):
        came = []
        with reader.stream(1, "p.count", 40, window=4) as stream:
            with suppress(Interrupt), interrupting:
                came.extend(stream)
            interrupted_at = stream.count
            came.extend(stream)
            assert stream.count == 40
        missing = sorted(set(range(40)) - set(came))
        assert came == sorted(set(came)), "in order and once"
        assert missing in ([], [interrupted_at - 1])

    reader, _ = pair
    list(reader.stream(1, "p.count", 1))
    assert every_interrupt(run, step=3, apart_from=SHOWN_ELSEWHERE) >= 5
    ended(pair)


def test_an_interrupt_anywhere_in_opening_and_closing_leaves_nothing(pair):
    def run(interrupting):
        read_one(interrupting)
        eventually(lambda: agents_are_idle(pair))

    def read_one(interrupting):
        with suppress(Interrupt), interrupting:
            with reader.stream(1, "p.count", 10**9, window=2) as stream:
                next(stream)

    def agents_are_idle(agents):
        return agents[1].producer.open == 0 and is_idle(*agents)

    reader, _ = pair
    list(reader.stream(1, "p.count", 1))
    assert every_interrupt(run, step=3, apart_from=SHOWN_ELSEWHERE) >= 5
    ended(pair)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.count", "p.count_async"])
@pytest.mark.parametrize("how", ["close", "break", "drop", "with"])
def test_a_suspended_generator_ends_soon_after_its_reader_leaves(pair, name, how):
    reader, _ = pair
    producer = pair[1].producer
    took = []
    for _ in range(trials(3, 20)):
        stream = reader.stream(1, name, 10**9, window=4)
        assert next(stream) == 0
        eventually(lambda: producer.yielded >= 4)
        began = time.monotonic()
        if how == "break":
            for _ in stream:
                break
            del stream
        elif how == "drop":
            del stream
        elif how == "with":
            with stream:
                pass
        else:
            stream.close()
        eventually(lambda: producer.open == 0)
        took.append(time.monotonic() - began)
    assert min(took) < 0.5  # 10 ms on an idle machine
    ended(pair)


def test_a_cancelled_task_ends_its_stream(pair):
    reader, _ = pair

    async def read():
        async with reader.stream(1, "p.count", 10**9) as stream:
            async for _ in stream:
                await asyncio.sleep(0)

    async def cancelled():
        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    ended(pair)


def test_an_async_reader_has_the_limit_of_an_item_too(pair):
    reader, callee = pair
    go_on = threading.Event()

    def stall():
        yield 1
        go_on.wait(PATIENCE)

    callee.register("stall", stall)

    async def read():
        return [item async for item in reader.stream(1, "stall", timeout=0.2)]

    with pytest.raises(DeadlineExceededError, match="after 1 items"):
        asyncio.run(read())
    go_on.set()
    ended(pair)


def test_a_million_items_that_nobody_reads_end_with_their_limit(pair):
    reader, _ = pair
    producer = pair[1].producer
    for limits, reason in (
        ({"total_timeout": 0.3}, "limit in all|no result within 0.3 s"),
        ({"unread_timeout": 0.3}, "the reader took no item"),
    ):
        stream = reader.to_stream(1, **limits)("p.count", 10**6)
        eventually(lambda: producer.open == 1)
        eventually(lambda: producer.open == 0)
        assert producer.yielded <= 65
        came = []
        with pytest.raises(DeadlineExceededError, match=reason) as info:
            came.extend(stream)
        assert f"after {stream.count} items" in str(info.value)
        assert stream.count <= 65
    ended(pair)


def test_a_reader_that_takes_items_slowly_is_not_taken_for_one_that_reads_nothing(pair):
    reader, _ = pair
    came = []
    for number in reader.to_stream(1, unread_timeout=0.5)("p.count", 12):
        came.append(number)
        time.sleep(0.1)  # all of them came in one message
    assert came == list(range(12))
    ended(pair)


def test_an_item_held_for_the_next_one_leaves_although_all_threads_sleep(pair):
    reader, callee = pair
    go_on = threading.Event()

    def pairs():
        for _ in range(2):
            time.sleep(0.5)  # the standby falls asleep
            yield "first"
            yield "second"  # at once: it waits for another one
        go_on.wait(PATIENCE)

    callee.register("pairs", pairs)
    stream = reader.stream(1, "pairs", timeout=2.0)
    try:
        assert [next(stream) for _ in range(4)] == ["first", "second"] * 2
    finally:
        go_on.set()
        stream.close()
    ended(pair)


def test_a_stream_that_is_refused_when_it_continues_ends_its_generator(pair, monkeypatch):
    reader, callee = pair
    stream = reader.stream(1, "p.count", 100, window=2)
    assert next(stream) == 0
    (served,) = callee._server.streams._open
    eventually(lambda: served.is_suspended)
    served._phase = Phase.DUE  # a grant came, and the queue is full
    served.refuse("4096 calls are waiting")
    with pytest.raises(OverloadedError, match="4096 calls"):
        list(stream)
    ended(pair)


def test_an_iterator_that_is_empty_or_has_no_truth_is_closed(pair):
    class Items:
        closed = 0

        def __iter__(self):
            return self

        def __next__(self):
            return 1

        def __len__(self):
            raise TypeError("no length")

        def close(self):
            Items.closed += 1

    reader, callee = pair
    callee.register("items", Items)
    with reader.stream(1, "items", window=2) as stream:
        assert next(stream) == 1
    eventually(lambda: Items.closed == 1)
    ended(pair)


def test_a_generator_that_ends_slowly_does_not_hold_up_the_end_of_its_agent(pair):
    reader, callee = pair
    go_on = threading.Event()

    def slow():
        try:
            while True:
                yield 1
        finally:
            go_on.wait(PATIENCE)

    callee.register("slow", slow)
    stream = reader.stream(1, "slow", window=1)
    assert next(stream) == 1
    began = time.monotonic()
    callee.close(grace=0.0)
    assert time.monotonic() - began < 5.0
    go_on.set()
    stream.close()


def test_a_rank_has_at_most_so_many_streams_open(pair, monkeypatch):
    monkeypatch.setattr(ServedStreams, "MOST", 3)
    reader, callee = pair
    streams = [reader.stream(1, "p.count", 10**6) for _ in range(3)]
    assert [next(stream) for stream in streams] == [0, 0, 0]
    with pytest.raises(OverloadedError, match="3 streams open"):
        next(reader.stream(1, "p.count", 1))
    assert next(callee.stream(1, "p.count", 1)) == 0, "another rank may have as many"
    streams.pop().close()
    eventually(lambda: pair[1].producer.open == 2)
    assert list(reader.stream(1, "p.count", 2)) == [0, 1]
    for stream in streams:
        stream.close()
    ended(pair)


def test_a_nested_stream_ends_with_the_call_that_reads_it(pair):
    reader, callee = pair
    reading = threading.Event()

    def consume():
        for _ in callee.stream(1, "p.count", 10**9):
            reading.set()
            if current_call().cancelled:
                return

    callee.register("consume", consume)
    future = reader.rpc_async(1, "consume")
    assert reading.wait(PATIENCE)
    future.cancel()
    ended(pair)


def test_a_circle_through_a_stream_is_reported(pair):
    """A coroutine blocks the event loop until an async generator, which needs the loop, yields."""
    reader, callee = pair

    async def block():
        return next(callee.stream(1, "p.count_async", 1))

    callee.register("block", block)
    with pytest.raises((CircularCallError, RemoteError, DeadlineExceededError)) as info:
        reader.rpc_sync(1, "block", timeout=3.0)
    assert "event loop" in str(info.value)
    assert "p.count_async" in str(info.value)


def test_what_the_reader_waits_for_is_in_its_late_error(pair):
    reader, callee = pair
    go_on = threading.Event()

    def stall():
        go_on.wait(PATIENCE)
        yield 1

    callee.register("stall", stall)
    with pytest.raises(DeadlineExceededError, match="stall") as info:
        next(reader.stream(1, "stall", timeout=0.3))
    assert "go_on.wait" in str(info.value) or "running" in str(info.value)
    go_on.set()
    ended(pair)


# -- limits in memory ------------------------------------------------------------------------------


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("kind", ["unix", "simulated"])
def test_a_slow_reader_of_large_items_needs_no_more_memory(kind):
    count, nbytes = trials(4_000, 100_000, quick=1_000), 64 << 10
    make = simulated_world if kind == "simulated" else partial(tcp_world, transport=kind)
    with make(2) as world, agents_of(world) as (reader, agent):

        def chunks(count):
            for number in range(count):
                yield np.full(nbytes, number % 251, np.uint8)

        agent.register("chunks", chunks)
        list(reader.stream(1, "chunks", 100))
        before = peak_mib()
        for number, chunk in enumerate(reader.to_stream(1, window=32)("chunks", count)):
            assert chunk[-1] == number % 251
            if number % 500 == 0:
                time.sleep(0.01)
        assert number == count - 1
        assert peak_mib() - before < 3 * 32 * nbytes / (1 << 20) + 8


def test_bytes_are_credit_too(pair):
    reader, _ = pair
    producer = pair[1].producer
    stream = reader.to_stream(1, window_nbytes=100_000)("p.count", 10**6, nbytes=10_000)
    next(stream)
    eventually(lambda: producer.yielded >= 10)
    time.sleep(0.05)
    assert producer.yielded <= 13
    stream.close()
    ended(pair)


def test_a_producer_that_ignores_its_credit_is_refused(pair):
    reader, callee = pair
    stream = reader.stream(1, "p.count", 1000, window=4)
    eventually(lambda: pair[1].producer.yielded >= 4)
    served = next(iter(callee._server.streams._open))
    served.grant(served._granted._replace(items=10**6, nbytes=10**9))
    callee._server.pool.add(served)
    came = []
    with pytest.raises(RankwireError, match="has sent 1000 items") as info:
        came.extend(stream)
    assert info.value.peer == 1
    ended(pair)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.fault(43, "a stream whose producer is killed delivers what came, and says how much")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_at_every_message_of_a_stream(victim):
    finished = False
    after = 0
    while not finished:
        plan = FaultPlan().kill(victim, after=after)
        world = SimulatedBackend.create_group(3, faults=plan, timeout=PATIENCE)
        producer, came, errors = Producer(), [], []
        with suppress(PeerLostError), agents_of(world, grace=0.0) as agents:
            agents[1].register("p", producer)
            stream = None
            try:
                stream = agents[0].stream(1, "p.count", 30, nbytes=100, window=3)
                came.extend(stream)
                finished = True
            except RankwireError as error:
                errors.append(error)
            for error in errors:
                assert error.peer == victim
                if victim == 1:
                    assert type(error) is PeerLostError
                    assert stream is None or f"after {len(came)} items" in str(error)
            assert [number for number, _ in came] == list(range(len(came)))
            assert len(came) == 30 or not finished
            eventually(lambda: producer.open == 0)  # noqa: B023
            eventually(lambda: not agents[1].activity().in_service)
        for backend in world:
            backend.close()
        after += 1
    assert after >= 10


@pytest.mark.fault(43, "the generator of a reader that is killed ends")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_is_killed_in_a_stream(transport, victim):
    run = "__import__('rpc.streamed').streamed.{}(backend)"
    with runtime_folder_of_its_own(), process_world(2, transport=transport) as ranks:
        producing = ranks[1].start("eval", run.format("produce"))
        reading = ranks[0].start("eval", run.format("read"))
        eventually(lambda: ranks[1 - victim].call("eval", run.format("has_begun")))
        killed = ranks[victim].kill()
        if victim == 1:
            kind, text, peer, count, late = reading.result()
            assert (kind, peer) == ("PeerLostError", 1)
            assert f"after {count} items" in text
        else:
            late = producing.result()
        assert late - killed < 5.0


# -- a model ---------------------------------------------------------------------------------------


class Streams(RuleBasedStateMachine):
    """Several streams between two ranks, read, closed, dropped and left, against lists."""

    streams = Bundle("streams")

    @initialize()
    def form(self):
        self.world = SimulatedBackend.create_group(2, timeout=PATIENCE)
        self.agents = [RpcAgent(backend) for backend in self.world]
        self.producer = Producer()
        self.agents[1].register("p", self.producer)
        self.agents[1].register("fail", self.fail)

    def fail(self, count):
        yield from range(count)
        raise KeyError(count)

    @rule(
        target=streams,
        window=st.integers(1, 9),
        stop=st.integers(0, 40),
        name=st.sampled_from(["p.count", "p.count_async", "fail"]),
        src=st.sampled_from([0, 1]),
    )
    def open(self, window, stop, name, src):
        stream = self.agents[src].stream(1, name, stop, window=window)
        return [stream, iter(range(stop)), name == "fail"]

    @rule(one=streams, count=st.integers(1, 20))
    def read(self, one, count):
        stream, model, fails = one
        for _ in range(count):
            expected = next(model, None)
            if expected is not None:
                assert next(stream) == expected
                continue
            if fails and not stream.closed:
                with pytest.raises(KeyError):
                    next(stream)
            assert next(stream, "end") == "end"
            assert stream.closed

    @rule(one=streams)
    def close(self, one):
        stream, _, _ = one
        stream.close()
        one[1], one[2] = iter(()), False

    @rule(one=consumes(streams))
    def drop(self, one):
        one.clear()

    def teardown(self):
        for agent in getattr(self, "agents", ()):
            agent.close(grace=0.0)
        eventually(lambda: self.producer.open == 0)
        for backend in getattr(self, "world", ()):
            backend.close()


Streams.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=20, deadline=None
)
test_streams_are_as_the_model_says = Streams.TestCase


# -- many at once ----------------------------------------------------------------------------------


def test_many_threads_read_streams_of_one_rank_at_once(pair):
    def read(number):
        stop = 200 + number
        for window in (1, 7, 64):
            assert list(reader.stream(1, "p.count", stop, window=window)) == list(range(stop))

    reader, _ = pair
    reading = [Running(read, number) for number in range(16)]
    for each in reading:
        each.result(PATIENCE)
    ended(pair)


def test_calls_go_on_beside_suspended_streams(pair):
    reader, callee = pair
    callee.register("add", lambda a, b: a + b)
    streams = [reader.stream(1, "p.count", 10**6) for _ in range(100)]
    eventually(lambda: pair[1].producer.open == 100)
    assert reader.rpc_sync(1, "add", 1, 2) == 3, "suspended generators occupy no worker"
    for stream in streams:
        stream.close()
    ended(pair)


def test_an_agent_that_closes_ends_its_streams(pair):
    reader, callee = pair
    stream = reader.stream(1, "p.count", 10**6)
    assert next(stream) == 0
    callee.close(grace=0.0)
    with pytest.raises((RankwireError, CallCancelledError)) as info:
        list(stream)
    assert "items" in str(info.value)
    eventually(lambda: callee.producer.open == 0)
