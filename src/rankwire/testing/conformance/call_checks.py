"""Conformance checks of calls: an ``RpcAgent`` behaves the same on every backend."""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait
from functools import partial

import numpy as np

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    FunctionNotFoundError,
    InvalidRankError,
    MessageTooLargeError,
    OverloadedError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.conformance.tools import agents_of, expect, work_until_cancelled
from rankwire.testing.ranks import MakeWorld, in_parallel


def every_rank_calls_every_rank(make_world: MakeWorld) -> None:
    def describe(rank: int, text: str, n: int = 0) -> list[object]:
        return [rank, text, n]

    with agents_of(make_world, 3) as agents:
        for agent in agents:
            agent.register("describe", partial(describe, agent.rank))

        def call_all(rank: int) -> None:
            for dst in range(3):
                result = agents[rank].rpc_sync(dst, "describe", f"from {rank}", n=dst)
                assert result == [dst, f"from {rank}", dst]

        in_parallel([partial(call_all, rank) for rank in range(3)])


def values_and_arrays_travel(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (caller, callee):
        callee.register("echo", lambda *values, **named: (values, named))
        big = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
        values, named = caller.rpc_sync(1, "echo", None, (1, 2), {"a": [1.5]}, big, x={3})
        assert values[:3] == (None, (1, 2), {"a": [1.5]})
        assert named == {"x": {3}}
        assert np.array_equal(values[3], big)
        values[3][0, 0] = 7  # the receiver owns it
        assert big[0, 0] == 0


def errors_keep_type_text_and_traceback(make_world: MakeWorld) -> None:
    kinds = {kind.__name__: kind for kind in (ValueError, SystemExit, KeyboardInterrupt)}

    def fail(name: str) -> None:
        raise kinds[name]("why")

    with agents_of(make_world, 2) as (caller, callee):
        callee.register("fail", fail)
        for name in kinds:
            error = expect(RemoteError, partial(caller.rpc_sync, 1, "fail", name))
            assert (error.remote_type, error.remote_message) == (name, "why")
            assert "in fail" in error.remote_traceback
            assert error.peer == 1


def what_cannot_be_called_is_told_apart(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (caller, callee):
        callee.register("known", lambda: object())
        missing = expect(FunctionNotFoundError, lambda: caller.rpc_sync(1, "unknown"))
        assert (missing.name, missing.known) == ("unknown", ["known"])
        expect(InvalidRankError, lambda: caller.rpc_sync(7, "known"))
        wrong = expect(UnsupportedTypeError, lambda: caller.rpc_sync(1, "known", [object()]))
        assert wrong.path == "args[0][0]"
        expect(RemoteError, lambda: caller.rpc_sync(1, "known"))  # an unsendable result


def registering_is_strict(make_world: MakeWorld) -> None:
    with agents_of(make_world, 1) as (agent,):

        @agent.register
        def first() -> int:
            return 1

        assert agent.rpc_sync(0, first) == 1
        expect(ConfigurationError, lambda: agent.register("first", lambda: 2))
        expect(ConfigurationError, lambda: agent.register("", first))
        agent.register("first", lambda: 2, replace=True)
        assert agent.rpc_sync(0, "first") == 2
        assert agent.functions() == ["first"]
        agent.unregister("first")
        assert agent.lookup("first") is None
        expect(FunctionNotFoundError, lambda: agent.unregister("first"))


def a_late_reply_is_dropped(make_world: MakeWorld) -> None:
    go_on = runtime.Event()
    with agents_of(make_world, 2) as (caller, callee):
        callee.register("wait", lambda: REAL_TIME.wait(go_on, 10))
        callee.register("add", lambda a, b: a + b)
        assert caller.rpc_sync(1, "add", 1, 1) == 2  # connected now, so the next call is sent
        begin = REAL_TIME.now()
        error = expect(DeadlineExceededError, lambda: caller.rpc_sync(1, "wait", timeout=0.15))
        assert REAL_TIME.now() - begin < 5
        assert (error.limit, error.waiting_for, error.may_have_run) == (0.15, [1], True)
        go_on.set()
        assert caller.rpc_sync(1, "add", 2, 3) == 5
        assert "0 calls in flight" in repr(caller)


def ranks_call_each_other_at_once(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as agents:
        for agent in agents:
            agent.register("square", lambda x: x * x)

        def call(rank: int) -> None:
            for number in range(200):
                assert agents[rank].rpc_sync(1 - rank, "square", number) == number * number

        in_parallel([partial(call, rank) for rank in (0, 1, 0, 1)])


def replies_find_their_callers(make_world: MakeWorld) -> None:
    def answer(number: int) -> int:
        REAL_TIME.sleep((number * 7 % 5) / 1000)
        return number

    with agents_of(make_world, 2) as (caller, callee):
        callee.register("answer", answer)
        numbers = range(24)
        got = in_parallel([partial(caller.rpc_sync, 1, "answer", n) for n in numbers])
        assert got == list(numbers)


def a_slow_call_does_not_hold_up_a_fast_one(make_world: MakeWorld) -> None:
    go_on = runtime.Event()
    with agents_of(make_world, 2) as (caller, callee):
        callee.register("slow", lambda: REAL_TIME.wait(go_on, 20))
        callee.register("fast", lambda: "here")
        slow = caller.rpc_async(1, "slow")
        assert caller.rpc_sync(1, "fast", timeout=10) == "here"
        assert not slow.done()
        go_on.set()
        assert slow.result(10) is True


def futures_have_the_usual_verbs(make_world: MakeWorld) -> None:
    go_on = runtime.Event()
    with agents_of(make_world, 2) as (caller, callee):
        callee.register("add", lambda a, b: a + b)
        callee.register("wait", lambda: REAL_TIME.wait(go_on, 20))
        futures = [caller.rpc_async(1, "add", number, 1) for number in range(20)]
        done, not_done = wait(
            futures, timeout=10
        )  # no thread calls result(), so the agent must read
        assert (len(done), len(not_done)) == (20, 0)
        assert [future.result() for future in futures] == list(range(1, 21))
        called_back = runtime.Event()
        caller.rpc_async(1, "add", 1, 2).add_done_callback(lambda _: called_back.set())
        assert REAL_TIME.wait(called_back, 10)
        waiting = caller.rpc_async(1, "wait")
        expect(TimeoutError, lambda: waiting.result(0.05))
        go_on.set()
        assert waiting.result(10) is True
        assert isinstance(caller.rpc_async(1, "unknown").exception(10), FunctionNotFoundError)


def futures_are_awaitable(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (caller, callee):

        @callee.register
        async def later(value: int) -> int:
            await asyncio.sleep(0.01)
            return value

        async def gather() -> list[int]:
            calls = [caller.rpc_async(1, "later", n) for n in range(30)]
            results: list[int] = await asyncio.gather(*calls)
            return results

        assert asyncio.run(gather()) == list(range(30))


def cancel_reaches_the_callee(make_world: MakeWorld) -> None:
    started, cancelled = runtime.Event(), runtime.Event()

    async def sleep_for_ever() -> None:
        started.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with agents_of(make_world, 2) as (caller, callee):
        for function in (partial(work_until_cancelled, started, cancelled), sleep_for_ever):
            callee.register("work", function, replace=True)
            started.clear()
            cancelled.clear()
            future = caller.rpc_async(1, "work")
            assert REAL_TIME.wait(started, 10)
            assert future.cancel()
            expect(CancelledError, future.result)
            assert REAL_TIME.wait(cancelled, 10)


def limits_are_visible(make_world: MakeWorld) -> None:
    go_on = runtime.Event()
    with agents_of(make_world, 2, workers=1, max_queued=1, max_in_flight=4) as (caller, callee):
        callee.register("wait", lambda: REAL_TIME.wait(go_on, 20))
        futures = [caller.rpc_async(1, "wait") for _ in range(3)]
        refused, _ = wait(futures, timeout=10, return_when=FIRST_COMPLETED)
        assert [type(future.exception()) for future in refused] == [OverloadedError]
        for _ in range(2):  # one still runs and one still waits
            assert isinstance(caller.rpc_async(1, "wait").exception(10), OverloadedError)
        go_on.set()
        assert [future.result(10) for future in futures if future not in refused] == [True, True]


def size_limits_hold_in_both_directions(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2, max_message_nbytes=10_000) as (caller, callee):
        callee.register("make", lambda nbytes: bytes(nbytes))
        callee.register("take", len)
        expect(MessageTooLargeError, lambda: caller.rpc_sync(1, "take", bytes(10_000)))
        expect(MessageTooLargeError, lambda: caller.rpc_sync(1, "make", 10_000))
        assert caller.rpc_sync(1, "take", bytes(9_000)) == 9_000
        assert len(caller.rpc_sync(1, "make", 9_000)) == 9_000


def agents_never_cross(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        with RpcAgent(first, name="a") as a0, RpcAgent(second, name="a") as a1:
            with RpcAgent(first, name="b") as b0, RpcAgent(second, name="b") as b1:
                a1.register("who", lambda: "a")
                b1.register("who", lambda: "b")
                expect(ConfigurationError, lambda: RpcAgent(first, name="a"))
                for _ in range(20):
                    assert (a0.rpc_sync(1, "who"), b0.rpc_sync(1, "who")) == ("a", "b")
            a1.close()
            expect(ChannelClosedError, lambda: a0.rpc_sync(1, "who", timeout=5))
            with RpcAgent(second, name="a") as again:
                again.register("who", lambda: "a again")
                assert a0.rpc_sync(1, "who") == "a again"


def closing_drains_and_then_fails_the_rest(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        caller, callee = RpcAgent(first), RpcAgent(second)
        go_on = runtime.Event()
        both_run = runtime.Barrier(3)

        def run(seconds: float) -> str:
            both_run.wait(10)
            REAL_TIME.wait(go_on, seconds)
            return "done"

        callee.register(run)
        short, long = (caller.rpc_async(1, "run", seconds) for seconds in (0.05, 20.0))
        both_run.wait(10)
        callee.close(grace=0.8)
        assert short.result(5) == "done"
        assert isinstance(long.exception(5), ChannelClosedError)
        go_on.set()
        waiting = caller.rpc_async(0, "nothing")
        caller.close()
        caller.close()
        assert waiting.exception(5) is not None
        expect(ChannelClosedError, lambda: caller.rpc_sync(0, "nothing"))
