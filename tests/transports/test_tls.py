"""TLS streams: sockets to their owners, whatever the network and OpenSSL do."""

import contextlib
import fcntl
import os
import random
import socket
import ssl
from dataclasses import replace

import pytest

from connected import read_into, write
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    ProtocolError,
)
from rankwire.launch.certificates import make_certificates
from rankwire.links.connection import Connection
from rankwire.transports.security import Tls
from rankwire.transports.tcp_stream import tune_tcp
from rankwire.transports.tls import TlsContexts, TlsStream, _make_context, names_of_peer
from rankwire.wire.frames import Channel
from rankwire.wire.handshake import LAUNCHER
from real_time import Deadline
from worlds import PATIENCE, Running, eventually

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours", 2)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """Certificates of another authority."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "theirs", 2)


@pytest.fixture
def tcp(cleanup):
    """Two connected TCP sockets, which do not block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        tune_tcp(sock)
        cleanup.callback(sock.close)
    return near, far


def accept(stream):
    """Be the listener's half of the TLS handshake."""
    eventually(stream.shake_hands)
    return stream


def shake(near, far, dialling, listening):
    """Return both ends, hands shaken."""
    dial = Running(TlsContexts(dialling).dial, near, Deadline(PATIENCE), lambda: None)
    listener = accept(TlsContexts(listening).accept(far))
    return dial.result(), listener


@pytest.fixture
def streams(tcp, files):
    return shake(*tcp, files[0], files[1])


@pytest.fixture
def pair(streams, cleanup):
    """Two connections to each other, inside TLS."""
    made = [
        Connection(end, peer=1 - rank, max_nbytes=1 << 30, clock=REAL_TIME)
        for rank, end in enumerate(streams)
    ]
    for connection in made:
        cleanup.callback(connection.close)
    return made


def receive_all(stream, nbytes):
    data = bytearray()
    buffer = memoryview(bytearray(50_000))
    while len(data) < nbytes:
        try:
            count = read_into(stream, buffer)
        except BlockingIOError:
            continue
        assert count, "the stream ended"
        data += buffer[:count]
    return bytes(data)


# -- the stream


def test_both_ends_know_the_listeners_certificate(streams, files):
    assert streams[0].binding == streams[1].binding
    assert len(streams[0].binding) == 32
    assert streams[0].session.version() == streams[1].session.version() == "TLSv1.3"


@pytest.mark.parametrize("size", [1, 100, 16384, 16385, 100_000, 3_000_000])
def test_bytes_arrive_in_both_directions(streams, size):
    data = random.Random(size).randbytes(size)
    for sender, receiver in (streams, streams[::-1]):
        sending = Running(send_all, sender, data)
        assert receive_all(receiver, size) == data
        sending.result()


def send_all(stream, data):
    view = memoryview(data)
    while view:
        try:
            view = view[write(stream, view[:7], b"", view[7:]) :]
        except BlockingIOError:
            continue


def test_what_the_socket_does_not_take_counts_as_one_byte_unsent_and_leaves_later(streams):
    sender, receiver = streams
    data = random.Random(1).randbytes(20 << 20)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += write(sender, memoryview(data)[sent:])
    assert sent < len(data)
    with pytest.raises(BlockingIOError):
        write(sender, memoryview(data)[sent:])
    reading = Running(receive_all, receiver, sent + 1)
    while True:
        try:
            assert write(sender, memoryview(data)[sent:]) == 1, "the byte it owed"
            break
        except BlockingIOError:
            continue
    assert reading.result() == data[: sent + 1]


def test_looking_does_not_take(streams):
    near, far = streams
    with pytest.raises(BlockingIOError):
        far.peek(10)
    write(near, b"abcdef")
    assert eventually(lambda: peeked(far, 3)) == b"abc"
    assert far.peek(10) in (b"abc", b"abcdef")
    assert receive_all(far, 6) == b"abcdef"


def peeked(stream, nbytes):
    try:
        return stream.peek(nbytes)
    except BlockingIOError:
        return b""


