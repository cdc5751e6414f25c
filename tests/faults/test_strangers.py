"""Strangers at the door: they talk garbage, say nothing, come and go; the job does not notice."""

import contextlib
import resource
import socket
import struct
import subprocess
import sys
import time

import pytest

from faults.probes import PROBES
from faults.sizes import time_limit, trials
from rankwire import TcpBackend
from worlds import PATIENCE, Running, address_of, bound_socket, eventually, process_world, tcp_world

pytestmark = pytest.mark.timeout(time_limit(60, 900))

NO_LINGER = struct.pack("ii", 1, 0)  # closing resets: thousands of ports are free again at once


def dial(address):
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=PATIENCE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    return sock


def say(address, words):
    """Say something to a port, and return what it answers until it hangs up or is silent."""
    answer = b""
    with dial(address) as sock, contextlib.suppress(OSError):
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(4096):
            answer += piece
    return answer


def doors(world):
    """Return the address of every rank's listening port."""
    members = {rank: peer.member for one in world for rank, peer in one.mesh.peers.items()}
    return [f"{member.host}:{member.port}" for member in members.values()]


@pytest.mark.fault(
    17, "real probes of other protocols are dropped, learn nothing, and change nothing"
)
def test_f17_probes_of_other_protocols(measured):
    with tcp_world(2, transport="tcp") as world:
        talking = Running(talk_on, world)
        for words in PROBES.values():
            for door in doors(world):
                answer = say(door, words)
                assert answer == b"" or (len(answer) >= 64 and answer.startswith(b"rankwire"))
                assert answer[64:] in (b"", b"\x0b" + bytes(39)), "its proof is wrong"
        measured("kinds of probes dropped", len(PROBES), unit="probes")
        world[0].send(b"stop", 1, 99)
        assert talking.result() > 0


def talk_on(world):
    """Exchange messages until told to stop; return how many."""
    count = 0
    while True:
        with contextlib.suppress(TimeoutError):
            world[1].recv(0, 99, timeout=0)
            return count
        world[0].send(count.to_bytes(8, "little"), 1)
        assert int.from_bytes(world[1].recv(0), "little") == count
        count += 1


@contextlib.contextmanager
def room_for_descriptors(count):
    """Allow this process so many open files for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"no more than {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.fault(
    18, "thousands of connections that say nothing, or garbage, keep no rank from joining"
)
def test_f18_a_rank_joins_while_5000_foreign_connections_are_open(measured):
    held = 5000
    with room_for_descriptors(held + 1000), contextlib.ExitStack() as stack:
        listener = bound_socket()
        address = address_of(listener)
        zero = Running(TcpBackend, 0, 2, address, listener=listener, join_timeout=PATIENCE)
        eventually(lambda: can_connect(address))
        for number in range(held):
            stranger = stack.enter_context(dial(address))
            if number % 2:
                with contextlib.suppress(OSError):
                    stranger.sendall(b"\xff" * 100)  # less than a greeting: it waits for the rest
        began = time.monotonic()
        one = TcpBackend(1, 2, address, join_timeout=PATIENCE)
        joined = time.monotonic() - began
        measured("a rank joins among 5,000 strangers", joined, limit=1.0)
        with one, zero.result():
            one.send(b"in", 0)
            assert zero.result().recv(1) == b"in"


def can_connect(address):
    with contextlib.suppress(OSError), dial(address):
        return True
    return False


# In a process of its own: threads here would take the time of those that measure.
SCAN = """
import socket, struct, sys, time
host, port, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
began, count = time.monotonic(), 0
while True:
    try:
        sock = socket.create_connection((host, port), timeout=5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    except OSError:
        pass
    count += 1
    if count == 100:
        print("scans", flush=True)
    time.sleep(max(0.0, began + count / rate - time.monotonic()))
"""


@contextlib.contextmanager
def scanned(address, rate):
    """Connect to a port and hang up, so many times a second, for the time of the block."""
    host, _, port = address.rpartition(":")
    with subprocess.Popen(
        [sys.executable, "-c", SCAN, host, port, str(rate)], stdout=subprocess.PIPE
    ) as scanner:
        assert scanner.stdout.readline() == b"scans\n"
        try:
            yield
            assert scanner.poll() is None, "it scanned all the time"
        finally:
            scanner.kill()


def barriers(ranks, seconds):
    """Meet for a while; return how often a second, and the longest time that one took."""
    began, count, longest = time.monotonic(), 0, 0.0
    while time.monotonic() - began < seconds:
        entered = time.monotonic()
        for command in [rank.start("barrier") for rank in ranks]:
            command.result()
        longest = max(longest, time.monotonic() - entered)
        count += 1
    return count / seconds, longest


@pytest.mark.fault(
    19, "under 1,000 connections a second to its port a world goes on without a stall"
)
@pytest.mark.parametrize("dialled", [True, False], ids=["connected", "dialling"])
def test_f19_a_port_scan_of_a_running_world(dialled, measured):
    seconds = trials(1, 30)
    with process_world(3, transport="tcp") as ranks:
        if dialled:
            measured("barriers without a scan", barriers(ranks, seconds)[0], unit="a second")
        with scanned(ranks[0].call("eval", "backend.address"), rate=1000):
            count, longest = barriers(ranks, seconds)
        measured("barriers under the scan", count, unit="a second")
        measured("longest barrier under the scan", longest, limit=1.0)
