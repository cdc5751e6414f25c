"""What is kept about one peer: its failure ends everything that needs it, once and for all."""

import contextlib
import select
import socket
from functools import partial

import pytest

from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError, DeadlineExceededError, PeerLostError, ProtocolError
from rankwire.links.connection import Connection
from rankwire.mesh.peers import Peer
from rankwire.transports.byte_stream import wait_for
from rankwire.wire.control_messages import Member
from rankwire.wire.frames import Channel
from rankwire.wire.receive import Receive
from real_time import Deadline
from worlds import PATIENCE, Running, eventually

LOST = PeerLostError(3, "the first cause")
LATER = PeerLostError(3, "a later cause")
CLOSED = ChannelClosedError("this backend is closed")
LEFT = ChannelClosedError("rank 3 has left")
KEY = (0, Channel.MESSAGE, 0)


@pytest.fixture
def peer():
    return Peer(Member(3, 1, "127.0.0.1", 9, "", "host"), REAL_TIME)


@pytest.fixture
def connect():
    """Return connected pairs: our end as the backend sees it, and the far end."""
    with contextlib.ExitStack() as stack:

        def make():
            ends = []
            for rank, sock in zip((3, 0), socket.socketpair(), strict=True):
                sock.setblocking(False)
                ends.append(Connection(sock, peer=rank, max_nbytes=1 << 20, clock=REAL_TIME))
                stack.callback(ends[-1].close)
            return ends

        yield make


def send(connection: Connection, message: bytes) -> None:
    connection.send((0, Channel.MESSAGE, 0), ([message], len(message)), Deadline(PATIENCE))


def receive(peer: Peer, limit: float = PATIENCE) -> bytes:
    wanted = Receive(KEY)
    peer.inbox.post(wanted)
    return bytes(peer.inbox.wait(wanted, Deadline(limit)))


def test_at_first_nothing_has_failed(peer):
    assert peer.failure is None
    assert peer.messages is None
    assert peer.inbox.connection is None
    with pytest.raises(DeadlineExceededError):
        receive(peer, 0.0)


def test_the_first_cause_stays(peer):
    peer.fail(LOST)
    peer.fail(LATER)
    assert str(peer.failure) == str(LOST)
    with pytest.raises(PeerLostError, match="first cause"):
        receive(peer)


@pytest.mark.parametrize("orderly", [True, False])
def test_one_that_was_let_in_while_this_rank_leaves_is_told_so(peer, connect, orderly):
    """It came between the last look at the connections and the end of the acceptor."""
    near, far = connect()
    peer.close(CLOSED, Deadline(PATIENCE), orderly=orderly)
    peer.add(near, incoming=True)
    with pytest.raises(ChannelClosedError if orderly else PeerLostError):
        list(iter(partial(far.read, Deadline(PATIENCE)), None))


def test_a_failure_ends_all_connections(peer, connect):
    pairs = [connect() for _ in range(3)]
    for near, _ in pairs:
        peer.add(near)
    peer.fail(LOST)
    for near, far in pairs:
        with pytest.raises(PeerLostError, match="first cause"):
            send(near, b"x")
        with pytest.raises(PeerLostError):
            far.read(Deadline(PATIENCE))


def test_a_connection_that_comes_after_the_failure_is_ended_at_once(peer, connect):
    peer.fail(LOST)
    near, far = connect()
    peer.add(near)
    with pytest.raises(PeerLostError, match="first cause"):
        send(near, b"x")
    with pytest.raises(PeerLostError):
        far.read(Deadline(PATIENCE))


def test_a_connection_that_was_given_back_does_not_share_the_failure(peer, connect):
    near, far = connect()
    peer.add(near)
    peer.remove(near)
    peer.remove(near)
    peer.fail(LOST)
    send(near, b"still there")
    assert far.read(Deadline(PATIENCE))[0].payload == b"still there"


def test_a_failure_wakes_receivers_that_wait_for_a_first_message(peer):
    waiting = [Running(receive, peer) for _ in range(3)]
    eventually(lambda: len(peer.inbox._asleep) == 3)
    peer.fail(LOST)
    for thread in waiting:
        assert "first cause" in str(thread.error())


def test_a_failure_wakes_the_receiver_that_reads_and_those_behind_it(peer, connect):
    near, _ = connect()
    peer.add(near)
    peer.inbox.attach(near)
    waiting = [Running(receive, peer) for _ in range(3)]
    eventually(lambda: peer.inbox.is_read and len(peer.inbox._asleep) == 2)
    peer.fail(LOST)
    for thread in waiting:
        assert "first cause" in str(thread.error())


