"""The acceptor: ranks get in at once, strangers never, and nothing they do stops it."""

import errno
import os
import random
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from headers import pack_header
from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    NoConnectionError,
    PeerLostError,
    ProtocolError,
    RankwireError,
    RendezvousError,
)
from rankwire.launch.certificates import make_certificates
from rankwire.links import acceptor as acceptor_module
from rankwire.links.acceptor import Acceptor, room_for
from rankwire.links.connection import Connection
from rankwire.links.dialer import authenticate
from rankwire.transports import unix_stream
from rankwire.transports.security import choose_policy
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp, listen_tcp, start_listening
from rankwire.transports.unix_stream import connect_unix, listen_unix
from rankwire.wire.frames import Channel
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    HELLO_NBYTES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    VERDICT_NBYTES,
    Hello,
    Initiator,
    Purpose,
    Responder,
    Status,
    handshake_key,
    job_id,
)
from real_time import Deadline
from worlds import PATIENCE, Running, eventually

SOON = 5.0
AT_ONCE = 1.0  # seconds in which a rank gets in, whatever strangers do; it takes 1 ms
KEY = handshake_key(b"the secret of this job, 32 bytes")
OTHER_KEY = handshake_key(b"the secret of another job, 32 b.")
NONCE = bytes(NONCE_NBYTES)


def hello(purpose=Purpose.MESSAGES, *, rank=2):
    return Hello(purpose, job_id("job"), epoch=5, world_size=4, rank=rank, peer=1)


class Guests:
    """A house that lets everyone in, unless told otherwise."""

    def __init__(self):
        self.verdict = (Status.WELCOME, 0)
        self.judged = []
        self.entered = []
        self.seals = []

    def admit(self, hello):
        self.judged.append(hello)
        return self.verdict

    def enter(self, hello, sock, seals):
        self.entered.append((hello, sock))
        self.seals.append(seals)


class Door:
    """A acceptor with a TCP listener and a house, and those who knock."""

    def __init__(self, cleanup, listener=None, **options):
        self.house = Guests()
        self.listener = listener or listen_tcp(TcpAddress("127.0.0.1", 0))
        self.address = TcpAddress(*self.listener.getsockname())
        self.acceptor = Acceptor(self.house, REAL_TIME, key=KEY, **options)
        self._cleanup = cleanup
        start_listening(self.listener)
        self.acceptor.listen(self.listener)
        cleanup.callback(lambda: [sock.close() for _, sock in self.house.entered])
        cleanup.callback(self.acceptor.close)

    def connect(self):
        """Connect without a word; the socket blocks."""
        sock = connect_tcp(self.address, Deadline(PATIENCE))
        self._cleanup.callback(sock.close)
        sock.settimeout(PATIENCE)
        return sock

    def knock(self, greeting=None, *, key=KEY, timeout=PATIENCE):
        """Dial as a rank does; return the socket."""
        sock = self.connect()
        sock.setblocking(False)
        authenticate(sock, greeting or hello(), key=key, deadline=Deadline(timeout))
        sock.settimeout(PATIENCE)
        return sock

    def knock_at_once(self):
        self.knock(timeout=AT_ONCE)

    @property
    def strangers(self):
        return len(self.acceptor._strangers)


