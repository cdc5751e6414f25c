"""The inbox: the thread that waits is the thread that reads, and no message or wake-up is lost."""

import math
import random
import struct
import threading
import time
from contextlib import suppress

import pytest

from faults.sizes import QUICK
from headers import pack_header
from interrupts import Interrupt, every_interrupt
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    SizeMismatchError,
)
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.wire.frames import Channel, whole_of
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import Destination, Placed, PostedReceive, Receive
from real_time import Deadline
from worlds import PATIENCE, Running, eventually

SOON = 8.0  # seconds for what takes milliseconds, on a machine that is busy with other things
KIB = 1 << 10


class Post:
    """An inbox for what rank 1 sends, and rank 1's end of its connection."""

    def __init__(self, connections, mailbox=None, *, attached=True):
        self.connection, self.sender = connections
        self.inbox = Inbox(
            1, mailbox or Mailbox(), REAL_TIME, self.connection if attached else None
        )

    def send(self, tag, payload=b""):
        deadline = Deadline(PATIENCE)
        self.sender.send((0, Channel.MESSAGE, tag), ([payload], len(payload)), deadline)

    def want(self, tag, on_done=None, *, group=0, nbytes=None):
        receive = Receive((group, Channel.MESSAGE, tag), on_done, nbytes=nbytes)
        self.inbox.post(receive)
        return receive

    def recv(self, tag, timeout=PATIENCE, *, nbytes=None):
        deadline = timeout if not isinstance(timeout, (int, float)) else Deadline(timeout)
        return self.inbox.wait(self.want(tag, nbytes=nbytes), deadline)

    def start(self, tag, timeout=PATIENCE, **options):
        """Receive in a thread of its own; return once it reads or sleeps."""
        parked, reading = len(self.inbox._asleep), self.inbox.is_read
        running = Running(self.recv, tag, timeout, **options)
        eventually(
            lambda: (
                running.done
                or len(self.inbox._asleep) > parked
                or (self.inbox.is_read and not reading)
            )
        )
        return running


@pytest.fixture
def transport(request):
    """Who reads does not depend on the transport: both are tried where the socket matters."""
    return getattr(request, "param", "unix")


on_both_transports = pytest.mark.parametrize("transport", ["unix", "tcp"], indirect=True)


@pytest.fixture
def post(connections):
    return Post(connections)


class LateDeadline:
    """A deadline that passes at the very moment at which its owner wakes up."""

    limit = 0.5
    expired = True
    waited = 0.5

    def sleep_limit(self):
        return PATIENCE

    def remaining(self):
        return PATIENCE


# -- receiving


@on_both_transports
def test_a_message_is_received_before_and_after_it_is_asked_for(post):
    post.send(1, b"early")
    assert post.recv(1) == b"early"
    waiting = post.start(2)
    post.send(2, b"late")
    assert waiting.result() == b"late"


@on_both_transports
def test_messages_of_one_tag_come_in_order_whatever_is_between_them(post):
    for number in range(100):
        post.send(number % 3, bytes([number]))
    for tag in (2, 0, 1):
        assert [post.recv(tag) for _ in range(tag, 100, 3)] == [
            bytes([number]) for number in range(tag, 100, 3)
        ]


def test_a_receive_may_come_before_the_connection(connections):
    post = Post(connections, attached=False)
    waiting = [post.start(tag) for tag in range(4)]
    assert not post.inbox.is_read
    assert post.inbox.attach(post.connection)
    for tag in (3, 1, 0, 2):
        post.send(tag, bytes([tag]))
    assert [running.result() for running in waiting] == [b"\0", b"\1", b"\2", b"\3"]


def test_there_is_one_connection(connections):
    post = Post(connections, attached=False)
    near, far = connections
    assert post.inbox.attach(near)
    assert not post.inbox.attach(far)
    assert not post.inbox.attach(near)
    assert post.inbox.connection is near


@on_both_transports
def test_threads_that_wait_for_different_tags_each_get_exactly_theirs(post):
    threads, messages = 32, 3000
    chance = random.Random(32)
    tags = [number % threads for number in range(messages)]
    chance.shuffle(tags)

    def work(tag):
        return [post.recv(tag) for _ in range(tags.count(tag))]

    waiting = [Running(work, tag) for tag in range(threads)]
    for number, tag in enumerate(tags):
        post.send(tag, struct.pack("<II", tag, number))
    for tag, running in enumerate(waiting):
        expected = [struct.pack("<II", tag, n) for n, each in enumerate(tags) if each == tag]
        assert running.result() == expected
    assert post.inbox._mailbox.arrived.nbytes == 0
    assert not post.inbox.is_read


def test_threads_that_wait_for_one_tag_share_its_messages(post):
    waiting = [Running(lambda: [post.recv(7) for _ in range(50)]) for _ in range(8)]
    for number in range(400):
        post.send(7, struct.pack("<I", number))
    received = [running.result() for running in waiting]
    for own in received:
        assert own == sorted(own, key=lambda payload: struct.unpack("<I", payload))
    numbers = sorted(struct.unpack("<I", payload)[0] for own in received for payload in own)
    assert numbers == list(range(400))


# -- deadlines


def test_no_patience_polls(post):
    with pytest.raises(DeadlineExceededError) as caught:
        post.recv(1, 0.0)
    assert (caught.value.limit, caught.value.waiting_for) == (0.0, [1])
    post.send(2, b"other")
    post.send(1, b"here")
    assert eventually(lambda: poll(post, 1)) == b"here"
    assert post.recv(2, 0.0) == b"other"


def poll(post, tag):
    with suppress(DeadlineExceededError):
        return post.recv(tag, 0.0)


def test_a_deadline_takes_the_receive_back_and_the_message_stays_receivable(post):
    deadline = Deadline(0.05)
    with pytest.raises(DeadlineExceededError) as caught:
        post.recv(1, deadline)
    assert 0.04 <= deadline.waited < SOON
    assert (caught.value.limit, caught.value.waiting_for) == (0.05, [1])
    assert post.inbox.in_flight == 0
    post.send(1, b"late")
    assert post.recv(1) == b"late"


def test_a_deadline_without_a_connection_says_that_nothing_was_sent(connections):
    post = Post(connections, attached=False)
    with pytest.raises(DeadlineExceededError, match="not sent anything yet"):
        post.recv(1, 0.02)


def test_a_second_receiver_keeps_its_own_deadline_while_another_reads(post):
    reader = post.start(1)
    for limit in (0.0, 0.05, 0.2):
        deadline = Deadline(limit)
        with pytest.raises(DeadlineExceededError) as caught:
            post.recv(2, deadline)
        assert limit <= deadline.waited < SOON
        assert caught.value.limit == limit
    assert not reader.done
    post.send(1, b"x")
    assert reader.result() == b"x"


def test_driving_leaves_the_receive_posted_when_the_deadline_passes(post):
    receive = post.want(1)
    assert not post.inbox.drive(receive, Deadline(0.02))
    assert post.inbox.in_flight == 1
    post.send(1, b"x")
    assert post.inbox.drive(receive, Deadline(PATIENCE))
    assert receive.result() == b"x"
    assert not post.inbox.withdraw(receive)


# -- who reads


def test_the_role_is_handed_on_when_the_readers_own_message_has_come(post):
    waiting = [post.start(tag) for tag in range(5)]
    for tag in range(5):  # the reader's own is always the next to come
        post.send(tag, b"x")
        assert waiting[tag].result(SOON) == b"x"
    assert not post.inbox.is_read


