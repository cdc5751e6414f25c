"""Joining: what a rank makes of everything that may answer at rank 0's address."""

import contextlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from headers import pack_header
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    AuthenticationError,
    PeerLostError,
    ProtocolError,
    RankwireError,
    RendezvousError,
    VersionMismatchError,
)
from rankwire.links.connection import Connection
from rankwire.rendezvous.join import Attempts, Joiner
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.transports.tcp_stream import TcpAddress
from rankwire.wire.control_messages import (
    Failed,
    Gone,
    Join,
    Member,
    Waiting,
    World,
    pack,
    unpack,
)
from rankwire.wire.frames import Channel
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    HELLO_NBYTES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    PROTOCOL_VERSION,
    Hello,
    Purpose,
    Responder,
    Status,
    handshake_key,
    job_id,
)
from rankwire.wire.keys import SALT_NBYTES, pair_keys, rank_key, wrap
from real_time import Deadline
from worlds import PATIENCE, SECRET, Running, address_of, bound_socket, runtime_folder_of_its_own

KEY = handshake_key(SECRET)
OTHER_KEY = handshake_key(b"another secret of another job")


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path


# -- what answers


Script = Callable[[socket.socket], None]


class Door:
    """A listening socket; each connection is played one of the scripts, the last one again and
    again. A script returns when it hangs up.
    """

    def __init__(self, *scripts: Script, listening: bool = True) -> None:
        self._listener = bound_socket()
        self.address = TcpAddress.parse(address_of(self._listener))
        self.visits = 0
        self.over = threading.Event()
        self._scripts = list(scripts)
        self._thread = threading.Thread(target=self._run, daemon=True)
        if listening:
            self.open()

    def open(self) -> None:
        self._listener.listen()
        self._listener.settimeout(0.02)
        self._thread.start()

    def _run(self) -> None:
        while not self.over.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.visits += 1
            sock.settimeout(PATIENCE)
            script = self._scripts[min(self.visits, len(self._scripts)) - 1]
            with sock, contextlib.suppress(OSError):
                script(sock)

    def close(self) -> None:
        self.over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()


@pytest.fixture
def door():
    with contextlib.ExitStack() as stack:

        def make(*scripts: Script, **options: bool) -> Door:
            made = Door(*scripts, **options)
            stack.callback(made.close)
            return made

        yield make


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = sock.recv(nbytes, socket.MSG_WAITALL)
    if len(data) < nbytes:
        raise ConnectionError("hung up")
    return data


def shake_hands(
    sock: socket.socket, *, key: bytes = KEY, status: Status = Status.WELCOME, detail: int = 0
) -> Hello:
    """Let a rank in, or refuse it; the listening half of the handshake."""
    responder = Responder(key=key, nonce=secrets.token_bytes(NONCE_NBYTES))
    sock.sendall(responder.challenge(receive(sock, HELLO_NBYTES)))
    try:
        hello = responder.verify(receive(sock, PROOF_NBYTES))
    except AuthenticationError:
        sock.sendall(responder.refusal())
        raise
    sock.sendall(responder.verdict(status, detail))
    return hello


def framed(*messages) -> bytes:
    """Return control messages as they travel."""
    payloads = [pack(message) for message in messages]
    return b"".join(
        pack_header((0, Channel.CONTROL, 0), len(payload), number) + payload
        for number, payload in enumerate(payloads)
    )


def hear_join(sock: socket.socket) -> Member:
    """Return how the rank presents itself."""
    sock.setblocking(False)
    frames = Connection(sock, peer=1, max_nbytes=1 << 20, clock=REAL_TIME).read(Deadline(PATIENCE))
    sock.setblocking(True)
    message = unpack(frames[0].payload)
    assert isinstance(message, Join)
    return message.member


def stay(sock: socket.socket) -> None:
    """Wait until the other end hangs up."""
    with contextlib.suppress(OSError):
        while sock.recv(4096):
            pass


def welcome_and_tell(*messages, key: bytes = KEY) -> Script:
    """Let the rank in, tell it all this at once, and stay."""

    def script(sock: socket.socket) -> None:
        shake_hands(sock, key=key)
        hear_join(sock)
        sock.sendall(framed(*messages))
        stay(sock)

    return script


def hang_up(sock: socket.socket) -> None:
    pass


def world(*ranks: int) -> World:
    return World(7, [Member(rank, 1, "127.0.0.1", 9, "", host_id()) for rank in ranks])


def join_as(
    rank: int,
    door: Door,
    *,
    limit: float = PATIENCE,
    find_key: Callable[[], bytes | None] = lambda: KEY,
    has_coordinator: bool = False,
):
    """Join through the door; the control connection is closed again."""
    hello = Hello(Purpose.JOIN, job_id("test"), 0, 3, rank, 0)

    def describe(host: str) -> Member:
        return Member(rank, 77, host, 4001, "", "host")

    found, control, *_ = Joiner(
        door.address,
        hello,
        find_key=find_key,
        describe=describe,
        deadline=Deadline(limit),
        has_coordinator=has_coordinator,
    ).join()
    control.close()
    return found


