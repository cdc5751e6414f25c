"""What runs inside a child process: all ranks of one world of one candidate.

Not for use by hand; ``benchmarks.collectives.measure`` starts it. Rank 0 writes one line of JSON a
figure, ``[key, seconds]``. A candidate's own prints go to stderr and cannot disturb that.

The process becomes the candidate's own launcher if there is one. Otherwise it imports the library
once and forks the ranks, which is safe since nothing has been used yet: 16 ranks that each import
torch would take 10 s on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from statistics import median
from time import perf_counter
from typing import TextIO

import numpy as np

from benchmarks.collectives.candidates import CANDIDATES, Candidate, Rank
from benchmarks.collectives.exercises import prepare
from benchmarks.collectives.figures import MIB, Figure, figures_of
from benchmarks.processes import die_with_parent, exit_on_sigterm, take_stdout

# From this size on the ranks meet before each repeat, outside the clock, to start together. Smaller
# operations follow each other at once: there, leaving a barrier would cost more than what is timed.
MEETING_NBYTES = MIB
# Share of the measured time spent before it: first calls dial, grow pools, settle clocks.
WARM_UP_SHARE = 0.25
# Enough to guess how many repeats fill the time; at 16 ranks a small one may already take 50 ms.
SMALL_PROBES = 10
LARGE_PROBES = 2
# float32, in which the ranks agree on it, still counts exactly here.
MOST_REPEATS = 100_000
# Time for the others to say what they know when one rank has failed.
LAST_WORDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("candidate", choices=[candidate.name for candidate in CANDIDATES])
    parser.add_argument("world_size", type=int)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--fewest-repeats", type=int, default=5)
    parser.add_argument("--launched", action="store_true", help="be one rank, not the world")
    arguments = parser.parse_args()

    candidate = next(each for each in CANDIDATES if each.name == arguments.candidate)
    if candidate.launcher and not arguments.launched:
        become_launcher(candidate, arguments)
    report = take_stdout()
    if arguments.launched:
        be_rank(candidate, 0, arguments, report)
    else:
        fork_ranks(candidate, arguments, report)


def become_launcher(candidate: Candidate, arguments: argparse.Namespace) -> None:
    """Replace this process by the candidate's launcher, which starts this module as every rank."""
    # It outlives the change of program, so that a launcher cannot outlive the harness either.
    die_with_parent()
    program = (sys.executable, *candidate.runner, "-m", "benchmarks.collectives.child")
    command = (*candidate.launcher, str(arguments.world_size), *program, *sys.argv[1:])
    os.execvp(command[0], (*command, "--launched"))


def fork_ranks(candidate: Candidate, arguments: argparse.Namespace, report: TextIO) -> None:
    """Run every rank in a process of its own; when one fails, end the others."""
    die_with_parent()
    exit_on_sigterm()
    candidate.load()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=be_rank,
            args=(candidate, rank, arguments, report),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank in range(arguments.world_size)
    ]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int)
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                wait(list(running), LAST_WORDS)
                # Not SIGTERM: a rank that waits inside a C library would never see it.
                for other in running.values():
                    other.kill()
                sys.exit(f"{process.name} ended with exit code {process.exitcode}")


def be_rank(
    candidate: Candidate, number: int, arguments: argparse.Namespace, report: TextIO
) -> None:
    die_with_parent()
    exit_on_sigterm()
    rank: Rank = candidate.load().Rank(number, arguments.world_size, arguments.address)
    for figure in figures_of(arguments.world_size):
        seconds = measure(rank, figure, seconds=arguments.seconds, fewest=arguments.fewest_repeats)
        if rank.rank == 0:
            print(json.dumps([figure.key, seconds]), file=report, flush=True)
    # Nobody leaves while others still need it.
    rank.barrier()
    rank.close()


def measure(rank: Rank, figure: Figure, *, seconds: float, fewest: int) -> float:
    """Return the median time of one operation, by this rank's clock."""
    exercise = prepare(rank, figure)
    exercise.run()
    exercise.verify()
    is_large = figure.nbytes >= MEETING_NBYTES
    time_repeats = time_meeting if is_large else time_following
    probe = median(time_repeats(rank, exercise.run, LARGE_PROBES if is_large else SMALL_PROBES))
    count = min(max(fewest, int(seconds / probe)), MOST_REPEATS)
    # Everyone goes by the clock of rank 0, or the last repeats would have too few ranks.
    count = agree(rank, count)
    time_repeats(rank, exercise.run, int(count * WARM_UP_SHARE))
    return median(time_repeats(rank, exercise.run, count))


def time_following(rank: Rank, repeat: Callable[[], object], count: int) -> list[float]:
    """Time repeats one after the other; each is over when the next one can begin."""
    times = []
    before = perf_counter()
    for _ in range(count):
        repeat()
        # One reading ends this repeat and starts the next: the loop is in the figure, 0.1 us.
        after = perf_counter()
        times.append(after - before)
        before = after
    return times


def time_meeting(rank: Rank, repeat: Callable[[], object], count: int) -> list[float]:
    """Time repeats that all ranks start together."""
    times = []
    for _ in range(count):
        rank.barrier()
        before = perf_counter()
        repeat()
        times.append(perf_counter() - before)
    return times


def agree(rank: Rank, count: int) -> int:
    """Return what rank 0 passed."""
    value = np.array([count if rank.rank == 0 else 0, 0], dtype=np.float32)
    rank.all_reduce(rank.pack(value))
    return int(value[0])


if __name__ == "__main__":
    main()
