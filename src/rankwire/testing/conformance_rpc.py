"""The conformance checks about calls: an ``RpcAgent`` behaves the same on every backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep
from typing import Any

import numpy as np

from rankwire.errors import (
    CallCancelledError,
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
from rankwire.rpc.agent import RpcAgent
from rankwire.rpc.context import current_call
from rankwire.testing.expecting import expect
from rankwire.testing.ranks import in_parallel
from rankwire.testing.worlds import MakeWorld

__all__ = ["RPC_CHECKS"]


@contextmanager
def _agents(make_world: MakeWorld, world_size: int, **options: Any) -> Iterator[list[RpcAgent]]:
    world_options = {name: options.pop(name) for name in ("max_message_nbytes",) if name in options}
    with make_world(world_size, **world_options) as world:
        agents = [RpcAgent(backend, **options) for backend in world]
        try:
            yield agents
        finally:
            for agent in agents:
                agent.close(grace=2.0)


def _every_rank_calls_every_rank(make_world: MakeWorld) -> None:
    def describe(rank: int, text: str, n: int = 0) -> list[object]:
        return [rank, text, n]

    with _agents(make_world, 3) as agents:
        for agent in agents:
            agent.register("describe", partial(describe, agent.rank))

        def call_all(rank: int) -> None:
            for dst in range(3):
                result = agents[rank].rpc_sync(dst, "describe", f"from {rank}", n=dst)
                assert result == [dst, f"from {rank}", dst]

        in_parallel([partial(call_all, rank) for rank in range(3)])


def _values_and_arrays_travel(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as (caller, callee):
        callee.register("echo", lambda *values, **named: (values, named))
        big = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
        values, named = caller.rpc_sync(1, "echo", None, (1, 2), {"a": [1.5]}, big, x={3})
        assert values[:3] == (None, (1, 2), {"a": [1.5]})
        assert named == {"x": {3}}
        assert np.array_equal(values[3], big)
        values[3][0, 0] = 7  # the receiver owns it
        assert big[0, 0] == 0


def _errors_keep_type_text_and_traceback(make_world: MakeWorld) -> None:
    def fail(kind: str) -> None:
        raise {"value": ValueError, "exit": SystemExit, "interrupt": KeyboardInterrupt}[kind]("why")

    with _agents(make_world, 2) as (caller, callee):
        callee.register("fail", fail)
        for kind, name in (
            ("value", "ValueError"),
            ("exit", "SystemExit"),
            ("interrupt", "KeyboardInterrupt"),
        ):
            error = expect(RemoteError, partial(caller.rpc_sync, 1, "fail", kind))
            assert (error.remote_type, error.remote_message) == (name, "why")
            assert "in fail" in error.remote_traceback
            assert error.peer == 1


def _what_cannot_be_called_is_told_apart(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as (caller, callee):
        callee.register("known", lambda: object())
        missing = expect(FunctionNotFoundError, lambda: caller.rpc_sync(1, "unknown"))
        assert (missing.name, missing.known) == ("unknown", ["known"])
        expect(InvalidRankError, lambda: caller.rpc_sync(7, "known"))
        wrong = expect(UnsupportedTypeError, lambda: caller.rpc_sync(1, "known", [object()]))
        assert wrong.path == "args[0][0]"
        expect(RemoteError, lambda: caller.rpc_sync(1, "known"))  # an unsendable result


def _registering_is_strict(make_world: MakeWorld) -> None:
    with _agents(make_world, 1) as (agent,):

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


def _a_late_reply_is_dropped(make_world: MakeWorld) -> None:
    go_on = threading.Event()
    with _agents(make_world, 2) as (caller, callee):
        callee.register("wait", lambda: go_on.wait(10))
        callee.register("add", lambda a, b: a + b)
        begin = monotonic()
        error = expect(DeadlineExceededError, lambda: caller.rpc_sync(1, "wait", timeout=0.15))
        assert monotonic() - begin < 5
        assert (error.limit, error.waiting_for, error.may_have_run) == (0.15, [1], True)
        go_on.set()
        assert caller.rpc_sync(1, "add", 2, 3) == 5
        assert "0 calls in flight" in repr(caller)


def _deadlines_travel_and_bound_nested_calls(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as (caller, callee):
        seen: list[float] = []

        def look(agent: RpcAgent, nested: bool) -> None:
            call = current_call()
            assert call is not None
            seen.append(call.deadline.limit)
            if nested:
                agent.rpc_sync(1 - agent.rank, "look", False, timeout=100.0)

        for agent in (caller, callee):
            agent.register("look", partial(look, agent))
        caller.rpc_sync(1, "look", True, timeout=5.0)
        assert len(seen) == 2
        assert all(0 < limit <= 5.0 for limit in seen)


def _calls_nest_with_one_worker(make_world: MakeWorld) -> None:
    def down(agent: RpcAgent, depth: int) -> int:
        deeper: int = agent.rpc_sync(1 - agent.rank, "down", depth - 1) if depth else -1
        return 1 + deeper

    with _agents(make_world, 2, workers=1) as agents:
        for agent in agents:
            agent.register("down", partial(down, agent))
        assert agents[0].rpc_sync(1, "down", 32) == 32
        error = expect(RemoteError, lambda: agents[0].rpc_sync(1, "down", 33))
        assert "OverloadedError" in error.remote_type
        assert "nested" in error.remote_message
        assert "rank 1 'down' -> rank 0 'down' -> " in error.remote_message


def _a_call_knows_its_chain(make_world: MakeWorld) -> None:
    def look(agent: RpcAgent, nested: int) -> list[object]:
        call = current_call()
        assert call is not None
        assert call.depth == len(call.chain)
        deeper: list[object] = agent.rpc_sync(1 - agent.rank, "look", nested - 1) if nested else []
        return [call.chain, *deeper]

    with _agents(make_world, 2) as agents:
        for agent in agents:
            agent.register("look", partial(look, agent))
        chains = agents[0].rpc_sync(1, "look", 2)
        assert chains == [(), ((1, "look"),), ((1, "look"), (0, "look"))]


def _a_late_call_says_what_its_callee_does(make_world: MakeWorld) -> None:
    go_on = threading.Event()

    def outer() -> None:
        callee.rpc_sync(0, "inner", timeout=1.0)

    with _agents(make_world, 2) as (caller, callee):
        caller.register("inner", lambda: go_on.wait(20))
        callee.register("outer", outer)
        error = expect(DeadlineExceededError, lambda: caller.rpc_sync(1, "outer", timeout=0.5))
        assert "rank 1 has had 'outer' for" in error.detail
        assert "rank 0 'inner'" in error.detail
        nested = expect(RemoteError, lambda: caller.rpc_sync(1, "outer", timeout=10))
        assert nested.remote_type.endswith("DeadlineExceededError")
        assert "rank 1 'outer' -> rank 0 'inner'" in nested.remote_message
        go_on.set()


def _a_circle_through_an_event_loop_is_reported(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as agents:

        async def blocking() -> object:
            return agents[0].rpc_sync(1, "middle")

        async def on_the_same_loop() -> None:
            return None

        agents[0].register("blocking", blocking)
        agents[0].register("last", on_the_same_loop)
        agents[1].register("middle", lambda: agents[1].rpc_sync(0, "last"))
        begin = monotonic()
        error = expect(RemoteError, lambda: agents[1].rpc_sync(0, "blocking", timeout=40))
        assert monotonic() - begin < 20
        assert error.remote_type.endswith("CircularCallError")
        for part in ("rank 0 'blocking'", "rank 1 'middle'", "rank 0 'last'", "event loop"):
            assert part in error.remote_message
        assert agents[1].rpc_sync(0, "last", timeout=10) is None


def _circles_of_two_chains_are_reported(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as agents:
        both = threading.Barrier(2)

        async def cross(agent: RpcAgent) -> object:
            both.wait(10)
            return agent.rpc_sync(1 - agent.rank, "leaf")

        async def leaf() -> str:
            return "leaf"

        for agent in agents:
            agent.register("cross", partial(cross, agent))
            agent.register("leaf", leaf)
        futures = [agents[0].rpc_async(rank, "cross", timeout=40) for rank in (0, 1)]
        outcomes = [future.exception(30) for future in futures]
        failed = [error for error in outcomes if error is not None]
        assert len(failed) == 1  # that one gave up, so the other one could go on
        assert isinstance(failed[0], RemoteError)
        assert failed[0].remote_type.endswith("CircularCallError")


def _a_circle_through_a_full_limit_is_reported(make_world: MakeWorld) -> None:
    def down(agent: RpcAgent, depth: int) -> int:
        deeper: int = agent.rpc_sync(1 - agent.rank, "down", depth - 1) if depth else -1
        return 1 + deeper

    with _agents(make_world, 2, max_in_flight=1) as agents:
        for agent in agents:
            agent.register("down", partial(down, agent))
        assert agents[0].rpc_sync(1, "down", 1, timeout=20) == 1
        error = expect(RemoteError, lambda: agents[0].rpc_sync(1, "down", 3, timeout=40))
        assert error.remote_type.endswith("CircularCallError")
        assert "its turn to call" in error.remote_message


def _slow_calls_are_no_circles(make_world: MakeWorld) -> None:
    """Calls that wait for long, in all ways in which one could take them for a circle."""
    seconds = 1.8  # the first look is after 1.25

    async def pause() -> str:
        await asyncio.sleep(seconds)
        return "paused"

    async def awaits(agent: RpcAgent) -> object:
        return await agent.rpc_async(1 - agent.rank, "through")

    def through(agent: RpcAgent) -> object:
        return agent.rpc_sync(1 - agent.rank, "pause")

    async def blocks_its_loop(agent: RpcAgent) -> object:
        return agent.rpc_sync(1 - agent.rank, "sleep")

    def down(agent: RpcAgent, depth: int) -> object:
        name, args = ("down", (depth - 1,)) if depth else ("sleep", ())
        return agent.rpc_sync(1 - agent.rank, name, *args)

    def looks_in(agent: RpcAgent) -> object:
        future = agent.rpc_async(1 - agent.rank, "sleep")
        while True:
            try:
                return future.result(0.1)
            except TimeoutError:
                continue

    def fans_out(agent: RpcAgent) -> int:
        futures = [agent.rpc_async(1 - agent.rank, "sleep") for _ in range(4)]
        return len([future.result() for future in futures])

    def nap() -> str:
        sleep(seconds)
        return "slept"

    with _agents(make_world, 2, timeout=50.0) as agents:
        for agent in agents:
            agent.register("pause", pause)
            agent.register("sleep", nap)
            for function in (awaits, through, blocks_its_loop, down, looks_in, fans_out):
                agent.register(function.__name__, partial(function, agent))
        calls: list[tuple[Any, ...]] = [
            (name,) for name in ("awaits", "blocks_its_loop", "looks_in", "fans_out")
        ]
        calls.append(("down", 30))
        futures = [agents[0].rpc_async(dst, *call) for call in calls for dst in (0, 1)]
        for future in futures:
            assert future.result(50) is not None


def _ranks_call_each_other_at_once(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as agents:
        for agent in agents:
            agent.register("square", lambda x: x * x)

        def call(rank: int) -> None:
            for number in range(200):
                assert agents[rank].rpc_sync(1 - rank, "square", number) == number * number

        in_parallel([partial(call, rank) for rank in (0, 1, 0, 1)])


def _replies_find_their_callers(make_world: MakeWorld) -> None:
    def answer(number: int) -> int:
        sleep((number * 7 % 5) / 1000)
        return number

    with _agents(make_world, 2) as (caller, callee):
        callee.register("answer", answer)
        numbers = range(24)
        got = in_parallel([partial(caller.rpc_sync, 1, "answer", n) for n in numbers])
        assert got == list(numbers)


def _a_slow_call_does_not_hold_up_a_fast_one(make_world: MakeWorld) -> None:
    go_on = threading.Event()
    with _agents(make_world, 2) as (caller, callee):
        callee.register("slow", lambda: go_on.wait(20))
        callee.register("fast", lambda: "here")
        slow = caller.rpc_async(1, "slow")
        assert caller.rpc_sync(1, "fast", timeout=10) == "here"
        assert not slow.done()
        go_on.set()
        assert slow.result(10) is True


def _futures_have_the_usual_verbs(make_world: MakeWorld) -> None:
    go_on = threading.Event()
    with _agents(make_world, 2) as (caller, callee):
        callee.register("add", lambda a, b: a + b)
        callee.register("wait", lambda: go_on.wait(20))
        futures = [caller.rpc_async(1, "add", number, 1) for number in range(20)]
        done, not_done = wait(futures, timeout=10)  # nobody calls result(): somebody must read
        assert (len(done), len(not_done)) == (20, 0)
        assert [future.result() for future in futures] == list(range(1, 21))
        called_back = threading.Event()
        caller.rpc_async(1, "add", 1, 2).add_done_callback(lambda _: called_back.set())
        assert called_back.wait(10)
        waiting = caller.rpc_async(1, "wait")
        expect(TimeoutError, lambda: waiting.result(0.05))
        go_on.set()
        assert waiting.result(10) is True
        assert isinstance(caller.rpc_async(1, "unknown").exception(10), FunctionNotFoundError)


def _futures_are_awaitable(make_world: MakeWorld) -> None:
    with _agents(make_world, 2) as (caller, callee):

        @callee.register
        async def later(value: int) -> int:
            await asyncio.sleep(0.01)
            return value

        async def gather() -> list[int]:
            return await asyncio.gather(*(caller.rpc_async(1, "later", n) for n in range(30)))

        assert asyncio.run(gather()) == list(range(30))


def _cancel_reaches_the_callee(make_world: MakeWorld) -> None:
    started, cancelled = threading.Event(), threading.Event()

    def look_for_cancel() -> None:
        call = current_call()
        assert call is not None
        started.set()
        limit = monotonic() + 10
        while not call.cancelled and monotonic() < limit:
            sleep(0.005)
        if call.cancelled:
            cancelled.set()

    async def sleep_for_ever() -> None:
        started.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with _agents(make_world, 2) as (caller, callee):
        for function in (look_for_cancel, sleep_for_ever):
            callee.register("work", function, replace=True)
            started.clear()
            cancelled.clear()
            future = caller.rpc_async(1, "work")
            assert started.wait(10)
            assert future.cancel()
            expect(CancelledError, future.result)
            assert cancelled.wait(10)


def _cancel_reaches_nested_calls(make_world: MakeWorld) -> None:
    """Program -> rank 1 -> rank 2 -> rank 0, with every way of waiting on the way."""
    started, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        call = current_call()
        assert call is not None
        started.set()
        limit = monotonic() + 10
        while not call.cancelled and monotonic() < limit:
            sleep(0.005)
        if call.cancelled:
            ended.set()

    def sync(agent: RpcAgent, dst: int, name: str) -> None:
        try:
            agent.rpc_sync(dst, name)
        except CallCancelledError as error:
            errors.append(error)
            raise

    def future(agent: RpcAgent, dst: int, name: str) -> None:
        agent.rpc_async(dst, name).result()

    async def awaiting(agent: RpcAgent, dst: int, name: str) -> None:
        await agent.rpc_async(dst, name)

    async def blocking(agent: RpcAgent, dst: int, name: str) -> None:
        agent.rpc_sync(dst, name)

    with _agents(make_world, 3) as agents:
        agents[0].register("work", work)
        for function in (sync, future, awaiting, blocking):
            agents[1].register("first", partial(function, agents[1], 2, "second"), replace=True)
            agents[2].register("second", partial(sync, agents[2], 0, "work"), replace=True)
            started.clear()
            ended.clear()
            errors.clear()
            call = agents[0].rpc_async(1, "first")
            assert started.wait(10)
            assert call.cancel()
            assert ended.wait(10)
            limit = monotonic() + 10
            while not errors and monotonic() < limit:
                sleep(0.005)
            assert errors[0].peer in (0, 2)  # type: ignore[attr-defined]


def _limits_are_visible(make_world: MakeWorld) -> None:
    go_on = threading.Event()
    with _agents(make_world, 2, workers=1, max_queued=1, max_in_flight=4) as (caller, callee):
        callee.register("wait", lambda: go_on.wait(20))
        futures = [caller.rpc_async(1, "wait") for _ in range(3)]
        refused = [f for f in futures if isinstance(_error_within(f, 0.5), OverloadedError)]
        assert len(refused) == 1
        more = [caller.rpc_async(1, "wait") for _ in range(2)]
        more += [f for f in more if isinstance(_error_within(f, 0.2), OverloadedError)]
        assert len(more) == 4
        go_on.set()


def _error_within(future: Any, seconds: float) -> BaseException | None:
    try:
        error: BaseException | None = future.exception(seconds)
    except TimeoutError:
        return None
    return error


def _size_limits_hold_in_both_directions(make_world: MakeWorld) -> None:
    with _agents(make_world, 2, max_message_nbytes=10_000) as (caller, callee):
        callee.register("make", lambda nbytes: bytes(nbytes))
        callee.register("take", len)
        expect(MessageTooLargeError, lambda: caller.rpc_sync(1, "take", bytes(10_000)))
        expect(MessageTooLargeError, lambda: caller.rpc_sync(1, "make", 10_000))
        assert caller.rpc_sync(1, "take", bytes(9_000)) == 9_000
        assert len(caller.rpc_sync(1, "make", 9_000)) == 9_000


def _agents_never_cross(make_world: MakeWorld) -> None:
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


def _closing_drains_and_then_fails_the_rest(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        caller, callee = RpcAgent(first), RpcAgent(second)
        go_on = threading.Event()
        callee.register("short", lambda: [sleep(0.2), "done"][1])  # type: ignore[func-returns-value]
        callee.register("long", lambda: go_on.wait(20))
        short = caller.rpc_async(1, "short")
        long = caller.rpc_async(1, "long")
        sleep(0.05)
        callee.close(grace=0.6)
        assert short.result(5) == "done"
        assert isinstance(long.exception(5), ChannelClosedError)
        go_on.set()
        waiting = caller.rpc_async(0, "nothing")
        caller.close()
        caller.close()
        assert waiting.exception(5) is not None
        expect(ChannelClosedError, lambda: caller.rpc_sync(0, "nothing"))


RPC_CHECKS: tuple[Callable[[MakeWorld], None], ...] = (
    _every_rank_calls_every_rank,
    _values_and_arrays_travel,
    _errors_keep_type_text_and_traceback,
    _what_cannot_be_called_is_told_apart,
    _registering_is_strict,
    _a_late_reply_is_dropped,
    _deadlines_travel_and_bound_nested_calls,
    _calls_nest_with_one_worker,
    _a_call_knows_its_chain,
    _a_late_call_says_what_its_callee_does,
    _a_circle_through_an_event_loop_is_reported,
    _circles_of_two_chains_are_reported,
    _a_circle_through_a_full_limit_is_reported,
    _slow_calls_are_no_circles,
    _ranks_call_each_other_at_once,
    _replies_find_their_callers,
    _a_slow_call_does_not_hold_up_a_fast_one,
    _futures_have_the_usual_verbs,
    _futures_are_awaitable,
    _cancel_reaches_the_callee,
    _cancel_reaches_nested_calls,
    _limits_are_visible,
    _size_limits_hold_in_both_directions,
    _agents_never_cross,
    _closing_drains_and_then_fails_the_rest,
)
