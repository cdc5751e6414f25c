"""What a small collective keeps although its way is short: whoever disagrees, fails or is gone.

With two ranks and 8 bytes an operation is one message each way. All that is looked at beside those
messages, or only when they do not come, must still be looked at: every rank is told within a second
or by its next operation, and afterwards all of them work or fail alike.
"""

import contextlib
import time
from contextlib import suppress
from itertools import count

import numpy as np
import pytest

import rankwire
from collectives import small_ones
from collectives.small_ones import Outcome, agreed, attempt
from interrupts import Interrupt, every_interrupt
from rankwire import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
)
from rankwire.testing import simulated_world, tcp_world
from worlds import (
    PATIENCE,
    Running,
    eventually,
    nursery,
    process_world,
    runtime_folder_of_its_own,
)

SOON = 8.0  # seconds; measured: 0.05 to 0.15, on a busy machine more than 1
PROCESSES = ("unix", "tcp")


@pytest.fixture(scope="module", autouse=True)
def shared_nursery():
    with nursery():
        yield


@pytest.fixture(autouse=True)
def folder(shared_nursery):
    """Who is killed leaves the file of its socket here."""
    with runtime_folder_of_its_own():
        yield


# -- ranks in threads and in processes, to be told what to do in the same words


class Thread:
    """A rank of a simulated world."""

    def __init__(self, backend):
        self.rank = backend.rank
        self._backend = backend

    def start(self, function, *args, **options):
        return Running(getattr(small_ones, function), self._backend, *args, **options)

    def kill(self):
        self._backend.network.kill(self.rank)
        return time.monotonic()


class Process:
    """A rank that is a process."""

    def __init__(self, process):
        self.rank = process.rank
        self._process = process
        self.kill = process.kill

    def start(self, function, *args, **options):
        line = f"__import__('collectives.small_ones').small_ones.{function}"
        return self._process.start(
            "eval", f"{line}(backend, *args, **options)", args=args, options=options
        )


@contextlib.contextmanager
def world_of(kind, size):
    """Ranks that have had some operations together."""
    with contextlib.ExitStack() as stack:
        if kind == "simulated":
            world = stack.enter_context(simulated_world(size, timeout=PATIENCE))
            ranks = [Thread(backend) for backend in world]
        else:
            world = stack.enter_context(process_world(size, transport=kind))
            ranks = [Process(process) for process in world]
        check_agreement(ranks)
        yield ranks


# Each kind and each size is shown in `make test`, not each kind in each size.
SHOWN = [("unix", 2), ("unix", 3), ("tcp", 3), ("simulated", 2)]
NOT_SHOWN = [("tcp", 2), ("simulated", 3)]


@pytest.fixture(
    params=[*SHOWN, *(pytest.param(case, marks=pytest.mark.slow) for case in NOT_SHOWN)], ids=str
)
def ranks(request):
    with world_of(*request.param) as ranks:
        yield ranks


def check_agreement(ranks):
    """All ranks work together, and get nothing that is not theirs."""
    first = int(time.monotonic() * 1000) % 100_000
    for running in [rank.start("agree", first) for rank in ranks]:
        assert running.result() == agreed(first, len(ranks))


def attempts(ranks, names, **options) -> list[Outcome]:
    """Let each rank attempt one at the same time."""
    running = [
        rank.start("attempt", name, **options) for rank, name in zip(ranks, names, strict=True)
    ]
    return [each.result() for each in running]


# -- who calls something else ----------------------------------------------------------------------

OTHERS = [  # what all but one call, what that one calls, words of both
    ("all_reduce", "barrier", "all_reduce(sum", "barrier()"),
    ("barrier", "all_reduce", "barrier()", "all_reduce(sum"),
    ("broadcast", "barrier", "broadcast(root 0", "barrier()"),
    ("all_reduce", "broadcast", "all_reduce(sum", "broadcast(root 0"),
    ("all_gather", "all_reduce", "all_gather(", "all_reduce(sum"),
    ("all_reduce", "all_gather_object", "all_reduce(sum", "all_gather_object"),
]
ARGUMENTS = [
    ("all_reduce", "all_reduce int64", "float64", "int64"),
    ("all_reduce two halves", "all_reduce", "float32", "float64"),
    ("all_reduce", "all_reduce another shape", "(1,)", "(1, 1)"),
    ("all_reduce", "all_reduce empty", "(1,)", "(0,)"),
    ("all_reduce", "all_reduce max", "sum", "max"),
    ("all_reduce", "all_reduce ordered", "all_reduce", "ordered"),
    ("all_reduce", "all_reduce large", "(1,)", "(40000,)"),
    ("broadcast", "broadcast root 1", "root 0", "root 1"),
]


