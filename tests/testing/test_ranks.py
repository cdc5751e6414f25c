"""run_ranks: a function as every rank, in threads or in processes."""

import os
import threading

import pytest

from rankwire import ConfigurationError
from rankwire.testing import in_parallel, run_ranks, simulated_world
from rankwire.testing.ranks import RankFailedError


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


@pytest.mark.parametrize("backend", ["simulated", "tcp", "unix", "auto", simulated_world])
def test_results_come_in_rank_order(backend):
    assert run_ranks(3, describe, "number", backend=backend) == [
        f"number {rank} of 3" for rank in range(3)
    ]


def test_processes_work_the_same():
    assert run_ranks(2, describe, backend="auto", processes=True) == ["rank 0 of 2", "rank 1 of 2"]


def test_the_failing_rank_is_named():
    with pytest.raises(ZeroDivisionError) as info:
        run_ranks(3, fail_on_one)
    assert info.value.__notes__ == ["raised by rank 1"]
    with pytest.raises(RankFailedError, match="ZeroDivisionError: on purpose") as info:
        run_ranks(2, fail_on_one, backend="auto", processes=True)
    assert info.value.rank == 1


def test_a_process_that_dies_is_named():
    with pytest.raises(RankFailedError) as info:
        run_ranks(2, exit_on_one, backend="auto", processes=True)
    assert info.value.rank in (0, 1)  # rank 0 may be the first to say that it lost rank 1


def test_ranks_that_do_not_finish_are_named():
    go_on = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
            in_parallel([lambda: None, lambda: go_on.wait(10)], timeout=0.1)
    finally:
        go_on.set()


def test_wrong_names_are_refused():
    with pytest.raises(ConfigurationError):
        run_ranks(2, describe, backend="carrier pigeon")
    with pytest.raises(ConfigurationError):
        run_ranks(2, describe, processes=True)
