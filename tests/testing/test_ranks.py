"""run_ranks: a function as every rank, in threads or in processes, and what becomes of each."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import rankwire
from rankwire import ConfigurationError, FaultPlan, PeerLostError
from rankwire.testing import (
    RankFailedError,
    RankOutcome,
    RanksStuckError,
    in_parallel,
    run_ranks,
    simulated_world,
)


def describe(backend, word="rank"):
    backend.barrier()
    return f"{word} {backend.rank} of {backend.world_size}"


def fail_on_one(backend):
    if backend.rank == 1:
        raise ZeroDivisionError("on purpose")
    return backend.rank


def exit_on_one(backend):
    if backend.rank == 1:
        os._exit(7)
    backend.recv(1, timeout=20)


def be_killed_on_one(backend):
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        backend.recv(1)
    except PeerLostError as error:
        return error.peer


def wait_for_one(backend):
    if backend.rank == 1:
        raise ZeroDivisionError("on purpose")
    backend.recv(1)


def sleep_long(backend):
    if backend.rank == 1:
        time.sleep(60)


class Unsendable(Exception):
    """An error that can be pickled and not unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_unsendable(backend):
    raise Unsendable("this", "that")


def return_unsendable(backend):
    return threading.Lock()


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["simulated", "tcp", "unix", "auto", simulated_world, None])
def test_results_come_in_rank_order(backend):
    assert run_ranks(3, describe, "number", backend=backend) == [
        f"number {rank} of 3" for rank in range(3)
    ]


def test_processes_work_the_same():
    assert run_ranks(2, describe, processes=True) == ["rank 0 of 2", "rank 1 of 2"]


def test_an_outcome_for_each_rank_whatever_becomes_of_it():
    zero, one, two = run_ranks(3, fail_on_one, outcomes=True)
    assert zero == RankOutcome(0, 0)
    assert zero.returned
    assert zero.result() == 0
    assert isinstance(one.error, ZeroDivisionError)
    assert not one.returned
    assert not one.killed
    assert two.value == 2
    with pytest.raises(RankFailedError, match="rank 1 failed: ZeroDivisionError: on purpose"):
        one.result()


def test_outcomes_of_processes_have_the_errors_themselves():
    zero, one = run_ranks(2, wait_for_one, processes=True, outcomes=True)
    assert isinstance(one.error, ZeroDivisionError)
    assert "in wait_for_one" in one.remote_traceback
    assert isinstance(zero.error, PeerLostError)
    assert zero.error.peer == 1


# -- failures --------------------------------------------------------------------------------------


def test_the_failing_rank_is_named():
    with pytest.raises(ZeroDivisionError) as info:
        run_ranks(3, fail_on_one)
    assert info.value.__notes__ == ["raised by rank 1"]
    with pytest.raises(RankFailedError, match="ZeroDivisionError: on purpose") as info:
        run_ranks(2, fail_on_one, processes=True)
    assert info.value.rank == 1
    assert [outcome.rank for outcome in info.value.outcomes] == [0, 1]


@pytest.mark.parametrize("processes", [False, True])
def test_the_rank_whose_failure_began_it_is_blamed(processes):
    with pytest.raises((ZeroDivisionError, RankFailedError), match="on purpose"):
        run_ranks(3, wait_for_one, processes=processes)


def test_a_process_that_dies_is_named():
    with pytest.raises(RankFailedError, match="exit code 7") as info:
        run_ranks(2, exit_on_one, processes=True)
    assert info.value.rank == 1
    assert not info.value.killed


def test_errors_and_results_that_cannot_travel_are_told_as_text():
    (outcome,) = run_ranks(1, raise_unsendable, processes=True, outcomes=True)
    assert isinstance(outcome.error, RankFailedError)
    assert "Unsendable: this and that" in str(outcome.error)
    assert "in raise_unsendable" in outcome.error.remote_traceback
    with pytest.raises(RankFailedError, match=r"its result, of type _thread\.lock, cannot be sent"):
        run_ranks(1, return_unsendable, processes=True)


def test_wrong_names_are_refused():
    with pytest.raises(ConfigurationError):
        run_ranks(2, describe, backend="carrier pigeon")
    with pytest.raises(ConfigurationError):
        run_ranks(2, describe, backend="simulated", processes=True)
    with pytest.raises(ConfigurationError, match="cannot be sent to another process"):
        run_ranks(2, describe, threading.Lock(), processes=True)


# -- kills -----------------------------------------------------------------------------------------


def test_a_killed_rank_is_distinguished_from_one_that_raised():
    def send_twice(backend):
        if backend.rank == 1:
            backend.send(b"first", 0)
            backend.send(b"second", 0)
            return "alive"
        assert backend.recv(1) == b"first"
        with pytest.raises(PeerLostError):
            backend.recv(1)
        raise ZeroDivisionError

    zero, one = run_ranks(2, send_twice, outcomes=True, faults=FaultPlan().kill(1, after=1))
    assert isinstance(zero.error, ZeroDivisionError)
    assert not zero.killed
    assert one == RankOutcome(1, killed=True, reason="it was killed")


def test_a_rank_is_reported_as_killed_also_if_its_own_thread_sees_that_first():
    def send_twice(backend):
        if backend.rank == 1:
            backend.send(b"first", 0)
            backend.send(b"second", 0)
        backend.recv(1)
        with pytest.raises(PeerLostError):
            backend.recv(1)

    for _ in range(50):
        _, one = run_ranks(2, send_twice, outcomes=True, faults=FaultPlan().kill(1, after=1))
        assert one.killed, one