def test_what_arrived_before_the_failure_is_received_first(peer, connect):
    near, far = connect()
    peer.add(near)
    peer.inbox.attach(near)
    send(far, b"one")
    send(far, b"two")
    peer.fail(LOST)
    assert [receive(peer), receive(peer)] == [b"one", b"two"]
    with pytest.raises(PeerLostError, match="first cause"):
        receive(peer)


def test_errors_of_a_failure_are_not_shared_between_threads(peer):
    peer.fail(LOST)
    errors = [Running(receive, peer).error() for _ in range(2)]
    assert errors[0] is not errors[1]
    assert errors[0] is not LOST


def test_closing_says_farewell_on_every_connection_and_closes_it(peer, connect):
    pairs = [connect() for _ in range(3)]
    for near, _ in pairs:
        peer.add(near)
    peer.inbox.attach(pairs[0][0])
    peer.close(CLOSED, Deadline(PATIENCE))
    for near, far in pairs:
        assert near.fileno() == -1
        with pytest.raises(ChannelClosedError, match="rank 0 has left"):
            far.read(Deadline(PATIENCE))


def test_closing_wakes_receivers(peer, connect):
    near, _ = connect()
    peer.add(near)
    peer.inbox.attach(near)
    waiting = [Running(receive, peer) for _ in range(3)]
    eventually(lambda: peer.inbox.is_read and len(peer.inbox._asleep) == 2)
    peer.close(CLOSED, Deadline(PATIENCE))
    for thread in waiting:
        assert isinstance(thread.error(), ChannelClosedError)


def test_closing_keeps_an_earlier_failure_and_says_no_farewell_to_the_dead(peer, connect):
    near, far = connect()
    peer.add(near)
    peer.fail(LOST)
    peer.close(CLOSED, Deadline(PATIENCE))
    assert str(peer.failure) == str(LOST)
    with pytest.raises(PeerLostError):
        far.read(Deadline(PATIENCE))


def test_a_peer_that_takes_nothing_does_not_hold_up_closing(peer, connect):
    near, far = connect()
    peer.add(near)
    with contextlib.suppress(DeadlineExceededError):
        while True:
            near.send((0, Channel.MESSAGE, 0), ([bytes(1000)], 1000), Deadline(0.0))
    closing = Running(peer.close, CLOSED, Deadline(0.05))
    closing.result(5.0)
    assert wait_for(far.stream, select.POLLIN | select.POLLHUP, 0.0) & select.POLLHUP


def test_a_peer_closed_twice_is_closed(peer, connect):
    near, _ = connect()
    peer.add(near)
    peer.close(CLOSED, Deadline(PATIENCE))
    peer.close(CLOSED, Deadline(PATIENCE))
    assert near.fileno() == -1


def test_a_peer_that_has_left_takes_no_more_but_what_it_sent_is_received(peer, connect):
    """Its last messages and its farewell may still be on the way when the news comes."""
    outgoing, _ = connect()
    incoming, far = connect()
    for connection in (outgoing, incoming):
        peer.add(connection)
    peer.messages = outgoing
    peer.inbox.attach(incoming)
    peer.leave(LEFT)
    with pytest.raises(ChannelClosedError, match="rank 3 has left"):
        send(outgoing, b"x")
    send(far, b"the last words")
    far.farewell(Deadline(PATIENCE))
    far.close()
    assert receive(peer) == b"the last words"
    with pytest.raises(ChannelClosedError):
        receive(peer)


def test_a_peer_that_left_without_ever_sending_ends_receives(peer):
    waiting = Running(receive, peer)
    eventually(lambda: len(peer.inbox._asleep) == 1)
    peer.leave(LEFT)
    assert "rank 3 has left" in str(waiting.error())


def test_a_peer_that_has_gone_is_not_dialled(peer):
    peer.check()
    peer.fail(LOST)
    with pytest.raises(PeerLostError, match="first cause") as caught:
        peer.check()
    assert caught.value is not LOST


@pytest.mark.parametrize(
    ("cause", "reasons"),
    [(LOST, ["the first cause"]), (ProtocolError("it sent garbage"), ["it sent garbage"])],
)
def test_whoever_asked_is_told_of_a_loss_once_whatever_the_cause(cause, reasons):
    told = []
    peer = Peer(Member(3, 1, "127.0.0.1", 9, "", "host"), REAL_TIME, on_lost=told.append)
    peer.fail(cause)
    peer.fail(LATER)
    assert [(error.peer, error.reason) for error in told] == [(3, reason) for reason in reasons]
    assert str(peer.failure) == str(cause)
