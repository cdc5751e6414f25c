"""Many ranks that wait for one: all know who is missing, at 3 control messages for each rank."""

import contextlib
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import rankwire
from rankwire.collectives.sequence import OperationSequence
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    PeerLostError,
    UnsupportedTypeError,
)
from rankwire.testing import in_parallel, simulated_world, tcp_world
from worlds import Running, eventually, process_world, runtime_folder_of_its_own

SOON = 8.0  # seconds; measured: 0.1 to 0.3 on an idle machine
TIMEOUT = 20.0
MINUTES = 120.0
MANY = 64
MOST_MESSAGES = 3  # for each rank: it waits, it asks who is missing, and the answer


class Counts:
    """Counts what the ranks of a simulated world report, and what they are told."""

    def __init__(self, world) -> None:
        self.reported, self.told = Counter(), Counter()
        for backend in world:
            self._count(backend)

    def _count(self, backend) -> None:
        send, deliver = backend.roll._send, backend.roll.deliver

        def counting_send(notice, patience):
            self.reported[backend.rank] += not notice.is_failure
            send(notice, patience)

        def counting_deliver(notice):
            self.told[backend.rank] += not notice.is_failure
            deliver(notice)

        backend.roll._send, backend.roll.deliver = counting_send, counting_deliver

    @property
    def most(self) -> int:
        """The most that one rank has sent and received, failures apart."""
        return max((self.reported + self.told).values(), default=0)


def start(world, call, absent=()) -> dict[int, Running]:
    return {b.rank: Running(call, b) for b in world if b.rank not in absent}


def check_works(world) -> None:
    for result in in_parallel([partial(rankwire.all_reduce, b, np.ones(2)) for b in world]):
        assert (result == len(world)).all()