# -- being let in


def test_the_world_is_learned(door):
    assert join_as(1, door(welcome_and_tell(world(0, 1, 2)))) == world(0, 1, 2)


def test_the_rank_says_who_it_is_and_where_it_was_seen(door):
    heard = []

    def script(sock):
        hello = shake_hands(sock)
        heard.append((hello.purpose, hello.rank, hello.world_size, hello.peer, hello.job))
        heard.append(hear_join(sock))
        sock.sendall(framed(world(0, 1, 2)))

    join_as(1, door(script))
    assert heard[0] == (Purpose.JOIN, 1, 3, 0, job_id("test"))
    assert heard[1] == Member(1, 77, "127.0.0.1", 4001, "", "host")


def test_waiting_goes_on_until_the_world_is_complete(door):
    told = (Waiting([1, 2]), Waiting([2]), Waiting([]), world(0, 1, 2))
    assert join_as(1, door(welcome_and_tell(*told))) == world(0, 1, 2)


def test_a_world_that_comes_byte_by_byte_is_learned(door):
    def script(sock):
        shake_hands(sock)
        for byte in framed(Waiting([2]), world(0, 1, 2)):
            sock.sendall(bytes([byte]))
        stay(sock)

    assert join_as(1, door(script)) == world(0, 1, 2)


def test_a_death_that_is_told_together_with_the_world_is_not_overheard(door):
    """Rank 2 dies right after the world formed: both messages are there in one read."""
    key = rank_key(SECRET, 1)
    keys = wrap(key, pair_keys(bytes(32), 1, [0] * 3), bytes(SALT_NBYTES))
    formed = msgspec.structs.replace(world(0, 1, 2), keys=keys)
    told = (formed, Gone(2, "its connection ended", orderly=False))
    there = door(welcome_and_tell(*told, key=key))
    with TcpBackend(1, 3, str(there.address), secret=SECRET, job="test") as backend:
        with pytest.raises(PeerLostError) as caught:
            backend.recv(2, timeout=10.0)
        assert caught.value.peer == 2


# -- trying again


def test_dialling_is_repeated_until_rank_0_listens(door):
    there = door(welcome_and_tell(world(0, 1, 2)), listening=False)
    joining_rank = Running(join_as, 1, there)
    time.sleep(0.05)  # some tries are refused
    assert not joining_rank.done
    there.open()
    assert joining_rank.result() == world(0, 1, 2)


def test_hanging_up_before_and_after_the_handshake_is_tried_again(door):
    there = door(hang_up, hang_up, shake_hands, shake_hands, welcome_and_tell(world(0, 1, 2)))
    assert join_as(1, there) == world(0, 1, 2)
    assert there.visits == 5


def hang_up_on_proof(sock: socket.socket) -> None:
    responder = Responder(key=KEY, nonce=secrets.token_bytes(NONCE_NBYTES))
    sock.sendall(responder.challenge(receive(sock, HELLO_NBYTES)))
    receive(sock, PROOF_NBYTES)


def test_a_connection_that_is_dropped_during_the_handshake_is_tried_again(door):
    """However often: a full acceptor drops connections of ranks that have the right secret."""
    there = door(*[hang_up_on_proof] * 5, welcome_and_tell(world(0, 1, 2)))
    assert join_as(1, there) == world(0, 1, 2)
    assert there.visits == 6


def test_a_rank_that_is_dropped_until_its_deadline_says_so_and_does_not_blame_the_secret(door):
    there = door(hang_up_on_proof)
    with pytest.raises(RendezvousError) as caught:
        join_as(1, there, limit=0.5)
    text = str(caught.value)
    assert re.search(rf"not reached at {there.address} within 0.5 s, in \d+ tries \(", text)
    assert "(the other end closed the connection during the handshake)" in text
    assert "secret" not in text


def test_a_rank_0_that_restarts_while_ranks_wait_finds_them_again(door):
    def dies_while_forming(sock):
        shake_hands(sock)
        hear_join(sock)
        sock.sendall(framed(Waiting([2])))

    assert join_as(1, door(dies_while_forming, welcome_and_tell(world(0, 1, 2)))) == world(0, 1, 2)


def test_a_secret_that_is_laid_out_later_is_found(door):
    keys = iter([None, None, KEY])
    found = join_as(1, door(welcome_and_tell(world(0, 1, 2))), find_key=lambda: next(keys))
    assert found == world(0, 1, 2)


