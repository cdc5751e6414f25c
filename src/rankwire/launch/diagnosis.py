"""Diagnose a world from facts about its ranks and measurements of its links, for ``doctor``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

import msgspec

# A link is marked if it is worse than the median of its kind by these factors.
_SLOW = 5.0
_NARROW = 3.0
_ENOUGH_TO_COMPARE = 4
# To each peer: messages both ways, calls both ways. Then those of the process itself.
_DESCRIPTORS_A_PEER = 4
_OTHER_DESCRIPTORS = 64
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Facts(msgspec.Struct, frozen=True):
    """Facts about one rank; 0 or "" if unknown."""

    rank: int
    host: str = ""
    boot: str = ""  # equal for ranks that share a kernel
    net_namespace: int = 0
    pid_namespace: int = 0
    cores: int = 0
    spins: bool = True  # a waiting thread polls before it sleeps, on its own core
    why_nothing_shared: str = ""  # "" if collectives can use shared memory
    max_descriptors: int = 0
    somaxconn: int = 0
    ptrace_scope: int = -1  # Yama's setting; -1 if the kernel has none
    has_seccomp: bool = False  # a filter restricts its system calls
    mtu: int = 0  # of the default route's interface
    version: str = ""
    python: str = ""


class Cell(msgspec.Struct, frozen=True):
    """The measurements from one rank to another."""

    src: int
    dst: int
    transport: str = ""  # "unix" or "tcp"; "" if dst is unreachable
    single_copy: bool = False  # large messages are read from the sender's memory
    why_not: str = ""  # reason for no single copy, or why dst is unreachable
    latency: float = 0.0  # the median of small round trips, in seconds
    bandwidth: float = 0.0  # bytes per second of large messages

    @property
    def kind(self) -> str:
        """The transport in one word."""
        return "copy" if self.single_copy else self.transport or "none"


class Advice(msgspec.Struct, frozen=True):
    """A recommended change."""

    is_bad: bool  # the world does not work without the change; else it is slower
    what: str
    change: str


class Report(msgspec.Struct, frozen=True):
    """The results of an examination."""

    facts: list[Facts]
    cells: list[Cell]
    marked: list[tuple[int, int]]  # bad or slow links, as (src, dst)
    advice: list[Advice]

    @property
    def is_well(self) -> bool:
        """Whether every rank reaches every other."""
        return not any(advice.is_bad for advice in self.advice)


def diagnose(facts: Sequence[Facts], cells: Sequence[Cell]) -> Report:
    """Return the report on a world."""
    by_rank = {fact.rank: fact for fact in facts}
    marked = _marked(cells)
    advice = [
        *_unreached(cells),
        *_versions(facts),
        *_without_single_copy(cells, by_rank),
        *_without_shared_memory(facts),
        *_tcp_on_one_host(cells, by_rank),
        *_slow(cells, marked),
        *_hosts(facts),
        *_mtus(facts),
    ]
    return Report(list(facts), list(cells), sorted(marked), advice)


def _marked(cells: Sequence[Cell]) -> set[tuple[int, int]]:
    marked = {(cell.src, cell.dst) for cell in cells if not cell.transport}
    reached = [cell for cell in cells if cell.transport]
    for alike in _grouped(reached, lambda cell: cell.kind).values():
        if len(alike) < _ENOUGH_TO_COMPARE:
            continue
        latency = median(cell.latency for cell in alike)
        bandwidth = median(cell.bandwidth for cell in alike)
        marked |= {
            (cell.src, cell.dst)
            for cell in alike
            if cell.latency > _SLOW * latency or cell.bandwidth * _NARROW < bandwidth
        }
    return marked


def _unreached(cells: Sequence[Cell]) -> Iterator[Advice]:
    unreached = [cell for cell in cells if not cell.transport]
    for reason, found in _grouped(unreached, lambda cell: cell.why_not).items():
        yield Advice(
            True,
            f"{_arrows(found)} cannot be reached: {reason}",
            "let every host reach every other on all ports above 1023, by the address under which"
            " it reaches node 0",
        )


def _versions(facts: Sequence[Facts]) -> Iterator[Advice]:
    for name, values in (
        ("the version of rankwire", {fact.rank: fact.version for fact in facts}),
        ("the version of Python", {fact.rank: fact.python for fact in facts}),
    ):
        if len(set(values.values())) > 1:
            yield Advice(
                False, f"{name} differs: {_groups(values)}", "install the same on all hosts"
            )


def _without_single_copy(cells: Sequence[Cell], facts: dict[int, Facts]) -> Iterator[Advice]:
    def reason_and_remedy(cell: Cell) -> tuple[str, str]:
        # The process id differs for each link.
        reason = cell.why_not.split(" of process ")[0]
        return reason, _remedy(facts.get(cell.src), facts.get(cell.dst))

    copied = [cell for cell in cells if cell.transport == "unix" and not cell.single_copy]
    for (reason, remedy), found in _grouped(copied, reason_and_remedy).items():
        yield Advice(False, f"no single copy {_arrows(found)}: {reason}", remedy)


def _without_shared_memory(facts: Sequence[Facts]) -> Iterator[Advice]:
    unable = [fact for fact in facts if fact.why_nothing_shared]
    for reason, found in _grouped(unable, lambda fact: fact.why_nothing_shared).items():
        ranks = ", ".join(str(fact.rank) for fact in found)
        yield Advice(
            False,
            f"no shared memory at rank{'s'[: len(found) > 1]} {ranks}: {reason}; collectives of"
            " that host go by sockets",
            "let the ranks call memfd_create, and leave RANKWIRE_SEGMENT alone",
        )


def _remedy(one: Facts | None, other: Facts | None) -> str:
    if one is None or other is None:
        return "see README, single_copy"
    if one.pid_namespace != other.pid_namespace:
        return "let the containers share process ids (docker --pid, shareProcessNamespace in a pod)"
    if max(one.ptrace_scope, other.ptrace_scope) > 0:
        return "set kernel.yama.ptrace_scope to 0 (sysctl), or give the ranks CAP_SYS_PTRACE"
    if one.has_seccomp or other.has_seccomp:
        return (
            "allow process_vm_readv and process_vm_writev in the container's seccomp filter"
            " (docker --cap-add SYS_PTRACE does)"
        )
    return "run the ranks as one user, and let the kernel allow process_vm_readv between them"


def _tcp_on_one_host(cells: Sequence[Cell], facts: dict[int, Facts]) -> Iterator[Advice]:
    found: list[Cell] = []
    apart: list[Cell] = []
    for cell in cells:
        one, other = facts.get(cell.src), facts.get(cell.dst)
        if cell.transport == "tcp" and one and other and one.boot == other.boot != "":
            (found if one.net_namespace == other.net_namespace else apart).append(cell)
    if found:
        yield Advice(
            False,
            f"TCP on one host {_arrows(found)}: they do not see each other's socket files",
            'share XDG_RUNTIME_DIR (or /tmp) between the containers, or leave transport="auto"',
        )
    if apart:
        yield Advice(
            False,
            f"TCP on one machine {_arrows(apart)}: they are in different network namespaces",
            "let the containers share the host's network, for Unix sockets and single copy",
        )


def _slow(cells: Sequence[Cell], marked: set[tuple[int, int]]) -> Iterator[Advice]:
    slow = [cell for cell in cells if cell.transport and (cell.src, cell.dst) in marked]
    if slow:
        yield Advice(
            False,
            f"much slower than others of their kind: {_arrows(slow)}",
            "look for other load on these hosts, and measure again",
        )


def _hosts(facts: Sequence[Facts]) -> Iterator[Advice]:
    hosts = _grouped(facts, lambda fact: (fact.boot or fact.host, fact.net_namespace))
    needed = _OTHER_DESCRIPTORS + _DESCRIPTORS_A_PEER * (len(facts) - 1)
    for here in hosts.values():
        name, first = here[0].host, here[0]
        if first.cores and not all(fact.spins for fact in here):
            yield Advice(
                False,
                f"{len(here)} ranks share {first.cores} core{'s'[: first.cores > 1]} on {name}:"
                " waiting ranks let others run, sleep soon, and waking up costs 30-60 us",
                "start at most one rank a core where latency counts",
            )
        few = min(fact.max_descriptors for fact in here)
        if few and few < needed:
            yield Advice(
                True,
                f"a rank on {name} may open {few} files; {len(facts)} ranks that all talk to"
                f" each other need up to {needed}",
                f"ulimit -n {needed}",
            )
        if first.somaxconn and first.somaxconn < len(facts):
            yield Advice(
                False,
                f"{first.somaxconn} connections may wait on {name}, and {len(facts)} ranks"
                " may come at once",
                f"sysctl -w net.core.somaxconn={max(4096, len(facts))}",
            )


def _mtus(facts: Sequence[Facts]) -> Iterator[Advice]:
    mtus = {fact.rank: str(fact.mtu) for fact in facts if fact.mtu}
    if len(set(mtus.values())) > 1:
        yield Advice(False, f"the MTU differs: {_groups(mtus)}", "set the same on all hosts")


def _arrows(cells: Sequence[Cell]) -> str:
    shown = ", ".join(f"{cell.src}→{cell.dst}" for cell in cells[:4])
    return shown if len(cells) <= 4 else f"{shown} and {len(cells) - 4} more"


def _groups(values: dict[int, str]) -> str:
    groups = _grouped(values, values.__getitem__)
    return ", ".join(
        f"{value} (ranks {', '.join(map(str, ranks))})" for value, ranks in groups.items()
    )


def _grouped(values: Iterable[_Value], key: Callable[[_Value], _Key]) -> dict[_Key, list[_Value]]:
    groups: dict[_Key, list[_Value]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups
