"""Several hosts on this machine: network namespaces on one switch, with cables that can be cut.

Each host is a namespace with an interface ``eth0`` on a bridge, which is in a namespace of its own:
nothing of the machine's own network is touched. What is lost is lost at the *receiver's ingress*:
dropping on the sender's own egress is no network loss, Linux sees it and retries at once. Loss and
cuts are classic BPF programs that ``tc`` runs; neither netem nor a firewall is needed.

Ranks run inside as processes, see ``Hosts.rank``. Names have our process id in them, and whatever a
killed test run left behind is removed by the next one. Needs root, ``ip`` and ``tc``.
"""

import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator

import worlds

_PREFIX = "rwtest"
_DROP, _PASS = 2, 0xFFFFFFFF
_RETURN, _LOAD_WORD, _IF_EQUAL, _IF_ABOVE = 0x06, 0x20, 0x15, 0x25
_SOURCE_ADDRESS = 14 + 12  # after the Ethernet header
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM

Instruction = tuple[int, int, int, int]


def why_not() -> str:
    """Return why there can be no hosts here; an empty text if there can."""
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


class Hosts:
    """So many hosts, each with one address on a common network.

    Args:
        count: How many.
        networks: How many networks they share; host ``i`` is 10.77.``network``.``i + 1``, and its
            interfaces are ``eth0``, ``eth1`` and so on.
    """

    def __init__(self, count: int, *, networks: int = 1) -> None:
        self.count = count
        self._own = f"{_PREFIX}-{os.getpid()}-{id(self) & 0xFFFF:x}"
        self._switch = f"{self._own}-switch"
        self._stack = contextlib.ExitStack()
        self._nursery = self._stack.enter_context(worlds.nursery())
        sweep()
        try:
            self._add(self._switch)
            for host in range(count):
                self._add(self.namespace(host))
            for network in range(networks):
                self._connect(network)
        except BaseException:
            self.close()
            raise

    def namespace(self, host: int) -> str:
        return f"{self._own}-{host}"

    def address(self, host: int, network: int = 0) -> str:
        return f"10.77.{network}.{host + 1}"

    def rank(self, rank: int, *, host: int | None = None) -> worlds.RankProcess:
        """Return a rank process on a host (that of its own number), without a backend yet."""
        where = rank if host is None else host
        network = f"/run/netns/{self.namespace(where)}"
        process = worlds.RankProcess(rank, self._nursery, network=network)
        self._stack.callback(process.close)
        return process

    # -- what happens to packets that arrive at a host

    def cut(self, host: int, *, sources: Iterable[int] | None = None, network: int = 0) -> None:
        """Let nothing reach a host any more; or only nothing from some others."""
        if sources is None:
            program: list[Instruction] = [(_RETURN, 0, 0, _DROP)]
        else:
            addresses = [int(ipaddress.ip_address(self.address(s, network))) for s in sources]
            program = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS)]
            for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                program.append((_IF_EQUAL, left, 0, address))
            program += [(_RETURN, 0, 0, _PASS), (_RETURN, 0, 0, _DROP)]
        self._filter(host, network, program)

    def part(self, *sides: Iterable[int], network: int = 0) -> None:
        """Split the network: hosts of different sides do not reach each other."""
        groups = [set(side) for side in sides]
        for group in groups:
            for host in group:
                others = set().union(*groups) - group
                self.cut(host, sources=sorted(others), network=network)

    def lose(self, host: int, share: float, *, network: int = 0) -> None:
        """Lose a share of the packets that arrive at a host, by chance."""
        limit = int(share * 0xFFFFFFFF)
        program = [
            (_LOAD_WORD, 0, 0, _RANDOM),
            (_IF_ABOVE, 0, 1, limit),
            (_RETURN, 0, 0, _PASS),
            (_RETURN, 0, 0, _DROP),
        ]
        self._filter(host, network, program)

    def heal(self, host: int, *, network: int = 0) -> None:
        """Let everything arrive at a host again."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it was never cut
            self._tc(host, "qdisc", "del", "dev", f"eth{network}", "clsact")

    def slow(self, host: int, bits_per_second: int, *, network: int = 0) -> None:
        """Limit what arrives at a host: the cable from the switch is slow."""
        _run(
            "tc", "-n", self._switch, "qdisc", "replace", "dev", f"p{network}-{host}", "root",
            "tbf", "rate", f"{bits_per_second}bit", "burst", "16kb", "latency", "200ms",
        )  # fmt: skip

    def _filter(self, host: int, network: int, program: list[Instruction]) -> None:
        self.heal(host, network=network)
        code = f"{len(program)}," + ",".join(" ".join(map(str, line)) for line in program)
        device = ("dev", f"eth{network}")
        self._tc(host, "qdisc", "add", *device, "clsact")
        self._tc(host, "filter", "add", *device, "ingress", "bpf", "da", "bytecode", code)

    def _tc(self, host: int, *words: str) -> None:
        _run("tc", "-n", self.namespace(host), *words)

    # -- building

    def _add(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        self._stack.callback(_run, "ip", "netns", "del", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _connect(self, network: int) -> None:
        bridge, eth = f"br{network}", f"eth{network}"
        _run("ip", "-n", self._switch, "link", "add", bridge, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", bridge, "up")
        for host in range(self.count):
            there, port = self.namespace(host), f"p{network}-{host}"
            _run(
                "ip", "link", "add", port, "netns", self._switch,
                "type", "veth", "peer", "name", eth, "netns", there,
            )  # fmt: skip
            _run("ip", "-n", self._switch, "link", "set", port, "master", bridge, "up")
            address = f"{self.address(host, network)}/24"
            _run("ip", "-n", there, "addr", "add", address, "dev", eth)
            _run("ip", "-n", there, "link", "set", eth, "up")

    def close(self) -> None:
        """End the ranks and remove the hosts."""
        self._stack.close()


@contextlib.contextmanager
def network(count: int, **options: int) -> Iterator[Hosts]:
    """Hosts for the time of a block."""
    with contextlib.closing(Hosts(count, **options)) as hosts:
        yield hosts


@contextlib.contextmanager
def world(count: int, **options: object) -> Iterator[tuple[Hosts, list[worlds.RankProcess]]]:
    """One rank on each of so many hosts, as one world."""
    with network(count) as hosts:
        ranks = [hosts.rank(rank) for rank in range(count)]
        form(hosts, ranks, **options)
        yield hosts, ranks


def form(hosts: Hosts, ranks: list[worlds.RankProcess], **options: object) -> None:
    """Form a world of ranks on different hosts."""
    address = f"{hosts.address(0)}:29500"
    chosen = {"secret": worlds.SECRET, **options}
    forming = [rank.form(len(ranks), address, **chosen) for rank in ranks]
    for rank in forming:
        rank.result()


def sweep() -> None:
    """Remove what processes that are dead left behind."""
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else ():
        found = re.match(rf"{_PREFIX}-(\d+)-", name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
