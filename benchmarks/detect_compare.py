"""How long until a waiting operation ends when its peer is killed, or stopped.

Two ranks on this host; one waits for the other in a call or in a collective, with the default
settings of each library; then the other gets SIGKILL or SIGSTOP. The time is from the signal to the
end of the operation on the survivor, by the clock that all processes of a host share.

    python -m benchmarks.detect_compare --trials 10 --stop-trials 1

An operation that has not ended after the cap is written as longer than that.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from benchmarks.processes import free_address

KILL_CAP, STOP_CAP = 60.0, 60.0
START_LIMIT = 60.0
# The survivor says that it waits just before it does; then it takes this long to really wait.
SETTLE = 0.5

# Each program is given its rank and the address; rank 1 is the one that gets the signal.
_BEGIN = """
import sys, time
rank, address = int(sys.argv[1]), sys.argv[2]
def say(word):
    print(word, flush=True)
def wait(operation):
    say("waits")
    try:
        operation()
        word = "nothing"
    except BaseException as error:
        word = type(error).__name__
    say(f"{time.monotonic()} {word}")
"""
_END = """
if rank == 1:
    say("waits")
    time.sleep(1000)
"""

PROGRAMS = {
    ("rankwire", "call"): """
from rankwire import RpcAgent, TcpBackend
backend = TcpBackend(rank, 2, address)
agent = RpcAgent(backend)
agent.register("nap", time.sleep)
if rank == 0:
    wait(lambda: agent.rpc_sync(1, "nap", 1000))
""",
    ("rankwire", "all-reduce"): """
import numpy
from rankwire import TcpBackend, all_reduce
backend = TcpBackend(rank, 2, address)
all_reduce(backend, numpy.ones(4))
if rank == 0:
    wait(lambda: all_reduce(backend, numpy.ones(4)))
""",
    ("torch RPC", "call"): """
import torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{address}")
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    wait(lambda: rpc.rpc_sync("rank1", time.sleep, args=(1000,)))
""",
    ("torch Gloo", "all-reduce"): """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 0:
    wait(lambda: dist.all_reduce(torch.ones(4)))
""",
}


class Rank:
    """A process that runs a program, and tells by lines what happens."""

    def __init__(self, program: str, rank: int, address: str) -> None:
        # Its errors are expected, and torch writes many lines about them.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN + program + _END, str(rank), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def line(self, limit: float) -> str | None:
        """Return the next line; None if there is none within the limit, or the process ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit)[0]:
            return None
        return self._process.stdout.readline().decode().strip() or None

    def signal(self, number: int) -> float:
        now = time.monotonic()
        os.kill(self._process.pid, number)
        return now

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate()


def measure(program: str, number: signal.Signals, cap: float) -> tuple[float | None, str]:
    """Return the seconds until the survivor's operation ended, or None, and by what."""
    address = free_address()
    ranks = [Rank(program, rank, address) for rank in (0, 1)]
    try:
        for rank in ranks:
            if rank.line(START_LIMIT) != "waits":
                raise RuntimeError("a rank did not start")
        time.sleep(SETTLE)
        began = ranks[1].signal(number)
        line = ranks[0].line(cap)
        if line is None:
            return None, ""
        ended, _, error = line.partition(" ")
        return float(ended) - began, error
    finally:
        for rank in ranks:
            rank.close()


def table(trials: int, stop_trials: int, cap: float) -> str:
    """Measure everything and return it as Markdown."""
    lines = [
        "| library | waits in | SIGKILL: p50 | SIGKILL: max | ends by | SIGSTOP: p50 | ends by |",
        "|---|---|---|---|---|---|---|",
    ]
    for (library, operation), program in PROGRAMS.items():
        kills = [measure(program, signal.SIGKILL, KILL_CAP) for _ in range(trials)]
        stops = [measure(program, signal.SIGSTOP, cap) for _ in range(stop_trials)]
        cells = [
            library,
            operation,
            _typical(kills, KILL_CAP),
            _worst(kills, KILL_CAP),
            _errors(kills),
            _typical(stops, cap),
            _errors(stops),
        ]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    counts = f"{trials} kills and {stop_trials} stops each"
    return "\n".join(lines) + f"\n\n{counts}; default settings; two ranks on one host.\n"


Outcome = tuple[float | None, str]


def _typical(outcomes: list[Outcome], cap: float) -> str:
    return _text(median(_seconds(outcomes)), cap)


def _worst(outcomes: list[Outcome], cap: float) -> str:
    return _text(max(_seconds(outcomes)), cap)


def _seconds(outcomes: list[Outcome]) -> list[float]:
    return [float("inf") if seconds is None else seconds for seconds, _ in outcomes]


def _text(seconds: float, cap: float) -> str:
    if seconds == float("inf"):
        return f"> {cap:g} s"
    return f"{seconds * 1000:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _errors(outcomes: list[Outcome]) -> str:
    return (
        ", ".join(sorted({f"`{error}`" for _, error in outcomes if error})) or "not within the cap"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--stop-trials", type=int, default=2)
    parser.add_argument("--cap", type=float, default=STOP_CAP, help="seconds to wait after SIGSTOP")
    parser.add_argument("--out", type=Path, help="write the table there, not to the output")
    options = parser.parse_args()
    text = table(options.trials, options.stop_trials, options.cap)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
