"""``rankwire doctor``: which ranks of a world reach each other, how fast, and what to change.

Every rank of the world runs this module, started by any launcher. Rank 0 makes the pairs measure
one at a time, so that they do not disturb each other, and prints the ``diagnosis``. There is no
barrier, because ranks may not reach each other.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from rankwire import __version__
from rankwire.backends.connect import connect
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import RankwireError
from rankwire.launch.diagnosis import Cell, Facts, Report, diagnose
from rankwire.rendezvous.runtime_dir import namespace

DEFAULT_NBYTES = 64 << 20
_ROUND_TRIPS = 300
_WARM_UP = 30
_REPEATS = 3
_PAIR_LIMIT = 30.0  # seconds after which the ranks of a pair count as unreachable
_SLOWEST = 10e6  # bytes per second; large messages on a slower link time out
_T = TypeVar("_T")
_ORDER, _RESULT, _PING, _BULK = 1, 2, 3, 4
_WIDEST = 12  # ranks; a matrix for more is wider than a screen


class _Order(msgspec.Struct):
    """An order to measure with a peer, or to stop if None."""

    peer: int | None
    is_first: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as one rank of the examined world; return the exit code, 1 if something is bad."""
    parser = argparse.ArgumentParser("rankwire.launch.doctor", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print values instead of a table")
    parser.add_argument("--nbytes", type=int, default=DEFAULT_NBYTES, help="size of large messages")
    options = parser.parse_args(arguments)
    # Raised above our own limit, so that it does not end the measurement.
    with connect(max_message_nbytes=max(options.nbytes, DEFAULT_NBYTES)) as backend:
        if backend.rank != 0:
            _obey(backend, options.nbytes)
            return 0
        report = diagnose(*_examine(backend, options.nbytes))
    if options.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report)
    return 0 if report.is_well else 1


def _examine(backend: TcpBackend, nbytes: int) -> tuple[list[Facts], list[Cell]]:
    facts, cells = [_facts(backend)], []
    said_at = REAL_TIME.now()
    unreached: set[int] = set()
    for one, other in combinations(range(backend.world_size), 2):
        if unreached & {one, other}:
            continue
        try:
            _give_order(backend, other, _Order(one))
            if one == 0:
                cells.append(_measure(backend, other, nbytes, is_first=True))
                facts.append(_result(backend, other, Facts, nbytes))
            else:
                _give_order(backend, one, _Order(other, is_first=True))
                cells.append(_result(backend, one, Cell, nbytes))
            cells.append(_result(backend, other, Cell, nbytes))
        except RankwireError as error:
            cells.append(Cell(one, other, why_not=error.message))
            unreached |= {other} if one == 0 else set()
        if REAL_TIME.now() - said_at >= 1.0:
            said_at = REAL_TIME.now()
            sys.stderr.write(f"doctor: measured ranks {one} and {other}\n")
    for rank in {*range(1, backend.world_size)} - unreached:
        with suppress(RankwireError):  # it was measured; a later failure does not matter
            _give_order(backend, rank, _Order(None))
    return facts, cells


def _obey(backend: TcpBackend, nbytes: int) -> None:
    has_told_facts = False
    while True:
        data = backend.recv(0, _ORDER, timeout=3600.0)
        order = msgspec.json.decode(data, type=_Order)
        if order.peer is None:
            return
        cell = _measure(backend, order.peer, nbytes, is_first=order.is_first)
        if not has_told_facts:
            has_told_facts = True
            backend.send(msgspec.json.encode(_facts(backend)), 0, _RESULT)
        backend.send(msgspec.json.encode(cell), 0, _RESULT)


def _give_order(backend: TcpBackend, rank: int, order: _Order) -> None:
    backend.send(msgspec.json.encode(order), rank, _ORDER, timeout=_PAIR_LIMIT)


def _result(backend: TcpBackend, rank: int, kind: type[_T], nbytes: int) -> _T:
    limit = 2 * (1 + _REPEATS) * _bulk_limit(nbytes)
    return msgspec.json.decode(backend.recv(rank, _RESULT, timeout=limit), type=kind)


def _bulk_limit(nbytes: int) -> float:
    return _PAIR_LIMIT + nbytes / _SLOWEST


def _measure(backend: TcpBackend, peer: int, nbytes: int, *, is_first: bool) -> Cell:
    """Measure with a peer, which does the same; return the results of this direction."""
    try:
        link = backend.link_to(peer, timeout=_PAIR_LIMIT)
        latency = _latency(backend, peer, is_first=is_first)
        rates = {
            is_sender: _bandwidth(backend, peer, nbytes, is_sender=is_sender)
            for is_sender in (is_first, not is_first)
        }
    except RankwireError as error:
        return Cell(backend.rank, peer, why_not=error.message)
    why_not = "" if link.single_copy else link.reason
    return Cell(backend.rank, peer, link.transport, link.single_copy, why_not, latency, rates[True])


