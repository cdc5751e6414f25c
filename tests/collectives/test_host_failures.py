"""Failures in operations over several hosts: every rank ends soon, says who it was, and goes on.

A rank may wait in memory for the leader of its host, and that one for a message of another host. It
still hears of whatever happens to any rank.
"""

import signal
import time

import numpy as np
import pytest
from sums import everywhere

import rankwire
from faults.sizes import trials
from interrupts import interrupt_main_thread_in
from rankwire import SubBackend
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
)
from rankwire.transports.shared_memory import CAN_SHARE
from several_hosts import processes_on, threads_on, works_by_hosts
from worlds import Running, eventually

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only")

SLOW = pytest.mark.slow
SOON = 8.0
TWO_BY_TWO = (0, 0, 1, 1)  # ranks 0 and 2 lead
# Who dies, or stops: the leader of another host than rank 0's, and one that does not lead, first.
RANKS = [pytest.param(0, marks=SLOW), 1, 2, pytest.param(3, marks=SLOW)]
SMALL, LARGE = 10, 600_000  # elements; the large ones go in pieces
ALL_REDUCE = "__import__('rankwire').all_reduce(backend, __import__('numpy').ones({count}))[-1]"
LIMITED = ALL_REDUCE.replace("))[-1]", "), timeout={timeout})[-1]")
FOR_EVER = "[{operation} for _ in range(10**7)]"
BY_HOSTS = "backend.operations.agreement.hosts is not None"

