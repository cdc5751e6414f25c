"""What runs inside a child process: one candidate, either serving or calling.

Not for use by hand; ``benchmarks.measure`` starts it. The server writes the line ``ready``, the
client one line of JSON. A candidate's own prints go to stderr and cannot disturb that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TextIO

import numpy as np

from benchmarks.candidates import CANDIDATES, Candidate, Client
from benchmarks.processes import die_with_parent, exit_on_sigterm, take_stdout

MIB = 1 << 20

# Share of the measured time spent before it: first calls dial, import, grow pools, settle clocks.
WARM_UP_SHARE = 0.25
WARM_UP_CALLS = 50
# A median of fewer says little; one of more costs time only.
SMALLEST_SAMPLE = 20
# Long enough to guess the rate that fixes how many calls the timed run makes.
RATE_PROBE_CALLS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("serve", "call"))
    parser.add_argument("candidate", choices=[candidate.name for candidate in CANDIDATES])
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--large-repeats", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=64)
    arguments = parser.parse_args()

    die_with_parent()
    exit_on_sigterm()
    report = take_stdout()
    candidate = next(each for each in CANDIDATES if each.name == arguments.candidate)
    if arguments.role == "serve":
        serve(candidate, arguments.address, report)
    else:
        call(candidate, arguments, report)


def serve(candidate: Candidate, address: str, report: TextIO) -> None:
    module = candidate.load()
    module.serve(address, lambda: print("ready", file=report, flush=True), **candidate.options)


def call(candidate: Candidate, arguments: argparse.Namespace, report: TextIO) -> None:
    module = candidate.load()
    client: Client = module.Client(arguments.address, **candidate.options)
    metrics = measure(
        client,
        seconds=arguments.seconds,
        large_repeats=arguments.large_repeats if candidate.echoes_64mib else 0,
        in_flight=arguments.in_flight,
    )
    # First the figures, then the closing: a peer that hangs in it must not lose them.
    print(json.dumps(metrics), file=report, flush=True)
    client.close()


def measure(
    client: Client, *, seconds: float, large_repeats: int, in_flight: int
) -> dict[str, float]:
    """Take all figures of one candidate, times in seconds; 0 ``large_repeats`` leave 64 MiB out."""
    noop = sample(client.noop, seconds=seconds)
    figures = {
        "noop_p50": float(np.percentile(noop, 50)),
        "noop_p99": float(np.percentile(noop, 99)),
        "calls_per_second": call_rate(client, seconds=seconds, in_flight=in_flight),
        "echo_1mib_p50": median(echo(client, MIB, seconds=seconds / 2)),
    }
    if large_repeats:
        figures["echo_64mib_p50"] = median(echo(client, 64 * MIB, repeats=large_repeats))
    return figures


def echo(
    client: Client, nbytes: int, *, seconds: float = 0.0, repeats: int | None = None
) -> list[float]:
    """Time echoes of a float32 array, after one that is checked and not timed."""
    array = np.random.default_rng(seed=nbytes).standard_normal(nbytes // 4, dtype=np.float32)
    payload = client.pack(array)
    if not np.array_equal(client.unpack(client.echo(payload)), array):
        raise AssertionError(f"the echo of {nbytes} bytes came back changed")
    if repeats is None:
        return sample(lambda: client.echo(payload), seconds=seconds)
    return [clock(lambda: client.echo(payload)) for _ in range(repeats)]


def sample(function: Callable[[], object], *, seconds: float) -> list[float]:
    """Call for about that long and return the time of each call."""
    warm_up_end = perf_counter() + seconds * WARM_UP_SHARE
    for _ in range(WARM_UP_CALLS):
        function()
        if perf_counter() > warm_up_end:
            break
    while perf_counter() < warm_up_end:
        function()

    times: list[float] = []
    before = perf_counter()
    end = before + seconds
    while before < end or len(times) < SMALLEST_SAMPLE:
        function()
        # One reading ends this call and starts the next: the loop itself is in the figure, 0.1 us.
        after = perf_counter()
        times.append(after - before)
        before = after
    return times


def clock(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


def call_rate(client: Client, *, seconds: float, in_flight: int) -> float:
    """Calls per second from this thread with ``in_flight`` of them always under way."""
    client.many(RATE_PROBE_CALLS, in_flight)
    probe = clock(lambda: client.many(RATE_PROBE_CALLS, in_flight))
    count = max(RATE_PROBE_CALLS, int(RATE_PROBE_CALLS / probe * seconds))
    return count / clock(lambda: client.many(count, in_flight))


if __name__ == "__main__":
    main()