def test_the_role_is_handed_on_when_the_readers_deadline_passes(post):
    reader, other = post.start(1, 0.05), post.start(2)
    assert isinstance(reader.error(), DeadlineExceededError)
    eventually(lambda: post.inbox.is_read)
    post.send(2, b"x")
    assert other.result(SOON) == b"x"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_the_role_is_handed_on_when_the_reader_is_interrupted(post, interruption):
    read, go, calls = post.connection.receive, threading.Event(), []

    def interrupted_once(deadline, beside=None):
        calls.append(deadline)
        if len(calls) > 1:
            return read(deadline, beside)
        go.wait(PATIENCE)
        raise interruption

    post.connection.receive = interrupted_once
    reader, other = post.start(1), post.start(2)
    go.set()
    assert isinstance(reader.error(SOON), interruption)
    post.send(1, b"of the one that was interrupted")
    post.send(2, b"x")
    assert other.result(SOON) == b"x"
    assert post.inbox.in_flight == 0
    assert post.recv(1) == b"of the one that was interrupted"


def test_a_thread_that_is_interrupted_while_it_sleeps_leaves_nothing_behind(post):
    reader = post.start(1)
    interrupted = threading.Event()

    class Interrupted(LateDeadline):
        expired = False

        def sleep_limit(self):
            interrupted.set()
            raise KeyboardInterrupt

    sleeper = Running(post.recv, 2, Interrupted())
    assert isinstance(sleeper.error(SOON), KeyboardInterrupt)
    assert interrupted.is_set()
    assert not post.inbox._asleep
    post.send(2, b"kept")
    post.send(1, b"x")
    assert reader.result(SOON) == b"x"
    assert post.recv(2) == b"kept"


def test_a_message_for_a_thread_that_is_interrupted_goes_back(post):
    match = post.inbox._match

    def interrupted_after_delivery(frames):
        match(frames)
        post.inbox._match = match
        raise KeyboardInterrupt

    post.inbox._match = interrupted_after_delivery
    post.send(1, b"first")
    with pytest.raises(KeyboardInterrupt):
        post.recv(1)
    post.send(1, b"second")
    assert [post.recv(1), post.recv(1)] == [b"first", b"second"]


class Crowd:
    """Threads that receive while one of them is interrupted, on an inbox of their own."""

    def __init__(self, connections):
        self.post = Post(connections)
        self.called = []
        self.post.want(8, self.called.append)

    def check(self, got):
        """Check that all came that was sent; ``got`` is what the interrupted thread has got."""
        post = self.post
        while len(got) < 3:
            got.append(post.recv(6, SOON))
        assert got == [b"6%d" % number for number in range(3)]
        post.send(8, b"called back")
        eventually(lambda: post.inbox.read_available() or self.called, SOON)
        assert [receive.result() for receive in self.called] == [b"called back"]
        eventually(lambda: not post.inbox.is_read, SOON)
        assert (post.inbox.in_flight, post.inbox._mailbox.arrived.nbytes) == (0, 0)
        assert not post.inbox._asleep


@pytest.mark.fault(37, "an interrupted receive loses no message, no wake-up and not the link")
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("role", ["reader", "parked"])
def test_an_interrupt_anywhere_in_a_receive_loses_nothing(make_pair, role, when):
    def run(interrupting):
        crowd = Crowd(make_pair("unix", introduced=False))
        post = crowd.post
        first = post.start(5) if role == "parked" else None
        if when == "early":
            sending = Running(_send_a_few, post)
            sending.result()
        else:
            sending = Running(lambda: (time.sleep(0.002), _send_a_few(post)))
        other = Running(post.recv, 7)
        got = []
        with suppress(Interrupt), interrupting:
            got = [post.inbox.take(Receive((0, Channel.MESSAGE, 6)), Deadline(PATIENCE))]
        sending.result()
        assert other.result(SOON) == b"70"
        first_of_5 = post.recv(5, SOON) if first is None else first.result(SOON)
        assert [first_of_5, post.recv(5, SOON), post.recv(5, SOON)] == [b"50", b"51", b"52"]
        crowd.check(got)

    assert every_interrupt(run) >= 10


def _send_a_few(post):
    for number in range(3):
        for tag in (5, 6, 7) if number == 0 else (5, 6):
            post.send(tag, b"%d%d" % (tag, number))


@pytest.mark.parametrize(
    "gap", [1, *(pytest.param(gap, marks=pytest.mark.slow) for gap in (2, 3, 5, 8)), 13]
)
def test_a_second_interrupt_costs_the_interrupted_receive_its_message_at_most(make_pair, gap):
    def run(interrupting):
        post = Post(make_pair("unix", introduced=False))
        _send_a_few(post)
        got = []
        with suppress(Interrupt), interrupting:
            got = [post.inbox.take(Receive((0, Channel.MESSAGE, 6)), Deadline(PATIENCE))]
        post.send(6, b"last")
        while not got or got[-1] != b"last":
            got.append(post.recv(6, SOON))
        assert got in ([b"60", b"61", b"62", b"last"], [b"61", b"62", b"last"])
        assert [post.recv(5, SOON) for _ in range(3)] == [b"50", b"51", b"52"]

    every_interrupt(run, second_after=gap)


@pytest.mark.fault(37, "an interrupted receive of a lent message keeps it, and its sender goes on")
def test_an_interrupt_anywhere_in_receiving_what_is_lent_loses_nothing(make_pair):
    def run(interrupting):
        post = Lending(make_pair())
        sending = [post.lend(tag) for tag in (1, 2)]
        eventually(lambda: post.sender.outbox.frames_sent == 3)
        got = None
        with suppress(Interrupt), interrupting:
            got = post.inbox.take(Receive((0, Channel.MESSAGE, 2)), Deadline(PATIENCE))
        assert whole_of(got or post.recv(2, SOON)) == large(2)
        assert whole_of(post.recv(1, SOON)) == large(1)
        for sent in sending:
            sent.result(SOON)

    assert every_interrupt(run) >= 30


@pytest.mark.fault(37, "a lent message fetched by an interrupted thread can be read in parts")
def test_an_interrupt_anywhere_in_fetching_what_is_lent_leaves_it_readable(make_pair):
    def run(interrupting):
        post = Lending(make_pair())
        sending = post.lend(1)
        eventually(lambda: post.sender.outbox.frames_sent == 2)
        with suppress(Interrupt), interrupting:
            post.inbox.read_available()
        got = post.recv(1, SOON)
        if isinstance(got, Borrowed):
            part = bytearray(3)
            got.read_into(5, memoryview(part))
            assert part == large(1)[5:8]
            got.release()
        else:
            assert got == large(1)
        sending.result(SOON)

    assert every_interrupt(run) >= 30


@pytest.mark.fault(37, "a posted receive gets a lent message, also if its reader is interrupted")
@pytest.mark.parametrize("after", ["wait", "give up", "take back"])
def test_an_interrupt_anywhere_in_bringing_what_is_lent_leaves_the_receive_as_it_was(
    make_pair, after
):
    def run(interrupting):
        post = Lending(make_pair())
        receive, memory = post.want_there(1)
        sending = [post.lend(1, timeout=0.05 if after == "take back" else PATIENCE)]
        eventually(lambda: post.sender.outbox.frames_sent == 2)
        with suppress(Interrupt), interrupting:
            post.inbox.read_available()
        if after == "give up":
            post.inbox.give_up(receive)
            memory[:] = bytes(LARGE)  # from now on its owner uses it again
            assert whole_of(post.recv(1, SOON)) == large(1)
            assert memory == bytes(LARGE)
        else:
            expected = large(1)
            if after == "take back" and was_taken_back(sending[0]):
                expected = b"another"
                sending = [Running(post.send, 1, expected)]
            assert post.inbox.drive_posted(receive, Deadline(SOON))
            assert whole_of(receive.take()) == expected
        sending[0].result(SOON)

    assert every_interrupt(run) >= 30