def test_in_the_handshake_not_one_record_more_is_read(streams):
    near, far = streams
    write(near, b"proof")
    write(near, b"a frame")
    assert eventually(lambda: peek_socket(far, 40))
    assert far.receive(5) == b"proof"
    assert not far._received.pending, "the rest is still in the socket, where pollers see it"
    assert receive_all(far, 7) == b"a frame"


def peek_socket(stream, nbytes):
    return len(stream.sock.recv(1000, socket.MSG_PEEK)) >= nbytes


def test_an_end_of_the_socket_is_an_end_of_the_stream(streams):
    near, far = streams
    write(near, b"last")
    near.shut_down()
    assert receive_all(far, 4) == b"last"
    assert read_into(far, bytearray(10)) == 0
    assert far.peek(1) == b""


@pytest.mark.parametrize("where", [0, 5, 10, -1])
def test_an_altered_record_is_refused(streams, where):
    near, far = streams
    near.session.write(b"twelve bytes")
    record = bytearray(near._encrypted.read())
    record[where] ^= 1
    near.sock.send(record)
    with pytest.raises(ProtocolError, match="TLS"):
        receive_all(far, 1)
    with pytest.raises(ProtocolError, match="TLS"):
        read_into(far, bytearray(1))


def test_a_repeated_record_is_refused(streams):
    near, far = streams
    near.session.write(b"pay 100")
    record = near._encrypted.read()
    near.sock.send(record * 2)
    with pytest.raises(ProtocolError, match="TLS"):
        receive_all(far, 14)


# -- connections inside it


def test_frames_of_any_size_arrive(pair):
    for size in (0, 10, 16_384, 70_000, 1 << 20, 8 << 20):
        payload = random.Random(size).randbytes(size)
        sending = Running(pair[0].send, (0, 1, 5), ((payload,), size), Deadline(PATIENCE))
        frames = pair[1].read(Deadline(PATIENCE))
        while not frames:
            frames = pair[1].read(Deadline(PATIENCE))
        sending.result()
        assert bytes(frames[0].payload) == payload


def test_one_read_takes_all_that_a_poller_would_not_see(pair):
    for number in range(200):
        pair[0].send((0, Channel.MESSAGE, number), ((bytes(1000),), 1000), Deadline(PATIENCE))
    frames = []
    while len(frames) < 200:
        frames += pair[1].read(Deadline(PATIENCE))
        # Nothing whole is left inside when the reader may go to sleep.
        assert not pair[1].stream.has_pending
    assert [frame.envelope[2] for frame in frames] == list(range(200))


def test_threads_read_and_write_at_once(pair):
    """OpenSSL's objects are not thread-safe; here four threads use two of them."""
    count, size = 300, 20_000

    def write(connection):
        for number in range(count):
            connection.send(
                (0, 1, number), ((bytes([number % 251]) * size,), size), Deadline(PATIENCE)
            )

    def read(connection):
        frames = []
        while len(frames) < count:
            frames += connection.read(Deadline(PATIENCE))
        return [(frame.envelope[2], frame.payload[0], len(frame.payload)) for frame in frames]

    writing = [Running(write, connection) for connection in pair]
    reading = [Running(read, connection) for connection in pair]
    expected = [(number, number % 251, size) for number in range(count)]
    assert [each.result() for each in reading] == [expected, expected]
    for each in writing:
        each.result()


def test_a_send_that_is_not_taken_in_time_still_arrives_whole(pair):
    size = 30 << 20
    payload = random.Random(0).randbytes(size)
    with pytest.raises(DeadlineExceededError):
        pair[0].send((0, 1, 1), ((payload,), size), Deadline(0.05))
    assert pair[0].outbox.is_holding
    flushing = Running(pair[0].send, (0, 1, 2), ((b"next",), 4), Deadline(PATIENCE))
    frames = []
    while len(frames) < 2:
        frames += pair[1].read(Deadline(PATIENCE))
    flushing.result()
    assert bytes(frames[0].payload) == payload
    assert (frames[1].envelope[2], frames[1].payload) == (2, b"next")


def test_a_violation_behind_good_frames_ends_the_connection_after_them(pair):
    pair[0].send((0, 1, 1), ((b"good",), 4), Deadline(PATIENCE))
    write(pair[0].stream, b"\xff" * 32)
    frames = []
    while not frames:
        frames = pair[1].read(Deadline(PATIENCE))
    assert [frame.envelope[2] for frame in frames] == [1]
    with pytest.raises(ProtocolError):
        pair[1].read(Deadline(PATIENCE))


