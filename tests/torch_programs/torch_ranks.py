"""Ranks of torch programs: forked processes with a process group, for the time of one function."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

import rankwire.torch  # noqa: F401  (registers the backend)

LIMIT = 60.0  # seconds for all of it
FORK = multiprocessing.get_context("fork")


class RankError(Exception):
    """A rank raised; its traceback is the text."""


def run_ranks(size, function, *, backend="rankwire", timeout=20.0, killed=()):
    """Run ``function(rank)`` on forked ranks of a process group; return what each returns.

    Args:
        size: How many.
        function: What to run; closures are fine.
        backend: Of torch.
        timeout: The group's, in seconds.
        killed: Ranks that end without a result.
    """

    def be_rank(rank, path):
        dist.init_process_group(
            backend,
            store=dist.FileStore(path, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        result = function(rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        return result

    return run_forked(size, be_rank, killed=killed)


def run_forked(size, be_rank, *, killed=()):
    """Run ``be_rank(rank, path)`` in forked processes; return what each returns.

    ``path`` is of a file that is not there yet, for the ranks to meet in.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            FORK.Process(
                target=_run, args=(be_rank, rank, f"{folder}/store", pipes[rank][1]), daemon=True
            )
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return collect(pipes, killed)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def collect(pipes, killed):
    """Return what each rank has sent; raise what one of them has raised."""
    results = [None] * len(pipes)
    waiting = {pipes[rank][0]: rank for rank in range(len(pipes))}
    while waiting:
        ready = wait(list(waiting), LIMIT)
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} do not come to an end")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                is_good, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                if rank not in killed:
                    raise RankError(f"rank {rank} died") from None
                continue
            if not is_good:
                raise RankError(f"rank {rank}:\n{results[rank]}")
    return results


def _run(be_rank, rank, path, results):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # some operations have newer names
    try:
        outcome = True, be_rank(rank, path)
    except BaseException:
        outcome = False, traceback.format_exc()
    results.send_bytes(pickle.dumps(outcome))  # not ``send``: that shares the memory of tensors
    os._exit(0)


def on_both(size, function, **options):
    """Run the same on Gloo and on rankwire; return both results."""
    return [
        run_ranks(size, function, backend=backend, **options) for backend in ("gloo", "rankwire")
    ]