def was_taken_back(sending):
    try:
        sending.result()
    except DeadlineExceededError:
        return True
    return False


@pytest.mark.fault(37, "an interrupted thread does not give away the role of another")
def test_an_interrupted_thread_leaves_the_reading_to_another_that_waits_for_the_same(post):
    receive_frames, inside, most = post.connection.receive, 0, 0

    def receive_counted(deadline, beside):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return receive_frames(deadline, beside)
        finally:
            inside -= 1

    post.connection.receive = receive_counted
    receive = post.want(1)
    reading = Running(post.inbox.drive, receive, Deadline(PATIENCE))

    def run(interrupting):
        eventually(lambda: inside)
        with suppress(Interrupt), interrupting:
            post.inbox.drive(receive, Deadline(0.001))
        with suppress(DeadlineExceededError):
            post.recv(2, 0.001)
        assert most == 1

    assert every_interrupt(run) >= 10
    post.send(1, b"x")
    assert reading.result(SOON)


@pytest.mark.fault(37, "an interrupt while a connection ends leaves nobody waiting for its reader")
@pytest.mark.parametrize("way", ["read_available", "wait_until"])
def test_an_interrupt_anywhere_in_seeing_the_end_leaves_the_role(make_pair, way):
    def run(interrupting):
        post = Post(make_pair("unix", introduced=False))
        post.sender.close()
        with suppress(Interrupt, PeerLostError), interrupting:
            if way == "read_available":
                post.inbox.read_available()
            else:
                post.inbox.wait_until(lambda: False, Deadline(PATIENCE))
        assert not post.inbox.is_read
        with pytest.raises(PeerLostError):
            post.recv(1, SOON)

    assert every_interrupt(run) >= 10


@pytest.mark.fault(37, "an interrupt between two steps of a wake-up loses none of the next ones")
def test_an_interrupt_anywhere_in_waking_a_thread_keeps_none_asleep(make_pair):
    def run(interrupting):
        post = Post(make_pair("unix", introduced=False), attached=False)
        sleeping = [post.start(tag) for tag in (1, 2, 3)]
        called, go_on = threading.Event(), threading.Event()
        post.want(5, lambda _: (called.set(), go_on.wait(PATIENCE)))
        post.inbox.connection = post.connection  # from now on they can read, if they are woken up
        with suppress(Interrupt), interrupting:
            post.want(8)
        with suppress(AssertionError):
            eventually(lambda: post.inbox.is_read, 0.05)
        if not post.inbox.is_read:  # it came before the wake-up
            post.want(9)
        post.send(5, b"to be called back, which the reader does without the role")
        assert called.wait(SOON)
        for tag in (1, 2, 3):
            post.send(tag, b"x")
        eventually(lambda: sum(running.done for running in sleeping) == 2, SOON)
        go_on.set()
        assert [running.result(SOON) for running in sleeping] == [b"x"] * 3

    assert every_interrupt(run) >= 5


@pytest.mark.fault(37, "a connection that was given up stays so for an interrupted reader")
def test_an_interrupt_anywhere_in_seeing_that_a_connection_was_given_up(make_pair):
    def run(interrupting):
        pair = make_pair("unix", options=({"incoming": True}, {}), introduced=False)
        post = Post(pair)
        post.sender.close()
        with suppress(Interrupt), interrupting:
            post.inbox.read_available()
        post.inbox.read_available()
        assert post.inbox.connection is None
        post.connection, post.sender = make_pair("unix", introduced=False)
        assert post.inbox.attach(post.connection)
        post.send(1, b"x")
        assert post.recv(1, SOON) == b"x"

    assert every_interrupt(run) >= 10


def test_no_wake_up_is_lost_with_a_thread_whose_deadline_passes_as_it_wakes(post):
    reader = post.start(1)
    late = post.start(2, LateDeadline())
    patient = post.start(3)
    post.send(1, b"the reader's own")  # it leaves the role to the late one, which leaves too
    assert reader.result(SOON) == b"the reader's own"
    assert isinstance(late.error(SOON), DeadlineExceededError)
    post.send(3, b"x")
    assert patient.result(SOON) == b"x"


def test_no_wake_up_is_lost_with_a_driver_whose_deadline_passes_as_it_wakes(post):
    reader = post.start(1)
    late = Running(post.inbox.drive, post.want(2), LateDeadline())
    eventually(lambda: len(post.inbox._asleep) == 1)
    patient = post.start(3)
    post.send(1, b"the reader's own")
    assert reader.result(SOON) == b"the reader's own"
    assert late.result(SOON) is False
    post.send(3, b"x")
    assert patient.result(SOON) == b"x"


def test_several_threads_may_wait_for_one_receive(post):
    # RpcFuture.result() is safe from any thread.
    reader = post.start(1)
    receive = post.want(2)
    drivers = []
    for _ in range(3):
        drivers.append(Running(post.inbox.drive, receive, Deadline(PATIENCE)))
        time.sleep(0.05)
    post.send(2, b"x")
    assert [driver.result(SOON) for driver in drivers] == [True] * 3
    post.send(1, b"y")
    assert reader.result() == b"y"


# -- failure


@on_both_transports
def test_the_failure_of_the_connection_ends_all_waiting_each_with_an_error_of_its_own(post):
    waiting = [post.start(tag) for tag in range(8)]
    post.sender.close()
    errors = [running.error(SOON) for running in waiting]
    assert {type(error) for error in errors} == {PeerLostError}
    assert {error.peer for error in errors} == {1}
    assert len({id(error) for error in errors}) == 8
    with pytest.raises(PeerLostError):
        post.recv(9)


def test_garbage_ends_all_waiting(post):
    waiting = [post.start(tag) for tag in range(3)]
    post.sender.stream.send(b"\xff" * 100)
    assert {type(running.error(SOON)) for running in waiting} == {ProtocolError}


@pytest.mark.parametrize("attached", [False, True])
def test_failing_the_inbox_ends_all_that_sleep_and_calls_back(connections, attached):
    post = Post(connections, attached=attached)
    called = []
    posted = post.want(5, called.append)
    waiting = [post.start(tag) for tag in range(3)]
    post.inbox.fail(PeerLostError(1, "the coordinator says so"))
    for running in waiting[1:]:
        assert isinstance(running.error(SOON), PeerLostError)
    assert called == [posted]
    assert not post.inbox.attach(post.sender)
    post.connection.fail(PeerLostError(1, "the coordinator says so"))  # ends the reader


def test_failing_the_inbox_ends_the_one_that_reads(post):
    reader = post.start(1)
    post.inbox.fail(PeerLostError(1, "the coordinator says so"))
    assert isinstance(reader.error(SOON), PeerLostError)


@on_both_transports
def test_messages_that_came_before_the_failure_are_still_received(post):
    for number in range(3):
        post.send(1, bytes([number]))
    post.send(2, bytes(100 * KIB))
    post.sender.close()
    assert post.recv(1) == b"\0"
    with pytest.raises(PeerLostError):
        post.recv(3)
    assert [post.recv(1), post.recv(1), len(post.recv(2))] == [b"\1", b"\2", 100 * KIB]
    for tag in (1, 2, 3):
        with pytest.raises(PeerLostError):
            post.recv(tag)


