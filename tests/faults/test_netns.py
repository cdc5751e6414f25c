"""The hosts are hosts: they reach each other until a cable is cut, and leave nothing behind."""

import os
import subprocess
import sys
import time

import pytest

from faults import netns
from worlds import eventually

pytestmark = pytest.mark.usefixtures("several_hosts")

# One datagram each way, seen from the one who asks: whether an answer came.
ANSWER = """
(lambda sock: (sock.bind(("", 5000)), sock.settimeout(5),
    [sock.sendto(*sock.recvfrom(64)) for _ in range({count})], sock.close()) and None)(
    socket.socket(type=socket.SOCK_DGRAM))
"""
ASK = """
(lambda sock: (sock.settimeout(0.2), sock.sendto(b"?", ("{address}", 5000)),
    select.select([sock], [], [], 0.1)[0] != [], sock.close())[2])(
    socket.socket(type=socket.SOCK_DGRAM))
"""


def asks(rank, address):
    return rank.call("eval", ASK.format(address=address))


def test_cuts_loss_and_healing():
    with netns.network(3) as hosts:
        ranks = [hosts.rank(rank) for rank in range(3)]
        address = hosts.address(2)
        ranks[2].start("eval", ANSWER.format(count=1000))
        eventually(lambda: asks(ranks[0], address))
        hosts.cut(2)
        assert not asks(ranks[0], address), "nothing arrives"
        hosts.heal(2)
        assert asks(ranks[0], address)
        hosts.cut(0)
        assert not asks(ranks[0], address), "the answer does not arrive"
        hosts.heal(0)
        hosts.part([0], [1, 2])
        assert not asks(ranks[0], address)
        assert asks(ranks[1], address)
        for host in range(3):
            hosts.heal(host)
        hosts.lose(2, 0.5)
        code = f"[{ASK.format(address=address).strip()} for _ in range(24)].count(True)"
        assert 2 < ranks[0].call("eval", code) < 22


ENDLESS = """
import sys, time
from faults import netns
with netns.network(2):
    print("up", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_run_left_is_removed_by_the_next():
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    left = [name for name in os.listdir("/run/netns") if f"-{process.pid}-" in name]
    assert len(left) == 3
    began = time.monotonic()
    netns.sweep()
    assert time.monotonic() - began < 5.0
    assert not set(left) & set(os.listdir("/run/netns"))