def test_a_farewell_is_seen_by_who_only_writes(pair):
    pair[1].farewell(Deadline(PATIENCE))
    pair[1].close()

    def send_on():
        while True:
            pair[0].send((0, 1, 0), ((bytes(1000),), 1000), Deadline(PATIENCE))

    with pytest.raises(ConnectionError, match="has left"):
        send_on()


# -- who is refused


def dial_error(near, far, dialling, serve):
    """Return why dialling fails, with the listener's half played by ``serve(far)``."""
    dial = Running(dial_and_read, TlsContexts(dialling), near)
    with pytest.raises((AuthenticationError, OSError)):
        serve(far)
    far.close()
    return dial.error()


def dial_and_read(contexts, sock):
    """Dial; in TLS 1.3 a listener's refusal is seen only when one reads."""
    stream = contexts.dial(sock, Deadline(PATIENCE), lambda: None)
    while True:
        try:
            assert stream.receive(1), "the other end hung up"
        except BlockingIOError:
            continue


def test_a_certificate_of_another_authority_is_refused_by_the_listener(tcp, files, strangers):
    mixed = Tls(cert=strangers[0].cert, key=strangers[0].key, ca=files[0].ca)
    error = dial_error(*tcp, mixed, lambda far: accept(TlsContexts(files[1]).accept(far)))
    assert isinstance(error, AuthenticationError), error
    assert "unknown ca" in str(error)


def test_a_listener_of_another_authority_is_refused(tcp, files, strangers):
    error = dial_error(*tcp, files[0], lambda far: accept(TlsContexts(strangers[1]).accept(far)))
    assert isinstance(error, AuthenticationError), error
    assert "certificate verify failed" in str(error)


def test_a_dialler_without_a_certificate_is_refused(tcp, files):
    near, far = tcp
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=files[0].ca)
    bare = TlsStream(near, context, server_side=False)
    dialling = Running(eventually, bare.shake_hands)
    with pytest.raises(AuthenticationError, match="did not return a certificate"):
        accept(TlsContexts(files[1]).accept(far))
    dialling.result()