@on_both_transports
def test_messages_in_the_socket_are_received_after_the_connection_was_given_up(post):
    for number in range(3):
        post.send(1, bytes([number]))
    time.sleep(0.05)
    post.connection.fail(PeerLostError(1, "the coordinator says so"))
    assert [post.recv(1) for _ in range(3)] == [b"\0", b"\1", b"\2"]
    with pytest.raises(PeerLostError, match="coordinator"):
        post.recv(1)


@on_both_transports
def test_a_farewell_ends_receives_as_closed(post):
    post.send(1, b"x")
    post.sender.farewell(Deadline(PATIENCE))
    post.sender.close()
    assert post.recv(1) == b"x"
    with pytest.raises(ChannelClosedError, match="rank 1 has left"):
        post.recv(1)


def incoming(sockets):
    """An inbox whose connection was dialled by the peer, and the peer's socket."""
    near, far = sockets
    connection = Connection(near, peer=1, max_nbytes=1 << 20, clock=REAL_TIME, incoming=True)
    return Post((connection, Connection(far, peer=0, max_nbytes=1 << 20, clock=REAL_TIME)))


@on_both_transports
def test_a_connection_that_the_peer_gave_up_makes_room_for_the_next(sockets, connections):
    post = incoming(sockets)
    waiting = [post.start(tag) for tag in range(3)]
    post.sender.close()
    eventually(lambda: post.inbox.connection is None)
    post.connection, post.sender = connections
    assert post.inbox.attach(post.connection)
    for tag in range(3):
        post.send(tag, bytes([tag]))
    assert [running.result(SOON) for running in waiting] == [b"\0", b"\1", b"\2"]


def test_a_connection_that_the_peer_gave_up_is_dropped_on_request(sockets, connections):
    post = incoming(sockets)
    post.inbox.drop_given_up()
    assert post.inbox.connection is post.connection
    post.sender.close()
    eventually(lambda: post.connection.was_given_up)
    post.inbox.drop_given_up()
    assert post.inbox.connection is None
    assert post.connection.fileno() == -1
    assert post.inbox.attach(connections[0])


def test_a_peer_that_fails_before_it_has_sent_anything_ends_all_waiting(sockets):
    # Peer.fail: the coordinator says that the rank is dead; its connection was just dialled.
    post = incoming(sockets)
    waiting = [post.start(tag) for tag in range(3)]
    cause = PeerLostError(1, "the coordinator says so")
    post.connection.fail(cause)
    if post.inbox.connection is None:
        post.inbox.fail(cause)
    errors = [running.error(SOON) for running in waiting]
    assert {type(error) for error in errors} == {PeerLostError}


@on_both_transports
def test_half_a_message_at_the_end_is_not_delivered(post):
    post.send(1, b"whole")
    sock = post.sender.stream
    sock.send(b"\1\0\0\0\1\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\x0a" + bytes(7) + b"half")
    post.sender.close()
    assert post.recv(1) == b"whole"
    with pytest.raises(PeerLostError, match="middle of a message"):
        post.recv(1)


# -- closing


@pytest.mark.parametrize("readers", [0, 1, 5])
@on_both_transports
def test_closing_wakes_everyone_and_closes_the_connection(post, readers):
    waiting = [post.start(tag, math.inf) for tag in range(readers)]
    before = time.monotonic()
    post.inbox.close(ChannelClosedError("this backend is closed"))
    assert time.monotonic() - before < SOON
    for running in waiting:
        error = running.error(SOON)
        assert isinstance(error, ChannelClosedError)
        assert "this backend is closed" in str(error)
    assert post.connection.fileno() == -1
    with pytest.raises(ChannelClosedError):
        post.recv(1)
    post.inbox.close(ChannelClosedError("again"))


def test_closing_before_the_connection_has_come_refuses_it_later(connections):
    post = Post(connections, attached=False)
    waiting = [post.start(tag, math.inf) for tag in range(3)]
    post.inbox.close(ChannelClosedError("this backend is closed"))
    assert {type(running.error(SOON)) for running in waiting} == {ChannelClosedError}
    assert not post.inbox.attach(post.connection)


def test_a_group_that_is_left_ends_its_own_receives_only(post):
    reader = post.start(1)
    left, stays = post.want(1, group=5), post.want(1, group=6)
    sleeping = Running(post.inbox.wait, left, Deadline(PATIENCE))
    eventually(lambda: post.inbox._asleep)
    post.inbox.abandon(5, ChannelClosedError("left the group"))
    assert isinstance(sleeping.error(SOON), ChannelClosedError)
    assert not stays.done
    post.send(1, b"x")
    assert reader.result(SOON) == b"x"


def test_a_group_that_is_left_ends_its_receive_of_the_thread_that_reads(post):
    reader = Running(post.inbox.wait, post.want(1, group=5), Deadline(PATIENCE))
    eventually(lambda: post.inbox.is_read)
    post.inbox.abandon(5, ChannelClosedError("left the group"))
    assert isinstance(reader.error(SOON), ChannelClosedError)


@pytest.mark.parametrize("other_reads", [False, True])
def test_a_receive_that_another_thread_takes_back_is_not_waited_for(post, other_reads):
    # RpcFuture.cancel() in one thread, result() in another.
    other = post.start(1) if other_reads else None
    receive = post.want(2)
    driving = Running(post.inbox.drive, receive, Deadline(PATIENCE))
    eventually(lambda: post.inbox._asleep if other_reads else post.inbox.is_read)
    assert post.inbox.withdraw(receive)
    driving.result(SOON)
    post.send(1, b"x")
    assert other is None or other.result(SOON) == b"x"


# -- the limit on what is kept for later


def full_post(connections):
    """Nothing is read beyond the second of five large messages with tag 1."""
    post = Post(connections, Mailbox(unmatched_limit=150 * KIB))
    sending = Running(lambda: [post.send(1, bytes([n]) * 100 * KIB) for n in range(5)])
    eventually(lambda: poll(post, 9) or post.inbox._mailbox.arrived.nbytes >= 200 * KIB)
    return post, sending


def test_what_nobody_asks_for_stops_the_reading_and_the_error_says_so(connections):
    post, sending = full_post(connections)
    sending.result()
    post.send(2, b"behind them")
    with pytest.raises(DeadlineExceededError, match="204800 bytes of other messages"):
        post.recv(2, 0.1)
    assert post.inbox._mailbox.arrived.nbytes == 200 * KIB


def test_taking_what_is_kept_lets_the_reading_go_on(connections):
    post, sending = full_post(connections)
    sending.result()
    post.send(2, b"behind them")
    waiting = [post.start(2), post.start(3), post.start(4)]
    time.sleep(0.05)
    assert not any(running.done for running in waiting)
    assert not post.inbox.is_read
    for number in range(5):
        assert post.recv(1) == bytes([number]) * 100 * KIB
    assert waiting[0].result(SOON) == b"behind them"
    post.send(4, b"4")
    post.send(3, b"3")
    assert (waiting[1].result(SOON), waiting[2].result(SOON)) == (b"3", b"4")