def is_dropped(sock, timeout=SOON):
    """Whether the other end has closed the connection without a word."""
    sock.settimeout(timeout)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def has_ended(sock):
    """Whether that has happened already."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def door(cleanup):
    door = Door(cleanup)
    door.acceptor.start()
    return door


# -- ranks


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_rank_gets_in(door, purpose):
    near = door.knock(hello(purpose))
    [(entered, far)] = eventually(lambda: door.house.entered)
    assert entered == hello(purpose)
    assert far.sock.getblocking() is False
    assert far.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    near.sendall(b"ping")
    assert far.wait(PATIENCE)
    assert far.receive(4) == b"ping"
    assert door.strangers == 0


def test_a_rank_gets_in_over_a_unix_socket(cleanup, own_runtime_folder):
    path = f"{own_runtime_folder}/door"
    cleanup.callback(os.unlink, path)
    door = Door(cleanup)
    door.acceptor.listen(listen_unix(path))
    door.acceptor.start()
    sock = cleanup.enter_context(connect_unix(path, Deadline(PATIENCE)))
    authenticate(sock, hello(), key=KEY, deadline=Deadline(PATIENCE))
    door.knock()  # and over TCP as before
    eventually(lambda: len(door.house.entered) == 2)


def test_another_user_does_not_get_in_over_a_unix_socket(cleanup, own_runtime_folder, monkeypatch):
    path = f"{own_runtime_folder}/door"
    cleanup.callback(os.unlink, path)
    monkeypatch.setattr(unix_stream, "unix_peer", lambda _: (0, os.geteuid() + 1))
    door = Door(cleanup)
    door.acceptor.listen(listen_unix(path))
    door.acceptor.start()
    sock = cleanup.enter_context(connect_unix(path, Deadline(PATIENCE)))
    assert is_dropped(sock)
    assert not door.house.judged


def test_many_ranks_get_in_at_once(door):
    errors = []

    def knock(rank):
        try:
            door.knock(hello(rank=rank))
        except RankwireError as error:
            errors.append(error)

    threads = [threading.Thread(target=knock, args=(rank,)) for rank in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    eventually(lambda: len(door.house.entered) == 50)
    assert {entered.rank for entered, _ in door.house.entered} == set(range(50))


def test_what_a_rank_sends_with_its_proof_is_not_taken_from_its_stream(door):
    sock = door.connect()
    initiator = Initiator(hello(), key=KEY, nonce=NONCE)
    sock.sendall(initiator.hello())
    proof = initiator.proof(sock.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL))
    sock.sendall(proof + b"first frame")
    sock.close()
    [(_, far)] = eventually(lambda: door.house.entered)
    assert far.wait(PATIENCE)
    assert far.receive(100) == b"first frame"


@pytest.mark.parametrize(
    ("status", "detail", "error"),
    [
        (Status.DUPLICATE_RANK, 4711, RendezvousError),
        (Status.WRONG_WORLD_SIZE, 8, RendezvousError),
        (Status.OTHER_JOB, 0, RendezvousError),
        (Status.OTHER_EPOCH, 0, NoConnectionError),
        (Status.INVALID_RANK, 2, RendezvousError),
        (Status.NOT_EXPECTED, 0, RendezvousError),
        (Status.CLOSED, 0, ChannelClosedError),
    ],
)
def test_a_rank_that_is_refused_is_told_why_and_dropped(door, status, detail, error):
    door.house.verdict = (status, detail)
    with pytest.raises(error):
        door.knock(hello(Purpose.JOIN))
    assert eventually(lambda: door.house.judged) == [hello(Purpose.JOIN)]
    eventually(lambda: door.strangers == 0)
    assert not door.house.entered
    door.house.verdict = (Status.WELCOME, 0)
    door.knock_at_once()


# -- strangers


def test_a_wrong_secret_is_dropped_and_the_house_not_asked(door):
    with pytest.raises(AuthenticationError):
        door.knock(key=OTHER_KEY)
    assert not door.house.judged
    eventually(lambda: door.strangers == 0)
    door.knock_at_once()


def test_a_stranger_learns_nothing_but_that_its_proof_is_wrong(door):
    verdicts = set()
    for proof in (bytes(PROOF_NBYTES), bytes(range(PROOF_NBYTES))):
        sock = door.connect()
        sock.sendall(Initiator(hello(), key=OTHER_KEY, nonce=NONCE).hello())
        challenge = sock.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)
        assert challenge[:8] == b"rankwire"
        sock.sendall(proof)
        verdicts.add(sock.recv(VERDICT_NBYTES, socket.MSG_WAITALL))
        assert is_dropped(sock)
    assert verdicts == {Responder(key=KEY, nonce=NONCE).refusal()}
    sock = door.connect()
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_NBYTES))
    assert is_dropped(sock)


def test_a_silent_client_is_dropped(cleanup, monkeypatch):
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_LIMIT", 1.0)
    door = Door(cleanup)
    door.acceptor.start()
    silent = door.connect()
    halfway = door.connect()
    halfway.sendall(hello().pack(NONCE))
    before = time.monotonic()
    assert len(halfway.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)) == CHALLENGE_NBYTES
    assert is_dropped(silent)
    assert is_dropped(halfway)
    assert time.monotonic() - before < SOON
    assert door.strangers == 0
    door.knock_at_once()


def test_a_client_that_trickles_is_dropped_at_the_same_limit(cleanup, monkeypatch):
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_LIMIT", 0.2)
    door = Door(cleanup)
    door.acceptor.start()
    sock = door.connect()
    with suppress(ConnectionError):
        for byte in hello().pack(NONCE)[:-1]:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
        pytest.fail("it was listened to until the last byte but one")
    assert is_dropped(sock)


def http(*lines):
    return "\r\n".join((*lines, "", "")).encode()


TLS_CLIENT_HELLO = bytes.fromhex(
    "16030100c8010000c40303" + "5a" * 32 + "20" + "a5" * 32 + "0020130113021303c02bc02fc02cc030"
    "cca9cca8c013c014009c009d002f0035000a0100005b0000000e000c0000096c6f63616c686f7374"
)
GARBAGE = [
    http("GET / HTTP/1.1", "Host: 127.0.0.1", "User-Agent: Mozilla/5.0", "Accept: */*"),
    http("POST /rpc HTTP/1.1", "Content-Length: 1000000000"),
    http("OPTIONS * HTTP/1.0"),
    http("CONNECT example.com:443 HTTP/1.1"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    http("GET /metrics HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade"),
    TLS_CLIENT_HELLO,
    TLS_CLIENT_HELLO[:5],
    bytes.fromhex("802e0103010015000000100100800300800500800700c0060040020080040080"),  # SSLv2
    b"SSH-2.0-OpenSSH_9.6p1\r\n" + bytes(200),
    b"EHLO client\r\n",
    b"USER anonymous\r\n",
    b"HELP\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\0",
    b"\0" * 128,
    b"\0" * 100_000,
    b"\xff" * 128,
    b"\xff" * 100_000,
    b"*1\r\n$4\r\nPING\r\n",  # Redis
    b"stats\r\n",  # memcached
    bytes.fromhex("0000000804d2162f"),  # PostgreSQL SSLRequest
    bytes.fromhex("3a000000a68f0100000000000d27000000000000"),  # MongoDB
    bytes.fromhex("001e000601000001000000000000076578616d706c6503636f6d0000010001"),  # DNS
    b"OPTIONS sip:nm SIP/2.0\r\nVia: SIP/2.0/TCP nm\r\n\r\n",
    b"OPTIONS / RTSP/1.0\r\n\r\n",
    bytes.fromhex("030000130ee000000000000100080003000000"),  # RDP
    bytes.fromhex("000000a4ff534d4272000000000801400000000000000000"),  # SMB
    bytes.fromhex("300c020101600702010204008000"),  # LDAP
    bytes.fromhex("ff00000000000000017f0300") + b"NULL" + bytes(48),  # ZeroMQ
    b"AMQP\0\0\x09\x01",
    bytes.fromhex("101000044d5154540402003c00046e6d6170"),  # MQTT
    bytes.fromhex("0000001500120000000000010005726469726b"),  # Kafka
    b"JRMI\0\x02\x4b",  # Java RMI
    b"\xac\xed\0\x05sr\0\x11java.util.HashMap",  # Java serialisation
    b"\x80\x05\x95cos\nsystem\n(S'true'\ntR.",  # pickle
    b"\x93NUMPY\x01\0",
    b"GIOP\x01\0\x01\0$\0\0\0",
    b"\x3c\xc1\x85\x30\0",  # torch's TCPStore
    b"rankwire",
    b"rankwire".ljust(HELLO_NBYTES, b"\xff"),
    hello().pack(NONCE)[:-1] + b"\1",
    hello().pack(NONCE)[:10] + b"\xff\xff" + hello().pack(NONCE)[12:],
    hello().pack(NONCE) + bytes(PROOF_NBYTES),
    hello().pack(NONCE) + b"\xff" * 100_000,
    hello().pack(NONCE) * 2,
    hello().pack(NONCE)[:8] + b"\2\0" + hello().pack(NONCE)[10:] + bytes(PROOF_NBYTES),
    pack_header((0, Channel.CONTROL, 0), 100, 0) * 10,
    *(random.Random(seed).randbytes(50 * 4**seed) for seed in range(6)),
]


def test_garbage_of_all_kinds_keeps_no_rank_out(door):
    assert len(GARBAGE) > 50
    held = []
    for garbage in GARBAGE:
        held.append(door.connect())
        with suppress(ConnectionError):
            held[-1].sendall(garbage)
        gone = door.connect()
        with suppress(ConnectionError):
            gone.sendall(garbage)
        gone.close()
        door.knock_at_once()
    assert len(door.house.judged) == len(GARBAGE), "nobody else was let in"
    for sock in held:
        sock.close()
    eventually(lambda: door.strangers == 0)


def test_every_truncation_of_a_good_session_keeps_no_rank_out(door):
    for length in range(HELLO_NBYTES + PROOF_NBYTES):
        sock = door.connect()
        initiator = Initiator(hello(), key=KEY, nonce=NONCE)
        sock.sendall(initiator.hello()[:length])
        if length >= HELLO_NBYTES:
            proof = initiator.proof(sock.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL))
            sock.sendall(proof[: length - HELLO_NBYTES])
        sock.close()
    door.knock_at_once()
    eventually(lambda: door.strangers == 0 and door.house.entered)
    assert len(door.house.judged) == len(door.house.entered) == 1


def test_a_rank_joins_while_300_silent_connections_are_held(door):
    silent = [door.connect() for _ in range(300)]
    door.knock_at_once()
    door.knock_at_once()
    # Those that connect at about the same time may be accepted in another order.
    eventually(lambda: sum(map(has_ended, silent)) >= 44)
    assert 250 <= door.strangers <= 256
    assert all(map(has_ended, silent[:35])), "the oldest go"
    assert not any(map(has_ended, silent[55:])), "the others stay"


def test_there_is_room_for_as_many_handshakes_as_the_world_needs(cleanup):
    door = Door(cleanup, room=room_for(400))
    door.acceptor.start()
    silent = [door.connect() for _ in range(700)]
    door.knock_at_once()
    eventually(lambda: door.strangers == 700)
    assert not any(map(has_ended, silent))


def test_a_rank_that_is_dropped_to_make_room_is_not_told_that_its_secret_is_wrong(cleanup):
    door = Door(cleanup, room=4)
    door.acceptor.start()
    slow = door.connect()
    slow.sendall(Initiator(hello(), key=KEY, nonce=NONCE).hello())
    slow.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)
    for _ in range(4):
        door.connect()
    assert is_dropped(slow), "without a verdict"


def test_a_stranger_that_is_dropped_for_another_may_speak_at_that_moment(cleanup):
    """Its number is taken by the newcomer, and what it said must not be taken for theirs."""
    door = Door(cleanup, room=4)
    door.acceptor.start()
    old = [door.connect() for _ in range(4)]
    eventually(lambda: door.strangers == 4)
    busy, go_on = threading.Event(), threading.Event()
    door.acceptor.call_soon(lambda: busy.set() or go_on.wait(PATIENCE))
    busy.wait(PATIENCE)
    new = [door.connect() for _ in range(4)]
    for sock in old:
        sock.sendall(b"r")
    go_on.set()
    door.knock_at_once()
    assert all(is_dropped(sock) for sock in old)
    assert not has_ended(new[-1])


# -- out of resources


class Exhausted(socket.socket):
    """A listener whose ``accept`` fails as often as it is told, in the given way."""

    failures = ()

    def accept(self):
        if self.failures:
            code = self.failures.pop(0)
            raise OSError(code, os.strerror(code))
        return super().accept()


@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED]
)
def test_accepting_goes_on_after_it_has_failed_for_a_while(cleanup, code, caplog):
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.failures = [code] * 3
    door = Door(cleanup, listener)
    door.acceptor.start()
    caplog.set_level("ERROR", logger="rankwire")
    door.knock(timeout=SOON)
    assert not listener.failures
    eventually(lambda: door.house.entered)


def test_being_out_of_descriptors_costs_no_processor_time_and_ends_when_there_are_some(cleanup):
    script = textwrap.dedent(
        """
        import resource, socket, sys, time
        sys.path.insert(0, sys.argv[1])
        import logging
        from test_acceptor import KEY, Guests
        from rankwire.clock import REAL_TIME
        from rankwire.links.acceptor import Acceptor
        from rankwire.transports.tcp_stream import TcpAddress, listen_tcp, start_listening

        logging.disable()
        listener = listen_tcp(TcpAddress("127.0.0.1", 0))
        start_listening(listener)
        acceptor = Acceptor(Guests(), REAL_TIME, key=KEY)
        acceptor.listen(listener)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        acceptor.start()
        print(listener.getsockname()[1], flush=True)
        sys.stdin.readline()
        used = time.process_time()
        time.sleep(0.5)
        print(time.process_time() - used, flush=True)
        sys.stdin.readline()
        acceptor.close()
        """
    )
    here = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, here],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            address = TcpAddress("127.0.0.1", int(process.stdout.readline()))
            held = [connect_tcp(address, Deadline(PATIENCE)) for _ in range(80)]
            time.sleep(0.2)
            print(file=process.stdin, flush=True)
            assert float(process.stdout.readline()) < 0.25, "it must not spin"
            for sock in held:
                sock.close()
            with connect_tcp(address, Deadline(PATIENCE)) as sock:
                authenticate(sock, hello(), key=KEY, deadline=Deadline(SOON))
            print(file=process.stdin, flush=True)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


# -- a house that makes mistakes


@pytest.mark.parametrize("mistake", [ValueError, OSError])
@pytest.mark.parametrize("method", ["admit", "enter"])
def test_a_house_that_fails_with_one_visitor_is_still_served(door, method, mistake):
    good = getattr(door.house, method)

    def fail(*_):
        raise mistake("of the house")

    setattr(door.house, method, fail)
    sock = door.connect()
    sock.setblocking(False)
    with suppress(RankwireError):
        authenticate(sock, hello(), key=KEY, deadline=Deadline(PATIENCE))
    assert is_dropped(sock)
    setattr(door.house, method, good)
    assert door.acceptor._thread.is_alive()
    door.knock_at_once()


# -- control connections


class Control:
    """A connection that an acceptor watches, its other end, and what was reported."""

    def __init__(self, door, cleanup, *, on_frames=None):
        near, self.far = socket.socketpair()
        near.setblocking(False)
        self.connection = Connection(near, peer=3, max_nbytes=1000, clock=REAL_TIME)
        self.frames, self.ends, self.threads = [], [], set()
        self._on_frames = on_frames
        cleanup.callback(self.connection.close)
        cleanup.callback(self.far.close)
        watched = threading.Event()
        door.acceptor.call_soon(
            lambda: door.acceptor.watch(self.connection, self.heard, self.ended) or watched.set()
        )
        assert watched.wait(PATIENCE)

    def heard(self, frames):
        self.threads.add(threading.current_thread().name)
        self.frames += frames
        if self._on_frames is not None:
            self._on_frames(frames)

    def ended(self, error):
        self.threads.add(threading.current_thread().name)
        self.ends.append(error)

    def say(self, payload, sequence):
        self.far.sendall(pack_header((0, Channel.CONTROL, 0), len(payload), sequence) + payload)


@pytest.fixture
def control(door, cleanup):
    return Control(door, cleanup)


def test_the_frames_of_a_control_connection_are_reported_on_the_acceptors_thread(control):
    for number in range(20):
        control.say(bytes([number]) * number, number)
    eventually(lambda: len(control.frames) == 20)
    assert [frame.payload for frame in control.frames] == [bytes([n]) * n for n in range(20)]
    assert control.threads == {"rankwire-acceptor"}
    assert not control.ends


def test_a_frame_that_comes_in_parts_is_reported_once_whole(control):
    stream = pack_header((0, Channel.CONTROL, 0), 5, 0) + b"hello"
    for index in range(len(stream)):
        control.far.sendall(stream[index : index + 1])
    [frame] = eventually(lambda: control.frames)
    assert frame.payload == b"hello"


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (b"", PeerLostError),
        (bytes(10), PeerLostError),
        (b"\xff" * 64, ProtocolError),
        (pack_header((0, Channel.CONTROL, 0), 1001, 1), ProtocolError),
        (pack_header((0, Channel.FAREWELL, 0), 0, 1), ChannelClosedError),
    ],
    ids=["end", "truncated", "garbage", "too large", "farewell"],
)
def test_the_end_of_a_control_connection_is_reported_once_by_its_kind(control, last, kind):
    control.say(b"hello", 0)
    eventually(lambda: control.frames)
    control.far.sendall(last)
    control.far.close()
    eventually(lambda: control.ends)
    time.sleep(0.02)
    assert [type(error) for error in control.ends] == [kind]
    assert control.ends[0].peer == 3
    assert [frame.payload for frame in control.frames] == [b"hello"]
    assert control.connection.failure is not None


def test_a_message_that_the_owner_cannot_read_ends_its_connection_only(door, cleanup):
    def refuse(frames):
        raise ProtocolError("not a control message")

    bad, good = Control(door, cleanup, on_frames=refuse), Control(door, cleanup)
    bad.say(b"?", 0)
    [error] = eventually(lambda: bad.ends)
    assert isinstance(error, ProtocolError)
    good.say(b"!", 0)
    eventually(lambda: good.frames)
    door.knock_at_once()


def test_a_connection_that_is_not_watched_any_more_is_left_alone(door, control):
    done = threading.Event()
    door.acceptor.call_soon(lambda: door.acceptor.unwatch(control.connection) or done.set())
    assert done.wait(PATIENCE)
    control.say(b"hello", 0)
    control.far.close()
    door.knock_at_once()
    assert not control.frames
    assert not control.ends
    assert control.connection.read(Deadline(PATIENCE))[0].payload == b"hello"


def test_what_is_posted_runs_in_order_on_the_acceptors_thread(door):
    ran = []
    for number in range(1000):
        door.acceptor.call_soon(lambda n=number: ran.append((n, threading.current_thread().name)))
    eventually(lambda: len(ran) == 1000)
    assert ran == [(number, "rankwire-acceptor") for number in range(1000)]


# -- closing


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_thread_and_no_descriptor(cleanup):
    before, threads = descriptors(), threading.active_count()
    door = Door(cleanup)
    door.acceptor.start()
    sock = door.connect()
    halfway = door.connect()
    halfway.sendall(hello().pack(NONCE))
    eventually(lambda: door.strangers == 2)
    door.acceptor.close()
    assert threading.active_count() == threads
    assert is_dropped(sock)
    with suppress(ConnectionResetError):
        halfway.recv(CHALLENGE_NBYTES)
    assert is_dropped(halfway)
    sock.close()
    halfway.close()
    assert descriptors() == before
    with pytest.raises(NoConnectionError):
        connect_tcp(door.address, Deadline(PATIENCE))
    cleanup.enter_context(listen_tcp(door.address))


def test_closing_twice_or_before_the_start_is_fine(cleanup):
    before = descriptors()
    door = Door(cleanup)
    door.acceptor.close()
    door.acceptor.close()
    assert descriptors() == before


def test_what_is_posted_after_closing_is_ignored(door):
    door.acceptor.close()
    door.acceptor.call_soon(lambda: pytest.fail("it ran"))


def test_what_is_posted_at_the_moment_of_closing_touches_no_descriptor_of_others(door, monkeypatch):
    writing, closed = threading.Event(), threading.Event()
    write = os.eventfd_write

    def slow_write(descriptor, value):
        if threading.current_thread().name == "test":
            writing.set()
            closed.wait(0.2)  # it must not close meanwhile
        return write(descriptor, value)

    monkeypatch.setattr(runtime, "eventfd_write", slow_write)
    posting = Running(door.acceptor.call_soon, lambda: None)
    assert writing.wait(PATIENCE)
    door.acceptor.close()
    closed.set()
    posting.result()


def test_closing_while_strangers_keep_coming_ends(cleanup):
    for _ in range(10):
        door = Door(cleanup)
        door.acceptor.start()
        stop = threading.Event()

        def flood(door=door, stop=stop):
            while not stop.is_set():
                with suppress(OSError), connect_tcp(door.address, Deadline(1.0)) as sock:
                    sock.send(b"rankwire")

        thread = threading.Thread(target=flood)
        thread.start()
        time.sleep(0.01)
        before = time.monotonic()
        door.acceptor.close()
        assert time.monotonic() - before < SOON
        stop.set()
        thread.join()


def test_the_owner_may_close_it_from_its_own_thread(cleanup):
    door = Door(cleanup)
    door.acceptor.start()
    door.acceptor.call_soon(door.acceptor.close)
    eventually(lambda: not door.acceptor._thread.is_alive())
    with pytest.raises(NoConnectionError):
        connect_tcp(door.address, Deadline(PATIENCE))


def test_a_verdict_is_sent_before_the_socket_is_handed_over(door):
    sent_first = []

    def enter(greeting, stream, seals):
        stream.send_all(struct.pack("<Q", 42))
        sent_first.append(stream)

    door.house.enter = enter
    near = door.knock()
    near.settimeout(PATIENCE)
    assert struct.unpack("<Q", near.recv(8, socket.MSG_WAITALL)) == (42,)
    eventually(lambda: sent_first)  # it has sent before it takes note of that
    sent_first[0].close()


# -- protection


def test_a_rank_that_offers_too_little_is_told_and_the_house_not_asked(cleanup):
    door = Door(cleanup, policy=choose_policy("auth", TcpAddress("127.0.0.1", 0)))
    door.acceptor.start()
    with pytest.raises(NoConnectionError, match="wants sealed frames"):
        door.knock()
    assert door.house.judged == []


def test_both_ends_get_seals_that_fit(cleanup):
    policy = choose_policy("auth", TcpAddress("127.0.0.1", 0))
    door = Door(cleanup, policy=policy)
    door.acceptor.start()
    sock = door.connect()
    sock.setblocking(False)
    _, near = authenticate(sock, hello(), key=KEY, deadline=Deadline(PATIENCE), policy=policy)
    (far,) = eventually(lambda: door.house.seals)
    header = bytes(32)
    assert near.outgoing.of(0, header, 1, [b"x"], 1) == far.incoming.of(0, header, 1, [b"x"], 1)
    assert near.incoming.of(0, header, 1, [b"x"], 1) == far.outgoing.of(0, header, 1, [b"x"], 1)


@pytest.fixture
def tls_door(cleanup, tmp_path):
    pytest.importorskip("cryptography")
    (files,) = make_certificates(tmp_path / "tls", 1)
    both_ends = replace(files, names="any")
    policy = choose_policy("tls", TcpAddress("127.0.0.1", 0), tls=both_ends)
    door = Door(cleanup, policy=policy)
    door.acceptor.start()
    return door, policy


def knock_inside_tls(door, policy, timeout=PATIENCE):
    sock = door.connect()
    sock.setblocking(False)
    return authenticate(sock, hello(), key=KEY, deadline=Deadline(timeout), policy=policy)[0]


def test_a_rank_gets_in_through_tls_while_strangers_hold_on(tls_door):
    door, policy = tls_door
    silent = [door.connect() for _ in range(50)]
    halfway = [door.connect() for _ in range(50)]
    for sock in halfway:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")  # a record that never ends
    stream = knock_inside_tls(door, policy, AT_ONCE)
    assert stream.session.version() == "TLSv1.3"
    assert eventually(lambda: len(door.house.entered)) == 1
    assert door.strangers == len(silent) + len(halfway), "each costs a slot, and no more"


def test_a_stranger_that_never_finishes_tls_is_dropped_in_time(tls_door, monkeypatch):
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_LIMIT", 0.1)
    door, _ = tls_door
    sock = door.connect()
    sock.sendall(b"\x16\x03\x01\x02\x00\x01")
    assert is_dropped(sock)
    assert door.strangers == 0


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"rankwire" + bytes(120)])
def test_who_does_not_speak_tls_is_dropped(tls_door, noise):
    door, policy = tls_door
    sock = door.connect()
    sock.sendall(noise)
    sock.settimeout(SOON)
    assert sock.recv(100)[:1] in (b"", b"\x15"), "an alert of TLS, at most"
    knock_inside_tls(door, policy)
