"""Dialling: the end that opens a connection proves itself, and asks for proof."""

import socket
import struct
import time
from dataclasses import replace

import pytest

from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    RankwireError,
    RendezvousError,
    VersionMismatchError,
)
from rankwire.links.dialer import authenticate
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    HELLO_NBYTES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    PROTOCOL_VERSION,
    VERDICT_NBYTES,
    Hello,
    Purpose,
    Responder,
    Status,
    StillConnectedError,
    handshake_key,
    job_id,
)
from real_time import Deadline
from worlds import PATIENCE, Running

SOON = 5.0
KEY = handshake_key(b"the secret of this job, 32 bytes")
OTHER_KEY = handshake_key(b"the secret of another job, 32 b.")
HELLO = Hello(Purpose.MESSAGES, job_id("job"), epoch=5, world_size=4, rank=2, peer=1)


@pytest.fixture
def ends(make_link):
    """The socket of the end that dials, and that of the other end."""
    link = make_link()
    return link.connection.stream.sock, link.raw


def dial(sock, hello=HELLO, *, key=KEY, timeout=PATIENCE):
    return Running(authenticate, sock, hello, key=key, deadline=Deadline(timeout))


def receive(sock, nbytes):
    return sock.recv(nbytes, socket.MSG_WAITALL)


def answer(sock, *, key=KEY, status=Status.WELCOME, detail=0):
    """Be a listener; return whom it has let in."""
    responder = Responder(key=key, nonce=bytes(NONCE_NBYTES))
    sock.sendall(responder.challenge(receive(sock, HELLO_NBYTES)))
    hello = responder.verify(receive(sock, PROOF_NBYTES))
    sock.sendall(responder.verdict(status, detail))
    return hello


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_listener_that_knows_the_secret_is_reached(ends, purpose):
    near, far = ends
    hello = Hello(purpose, job_id("job"), 5, 4, 2, 1, 9)
    dialling = dial(near, hello)
    assert answer(far) == hello
    stream, seals = dialling.result()
    assert (stream.sock, seals) == (near, None), "the socket, and no seals on loopback"


def test_not_one_byte_after_the_handshake_is_taken(ends):
    near, far = ends
    dialling = dial(near)
    responder = Responder(key=KEY, nonce=bytes(NONCE_NBYTES))
    far.sendall(responder.challenge(receive(far, HELLO_NBYTES)))
    responder.verify(receive(far, PROOF_NBYTES))
    far.sendall(responder.verdict(Status.WELCOME) + b"first frame")
    dialling.result()
    near.setblocking(True)
    assert near.recv(100) == b"first frame"


def test_an_answer_in_single_bytes_is_understood(ends):
    near, far = ends
    dialling = dial(near)
    responder = Responder(key=KEY, nonce=bytes(NONCE_NBYTES))
    for byte in responder.challenge(receive(far, HELLO_NBYTES)):
        far.sendall(bytes([byte]))
    responder.verify(receive(far, PROOF_NBYTES))
    for byte in responder.verdict(Status.WELCOME):
        far.sendall(bytes([byte]))
    dialling.result()


def test_every_handshake_has_a_nonce_of_its_own(make_link):
    greetings = []
    for _ in range(2):
        link = make_link()
        dialling = dial(link.connection.stream.sock)
        greetings.append(receive(link.raw, HELLO_NBYTES))
        link.raw.close()
        dialling.error()
    assert greetings[0] != greetings[1]


# -- what can go wrong


def test_a_listener_that_does_not_know_the_secret_is_not_trusted(ends):
    near, far = ends
    dialling = dial(near)
    impostor = Responder(key=OTHER_KEY, nonce=bytes(NONCE_NBYTES))
    far.sendall(impostor.challenge(receive(far, HELLO_NBYTES)))
    receive(far, PROOF_NBYTES)
    far.sendall(impostor.verdict(Status.WELCOME))
    assert isinstance(dialling.error(), AuthenticationError)


@pytest.mark.parametrize(
    ("purpose", "text"),
    [
        (Purpose.JOIN, "secrets differ"),
        (Purpose.LAUNCH, "secrets differ"),
        (Purpose.MESSAGES, "not rank 1 of this world"),
        (Purpose.CALLS, "not rank 1 of this world"),
    ],
)
def test_a_listener_that_refuses_the_proof_has_another_key(ends, purpose, text):
    near, far = ends
    dialling = dial(near, replace(HELLO, purpose=purpose), key=OTHER_KEY)
    responder = Responder(key=KEY, nonce=bytes(NONCE_NBYTES))
    far.sendall(responder.challenge(receive(far, HELLO_NBYTES)))
    receive(far, PROOF_NBYTES)
    far.sendall(responder.refusal())
    error = dialling.error()
    assert isinstance(error, AuthenticationError)
    assert text in str(error)


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("said", [b"", b"v", bytes(VERDICT_NBYTES - 1)])
def test_a_listener_that_hangs_up_on_the_proof_has_not_refused_it(ends, purpose, said):
    near, far = ends
    dialling = dial(near, replace(HELLO, purpose=purpose))
    responder = Responder(key=KEY, nonce=bytes(NONCE_NBYTES))
    far.sendall(responder.challenge(receive(far, HELLO_NBYTES)))
    receive(far, PROOF_NBYTES)
    far.sendall(said)
    far.close()
    error = dialling.error()
    assert isinstance(error, NoConnectionError)
    assert "closed the connection during the handshake" in str(error)


