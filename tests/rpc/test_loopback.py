"""Calls to oneself go the same way without a connection."""

import threading

import pytest

from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError
from rankwire.rpc.loopback import Loopback


@pytest.fixture
def taken():
    return []


@pytest.fixture
def loopback(taken):
    return Loopback(4, taken.append, taken.append)


def test_a_request_reaches_the_server_and_its_reply_the_caller(loopback, taken):
    receive = loopback.call(4, 7, [b"re", b"quest"], 7, Deadline(1))
    (call,) = taken
    assert (call.src, call.request_id, call.payload) == (4, 7, b"request")
    loopback.reply(7, [b"answer"])
    assert loopback.wait(4, receive, Deadline(1)) == b"answer"
    assert loopback.in_flight() == 0


def test_a_late_reply_is_dropped(loopback):
    receive = loopback.call(4, 7, [], 0, Deadline(1))
    with pytest.raises(DeadlineExceededError):
        loopback.wait(4, receive, Deadline(0.01))
    loopback.reply(7, [b"late"])
    assert loopback.in_flight() == 0


def test_replies_call_back(loopback):
    called = []
    loopback.call(4, 7, [], 0, Deadline(1), called.append)
    loopback.reply(7, [b"x"])
    assert called[0].result() == b"x"


def test_room_is_waited_for(loopback):
    loopback.call(4, 1, [], 0, Deadline(1))
    assert loopback.wait_for_room(4, 2, Deadline(0))
    assert not loopback.wait_for_room(4, 1, Deadline(0.01))
    threading.Timer(0.05, loopback.reply, (1, [])).start()
    assert loopback.wait_for_room(4, 1, Deadline(10))


def test_closing_ends_every_wait(loopback):
    called = []
    receive = loopback.call(4, 7, [], 0, Deadline(1), called.append)
    loopback.close(ChannelClosedError("closed"))
    with pytest.raises(ChannelClosedError):
        loopback.wait(4, receive, Deadline(1))
    assert called == [receive]


def test_cancelling_is_passed_on(loopback, taken):
    loopback.cancel(4, 9)
    assert taken == [9]
