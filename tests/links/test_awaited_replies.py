"""A pending reply: wait for it, drive it, give it up, end it with an error."""

import time
from contextlib import suppress

import pytest

from interrupts import Interrupt, every_interrupt
from rankwire.clock import REAL_TIME
from rankwire.errors import CallCancelledError, DeadlineExceededError, PeerLostError
from rankwire.links.inbox import Inbox, Reply
from rankwire.wire.frames import Channel
from rankwire.wire.mailbox import Mailbox
from real_time import Deadline
from worlds import LEND_FROM, PATIENCE, Running, eventually

SOON = 8.0
SERVICE = 5


class Calls:
    """The replies of calls to rank 1, and rank 1's end of the connection."""

    def __init__(self, connections):
        self.connection, self.callee = connections
        self.inbox = Inbox(1, Mailbox(keep_unmatched=False), REAL_TIME, self.connection, fetch=True)

    def call(self, number, on_done=None):
        reply = Reply((SERVICE, int(Channel.REPLY), number), on_done, self.inbox)
        self.inbox.post(reply)
        return reply

    def answer(self, number, payload=b"!", **options):
        envelope, message = (SERVICE, int(Channel.REPLY), number), ([payload], len(payload))
        self.callee.send(envelope, message, Deadline(PATIENCE), **options)


@pytest.fixture
def calls(connections):
    return Calls(connections)


def test_a_reply_has_the_number_of_its_call(calls):
    reply = calls.call(7)
    assert (reply.request_id, reply.done, reply.posted) == (7, False, True)


def test_whoever_waits_gets_it_and_ends_others_on_the_way(calls):
    first, second = calls.call(1), calls.call(2)
    calls.answer(1, b"one")
    calls.answer(2, b"two")
    assert second.wait(Deadline(SOON)) == b"two"
    assert first.done
    assert first.wait(Deadline(0.0)) == b"one"
    assert calls.inbox.in_flight == 0


def test_a_reply_that_is_lent_arrives_in_memory_of_the_callers_own(lending):
    calls = Calls(lending)
    reply = calls.call(1)
    payload = bytearray(b"x" * LEND_FROM)
    answering = Running(calls.answer, 1, payload)
    result = reply.wait(Deadline(SOON))
    answering.result()
    payload[:1] = b"y"
    assert type(result) is bytearray
    assert result == b"x" * LEND_FROM


def test_a_wait_that_ends_at_its_deadline_takes_the_reply_back(calls):
    reply = calls.call(1)
    with pytest.raises(DeadlineExceededError) as info:
        reply.wait(Deadline(0.01))
    assert info.value.waiting_for == [1]
    assert calls.inbox.in_flight == 0
    calls.answer(1, b"late")
    calls.answer(2)
    assert calls.call(2).wait(Deadline(SOON)) == b"!"
    assert not reply.done


def test_a_drive_that_ends_at_its_deadline_leaves_it_to_come(calls):
    reply = calls.call(1)
    assert not reply.drive(Deadline(0.01))
    assert calls.inbox.in_flight == 1
    calls.answer(1)
    assert reply.drive(Deadline(SOON))
    assert reply.drive(Deadline(0.0))
    assert reply.result() == b"!"


@pytest.mark.parametrize("verb", ["wait", "drive"])
def test_waiting_sends_the_requests_that_were_held_back(calls, verb):
    """Else both ends would wait."""
    reply = calls.call(1)
    envelope = (SERVICE, int(Channel.CALL), 1)
    calls.connection.send(envelope, ([b"?"], 1), Deadline(SOON), hold=True)
    waiting = Running(getattr(reply, verb), Deadline(PATIENCE))
    if verb == "drive":  # a call whose reply is waited for at once is not held back
        eventually(lambda: not calls.connection.outbox.is_holding, SOON)
    calls.answer(1)
    assert waiting.result()


