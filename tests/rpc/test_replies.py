"""Replies: one terminal reply each, of a size that may be sent, kept for who takes none now."""

import threading

import pytest

from rankwire.clock import REAL_TIME
from rankwire.codec.codec import Codec
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    FunctionNotFoundError,
    MessageTooLargeError,
    OverloadedError,
    PeerLostError,
    RemoteError,
)
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc import replies
from rankwire.rpc.messages import Outcome, decode_reply
from rankwire.rpc.replies import Replies
from real_time import Deadline
from worlds import Running, eventually

MIB = 1 << 20


class Port:
    """Notes what is sent, and for how long; a test may have it refuse."""

    def __init__(self):
        self.sent = []
        self.limits = []
        self.refuse = None
        self.may_send = threading.Event()
        self.may_send.set()

    def reply(self, call, message, deadline, hold=False):
        if self.refuse is not None and deadline.limit == 0.0:
            raise self.refuse(call)
        assert self.may_send.wait(10)
        self.limits.append(deadline.remaining())
        self.sent.append((call.request_id, message, hold))


class Limits:
    """What answers know of a backend."""

    rank, clock = 1, REAL_TIME

    def __init__(self, max_message_nbytes):
        self.max_message_nbytes = max_message_nbytes


class Desk:
    """Replies over a port that notes them; errands run when the test says so."""

    def __init__(self, max_nbytes=MIB, names=("echo",)):
        self.codec = Codec()
        self.port = Port()
        self.errands = []
        self.replies = Replies(
            Limits(max_nbytes),
            self.port,
            self.codec,
            names=lambda: list(names),
            run_soon=self.errands.append,
            expect_work=lambda: None,
        )

    def sent(self):
        return [request_id for request_id, _, _ in self.port.sent]

    def decode(self, message):
        return decode_reply(self.codec, bytearray().join(message[0]), 1, 5.0)


@pytest.fixture
def desk():
    return Desk()


def call_of(number, origin="a connection", src=0):
    return IncomingCall(src, number, bytearray(), origin)


def too_late(_):
    return DeadlineExceededError(0.0)


# -- what is said ----------------------------------------------------------------------------------


def test_a_value_arrives(desk):
    assert desk.decode(desk.replies.value({"a": [1, b"2"]})) == {"a": [1, b"2"]}


def test_a_value_is_copied_if_that_was_asked_for(desk):
    for copies, expected in ((False, 1), (True, 0)):
        value = bytearray(20_000)
        message = desk.replies.value(value, copies=copies)
        value[:] = b"\1" * len(value)
        assert set(desk.decode(message)) == {expected}


def test_a_value_that_cannot_be_sent_is_an_error(desk):
    with pytest.raises(RemoteError, match="type object"):
        desk.decode(desk.replies.value(object()))
    with pytest.raises(MessageTooLargeError):
        desk.decode(desk.replies.value(bytes(2 * MIB)))


def test_an_error_is_as_long_as_a_message_may_be():
    for longest in (400, 2000, 100_000):
        desk = Desk(longest)
        message = desk.replies.error(ValueError("x" * 50_000))
        assert message[1] <= longest
        with pytest.raises(RemoteError) as info:
            desk.decode(message)
        assert "ValueError" in info.value.remote_type


@pytest.mark.parametrize(
    ("say", "kind", "may_have_run"),
    [
        (lambda a: a.refusal(Outcome.OVERLOADED, "full"), OverloadedError, None),
        (lambda a: a.unwanted(), RemoteError, None),
        (lambda a: a.late("why", began=False), DeadlineExceededError, False),
        (lambda a: a.late("why", began=True), DeadlineExceededError, True),
        (lambda a: a.closed(began=False), ChannelClosedError, False),
        (lambda a: a.closed(began=True), ChannelClosedError, True),
        (lambda a: a.not_found("eco"), FunctionNotFoundError, None),
    ],
    ids=["overloaded", "cancelled", "late", "late in it", "closed", "closed in it", "not found"],
)
def test_every_other_answer_is_its_error_at_the_caller(desk, say, kind, may_have_run):
    with pytest.raises(kind) as info:
        desk.decode(say(desk.replies))
    if may_have_run is not None:
        assert info.value.may_have_run is may_have_run


def test_the_error_of_an_unknown_name_lists_the_known_ones_if_they_fit():
    for names, known in ((["echo"], ["echo"]), (["x" * 1000] * 1000, [])):
        desk = Desk(100_000, names)
        with pytest.raises(FunctionNotFoundError) as info:
            desk.decode(desk.replies.not_found("eco"))
        assert info.value.known == known


# -- how it gets there -----------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "least", "most"), [(0.2, 0.5, 1.0), (30.0, 20.0, 30.0)])
def test_a_reply_has_the_time_of_its_call_and_a_second_at_least(desk, left, least, most):
    desk.replies.send(call_of(1), desk.replies.value(7), Deadline(left), hold=True)
    ((_, message, hold),) = desk.port.sent
    assert (desk.decode(message), hold) == (7, True)
    assert least < desk.port.limits[0] <= most


def test_after_the_deadline_of_a_call_its_caller_is_told_so_and_not_waited_for(desk):
    desk.replies.send(call_of(1), desk.replies.value(7), Deadline(0.0))
    ((_, message, _),) = desk.port.sent
    with pytest.raises(DeadlineExceededError) as info:
        desk.decode(message)
    assert info.value.may_have_run
    assert desk.port.limits == [0.0]