def _latency(backend: TcpBackend, peer: int, *, is_first: bool) -> float:
    times = []
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        begin = REAL_TIME.now()
        if is_first:
            backend.send(b"12345678", peer, _PING, timeout=_PAIR_LIMIT)
        data = backend.recv(peer, _PING, timeout=_PAIR_LIMIT)
        if not is_first:
            backend.send(data, peer, _PING, timeout=_PAIR_LIMIT)
        times.append(REAL_TIME.now() - begin)
    return median(times[_WARM_UP:])


def _bandwidth(backend: TcpBackend, peer: int, nbytes: int, *, is_sender: bool) -> float:
    """Return the best rate of a few large messages, each acknowledged, in bytes per second."""
    array = np.ones(nbytes, dtype=np.uint8).data  # touches every page
    best, limit = float("inf"), _bulk_limit(nbytes)
    for _ in range(1 + _REPEATS):
        begin = REAL_TIME.now()
        if is_sender:
            backend.send(array, peer, _BULK, timeout=limit)
            backend.recv(peer, _BULK, timeout=limit)
        else:
            backend.recv_into(array, peer, _BULK, timeout=limit)
            backend.send(b"", peer, _BULK, timeout=limit)
        best = min(best, REAL_TIME.now() - begin)
    return nbytes / best


def _facts(backend: TcpBackend) -> Facts:
    mesh = backend.mesh
    return Facts(
        rank=backend.rank,
        host=os.uname().nodename,
        boot=_read("/proc/sys/kernel/random/boot_id"),
        net_namespace=namespace("net"),
        pid_namespace=namespace("pid"),
        cores=len(os.sched_getaffinity(0)),
        spins=mesh.connections.spin > 0.0 and not mesh.connections.shares_cores,
        why_nothing_shared=mesh.segments.why_not(),
        max_descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        somaxconn=int(_read("/proc/sys/net/core/somaxconn") or 0),
        ptrace_scope=int(_read("/proc/sys/kernel/yama/ptrace_scope") or -1),
        has_seccomp="\nSeccomp:\t2" in _read("/proc/self/status"),
        mtu=_default_mtu(),
        version=__version__,
        python=platform.python_version(),
    )


def _default_mtu() -> int:
    for line in _read("/proc/net/route").splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000":
            return int(_read(f"/sys/class/net/{fields[0]}/mtu") or 0)
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not readable, or missing in this kernel
        return ""


def _show(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if len(report.facts) <= _WIDEST:
        console.print(_matrix(report))
    else:
        for kind in sorted({cell.kind for cell in report.cells}):
            console.print(_medians([cell for cell in report.cells if cell.kind == kind]))
    console.print("from row to column: by what, median round trip of 8 bytes, bandwidth")
    for advice in report.advice:
        style, word = ("bold red", "bad") if advice.is_bad else ("yellow", "could be better")
        console.print(f"[{style}]{word}:[/] ", end="")
        console.print(advice.what, markup=False)
        console.print(f"  change: {advice.change}", markup=False)
    if not report.advice:
        console.print("[green]nothing to change[/]")


def _matrix(report: Report) -> Table:
    ranks = sorted({rank for cell in report.cells for rank in (cell.src, cell.dst)} | {0})
    cells = {(cell.src, cell.dst): cell for cell in report.cells}
    hosts = {fact.rank: fact.host for fact in report.facts}
    table = Table("", *(str(rank) for rank in ranks))
    for src in ranks:
        row = [f"{src} {hosts.get(src, '')}"]
        for dst in ranks:
            cell = cells.get((src, dst))
            text = "" if cell is None else _describe(cell, "\n")
            row.append(f"[bold red]{text} ![/]" if (src, dst) in set(report.marked) else text)
        table.add_row(*row)
    return table


def _medians(alike: Sequence[Cell]) -> str:
    latency = median(cell.latency for cell in alike)
    bandwidth = median(cell.bandwidth for cell in alike)
    middle = Cell(0, 0, alike[0].transport, alike[0].single_copy, "", latency, bandwidth)
    return f"{len(alike)} links: {_describe(middle)} (medians)"


def _describe(cell: Cell, separator: str = " ") -> str:
    if not cell.transport:
        return "not reached"
    return f"{cell.kind} {cell.latency * 1e6:.0f} us{separator}{cell.bandwidth / 1e9:.1f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