@pytest.mark.parametrize("cases", [OTHERS, ARGUMENTS], ids=["another one", "other arguments"])
def test_whatever_one_rank_calls_instead_all_are_told(ranks, cases):
    for turn, (common, odd, *words) in enumerate(cases):
        names = [odd if rank.rank == turn % len(ranks) else common for rank in ranks]
        outcomes = attempts(ranks, names)
        for rank, outcome in enumerate(outcomes):
            error = outcome.error
            assert isinstance(error, CollectiveMismatchError), (names, rank, outcome)
            assert error.rank == rank
            assert error.peer in {*range(len(ranks))} - {rank}
            assert all(word in error.message for word in words), (words, error.message)
            assert outcome.is_untouched
        all_there = max(outcome.began for outcome in outcomes)
        assert max(outcome.ended for outcome in outcomes) - all_there < SOON
    check_agreement(ranks)


def test_after_each_disagreement_the_next_operation_works(ranks):
    for common, odd, *_ in (OTHERS[0], ARGUMENTS[0], ARGUMENTS[4]):
        names = [odd if rank.rank == 1 else common for rank in ranks]
        for outcome in attempts(ranks, names):
            assert isinstance(outcome.error, CollectiveMismatchError)
        check_agreement(ranks)


def test_one_operation_more_on_one_rank_is_found_where_it_is(ranks):
    lists = {0: ["all_reduce", "all_reduce", "barrier"], 1: ["all_reduce", "barrier"]}
    for odd in range(2):
        for place in range(2):
            words = [lists[rank.rank == odd][place] for rank in ranks]
            for outcome in attempts(ranks, words):
                if place == 0:
                    assert outcome.error is None
                else:
                    assert isinstance(outcome.error, CollectiveMismatchError), outcome
        check_agreement(ranks)


def test_what_concerns_one_rank_alone_is_no_disagreement(ranks):
    total = [sum(range(1, len(ranks) + 1))]
    for turn, odd in enumerate(["all_reduce in the background", "all_reduce elsewhere"] * 2):
        names = [odd if rank.rank == turn % 2 else "all_reduce" for rank in ranks]
        assert [outcome.value for outcome in attempts(ranks, names)] == [total] * len(ranks)
    check_agreement(ranks)


def test_a_small_operation_does_not_overtake_one_in_the_background(ranks):
    size = len(ranks)
    running = [rank.start("overtake", 5, in_background=rank.rank != 1) for rank in ranks]
    expected = [(size * (1.0 + n), size * 10.0 * n) for n in range(5)]
    assert [each.result() for each in running] == [expected] * size
    check_agreement(ranks)


def test_a_small_operation_waits_until_one_in_the_background_has_failed(ranks):
    """Else it would be sent as if that had gone well, and nobody else would take it."""
    first, *others = ranks
    before = first.start("epoch").result()
    running = [first.start("fail_and_go_on", timeout=0.12)]
    eventually(lambda: first.start("epoch").result() > before)
    running += [rank.start("fail_and_go_on") for rank in others]
    outcomes = [each.result() for each in running]
    assert isinstance(outcomes[0][0], DeadlineExceededError), outcomes
    for error, _ in outcomes[1:]:
        assert isinstance(error, CollectiveAbortedError), outcomes
        assert error.peer == 0
    assert [value for _, value in outcomes] == [[10.0 * len(ranks)]] * len(ranks)
    check_agreement(ranks)


# -- who is late, gives up or refuses --------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "broadcast"])
def test_a_rank_that_comes_late_gets_what_the_others_get(ranks, name):
    """The others look up and tell each other that they wait; that is no failure, then and later."""
    for late in range(2):
        running = [
            rank.start("attempt", name, after=0.16 if rank.rank == late else 0.0) for rank in ranks
        ]
        outcomes = [each.result() for each in running]
        assert [outcome.error for outcome in outcomes] == [None] * len(ranks)
        values = {"all_reduce": [sum(range(1, len(ranks) + 1))], "broadcast": [1.0]}
        assert [outcome.value for outcome in outcomes] == [values.get(name)] * len(ranks)
        early = [outcome for rank, outcome in enumerate(outcomes) if rank != late]
        if name != "broadcast":
            assert all(outcome.ended >= outcomes[late].began for outcome in early)
        check_agreement(ranks)


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "broadcast"])
def test_a_rank_that_comes_after_another_has_given_up_is_told(ranks, name):
    """What that one had sent is there, and must not pass for a result."""
    for early in range(2):
        (gone, *others) = [ranks[early], *(rank for rank in ranks if rank.rank != early)]
        given_up = gone.start("attempt", name, timeout=0.12).result()
        assert isinstance(given_up.error, DeadlineExceededError), given_up
        assert set(given_up.error.waiting_for) == {rank.rank for rank in others}
        assert given_up.is_untouched
        for rank, outcome in zip(others, attempts(others, [name] * len(others)), strict=True):
            error = outcome.error
            assert isinstance(error, CollectiveAbortedError), (rank.rank, outcome)
            assert (error.rank, error.peer) == (rank.rank, early)
            assert "no result within 0.12 s" in error.message
            assert outcome.ended - outcome.began < SOON
        check_agreement(ranks)


