"""Who shares memory, and what holds when a rank dies, stops, fails or is interrupted in it."""

import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from sums import everywhere

import rankwire
from faults.sizes import trials
from rankwire import SubBackend, TcpBackend
from rankwire.collectives.exchange import Exchange
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
)
from rankwire.testing import simulated_world, tcp_world
from rankwire.transports import shared_segment
from rankwire.transports.shared_memory import CAN_SHARE
from rankwire.transports.shared_segment import ASLEEP
from worlds import Running, eventually, process_world

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only")

SOON = 8.0
ALL_REDUCE = "__import__('rankwire').all_reduce(backend, __import__('numpy').ones({count}))[-1]"

SHARES = "backend.operations.agreement.slots is not None"
FOR_EVER = "[{operation} for _ in range(10**7)]"


def sum_up(backend, count=10):
    return float(rankwire.all_reduce(backend, np.ones(count))[-1])


def slots(backend):
    return backend.operations.agreement.slots


# -- who shares ------------------------------------------------------------------------------------


def test_a_group_agrees_with_its_first_operation():
    with tcp_world(3) as world:
        assert all(backend.operations is None for backend in world)
        assert everywhere(sum_up, world) == [3.0] * 3
        segments = [slots(backend) for backend in world]
        assert all(segments)
        assert everywhere(sum_up, world) == [3.0] * 3
        assert [slots(backend) for backend in world] == segments


def test_simulated_ranks_and_a_world_of_one_share_nothing():
    for world in (simulated_world(2), tcp_world(1)):
        with world as backends:
            everywhere(sum_up, backends)
            assert [slots(backend) for backend in backends] == [None] * len(backends)


@pytest.mark.parametrize("option", [{"segment_nbytes": 0}, {"transport": "tcp"}])
def test_nobody_shares_if_it_is_turned_off(option):
    with tcp_world(2, **option) as world:
        assert everywhere(sum_up, world) == [2.0, 2.0]
        assert [slots(backend) for backend in world] == [None, None]


@pytest.mark.parametrize("unable", [0, 1, 2])
def test_nobody_shares_if_one_cannot(monkeypatch, unable):
    with tcp_world(3) as world:
        method = "make" if unable == 0 else "open"
        monkeypatch.setattr(world[unable].mesh.segments, method, lambda *args: None)
        for _ in range(2):
            assert everywhere(sum_up, world) == [3.0] * 3
        assert [slots(backend) for backend in world] == [None] * 3


def test_a_system_without_memory_goes_by_sockets(monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_segment, "SharedMemory", refuse)
    with tcp_world(2) as world:
        assert everywhere(sum_up, world) == [2.0, 2.0]
        assert [slots(backend) for backend in world] == [None, None]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8"])
def test_a_size_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="segment_nbytes"):
        TcpBackend(0, 1, "127.0.0.1:0", segment_nbytes=wrong)


def test_groups_have_memory_of_their_own():
    def run(backend):
        group = SubBackend(backend, [0, 2]) if backend.rank != 1 else None
        results = [sum_up(backend)]
        if group is not None:
            results += [sum_up(group), slots(group) is not slots(backend)]
        return [*results, sum_up(backend)]

    with tcp_world(3) as world:
        assert everywhere(run, world) == [[3.0, 2.0, True, 3.0], [3.0, 3.0], [3.0, 2.0, True, 3.0]]