def test_leaving_a_group_makes_room_and_lets_the_reading_go_on(connections):
    post = Post(connections, Mailbox(unmatched_limit=150 * KIB))
    payload = bytes(200 * KIB)
    sending = Running(
        post.sender.send, (5, Channel.MESSAGE, 1), ([payload], len(payload)), Deadline(PATIENCE)
    )
    eventually(lambda: poll(post, 9) or post.inbox._mailbox.arrived.nbytes)
    sending.result()
    waiting = post.start(2)
    assert not post.inbox.is_read
    post.inbox.abandon(5, ChannelClosedError("left the group"))
    assert post.inbox._mailbox.arrived.nbytes == 0
    post.send(2, b"x")
    assert waiting.result(SOON) == b"x"


# -- messages of a fixed size


def test_a_message_of_another_size_is_an_error_and_stays_for_the_next(post):
    post.send(1, b"first")
    post.send(1, b"second")
    for _ in range(2):
        with pytest.raises(SizeMismatchError) as caught:
            post.recv(1, nbytes=3)
        assert (caught.value.expected, caught.value.got) == (3, 5)
    assert [post.recv(1, nbytes=5), post.recv(1, nbytes=6)] == [b"first", b"second"]


@pytest.mark.parametrize("reads", [False, True])
def test_a_message_of_another_size_goes_to_a_thread_that_waits_for_it(post, reads):
    reader = post.start(9) if not reads else None
    misfit = post.start(1, nbytes=3)
    waiting = post.start(1, nbytes=5)
    post.send(1, b"first")
    assert isinstance(misfit.error(SOON), SizeMismatchError)
    assert waiting.result(SOON) == b"first"
    post.send(9, b"x")
    assert reader is None or reader.result(SOON) == b"x"


def test_a_message_that_goes_back_ends_one_that_wanted_another_size(post):
    reader = post.start(9)
    receive = post.want(1)
    misfit = post.start(1, nbytes=3)
    post.send(1, b"first")
    eventually(lambda: receive.done)
    post.inbox.give_up(receive)  # as when its thread is interrupted
    assert isinstance(misfit.error(SOON), SizeMismatchError)
    assert post.recv(1) == b"first"
    post.send(9, b"x")
    assert reader.result(SOON) == b"x"


# -- reading without waiting for a message of one's own


def test_reading_what_is_available_delivers_without_waiting(post):
    called = []
    receives = [post.want(tag, called.append) for tag in range(3)]
    post.inbox.read_available()
    assert not called
    for tag in range(3):
        post.send(tag, bytes([tag]))
    eventually(lambda: post.inbox.read_available() or len(called) == 3)
    assert called == receives
    assert [receive.result() for receive in receives] == [b"\0", b"\1", b"\2"]


def test_reading_what_is_available_leaves_it_to_a_thread_that_reads_already(post):
    reader = post.start(1)
    post.inbox.read_available()
    assert post.inbox.is_read
    post.send(1, b"x")
    assert reader.result() == b"x"


def test_reading_what_is_available_lets_a_parked_thread_read_on(post):
    reader = post.start(1, 0.05)
    parked = post.start(2)
    reader.error()
    post.inbox.read_available()
    post.send(2, b"x")
    assert parked.result(SOON) == b"x"


def test_reading_what_is_available_ends_receives_when_the_connection_has_failed(post):
    called = []
    receive = post.want(1, called.append)
    post.sender.close()
    eventually(lambda: post.inbox.read_available() or called)
    assert called == [receive]
    with pytest.raises(PeerLostError):
        receive.result()


def test_reading_what_is_available_without_a_connection_does_nothing(connections):
    Post(connections, attached=False).inbox.read_available()


def test_reading_quietly_leaves_the_callbacks_for_later_and_each_is_called_once(post):
    called = []
    receives = [post.want(tag, called.append) for tag in range(3)]
    for tag in range(3):
        post.send(tag, b"x")
    eventually(lambda: post.inbox.read_quietly() or len(post.inbox.due) == 3)
    assert all(receive.done for receive in receives)
    assert not called
    for _ in range(2):
        post.inbox.call_back_due()
    assert called == receives


def test_reading_quietly_leaves_those_that_failed_for_later_too(post):
    called = []
    receive = post.want(1, called.append)
    post.sender.close()
    eventually(lambda: post.inbox.read_quietly() or receive.done)
    assert not called
    post.inbox.read_available()
    assert called == [receive]


def test_a_callback_is_called_once_without_locks_and_may_receive(post):
    called = []

    def on_done(receive):
        called.append(receive.result())
        if len(called) == 1:
            called.append(post.recv(2))

    post.want(1, on_done)
    waiting = post.start(3)
    for tag in (1, 2, 3):
        post.send(tag, bytes([tag]))
    assert waiting.result() == b"\3"
    eventually(lambda: len(called) == 2)
    assert called == [b"\1", b"\2"]


def test_replies_that_nobody_waits_for_are_dropped_and_counted(connections):
    post = Post(connections, Mailbox(keep_unmatched=False))
    receive = post.want(1)
    assert post.inbox.in_flight == 1
    assert post.inbox.withdraw(receive)
    assert not post.inbox.withdraw(receive)
    post.send(1, b"too late")
    waiting = post.start(2)
    post.send(2, b"x")
    assert waiting.result() == b"x"
    assert (post.inbox._mailbox.arrived.dropped, post.inbox.in_flight, receive.done) == (
        1,
        0,
        False,
    )


@on_both_transports
def test_both_ends_may_send_first_when_a_blocked_send_reads(connections):
    posts = [Post(connections), Post(connections[::-1])]
    payloads = [bytes([rank]) * (16 << 20) for rank in (0, 1)]

    def exchange(rank):
        post = posts[rank]
        post.connection.send(
            (0, Channel.MESSAGE, 1),
            ([payloads[rank]], len(payloads[rank])),
            Deadline(PATIENCE),
            meanwhile=post.inbox,
        )
        return post.recv(1)

    running = [Running(exchange, rank) for rank in (0, 1)]
    assert [each.result() for each in running] == [payloads[1], payloads[0]]


# -- waiting for a condition


def test_waiting_until_reads_until_the_condition_holds(post):
    receives = [post.want(tag) for tag in range(3)]
    for tag in range(3):
        post.send(tag, b"x")
    assert post.inbox.wait_until(lambda: post.inbox.in_flight == 0, Deadline(PATIENCE))
    assert all(receive.done for receive in receives)


def test_waiting_until_what_holds_already_does_not_read(post):
    post.send(1, b"x")
    assert post.inbox.wait_until(lambda: True, Deadline(0.0))
    assert post.inbox._mailbox.arrived.nbytes == 0


def test_waiting_until_gives_up_at_the_deadline(post):
    for limit in (0.0, 0.05):
        deadline = Deadline(limit)
        assert not post.inbox.wait_until(lambda: False, deadline)
        assert limit <= deadline.waited < SOON


def test_waiting_until_gives_up_at_the_deadline_while_another_reads(post):
    reader = post.start(1)
    assert not post.inbox.wait_until(lambda: False, Deadline(0.05))
    receive = post.want(2)
    waiting = Running(post.inbox.wait_until, lambda: receive.done, Deadline(PATIENCE))
    post.send(2, b"x")
    assert waiting.result(SOON)
    post.send(1, b"y")
    assert reader.result() == b"y"


def test_waiting_until_raises_when_the_peer_has_failed(post):
    waiting = Running(post.inbox.wait_until, lambda: False, Deadline(PATIENCE))
    time.sleep(0.02)
    post.sender.close()
    assert isinstance(waiting.error(SOON), PeerLostError)
    with pytest.raises(PeerLostError):
        post.inbox.wait_until(lambda: False, Deadline(PATIENCE))