@pytest.mark.parametrize("send", ["send", "send_at_once"])
def test_a_caller_that_is_gone_gets_no_reply_and_needs_none(desk, monkeypatch, send):
    def reply(*_, **__):
        raise PeerLostError(0, "it is gone")

    monkeypatch.setattr(desk.port, "reply", reply)
    more = () if send == "send_at_once" else (Deadline(5),)
    getattr(desk.replies, send)(call_of(1), desk.replies.value(1), *more)
    assert not desk.errands


def test_what_a_caller_does_not_take_now_is_sent_later_and_in_order(desk):
    desk.port.refuse = too_late
    for number in range(5):
        desk.replies.send_at_once(call_of(number), desk.replies.value(number))
    assert desk.sent() == []
    assert len(desk.errands) == 1  # one thread sends them all
    desk.port.refuse = None
    desk.replies.send_at_once(call_of(5), desk.replies.value(5))  # not before the others
    desk.errands.pop()()
    assert desk.sent() == [0, 1, 2, 3, 4, 5]
    assert all(0.5 < limit <= 1.0 for limit in desk.port.limits[-6:])
    desk.replies.send_at_once(call_of(6), desk.replies.value(6))
    assert desk.sent()[-1] == 6
    assert not desk.errands


def test_one_caller_that_takes_nothing_does_not_delay_the_others(desk):
    desk.port.refuse = too_late
    desk.replies.send_at_once(call_of(1, "slow"), desk.replies.value(1))
    desk.port.refuse = None
    desk.replies.send_at_once(call_of(2, "quick", src=2), desk.replies.value(2))
    assert desk.sent() == [2]


def test_replies_that_two_threads_fail_to_send_at_once_are_both_sent_later(desk):
    """The poller and the event loop answer one caller that takes nothing at this moment."""
    first, second = call_of(1), call_of(2)
    message = desk.replies.value(None)

    def refuse(call):
        if call is first:  # while the first is being refused, the second is too
            desk.replies.send_at_once(second, message)
        return DeadlineExceededError(0.0)

    desk.port.refuse = refuse
    desk.replies.send_at_once(first, message)
    desk.port.refuse = None
    assert len(desk.errands) == 1
    desk.errands.pop()()
    assert sorted(desk.sent()) == [1, 2]


def test_replies_that_a_caller_does_not_take_are_bounded(desk):
    """It may have asked for anything, in a few bytes, and never read."""
    message = ([bytes(MIB)], MIB)
    desk.port.refuse = too_late
    desk.port.may_send.clear()
    desk.replies.send_at_once(call_of(0), message)
    sending = Running(desk.errands.pop())
    for number in range(1, 1000):
        desk.replies.send_at_once(call_of(number), message)
    other = call_of(1000, "another connection", src=2)
    desk.replies.send_at_once(other, message)
    desk.port.may_send.set()
    sending.result()
    assert 100 <= len(desk.port.sent) <= 130  # 128 MiB
    assert 1000 not in desk.sent()
    desk.errands.pop()()
    assert desk.sent()[-1] == 1000  # each rank has its own bound
    desk.replies.send_at_once(call_of(1001), message)
    eventually(lambda: desk.errands)
    desk.errands.pop()()
    assert desk.sent()[-1] == 1001


# -- what hooks are told ---------------------------------------------------------------------------


class Handle:
    pass


def hooked(desk):
    """Let handles be sent; return the list of the ranks that have them."""
    held = []

    def take(handle, sending):
        held.append(sending.peer)
        sending.undo(lambda: held.remove(sending.peer))

    desk.codec.register(Handle, take=take, build=lambda state, _: Handle())
    return held


@pytest.mark.parametrize("copies", [False, True])
def test_a_reply_that_is_sent_stays_as_it_is(desk, copies):
    held = hooked(desk)
    desk.replies.send(call_of(1), desk.replies.value(Handle(), peer=3, copies=copies), Deadline(5))
    assert held == [3]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("left", [0.0, 5.0])
def test_a_reply_that_is_not_sent_is_undone(desk, copies, left):
    held = hooked(desk)
    message = desk.replies.value(Handle(), peer=3, copies=copies)
    desk.port.reply = lambda *_: (_ for _ in ()).throw(PeerLostError(3, "it died"))
    desk.replies.send(call_of(1), message, Deadline(left))
    assert held == []


def test_a_reply_of_which_a_part_has_left_is_not_undone(desk):
    held = hooked(desk)
    error = DeadlineExceededError(1.0)
    error.may_have_arrived = True
    desk.port.reply = lambda *_: (_ for _ in ()).throw(error)
    desk.replies.send(call_of(1), desk.replies.value(Handle(), peer=3), Deadline(5))
    assert held == [3]


def test_a_result_that_is_too_large_is_undone(desk):
    held = hooked(desk)
    desk.replies.value([Handle(), bytes(2 * MIB)], peer=3)
    assert held == []


def test_replies_that_are_kept_stay_and_those_that_are_dropped_are_undone(desk, monkeypatch):
    held = hooked(desk)
    monkeypatch.setattr(replies, "_MOST_KEPT_NBYTES", 2500)
    desk.port.refuse = too_late
    for number in range(3):
        desk.replies.send_at_once(call_of(number), desk.replies.value(Handle(), peer=number))
    assert held == [0, 1]
    desk.errands.pop()()
    assert desk.sent() == [0, 1]
    assert held == [0, 1]


def test_a_callback_that_raises_is_logged(desk, caplog):
    desk.codec.register(
        Handle, take=lambda _, sending: sending.undo(lambda: 1 // 0), build=lambda state, _: None
    )
    desk.replies.discard(desk.replies.value(Handle()))
    assert "a hook could not undo a reply" in caplog.text
