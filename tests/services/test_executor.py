"""``agent.executor``: a ``concurrent.futures.Executor`` whose calls run on ranks."""

import contextlib
import threading
from concurrent.futures import CancelledError, Executor, Future, wait

import pytest

from rankwire import (
    ChannelClosedError,
    ConfigurationError,
    FunctionNotFoundError,
    PeerLostError,
    RpcAgent,
    SimulatedBackend,
)
from worlds import eventually


@contextlib.contextmanager
def agents_of(world_size, **options):
    world = SimulatedBackend.create_group(world_size, timeout=10.0)
    agents = [RpcAgent(backend, **options) for backend in world]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.close(grace=1.0)


def test_it_is_an_executor_with_real_futures():
    with agents_of(3) as agents:
        for agent in agents:
            agent.register("add", lambda a, b: a + b)
        with agents[0].executor() as executor:
            assert isinstance(executor, Executor)
            futures = [executor.submit("add", n, b=1) for n in range(20)]
            assert all(type(future) is Future for future in futures)
            assert not wait(futures, 20).not_done
            assert [future.result() for future in futures] == list(range(1, 21))
            assert "on ranks [1, 2]" in repr(executor)
        assert "shut down" in repr(executor)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit("add", 1, 2)


def test_a_call_that_waits_can_be_cancelled():
    go_on = threading.Event()
    with agents_of(2) as agents:
        agents[1].register("wait", lambda: go_on.wait(20))
        with agents[0].executor(depth=1) as executor:
            first, second, third = (executor.submit("wait") for _ in range(3))
            eventually(first.running)
            assert second.cancel()
            assert not first.cancel()
            executor.shutdown(wait=False, cancel_futures=True)
            go_on.set()
            assert first.result(20) is True
            with pytest.raises(CancelledError):
                third.result(20)


@pytest.mark.parametrize("idempotent", [False, True])
def test_calls_of_a_lost_rank_are_repeated_if_that_does_no_harm(idempotent):
    with agents_of(3) as agents:
        for agent in agents:

            def work(number, agent=agent):
                if agent.rank == 1:
                    agent.backend.network.kill(1)
                return number

            agent.register("work", work, idempotent=idempotent)
        with agents[0].executor() as executor:
            futures = [executor.submit("work", number) for number in range(10)]
            errors = [future.exception(20) for future in futures]
        lost = [error for error in errors if error is not None]
        assert bool(lost) != idempotent
        for error in lost:
            assert isinstance(error, PeerLostError)
            assert error.peer == 1


def test_the_end_of_the_agent_ends_its_calls():
    with agents_of(2) as agents:
        agents[1].register("wait", lambda: threading.Event().wait(0.5))
        executor = agents[0].executor(depth=1)
        futures = [executor.submit("wait") for _ in range(3)]
        eventually(futures[0].running)
        agents[0].close(grace=0.0)
        for future in futures:
            assert isinstance(future.exception(20), ChannelClosedError)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit("wait")


def test_a_function_must_be_registered():
    with agents_of(2) as agents, agents[0].executor() as executor:
        with pytest.raises(ConfigurationError, match="is not registered on this rank"):
            executor.submit(print)


def test_a_function_that_no_rank_has_fails_only_its_own_calls():
    go_on = threading.Event()
    with agents_of(3) as agents:
        for agent in agents[1:]:
            agent.register("power", pow)
            agent.register("wait", lambda: go_on.wait(20))
        with agents[0].executor(depth=1) as executor:
            first = executor.submit("typo")
            with pytest.raises(FunctionNotFoundError, match="typo"):
                first.result(5)
            busy = executor.submit("wait")
            calls = [executor.submit("power", 2, n) for n in range(5)]
            typo = executor.submit("typo")
            calls += [executor.submit("power", 2, n) for n in range(5, 10)]
            assert [call.result(20) for call in calls] == [2**n for n in range(10)]
            assert isinstance(typo.exception(20), FunctionNotFoundError)
            go_on.set()
            assert busy.result(20) is True


def test_a_call_goes_to_a_rank_that_has_its_function():
    with agents_of(4) as agents:
        agents[3].register("power", pow)
        with agents[0].executor() as executor:
            futures = [executor.submit("power", 2, n) for n in range(60)]
            assert [future.result(20) for future in futures] == [2**n for n in range(60)]


def test_an_executor_ends_once_its_agent_has_ended_by_itself():
    with agents_of(2) as agents:
        agents[1].register("power", pow)
        agents[0].backend.close()
        future = agents[0].executor().submit("power", 2, 3)
        assert isinstance(future.exception(20), ChannelClosedError)


def test_a_call_with_an_iterator_is_not_repeated():
    with agents_of(3) as agents:
        for agent in agents:

            def total(numbers, agent=agent):
                next(numbers)
                if agent.rank == 1:
                    agent.backend.network.kill(1)
                return sum(numbers)

            agent.register("total", total, idempotent=True)
        with agents[0].executor() as executor:
            futures = [executor.submit("total", (n for n in range(5))) for _ in range(6)]
            errors = [future.exception(20) for future in futures]
        lost = [error for error in errors if error is not None]
        assert lost
        assert all(isinstance(error, PeerLostError) for error in lost)
        assert "an iterator" in str(lost[0])
        assert {future.result() for future in futures if future.exception() is None} <= {10}