def test_waiting_until_serves_the_others_while_it_reads(post):
    enough = threading.Event()
    waiting = Running(post.inbox.wait_until, enough.is_set, Deadline(PATIENCE))
    eventually(lambda: post.inbox.is_read)
    parked = [post.start(tag) for tag in range(3)]
    for tag in range(3):
        post.send(tag, b"x")
    assert [running.result(SOON) for running in parked] == [b"x"] * 3
    enough.set()
    post.send(9, b"wake")
    assert waiting.result(SOON)


def test_waiting_until_notices_room_that_a_caller_made_by_giving_up(post):
    # The limit of calls in flight: another call's deadline passes, and no reply comes at all.
    receives = [post.want(tag) for tag in range(2)]
    waiting = Running(post.inbox.wait_until, lambda: post.inbox.in_flight < 2, Deadline(PATIENCE))
    eventually(lambda: post.inbox.is_read)
    assert post.inbox.withdraw(receives[0])
    assert waiting.result(SOON) is True


# -- what is lent


LARGE = 512 * KIB


def large(seed=0):
    return bytes([seed]) * LARGE


class Lending(Post):
    """An inbox for what rank 1 sends or lends; sending is done when the memory is free again."""

    def __init__(self, connections, mailbox=None, *, fetch=False):
        super().__init__(connections, mailbox)
        self.inbox = Inbox(1, mailbox or Mailbox(), REAL_TIME, self.connection, fetch=fetch)

    def lend(self, tag, payload=None, timeout=PATIENCE):
        payload = large(tag) if payload is None else payload
        return Running(self.send_within, timeout, tag, payload)

    def send_within(self, timeout, tag, payload):
        deadline = Deadline(timeout)
        self.sender.send((0, Channel.MESSAGE, tag), ([payload], len(payload)), deadline)

    def want_there(self, tag):
        """Post a receive into memory of its own; return both."""
        memory = bytearray(LARGE)
        envelope = (0, Channel.MESSAGE, tag)
        receive = PostedReceive(envelope, into=Destination(memoryview(memory)))
        self.inbox.post(receive)
        return receive, memory

    def withdraw(self, tag, payload=None):
        """Lend something and take it back."""
        assert isinstance(self.lend(tag, payload, 0.02).error(), DeadlineExceededError)


@pytest.fixture
def lent_post(lending):
    return Lending(lending)


@pytest.fixture
def replies(lending):
    """An inbox as those that replies come to."""
    return Lending(lending, Mailbox(keep_unmatched=False), fetch=True)


def test_a_lent_message_is_left_to_the_thread_that_wants_it(lent_post):
    waiting = lent_post.start(1)
    sending = lent_post.lend(1)
    parcel = waiting.result(SOON)
    assert isinstance(parcel, Borrowed)
    time.sleep(0.02)
    assert not sending.done
    assert parcel.whole() == large(1)
    sending.result(SOON)


def test_a_lent_message_that_nobody_wants_is_fetched_by_the_reader_and_its_sender_goes_on(
    lent_post,
):
    reader = lent_post.start(5)
    for tag in (7, 7, 8):
        lent_post.lend(tag).result(SOON)
    assert not reader.done
    eventually(lambda: lent_post.inbox._mailbox.arrived.nbytes == 3 * LARGE)
    lent_post.send(5, b"x")
    assert reader.result(SOON) == b"x"
    assert [whole_of(lent_post.recv(tag)) for tag in (7, 8, 7)] == [large(7), large(8), large(7)]
    assert lent_post.inbox._mailbox.arrived.nbytes == 0


@pytest.mark.parametrize("read", ["read", "read_available", "read_quietly"])
def test_whoever_reads_without_waiting_fetches_too(lent_post, read):
    sending = lent_post.lend(7)
    eventually(lambda: (getattr(lent_post.inbox, read)(), sending.done)[-1])
    sending.result()
    assert whole_of(lent_post.recv(7)) == large(7)


@pytest.mark.parametrize("read", ["read", "read_available", "read_quietly"])
def test_whoever_reads_brings_a_lent_message_to_where_a_posted_receive_wants_it(lent_post, read):
    receive, memory = lent_post.want_there(7)
    sending = lent_post.lend(7)
    eventually(lambda: (getattr(lent_post.inbox, read)(), sending.done)[-1])
    sending.result()
    assert receive.done
    assert memory == large(7)


def test_a_receive_whose_message_is_taken_back_while_it_comes_gets_the_next_one(
    lent_post, monkeypatch
):
    receive, memory = lent_post.want_there(7)
    bring_to, is_revoked = Borrowed.bring_to, threading.Event()

    def bring_too_late(borrowed, place):
        assert is_revoked.wait(PATIENCE)
        return bring_to(borrowed, place)

    monkeypatch.setattr(Borrowed, "bring_to", bring_too_late)
    reading = Running(eventually, lambda: (lent_post.inbox.read_available(), receive.done)[-1])
    lent_post.withdraw(7, large(1))
    is_revoked.set()
    lent_post.lend(7, large(2)).result(SOON)
    reading.result(SOON)
    assert memory == large(2)


def test_a_thread_that_wants_it_while_it_is_being_fetched_gets_it_once(lent_post):
    for number in range(30):
        sending = lent_post.lend(7, large(number))
        helper = Running(eventually, lambda: (lent_post.inbox.read(), sending.done)[-1])  # noqa: B023
        assert whole_of(lent_post.recv(7)) == large(number)
        sending.result(SOON)
        helper.result(SOON)
    assert lent_post.inbox._mailbox.arrived.nbytes == 0


def test_a_lent_message_keeps_its_place_among_others(lent_post):
    def send_all():
        for number in range(20):
            payload = bytes([number]) * (LARGE if number % 3 == 0 else 10)
            lent_post.send(1, payload)

    sending = Running(send_all)
    received = [whole_of(lent_post.recv(1)) for _ in range(20)]
    assert [payload[0] for payload in received] == list(range(20))
    sending.result(SOON)


def test_a_lent_message_of_another_size_is_kept_and_its_sender_goes_on(lent_post):
    misfit = lent_post.start(1, nbytes=3)
    lent_post.lend(1).result(SOON)
    error = misfit.error(SOON)
    assert isinstance(error, SizeMismatchError)
    assert (error.expected, error.got) == (3, LARGE)
    with pytest.raises(SizeMismatchError):
        lent_post.recv(1, nbytes=LARGE - 1)
    assert whole_of(lent_post.recv(1, nbytes=LARGE)) == large(1)


def test_no_more_is_fetched_than_is_kept_for_later(lending):
    """However many are announced at once."""
    post = Lending(lending, Mailbox(unmatched_limit=2 * LARGE))
    sending = [post.lend(1, large(number)) for number in range(6)]
    eventually(lambda: post.sender.outbox.frames_sent == 1 + len(sending))
    with pytest.raises(DeadlineExceededError, match="other messages"):
        post.recv(5, 0.2)
    assert sum(each.done for each in sending) == 2, "the others wait for room"
    taken = [whole_of(post.recv(1)) for _ in range(6)]
    assert sorted(taken) == [large(number) for number in range(6)]
    for each in sending:
        each.result(SOON)


def test_a_message_that_was_taken_back_is_never_seen(lent_post):
    lent_post.withdraw(1)
    lent_post.send(2, b"x")
    assert lent_post.recv(2) == b"x"  # whoever reads finds that it was taken back
    assert lent_post.inbox._mailbox.arrived.nbytes == 0
    with pytest.raises(DeadlineExceededError):
        lent_post.recv(1, 0.05)
    lent_post.send(1, b"the next one")
    assert lent_post.recv(1) == b"the next one"


