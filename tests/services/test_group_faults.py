"""A rank of a group call is killed after each of its messages."""

import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress

import pytest

from rankwire import (
    ChannelClosedError,
    FaultPlan,
    GroupCallError,
    PeerLostError,
    RpcAgent,
)
from rankwire.testing import simulated_world
from worlds import eventually

KINDS = (GroupCallError, PeerLostError, ChannelClosedError)
SOON = 8.0  # seconds, less than the timeout
SIZE = 12  # rank 0 calls 6, 3, 2 and 1; rank 6 calls 9, 8 and 7; rank 9 calls 11 and 10
TIMEOUT = 10.0


class Field:
    """A world with an agent on each rank; every run of the function is counted."""

    def __init__(self, world):
        self.network = world[0].network
        self.agents = [RpcAgent(backend, timeout=TIMEOUT) for backend in world]
        self.runs = Counter()
        self.lock = threading.Lock()
        for agent in self.agents:
            agent.register("run", lambda n, agent=agent: self.run(agent.rank, n))

    def run(self, rank, number):
        with self.lock:
            self.runs[rank, number] += 1
        time.sleep(0.001 * (rank % 3))
        return rank + 0.1

    def living(self):
        return [a for a in self.agents if not self.network.was_killed(a.rank)]

    def assert_clean(self):
        assert not [key for key, count in self.runs.items() if count > 1], self.runs
        for agent in self.living():
            eventually(lambda agent=agent: agent.activity()[:2] == (0, 0))


@contextmanager
def field(plan):
    with simulated_world(SIZE, timeout=TIMEOUT, faults=plan) as world:
        one = Field(world)
        try:
            yield one
        finally:
            for agent in one.agents:
                agent.close(grace=0.5)


def messages_of(rank, **settings):
    """Return how many messages a rank sends in two group calls in which nothing happens."""
    with field(FaultPlan().kill(rank, after=10**6)) as one:
        for number in range(2):
            one.agents[0].to_all(**settings).run(number)
        return one.network.traffic.sent[rank]


CASES = [{}, {"reduce": "sum"}, {"collect": [0, 9]}, {"need": SIZE - 1}]
IDS = ["values", "reduce", "collect", "need"]
WHOLE = sum(rank + 0.1 for rank in range(SIZE))


@pytest.mark.parametrize("settings", CASES, ids=IDS)
@pytest.mark.parametrize("victim", [6, 9, 11])
def test_a_member_that_is_killed_is_named_and_no_other_is_missing(victim, settings):
    for count in range(1, messages_of(victim, **settings) + 1):
        with field(FaultPlan().kill(victim, after=count)) as one:
            for number in range(2):
                began = time.monotonic()
                result = one.agents[0].to_all(partial=True, **settings).run(number)
                assert time.monotonic() - began < SOON, count
                assert result.errors.keys() <= {victim}, count
                for error in result.errors.values():
                    assert isinstance(error, PeerLostError | ChannelClosedError), (count, error)
                    assert error.peer == victim
                assert not result.missing or "need" in settings, (count, result)
                if settings.get("reduce"):
                    lost = victim + 0.1 if result.errors else 0.0
                    assert abs(result.value - (WHOLE - lost)) < 1e-9
                elif "collect" in settings:
                    assert result.values.keys() >= {0, 9} - {victim}
                else:
                    expected = {r: r + 0.1 for r in range(SIZE) if r in result.values}
                    assert result.values == expected
                    assert len(result.values) >= SIZE - 1
            one.assert_clean()


@pytest.mark.parametrize("settings", CASES, ids=IDS)
def test_a_caller_that_is_killed_gets_an_error_and_leaves_nothing(settings):
    for count in range(1, messages_of(0, **settings)):
        with field(FaultPlan().kill(0, after=count)) as one:
            began = time.monotonic()
            # Its last message may be a cancel that no thread waits for.
            expected = nullcontext() if "need" in settings else pytest.raises(KINDS)
            with expected, suppress(*KINDS if "need" in settings else ()):
                [one.agents[0].to_all(**settings).run(number) for number in range(2)]
            assert time.monotonic() - began < SOON, count
            one.assert_clean()


@pytest.mark.parametrize("link", [(0, 6), (6, 9), (9, 11)])
def test_a_link_that_breaks_leaves_a_result_or_errors_of_the_ranks_behind_it(link):
    behind = range(link[1], SIZE)
    for count in range(1, 9):
        with field(FaultPlan().drop_link(*link, after=count)) as one:
            for number in range(2):
                began = time.monotonic()
                result = one.agents[0].to_all(partial=True).run(number)
                assert time.monotonic() - began < SOON, count
                assert not result.missing
                assert all(rank in behind for rank in result.errors), result.errors
                assert link[0] == 0 or not result.errors
            one.assert_clean()


def test_a_call_that_a_plan_fails_is_made_in_another_way_or_raises_its_error():
    plan = FaultPlan().fail(0, call=2, error=OSError("planned")).fail(6, call=1)
    with field(plan) as one:
        assert len(one.agents[0].call_all("run", 0)) == SIZE
        one.assert_clean()
    with field(FaultPlan().fail(0, call=2, error=OSError("planned"))) as one:
        with pytest.raises(OSError, match="planned"):
            one.agents[0].call_all("run", 0, ranks=[1, 2, 3])
        one.assert_clean()


@pytest.mark.parametrize("rank", [6, 9, 11])
def test_the_function_does_not_run_again_on_a_rank_whose_agent_was_reopened(rank):
    runs, begun, go = Counter(), threading.Event(), threading.Event()

    def work(own):
        runs[own] += 1
        if own == rank:
            begun.set()
            time.sleep(0.3)
        else:
            assert go.wait(TIMEOUT)
        return own

    with field(FaultPlan()) as one:
        for agent in one.agents:
            agent.register("work", lambda own=agent.rank: work(own))

        def reopen():
            assert begun.wait(TIMEOUT)
            one.agents[rank].close(grace=0.0)
            one.agents[rank] = RpcAgent(one.agents[rank].backend, timeout=TIMEOUT)
            one.agents[rank].register("work", lambda: work(rank))
            go.set()

        thread = threading.Thread(target=reopen)
        thread.start()
        result = one.agents[0].call_all("work", partial=True)
        thread.join()
        assert max(runs.values()) == 1, runs
        assert rank in result.errors
        # An agent that closes cancels what it has passed on.
        assert not [one for one in result.errors if one < rank], result.errors
        assert not result.missing


def test_the_function_does_not_run_on_a_process_that_was_restarted_meanwhile(monkeypatch):
    with field(FaultPlan().drop_link(6, 9)) as one:  # so that rank 0 calls rank 9
        backend, asked = one.agents[0].backend, Counter()

        def incarnation_of(rank):
            asked[rank] += 1
            return int(rank == 9 and asked[rank] > 1)

        monkeypatch.setattr(backend, "incarnation_of", incarnation_of)
        result = one.agents[0].call_all("run", 0, partial=True)
        assert [*result.errors] == [9]
        assert "restarted" in str(result.errors[9])
        assert result.errors[9].may_have_run
        assert one.runs[9, 0] == 0