def test_the_secret_of_an_earlier_job_is_not_kept(door):
    def shake_or_hang_up(sock):
        with contextlib.suppress(AuthenticationError):
            welcome_and_tell(world(0, 1, 2))(sock)

    keys = iter([OTHER_KEY, KEY])
    assert join_as(1, door(shake_or_hang_up), find_key=lambda: next(keys)) == world(0, 1, 2)


def test_tries_become_rarer(door):
    there = door(hang_up)
    with pytest.raises(RendezvousError):
        join_as(1, there, limit=0.5)
    assert 3 <= there.visits <= 20


# -- being refused


@pytest.mark.parametrize(
    ("status", "detail", "text"),
    [
        (Status.DUPLICATE_RANK, 4711, "4711"),
        (Status.WRONG_WORLD_SIZE, 5, "world size of 5, this rank was told 3"),
        (Status.OTHER_JOB, 0, "another job"),
        (Status.INVALID_RANK, 3, "rank 1 is not one of the 3"),
        (Status.NOT_EXPECTED, 0, "formed already"),
    ],
)
def test_a_refusal_ends_joining_at_once_with_its_reason(door, status, detail, text):
    there = door(lambda sock: shake_hands(sock, status=status, detail=detail))
    with pytest.raises(RendezvousError, match=text):
        join_as(1, there)
    assert there.visits == 1


def test_a_world_that_failed_to_form_ends_joining_at_once(door):
    with pytest.raises(RendezvousError) as caught:
        join_as(1, door(welcome_and_tell(Failed("the world did not form within 3 s", [2]))))
    assert caught.value.missing == [2]
    assert "within 3 s" in str(caught.value)


def test_another_secret_ends_joining_soon_and_is_named_as_the_cause(door):
    def script(sock):
        with contextlib.suppress(AuthenticationError):
            shake_hands(sock, key=OTHER_KEY)

    there = door(script)
    with pytest.raises(AuthenticationError, match="secret") as caught:
        join_as(1, there)
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert there.visits > 1, "one refusal proves nothing"


def test_an_impostor_that_lets_everybody_in_is_not_believed(door):
    """It does not know the secret, so it cannot sign its welcome."""
    knocked = []

    def script(sock):
        responder = Responder(key=OTHER_KEY, nonce=secrets.token_bytes(NONCE_NBYTES))
        sock.sendall(responder.challenge(receive(sock, HELLO_NBYTES)))
        receive(sock, PROOF_NBYTES)
        sock.sendall(responder.verdict(Status.WELCOME))
        knocked.append(sock.recv(4096))

    with pytest.raises(AuthenticationError):
        join_as(1, door(script))
    assert set(knocked) == {b""}, "nothing is said to an impostor"


def test_a_rank_without_a_secret_is_told_so(door):
    def script(sock):
        responder = Responder(key=KEY, nonce=secrets.token_bytes(NONCE_NBYTES))
        with contextlib.suppress(OSError):
            sock.sendall(responder.challenge(receive(sock, HELLO_NBYTES)))
        stay(sock)

    with pytest.raises(AuthenticationError, match="no secret"):
        join_as(1, door(script), find_key=lambda: None)


@pytest.mark.fault(57, "a stranger at rank 0's address is recognised, and said to be one")
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(64),
        bytes(CHALLENGE_NBYTES),
        b"\xff" * CHALLENGE_NBYTES,
    ],
    ids=["http", "ssh", "zeros", "ones"],
)
def test_a_stranger_at_the_address_is_recognised_soon(door, answer):
    def script(sock):
        receive(sock, HELLO_NBYTES)
        sock.sendall(answer)
        stay(sock)

    with pytest.raises(AuthenticationError, match="another program listens"):
        join_as(1, door(script))


@pytest.mark.fault(21, "another version of the protocol is an error that names both")
def test_another_version_is_an_error_at_once_that_names_both(door):
    """No number of tries makes it the same version."""

    def script(sock):
        receive(sock, HELLO_NBYTES)
        responder = Responder(key=KEY, nonce=bytes(NONCE_NBYTES))
        challenge = bytearray(responder._challenge)
        challenge[8:10] = (PROTOCOL_VERSION + 41).to_bytes(2, "little")
        sock.sendall(challenge)
        stay(sock)

    began = time.monotonic()
    with pytest.raises(RankwireError) as caught:
        join_as(1, door(script), limit=3.0)
    assert time.monotonic() - began < 8.0
    assert isinstance(caught.value, (VersionMismatchError, RendezvousError))
    for version in (PROTOCOL_VERSION, PROTOCOL_VERSION + 41):
        assert str(version) in str(caught.value)
    assert "version" in str(caught.value)


@pytest.mark.parametrize("words", [Gone(2, "", orderly=True), Join(world(0).members[0])], ids=repr)
def test_a_rank_0_that_says_what_it_must_not_is_an_error(door, words):
    with pytest.raises(ProtocolError):
        join_as(1, door(welcome_and_tell(words)))


