"""Conformance checks of calls that functions make: chains, cycles, deadlines, cancelling."""

from __future__ import annotations

import asyncio
from functools import partial

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.errors import CallCancelledError, DeadlineExceededError, RemoteError
from rankwire.rpc.call import current_call
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.conformance.tools import agents_of, expect, until, work_until_cancelled
from rankwire.testing.ranks import MakeWorld


def deadlines_travel_and_bound_nested_calls(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (caller, callee):
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


def _down(agent: RpcAgent, depth: int) -> int:
    """Call the other rank, which calls back, and so on."""
    deeper: int = agent.rpc_sync(1 - agent.rank, "down", depth - 1) if depth else -1
    return 1 + deeper


def calls_nest_with_one_worker(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2, workers=1) as agents:
        for agent in agents:
            agent.register("down", partial(_down, agent))
        assert agents[0].rpc_sync(1, "down", 32) == 32
        error = expect(RemoteError, lambda: agents[0].rpc_sync(1, "down", 33))
        assert "OverloadedError" in error.remote_type
        assert "nested" in error.remote_message
        assert "rank 1 'down' -> rank 0 'down' -> " in error.remote_message


def a_call_knows_its_chain(make_world: MakeWorld) -> None:
    def look(agent: RpcAgent, nested: int) -> list[object]:
        call = current_call()
        assert call is not None
        assert call.depth == len(call.chain)
        deeper: list[object] = agent.rpc_sync(1 - agent.rank, "look", nested - 1) if nested else []
        return [call.chain, *deeper]

    with agents_of(make_world, 2) as agents:
        for agent in agents:
            agent.register("look", partial(look, agent))
        chains = agents[0].rpc_sync(1, "look", 2)
        assert chains == [(), ((1, "look"),), ((1, "look"), (0, "look"))]


def a_late_call_says_what_its_callee_does(make_world: MakeWorld) -> None:
    go_on = runtime.Event()

    def outer() -> None:
        callee.rpc_sync(0, "inner", timeout=1.0)

    with agents_of(make_world, 2) as (caller, callee):
        caller.register("inner", lambda: REAL_TIME.wait(go_on, 20))
        callee.register("outer", outer)
        for _ in range(5):  # on a busy machine a callee may not answer in time
            error = expect(DeadlineExceededError, lambda: caller.rpc_sync(1, "outer", timeout=0.5))
            if "rank 1 has had" in error.detail:
                break
        assert "rank 1 has had 'outer' for" in error.detail
        assert "rank 0 'inner'" in error.detail
        nested = expect(RemoteError, lambda: caller.rpc_sync(1, "outer", timeout=10))
        assert nested.remote_type.endswith("DeadlineExceededError")
        assert "rank 1 'outer' -> rank 0 'inner'" in nested.remote_message
        go_on.set()


def a_circle_through_an_event_loop_is_reported(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as agents:

        async def blocking() -> object:
            return agents[0].rpc_sync(1, "middle")

        async def on_the_same_loop() -> None:
            return None

        agents[0].register("blocking", blocking)
        agents[0].register("last", on_the_same_loop)
        agents[1].register("middle", lambda: agents[1].rpc_sync(0, "last"))
        begin = REAL_TIME.now()
        error = expect(RemoteError, lambda: agents[1].rpc_sync(0, "blocking", timeout=40))
        assert REAL_TIME.now() - begin < 20
        assert error.remote_type.endswith("CircularCallError")
        for part in ("rank 0 'blocking'", "rank 1 'middle'", "rank 0 'last'", "event loop"):
            assert part in error.remote_message
        assert agents[1].rpc_sync(0, "last", timeout=10) is None


def cycles_of_two_chains_are_reported(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as agents:
        both = runtime.Barrier(2, timeout=10)

        async def cross(agent: RpcAgent) -> object:
            both.wait()
            return agent.rpc_sync(1 - agent.rank, "leaf")

        async def leaf() -> str:
            return "leaf"

        for agent in agents:
            agent.register("cross", partial(cross, agent))
            agent.register("leaf", leaf)
        futures = [agents[0].rpc_async(rank, "cross", timeout=40) for rank in (0, 1)]
        outcomes = [future.exception(30) for future in futures]
        failed = [error for error in outcomes if error is not None]
        assert len(failed) == 1  # it gave up, so the other could continue
        assert isinstance(failed[0], RemoteError)
        assert failed[0].remote_type.endswith("CircularCallError")


def a_circle_through_a_full_limit_is_reported(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2, max_in_flight=1) as agents:
        for agent in agents:
            agent.register("down", partial(_down, agent))
        assert agents[0].rpc_sync(1, "down", 1, timeout=20) == 1
        error = expect(RemoteError, lambda: agents[0].rpc_sync(1, "down", 3, timeout=40))
        assert error.remote_type.endswith("CircularCallError")
        assert "its turn to call" in error.remote_message


def slow_calls_are_no_circles(make_world: MakeWorld) -> None:
    """Make calls that wait for long in every way that could look like a cycle."""
    seconds = 1.8  # the first check comes after 1.25

    async def pause() -> str:
        await asyncio.sleep(seconds)
        return "paused"

    async def awaits(agent: RpcAgent) -> object:
        return await agent.rpc_async(1 - agent.rank, "through")

    def through(agent: RpcAgent) -> object:
        return agent.rpc_sync(1 - agent.rank, "pause")

    async def blocks_its_loop(agent: RpcAgent) -> object:
        return agent.rpc_sync(1 - agent.rank, "sleep")

    def down(agent: RpcAgent, depth: int = 30) -> object:
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
        REAL_TIME.sleep(seconds)
        return "slept"

    with agents_of(make_world, 2, timeout=50.0) as agents:
        for agent in agents:
            agent.register("pause", pause)
            agent.register("sleep", nap)
            for function in (awaits, through, blocks_its_loop, down, looks_in, fans_out):
                agent.register(function.__name__, partial(function, agent))
        names = ("awaits", "blocks_its_loop", "looks_in", "fans_out", "down")
        futures = [agents[0].rpc_async(dst, name) for name in names for dst in (0, 1)]
        for future in futures:
            assert future.result(50) is not None


def cancel_reaches_nested_calls(make_world: MakeWorld) -> None:
    """Program -> rank 1 -> rank 2 -> rank 0, with every way of waiting on the way."""
    started, ended = runtime.Event(), runtime.Event()
    errors: list[BaseException] = []

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

    with agents_of(make_world, 3) as agents:
        agents[0].register("work", partial(work_until_cancelled, started, ended))
        for function in (sync, future, awaiting, blocking):
            agents[1].register("first", partial(function, agents[1], 2, "second"), replace=True)
            agents[2].register("second", partial(sync, agents[2], 0, "work"), replace=True)
            started.clear()
            ended.clear()
            errors.clear()
            call = agents[0].rpc_async(1, "first")
            assert REAL_TIME.wait(started, 10)
            assert call.cancel()
            assert REAL_TIME.wait(ended, 10)
            until(lambda: bool(errors))
            assert errors[0].peer in (0, 2)  # type: ignore[attr-defined]