def test_who_asked_to_be_told_is_told_once_and_without_locks(calls):
    told = []

    def note(reply):
        calls.call(100 + len(told))  # would wait for ever for a lock
        told.append(reply)

    reply = calls.call(1, note)
    calls.answer(1)
    assert reply.wait(Deadline(SOON)) == b"!"
    assert told == [reply]


@pytest.mark.fault(37, "whoever waits for a reply that an interrupted thread has read is told")
def test_who_waits_calls_back_what_an_interrupted_thread_has_left(calls):
    """It was interrupted between reading and calling back."""
    told = []
    replies = [calls.call(number, told.append) for number in (1, 2)]
    calls.answer(1)
    calls.answer(2)
    eventually(lambda: calls.inbox.read_quietly() or replies[1].done, SOON)
    assert told == []
    assert replies[0].drive(Deadline(SOON))
    assert told == replies


def test_what_is_given_up_does_not_come_any_more(calls):
    told = []
    reply = calls.call(1, told.append)
    assert reply.withdraw()
    assert not reply.withdraw()
    calls.answer(1)
    calls.answer(2)
    calls.call(2).wait(Deadline(SOON))
    assert (reply.done, told) == (False, [])


def test_what_has_come_cannot_be_given_up_or_ended(calls):
    reply = calls.call(1)
    calls.answer(1, b"first")
    assert reply.drive(Deadline(SOON))
    assert not reply.withdraw()
    assert not reply.abort(CallCancelledError("too late"))
    assert reply.wait(Deadline(0.0)) == b"first"


@pytest.mark.parametrize("is_reader", [True, False], ids=["a reader", "a sleeper"])
def test_an_abort_ends_the_wait_of(calls, is_reader):
    told = []
    if not is_reader:
        reading = Running(calls.call(9).wait, Deadline(PATIENCE))
        eventually(lambda: calls.inbox.is_read)
    reply = calls.call(1, told.append)
    waiting = Running(reply.wait, Deadline(PATIENCE))
    eventually(lambda: calls.inbox.is_read)
    time.sleep(0.01)
    assert reply.abort(CallCancelledError("not wanted"))
    error = waiting.error(SOON)
    assert isinstance(error, CallCancelledError)
    assert told == [reply]
    assert not reply.abort(CallCancelledError("again"))
    calls.answer(1)  # dropped
    if not is_reader:
        calls.answer(9)
        reading.result()
    calls.answer(2)
    assert calls.call(2).wait(Deadline(SOON)) == b"!"


def test_an_error_is_put_into_the_terms_of_the_group(calls):
    reply = calls.call(1)
    translated = []
    reply.translate = translated.append
    with pytest.raises(DeadlineExceededError) as info:
        reply.wait(Deadline(0.01))
    assert translated == [info.value]


def test_the_end_of_the_callee_ends_its_replies(calls):
    told = []
    replies = [calls.call(number, told.append) for number in range(3)]
    calls.answer(0)
    calls.callee.close()
    assert replies[0].wait(Deadline(SOON)) == b"!"
    for reply in replies[1:]:
        with pytest.raises(PeerLostError):
            reply.wait(Deadline(SOON))
    assert sorted(reply.request_id for reply in told) == [0, 1, 2]


@pytest.mark.parametrize("verb", ["wait", "drive", "withdraw", "abort"])
def test_an_interrupt_anywhere_leaves_the_other_replies(make_pair, verb):
    numbers = iter(range(0, 1 << 30, 2))
    calls = Calls(make_pair())

    def run(interrupting):
        number = next(numbers)
        reply, other = calls.call(number), calls.call(number + 1)
        calls.answer(number, b"mine")
        calls.answer(number + 1, b"other")
        argument = () if verb == "withdraw" else (Deadline(SOON),)
        argument = (CallCancelledError("no"),) if verb == "abort" else argument
        with suppress(Interrupt), interrupting:
            getattr(reply, verb)(*argument)
        assert other.wait(Deadline(SOON)) == b"other"
        reply.withdraw()
        assert calls.inbox.in_flight == 0

    assert every_interrupt(run) >= 3
