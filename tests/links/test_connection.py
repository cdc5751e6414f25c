"""One connection: whole frames out, whole frames in, and one sticky end."""

import array
import random
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from itertools import chain, islice, repeat

import pytest

from headers import pack_header
from interrupts import LIBRARY, Interrupt, every_interrupt
from links.ends import Proxied, ReadsItself, fill, frame_bytes, frames_of, hold, noise, read, send
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    MessageTooLargeError,
    PeerLostError,
    ProtocolError,
    RankwireError,
)
from rankwire.links import connection as connection_module
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.lender import lend
from rankwire.links.send_handle import offer
from rankwire.wire.frames import HEADER_NBYTES, LOAN, Channel, whole_of
from rankwire.wire.loans import LoanRefusedError, pack_loan
from rankwire.wire.receive import MessageWithdrawnError
from rankwire.wire.seals import Protection, make_seals
from real_time import Deadline
from worlds import LEND_FROM, PATIENCE, Running, eventually, noting

MIB = 1 << 20
SOON = 8.0  # seconds for what takes milliseconds, on a machine that is busy with other things


def send_until_refused(connection):
    """Send although the peer has closed: TCP takes the first message."""
    deadline = Deadline(PATIENCE)
    while not deadline.expired:
        send(connection, b"x")


# -- whole frames


@pytest.mark.parametrize("nbytes", [0, 1, 100, 16384, 16385, 65504, 65505, 200 * 1024, 8 * MIB])
def test_a_message_of_any_size_arrives(connections, nbytes):
    near, far = connections
    payload = random.Random(nbytes).randbytes(nbytes)
    sending = Running(send, near, payload, tag=nbytes)
    [frame] = read(far)
    sending.result()
    assert (frame.envelope[1], frame.envelope[0], frame.envelope[2]) == (Channel.MESSAGE, 0, nbytes)
    assert frame.payload == payload


def test_frames_go_both_ways_at_once(connections):
    near, far = connections
    sending = [
        Running(lambda c=c: [send(c, bytes([n]) * (n * 1000)) for n in range(200)])
        for c in connections
    ]
    reading = Running(read, near, 200)
    frames = read(far, 200)
    for running in sending:
        running.result()
    expected = [bytes([n]) * (n * 1000) for n in range(200)]
    assert [frame.payload for frame in frames] == expected
    assert [frame.payload for frame in reading.result()] == expected


def test_a_read_without_patience_polls(link):
    before = time.monotonic()
    assert link.connection.read(Deadline(0.0)) == []
    assert link.connection.read_ready() is None
    assert time.monotonic() - before < SOON
    link.raw.sendall(frame_bytes(b"now"))
    eventually(lambda: link.connection.read(Deadline(0.0)))


@pytest.mark.parametrize("spin", [0.0, 100e-6, 0.05])
def test_spinning_changes_nothing_but_time(make_link, spin):
    link = make_link(spin=spin)
    assert link.connection.read(Deadline(0.02)) == []
    for number in range(50):
        link.raw.sendall(frame_bytes(bytes([number]), sequence=number))
        assert [frame.payload for frame in read(link.connection)] == [bytes([number])]


# -- deadlines


def test_a_blocked_receive_does_not_delay_a_send(link):
    reading = Running(read, link.connection)
    time.sleep(0.05)
    for number in range(10):
        send(link.connection, b"x")
        assert link.receive(HEADER_NBYTES + 1) == frame_bytes(b"x", sequence=number)
    assert not reading.done
    link.raw.sendall(frame_bytes(b"y"))
    assert reading.result()[0].payload == b"y"


@pytest.mark.parametrize(
    ("nbytes", "cut"),
    [
        *((5, 1), (5, 16), (5, 31), (5, 32), (5, 33), (5, 36)),
        *((200_000, 31), (200_000, 32), (200_000, 33), (200_000, 100_000), (200_000, 200_031)),
    ],
)
def test_a_deadline_in_the_middle_of_a_frame_loses_nothing(link, nbytes, cut):
    payload = random.Random(cut).randbytes(nbytes)
    stream = frame_bytes(payload, tag=4) + frame_bytes(b"next", tag=5, sequence=1)
    sending = Running(link.raw.sendall, stream[:cut])
    deadline = Deadline(0.05)
    assert link.connection.read(deadline) == []
    assert 0.04 <= deadline.waited < SOON
    sending.result()
    assert link.connection.read(Deadline(0.0)) == []
    sending = Running(link.raw.sendall, stream[cut:])
    first, second = read(link.connection, 2)
    sending.result()
    assert (first.envelope[2], first.payload) == (4, payload)
    assert (second.envelope[2], second.payload) == (5, b"next")


def test_input_that_trickles_in_does_not_prolong_the_deadline(link):
    stream = frame_bytes(bytes(1000))
    enough = threading.Event()

    def trickle():
        sent = 0
        while not enough.wait(0.01):
            sent += link.raw.send(stream[sent : sent + 1])
        link.raw.sendall(stream[sent:])

    trickling = Running(trickle)
    deadline = Deadline(0.2)
    while not deadline.expired:  # it looks up when the link is silent, on a busy machine sooner
        assert link.connection.read(deadline) == []
    assert deadline.waited < SOON, "it would take 10 s to the end of the frame"
    enough.set()
    assert read(link.connection)[0].payload == bytes(1000)
    trickling.result()