def test_a_killed_rank_that_goes_on_computing_is_not_waited_for():
    go_on = threading.Event()

    def compute(backend):
        if backend.rank == 1:
            go_on.wait(60)
        return backend.rank

    try:
        outcomes = run_ranks(
            3, compute, outcomes=True, faults=FaultPlan().kill(1, after_seconds=0.05)
        )
    finally:
        go_on.set()
    assert [outcome.killed for outcome in outcomes] == [False, True, False]
    assert [outcome.value for outcome in outcomes] == [0, None, 2]


def test_without_outcomes_a_killed_rank_is_an_error():
    with pytest.raises(RankFailedError, match="rank 1 failed: it was killed") as info:
        run_ranks(3, lambda backend: backend.rank, faults=FaultPlan().kill(1))
    assert info.value.killed
    assert [outcome.value for outcome in info.value.outcomes] == [0, None, 2]


def test_a_process_that_is_killed_is_reported_as_killed():
    zero, one = run_ranks(2, be_killed_on_one, processes=True, outcomes=True)
    assert zero.value == 1
    assert one.killed
    assert one.reason == "its process was killed by SIGKILL"


# -- leaving ---------------------------------------------------------------------------------------


def test_a_rank_that_returns_has_left():
    def leave_first(backend):
        if backend.rank == 1:
            return None
        with pytest.raises(rankwire.ChannelClosedError):
            backend.recv(1)
        return backend.alive

    assert run_ranks(2, leave_first) == [(0,), None]


@pytest.mark.parametrize("backend", ["simulated", "auto"])
def test_what_a_rank_sent_before_it_returned_arrives(backend):
    def send_and_leave(backend):
        if backend.rank == 1:
            backend.send_array(np.arange(1000), 0)
            return None
        time.sleep(0.01)
        return int(backend.recv_array(1).sum())

    assert run_ranks(2, send_and_leave, backend=backend) == [499500, None]


# -- limits ----------------------------------------------------------------------------------------


def test_an_operation_that_hangs_says_so_before_the_limit_passes():
    def wait_in_vain(backend):
        if backend.rank == 0:
            with pytest.raises(rankwire.DeadlineExceededError) as info:
                backend.recv(1)
            backend.send(b"go", 1)
            return info.value.waiting_for
        return backend.recv(0, timeout=20)[:0]

    assert run_ranks(2, wait_in_vain, timeout=0.1) == [[1], b""]


def test_a_limit_that_passes_shows_the_stacks_of_unfinished_ranks():
    go_on = threading.Event()

    def hang_here(backend):
        if backend.rank == 1:
            go_on.wait(60)

    try:
        with pytest.raises(RanksStuckError, match=r"ranks \[1\] did not finish") as info:
            run_ranks(2, hang_here, limit=0.1)
    finally:
        go_on.set()
    assert "in hang_here" in str(info.value)
    assert "go_on.wait(60)" in info.value.stacks[1]
    assert isinstance(info.value, TimeoutError)
    assert info.value.outcomes == [RankOutcome(0)]


@pytest.mark.slow
def test_a_limit_that_passes_shows_the_stacks_of_processes():
    with pytest.raises(RanksStuckError) as info:
        run_ranks(2, sleep_long, processes=True, limit=5.0)
    assert 1 in info.value.ranks
    assert "in sleep_long" in info.value.stacks[1]


def test_a_failure_counts_more_than_the_ranks_that_are_stuck_after_it():
    go_on = threading.Event()

    def fail_or_hang(backend):
        if backend.rank == 1:
            raise ZeroDivisionError
        go_on.wait(60)

    try:
        with pytest.raises(ZeroDivisionError) as info:
            run_ranks(2, fail_or_hang, limit=0.2)
    finally:
        go_on.set()
    assert "ranks [0] did not finish" in info.value.__notes__[0]


def test_ranks_in_parallel_that_do_not_finish_are_named():
    go_on = threading.Event()
    try:
        with pytest.raises(RanksStuckError, match=r"ranks \[1\]") as info:
            in_parallel([lambda: None, lambda: go_on.wait(10)], timeout=0.1)
    finally:
        go_on.set()
    assert "go_on.wait(10)" in info.value.stacks[1]


# -- functions without a module --------------------------------------------------------------------

PROGRAM = """
from rankwire.testing import run_ranks
import dataclasses

@dataclasses.dataclass
class Answer:
    rank: int

factor = 10

def helper(rank):
    return Answer(factor * rank)

def main(backend):
    backend.barrier()
    return helper(backend.rank)

print(run_ranks(2, main, processes=True))
print(run_ranks(2, lambda backend: backend.world_size, processes=True))
"""
PRINTED = "[Answer(rank=0), Answer(rank=10)]\n[2, 2]\n"


@pytest.mark.parametrize(
    "how",
    [
        "stdin",
        pytest.param("script", marks=pytest.mark.slow),
        pytest.param("command", marks=pytest.mark.slow),
    ],
)
def test_functions_of_main_run_in_processes_and_need_no_guard(how, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    args = {"script": [str(script)], "stdin": ["-"], "command": ["-c", PROGRAM]}[how]
    done = subprocess.run(
        [sys.executable, *args],
        input=PROGRAM if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.stdout, done.stderr) == (PRINTED, "")
