"""A receive in several inboxes: one message, the others stay where they belong."""

import pytest

from connected import socket_pair
from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError, DeadlineExceededError, PeerLostError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.links.receive_handle import FirstReceive
from rankwire.transports.poller import PollWaiter
from rankwire.transports.spin import Spin
from rankwire.wire.frames import Channel, whole_of
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import Receive
from real_time import Deadline
from worlds import PATIENCE, Running, eventually

ENVELOPE = (0, Channel.MESSAGE, 5)


class Several:
    """Inboxes of some peers, and what those send with."""

    def __init__(self, count, cleanup):
        self.inboxes, self.peers = [], []
        for rank in range(count):
            ends = socket_pair("unix")
            near, far = (
                Connection(end, peer=rank, max_nbytes=1 << 20, clock=REAL_TIME) for end in ends
            )
            cleanup.callback(near.close)
            cleanup.callback(far.close)
            self.inboxes.append(Inbox(rank, Mailbox(), REAL_TIME, near))
            self.peers.append(far)

    def send(self, rank, data, tag=5):
        envelope = (0, Channel.MESSAGE, tag)
        self.peers[rank].send(envelope, ((data,), len(data)), Deadline(PATIENCE))

    def receive(self, order=(0, 1, 2), nbytes=None):
        inboxes = [self.inboxes[rank] for rank in order]
        receive = FirstReceive(inboxes, ENVELOPE, nbytes, lambda: PollWaiter(Spin(0.0, REAL_TIME)))
        receive.sources = list(order)
        return receive

    def take(self, rank):
        return self.inboxes[rank].take(Receive(ENVELOPE), Deadline(0.0))


@pytest.fixture
def several(cleanup):
    return Several(3, cleanup)


def test_the_first_message_is_taken_and_the_others_stay(several):
    for rank in (2, 1):
        several.send(rank, b"of %d" % rank)
    first = several.receive()
    assert first.index == 0
    assert first.take(Deadline(PATIENCE), whole_of) == b"of 1"
    assert first.sources[first.index] == 1
    assert first.take(Deadline(PATIENCE), whole_of) == b"of 1", "again"
    assert several.take(2) == b"of 2"
    assert not any(inbox.wanted() for inbox in several.inboxes)


def test_those_whose_turn_it_is_come_first_though_others_were_read_before(several):
    several.send(0, b"of 0")
    several.inboxes[0].read_available()
    several.send(1, b"of 1")
    first = several.receive(order=(1, 2, 0))
    assert (first.take(Deadline(PATIENCE), whole_of), first.sources[first.index]) == (b"of 1", 1)
    assert several.take(0) == b"of 0"


def test_a_message_that_another_thread_reads_ends_the_wait(several):
    first = several.receive()
    waiting = Running(first.take, Deadline(PATIENCE), whole_of)
    eventually(lambda: several.inboxes[1].wanted())
    reading = Running(several.inboxes[1].take, Receive((0, Channel.MESSAGE, 6)), Deadline(PATIENCE))
    several.send(1, b"for the first")
    assert waiting.result() == b"for the first"
    several.send(1, b"for the other", 6)
    assert reading.result() == b"for the other"


def test_who_leaves_has_another_one_read(several):
    first = several.receive()
    waiting = Running(first.take, Deadline(PATIENCE), whole_of)
    reading = Running(several.inboxes[0].take, Receive((0, Channel.MESSAGE, 6)), Deadline(PATIENCE))
    several.send(1, b"it goes")
    assert waiting.result() == b"it goes"
    several.send(0, b"it stays", 6)
    assert reading.result() == b"it stays"


def test_when_one_has_come_none_is_held_for_it_elsewhere(several):
    first = several.receive()
    first.post()
    several.send(0, b"of 0")
    several.inboxes[0].read_available()
    several.send(1, b"of 1")
    several.inboxes[1].read_available()
    assert several.take(1) == b"of 1"
    assert first.take(Deadline(0.0), whole_of) == b"of 0"


def test_given_up_it_leaves_what_has_come(several):
    first = several.receive()
    first.post()
    several.send(0, b"first")
    several.send(0, b"second")
    several.inboxes[0].read_available()
    first.give_up()
    first.give_up()
    assert [several.take(0), several.take(0)] == [b"first", b"second"]


def test_a_deadline_leaves_it_asked_for(several):
    first = several.receive()
    with pytest.raises(DeadlineExceededError) as caught:
        first.take(Deadline(0.01), whole_of)
    assert caught.value.waiting_for == [0, 1, 2]
    several.send(2, b"late")
    assert first.take(Deadline(PATIENCE), whole_of) == b"late"


def test_the_loss_of_some_does_not_end_it_that_of_all_does(several):
    first = several.receive()
    several.inboxes[0].fail(ChannelClosedError("it has left"))
    several.inboxes[1].fail(PeerLostError(1, "it is gone"))
    with pytest.raises(DeadlineExceededError) as caught:
        first.take(Deadline(0.01), whole_of)
    assert caught.value.waiting_for == [2]
    waiting = Running(first.take, Deadline(PATIENCE), whole_of)
    several.inboxes[2].fail(ChannelClosedError("it has left"))
    assert waiting.error().peer == 1


def test_in_turn_no_inbox_is_starved_by_one_that_was_read_before(several):
    for rank in range(3):
        for _ in range(10):
            several.send(rank, b"x")
    got, last = [], 2
    for _ in range(9):
        order = [(last + step) % 3 for step in (1, 2, 3)]
        first = several.receive(order)
        first.take(Deadline(PATIENCE), whole_of)
        last = first.sources[first.index]
        got.append(last)
    assert got == [0, 1, 2] * 3