@pytest.mark.parametrize("said", [b"", b"r", b"rankwire" + bytes(50)])
def test_a_listener_that_hangs_up_before_it_saw_the_proof_is_no_connection(ends, said):
    near, far = ends
    dialling = dial(near)
    receive(far, HELLO_NBYTES)
    far.sendall(said)
    far.close()
    assert isinstance(dialling.error(), NoConnectionError)


def test_a_listener_that_hangs_up_before_it_heard_anything_is_no_connection(ends):
    near, far = ends
    far.close()
    time.sleep(0.02)
    assert isinstance(dial(near).error(), NoConnectionError)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize("heard", [0, HELLO_NBYTES])
def test_a_reset_before_the_proof_is_no_connection(ends, heard):
    near, far = ends
    dialling = dial(near)
    receive(far, heard or 1)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    assert isinstance(dialling.error(), NoConnectionError)


@pytest.mark.parametrize(
    "banner",
    [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"220 mail ESMTP\r\n"],
)
def test_a_stranger_that_answers_is_named_as_one(ends, banner):
    near, far = ends
    dialling = dial(near)
    far.sendall(banner.ljust(CHALLENGE_NBYTES))
    error = dialling.error()
    assert isinstance(error, AuthenticationError)
    assert "does not speak rankwire" in str(error)


def test_a_listener_of_another_version_is_named_with_both_versions(ends):
    near, far = ends
    dialling = dial(near)
    challenge = Responder(key=KEY, nonce=bytes(NONCE_NBYTES)).challenge(receive(far, HELLO_NBYTES))
    far.sendall(challenge[:8] + struct.pack("<H", 7) + challenge[10:])
    error = dialling.error()
    assert isinstance(error, VersionMismatchError)
    assert (error.ours, error.theirs) == (PROTOCOL_VERSION, 7)


@pytest.mark.parametrize(
    ("status", "join_error", "other_error"),
    [
        (Status.DUPLICATE_RANK, RendezvousError, StillConnectedError),
        (Status.WRONG_WORLD_SIZE, RendezvousError, NoConnectionError),
        (Status.OTHER_JOB, RendezvousError, NoConnectionError),
        (Status.OTHER_EPOCH, NoConnectionError, NoConnectionError),
        (Status.INVALID_RANK, RendezvousError, NoConnectionError),
        (Status.NOT_EXPECTED, RendezvousError, NoConnectionError),
        (Status.CLOSED, ChannelClosedError, ChannelClosedError),
    ],
)
def test_a_refusal_is_an_error_of_its_type(make_link, status, join_error, other_error):
    for purpose in Purpose:
        link = make_link()
        dialling = dial(link.connection.stream.sock, Hello(purpose, job_id("job"), 5, 4, 2, 1))
        answer(link.raw, status=status, detail=3)
        is_admission = purpose in (Purpose.JOIN, Purpose.LAUNCH)
        expected = join_error if is_admission else other_error
        assert type(dialling.error()) is expected


# -- deadlines


@pytest.mark.parametrize("silent_after", ["nothing", "half a challenge", "a challenge"])
def test_a_silent_listener_is_given_up_at_the_deadline(ends, silent_after):
    near, far = ends
    began = time.monotonic()
    dialling = dial(near, timeout=0.5)
    challenge = Responder(key=KEY, nonce=bytes(NONCE_NBYTES)).challenge(receive(far, HELLO_NBYTES))
    far.sendall({"nothing": b"", "half a challenge": challenge[:30]}.get(silent_after, challenge))
    error = dialling.error()
    assert isinstance(error, DeadlineExceededError)
    assert error.limit == 0.5
    assert 0.49 <= dialling.ended - began < SOON


def test_an_answer_that_trickles_in_does_not_prolong_the_deadline(ends):
    near, far = ends
    dialling = dial(near, timeout=0.2)
    challenge = Responder(key=KEY, nonce=bytes(NONCE_NBYTES)).challenge(receive(far, HELLO_NBYTES))
    for byte in challenge[:-1]:
        if dialling.done:
            break
        far.sendall(bytes([byte]))
        time.sleep(0.1)
    assert isinstance(dialling.error(), DeadlineExceededError)
    assert dialling.seconds < SOON, "it would take 6 s to the end of the challenge"


def test_a_check_that_raises_ends_the_wait(ends):
    # The peer has gone, as the coordinator has said meanwhile.
    near, _ = ends
    checks = []

    def check():
        checks.append(1)
        if len(checks) == 2:
            raise PeerLostError(1, "the coordinator says so")

    dialling = Running(authenticate, near, HELLO, key=KEY, deadline=Deadline(PATIENCE), check=check)
    assert isinstance(dialling.error(SOON), PeerLostError)


def test_only_errors_of_this_package_come_out(make_link):
    chunks = [b"", b"\0" * 64, b"\xff" * 64, b"rankwire" + b"\0" * 56, b"rankwire\1" + b"\0" * 200]
    for chunk in chunks:
        link = make_link()
        dialling = dial(link.connection.stream.sock, timeout=SOON)
        receive(link.raw, HELLO_NBYTES)
        link.raw.sendall(chunk)
        link.raw.close()
        assert isinstance(dialling.error(), RankwireError)
