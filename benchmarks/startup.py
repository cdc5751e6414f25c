"""How long until rankwire can be used: its import, and a world of 8 local ranks.

Run it alone with ``python -m benchmarks.startup``; ``benchmarks.run`` includes it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

from benchmarks.processes import Child, ChildError, exit_on_sigterm, free_address
from benchmarks.results import Startup

WORLD_SIZE = 8
TIMEOUT = 60.0

IMPORT_PROGRAM = """\
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, flush=True)
"""
FLOOR_PROGRAM = """\
import sys, time, numpy
print(time.monotonic(), flush=True)
sys.stdin.read()
"""


def measure_startup(
    *, import_repeats: int, world_repeats: int, on_step: Callable[[], None] = lambda: None
) -> Startup:
    """Take every figure, interleaved, ``on_step`` after each of ``count_steps`` steps.

    Raises:
        ChildError: a process died or did not answer in time.
    """
    numpy_times, rankwire_times = [], []
    # The first pair compiles bytecode and fills the page cache; it is not counted.
    for repeat in range(import_repeats + 1):
        pair = time_import("numpy"), time_import("rankwire")
        if repeat > 0:
            numpy_times.append(pair[0])
            rankwire_times.append(pair[1])
        on_step()
    floor_times, world_times = [], []
    for _ in range(world_repeats):
        floor_times.append(time_processes([("-c", FLOOR_PROGRAM)] * WORLD_SIZE))
        world_times.append(time_processes(world_programs(WORLD_SIZE)))
        on_step()
    return Startup(
        import_numpy=median(numpy_times),
        import_rankwire=median(rankwire_times),
        import_over_numpy=median(rankwire_times) - median(numpy_times),
        world_size=WORLD_SIZE,
        world_ready=median(world_times),
        world_floor=median(floor_times),
    )


def count_steps(*, import_repeats: int, world_repeats: int) -> int:
    return import_repeats + 1 + world_repeats


def time_import(module: str) -> float:
    """Seconds the import takes in a fresh interpreter, without the interpreter's own start."""
    with Child(("-c", IMPORT_PROGRAM.format(module=module))) as child:
        return float(child.read_line(TIMEOUT))


def time_processes(programs: Sequence[Sequence[str]]) -> float:
    """Seconds from before the first start until the last process said it was ready."""
    with ExitStack() as stack:
        start = time.monotonic()
        children = [stack.enter_context(Child(program)) for program in programs]
        ready = [float(child.read_line(TIMEOUT)) for child in children]
        # All at once, so that no rank sees another one vanish before it closes itself.
        for child in children:
            child.close_stdin()
        for child in children:
            child.wait(TIMEOUT)
    return max(ready) - start


def world_programs(world_size: int) -> list[tuple[str, ...]]:
    address = free_address()
    return [
        ("-m", "benchmarks.ready_rank", str(rank), str(world_size), address)
        for rank in range(world_size)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--import-repeats", type=int, default=15, metavar="N")
    parser.add_argument("--world-repeats", type=int, default=5, metavar="N")
    arguments = parser.parse_args()
    exit_on_sigterm()
    if importlib.util.find_spec("rankwire") is None:
        print("rankwire is not installed here: pip install -e .")
        return 1
    try:
        startup = measure_startup(
            import_repeats=arguments.import_repeats, world_repeats=arguments.world_repeats
        )
    except ChildError as error:
        print(f"{error.stderr}\n{error.reason}", file=sys.stderr)
        return 1
    print(f"import numpy       {startup.import_numpy * 1e3:7.1f} ms")
    print(f"import rankwire    {startup.import_rankwire * 1e3:7.1f} ms")
    print(f"  beyond numpy     {startup.import_over_numpy * 1e3:7.1f} ms   (target: 60 ms)")
    print(f"world of {startup.world_size} ready   {startup.world_ready:7.2f} s    (target: 2 s)")
    print(f"  numpy alone      {startup.world_floor:7.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
