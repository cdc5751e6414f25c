"""Faults of the network between hosts: namespaces whose cables are cut, lossy or slow."""

import time

import pytest

from faults import netns
from faults.sizes import NIGHTLY, trials
from rankwire import DeadlineExceededError, PeerLostError
from worlds import SECRET, eventually, introduce

pytestmark = [pytest.mark.usefixtures("several_hosts"), pytest.mark.timeout(120)]

LINK_LIMIT = 6.0  # seconds until a cut link is an error, idle or not
ONE_WAY_LIMIT = 11.0


IS_SENDING_TO_2 = "backend.mesh.peers[2].messages.outbox._lock.locked()"


def lost(command, peer, timeout=20.0):
    error = command.error(timeout)
    assert isinstance(error, PeerLostError), repr(error)
    assert error.peer == peer
    return error


@pytest.mark.fault(5, "a host that vanishes is lost for all others, on idle links")
@pytest.mark.fault(5, "a host that vanishes is lost for whoever is sending to it")
def test_f05_a_host_vanishes(measured):
    """Rank 0 has nothing in flight to rank 2, rank 1 has a lot."""
    for _ in range(trials(1, 10)):
        with netns.world(3) as (hosts, ranks):
            introduce(*ranks)
            idle = ranks[0].start("recv", 2)
            hosts.slow(2, 50_000_000)
            sending = ranks[1].start("eval", "backend.send(bytes(64 << 20), 2)")
            eventually(lambda r=ranks: r[1].call("eval", IS_SENDING_TO_2))
            began = time.monotonic()
            hosts.part([0, 1], [2])
            for name, command in (("idle", idle), ("data in flight", sending)):
                lost(command, 2)
                measured(f"vanished host named, {name}", command.ended - began, limit=LINK_LIMIT)
            ranks[0].call("send", b"still there?", 1)
            assert ranks[1].call("recv", 0) == b"still there?"


@pytest.mark.fault(6, "each half of a split network loses the other half, and works on by itself")
def test_f06_the_network_splits(measured):
    with netns.world(4) as (hosts, ranks):
        introduce(*ranks)
        across = [(0, 2), (1, 3), (2, 1), (3, 0)]
        pending = [(dst, ranks[src].start("recv", dst)) for src, dst in across]
        began = time.monotonic()
        hosts.part([0, 1], [2, 3])
        for peer, command in pending:
            lost(command, peer)
            measured("other half lost", command.ended - began, limit=LINK_LIMIT)
        for one, other in ((0, 1), (2, 3)):
            ranks[one].call("send", b"same side", other)
            assert ranks[other].call("recv", one) == b"same side"


@pytest.mark.fault(7, "both ends give up a link that is cut in one direction")
def test_f07_a_link_is_cut_in_one_direction(measured):
    with netns.world(2) as (hosts, ranks):
        introduce(*ranks)
        pending = [ranks[0].start("recv", 1), ranks[1].start("recv", 0)]
        began = time.monotonic()
        hosts.cut(1)
        for peer, command in zip((1, 0), pending, strict=True):
            lost(command, peer)
            measured("one-way cut noticed", command.ended - began, limit=ONE_WAY_LIMIT)


@pytest.mark.fault(8, "after a cut that heals in time everything arrives, once and in order")
@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.5] if NIGHTLY else [1.5])
def test_f08_a_cut_heals_before_the_limit(seconds):
    with netns.world(2) as (hosts, ranks):
        introduce(*ranks)
        received = ranks[1].start("eval", "[bytes(backend.recv(0)) for _ in range(200)]")
        sent = ranks[0].start(
            "eval", "[(backend.send(b'%d' % n, 1), time.sleep(0.002)) for n in range(200)] and None"
        )
        time.sleep(0.1)
        hosts.part([0], [1])
        time.sleep(seconds)
        for host in (0, 1):
            hosts.heal(host)
        sent.result()
        assert received.result() == [b"%d" % number for number in range(200)]


