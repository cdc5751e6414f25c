"""The calling side of a port: connections, limits, cancels, calls to oneself, interrupts.

Who polls is the test itself, so nothing happens at another moment than it says.
"""

import threading
from contextlib import suppress

import pytest

from faults.sizes import QUICK
from interrupts import Interrupt, every_interrupt
from rankwire.errors import ChannelClosedError, DeadlineExceededError
from rankwire.mesh.calls import OWN, CallCancelled, IncomingCall, RepliesDue
from rankwire.testing import simulated_world, tcp_world
from real_time import Deadline
from worlds import Running, eventually

SOON = 8.0
SERVICE = 5
# A socket that was just opened is closed by the interpreter, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(params=["unix", "tcp", "simulated"])
def world(request):
    kind = request.param
    made = simulated_world(2) if kind == "simulated" else tcp_world(2, transport=kind)
    with made as backends:
        yield backends


@pytest.fixture
def ports(world):
    return [backend.open_calls(SERVICE) for backend in world]


def call(port, request_id, payload=b"?", on_reply=None, *, dst=1, timeout=SOON, **options):
    message = ([payload], len(payload))
    return port.call(dst, request_id, message, Deadline(timeout), on_reply, **options)


def events_of(port, count):
    """Return so many events of a port."""
    events, deadline = [], Deadline(SOON)
    while len(events) < count:
        assert not deadline.expired, events
        events += port.poll(Deadline(0.1))
    return events


def answer(port, request, payload=b"!"):
    port.reply(request, ([payload], len(payload)), Deadline(SOON))


def has_input(port):
    """Whether something lies in the connection of a caller."""
    stream = port._calls.inbox_of(1).connection.stream
    with suppress(BlockingIOError):
        return bool(stream.peek(1))
    return stream.ring is not None and not stream.ring.is_empty()


def echo(callee, count):
    """Answer so many requests with what they carry; other events do not count."""
    requests = []
    while len(requests) < count:
        requests += [e for e in events_of(callee, 1) if isinstance(e, IncomingCall)]
    for request in requests:
        answer(callee, request, bytes(request.payload))


# -- calls -----------------------------------------------------------------------------------------


def test_the_first_call_dials_and_the_next_ones_use_that_connection(ports):
    caller, callee = ports
    assert caller._calls.inbox_of(1) is None
    replies = [call(caller, number, bytes([number])) for number in range(3)]
    inbox = caller._calls.inbox_of(1)
    assert caller._calls.inboxes() == [inbox]
    echo(callee, 3)
    assert [reply.wait(Deadline(SOON)) for reply in replies] == [b"\0", b"\1", b"\2"]
    assert caller._calls.inbox_of(1) is inbox


def test_threads_that_call_first_at_once_share_one_connection(ports):
    caller, callee = ports
    start = threading.Barrier(8)

    def call_at_once(number):
        start.wait(SOON)
        return call(caller, number, bytes([number])).wait(Deadline(SOON))

    calling = [Running(call_at_once, number) for number in range(8)]
    echo(callee, 8)
    assert [each.result() for each in calling] == [bytes([number]) for number in range(8)]
    assert len(caller._calls.inboxes()) == len(callee._incoming) == 1


def test_a_call_above_the_limit_is_not_made(ports):
    caller, callee = ports
    replies = [call(caller, number, limit=2) for number in range(3)]
    assert replies[2] is None
    assert caller.in_flight() == 2
    assert sorted(caller.calls_to(1)) == [0, 1]
    echo(callee, 2)
    replies[0].wait(Deadline(SOON))
    replies[1].wait(Deadline(SOON))
    assert call(caller, 3, limit=2) is not None


def test_calls_that_may_wait_are_sent_together_when_many_are_in_flight(ports):
    caller, callee = ports
    replies = [call(caller, number, bytes([number]), hold=True) for number in range(12)]
    connection = caller._calls.inbox_of(1).connection
    assert connection.outbox.is_holding
    assert caller.attend()
    assert not connection.outbox.is_holding
    echo(callee, 12)
    assert [reply.wait(Deadline(SOON))[0] for reply in replies] == list(range(12))


def test_waiting_for_a_reply_sends_what_was_held_back(ports):
    caller, callee = ports
    replies = [call(caller, number, bytes([number]), hold=True) for number in range(12)]
    waiting = Running(replies[-1].drive, Deadline(SOON))
    echo(callee, 12)
    assert waiting.result()


def test_a_callee_that_has_ended_is_dialled_anew(world, ports):
    caller, callee = ports
    lost = call(caller, 1)
    callee.close()
    with pytest.raises(ChannelClosedError):
        lost.wait(Deadline(SOON))
    callee = world[1].open_calls(SERVICE)
    before = caller._calls.inbox_of(1)
    reply = call(caller, 2, b"again")
    assert caller._calls.inbox_of(1) is not before
    echo(callee, 1)
    assert reply.wait(Deadline(SOON)) == b"again"


# -- calls to oneself ------------------------------------------------------------------------------


def test_a_call_to_oneself_is_polled_and_answered_without_a_connection(ports):
    port, _ = ports
    reply = call(port, 7, b"mine", dst=0)
    ((request),) = events_of(port, 1)
    assert (request.src, request.request_id, request.payload) == (0, 7, b"mine")
    assert request.origin is OWN
    assert port.calls_to(0) == [7]
    answer(port, request, b"yours")
    assert reply.wait(Deadline(SOON)) == b"yours"
    assert not port._calls.inboxes()
    assert port.calls_to(0) == []


