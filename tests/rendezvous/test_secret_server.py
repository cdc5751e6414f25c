"""The secret is told to the process that was started, and to nothing that it starts."""

import os
import selectors
import socket
import subprocess
import sys

import pytest

from rankwire.errors import ConfigurationError
from rankwire.rendezvous.secret import SecretServer, ask_for_secret

SECRET = b"s" * 32
# A rank that looks at the socket, by itself and by children that inherit it.
ASK = """
import os, sys
from rankwire.errors import ConfigurationError
from rankwire.rendezvous.secret import ask_for_secret
try:
    print(ask_for_secret(os.dup(int(sys.argv[1])), named="fd").decode(), flush=True)
except ConfigurationError as error:
    print(error, flush=True)
"""


@pytest.fixture
def handover():
    made = SecretServer(SECRET)
    yield made
    made.close()


def serve(handover, process, until):
    """Serve as the launcher's loop does, until a process of the rank has ended."""
    with selectors.PollSelector() as selector:
        handover.serve(selector, process)
        while until.poll() is None:
            for key, _ in selector.select(0.02):
                key.data()
        handover.close()


def run_rank(handover, program):
    fd = handover.theirs.fileno()
    rank = subprocess.Popen(
        [sys.executable, "-c", program, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
    )
    handover.theirs.close()
    serve(handover, rank.pid, rank)
    return rank.communicate()[0].splitlines()


def test_the_process_that_was_started_is_told(handover):
    assert run_rank(handover, ASK) == [SECRET.decode()]


def test_it_is_told_once(handover):
    first, second = run_rank(handover, ASK + ASK)
    assert first == SECRET.decode()
    # Its end of the socket is closed, before or while it is asked.
    assert "cannot be read" in second or "it gives it once" in second


def test_nothing_lies_in_the_socket_for_a_child_and_no_child_is_told(handover):
    """By fork, and past exec: neither reads anything, and asking gives nothing."""
    fork = """
import socket
with socket.socket(fileno=os.dup(int(sys.argv[1]))) as inherited:
    inherited.setblocking(False)
    try:
        print(inherited.recv(100))
    except BlockingIOError:
        print("nothing there", flush=True)
if os.fork() == 0:
    exec(ASK)
    os._exit(0)
os.wait()
os.set_inheritable(int(sys.argv[1]), True)
os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", ASK, sys.argv[1])
"""
    program = f"import os, sys\nASK = {ASK!r}\n{fork}\n{ASK}"
    nothing, forked, spawned, told = run_rank(handover, program)
    assert nothing == "nothing there"
    assert "only to the process that it started itself" in forked
    assert "only to the process that it started itself" in spawned
    assert told == SECRET.decode(), "and the rank itself is still told"


def test_a_program_that_replaces_itself_is_told(handover):
    program = f"""
import os, sys
os.execl(sys.executable, sys.executable, "-c", {ASK!r}, sys.argv[1])
"""
    assert run_rank(handover, program) == [SECRET.decode()]


def test_what_is_no_question_is_not_answered(handover):
    with selectors.PollSelector() as selector:
        handover.serve(selector, os.getpid())
        handover.theirs.send(b"something else")
        handover.theirs.send(b"rankwire: the secret?")  # and nowhere to write it
        answer, theirs = socket.socketpair()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, theirs.fileno().to_bytes(4, sys.byteorder))
        handover.theirs.sendmsg([b"?"], [rights])
        theirs.close()
        for _ in range(3):
            for key, _ in selector.select(0):
                key.data()
        assert answer.recv(100) == b""  # closed, not kept
        answer.close()
        handover.theirs.close()
        for key, _ in selector.select(0):
            key.data()
        assert not selector.get_map(), "all who could ask are gone"


def test_another_file_that_got_the_number_is_left_alone(tmp_path):
    with (tmp_path / "other").open("wb") as other:
        with pytest.raises(ConfigurationError, match="fd is not a launcher's socket"):
            ask_for_secret(other.fileno(), named="fd")
        other.write(b"still open")