@pytest.mark.parametrize("spin", [0.0, 100e-6])
def test_input_that_never_stops_does_not_prolong_the_deadline(make_link, spin):
    link = make_link(spin=spin)
    # Byte by byte, but always another one there: a whole frame may take hours.
    header = frame_bytes(bytes(1 << 29))[:HEADER_NBYTES]
    give_up = time.monotonic() + SOON
    stream = chain([header], repeat(b"\0"))

    def recv_into(buffer):
        if time.monotonic() > give_up:
            raise AssertionError("still reading, long after the deadline")
        piece = next(stream)
        buffer[: len(piece)] = piece
        return len(piece)

    link.connection.stream = Proxied(
        link.connection.stream,
        recv_into=recv_into,
        read=lambda buffer, counts: counts.append(recv_into(buffer)),
    )
    assert link.connection.read(Deadline(0.1)) == []


def test_a_poll_reads_all_that_is_there_of_a_large_message(link):
    stream = frame_bytes(bytes(150_000))
    link.raw.sendall(stream)
    time.sleep(0.05)
    frames = link.connection.read(Deadline(0.0))
    assert [frame.payload for frame in frames] == [bytes(150_000)]


# -- the end


def test_the_end_of_the_stream_is_a_lost_peer(link):
    link.raw.sendall(frame_bytes(b"last words"))
    link.raw.close()
    assert read(link.connection)[0].payload == b"last words"
    for _ in range(2):
        with pytest.raises(PeerLostError, match="connection ended") as caught:
            link.connection.read(Deadline(PATIENCE))
        assert caught.value.peer == 1
        assert "middle" not in caught.value.reason
    with pytest.raises(PeerLostError, match="connection ended"):
        send(link.connection, b"x")
    assert len(link.lost) == 1


def test_a_connection_that_the_peer_dialled_and_gave_up_is_no_loss(sockets):
    near, far = sockets
    lost = []
    connection = Connection(
        near, peer=1, max_nbytes=10, clock=REAL_TIME, on_lost=noting(lost), incoming=True
    )
    assert not connection.was_given_up
    far.close()
    eventually(lambda: connection.was_given_up)
    with pytest.raises(ChannelClosedError, match="never used"):
        connection.read(Deadline(PATIENCE))
    assert not lost


def test_a_connection_that_the_peer_dialled_and_used_is_lost_like_any_other(sockets):
    near, far = sockets
    lost = []
    connection = Connection(
        near, peer=1, max_nbytes=10, clock=REAL_TIME, on_lost=noting(lost), incoming=True
    )
    far.send(frame_bytes(b"x"))
    far.close()
    assert read(connection)[0].payload == b"x"
    assert not connection.was_given_up
    with pytest.raises(PeerLostError):
        connection.read(Deadline(PATIENCE))
    assert len(lost) == 1


@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_the_end_in_the_middle_of_a_message_says_so_and_gives_nothing_of_it(make_link, nbytes):
    stream = frame_bytes(bytes(nbytes))
    cuts = [*range(1, HEADER_NBYTES + 1), *range(HEADER_NBYTES + 1, len(stream), nbytes // 20)]
    for cut in cuts:
        link = make_link()
        Running(link.raw.sendall, stream[:cut]).result()
        link.raw.close()
        with pytest.raises(PeerLostError, match="middle of a message"):
            link.connection.read(Deadline(PATIENCE))
        link.connection.close()


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_reset_is_a_lost_peer(link):
    link.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.raw.close()
    with pytest.raises(PeerLostError, match="reset"):
        link.connection.read(Deadline(PATIENCE))
    with pytest.raises(PeerLostError, match="reset"):
        send(link.connection, b"x")
    assert len(link.lost) == 1


def test_a_writer_notices_that_the_peer_is_gone(link):
    link.raw.close()
    with pytest.raises(PeerLostError) as caught:
        send_until_refused(link.connection)
    assert caught.value.peer == 1
    assert isinstance(caught.value.__cause__, OSError)
    assert len(link.lost) == 1


def test_a_blocked_writer_notices_that_the_peer_is_gone(link):
    sending = Running(send, link.connection, bytes(64 * MIB))
    time.sleep(0.05)
    link.raw.close()
    assert isinstance(sending.error(SOON), PeerLostError)


def test_a_farewell_is_an_end_in_good_order_after_all_that_was_sent(connections):
    near, far = connections
    send(near, b"one")
    send(near, bytes(100_000))
    near.farewell(Deadline(PATIENCE))
    near.close()
    assert [len(frame.payload) for frame in read(far, 2)] == [3, 100_000]
    for _ in range(2):
        with pytest.raises(ChannelClosedError, match="rank 0 has left") as caught:
            far.read(Deadline(PATIENCE))
        assert caught.value.peer == 0
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        send(far, b"x")


def test_a_greeting_is_no_message_whatever_comes_with_it(make_link):
    greeting, message = frame_bytes(channel=Channel.GREETING), frame_bytes(b"x", sequence=1)
    for pieces in ([greeting, message], [greeting + message]):
        link = make_link()
        for piece in pieces:
            link.raw.sendall(piece)
            time.sleep(0.02)
        assert [frame.envelope[1] for frame in read(link.connection)] == [Channel.MESSAGE]


def test_a_peer_that_greeted_and_vanished_is_lost(sockets):
    near, far = sockets
    dialler = Connection(far, peer=0, max_nbytes=10, clock=REAL_TIME)
    connection = Connection(near, peer=1, max_nbytes=10, clock=REAL_TIME, incoming=True)
    dialler.greet(Deadline(PATIENCE))
    dialler.close()
    with pytest.raises(PeerLostError):
        read(connection)
    assert not connection.was_given_up


def test_a_farewell_is_the_end_whatever_comes_with_it(link):
    farewell = frame_bytes(channel=Channel.FAREWELL, sequence=1)
    link.raw.sendall(frame_bytes(b"x") + farewell + frame_bytes(b"too late", sequence=2))
    link.raw.close()
    frames = []
    with pytest.raises(ChannelClosedError, match="rank 1 has left"):
        frames.extend(frames_of(link.connection))
    assert [frame.payload for frame in frames] == [b"x"]


def test_a_farewell_is_not_reported_as_a_loss(link):
    link.raw.sendall(frame_bytes(channel=Channel.FAREWELL))
    link.raw.close()
    with pytest.raises(ChannelClosedError):
        link.connection.read(Deadline(PATIENCE))
    assert not link.lost


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "some unread"])
@pytest.mark.parametrize("before", [b"", b"a reply that nobody has read"], ids=["bare", "reply"])
def test_a_connection_that_is_only_written_hears_the_farewell_too(link, unread, before):
    send(link.connection, b"first")
    if not unread:
        link.receive(HEADER_NBYTES + 5)
    stream = frame_bytes(before) if before else b""
    stream += frame_bytes(channel=Channel.FAREWELL, sequence=1 if before else 0)
    link.raw.sendall(stream)
    link.raw.close()
    with pytest.raises(ChannelClosedError, match="rank 1 has left"):
        send_until_refused(link.connection)
    assert not link.lost