def test_a_call_to_oneself_may_be_waited_for_in_another_thread_and_called_back(ports):
    port, _ = ports
    seen = []
    reply = call(port, 7, b"mine", seen.append, dst=0)
    waiting = Running(reply.wait, Deadline(SOON))
    echo(port, 1)
    assert waiting.result() == b"mine"
    assert seen == [reply]


def test_calls_to_oneself_have_the_same_limit_and_the_same_ends(ports):
    port, _ = ports
    first = call(port, 1, dst=0, limit=1)
    assert call(port, 2, dst=0, limit=1) is None
    assert not port.wait_for_room(0, 1, Deadline(0.01))
    with pytest.raises(DeadlineExceededError):
        first.wait(Deadline(0.01))
    port.cancel(0, 1)
    assert [type(event) for event in events_of(port, 2)] == [IncomingCall, CallCancelled]
    last = call(port, 3, dst=0, limit=1)
    port.close()
    with pytest.raises(ChannelClosedError):
        last.wait(Deadline(SOON))
    with pytest.raises(ChannelClosedError):
        call(port, 4, dst=0)


def test_the_buffers_of_a_call_to_oneself_are_free_at_once(ports):
    port, _ = ports
    buffer = bytearray(b"before")
    reply = port.call(0, 1, ([buffer], 6), Deadline(SOON))
    buffer[:] = b"after."
    (request,) = events_of(port, 1)
    assert request.payload == b"before"
    result = bytearray(b"first")
    answer(port, request, result)
    result[:] = b"later"
    assert reply.wait(Deadline(SOON)) == b"first"


# -- cancels ---------------------------------------------------------------------------------------


def test_a_cancel_that_cannot_be_sent_now_is_sent_by_who_polls(ports):
    caller, callee = ports
    call(caller, 1)
    lock = caller._calls.inbox_of(1).connection.outbox._lock
    with lock:  # another thread is just sending
        caller.cancel(1, 1)
        assert caller._calls.unsent_cancels
        assert caller.poll(Deadline(0.02)) == []
    deadline = Deadline(SOON)
    while caller._calls.unsent_cancels and not deadline.expired:
        caller.poll(Deadline(0.02))
    assert [type(event) for event in events_of(callee, 2)] == [IncomingCall, CallCancelled]


def test_cancelling_where_nothing_was_called_is_nothing(ports):
    caller, _ = ports
    caller.cancel(1, 1)
    assert not caller._calls.unsent_cancels


# -- interrupts ------------------------------------------------------------------------------------


class Called:
    """Three calls whose replies have come, unread; notes which are called back, and with what."""

    def __init__(self, ports, first):
        self.caller, callee = ports
        self.ids = [first, first + 1, first + 2]
        self.seen = []
        self.replies = [
            call(self.caller, number, str(number).encode(), self.note) for number in self.ids
        ]
        echo(callee, 3)
        eventually(lambda: has_input(self.caller), SOON)

    def note(self, reply):
        if reply not in self.seen:  # "what was done of it already is not done twice" is theirs
            self.seen.append(reply)

    def look_after(self):
        """Do what the standby and whoever polls do about replies that no thread waits for."""
        deadline = Deadline(SOON)
        while len(self.seen) < 3 and not deadline.expired:
            self.caller.attend()
            for event in self.caller.poll(Deadline(0.05)):
                assert isinstance(event, RepliesDue)
                event.call_back()
        assert len(self.seen) == 3, f"{len(self.seen)} of 3 replies"
        assert [bytes(r.result()) for r in self.replies] == [str(n).encode() for n in self.ids]
        assert self.caller.in_flight() == 0


@pytest.mark.fault(37, "replies that an interrupted thread has read end their futures at once")
@pytest.mark.parametrize("second_after", [None, 1, 2, 3, 5, 8, 13])
def test_replies_that_an_interrupted_thread_has_read_are_looked_after(ports, second_after):
    """Nothing more comes on that connection, so nobody would be told of it."""
    numbers = iter(range(0, 1 << 30, 3))

    def run(interrupting):
        called = Called(ports, next(numbers))
        with suppress(Interrupt), interrupting:
            called.replies[0].drive(Deadline(SOON))
        called.look_after()

    call(ports[0], 1 << 40).withdraw()  # dials
    assert every_interrupt(run, second_after=second_after) >= 10


@pytest.mark.fault(37, "a call that an interrupt ends while it is sent is cancelled at its callee")
@pytest.mark.parametrize("dst", [0, 1], ids=["to oneself", "to another"])
def test_a_request_whose_sending_was_interrupted_is_cancelled(ports, dst):
    caller, callee = ports[0], ports[dst]
    numbers = iter(range(1 << 30))
    sent = []

    def run(interrupting):
        number = next(numbers)
        reply = None
        with suppress(Interrupt), interrupting:
            reply = call(caller, number, dst=dst)
        assert (reply is None) == bool(interrupting.happened)
        if reply is not None:
            reply.withdraw()
            caller.cancel(dst, number)
        assert caller.calls_to(dst) == []
        call(caller, 1 << 40, b"last", dst=dst).withdraw()
        caller.attend()
        events, deadline = [], Deadline(SOON)
        while not any(e.request_id == 1 << 40 for e in events) and not deadline.expired:
            if dst and caller._calls.unsent_cancels:
                caller.poll(Deadline(0.0))
            events += callee.poll(Deadline(0.05))
        kinds = [type(event) for event in events if event.request_id == number]
        if IncomingCall in kinds:
            sent.append(bool(interrupting.happened))
            assert CallCancelled in kinds
            assert kinds.count(IncomingCall) == 1

    call(caller, 1 << 41, dst=dst).withdraw()  # dials
    events_of(callee, 1)
    assert every_interrupt(run) >= 10
    assert QUICK or True in sent  # some had left; few places are behind that