@pytest.mark.parametrize("size", [MANY, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("absent", [(5,), pytest.param((0, 1, 2, 50), marks=pytest.mark.slow)])
def test_all_name_exactly_the_missing_at_three_messages_for_each(size, absent):
    with simulated_world(size, timeout=TIMEOUT) as world:
        # Connecting is most of the work of many ranks in one process.
        in_parallel([partial(rankwire.barrier, backend, timeout=MINUTES) for backend in world])
        counts = Counts(world)
        limit = size // 12  # seconds: all of them must have been heard by then, on a busy machine
        runs = start(world, partial(rankwire.barrier, timeout=limit), absent)
        noun = "rank" if len(absent) == 1 else "ranks"
        text = f"no result within {limit} s waiting for {noun} {', '.join(map(str, absent))}"
        for rank, run in runs.items():
            error = run.error(MINUTES)
            assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
            assert text in error.message, (rank, error.message[:300])
        assert counts.most <= MOST_MESSAGES


@pytest.mark.parametrize("size", [8, MANY])
def test_a_rank_that_is_only_late_costs_one_message_of_each_other(size):
    with simulated_world(size, timeout=TIMEOUT) as world:
        in_parallel([partial(rankwire.barrier, backend, timeout=MINUTES) for backend in world])
        counts = Counts(world)
        runs = start(world, rankwire.barrier, absent=[7])
        eventually(lambda: len(counts.reported) == size - 1, TIMEOUT)
        rankwire.barrier(world[7])
        for run in runs.values():
            run.result()
        assert counts.most == 1
        assert not counts.told


@pytest.mark.parametrize("odd", [0, 9])
def test_a_disagreement_of_many_is_found_by_all(odd):
    with simulated_world(MANY, timeout=TIMEOUT) as world:
        counts = Counts(world)
        runs = start(world, lambda b: rankwire.all_reduce(b, np.ones(2 + (b.rank == odd))))
        for run in runs.values():
            assert isinstance(run.error(), CollectiveMismatchError)
            assert f"on rank {odd}" in str(run.error())
            assert run.seconds < SOON
        assert counts.most <= MOST_MESSAGES
        check_works(world)


@pytest.mark.slow
def test_one_of_many_that_gives_up_ends_the_others():
    with simulated_world(MANY, timeout=TIMEOUT) as world:
        limits = partial(dict.get, {11: 6.0})
        runs = start(
            world,
            lambda b: rankwire.barrier(b, timeout=limits(b.rank) or TIMEOUT),
            absent=[3],
        )
        late = runs.pop(11)
        assert isinstance(late.error(), DeadlineExceededError)
        assert late.error().waiting_for == [3]
        for run in runs.values():
            error = run.error()
            assert isinstance(error, CollectiveAbortedError)
            assert error.peer == 11
            assert "no result within 6 s waiting for rank 3" in error.reason
            assert run.ended - late.ended < SOON


def test_one_of_many_that_cannot_begin_ends_the_others():
    with simulated_world(MANY, timeout=TIMEOUT) as world:
        runs = start(world, lambda b: rankwire.all_reduce(b, [1] if b.rank == 4 else np.ones(2)))
        assert isinstance(runs.pop(4).error(), UnsupportedTypeError)
        for run in runs.values():
            assert isinstance(run.error(), CollectiveAbortedError)
            assert run.error().peer == 4
            assert run.seconds < SOON
        check_works(world)


def test_a_rank_that_is_done_is_not_needed_to_tell_the_others_of_a_failure():
    size = 12

    def steps(x):
        if x.rank == 1:
            x.send_buffers(0, 0, (), 0)
        if x.rank == 0:
            x.receive(1, 0)
        else:
            x.receive(size - 1, 1)  # which does not come

    def run(backend):
        limit = 1.0 if backend.rank == 5 else TIMEOUT
        OperationSequence.of(backend).call(
            "waiting", lambda **_: ("waiting()", steps), timeout=limit
        )

    with simulated_world(size, timeout=TIMEOUT) as world:
        runs = start(world, run, absent=[size - 1])
        runs.pop(0).result()
        late = runs.pop(5)
        assert isinstance(late.error(), DeadlineExceededError)
        for run in runs.values():
            assert isinstance(run.error(), CollectiveAbortedError)
            assert run.error().peer == 5
            assert run.ended - late.ended < SOON


def test_only_a_few_of_many_ask_the_missing_rank_what_it_does(monkeypatch):
    asking = []
    with tcp_world(12, timeout=TIMEOUT) as world:
        in_parallel([partial(rankwire.barrier, backend, timeout=MINUTES) for backend in world])
        for backend in world:
            monkeypatch.setattr(
                backend.mesh.inquiries,
                "doing_of",
                lambda rank, deadline, b=backend: asking.append(b.rank) or "",
            )
        for run in start(world, partial(rankwire.barrier, timeout=2.0), absent=[2]).values():
            assert isinstance(run.error(), (DeadlineExceededError, CollectiveAbortedError))
    assert set(asking) <= {0, 1, 3, 4, 5, 6, 7, 8}


@pytest.mark.slow
def test_many_ranks_over_sockets():
    with tcp_world(10, timeout=TIMEOUT) as world:
        check_works(world)
        for absent in (0, 4):
            runs = start(world, partial(rankwire.barrier, timeout=5.0), [absent])
            for run in runs.values():
                error = run.error()
                assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
                assert error.waiting_for == [absent]
            with contextlib.suppress(CollectiveAbortedError):
                rankwire.barrier(world[absent])
                for run in start(world, rankwire.barrier).values():  # it hears of it here
                    assert isinstance(run.error(), CollectiveAbortedError)
            check_works(world)


def test_the_coordinator_that_is_killed_ends_those_who_wait_with_it_and_no_others():
    """Groups without it go on; what goes wrong in them ends at their time limit."""
    with runtime_folder_of_its_own(), process_world(4, timeout=TIMEOUT) as ranks:
        make = (
            "globals().setdefault('group', __import__('rankwire').SubBackend(backend, [1, 2, 3]))"
        )
        for made in [rank.start("eval", f"{make} and 1") for rank in ranks[1:]]:
            assert made.result() == 1
        sums = "__import__('rankwire').all_reduce({}, __import__('numpy').ones({}), timeout={})[0]"
        waiting = [rank.start("eval", sums.format("backend", 3, 15)) for rank in ranks[1:]]
        ranks[0].kill()
        for command in waiting:
            assert isinstance(command.error(), PeerLostError)
            assert command.error().peer == 0
        in_group = [rank.start("eval", sums.format("group", 3, 15)) for rank in ranks[1:]]
        assert [command.result() for command in in_group] == [3.0] * 3
        differing = [
            rank.start("eval", sums.format("group", 3 + rank.rank, 1.0)) for rank in ranks[1:]
        ]
        for command in differing:
            assert isinstance(command.error(), DeadlineExceededError)


@pytest.mark.parametrize("kind", ["world", "group"])
@pytest.mark.parametrize("operations", [0, 2])
def test_a_coordinator_that_leaves_ends_every_later_operation_at_once(kind, operations):
    """Also of groups in which it has begun none, and although it cannot tell who fails later."""
    with tcp_world(5, timeout=TIMEOUT) as world:
        groups = world
        if kind == "group":
            make = [partial(rankwire.SubBackend, backend, range(5)) for backend in world]
            groups = in_parallel(make)
        for _ in range(operations):
            in_parallel([partial(rankwire.barrier, group) for group in groups])
        world[0].close()
        for _ in range(3):
            begin = time.monotonic()
            for run in start(groups, rankwire.barrier, [0]).values():
                error = run.error()
                assert isinstance(error, (ChannelClosedError, CollectiveAbortedError)), repr(error)
                assert "rank 0 has left" in str(error)
            assert time.monotonic() - begin < SOON


# -- processes

COUNTING = """
reported, told, dialled = [], [], []
send, deliver = backend.roll._send, backend.roll.deliver
def counting_send(notice, patience):
    reported.append(notice.state)
    send(notice, patience)
def counting_deliver(notice):
    told.append(notice.state)
    deliver(notice)
backend.roll._send, backend.roll.deliver = counting_send, counting_deliver
open_stream = backend.mesh.connections.open_stream
def counting_open(peer, purpose, service, deadline):
    dialled.append(peer.member.rank)
    return open_stream(peer, purpose, service, deadline)
backend.mesh.connections.open_stream = counting_open
"""
BARRIER = "__import__('rankwire').barrier(backend, timeout=120.0)"
COUNTED = "[len(reported), len(told), dialled]"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_processes_that_wait_for_a_late_one_dial_nobody(transport):
    """48 of them, a minute at most on a busy machine; with memory to share and without."""
    size, late = 48, 1
    with (
        runtime_folder_of_its_own(),
        process_world(size, transport=transport, timeout=MINUTES) as ranks,
    ):
        for done in [rank.start("eval", BARRIER) for rank in ranks]:
            done.result(MINUTES)  # all connections that a barrier needs
        for rank in ranks:
            rank.call("eval", "exec(code, globals())", code=COUNTING)
        waiting = {r.rank: r.start("eval", BARRIER) for r in ranks if r.rank != late}
        time.sleep(3.0)  # the late one is late, and that is the point
        begin = time.monotonic()
        ranks[late].start("eval", BARRIER).result(MINUTES)
        for command in waiting.values():
            command.result(MINUTES)
        assert time.monotonic() - begin < SOON
        for rank in ranks:
            reported, told, dialled = rank.call("eval", COUNTED)
            assert reported + told <= MOST_MESSAGES
            assert told == 0
            assert dialled == []
        for again in [rank.start("eval", BARRIER) for rank in ranks]:
            again.result(MINUTES)


@pytest.mark.slow
def test_a_world_of_a_hundred_processes_survives_a_late_rank():
    """As ``python -m benchmarks.late_rank`` does it with 400."""
    command = [sys.executable, "-m", "benchmarks.late_rank", "--ranks", "100", "--late", "3"]
    root = Path(__file__).parents[2]
    with runtime_folder_of_its_own():
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=MINUTES)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "ranks that failed: 0" in done.stdout
