"""Conformance checks of pools: they behave the same on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from rankwire import runtime
from rankwire.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FunctionNotFoundError,
    InvalidRankError,
    PeerLostError,
    RemoteError,
)
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.conformance.tools import agents_of, expect, leave, until
from rankwire.testing.ranks import MakeWorld


def square(number: int) -> int:
    """Return the square; 13 raises."""
    if number == 13:
        raise KeyError("unlucky")
    return number * number


async def square_async(number: int) -> int:
    """Return the square, on the event loop."""
    return square(number)


def square_later(number: int) -> Future[int]:
    """Return a future of the square."""
    future: Future[int] = Future()
    future.set_result(square(number))
    return future


def is_quiet(agents: list[RpcAgent]) -> bool:
    """Return whether no calls are in flight or in service."""
    activities = [agent.activity() for agent in agents]
    return not any(each.in_flight or each.in_service for each in activities)


def each_task_of_a_map_has_one_outcome(make_world: MakeWorld) -> None:
    for world_size in (1, 2, 4):
        with agents_of(make_world, world_size) as agents:
            for agent in agents:
                for function in (square, square_async, square_later):
                    agent.register(function)
            for function in (square, square_async, square_later):
                for chunk in (1, 7):
                    outcomes = list(agents[0].map(function, range(50), chunk=chunk))
                    assert sorted(each.index for each in outcomes) == list(range(50))
                    for each in outcomes:
                        assert each.task == each.index
                        assert each.rank in (range(1, world_size) or [0])
                        if each.task == 13:
                            assert isinstance(each.error, RemoteError)
                            expect(KeyError, partial(getattr, each, "value"))
                        else:
                            assert (each.value, each.error) == (each.task**2, None)
            assert list(agents[0].map("square", [])) == []
            until(partial(is_quiet, agents))


def a_map_may_be_in_order(make_world: MakeWorld) -> None:
    with agents_of(make_world, 3) as agents:
        for agent in agents:
            agent.register(square)
        for chunk in (1, 4):
            ordered = agents[0].map(square, iter(range(40)), ordered=True, chunk=chunk)
            assert [each.task for each in ordered] == list(range(40))


def a_map_reads_its_tasks_when_it_needs_them(make_world: MakeWorld) -> None:
    read = 0

    def numbers() -> Iterator[int]:
        nonlocal read
        while True:
            read += 1
            yield read

    with agents_of(make_world, 3) as agents:
        for agent in agents:
            agent.register(square)
        for ordered in (False, True):
            for chunk in (1, 5):
                read = 0
                with agents[0].map(
                    square, numbers(), depth=3, chunk=chunk, ordered=ordered
                ) as outcomes:
                    for taken in range(1, 200):
                        next(outcomes)
                        assert read - taken <= 3 * 2 * chunk
                assert outcomes.closed
                assert list(outcomes) == []
        until(partial(is_quiet, agents))


def tasks_of_a_map_are_of_all_types_and_fail_alone(make_world: MakeWorld) -> None:
    def total(array: Any) -> object:
        return object() if array is None else array.sum()

    with agents_of(make_world, 2) as (caller, worker):
        worker.register("total", total)
        tasks: list[Any] = [np.arange(n) for n in (1, 1000, 200_000)] + [None, object()]
        for chunk in (1, 5):
            outcomes = list(caller.map("total", tasks, chunk=chunk, ordered=True))
            values = [each.value for each in outcomes[:3]]
            assert values == [task.sum() for task in tasks[:3]]
            assert isinstance(outcomes[3].error, RemoteError)
            assert outcomes[4].error is not None
            assert outcomes[4].rank is None


def a_map_that_is_left_early_cancels_its_tasks(make_world: MakeWorld) -> None:
    going = runtime.Event()

    def wait(number: int) -> Future[int]:
        future: Future[int] = Future()
        if not number:
            future.set_result(0)
        return future

    with agents_of(make_world, 2) as agents:
        agents[1].register("wait", wait)
        for outcome in agents[0].map("wait", range(1000)):
            assert outcome.task == 0
            going.set()
            break
        del outcome
        until(partial(is_quiet, agents))
        assert going.is_set()


def the_limit_of_a_task_counts_from_when_a_worker_takes_it(make_world: MakeWorld) -> None:
    def hold(number: int) -> int:
        clock.sleep(0.35 if number < 3 else 0.0)
        return number

    with agents_of(make_world, 2, workers=1) as (caller, worker):
        clock = worker.backend.clock
        worker.register("hold", hold)
        outcomes = list(caller.map("hold", range(4), depth=4, timeout=0.9))
        assert [each.error for each in outcomes] == [None] * 4


def a_task_beyond_its_limit_ends_and_the_others_go_on(make_world: MakeWorld) -> None:
    release = runtime.Event()

    def stick(number: int) -> int:
        if number == 0:
            release.wait()
        return number

    with agents_of(make_world, 3, workers=1) as agents:
        for agent in agents[1:]:
            agent.register("stick", stick)
        outcomes = list(agents[0].map("stick", range(8), timeout=0.3, ordered=True))
        release.set()
        assert isinstance(outcomes[0].error, DeadlineExceededError)
        assert "map 'stick'" in str(outcomes[0].error)
        late = [each for each in outcomes if each.error is not None]
        assert len(late) <= 2  # one may have waited behind it until its own guard


def tasks_of_a_lost_rank_go_to_others_if_that_does_no_harm(make_world: MakeWorld) -> None:
    for is_idempotent in (True, False):
        with agents_of(make_world, 4) as agents:

            def fail(number: int, agents: list[RpcAgent] = agents) -> int:
                leave(agents[3].backend, RuntimeError("out of memory"))
                return number

            def work(number: int, agents: list[RpcAgent] = agents) -> int:
                agents[0].backend.clock.sleep(0.01)
                return number

            agents[3].register("work", fail)
            for agent in agents[:3]:
                agent.register("work", work, idempotent=is_idempotent)
            outcomes = list(agents[0].map("work", range(40), ordered=True))
            assert [each.index for each in outcomes] == list(range(40))
            errors = [each.error for each in outcomes if each.error is not None]
            assert len(errors) <= 2
            assert bool(errors) != is_idempotent
            for error in errors:
                assert isinstance(error, PeerLostError)
                assert error.peer == 3
                assert "not registered here as idempotent" in str(error)


def a_map_without_a_rank_that_can_work_ends(make_world: MakeWorld) -> None:
    with agents_of(make_world, 3) as agents:
        outcomes = list(agents[0].map("nothing", range(5)))
        assert all(isinstance(each.error, FunctionNotFoundError) for each in outcomes)
        for agent in agents:
            agent.register(square)
        for agent in agents[1:]:
            leave(agent.backend, RuntimeError("out of memory"))
        until(lambda: agents[0].backend.alive == (0,))
        outcomes = list(agents[0].map(square, range(5)))
        assert len(outcomes) == 5
        assert all(isinstance(each.error, PeerLostError) for each in outcomes)


def a_late_task_is_given_to_an_idle_rank_too(make_world: MakeWorld) -> None:
    release = runtime.Event()

    with agents_of(make_world, 3) as agents:
        for agent in agents:

            def work(number: int, agent: RpcAgent = agent) -> int:
                if agent.rank == 1:
                    release.wait()
                return agent.rank

            agent.register("work", work, idempotent=True)
        outcomes = list(agents[0].map("work", range(3), depth=1, hedge_after=0.1))
        assert [each.value for each in outcomes] == [2] * 3
        release.set()
        until(partial(is_quiet, agents))


def the_arguments_of_a_map_are_checked(make_world: MakeWorld) -> None:
    with agents_of(make_world, 2) as (agent, _):
        agent.register(square)
        wrong: list[dict[str, Any]] = [{"depth": 0}, {"chunk": 0}, {"retries": -1}, {"ranks": []}]
        for options in (*wrong, {"timeout": -1.0}, {"hedge_after": 1.0}):
            expect(ConfigurationError, partial(agent.map, square, [], **options))
        expect(InvalidRankError, lambda: agent.map(square, [], ranks=[2]))
        expect(ConfigurationError, lambda: agent.map(print, []))


def an_executor_runs_calls_on_ranks(make_world: MakeWorld) -> None:
    with agents_of(make_world, 3) as agents:
        for agent in agents:
            agent.register(square)
            agent.register("add", lambda a, b=2: a + b)
        with agents[0].executor() as executor:
            futures = [executor.submit(square, number) for number in range(20)]
            added: Future[int] = executor.submit("add", 1, b=5)
            assert added.result() == 6
            assert [each.result() for each in futures[:13]] == [n * n for n in range(13)]
            assert isinstance(futures[13].exception(), KeyError)
            assert list(executor.map(square, range(5))) == [0, 1, 4, 9, 16]
        expect(RuntimeError, lambda: executor.submit(square, 1))
        until(partial(is_quiet, agents))
