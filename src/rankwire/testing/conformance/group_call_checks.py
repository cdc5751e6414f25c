"""Conformance checks of group calls: they behave the same on every backend."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from rankwire import runtime
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    FunctionNotFoundError,
    GroupCallError,
    PeerLostError,
    RemoteError,
)
from rankwire.rpc.call import current_call
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.conformance.tools import agents_of, expect, leave, until, work_until_cancelled
from rankwire.testing.ranks import MakeWorld, in_parallel

_FEW, _MANY = 3, 10  # called one by one, and along a tree


class Model:
    """What each rank serves."""

    def __init__(self, agent: RpcAgent) -> None:
        self.agent = agent
        self.running = self.most_running = 0

    def rank(self) -> int:
        """Return the rank."""
        return self.agent.rank

    def scale(self, array: Any, by: float = 1.0) -> Any:
        """Return an array that depends on the rank; use up the argument."""
        array *= by
        return array * self.agent.rank + 0.1

    def later(self, value: int) -> Future[int]:
        """Return a future."""
        future: Future[int] = Future()
        runtime.Thread(target=future.set_result, args=(value + self.agent.rank,)).start()
        return future

    async def soon(self, value: int) -> int:
        """Return on the event loop."""
        await asyncio.sleep(0)
        return value + self.agent.rank

    def fail_on(self, ranks: list[int]) -> int:
        """Raise on some ranks."""
        if self.agent.rank in ranks:
            raise KeyError(f"at {self.agent.rank}")
        return self.agent.rank

    def nested(self, size: int) -> int:
        """Make a group call inside a group call."""
        ranks = range(self.agent.rank % 2, size, 3)
        return sum(self.agent.to_all(ranks=ranks).m.rank())


def _serve(agents: list[RpcAgent]) -> list[Model]:
    models = [Model(agent) for agent in agents]
    for agent, model in zip(agents, models, strict=True):
        agent.register("m", model)
    return models


def a_group_call_has_the_values_of_all_ranks(make_world: MakeWorld) -> None:
    for size in (1, _FEW, _MANY):
        with agents_of(make_world, size) as agents:
            _serve(agents)
            for caller in (agents[0], agents[-1]):
                result = caller.call_all("m.rank")
                assert result.values == {rank: rank for rank in range(size)}
                assert list(result) == list(range(size))
                assert (len(result), result[size - 1], result.missing) == (size, size - 1, [])
                later = caller.call_all("m.later", 5)
                assert list(later) == [5 + rank for rank in range(size)]
                assert list(caller.call_all("m.soon", 7)) == [7 + rank for rank in range(size)]
            ranks = [*range(size - 1, -1, -1)]
            assert [*agents[0].call_all("m.rank", ranks=ranks).values] == ranks
            others = [rank for rank in range(size) if rank != size // 2] or [0]
            assert list(agents[size // 2].call_all("m.rank", ranks=others)) == others


def group_calls_of_all_ranks_do_not_disturb_each_other(make_world: MakeWorld) -> None:
    def call(agent: RpcAgent) -> None:
        for _ in range(5):
            assert list(agent.call_all("m.rank")) == list(range(_MANY))
            assert agent.call_all("m.nested", _MANY, reduce="sum") == _MANY // 2 * (18 + 12)

    with agents_of(make_world, _MANY, workers=1) as agents:
        _serve(agents)
        in_parallel([partial(call, agent) for agent in agents])


def values_are_combined_in_the_order_of_ranks(make_world: MakeWorld) -> None:
    array = np.random.default_rng(7).normal(size=1000).astype(np.float32)
    with agents_of(make_world, _MANY) as agents:
        _serve(agents)
        total = agents[0].call_all("m.scale", array, reduce="sum")
        assert isinstance(total, np.ndarray)
        for caller, reduce in ((agents[7], "sum"), (agents[3], lambda a, b: a + b)):
            again = caller.call_all("m.scale", array, reduce=reduce)
            assert again.tobytes() == total.tobytes()
        one_by_one = agents[0].to_all(reduce="sum", need=_MANY).m.scale(array)
        assert one_by_one.tobytes() == total.tobytes()
        call = agents[2].call_all
        assert call("m.rank", reduce="max") == _MANY - 1
        assert call("m.rank", reduce="min") == 0
        assert call("m.rank", reduce="mean") == (_MANY - 1) / 2
        assert call("m.rank", ranks=[3, 1, 2], reduce=lambda a, b: f"{a}{b}") == "312"
        expect(ConfigurationError, lambda: call("m.rank", reduce="median"))


def large_arguments_and_values_travel(make_world: MakeWorld) -> None:
    array = np.arange(1_500_000.0)
    with agents_of(make_world, _MANY) as agents:
        _serve(agents)
        for collect in (None, [0, 9, 5]):
            result = agents[0].call_all("m.scale", array, by=2.0, collect=collect)
            assert [*result.values] == ([*range(_MANY)] if collect is None else [0, 5, 9])
            for rank, value in result.values.items():
                assert np.array_equal(value, array * 2.0 * rank + 0.1)
        assert np.array_equal(array, np.arange(1_500_000.0))


def a_group_call_reports_which_ranks_failed(make_world: MakeWorld) -> None:
    for size in (_FEW, _MANY):
        with agents_of(make_world, size) as agents:
            _serve(agents)
            last = size - 1
            for caller in (agents[0], agents[1]):
                fail = partial(caller.call_all, "m.fail_on", [1, last])
                error = expect(GroupCallError, fail)
                assert [*error.errors] == [1, last]
                assert isinstance(error.errors[last], KeyError)
                assert isinstance(error.errors[last], RemoteError)
                assert error.errors[last].peer == last
                assert [*error.values] == [rank for rank in range(size) if rank not in (1, last)]
                assert f"ranks 1, {last}" in str(error)
                assert "KeyError" in str(error)
                result = fail(partial=True)
                assert result[0] == 0
                expect(KeyError, partial(result.__getitem__, 1))
                combined = fail(partial=True, reduce="sum")
                assert combined.value == sum(range(size)) - 1 - last
            agents[0].register("only here", lambda: 1)
            error = expect(GroupCallError, lambda: agents[0].call_all("only here"))
            assert isinstance(error.errors[last], FunctionNotFoundError)
            assert error.values == {0: 1}


def a_late_rank_is_named_and_the_others_are_not(make_world: MakeWorld) -> None:
    for size in (_FEW, _MANY):
        started, cancelled = runtime.Event(), runtime.Event()
        with agents_of(make_world, size) as agents:
            for agent in agents:
                agent.register("work", partial(int, agent.rank))
            late = size - 1
            late_agent = agents[late]
            late_agent.register(
                "work", partial(work_until_cancelled, started, cancelled), replace=True
            )
            result = agents[0].call_all("work", timeout=0.5, partial=True)
            assert (result.missing, result.errors) == ([late], {})
            assert [*result.values] == [*range(late)]
            until(cancelled.is_set)
            error = expect(GroupCallError, lambda: agents[0].call_all("work", timeout=0.3))
            assert f"rank {late} did not answer in time" in str(error)


def enough_values_cancel_the_other_calls(make_world: MakeWorld) -> None:
    started, cancelled = runtime.Event(), runtime.Event()
    with agents_of(make_world, 4) as agents:
        agents[3].register("inner", partial(work_until_cancelled, started, cancelled))

        def work(rank: int) -> int:
            until(started.is_set)
            return rank

        for agent in agents[:2]:
            agent.register("work", partial(work, agent.rank))
        agents[2].register("work", lambda: agents[2].rpc_sync(3, "inner"))
        result = agents[0].call_all("work", ranks=[0, 1, 2], need=2)
        assert (result.values, result.missing) == ({0: 0, 1: 1}, [2])
        until(cancelled.is_set)
        until(lambda: not agents[2].activity().in_service)
        agents[1].register("work", lambda: 1 // 0, replace=True)
        agents[2].register("work", lambda: 1 // 0, replace=True)
        error = expect(GroupCallError, lambda: agents[0].call_all("work", ranks=[0, 1, 2], need=2))
        assert [*error.errors] == [1, 2]


def values_come_as_they_are_ready(make_world: MakeWorld) -> None:
    turns = [runtime.Event() for _ in range(4)]

    def work(rank: int) -> int:
        until(turns[rank].is_set)
        if rank == 1:
            raise ValueError("this one fails")
        return rank

    with agents_of(make_world, 4) as agents:
        for agent in agents:
            agent.register("work", partial(work, agent.rank))
        found: list[int] = []

        def take() -> None:
            values = agents[0].as_completed("work")
            turns[1].set()
            turns[2].set()
            for rank, value in values:
                assert rank == value
                found.append(rank)
                following = {2: 0, 0: 3}.get(rank, 3)
                turns[following].set()

        error = expect(GroupCallError, take)
        assert [*error.errors] == [1]
        assert "this one fails" in str(error)
        assert found == [2, 0, 3]
        for turn in turns[2:]:
            turn.clear()
        for _ in agents[0].as_completed("work"):
            break
        for turn in turns:
            turn.set()
        until(lambda: not any(agent.activity().in_service for agent in agents))


def each_rank_may_get_its_own_arguments(make_world: MakeWorld) -> None:
    with agents_of(make_world, 4) as agents:
        for agent in agents:
            agent.register("both", lambda a, b, c=0, agent=agent: [agent.rank, a, b, c])
        own = agents[0].to_all(ranks=[3, 1], args_of=lambda rank: (10 * rank,))
        assert own.both(5, c=2).values == {3: [3, 5, 30, 2], 1: [1, 5, 10, 2]}
        expect(ConfigurationError, lambda: agents[0].to_all(args_of=lambda rank: 5).both(1))  # type: ignore[arg-type,return-value]


def a_function_that_asks_who_calls_is_not_deceived(make_world: MakeWorld) -> None:
    def who() -> int:
        call = current_call()
        assert call is not None
        return call.src

    def origin() -> int:
        call = current_call()
        assert call is not None
        return call.origin

    with agents_of(make_world, _MANY) as agents:
        for agent in agents:
            agent.register("who", who)
            agent.register("direct", who, direct=True)
            agent.register("origin", origin)
        for caller in (0, 4):
            call = agents[caller].call_all
            assert set(call("direct")) == {caller}
            assert set(call("origin")) == {caller}
            assert set(call("who", ranks=[1, 2, 9])) == {caller}
            result = call("who", partial=True)
            assert set(result) == {caller}
            assert result.errors
            assert all(isinstance(error, PermissionError) for error in result.errors.values())
            assert "direct=True" in str(next(iter(result.errors.values())))


def a_lost_relay_is_named_and_the_ranks_below_it_answer(make_world: MakeWorld) -> None:
    runs: list[int] = []
    started = [runtime.Event() for _ in range(_MANY)]
    release = runtime.Event()
    relay = 5  # it calls 6, 7, 8 and 9

    def work(rank: int) -> int:
        runs.append(rank)
        started[rank].set()
        until(release.is_set)
        return rank

    with agents_of(make_world, _MANY) as agents:
        for agent in agents:
            agent.register("work", partial(work, agent.rank))
        results: list[Any] = []
        thread = runtime.Thread(
            target=lambda: results.append(agents[0].call_all("work", partial=True))
        )
        thread.start()
        until(lambda: all(each.is_set() for each in started))
        leave(agents[relay].backend, error=ValueError("this rank fails"))
        release.set()
        thread.join()
        (result,) = results
        assert [*result.errors] == [relay]
        assert isinstance(result.errors[relay], (PeerLostError, ChannelClosedError))
        assert [*result] == [rank for rank in range(_MANY) if rank != relay]
        assert sorted(runs) == list(range(_MANY))