OPERATIONS = {
    "all_reduce": rankwire.all_reduce,
    "broadcast": lambda b, x, **kw: rankwire.broadcast(b, x, 1, **kw),
    "reduce": lambda b, x, **kw: rankwire.reduce(b, x, 1, out=x if b.rank == 1 else None, **kw),
    "all_gather": lambda b, x, **kw: rankwire.all_gather(b, x[: len(x) // 4], out=x, **kw),
    "reduce_scatter": lambda b, x, **kw: rankwire.reduce_scatter(
        b, np.ones(len(x)), out=x[: len(x) // 4], **kw
    ),
}


def sum_up(backend, count=SMALL):
    return float(rankwire.all_reduce(backend, np.ones(count))[-1])


def all_sum_up(ranks):
    running = [rank.start("eval", ALL_REDUCE.format(count=SMALL)) for rank in ranks]
    return [command.result() for command in running]


# -- who shares ------------------------------------------------------------------------------------


@pytest.mark.parametrize("unable", range(4))
def test_if_one_rank_cannot_share_all_go_by_messages(monkeypatch, unable):
    with threads_on(TWO_BY_TWO) as world:
        for method in ("make", "open"):
            monkeypatch.setattr(world[unable].mesh.segments, method, lambda *args: None)
        for _ in range(2):
            assert everywhere(sum_up, world) == [4.0] * 4
        assert not any(works_by_hosts(backend) for backend in world)
        assert all(backend.operations.agreement.slots is None for backend in world)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("of_rank", [{2: {"segment_nbytes": 0}}, {1: {"segment_nbytes": 0}}])
def test_a_host_on_which_it_is_turned_off_decides_for_all(of_rank):
    with processes_on(TWO_BY_TWO, of_rank=of_rank) as ranks:
        assert all_sum_up(ranks) == [4.0] * 4
        assert not any(rank.call("eval", BY_HOSTS) for rank in ranks)


def test_a_host_of_another_kind_decides_for_all(monkeypatch):
    """Its ranks know that they cannot, and take part in the agreement all the same."""
    with threads_on(TWO_BY_TWO) as world:
        for backend in world[2:]:
            monkeypatch.setattr(backend.mesh, "shares_memory", False)
        assert everywhere(sum_up, world) == [4.0] * 4
        assert not any(works_by_hosts(backend) for backend in world)


@pytest.mark.usefixtures("folder")
def test_hosts_with_slots_of_different_sizes_use_the_same_pieces():
    of_rank = {0: {"segment_nbytes": 1 << 16}, 2: {"segment_nbytes": 1 << 20}}
    with processes_on(TWO_BY_TWO, of_rank=of_rank) as ranks:
        operation = ALL_REDUCE.format(count=100_000)
        running = [rank.start("eval", operation) for rank in ranks]
        assert [command.result() for command in running] == [4.0] * 4
        fits = "backend.operations.agreement.hosts.slot_nbytes"
        assert [rank.call("eval", fits) for rank in ranks] == [(1 << 16) // 4] * 4


# -- disagreements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [{0}, {1}, {2}, {3}, {2, 3}, {1, 3}], ids=str)
@pytest.mark.parametrize("count", [SMALL, pytest.param(LARGE, marks=SLOW)])
def test_a_disagreement_is_named_on_all_ranks(others, count):
    def run(backend):
        rankwire.barrier(backend)
        begin = time.monotonic()
        array = np.ones(count + 1 if backend.rank in others else count)
        with pytest.raises(CollectiveMismatchError) as info:
            rankwire.all_reduce(backend, array, timeout=40)
        seconds = time.monotonic() - begin
        assert f"({count},)" in str(info.value)
        assert f"({count + 1},)" in str(info.value)
        assert (array == 1.0).all()
        assert sum_up(backend) == 4.0
        return seconds

    with threads_on(TWO_BY_TWO) as world:
        assert max(everywhere(run, world)) < SOON
        assert all(works_by_hosts(backend) for backend in world)


@pytest.mark.parametrize("missing", RANKS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("count", [16, pytest.param(LARGE, marks=SLOW)])
def test_nothing_is_written_until_all_ranks_have_come(name, missing, count):
    def run(backend):
        rankwire.barrier(backend)
        if backend.rank == missing:
            time.sleep(0.3)
            timeout = 0.0  # it comes when the others have gone
        else:
            timeout = 0.2
        array = np.full(count, 7.0)
        with pytest.raises((DeadlineExceededError, CollectiveAbortedError)) as info:
            OPERATIONS[name](backend, array, timeout=timeout)
        assert (array == 7.0).all()
        if isinstance(info.value, DeadlineExceededError) and backend.rank != missing:
            assert missing in info.value.waiting_for
        eventually(lambda: sum_up(backend) == 4.0)

    with threads_on(TWO_BY_TWO) as world:
        everywhere(run, world)


def test_a_refused_argument_ends_the_others():
    def run(backend):
        rankwire.barrier(backend)
        expected = ConfigurationError if backend.rank == 3 else CollectiveAbortedError
        with pytest.raises(expected):
            rankwire.all_reduce(backend, np.ones(3), "no op" if backend.rank == 3 else "sum")
        return sum_up(backend)

    with threads_on(TWO_BY_TWO) as world:
        assert everywhere(run, world) == [4.0] * 4


# -- deaths, stops and interrupts ------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_rank_that_is_killed_anywhere_is_named_by_all(victim, count):
    """The leader of a host, or another one of its ranks; also rank 0, which coordinates."""
    for number in range(trials(2, 20, quick=1)):
        with processes_on(TWO_BY_TWO) as ranks:
            assert all_sum_up(ranks) == [4.0] * 4
            assert all(rank.call("eval", BY_HOSTS) for rank in ranks)
            operation = FOR_EVER.format(operation=ALL_REDUCE.format(count=count))
            running = [rank.start("eval", operation) for rank in ranks]
            time.sleep(0.02 + 0.0017 * number)
            killed = ranks[victim].kill()
            for rank, command in enumerate(running):
                if rank != victim:
                    error = command.error()
                    assert isinstance(error, PeerLostError), repr(error)
                    assert error.peer == victim
                    assert command.ended - killed < SOON


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("victim", RANKS)
def test_a_rank_that_never_comes_and_dies_is_named_by_all_who_wait(victim):
    """All others wait already: in memory, or for a message of another host."""
    with processes_on(TWO_BY_TWO) as ranks:
        assert all_sum_up(ranks) == [4.0] * 4
        others = [rank for rank in ranks if rank.rank != victim]
        waiting = [rank.start("eval", ALL_REDUCE.format(count=SMALL)) for rank in others]
        time.sleep(0.2)
        killed = ranks[victim].kill()
        for command in waiting:
            error = command.error()
            assert isinstance(error, PeerLostError), repr(error)
            assert error.peer == victim
            assert command.ended - killed < SOON


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("victim", RANKS)
def test_a_rank_that_stops_is_named_at_the_limit(victim):
    with processes_on(TWO_BY_TWO) as ranks:
        assert all_sum_up(ranks) == [4.0] * 4
        ranks[victim].stop()
        others = [rank for rank in ranks if rank.rank != victim]
        operation = LIMITED.format(count=SMALL, timeout=0.7)
        for command in [rank.start("eval", operation) for rank in others]:
            error = command.error()
            if isinstance(error, CollectiveAbortedError):
                assert f"waiting for rank {victim}" in str(error)
            else:
                assert isinstance(error, DeadlineExceededError), repr(error)
                assert error.waiting_for == [victim]
        ranks[victim].signal(signal.SIGCONT)
        late = ranks[victim].start("eval", ALL_REDUCE.format(count=SMALL)).error()
        assert isinstance(late, CollectiveAbortedError), repr(late)
        assert all_sum_up(ranks) == [4.0] * 4
        assert all(rank.call("eval", BY_HOSTS) for rank in ranks)


@pytest.mark.parametrize("leaver", range(1, 4))
def test_a_rank_that_leaves_ends_the_others(leaver):
    with threads_on(TWO_BY_TWO) as world:
        everywhere(sum_up, world)
        stay = [backend for backend in world if backend.rank != leaver]
        waiting = [Running(sum_up, backend) for backend in stay]
        time.sleep(0.1)
        world[leaver].close()
        for command in waiting:
            error = command.error(SOON)
            assert isinstance(error, (ChannelClosedError, CollectiveAbortedError)), repr(error)
            assert f"rank {leaver} has left" in str(error)


@pytest.mark.parametrize("interrupted", range(4))
def test_an_interrupt_ends_the_others_and_all_go_on(interrupted):
    with threads_on(TWO_BY_TWO) as world:
        everywhere(sum_up, world)
        everywhere(lambda backend: backend.barrier(), world)  # so that all are connected
        missing = (interrupted + 1) % 4
        others = [b for b in world if b.rank not in (interrupted, missing)]
        waiting = [Running(sum_up, backend) for backend in others]
        interrupting = Running(interrupt_main_thread_in, "call")
        with pytest.raises(KeyboardInterrupt):
            sum_up(world[interrupted])
        interrupting.result()
        errors = [command.error(SOON) for command in waiting]
        errors.append(Running(sum_up, world[missing]).error(SOON))
        for error in errors:
            assert isinstance(error, CollectiveAbortedError), repr(error)
            assert error.peer == interrupted
        assert everywhere(sum_up, world) == [4.0] * 4


@pytest.mark.parametrize("place", [0, 1])
def test_a_group_that_is_closed_ends_the_wait_in_it(place):
    with threads_on(TWO_BY_TWO) as world:
        groups = everywhere(lambda backend: SubBackend(backend, range(4)), world)
        everywhere(sum_up, groups)
        waiting = Running(sum_up, groups[place])
        time.sleep(0.1)
        groups[place].close()
        assert isinstance(waiting.error(SOON), ChannelClosedError)