def test_a_message_whose_bytes_look_like_a_farewell_is_none(link):
    payload = bytes([Channel.FAREWELL]) * 100
    link.raw.sendall(frame_bytes(payload))
    link.raw.close()
    with pytest.raises(PeerLostError):
        send_until_refused(link.connection)


def test_a_farewell_to_a_peer_that_takes_nothing_gives_up_in_time(link):
    fill(link.connection.stream)
    before = time.monotonic()
    link.connection.farewell(Deadline(0.1))
    assert time.monotonic() - before < SOON


def test_a_farewell_to_a_peer_that_is_gone_is_no_error(link):
    link.raw.close()
    for _ in range(3):
        link.connection.farewell(Deadline(0.1))


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n",
        frame_bytes(sequence=1),
        frame_bytes(channel=99),
        pack_header((0, 1, 0), 1001, 0),
        pack_header((0, 1, 0), 2**64 - 1, 0),
    ],
    ids=["http", "sequence", "channel", "limit+1", "2**64-1"],
)
def test_garbage_is_a_protocol_error_that_names_the_peer_and_is_reported_once(make_link, garbage):
    link = make_link(max_nbytes=1000)
    link.raw.sendall(garbage)
    for _ in range(3):
        with pytest.raises(ProtocolError) as caught:
            link.connection.read(Deadline(PATIENCE))
        assert caught.value.peer == 1
    with pytest.raises(ProtocolError):
        send(link.connection, b"x")
    assert [type(cause) for cause in link.lost] == [ProtocolError]
    assert link.raw.recv(1) == b"", "the peer sees the end of its connection"


def test_frames_before_garbage_in_one_read_are_given(link):
    link.raw.sendall(frame_bytes(b"good") + frame_bytes(channel=99, sequence=1))
    frames = []
    with pytest.raises(ProtocolError):
        frames.extend(frames_of(link.connection))
    assert [frame.payload for frame in frames] == [b"good"]


def test_the_first_cause_is_kept(link):
    first = link.connection.fail(PeerLostError(1, "the coordinator says so"))
    second = link.connection.fail(ProtocolError("noticed later"))
    for error in (first, second, link.connection.failure):
        assert isinstance(error, PeerLostError)
        assert error.reason == "the coordinator says so"
    assert len({id(error) for error in (first, second, link.connection.failure)}) == 3
    assert len(link.lost) == 1


@pytest.mark.parametrize("end", ["fail", "close"])
def test_a_blocked_reader_is_woken_by(link, end):
    reading = Running(read, link.connection)
    time.sleep(0.05)
    assert not reading.done
    if end == "fail":
        link.connection.fail(ChannelClosedError("this backend is closed"))
    else:
        link.connection.close()
    assert isinstance(reading.error(SOON), ChannelClosedError)
    assert not link.lost


@pytest.mark.parametrize("end", ["fail", "close"])
def test_a_blocked_sender_is_woken_by(link, end):
    sending = Running(send, link.connection, bytes(64 * MIB))
    time.sleep(0.05)
    waiting = Running(send, link.connection, b"behind it")
    time.sleep(0.02)
    assert not sending.done
    assert not waiting.done
    if end == "fail":
        link.connection.fail(ChannelClosedError("this backend is closed"))
    else:
        link.connection.close()
    assert isinstance(sending.error(SOON), ChannelClosedError)
    assert isinstance(waiting.error(SOON), ChannelClosedError)
    assert not link.lost


def test_a_closed_connection_refuses_everything_and_closes_again(link):
    link.connection.close()
    link.connection.close()
    for use in (
        lambda: send(link.connection, b"x"),
        lambda: link.connection.read(Deadline(PATIENCE)),
        link.connection.read_ready,
    ):
        with pytest.raises(ChannelClosedError, match="closed"):
            use()
    assert link.connection.fileno() == -1
    assert not link.lost


def test_what_had_arrived_before_a_failure_can_still_be_read(link):
    link.raw.sendall(frame_bytes(b"one") + frame_bytes(b"two", sequence=1))
    time.sleep(0.05)
    link.connection.fail(PeerLostError(1, "the coordinator says so"))
    assert [frame.payload for frame in read(link.connection, 2)] == [b"one", b"two"]
    with pytest.raises(PeerLostError, match="coordinator"):
        link.connection.read(Deadline(PATIENCE))


