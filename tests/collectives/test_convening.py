"""Many ranks that wait: who is missing is known to all, and it takes a few messages for each."""

import contextlib
import time
from functools import partial

import numpy as np
import pytest

import rankwire
from rankwire.backends.faults import FaultPlan
from rankwire.collectives.convening import _FEW
from rankwire.collectives.sequence import OperationSequence
from rankwire.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    PeerLostError,
    UnsupportedTypeError,
)
from rankwire.testing import in_parallel, simulated_world, tcp_world
from worlds import Running

SOON = 8.0  # seconds; measured: 0.1 to 0.3 on an idle machine
TIMEOUT = 20.0
MINUTES = 120.0
MANY = _FEW + 4
# For each rank, beside the log2(N) of the operation: an answer, the roll, a question near the end
# and its answer, and the failure, there and back. On a busy machine there may be two conveners, and
# more looks. If everyone told everyone it would be 127 of each.
MOST_NOTICES = 60


def counting(size: int):
    """A world whose messages are counted."""
    return simulated_world(size, timeout=TIMEOUT, faults=FaultPlan().kill(0, after=1 << 40))


def notices_of(world, own: int) -> float:
    """Return how many messages a rank has sent beside those of the operation."""
    return sent_by_each(world) - own


def sent_by_each(world) -> float:
    return sum(world[0].network._sent.values()) / len(world)


def start(world, call, absent=()) -> dict[int, Running]:
    return {b.rank: Running(call, b) for b in world if b.rank not in absent}


def check_works(world) -> None:
    for result in in_parallel([partial(rankwire.all_reduce, b, np.ones(2)) for b in world]):
        assert (result == len(world)).all()


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "absent",
    [
        pytest.param((5,), marks=pytest.mark.slow),
        pytest.param((0,), marks=pytest.mark.slow),
        (0, 1, 2, 50),
    ],
)
def test_all_name_exactly_the_missing_at_a_few_messages_for_each(size, absent):
    """Everyone to everyone would be 63 and 127 for each, or more. The first may be missing too."""
    with counting(size) as world:
        # Connecting is most of the work of many ranks in one process.
        in_parallel([partial(rankwire.barrier, backend, timeout=MINUTES) for backend in world])
        before = sent_by_each(world)
        limit = size // 12  # seconds: all of them must have been heard by then, on a busy machine
        runs = start(world, partial(rankwire.barrier, timeout=limit), absent)
        noun = "rank" if len(absent) == 1 else "ranks"
        text = f"no result within {limit} s waiting for {noun} {', '.join(map(str, absent))}"
        for rank, run in runs.items():
            error = run.error()
            assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
            assert text in error.message, (rank, error.message[:300])
        assert notices_of(world, size.bit_length() - 1) - before < MOST_NOTICES


def test_a_rank_that_is_only_late_costs_a_few_messages_for_each():
    with counting(64) as world:

        def run(backend):
            if backend.rank == 7:
                time.sleep(0.5)
            rankwire.barrier(backend)

        in_parallel([partial(run, backend) for backend in world])
        assert notices_of(world, 6) < MOST_NOTICES


@pytest.mark.parametrize("odd", [0, 9])
def test_a_disagreement_of_many_is_found_by_all(odd):
    with counting(64) as world:
        runs = start(world, lambda b: rankwire.all_reduce(b, np.ones(2 + (b.rank == odd))))
        for run in runs.values():
            assert isinstance(run.error(), CollectiveMismatchError)
            assert f"on rank {odd}" in str(run.error())
            assert run.seconds < SOON
        assert notices_of(world, 6) < MOST_NOTICES
        check_works(world)


@pytest.mark.slow
def test_one_of_many_that_gives_up_ends_the_others():
    with counting(64) as world:
        runs = start(
            world,
            lambda b: rankwire.barrier(b, timeout=6.0 if b.rank == 11 else TIMEOUT),
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
        assert notices_of(world, 6) < MOST_NOTICES


def test_one_of_many_that_cannot_begin_ends_the_others():
    with counting(64) as world:
        runs = start(world, lambda b: rankwire.all_reduce(b, [1] if b.rank == 4 else np.ones(2)))
        assert isinstance(runs.pop(4).error(), UnsupportedTypeError)
        for run in runs.values():
            assert isinstance(run.error(), CollectiveAbortedError)
            assert run.error().peer == 4
            assert run.seconds < SOON
        check_works(world)


def test_the_death_of_the_one_that_convenes_ends_the_others():
    with counting(MANY) as world:
        runs = start(world, rankwire.barrier, absent=[3])
        operations = OperationSequence.of(world[5])
        until = time.monotonic() + TIMEOUT
        while operations.convener(0) != 0:  # a higher one may be heard first
            assert time.monotonic() < until
            time.sleep(0.005)
        world[0].network.kill(0)
        died = time.monotonic()
        for run in runs.values():
            assert isinstance(run.error(), PeerLostError)
            assert run.error().peer == 0
            assert run.ended - died < SOON


def test_another_one_convenes_when_the_first_is_done():
    """It has done its part and looks up no more; what one of the others says still reaches all."""

    def steps(x):
        if x.rank == 1:
            time.sleep(0.3)
            x.send_buffers(0, 0, (), 0)
        if x.rank == 0:
            x.receive(1, 0)
        else:
            x.receive(MANY - 1, 1)  # which does not come

    def run(backend):
        limit = 1.0 if backend.rank == 5 else TIMEOUT
        OperationSequence.of(backend).call("waiting", lambda: ("waiting()", steps, False, limit))

    with counting(MANY) as world:
        runs = start(world, run, absent=[MANY - 1])
        runs.pop(0).result()
        late = runs.pop(5)
        assert isinstance(late.error(), DeadlineExceededError)
        for run in runs.values():
            assert isinstance(run.error(), CollectiveAbortedError)
            assert run.error().peer == 5
            assert run.ended - late.ended < SOON


@pytest.mark.slow
def test_many_ranks_over_sockets():
    with tcp_world(_FEW + 2, timeout=TIMEOUT) as world:
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