def test_messages_that_were_taken_back_do_not_fill_the_mailbox(lending):
    post = Lending(lending, Mailbox(unmatched_limit=2 * LARGE))
    for _ in range(4):
        post.withdraw(1)
        post.inbox.read()
    post.send(2, b"x")
    assert post.recv(2, SOON) == b"x"


def test_a_message_that_was_taken_back_fits_everyone(lent_post):
    """A retry after a deadline may have another size."""
    lent_post.withdraw(1)
    lent_post.send(1, b"abc")
    lent_post.send(2, b"x")
    assert lent_post.recv(2) == b"x"
    assert lent_post.recv(1, nbytes=3) == b"abc"


def test_a_message_that_was_taken_back_ends_no_receive_that_waits_for_another_size(lent_post):
    lent_post.withdraw(1)
    waiting = Running(lent_post.recv, 1, nbytes=3)
    time.sleep(0.05)
    lent_post.send(1, b"abc")
    assert waiting.result(SOON) == b"abc"


def test_a_lent_message_for_a_thread_that_is_interrupted_goes_back_and_its_sender_goes_on(
    lent_post,
):
    deliver = lent_post.inbox._deliver

    def interrupted_after_delivery(frames):
        deliver(frames)
        lent_post.inbox._deliver = deliver
        raise KeyboardInterrupt

    lent_post.inbox._deliver = interrupted_after_delivery
    sending = lent_post.lend(1)
    with pytest.raises(KeyboardInterrupt):
        lent_post.recv(1)
    reader = lent_post.start(9)
    sending.result(SOON)
    assert whole_of(lent_post.recv(1)) == large(1)
    lent_post.send(9, b"x")
    assert reader.result() == b"x"


def test_what_was_fetched_is_received_after_its_sender_has_gone(lent_post):
    reader = lent_post.start(9)
    lent_post.lend(1).result(SOON)
    lent_post.sender.close()
    assert isinstance(reader.error(SOON), PeerLostError)
    assert whole_of(lent_post.recv(1)) == large(1)
    with pytest.raises(PeerLostError):
        lent_post.recv(1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lent_message_that_is_refused_is_dropped_and_its_sender_goes_on(lent_post, when):
    reader = lent_post.start(9)
    if when == "before":
        lent_post.inbox.refuse((0, Channel.MESSAGE, 1 << 16))
    lent_post.lend(1 << 16 | 5, large()).result(SOON)
    lent_post.lend(2 << 16, large(2)).result(SOON)
    if when == "after":
        lent_post.inbox.refuse((0, Channel.MESSAGE, 1 << 16))
    eventually(lambda: lent_post.inbox._mailbox.arrived.nbytes == LARGE)
    assert lent_post.inbox._mailbox.arrived.dropped == 1
    lent_post.send(9, b"x")
    assert reader.result(SOON) == b"x"
    assert whole_of(lent_post.recv(2 << 16)) == large(2)


def test_refusing_makes_room_and_lets_the_reading_go_on(connections):
    post = Post(connections, Mailbox(unmatched_limit=150 * KIB))
    sending = Running(post.send, 1, bytes(200 * KIB))
    eventually(lambda: poll(post, 1 << 20) or post.inbox._mailbox.arrived.nbytes)
    sending.result()
    waiting = post.start(2 << 20)
    assert not post.inbox.is_read
    post.inbox.refuse((0, Channel.MESSAGE, 0))
    post.send(2 << 20, b"x")
    assert waiting.result(SOON) == b"x"


def test_replies_are_fetched_by_whoever_reads_them(replies):
    called = []
    receives = [replies.want(tag, lambda r: called.append(r.result()[0])) for tag in (1, 2)]
    for tag in (1, 2):
        sending = replies.lend(tag)
        eventually(lambda sending=sending: replies.inbox.read_available() or sending.done)
        sending.result()
    assert [type(receive.payload) for receive in receives] == [bytearray, bytearray]
    assert [receive.result() for receive in receives] == [large(1), large(2)]
    assert called == [1, 2]


def test_a_reply_that_nobody_wants_is_given_back_unread(replies):
    waiting = replies.start(1)
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Borrowed, "_pull", lambda *_: reads.append(1))
        replies.lend(2).result(SOON)
    assert not reads
    replies.lend(1).result(SOON)
    assert waiting.result(SOON) == large(1)


def test_a_lent_reply_that_nobody_wants_is_counted_like_any_other(replies):
    waiting = replies.start(1)
    replies.send(2, b"small")
    replies.lend(3).result(SOON)
    replies.send(1, b"x")
    assert waiting.result(SOON) == b"x"
    assert replies.inbox._mailbox.arrived.dropped == 2


def test_a_reply_that_was_taken_back_does_not_stop_those_behind_it(replies):
    waiting = [replies.start(1), replies.start(2)]
    with replies.inbox._mutex:  # nobody reads it before it is taken back
        withdrawn = replies.lend(1, timeout=0.05)
        assert isinstance(withdrawn.error(), DeadlineExceededError)
    replies.send(2, b"x")
    assert waiting[1].result(SOON) == b"x"
    assert not waiting[0].done
    replies.lend(1, large(9)).result(SOON)
    assert waiting[0].result(SOON) == large(9)


def test_there_is_something_to_watch_only_if_somebody_can_read_it(connections):
    post = Post(connections, Mailbox(unmatched_limit=5), attached=False)
    assert post.inbox.watch() == []
    post.inbox.read()
    assert post.inbox.attach(post.connection)
    assert post.inbox.watch() == [post.connection.stream]
    reader = post.start(1)
    assert post.inbox.watch() == []
    post.send(1, b"x")
    assert reader.result() == b"x"
    assert post.inbox.watch() == [post.connection.stream]
    post.send(2, b"large")
    eventually(lambda: post.inbox.read() or post.inbox._mailbox.arrived.nbytes)
    assert post.inbox.watch() == [], "no more is read for now"
    post.inbox.read()
    assert post.recv(2) == b"large"
    post.connection.fail(PeerLostError(1, "the coordinator says so"))
    assert post.inbox.watch() == []
    post.connection.close()
    assert post.inbox.watch() == []
    post.inbox.read()


# -- everything at once


@pytest.mark.fault(38, "random deadlines lose nothing, double nothing and keep the order")
@pytest.mark.fault(41, "random deadlines lose nothing, double nothing and keep the order")
def test_random_timeouts_lose_nothing_double_nothing_and_keep_the_order(post):
    tags, seconds = 6, 1.0 if QUICK else 3.0
    stop = threading.Event()
    sent = [0] * tags

    def write():
        chance = random.Random(1)
        while not stop.is_set():
            tag = chance.randrange(tags)
            body = bytes(chance.choice((0, 0, 0, 50, 2000, 70_000)))
            post.send(tag, struct.pack("<I", sent[tag]) + body)
            sent[tag] += 1
            if sum(sent) - sum(map(len, received)) > 2000:
                time.sleep(0.001)
            elif chance.random() < 0.02:
                time.sleep(chance.choice((0.0, 0.0005, 0.003)))

    def take(tag, seed):
        """Receive in all the ways there are, with all kinds of patience."""
        chance = random.Random(seed)
        while not (stop.is_set() and drained[tag].is_set()):
            limit = chance.choice((0.0, 0.0, 0.0001, 0.0005, 0.002, 0.02))
            nbytes = 3 if chance.random() < 0.1 else None
            try:
                payload = post.recv(tag, limit, nbytes=nbytes)
            except (DeadlineExceededError, SizeMismatchError):
                continue
            received[tag].append(struct.unpack_from("<I", payload)[0])
            if writer.done and len(received[tag]) == sent[tag]:
                drained[tag].set()

    received = [[] for _ in range(tags)]
    drained = [threading.Event() for _ in range(tags)]
    writer = Running(write)
    takers = [Running(take, tag, tag) for tag in range(tags)]
    helper_stop = threading.Event()

    def help_reading():
        while not helper_stop.wait(0.0007):
            post.inbox.read_available()

    helper = Running(help_reading)
    time.sleep(seconds)
    stop.set()
    writer.result()
    for tag in range(tags):
        eventually(lambda tag=tag: len(received[tag]) >= sent[tag])
        drained[tag].set()
    helper_stop.set()
    helper.result()
    for taker in takers:
        taker.result()
    assert received == [list(range(count)) for count in sent]
    assert sum(sent) > 500
    assert post.inbox._mailbox.arrived.nbytes == 0
    assert not post.inbox.is_read
    assert not post.inbox._asleep


