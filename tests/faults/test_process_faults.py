"""Faults of processes: exits in the middle of everything, a log that nobody reads."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from faults.sizes import time_limit, trials
from rankwire import ChannelClosedError, PeerLostError
from worlds import PATIENCE, Running, TcpBackend, address_of, bound_socket

pytestmark = pytest.mark.timeout(time_limit(60, 900))


def environment():
    """Return that of a process which finds the package, the tests and this test's folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


RANK_1 = """
import atexit, logging, os, signal, sys, threading, time
from rankwire import RpcAgent, TcpBackend
backend = TcpBackend(1, 2, sys.argv[1], join_timeout=20)
agent = RpcAgent(backend)
backend.send(b"up", 0)
"""

EXITS = {
    "the end of the script": "",
    "sys.exit": "sys.exit(3)",
    "an exception": "raise ValueError('of the user')",
    "a thread in recv": "threading.Thread(target=backend.recv, args=(0, 7), daemon=True).start()",
    "a call in flight": "future = agent.rpc_async(0, 'hang')",
    "a call to itself": "agent.register('nap', time.sleep); agent.rpc_async(1, 'nap', 5)",
    "closing at exit": "atexit.register(backend.close)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "without farewell": "os._exit(0)",
}


def start_rank_1(address, code):
    return subprocess.Popen(
        [sys.executable, "-c", RANK_1 + textwrap.dedent(code), address],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.fault(
    36, "a process ends soon, however its program ends, without noise from our threads"
)
@pytest.mark.fault(36, "its peers are told, or notice")
@pytest.mark.parametrize("code", EXITS.values(), ids=EXITS.keys())
def test_f36_a_program_ends_in_the_middle_of_everything(code, measured):
    for _ in range(trials(1, 20)):
        listener = bound_socket()
        address = address_of(listener)
        process = start_rank_1(address, code)
        with TcpBackend(0, 2, address, listener=listener, join_timeout=PATIENCE) as zero:
            assert zero.recv(1) == b"up"
            waiting = Running(zero.recv, 1)
            began = time.monotonic()
            _, errors = process.communicate(timeout=20)
            measured("ended", time.monotonic() - began, limit=2.0)
            assert isinstance(waiting.error(), (PeerLostError, ChannelClosedError))
        for noise in ("Exception in thread", "Exception ignored", "Fatal Python error"):
            assert noise not in errors, errors
        assert ("Traceback" in errors) == ("of the user" in errors), errors


LOGGING = """
import logging, os, socket, sys
from worlds import tcp_world
logging.basicConfig(level=logging.DEBUG)
with tcp_world(2, transport="tcp") as world:
    host, port = world[0].address.split(":")
    for number in range(50):
        socket.create_connection((host, int(port))).close()  # each is a line of the log
        world[0].send(b"%d" % number, 1)
        assert world[1].recv(0) == b"%d" % number
    world[0].close()
os.write(3, b"all arrived")
os._exit(0)
"""


@pytest.mark.fault(59, "a log that cannot be written breaks no message")
@pytest.mark.parametrize("stderr", ["closed", "a pipe without a reader", "a full disk"])
def test_f59_the_log_cannot_be_written(stderr):
    """Whatever logging itself complains about goes to the same place, and harms nobody."""
    redirect = {
        "closed": "2>&-",
        "a pipe without a reader": "2> >(exit 0)",
        "a full disk": "2>/dev/full",
    }[stderr]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as said:
        try:
            command = f'exec "$0" -c "$1" {redirect} 3>&{writing}'
            subprocess.run(
                ["bash", "-c", command, sys.executable, LOGGING],
                env=environment(),
                pass_fds=[writing],
                timeout=30,
                check=False,
            )
        finally:
            os.close(writing)
        assert said.read() == b"all arrived"