def test_a_rank_0_that_sends_garbage_is_an_error(door):
    def script(sock):
        shake_hands(sock)
        sock.sendall(b"\xff" * 64)
        stay(sock)

    with pytest.raises(ProtocolError):
        join_as(1, door(script))


# -- the deadline


@pytest.mark.parametrize("limit", [0.0, 0.1, 0.3])
def test_nobody_at_the_address_is_an_error_at_the_deadline_that_names_rank_0(door, limit):
    there = door(stay, listening=False)
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        join_as(1, there, limit=limit)
    assert limit <= time.monotonic() - began < limit + 8.0
    assert caught.value.missing == [0]
    assert str(there.address) in str(caught.value)
    assert f"within {limit:g} s" in str(caught.value)
    assert caught.value.rank == 1


def test_a_launcher_that_is_not_reached_is_not_called_rank_0(door):
    with pytest.raises(RendezvousError, match="the coordinator was not reached") as caught:
        join_as(0, door(stay, listening=False), limit=0.1, has_coordinator=True)
    assert caught.value.missing == []


def test_ranks_that_give_up_at_the_same_deadline_are_not_the_cause():
    attempts = Attempts(1, TcpAddress("127.0.0.1", 4000), Deadline(1e-9), has_coordinator=False)
    attempts.begin()
    attempts.admitted()
    attempts.note_missing([3])
    attempts.note_missing([2, 3])
    assert attempts.missing == [3]


def test_a_launcher_that_is_reached_may_miss_rank_0(door):
    with pytest.raises(RendezvousError, match="the world did not form") as caught:
        join_as(1, door(welcome_and_tell(Waiting([0, 2]))), limit=1.0, has_coordinator=True)
    assert caught.value.missing == [0, 2]


def test_a_refused_connection_does_not_hide_why_the_handshake_failed_before(door):
    """Here the secrets differ, and the coordinator has gone before that was tried often enough."""

    def script(sock):
        with contextlib.suppress(AuthenticationError):
            shake_hands(sock, key=OTHER_KEY)
        there.over.set()
        there._listener.close()

    there = door(script)
    with pytest.raises(RendezvousError, match="secrets differ") as caught:
        join_as(1, there, limit=1.5)
    assert isinstance(caught.value.__cause__, AuthenticationError)


def test_a_silent_listener_costs_no_more_than_the_deadline(door):
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        join_as(1, door(stay), limit=0.3)
    assert 0.3 <= time.monotonic() - began < 8.0
    assert caught.value.missing == [0]


def test_a_listener_that_trickles_costs_no_more_than_the_deadline(door):
    def script(sock):
        while True:
            sock.sendall(b"r")
            time.sleep(0.05)

    began = time.monotonic()
    with pytest.raises((RendezvousError, AuthenticationError)):
        join_as(1, door(script), limit=0.3)
    assert time.monotonic() - began < 8.0


def test_at_the_deadline_the_ranks_named_last_are_missing(door):
    with pytest.raises(RendezvousError) as caught:
        join_as(1, door(welcome_and_tell(Waiting([2, 3]), Waiting([3]))), limit=1.0)
    assert caught.value.missing == [3]
    assert "within 1 s" in str(caught.value)


def test_a_rank_0_that_vanishes_for_good_is_missing_itself(door):
    """It had said that rank 2 is missing; what is known now is that rank 0 is."""

    def script(sock):
        shake_hands(sock)
        hear_join(sock)
        sock.sendall(framed(Waiting([2])))
        there.over.set()  # and nobody answers any more

    there = door(script)
    with pytest.raises(RendezvousError) as caught:
        join_as(1, there, limit=1.0)
    assert 0 in caught.value.missing


def test_the_missing_are_logged_now_and_then(door, caplog, monkeypatch):
    monkeypatch.setattr("rankwire.rendezvous.join._REPORT_EVERY", 0.1)
    with pytest.raises(RendezvousError):
        join_as(1, door(welcome_and_tell(Waiting([2]))), limit=1.0)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("rank 1 waits for rank 2 (") for line in lines)
    assert len(lines) <= 11


def test_hundreds_of_missing_ranks_are_named_in_short_lines(door, caplog, monkeypatch):
    monkeypatch.setattr("rankwire.rendezvous.join._REPORT_EVERY", 0.1)
    with pytest.raises(RendezvousError) as caught:
        join_as(1, door(welcome_and_tell(Waiting(list(range(2, 302))))), limit=1.0)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("rank 1 waits for 300 ranks: 2-301 (") for line in lines)
    assert len(max([*lines, str(caught.value)], key=len)) <= 200
    assert caught.value.missing == list(range(2, 302))