def test_one_that_waits_for_ever_is_served_however_many_others_give_up(post):
    """A wake-up lost with one that gives up would leave the one that waits asleep."""
    slowest = 0.0
    for turn in range(300):
        patient = Running(post.recv, 1, math.inf)
        others = [Running(give_up, post, tag) for tag in (2, 3, 4)]
        for other in others:
            other.result()
        if turn % 3 == 0:
            post.send(2, b"for nobody yet")
            post.recv(2)
        before = time.monotonic()
        post.send(1, b"x")
        assert patient.result(SOON) == b"x"
        slowest = max(slowest, time.monotonic() - before)
    assert slowest < SOON


def give_up(post, tag):
    with suppress(DeadlineExceededError):
        post.recv(tag, 0.0005)


# -- straight to where it is wanted


def block(number, nbytes=300_000):
    return bytes([number]) * nbytes


def want_into(post, tag, nbytes=300_000):
    memory = bytearray(nbytes)
    into = Destination(memoryview(memory))
    return Receive((0, Channel.MESSAGE, tag), nbytes=nbytes, into=into), memory


def send_halves(post, tag, payload):
    """Send a message whose second half leaves when the event is set; return event and thread."""
    half, go_on = len(payload) // 2, threading.Event()
    header = pack_header((0, Channel.MESSAGE, tag), len(payload), post.sender.outbox.frames_sent)

    def send():
        stream = post.sender.stream
        for part in (header + payload[:half], payload[half:]):
            view = memoryview(part)
            while view:
                try:
                    view = view[stream.send(view) :]
                except BlockingIOError:
                    stream.wait(0.1, to_write=True)
            assert go_on.wait(PATIENCE)

    post.sender.outbox._outgoing = (post.sender.outbox.frames_sent + 1, ())
    return go_on, Running(send)


@on_both_transports
def test_a_large_message_is_received_straight_into_its_receivers_memory(post):
    receive, memory = want_into(post, 3)
    sending = Running(post.send, 3, block(7))
    payload = post.inbox.take(receive, Deadline(PATIENCE))
    sending.result()
    assert isinstance(payload, Placed)
    assert memory == block(7)


@on_both_transports
def test_a_deadline_in_the_middle_of_a_message_gives_the_memory_back_and_loses_nothing(post):
    receive, memory = want_into(post, 3)
    go_on, sending = send_halves(post, 3, block(7))
    with pytest.raises(DeadlineExceededError):
        post.inbox.take(receive, Deadline(0.2))
    assert memory[0] == 7, "it had begun to come there"
    memory[:] = bytes(len(memory))
    go_on.set()
    assert post.recv(3) == block(7)
    sending.result()
    assert memory == bytes(len(memory)), "written to after its receiver had gone"


def test_a_thread_that_reads_for_another_leaves_its_memory_when_that_gives_up(post):
    receive, memory = want_into(post, 3)
    reader = post.start(4)  # has the reading role, and keeps it
    post.inbox.post(receive)  # before anything comes: then it is known where that is wanted
    go_on, sending = send_halves(post, 3, block(7))
    eventually(lambda: memory[0] == 7, SOON)
    with pytest.raises(DeadlineExceededError):
        post.inbox.wait(receive, Deadline(0.05))
    memory[:] = bytes(len(memory))
    go_on.set()
    sending.result()
    assert post.recv(3) == block(7)
    assert memory == bytes(len(memory))
    post.send(4, b"done")
    assert reader.result(SOON) == b"done"


def test_the_end_of_a_connection_in_the_middle_of_a_message_gives_the_memory_back(post):
    receive, memory = want_into(post, 3)
    go_on, sending = send_halves(post, 3, block(7))
    waiting = Running(post.inbox.take, receive, Deadline(PATIENCE))
    eventually(lambda: memory[0] == 7, SOON)
    post.inbox.fail(PeerLostError(1, "it was declared dead"))
    with pytest.raises(PeerLostError):
        waiting.result(SOON)
    assert post.inbox._mailbox.placing is None
    assert not isinstance(post.connection.parser.state[3].large.payload, Placed)
    go_on.set()
    sending.result()


@pytest.mark.parametrize("role", ["reader", "parked"])
def test_an_interrupt_anywhere_while_a_message_comes_into_memory_loses_nothing(make_pair, role):
    def run(interrupting):
        post = Post(make_pair("unix", introduced=False))
        other = post.start(4) if role == "parked" else None
        receive, memory = want_into(post, 3)
        sending = Running(lambda: [post.send(3, block(1)), post.send(3, block(2))])
        got = []
        with suppress(Interrupt), interrupting:
            got.append(post.inbox.take(receive, Deadline(PATIENCE)))
        got = [bytes(whole_of(payload)) for payload in got]  # it may have come before it was wanted
        memory[:] = bytes(len(memory))
        while len(got) < 2:
            got.append(post.recv(3, SOON))
        sending.result()
        assert got == [block(1), block(2)]
        assert memory == bytes(len(memory)), "written to after its receiver had gone"
        post.send(4, b"done")
        assert (post.recv(4, SOON) if other is None else other.result(SOON)) == b"done"
        assert post.inbox._mailbox.placing is None

    assert every_interrupt(run) >= 10


@on_both_transports
def test_many_threads_whose_time_is_always_up_get_every_large_message_once_and_whole(post):
    sizes = [70_000, 300_000, 1_000_000]
    count, counted = 120, threading.Lock()
    got = []

    def sends():
        for number in range(count):
            post.send(number % 3, block(number, sizes[number % 3]))

    def receives(tag, seed):
        chance = random.Random(seed)
        while True:
            with counted:
                if sum(1 for number in got if number % 3 == tag) == count // 3:
                    return
            receive, memory = want_into(post, tag, sizes[tag])
            try:
                payload = post.inbox.take(receive, Deadline(chance.choice([0.0, 0.0005, 0.003])))
            except DeadlineExceededError:
                memory[:] = bytes(len(memory))
                time.sleep(0.0002)
                assert not any(memory), "written to after its receiver had gone"
                continue
            if not isinstance(payload, Placed):
                memory[:] = payload
            with counted:
                assert memory == block(memory[0], len(memory))
                got.append(memory[0])

    threads = [Running(receives, tag, 10 * tag + at) for tag in range(3) for at in range(2)]
    sending = Running(sends)
    for thread in threads:
        thread.result(60)
    sending.result()
    assert sorted(got) == list(range(count))
    assert post.inbox._mailbox.placing is None