@pytest.mark.parametrize("side", ["dialler", "listener"])
def test_tls_1_2_is_refused(tcp, files, side):
    near, far = tcp
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if side == "dialler" else ssl.PROTOCOL_TLS_SERVER)
    old.check_hostname = False
    old.load_verify_locations(cafile=files[0].ca)
    old.load_cert_chain(files[0].cert, files[0].key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    if side == "dialler":
        theirs = Running(eventually, TlsStream(near, old, server_side=False).shake_hands)
        with pytest.raises(AuthenticationError, match="protocol"):
            accept(TlsContexts(files[1]).accept(far))
    else:
        theirs = Running(eventually, TlsStream(far, old, server_side=True).shake_hands)
        with pytest.raises(AuthenticationError, match="protocol"):
            TlsContexts(files[1]).dial(near, Deadline(PATIENCE), lambda: None)
    theirs.error()


GARBAGE = {
    "a greeting without TLS": b"rankwire\x02\x00" + bytes(118),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(100),
    "a bare alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a record of noise": b"\x16\x03\x01\x00\x40" + bytes(range(64)),
    "a record too long": b"\x16\x03\x01\xff\xff" + bytes(20_000),
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("noise", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_by_the_listener(tcp, files, noise):
    near, far = tcp
    near.send(noise)
    near.shutdown(socket.SHUT_WR)
    with pytest.raises((AuthenticationError, ConnectionError)):
        accept(TlsContexts(files[1]).accept(far))


@pytest.mark.parametrize("noise", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_by_the_dialler(tcp, files, noise):
    near, far = tcp
    far.send(noise)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises((AuthenticationError, NoConnectionError)):
        TlsContexts(files[1]).dial(near, Deadline(PATIENCE), lambda: None)


def test_a_silent_listener_is_waited_for_until_the_deadline(tcp, files):
    with pytest.raises(DeadlineExceededError, match="TLS"):
        TlsContexts(files[1]).dial(tcp[0], Deadline(0.05), lambda: None)


# -- files


def test_a_key_that_does_not_fit_is_refused(files):
    with pytest.raises(ConfigurationError, match="cannot be used"):
        TlsContexts(Tls(cert=files[0].cert, key=files[1].key, ca=files[0].ca))


def test_a_key_that_others_can_read_is_refused(tmp_path, files):
    key = tmp_path / "open.key"
    key.write_bytes(files[0].key.read_bytes())
    key.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"open\.key must .* closed to others"):
        TlsContexts(Tls(cert=files[0].cert, key=key, ca=files[0].ca))
    key.chmod(0o400)
    TlsContexts(Tls(cert=files[0].cert, key=key, ca=files[0].ca))


def test_the_key_that_was_checked_is_the_one_that_is_loaded(tmp_path, files, monkeypatch):
    """In a folder that others can write, a name can mean another file a moment later."""
    key = tmp_path / "rank.key"
    key.write_bytes(files[0].key.read_bytes())
    key.chmod(0o600)
    check = os.fstat

    def check_and_exchange(descriptor):
        status = check(descriptor)
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH:  # not that of its name alone
            other = tmp_path / "other"
            other.write_text("of somebody else")
            other.rename(key)
        return status

    monkeypatch.setattr(os, "fstat", check_and_exchange)
    _make_context(ssl.PROTOCOL_TLS_SERVER, Tls(cert=files[0].cert, key=key, ca=files[0].ca))
    assert key.read_text() == "of somebody else"


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(tmp_path, files):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files[0].key.read_bytes(), None)
    closed = tmp_path / "closed.key"
    closed.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    closed.chmod(0o600)
    with pytest.raises(ConfigurationError, match="passphrase"):
        TlsContexts(Tls(cert=files[0].cert, key=closed, ca=files[0].ca))


# -- whose certificate it is


class Shown:
    """The other end of a connection, as far as its certificate goes."""

    def __init__(self, *names):
        self.session = self
        self._names = names

    def getpeercert(self):
        return {"subjectAltName": [("DNS", name) for name in self._names]}


def test_both_ends_know_whose_certificate_the_other_has_shown(streams):
    near, far = streams  # the certificates of rank 0 and rank 1
    assert names_of_peer(near) == ["rank-1"]
    assert names_of_peer(far) == ["rank-0"]


@pytest.mark.parametrize(
    ("names", "who", "shown", "fits"),
    [
        ("rank-{rank}", 1, ["rank-1"], True),
        ("rank-{rank}", 1, ["other", "rank-1"], True),
        ("rank-{rank}", 1, ["rank-11"], False),
        ("rank-{rank}", 11, ["rank-1"], False),
        ("rank-{rank}", 1, ["rank-2"], False),
        ("rank-{rank}", 1, ["launcher"], False),
        ("rank-{rank}", 1, ["*"], False),
        ("rank-{rank}", 1, ["rank-*"], False),
        ("rank-{rank}", 1, [], False),
        ("rank-{rank}", LAUNCHER, ["launcher"], True),
        ("rank-{rank}", LAUNCHER, ["rank-0"], False),
        ("rank-{rank}", LAUNCHER, [f"rank-{LAUNCHER}"], False),
        ("w-{rank}.job.example", 3, ["w-3.job.example"], True),
        ("w-{rank}.job.example", 3, ["rank-3"], False),
        ("spiffe://us/{rank}", 3, ["spiffe://us/3"], True),
        ("any", 3, [], True),
        ("any", LAUNCHER, ["rank-0"], True),
    ],
)
def test_a_certificate_is_of_one_rank_or_of_launchers(files, names, who, shown, fits):
    contexts = TlsContexts(replace(files[0], names=names))
    objection = contexts.objection_to(Shown(*shown), who)
    assert bool(objection) is not fits
    if not fits:
        assert all(repr(name) in objection for name in shown)


@pytest.mark.parametrize("names", ["", "rank", "host.example", "{}", "Any"])
def test_names_that_say_nothing_of_ranks_are_refused(files, names):
    with pytest.raises(ConfigurationError, match="names="):
        TlsContexts(replace(files[0], names=names))
