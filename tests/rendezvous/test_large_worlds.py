"""Worlds of a thousand ranks form, also if some of the ranks are slow and others never speak.

The ranks are threads of a second process that do no more than join, with the code of real ranks.
"""

import contextlib
import json
import resource
import subprocess
import sys
import textwrap
import threading

import pytest

from rankwire.clock import REAL_TIME
from rankwire.rendezvous import coordinator as coordinator_module
from rankwire.rendezvous.coordinator_host import CoordinatorHost
from rankwire.rendezvous.reports import Told
from rankwire.transports import tcp_stream
from rankwire.transports.security import UNPROTECTED
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp
from rankwire.wire.control_messages import Waiting
from real_time import Deadline
from worlds import SECRET, address_of, bound_socket

WORLD_SIZE = 1000
SILENT = 300  # connections that say nothing
LIMIT = 120.0  # seconds; it takes 4, and 17 beside twelve busy loops on 2 cores

pytestmark = pytest.mark.timeout(2 * LIMIT)

# Every second rank computes its proof 50 ms late, so that hundreds are in their handshake at once.
JOINERS = textwrap.dedent(
    """
    import collections, json, sys, threading, time
    from rankwire.clock import REAL_TIME
    from rankwire.deadline import Deadline
    from rankwire.transports.tcp_stream import TcpAddress
    from rankwire.wire.control_messages import Member
    from rankwire.rendezvous.join import Joiner
    from rankwire.rendezvous.runtime_dir import host_id
    from rankwire.wire.handshake import LAUNCHER, Hello, Initiator, Purpose, job_id
    from rankwire.wire.keys import rank_key

    address, world_size, limit, secret = json.loads(sys.argv[1])
    outcomes, slow, said = collections.Counter(), threading.local(), Initiator.proof

    def proof(initiator, challenge):
        time.sleep(slow.seconds)
        return said(initiator, challenge)

    def join(rank):
        slow.seconds = 0.05 * (rank % 2)
        try:
            world, control, _ = Joiner(
                TcpAddress.parse(address),
                Hello(Purpose.JOIN, job_id("large"), 0, world_size, rank, LAUNCHER),
                find_key=lambda: rank_key(secret.encode(), rank),
                describe=lambda host: Member(rank, 1, host, 9, "", host_id()),
                deadline=Deadline(limit, REAL_TIME),
                has_coordinator=True,
            ).join()
            outcomes[f"a world of {len(world.members)}"] += 1
            stay.append(control)
        except Exception as error:
            outcomes[f"{type(error).__name__}: {error}"] += 1

    Initiator.proof, stay = proof, []
    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(outcomes), flush=True)
    sys.stdin.read()
    """
)


@pytest.fixture
def usual_limit_of_open_files():
    """Begin with the limit of most systems, which the coordinator raises; put it back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * WORLD_SIZE:
        pytest.skip(f"no more than {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def hosted(usual_limit_of_open_files, monkeypatch):
    # The ranks share one interpreter: on a loaded machine some do not read for longer than 4 s.
    monkeypatch.setattr(tcp_stream, "_USER_TIMEOUT_MS", int(LIMIT * 1000))
    formed = threading.Event()
    listener = bound_socket()
    host = CoordinatorHost(
        listener,
        WORLD_SIZE,
        secret=SECRET,
        job="large",
        clock=REAL_TIME,
        policy=UNPROTECTED,
        told=Told(on_formed=lambda world: formed.set()),
    )
    yield address_of(listener), formed, host
    host.close()


@pytest.fixture
def waits_told(monkeypatch):
    """Count the messages about missing ranks."""
    told = []
    tell = coordinator_module.tell

    def count(connection, message, *args):
        if isinstance(message, Waiting):
            told.append(message)
        tell(connection, message, *args)

    monkeypatch.setattr(coordinator_module, "tell", count)
    return told


def test_a_thousand_ranks_join_although_half_are_slow_and_strangers_say_nothing(hosted, waits_told):
    address, formed, host = hosted
    arguments = json.dumps([address, WORLD_SIZE, LIMIT, SECRET.decode()])
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(connect_tcp(TcpAddress.parse(address), Deadline(LIMIT)))
        began = REAL_TIME.now()
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", JOINERS, arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.kill)
        outcomes = json.loads(process.stdout.readline())
        took = REAL_TIME.now() - began
        host.close()  # or it tells each rank of the end of each other one
    assert outcomes == {f"a world of {WORLD_SIZE}": WORLD_SIZE}
    assert formed.is_set()
    # One to each rank when it joins, then at most one a second.
    assert len(waits_told) <= WORLD_SIZE * (1 + took)
