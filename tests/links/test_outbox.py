"""Messages that wait to leave: in order, whole, and out of memory that can be taken back."""

import time
from contextlib import suppress

import pytest

from interrupts import Interrupt, every_interrupt
from links.ends import read
from rankwire.errors import ChannelClosedError, DeadlineExceededError
from rankwire.links import send_handle
from rankwire.wire.frames import Channel
from rankwire.wire.loans import REFUSED
from real_time import Deadline
from worlds import PATIENCE, Running

MIB = 1 << 20


def envelope(tag):
    return (0, Channel.MESSAGE, tag)


def post(connection, data, tag=0):
    return send_handle.post(connection, envelope(tag), ((data,), len(data)))


def read_all(connection, count):
    """Return tags and payloads of the next frames."""
    return [(frame.envelope[2], bytes(frame.payload)) for frame in read(connection, count)]


def read_later(connection, count):
    """Read when whoever sends has begun to wait for that."""
    time.sleep(0.01)
    return read_all(connection, count)


def test_what_is_taken_at_once_has_left(connections):
    near, far = connections
    assert post(near, b"small") is None
    assert read_all(far, 1) == [(0, b"small")]


def test_what_waits_leaves_in_order_before_what_is_sent_later(connections):
    near, far = connections
    near.lend_from = 1 << 60
    big = bytes(8 * MIB)
    first, second = post(near, big, 0), post(near, big, 1)
    assert first is not None
    assert post(near, b"small", 2) is not None
    assert not first.is_over()
    assert near.queued_nbytes >= 8 * MIB
    reading = Running(read_all, far, 4)
    near.send(envelope(3), ((b"last",), 4), Deadline(PATIENCE))
    assert first.is_over()
    assert second.is_over()
    assert reading.result() == [(0, big), (1, big), (2, b"small"), (3, b"last")]


def test_waiting_for_one_does_not_wait_for_the_next(connections):
    near, far = connections
    near.lend_from = 1 << 60
    first, second = post(near, bytes(4 * MIB), 0), post(near, bytes(64 * MIB), 1)
    reading = Running(read_all, far, 1)
    assert first.wait(Deadline(PATIENCE))
    reading.result()
    assert not second.wait(Deadline(0.05))


def test_what_has_not_begun_is_taken_back_and_the_rest_goes_on(connections):
    near, far = connections
    near.lend_from = 1 << 60
    big = bytes(8 * MIB)
    first, second, third = post(near, big, 0), post(near, big, 1), post(near, b"third", 2)
    assert not second.revoke()
    assert not second.revoke(), "again"
    reading = Running(read_all, far, 2)
    assert third.wait(Deadline(PATIENCE))
    assert first.is_over()
    assert reading.result() == [(0, big), (2, b"third")]


def test_of_what_has_begun_the_rest_is_copied(connections):
    near, far = connections
    near.lend_from = 1 << 60
    data = bytearray(8 * MIB)
    posted = post(near, data)
    assert posted.revoke()
    data[:] = b"x" * len(data)
    reading = Running(read_all, far, 2)
    near.send(envelope(1), ((b"next",), 4), Deadline(PATIENCE))
    assert reading.result() == [(0, bytes(8 * MIB)), (1, b"next")]


def test_a_failed_connection_ends_the_wait(connections):
    near, _ = connections
    near.lend_from = 1 << 60
    posted = post(near, bytes(8 * MIB))
    near.fail(ChannelClosedError("it is over"))
    with pytest.raises(ChannelClosedError):
        posted.wait(Deadline(PATIENCE))
    with pytest.raises(ChannelClosedError):
        post(near, b"x")


def test_a_sender_behind_others_has_its_own_limit(connections):
    near, far = connections
    near.lend_from = 1 << 60
    post(near, bytes(8 * MIB))
    with pytest.raises(DeadlineExceededError) as caught:
        near.send(envelope(1), ((b"late",), 4), Deadline(0.12))
    assert not caught.value.may_have_arrived
    reading = Running(read_all, far, 2)
    near.send(envelope(2), ((b"end",), 3), Deadline(PATIENCE))
    assert [tag for tag, _ in reading.result()] == [0, 2]


@pytest.mark.fault(37, "an interrupt in sending what waits leaves whole frames")
def test_an_interrupt_anywhere_in_sending_what_waits(connections):
    near, far = connections
    near.lend_from = 1 << 60
    tags = iter(range(1 << 30))
    data = bytes(16 * MIB)

    def run(interrupting):
        tag = next(tags)
        posted = [post(near, data, tag) for _ in range(2)]
        reading = Running(read_later, far, 3)
        with suppress(Interrupt), interrupting:
            for one in posted:
                if one is not None:
                    one.wait(Deadline(PATIENCE))
        near.send(envelope(tag), ((b"end",), 3), Deadline(PATIENCE))
        assert reading.result() == [(tag, data), (tag, data), (tag, b"end")]

    assert every_interrupt(run, step=2) >= 10


def test_an_interrupt_anywhere_in_sending_a_refused_loan_by_stream_does_not_send_it_twice(lending):
    near, far = lending
    near.lend_from = 1
    data = bytes(1000)

    def run(interrupting):
        handle = send_handle.offer(near, envelope(0), ((data,), len(data)), Deadline(PATIENCE))
        read(far)
        handle._posted._pair[1] = handle._posted.number | REFUSED
        with suppress(Interrupt), interrupting:
            handle.wait(Deadline(PATIENCE))
        assert handle.wait(Deadline(PATIENCE))
        assert handle.is_over()
        assert handle.revoke(), "it arrives"
        near.send_small(envelope(1), ((b"end",), 3), Deadline(PATIENCE))
        assert read_all(far, 2) == [(0, data), (1, b"end")]

    assert every_interrupt(run, step=1) >= 10