def test_repr_tells_the_peer_the_transport_and_the_state(link, transport):
    assert link.connection.transport == transport
    assert repr(link.connection) == f"<Connection to rank 1 over {transport}, open>"
    link.connection.fail(PeerLostError(1, "killed"))
    assert "failed: rank 1 is lost: killed" in repr(link.connection)


# -- interrupts


@pytest.mark.fault(37, "an interrupted reader loses no byte that has left the kernel")
@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("nbytes", [10, 20_000, 100_000])
def test_an_interrupt_anywhere_in_a_read_loses_and_doubles_nothing(sockets, nbytes, is_sealed):
    seals = make_seals(b"k" * 32, b"said", Protection.SEALED, dialled=True) if is_sealed else None
    there = make_seals(b"k" * 32, b"said", Protection.SEALED, dialled=False) if is_sealed else None
    near = Connection(sockets[0], peer=1, max_nbytes=1 << 30, clock=REAL_TIME, seals=seals)
    far = Connection(sockets[1], peer=0, max_nbytes=1 << 30, clock=REAL_TIME, seals=there)

    def chatter():
        for number in range(1 << 30):
            body = number.to_bytes(4, "little") * (nbytes // 4 + 1)
            far.send((0, Channel.MESSAGE, number), ([body], len(body)), Deadline(PATIENCE))

    chattering, expected = Running(chatter), 0
    try:

        def run(interrupting):
            nonlocal expected
            with suppress(Interrupt), interrupting:
                near.receive(Deadline(PATIENCE))
            for _ in range(2):  # what was read and not taken comes again
                for frame in [*near.parser.frames]:
                    assert frame.envelope[2] == expected
                    assert frame.payload == frame.envelope[2].to_bytes(4, "little") * (
                        nbytes // 4 + 1
                    )
                    near.parser.frames.popleft()
                    expected += 1
                near.receive(Deadline(PATIENCE))

        for _ in range(3):
            assert every_interrupt(run) >= 5
    finally:
        far.fail(PeerLostError(0, "over"))
        chattering.error()
    assert expected > 10


@pytest.mark.fault(37, "signals at random times never put a stream out of step")
@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_signals_at_random_times_never_put_the_stream_out_of_step(make_link):
    """After an interrupt, what comes next is a whole message, or the connection has ended."""
    interrupted = 0
    armed = False

    def on_signal(_, frame):
        nonlocal interrupted, armed
        if armed and frame is not None and frame.f_code.co_filename.startswith(LIBRARY):
            armed = False
            interrupted += 1
            raise Interrupt

    main, stopping, chance = threading.get_ident(), threading.Event(), random.Random(5)

    def annoy():
        while not stopping.wait(chance.uniform(0.0, 0.001)):
            signal.pthread_kill(main, signal.SIGUSR1)

    def chatter(sock):
        with suppress(OSError):
            for number in range(1 << 30):
                body = number.to_bytes(8, "little") * chance.choice((1, 2, 20, 10_000))
                sock.sendall(frame_bytes(body, sequence=number))

    before = signal.signal(signal.SIGUSR1, on_signal)
    annoying = Running(annoy)
    try:
        enough, give_up = time.monotonic() + 1.0, time.monotonic() + PATIENCE

        def goes_on():
            now = time.monotonic()
            return now < enough or (interrupted <= 20 and now < give_up)

        while goes_on():
            link, expected = make_link(), 0
            chattering = Running(chatter, link.raw)
            try:
                while goes_on():
                    frames = []
                    armed = True
                    try:
                        frames = link.connection.read(Deadline(SOON))
                    except Interrupt:
                        pass
                    finally:
                        armed = False
                    for frame in frames:
                        number = int.from_bytes(frame.payload[:8], "little")
                        assert number >= expected, "a message came twice"
                        assert frame.payload == frame.payload[:8] * (len(frame.payload) // 8)
                        expected = number + 1
            except PeerLostError:
                pass  # the connection was given up, which is safe
            finally:
                link.raw.shutdown(socket.SHUT_RDWR)
                link.connection.close()
                chattering.result()
    finally:
        stopping.set()
        annoying.result()
        signal.signal(signal.SIGUSR1, before)
    assert interrupted > 20


def test_a_connection_says_goodbye_once_and_for_all(connections):
    # Another thread may still be sending while the backend closes.
    near, far = connections
    near.farewell(Deadline(PATIENCE))
    with suppress(RankwireError):
        send(near, b"too late")
    near.close()
    frames = []
    with pytest.raises(ChannelClosedError):
        frames.extend(frames_of(far))
    assert not frames


def test_a_connection_needs_neither_spin_nor_a_listener_for_its_loss():
    near, far = socket.socketpair()
    near.setblocking(False)
    connection = Connection(near, peer=3, max_nbytes=10, clock=REAL_TIME)
    far.close()
    with pytest.raises(PeerLostError, match="rank 3"):
        connection.read(Deadline(PATIENCE))
    connection.close()


# -- lending


LARGE = 2 * LEND_FROM


def no_check():
    """There is nothing to check."""


def test_two_ends_on_one_host_tell_each_other_that_they_can_borrow(make_pair):
    near, far = make_pair(introduced=False)
    assert (near.can_lend, near.why_not_lend) == (None, "")
    near.introduce()
    far.await_introduction(Deadline(PATIENCE), no_check)
    assert (far.can_lend, near.can_lend) == (True, None)
    far.introduce()
    near.await_introduction(Deadline(PATIENCE), no_check)
    assert (near.can_lend, near.why_not_lend) == (True, "")


def test_an_introduction_is_heard_by_whoever_reads(make_pair):
    near, far = make_pair(introduced=False)
    near.introduce()
    send(near, b"x")
    assert [frame.payload for frame in read(far)] == [b"x"]
    assert far.can_lend


def test_over_tcp_nobody_introduces_itself_and_nobody_waits_for_it(make_pair):
    near, far = make_pair("tcp")
    near.await_introduction(Deadline(0.0), no_check)
    assert far.read_ready() is None
    assert near.can_lend is False
    assert "Unix socket" in near.why_not_lend


@pytest.mark.parametrize("transport", ["unix", "tcp"], indirect=True)
def test_only_a_peer_of_this_host_can_say_that_it_can_borrow(link, transport):
    greeting = pack_header((0, Channel.GREETING, 1), 0, 0)
    link.raw.sendall(greeting + frame_bytes(b"x", sequence=1))
    with suppress(ProtocolError):
        read(link.connection)
    assert bool(link.connection.can_lend) is (transport == "unix")


@pytest.mark.parametrize("says", [0, 3, 2**64 - 1])
def test_a_greeting_that_says_nothing_changes_nothing(make_pair, says):
    near, far = make_pair(introduced=False)
    near.send((0, Channel.GREETING, says), ((b"?",), 1), Deadline(PATIENCE))
    send(near, b"x")
    read(far)
    assert far.can_lend is None


def test_an_introduction_that_does_not_come_is_waited_for_until_the_deadline(make_pair):
    near, _ = make_pair(introduced=False)
    deadline = Deadline(0.15)
    checks = []
    with pytest.raises(DeadlineExceededError) as caught:
        near.await_introduction(deadline, lambda: checks.append(1))
    assert 0.15 <= deadline.waited < SOON
    assert (caught.value.limit, caught.value.waiting_for) == (0.15, [1])
    assert checks
    assert near.failure is None


def test_what_the_check_raises_ends_the_wait_for_an_introduction(make_pair):
    near, _ = make_pair(introduced=False)

    def check():
        raise PeerLostError(1, "the coordinator says so")

    with pytest.raises(PeerLostError, match="coordinator"):
        near.await_introduction(Deadline(PATIENCE), check)


def test_a_peer_that_goes_before_its_introduction_is_lost(make_pair):
    near, far = make_pair(introduced=False)
    waiting = Running(near.await_introduction, Deadline(PATIENCE), no_check)
    time.sleep(0.02)
    far.close()
    assert isinstance(waiting.error(SOON), PeerLostError)


def test_a_connection_that_ends_here_is_not_waited_for(make_pair):
    near, _ = make_pair(introduced=False)
    waiting = Running(near.await_introduction, Deadline(PATIENCE), no_check)
    time.sleep(0.02)
    near.fail(ChannelClosedError("this backend is closed"))
    with suppress(ChannelClosedError):
        waiting.result(SOON)


@pytest.mark.parametrize("nbytes", [LEND_FROM - 1, LEND_FROM, LARGE])
def test_what_is_large_enough_is_lent_and_arrives(lending, nbytes):
    near, far = lending
    payload = noise(nbytes)
    sending = Running(send, near, payload, tag=9)
    [frame] = read(far)
    assert (frame.envelope[1], frame.envelope[0], frame.envelope[2]) == (Channel.MESSAGE, 0, 9)
    assert len(frame.payload) == nbytes
    assert isinstance(frame.payload, Borrowed) is (nbytes >= LEND_FROM)
    assert whole_of(frame.payload) == payload
    sending.result(SOON)


@pytest.mark.parametrize(
    "channel", [Channel.MESSAGE, Channel.COLLECTIVE, Channel.CALL, Channel.REPLY]
)
def test_every_channel_that_carries_payloads_lends(lending, channel):
    near, far = lending
    payload = noise(LARGE)
    sending = Running(near.send, (3, channel, 4), ([payload], LARGE), Deadline(PATIENCE))
    [frame] = read(far)
    assert (frame.envelope[1], frame.envelope[0], frame.envelope[2]) == (channel, 3, 4)
    assert whole_of(frame.payload) == payload
    sending.result(SOON)


def test_both_ends_lend_to_each_other_at_once(lending):
    sending = [Running(send, end, noise(LARGE, rank)) for rank, end in enumerate(lending)]
    for rank, end in enumerate(lending):
        assert whole_of(read(end)[0].payload) == noise(LARGE, 1 - rank)
    for running in sending:
        running.result(SOON)


def test_a_send_returns_when_the_memory_is_free_again(lending):
    near, far = lending
    memory = bytearray(b"a") * LARGE
    sending = Running(send, near, memory)
    [frame] = read(far)
    time.sleep(0.02)
    assert not sending.done
    payload = whole_of(frame.payload)
    sending.result(SOON)
    memory[:] = b"b" * LARGE
    assert payload == b"a" * LARGE


def test_numbers_of_eight_bytes_are_lent_whole(lending):
    near, far = lending
    numbers = array.array("d", range(LARGE // 8))
    sending = Running(send, near, [memoryview(numbers), b"", memoryview(numbers)])
    [frame] = read(far)
    assert whole_of(frame.payload) == numbers.tobytes() * 2
    sending.result(SOON)


@pytest.mark.parametrize(("count", "is_lent"), [(512, True), (513, False), (2000, False)])
def test_what_is_in_too_many_pieces_goes_as_bytes(lending, count, is_lent):
    near, far = lending
    pieces = [noise(600, number) for number in range(count)]
    sending = Running(send, near, pieces)
    [frame] = read(far)
    assert isinstance(frame.payload, Borrowed) is is_lent
    assert whole_of(frame.payload) == b"".join(pieces)
    sending.result(SOON)


def test_a_loan_keeps_its_place_among_small_frames(lending):
    near, far = lending
    hold(near, b"held", tag=0)
    sending = Running(send, near, noise(LARGE), tag=1)
    first, second = read(far, 2)
    send(near, b"behind it", tag=2)  # a loan that is not read yet keeps nobody from sending
    [third] = read(far)
    assert [first.envelope[2], second.envelope[2], third.envelope[2]] == [0, 1, 2]
    assert not sending.done
    second.payload.release()
    sending.result(SOON)


def test_a_peer_that_cannot_borrow_gets_the_bytes(make_pair):
    near, far = make_pair(options=({}, {"single_copy": False}))
    assert (near.can_lend, near.why_not_lend) == (False, "it is turned off")
    assert far.can_lend, "the other way it works"
    sending = Running(send, near, noise(LARGE))
    [frame] = read(far)
    assert isinstance(frame.payload, bytearray)
    assert frame.payload == noise(LARGE)
    sending.result(SOON)


def test_the_reason_of_a_peer_that_cannot_borrow_may_be_printed(make_pair, monkeypatch):
    monkeypatch.setattr(connection_module, "probe", lambda sock: (0, "\x1b[2J\n" * 10_000))
    near, _ = make_pair()
    assert near.why_not_lend.isprintable()
    assert len(near.why_not_lend) <= 500


def test_a_peer_that_its_kernel_does_not_let_read_says_why_and_gets_the_bytes(
    make_pair, monkeypatch
):
    reason = "the kernel refuses to copy memory of process 7: Operation not permitted"
    monkeypatch.setattr(connection_module, "probe", lambda sock: (0, reason))
    near, far = make_pair()
    assert (near.can_lend, near.why_not_lend) == (False, reason)
    sending = Running(send, near, noise(LARGE))
    assert read(far)[0].payload == noise(LARGE)
    sending.result(SOON)


def test_a_peer_that_has_not_introduced_itself_gets_the_bytes(make_pair):
    near, far = make_pair(introduced=False)
    sending = Running(send, near, noise(LARGE))
    assert read(far)[0].payload == noise(LARGE)
    sending.result(SOON)


def test_an_offer_does_not_wait_and_is_settled_later(lending):
    near, far = lending
    payload = noise(LARGE)
    lent = offer(near, (0, Channel.MESSAGE, 1), ([payload], LARGE), Deadline(PATIENCE))
    assert lent is not None
    assert not lent.wait(Deadline(0.02))
    [frame] = read(far)
    assert whole_of(frame.payload) == payload
    assert lent.wait(Deadline(PATIENCE))
    lent.settle(Deadline(0.0))


def test_an_offer_of_what_is_not_lent_has_been_sent(make_pair):
    for near, far in (make_pair(), make_pair("tcp")):
        assert offer(near, (0, Channel.MESSAGE, 1), ([b"abc"], 3), Deadline(PATIENCE)) is None
        assert read(far)[0].payload == b"abc"


# -- loans that end in another way


@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_a_loan_that_nobody_took_in_time_was_never_sent_and_the_connection_goes_on(lending, limit):
    near, far = lending
    memory = bytearray(noise(LARGE))
    deadline = Deadline(limit)
    with pytest.raises(DeadlineExceededError) as caught:
        near.send((0, Channel.MESSAGE, 1), ([memory], LARGE), deadline)
    assert limit <= deadline.waited < limit + SOON
    assert (caught.value.limit, caught.value.waiting_for) == (limit, [1])
    memory[:] = bytes(LARGE)
    send(near, b"next", tag=2)
    sending = Running(send, near, noise(LARGE, 3), tag=3)
    frames = list(islice((f for f in frames_of(far) if f.envelope[2] > 1), 2))
    assert frames[0].payload == b"next"
    assert whole_of(frames[1].payload) == noise(LARGE, 3)
    sending.result(SOON)
    assert near.failure is far.failure is None


def test_a_withdrawn_loan_says_so_to_whoever_takes_it(lending):
    near, far = lending
    with pytest.raises(DeadlineExceededError):
        send(near, noise(LARGE), timeout=0.05)
    [frame] = read(far)
    with pytest.raises(MessageWithdrawnError):
        whole_of(frame.payload)
    assert far.failure is None


def test_a_loan_whose_frame_cannot_be_sent_is_withdrawn(lending):
    near, far = lending
    filler = fill(near.stream)
    with pytest.raises(DeadlineExceededError):
        send(near, noise(LARGE), timeout=0.05)
    assert near.failure is None
    assert filler
    assert far.failure is None


@pytest.mark.parametrize("how", ["vanishes", "leaves"])
def test_a_lender_learns_that_its_peer(lending, how):
    """Nobody reads this connection: what the peer said last is still in it."""
    near, far = lending
    sending = Running(send, near, noise(LARGE))
    read(far)
    if how == "leaves":
        far.farewell(Deadline(PATIENCE))
    began = time.monotonic()
    far.close()
    error = sending.error(SOON)
    assert isinstance(error, PeerLostError if how == "vanishes" else ChannelClosedError)
    assert error.peer == 1
    assert sending.ended - began < SOON


@pytest.mark.parametrize("end", ["fail", "close"])
def test_a_lender_is_woken_by(lending, end):
    near, far = lending
    sending = Running(send, near, noise(LARGE))
    [frame] = read(far)
    if end == "fail":
        near.fail(ChannelClosedError("this backend is closed"))
    else:
        near.close()
    assert isinstance(sending.error(SOON), ChannelClosedError)
    with pytest.raises(MessageWithdrawnError):
        whole_of(frame.payload)


def test_a_lender_does_not_mistake_a_message_to_it_for_the_end(lending):
    near, far = lending
    send(far, b"unread")
    sending = Running(send, near, noise(LARGE))
    [frame] = read(far)
    time.sleep(0.12)
    assert not sending.done
    frame.payload.release()
    sending.result(SOON)
    assert [frame.payload for frame in read(near)] == [b"unread"]


def test_a_lender_does_not_mistake_a_message_that_looks_like_a_farewell_for_the_end(lending):
    near, far = lending
    send(far, array.array("q", [1, 2, 3, 8, 0, 0, 0]).tobytes())  # unread, and it ends like one
    sending = Running(send, near, noise(LARGE))
    [frame] = read(far)
    time.sleep(0.12)
    with suppress(MessageWithdrawnError):
        frame.payload.release()
    sending.result(SOON)
    assert near.failure is None


def test_two_ends_that_lend_first_read_meanwhile(lending):
    class TakesAll(ReadsItself):
        def read(self):
            for frame in self.connection.read_ready() or ():
                self.frames.append(whole_of(frame.payload))

    def exchange(rank):
        meanwhile = TakesAll(lending[rank])
        send(lending[rank], noise(LARGE, rank), meanwhile=meanwhile)
        return meanwhile.frames or [whole_of(read(lending[rank])[0].payload)]

    running = [Running(exchange, rank) for rank in (0, 1)]
    assert [thread.result(SOON) for thread in running] == [[noise(LARGE, 1)], [noise(LARGE, 0)]]


# -- loans that nobody makes


def loan_frame(description, *, channel=Channel.MESSAGE, sequence=0, tag=0):
    return pack_header((0, channel | LOAN, tag), len(description), sequence) + description


def description_of(payload):
    """Lend something here, for as long as it takes."""
    lent, description = lend([payload], len(payload))
    return description, lent


@pytest.mark.parametrize("transport", ["unix", "tcp"], indirect=True)
def test_a_loan_to_a_process_that_cannot_read_it_breaks_the_rules(transport, sockets):
    near, far = sockets
    lost = []
    connection = Connection(
        near,
        peer=1,
        max_nbytes=1 << 30,
        clock=REAL_TIME,
        on_lost=noting(lost),
        single_copy=transport == "tcp",
    )
    description, _ = description_of(noise(LARGE))
    far.send(loan_frame(description) + frame_bytes(b"x", sequence=1))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="cannot read") as caught:
            connection.read(Deadline(PATIENCE))
        assert caught.value.peer == 1
    assert len(lost) == 1
    connection.close()


def test_a_loan_above_the_limit_is_refused_unread(make_pair):
    near, far = make_pair(options=({}, {"max_nbytes": LARGE}))
    sending = Running(send, near, noise(LARGE))
    whole_of(read(far)[0].payload)
    sending.result(SOON)
    sending = Running(send, near, noise(LARGE + 1))
    with pytest.raises(ProtocolError, match=f"lends {LARGE + 1} bytes") as caught:
        far.read(Deadline(PATIENCE))
    assert isinstance(caught.value.__cause__, MessageTooLargeError)
    assert isinstance(sending.error(SOON), PeerLostError)


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_frames_before_a_bad_loan_in_one_read_are_given(link):
    link.raw.sendall(frame_bytes(b"good") + loan_frame(bytes(48), sequence=1))
    frames = []
    with pytest.raises(ProtocolError):
        frames.extend(frames_of(link.connection))
    assert [frame.payload for frame in frames] == [b"good"]


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_a_loan_of_memory_that_cannot_be_read_is_refused_and_sent_in_another_way(link):
    _, lent = description_of(b"abc")
    description = pack_loan(lent.number, lent.address, lent.address + 8, [(8, 99)], 99)
    link.raw.sendall(loan_frame(description))
    [frame] = read(link.connection)
    with pytest.raises(MessageWithdrawnError):
        whole_of(frame.payload)
    with pytest.raises(LoanRefusedError):
        lent.wait(Deadline(PATIENCE), lambda: None, None)
    assert link.connection.failure is None


def test_garbage_in_a_loan_gives_a_parcel_or_a_protocol_error_and_nothing_else():
    chance = random.Random("rankwire loan frames")
    payload = noise(1000)
    good, lent = description_of(payload)
    refused = unreadable = taken = 0
    for _ in range(1000):
        description = bytearray(good)
        match chance.randrange(4):
            case 0:
                description = bytearray(chance.randbytes(16 * chance.randrange(2, 6)))
            case 1:
                del description[chance.randrange(len(description)) :]
            case 2:  # the words' addresses stay: a receipt must not land just anywhere
                description[chance.choice([*range(8), *range(24, 48)])] ^= 1 << chance.randrange(8)
            case _:
                pass
        near, far = socket.socketpair()
        near.setblocking(False)
        connection = Connection(near, peer=1, max_nbytes=1 << 20, clock=REAL_TIME)
        with far:
            far.send(loan_frame(bytes(description)))
            try:
                [frame] = connection.read(Deadline(PATIENCE))
                view = bytearray(len(frame.payload))
                frame.payload.read_into(0, memoryview(view))
                assert view == payload or bytes(description) != good
                taken += 1
            except ProtocolError:
                refused += 1
            except (PeerLostError, MessageWithdrawnError):
                unreadable += 1
        connection.close()
    lent.revoke()
    assert refused > 100
    assert unreadable > 20
    assert taken > 100


# -- sealed frames


@pytest.fixture
def sealed(make_pair):
    """Two connections over TCP whose frames are sealed."""
    seals = [
        make_seals(b"k" * 32, b"said", Protection.SEALED, dialled=dialled)
        for dialled in (True, False)
    ]
    return make_pair("tcp", options=[{"seals": each} for each in seals])


def read_frames(connection, count):
    frames = []
    while len(frames) < count:
        frames += connection.read(Deadline(PATIENCE))
    return frames


@pytest.mark.parametrize("size", [0, 100, 16_384, 16_385, 65_536, 65_537, 1 << 20, 5 << 20])
def test_sealed_frames_arrive_in_both_directions(sealed, size):
    payload = random.Random(size).randbytes(size)
    for sender, receiver in (sealed, sealed[::-1]):
        sending = Running(
            sender.send, (2, 1, 3), ((payload[:7], payload[7:]), size), Deadline(PATIENCE)
        )
        (frame,) = read_frames(receiver, 1)
        sending.result()
        assert (frame.envelope[0], frame.envelope[2], bytes(frame.payload)) == (2, 3, payload)


def test_sealed_frames_that_are_held_back_keep_their_order(sealed):
    for tag in range(20):
        sealed[0].send((0, 1, tag), ((b"x",), 1), Deadline(PATIENCE), hold=True)
    sealed[0].outbox.flush(Deadline(PATIENCE))
    assert [frame.envelope[2] for frame in read_frames(sealed[1], 20)] == list(range(20))


def test_a_sealed_frame_that_is_not_taken_in_time_still_arrives_whole(sealed):
    size = 30 << 20
    with pytest.raises(DeadlineExceededError):
        sealed[0].send((0, 1, 1), ((bytes(size),), size), Deadline(0.1))
    sending = Running(sealed[0].send, (0, 1, 2), ((b"next",), 4), Deadline(PATIENCE))
    frames = read_frames(sealed[1], 2)
    sending.result()
    assert [(frame.envelope[2], len(frame.payload)) for frame in frames] == [(1, size), (2, 4)]


def test_an_interrupt_anywhere_in_a_sealed_send_leaves_whole_frames(make_pair):
    size = 3 << 20

    def run(interrupting):
        seals = [
            make_seals(b"k" * 32, b"said", Protection.SEALED, dialled=dialled)
            for dialled in (True, False)
        ]
        near, far = make_pair("tcp", options=[{"seals": each} for each in seals])
        reading = Running(lambda: [read_until(far, 2)])
        is_sent = False
        with suppress(Interrupt), interrupting:
            near.send((0, 1, 1), ((bytes(size),), size), Deadline(PATIENCE))
            is_sent = True
        near.send((0, 1, 2), ((b"next",), 4), Deadline(PATIENCE))
        [tags] = reading.result()
        assert tags == [1, 2] or (tags == [2] and not is_sent)

    def read_until(connection, last):
        tags = []
        while last not in tags:
            tags += [frame.envelope[2] for frame in connection.read(Deadline(PATIENCE))]
        return tags

    assert every_interrupt(run) >= 10


def test_a_frame_that_never_left_does_not_use_up_a_number(sealed):
    """Its place in the order is taken by the next one."""
    sealed[0].outbox._lock.acquire()
    with pytest.raises(DeadlineExceededError):
        sealed[0].send((0, 1, 1), ((b"x",), 1), Deadline(0.01))
    sealed[0].outbox._lock.release()
    sealed[0].send((0, 1, 2), ((b"x",), 1), Deadline(PATIENCE))
    assert [frame.envelope[2] for frame in read_frames(sealed[1], 1)] == [2]


def test_sealed_frames_from_many_threads_stay_whole(sealed):
    def send(thread):
        for number in range(100):
            data = bytes([thread]) * (number * 300)
            sealed[0].send((thread, 1, number), ((data,), len(data)), Deadline(PATIENCE))

    sending = [Running(send, thread) for thread in range(4)]
    frames = read_frames(sealed[1], 400)
    for each in sending:
        each.result()
    for thread in range(4):
        mine = [frame for frame in frames if frame.envelope[0] == thread]
        assert [frame.envelope[2] for frame in mine] == list(range(100))
        assert all(set(frame.payload) <= {thread} for frame in mine)


def test_a_broken_seal_fails_the_connection_naming_the_peer(sealed):
    near, far = sealed
    far.outbox._seal = near.outbox._seal  # sealed with the wrong key
    far.send((0, 1, 0), ((b"evil",), 4), Deadline(PATIENCE))
    with pytest.raises(ProtocolError, match="seal") as caught:
        read_frames(near, 1)
    assert caught.value.peer == 1
    assert isinstance(near.failure, ProtocolError)


def test_a_broken_seal_behind_good_frames_ends_the_connection_at_once(sealed):
    near, far = sealed
    far.send((0, 1, 0), ((b"good",), 4), Deadline(PATIENCE), hold=True)
    far.outbox._seal = near.outbox._seal
    far.send((0, 1, 1), ((b"evil",), 4), Deadline(PATIENCE))
    assert [frame.envelope[2] for frame in read_frames(near, 1)] == [0]
    assert isinstance(near.failure, ProtocolError), "nobody has to read on to learn it"
    with pytest.raises(ProtocolError, match="seal"):
        near.read(Deadline(PATIENCE))


def test_a_sealed_farewell_is_seen_by_who_only_writes(sealed):
    near, far = sealed
    far.send((0, 1, 0), ((b"unread",), 6), Deadline(PATIENCE))
    far.farewell(Deadline(PATIENCE))
    far.close()

    def send_on():
        while True:
            near.send((0, 1, 0), ((b"x",), 1), Deadline(PATIENCE))

    with pytest.raises(ChannelClosedError, match="left"):
        send_on()