def test_two_threads_in_two_groups_do_not_meet():
    def run(backend):
        group = SubBackend(backend, range(backend.world_size))
        wrong = []

        def repeat(where, value):
            for _ in range(trials(300, 20_000, quick=100)):
                total = rankwire.all_reduce(where, np.full(3, value))
                if total[0] != value * where.world_size:
                    wrong.append(total)

        both = (backend, 1.0), (group, 5.0)
        threads = [threading.Thread(target=repeat, args=args) for args in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong

    with tcp_world(2) as world:
        assert everywhere(run, world) == [[], []]


def test_nothing_is_left_of_a_hundred_groups():
    def held():
        """Return how many descriptors, threads and mappings there are."""
        gc.collect()
        with open("/proc/self/maps") as maps:
            mappings = sum("memfd:rankwire" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings

    with tcp_world(2) as world:
        everywhere(sum_up, world)
        before = held()

        def use(backend):
            for _ in range(trials(100, 100, quick=30)):
                with SubBackend(backend, [0, 1]) as group:
                    assert sum_up(group) == 2.0

        everywhere(use, world)
        eventually(lambda: held() == before, SOON)


def test_a_group_that_is_closed_gives_its_memory_back():
    def run(backend):
        with SubBackend(backend, [0, 1]) as group:
            sum_up(group)
            segment = weakref.ref(slots(group)._segment)
        return segment() is None and slots(group) is None

    with tcp_world(2) as world:
        assert everywhere(run, world) == [True, True]


# -- disagreements and failures --------------------------------------------------------------------


def test_a_disagreement_is_found_at_once_and_named_on_all_ranks():
    def run(backend):
        rankwire.barrier(backend)
        begin = time.monotonic()
        count = 5 if backend.rank == 1 else 4
        with pytest.raises(CollectiveMismatchError) as info:
            rankwire.all_reduce(backend, np.ones(count), timeout=40)
        assert "(5,)" in str(info.value)
        assert "(4,)" in str(info.value)
        seconds = time.monotonic() - begin
        assert sum_up(backend) == backend.world_size
        return seconds

    with tcp_world(3) as world:
        assert max(everywhere(run, world)) < SOON
        assert all(slots(backend) is not None for backend in world)


def test_after_a_failure_the_ranks_agree_on_new_memory():
    def run(backend):
        assert sum_up(backend) == 2.0
        before = slots(backend)
        if backend.rank == 1:
            time.sleep(0.6)
        with pytest.raises((DeadlineExceededError, CollectiveAbortedError)):
            rankwire.all_reduce(backend, np.ones(4), timeout=0.2)
        assert sum_up(backend) == 2.0
        return slots(backend) not in (None, before)

    with tcp_world(2) as world:
        assert everywhere(run, world) == [True, True]


def test_a_refused_argument_ends_the_others():
    def run(backend):
        rankwire.barrier(backend)
        expected = ConfigurationError if backend.rank == 0 else CollectiveAbortedError
        with pytest.raises(expected):
            rankwire.all_reduce(backend, np.ones(3), "sum" if backend.rank else "no op")
        return sum_up(backend)

    with tcp_world(2) as world:
        assert everywhere(run, world) == [2.0, 2.0]


@pytest.mark.fault(48, "a process killed in a collective through shared memory is named by all")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_killed_anywhere_is_named_by_all(world_size):
    for number in range(trials(4, 40, quick=2)):
        with process_world(world_size) as ranks:
            once = [rank.start("eval", ALL_REDUCE.format(count=10)) for rank in ranks]
            assert [command.result() for command in once] == [float(world_size)] * world_size
            assert all(rank.call("eval", SHARES) for rank in ranks)
            operation = FOR_EVER.format(operation=ALL_REDUCE.format(count=50_000))
            running = [rank.start("eval", operation) for rank in ranks]
            time.sleep(0.02 + 0.0007 * number)
            victim = number % world_size
            killed = ranks[victim].kill()
            for rank, command in enumerate(running):
                if rank != victim:
                    error = command.error()
                    assert isinstance(error, PeerLostError), repr(error)
                    assert error.peer == victim
                    assert command.ended - killed < SOON


@pytest.mark.usefixtures("folder")
def test_a_rank_that_waits_for_one_that_stops_says_so_at_its_limit():
    with process_world(2) as ranks:
        once = [rank.start("eval", ALL_REDUCE.format(count=10)) for rank in ranks]
        assert [command.result() for command in once] == [2.0, 2.0]
        ranks[1].stop()
        limited = ALL_REDUCE.format(count=10).replace("))[-1]", "), timeout=0.7)[-1]")
        error = ranks[0].start("eval", limited).error()
        assert isinstance(error, DeadlineExceededError)
        assert error.waiting_for == [1]
        ranks[1].signal(signal.SIGCONT)
        assert isinstance(
            ranks[1].start("eval", ALL_REDUCE.format(count=10)).error(), CollectiveAbortedError
        )
        again = [rank.start("eval", ALL_REDUCE.format(count=10)) for rank in ranks]
        assert [command.result() for command in again] == [2.0, 2.0]


@pytest.mark.usefixtures("folder")
def test_a_rank_that_leaves_is_not_waited_for():
    with process_world(2) as ranks:
        once = [rank.start("eval", ALL_REDUCE.format(count=10)) for rank in ranks]
        assert [command.result() for command in once] == [2.0, 2.0]
        waiting = ranks[0].start("eval", ALL_REDUCE.format(count=10))
        ranks[1].call("close")
        error = waiting.error()
        assert isinstance(error, rankwire.RankwireError)
        assert error.peer == 1


@pytest.mark.parametrize("nested", [False, True])
def test_a_group_that_is_closed_ends_the_wait_in_it(nested):
    with tcp_world(2) as world:
        groups = everywhere(lambda backend: SubBackend(backend, [0, 1]), world)
        inner = everywhere(lambda group: SubBackend(group, [0, 1]), groups) if nested else groups
        everywhere(sum_up, inner)
        waiting = Running(sum_up, inner[0])
        eventually(lambda: is_asleep(inner[0]), SOON)
        groups[0].close()
        assert isinstance(waiting.error(SOON), ChannelClosedError)


def is_asleep(backend):
    segment = slots(backend)._segment
    return segment.words[segment.lines[segment.rank] + ASLEEP] == 1


def test_a_rank_that_leaves_right_after_its_part_has_done_it(monkeypatch):
    """It goes while another one has just looked up from waiting for it."""
    with tcp_world(2) as (near, far):
        everywhere(sum_up, [near, far])
        look_up = Exchange.look_up

        def slowly(self, src):
            if self.rank == 0 and not done:
                done.append(sum_up(far))
                far.close()
                eventually(lambda: near.failure_of(1) is not None, SOON)
            look_up(self, src)

        done = []
        monkeypatch.setattr(Exchange, "look_up", slowly)
        assert sum_up(near) == 2.0
        assert done == [2.0]
