"""A world of many processes on one host in which one rank comes late to a barrier.

The ranks form a world, meet in a barrier to which rank 1 comes late, sum an array, and leave.
``python -m benchmarks.late_rank --ranks 400`` prints how long each of these took for the slowest
rank, and how many reports a rank sent to the coordinator. It fails if a rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

import rankwire
from benchmarks.processes import exit_on_sigterm, free_address

LATE_RANK = 1
STEPS = ("form", "barrier", "all_reduce", "leave")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=400)
    parser.add_argument("--late", type=float, default=5.0, help="seconds")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each step")
    chosen = parser.parse_args(arguments)
    exit_on_sigterm()
    begin = time.monotonic()
    reader, writer = os.pipe()
    address = free_address()
    children: list[int] = []
    try:
        for rank in range(chosen.ranks):
            child = os.fork()
            if child == 0:
                os.close(reader)
                os._exit(run_rank(rank, address, chosen, writer))
            children.append(child)
        os.close(writer)
        with open(reader) as lines:  # until all ranks have ended
            results = [json.loads(line) for line in lines]
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(
        f"{chosen.ranks} ranks: {time.monotonic() - begin:.1f} s, rank {LATE_RANK} is "
        f"{chosen.late:g} s late"
    )
    for step in STEPS:
        print(f"  {step}: {max((each[step] for each in results), default=0.0):.2f} s")
    print(f"  reports of a rank: at most {max((each['reports'] for each in results), default=0)}")
    failed = sum(code != 0 for code in codes)
    print(f"  ranks that failed: {failed}")
    return 1 if failed else 0


def run_rank(rank: int, address: str, chosen: argparse.Namespace, writer: int) -> int:
    """Do what one rank does, and write how long its steps took as one line."""
    try:
        times = [time.monotonic()]
        backend = rankwire.TcpBackend(
            rank, chosen.ranks, address, join_timeout=chosen.limit, timeout=chosen.limit
        )
        reports = count_reports(backend)
        times.append(time.monotonic())
        if rank == LATE_RANK:
            time.sleep(chosen.late)
        backend.barrier()
        times.append(time.monotonic())
        total = rankwire.all_reduce(backend, np.full(8, 1.0))
        assert (total == chosen.ranks).all()
        times.append(time.monotonic())
        backend.close()
        times.append(time.monotonic())
        spans = [end - begin for begin, end in pairwise(times)]
        line = json.dumps({**dict(zip(STEPS, spans, strict=True)), "reports": len(reports)})
        os.write(writer, f"{line}\n".encode())
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def count_reports(backend: rankwire.TcpBackend) -> list[str]:
    """Return a list that gets the state of each notice which the rank sends."""
    states: list[str] = []
    report = backend.roll.report

    def counted(notice: object) -> None:
        states.append(getattr(notice, "state", ""))
        report(notice)  # type: ignore[arg-type]

    backend.roll.report = counted  # type: ignore[method-assign]
    return states


if __name__ == "__main__":
    sys.exit(main())