def test_a_rank_that_gives_up_ends_those_that_wait_with_it():
    for kind in (*PROCESSES, "simulated"):
        with world_of(kind, 3) as ranks:
            patient = ranks[0].start("attempt", "all_reduce")
            given_up = ranks[1].start("attempt", "all_reduce", timeout=1.0).result()
            assert isinstance(given_up.error, DeadlineExceededError)
            assert given_up.error.waiting_for == [2]
            outcomes = [patient.result()]
            outcomes += attempts(ranks[2:], ["all_reduce"])
            for outcome in outcomes:
                assert isinstance(outcome.error, CollectiveAbortedError), outcome
                assert outcome.error.peer == 1
                assert outcome.ended - max(given_up.ended, outcome.began) < SOON
            check_agreement(ranks)


def test_what_went_well_on_some_ranks_alone_fails_in_the_next_operation(ranks):
    """A rank leaves while the others have all that they need; they are told too late for this."""
    leaving, *others = ranks
    for _ in range(3):
        running = [rank.start("attempt", "all_reduce", after=0.1) for rank in others]
        given_up = leaving.start("attempt", "all_reduce", timeout=0.1).result()
        outcomes = [each.result() for each in running]
        if given_up.error is None or all(outcome.error for outcome in outcomes):
            check_agreement(ranks)
            continue
        for outcome in attempts(ranks, ["all_reduce"] * len(ranks)):
            assert isinstance(outcome.error, CollectiveAbortedError), outcome
        check_agreement(ranks)


def test_a_rank_that_refuses_its_arguments_ends_the_others(ranks):
    for name in ("all_reduce", "broadcast", "all_gather"):
        names = [f"{name} wrong" if rank.rank == 1 else name for rank in ranks]
        for rank, outcome in enumerate(attempts(ranks, names)):
            if rank == 1:
                assert isinstance(outcome.error, (ConfigurationError, TypeError)), outcome
            else:
                assert isinstance(outcome.error, CollectiveAbortedError), outcome
                assert outcome.error.peer == 1
                assert outcome.ended - outcome.began < SOON
                assert outcome.is_untouched
        check_agreement(ranks)


# -- who dies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "broadcast"])
def test_a_rank_that_dies_is_named_by_all_others_from_then_on(ranks, name):
    *others, victim = ranks
    waiting = [rank.start("attempt", name) for rank in others]
    time.sleep(0.02)  # spinning or asleep
    killed = victim.kill()
    for outcome in [each.result() for each in waiting]:
        assert isinstance(outcome.error, PeerLostError), outcome
        assert outcome.error.peer == victim.rank
        assert outcome.ended - killed < SOON
        assert outcome.is_untouched
    for outcome in attempts(others, ["all_reduce"] * len(others)):
        assert isinstance(outcome.error, PeerLostError), outcome
        assert outcome.error.peer == victim.rank
        assert outcome.ended - outcome.began < SOON


def test_a_rank_that_dies_in_a_stream_of_small_operations_is_named(ranks):
    victim = ranks[-1]
    running = [rank.start("for_ever") for rank in ranks]
    time.sleep(0.05)
    killed = victim.kill()
    for each in running[:-1]:
        error = each.error()
        assert isinstance(error, PeerLostError), repr(error)
        assert error.peer == victim.rank
        assert each.ended - killed < SOON
    if isinstance(victim, Thread):
        assert isinstance(running[-1].error(), PeerLostError)


# -- who is interrupted ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_in_a_small_operation_leaves_both_ranks_in_step():
    """A rank that had done its part is told in its next operation; then all are in step again."""
    numbers = count(1000)

    def until_the_last_one():
        outcomes = []
        while not outcomes or (outcomes[-1].value or [0])[0] < 1000:
            outcomes.append(attempt(far, "all_reduce"))
        return outcomes

    def run(interrupting):
        others = Running(until_the_last_one)
        with suppress(Interrupt), interrupting:
            rankwire.all_reduce(near, np.ones(1))
        last = float(next(numbers))
        errors = []
        for _ in range(3):
            try:
                value = rankwire.all_reduce(near, np.full(1, last), timeout=PATIENCE)[0]
                break
            except CollectiveAbortedError as error:  # it had gone well there
                errors.append(error)
        assert value == last + 2
        outcomes = others.result()
        assert outcomes[-1].value == [value]
        assert len(errors) <= 1
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert len(failed) <= 1
        # A rank that was interrupted before it could tell is found to be one further.
        told = (CollectiveAbortedError, CollectiveMismatchError)
        assert all(isinstance(error, told) for error in failed), failed

    with tcp_world(2, timeout=PATIENCE) as (near, far):
        # Every 9th place: it takes the other rank 50 ms to look up.
        every_interrupt(run, step=9)
