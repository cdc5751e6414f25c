"""Strangers at the door: they talk garbage, say nothing, come and go; the job does not notice."""

import contextlib
import resource
import socket
import struct
import threading
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
    members = {rank: peer.member for one in world for rank, peer in one._peers.items()}
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
                assert answer == b"" or (len(answer) == 64 and answer.startswith(b"rankwire"))
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
def test_f18_5000_strangers_hold_on_while_a_rank_joins(measured):
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


@pytest.mark.fault(19, "a port scan does not disturb a world that runs")
def test_f19_a_port_scan_of_a_running_world(measured):
    seconds = trials(2, 60)
    with process_world(3, transport="tcp") as ranks:
        address = ranks[0].call("eval", "backend.address")
        stop = threading.Event()

        def scan():
            count = 0
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    dial(address).close()
                count += 1
            return count

        scanning = [Running(scan) for _ in range(2)]
        began = time.monotonic()
        rounds = 0
        try:
            while time.monotonic() - began < seconds:
                entering = [rank.start("barrier") for rank in ranks]
                for entered in entering:
                    entered.result()
                rounds += 1
        finally:
            stop.set()
            scanned = sum(thread.result() for thread in scanning)
        measured("connections of the scan", scanned / seconds, unit="a second")
        measured("barriers meanwhile", rounds / seconds, unit="a second")
        assert rounds > 0