EXCHANGE = """
(lambda numpy, rankwire: [
    rankwire.all_reduce(backend, numpy.arange(100_000, dtype=numpy.int64) + backend.rank).tolist()
    == (2 * numpy.arange(100_000) + 1).tolist()
    for _ in range({rounds})
])(__import__("numpy"), __import__("rankwire"))
"""

# Segments that the kernel of this host sent again.
RETRANSMITTED = """
(lambda names, values: int(values[names.index("RetransSegs")]))(
    *[line.split() for line in open("/proc/self/net/snmp") if line.startswith("Tcp:")]
)
"""


@pytest.mark.fault(9, "lost packets change no bit of any result, and lose no rank")
@pytest.mark.parametrize("share", [0.01, pytest.param(0.05, marks=pytest.mark.slow)])
def test_f09_packets_are_lost(share, measured):
    rounds = trials(60, 600)
    with netns.world(2, timeout=60.0) as (hosts, ranks):
        introduce(*ranks)
        for host in (0, 1):
            hosts.lose(host, share)
        began = time.monotonic()
        working = [rank.start("eval", EXCHANGE.format(rounds=rounds)) for rank in ranks]
        for command in working:
            assert all(command.result(100.0))
        measured("bit-exact sums at this loss", rounds, unit="sums")
        measured("they took", time.monotonic() - began)
        repeated = sum(rank.call("eval", RETRANSMITTED) for rank in ranks)
        measured("segments sent again", repeated, unit="segments")
        assert repeated > 0, "nothing was lost: the test shows nothing"


@pytest.mark.fault(10, "a transfer that is slow but goes on is not taken for a dead rank")
@pytest.mark.fault(10, "a transfer that is too slow for its own deadline ends there")
def test_f10_a_link_becomes_very_slow(measured):
    seconds = trials(7, 60)  # longer than the limit for a cut link
    rate = 1_000_000
    nbytes = rate // 8 * seconds
    with netns.world(2, timeout=200.0) as (hosts, ranks):
        introduce(*ranks)
        hosts.slow(1, rate)
        code = f"len(backend.recv(0, timeout={10 * seconds}))"
        receiving = ranks[1].start("eval", code)
        ranks[0].start("eval", f"backend.send(bytes({nbytes}), 1)").result(10 * seconds)
        assert receiving.result(10 * seconds) == nbytes
        measured("transfer at 1 Mbit/s, without a loss", seconds, unit="s")
        late = ranks[1].start("recv", 0, timeout=1.0)
        ranks[0].start("eval", f"backend.send(bytes({nbytes}), 1)")
        assert isinstance(late.error(), DeadlineExceededError)


@pytest.mark.fault(58, "ranks reach each other by the network on which they met")
def test_f58_several_networks():
    """Rank 0 is at its second address; the first network is cut, so nothing may use it."""
    with netns.network(2, networks=2) as hosts:
        for host in (0, 1):
            hosts.cut(host, network=0)
        ranks = [hosts.rank(rank) for rank in (0, 1)]
        address = f"{hosts.address(0, 1)}:29500"
        forming = [rank.form(2, address, secret=SECRET) for rank in ranks]
        for command in forming:
            command.result()
        introduce(*ranks)
        for one, other in ((0, 1), (1, 0)):
            ranks[one].call("send", b"hello", other)
            assert ranks[other].call("recv", one) == b"hello"


@pytest.mark.fault(
    58, "an address that cannot be reached is named, with the ranks that are missing"
)
def test_f58_a_wrong_address_is_named():
    with netns.network(2, networks=2) as hosts:
        rank = hosts.rank(1)
        hosts.cut(0)
        address = f"{hosts.address(0)}:29500"
        error = rank.form(2, address, secret=SECRET, join_timeout=1.5).error()
        assert address in str(error), str(error)
        assert getattr(error, "missing", None) == [0], str(error)
