"""One call in service: whatever its function does, there is one reply, and nothing is kept."""

import asyncio
import threading
import time

import pytest

from rankwire.clock import REAL_TIME
from rankwire.codec.codec import Codec
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    DeadlineExceededError,
    OverloadedError,
    RemoteError,
)
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc.call import current_call, serving
from rankwire.rpc.messages import Request, decode_reply
from rankwire.rpc.registry import Function
from rankwire.rpc.replies import Replies
from rankwire.rpc.reservations import SMALL_NBYTES
from rankwire.rpc.served_call import EventLoop, ServedCall
from real_time import Deadline
from worlds import eventually

MIB = 1 << 20


class FakePool:
    """A pool whose poller has more at hand if the test says so."""

    def __init__(self):
        self.arrived = []
        self.keeps_the_role = True

    def has_more(self, worker):
        return bool(self.arrived)

    def is_poller(self, worker):
        return self.keeps_the_role


class FakeRoom:
    def __init__(self):
        self.released = []

    def release(self, src, request_id):
        self.released.append((src, request_id))


class FakeCalls(dict):
    workers = 2

    def __init__(self):
        self.late = []

    def remember_late(self, call, doing):
        self.late.append((call, doing))


class FakeServer:
    """What a served call knows of its server, and a port that notes the replies."""

    rank, max_message_nbytes, clock = 1, MIB, REAL_TIME  # as a backend

    def __init__(self):
        self.codec = Codec()
        self.active = FakeCalls()
        self.pool = FakePool()
        self.reservations = FakeRoom()
        self.is_stopping = False
        self.event_loop = EventLoop(REAL_TIME)
        self.sent = []
        self.flushed = 0
        self.errands = []
        self.port = self
        self.replies = Replies(
            self,
            self,
            self.codec,
            names=lambda: [],
            run_soon=self.run_soon,
            expect_work=lambda: None,
        )

    def reply(self, call, message, deadline, hold=False):
        self.sent.append((bytearray().join(message[0]), hold))

    def flush(self):
        self.flushed += 1

    def run_soon(self, errand):
        self.errands.append(errand)
        errand()

    def serve(self, target, *args, timeout=5.0, chain=(), nbytes=0, **options):
        """Return a call in service of a function."""
        request = Request("function", timeout, list(chain), list(args), {})
        incoming = IncomingCall(0, 7, bytearray(nbytes), "a connection")
        call = ServedCall(self, incoming, request, Function("function", target, **options))
        return call

    def result(self):
        """Return what the caller gets: the one reply, as its value or error."""
        eventually(lambda: self.sent and not self.active)
        ((payload, _),) = self.sent
        return decode_reply(self.codec, payload, 1, 5.0)


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.event_loop.close()


WORKER = object()


# -- functions -------------------------------------------------------------------------------------


def test_a_value_is_replied_and_the_call_is_known_meanwhile(server):
    seen = []

    def add(a, b):
        seen.append((current_call(), current_call().worker))
        return a + b

    call = server.serve(add, 2, 3)
    call.run(WORKER)
    assert server.result() == 5
    assert seen == [(call, WORKER)]
    assert (serving.get(), call.worker) == (None, None)


def test_it_knows_who_called_and_for_how_long(server):
    call = server.serve(lambda: None, timeout=5.0, chain=[3, "f", 1, "g"])
    assert (call.src, call.name, call.depth) == (0, "function", 2)
    assert call.chain == ((3, "f"), (1, "g"))
    assert 4.0 < call.deadline.remaining() <= 5.0
    assert not call.cancelled


class Strange(BaseException):
    def __str__(self):
        raise SystemExit(3)


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(2), KeyboardInterrupt(), Strange(), StopIteration()]
)
def test_whatever_a_function_raises_is_the_reply(server, error):
    def fail():
        raise error

    server.serve(fail).run(WORKER)
    with pytest.raises(RemoteError) as info:
        server.result()
    assert type(error).__name__ in info.value.remote_type
    assert serving.get() is None


# -- not run, or too late --------------------------------------------------------------------------


def ran():
    raise AssertionError("it must not run")


async def ran_async():
    ran()


@pytest.mark.parametrize("target", [ran, ran_async])
def test_a_call_that_waited_for_a_worker_until_its_limit_does_not_run_and_says_so(server, target):
    server.serve(target, timeout=0.0).run(WORKER)
    with pytest.raises(
        DeadlineExceededError, match=r"it waited \S+ s there for one of 2 workers"
    ) as info:
        server.result()
    assert not info.value.may_have_run


@pytest.mark.parametrize("target", [ran, ran_async])
@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_call_that_was_cancelled_before_it_began_does_not_run(server, target, is_stopping):
    server.is_stopping = is_stopping
    call = server.serve(target)
    call.cancel()
    call.run(WORKER)
    with pytest.raises(ChannelClosedError if is_stopping else RemoteError) as info:
        server.result()
    if is_stopping:
        assert not info.value.may_have_run


def test_a_coroutine_whose_event_loop_has_ended_does_not_run(server):
    server.event_loop.close()
    server.serve(ran_async).run(WORKER)
    with pytest.raises(ChannelClosedError) as info:
        server.result()
    assert not info.value.may_have_run


def test_a_refused_call_is_answered(server):
    server.serve(ran).refuse("too many")
    with pytest.raises(OverloadedError, match="too many"):
        server.result()


def test_why_a_call_failed_after_its_deadline_is_remembered(server):
    def fail():
        time.sleep(0.02)
        raise ValueError("too late to be told")

    call = server.serve(fail, timeout=0.01)
    call.run(WORKER)
    ((late, doing),) = server.active.late
    assert late is call
    assert doing == "failed too late with ValueError: too late to be told"
    with pytest.raises(DeadlineExceededError) as info:
        server.result()
    assert info.value.may_have_run


def test_a_function_that_ends_with_its_agent_says_so(server):
    def fail():
        server.is_stopping = True
        raise CallCancelledError("its call was given up")

    server.serve(fail).run(WORKER)
    with pytest.raises(ChannelClosedError) as info:
        server.result()
    assert info.value.may_have_run


def test_the_result_of_a_cancelled_call_is_not_sent(server):
    def cancelled_meanwhile():
        call.incoming.is_wanted = False
        return "large"

    call = server.serve(cancelled_meanwhile)
    call.run(WORKER)
    with pytest.raises(RemoteError, match="cancelled"):
        server.result()


# -- coroutines ------------------------------------------------------------------------------------


def test_a_coroutine_runs_on_the_event_loop_and_knows_its_call(server):
    seen = []

    async def add(a, b):
        await asyncio.sleep(0)
        seen.append((current_call(), threading.get_ident()))
        return a + b

    call = server.serve(add, 2, 3)
    assert call.needs_event_loop
    call.run(WORKER)
    assert server.result() == 5
    assert seen == [(call, server.event_loop.ident)]
    assert not call.needs_event_loop
    assert not server.errands


def test_a_large_result_of_a_coroutine_is_sent_by_another_thread(server):
    async def large():
        return bytes(100_000)

    server.serve(large).run(WORKER)
    assert server.result() == bytes(100_000)
    assert len(server.errands) == 1


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_coroutine_is_cancelled_where_it_waits(server, is_stopping):
    started = threading.Event()

    async def wait():
        started.set()
        await asyncio.sleep(60)

    call = server.serve(wait)
    call.run(WORKER)
    assert started.wait(10)
    server.is_stopping = is_stopping
    eventually(lambda: call.task is not None)
    call.cancel()
    with pytest.raises(ChannelClosedError if is_stopping else RemoteError):
        server.result()
    call.cancel()  # harmless when it has ended
    server.event_loop.close()
    call.cancel()


def test_what_a_coroutine_raises_is_the_reply(server):
    async def fail():
        raise KeyError("no")

    server.serve(fail).run(WORKER)
    with pytest.raises(RemoteError, match="KeyError"):
        server.result()


# -- replies that are held back --------------------------------------------------------------------


def test_a_reply_is_held_back_only_if_more_calls_are_at_hand(server):
    server.serve(lambda: 1).run(WORKER)
    server.pool.arrived.append("another call")
    server.serve(lambda: 2).run(WORKER)
    server.serve(lambda: 3).run(None)  # by a thread of the user's, which does not poll
    assert [hold for _, hold in server.sent] == [False, True, False]
    assert server.flushed == 0


def test_a_worker_that_has_lost_its_role_sends_what_it_held_back(server):
    server.pool.arrived.append("another call")
    server.pool.keeps_the_role = False
    server.serve(lambda: 1).run(WORKER)
    assert (server.sent[0][1], server.flushed) == (True, 1)


# -- room and pace ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "chain", "is_counted"),
    [(SMALL_NBYTES, [], False), (SMALL_NBYTES + 1, [], True), (SMALL_NBYTES + 1, [0, "f"], False)],
    ids=["small", "large", "nested"],
)
@pytest.mark.parametrize("end", ["run", "refuse", "cancel"])
def test_a_large_call_frees_its_space_once(server, nbytes, chain, is_counted, end):
    call = server.serve(lambda: 1, nbytes=nbytes, chain=chain)
    if end == "cancel":
        call.cancel()
    if end == "refuse":
        call.refuse("no")
    else:
        call.run(WORKER)
    assert server.reservations.released == ([(0, 7)] if is_counted else [])
    assert not server.active


def test_the_arguments_of_a_large_call_that_was_cancelled_need_not_wait(server):
    call = server.serve(ran, bytes(10), nbytes=SMALL_NBYTES + 1)
    call.cancel()
    assert call.incoming.payload == b""
    call.run(WORKER)
    assert len(server.sent) == 1


@pytest.mark.parametrize(
    ("was_slow", "seconds", "is_slow"),
    [(False, 0.1, True), (True, 0.1, True), (True, 1e-5, False), (True, 5e-4, True),
     (False, 5e-4, False)],
)  # fmt: skip
def test_the_pace_of_a_function_is_learned_from_its_calls(server, was_slow, seconds, is_slow):
    call, waiting = server.serve(ran), server.serve(ran)
    waiting.function = call.function
    call.function.is_slow = was_slow
    call.note_pace(seconds)
    assert call.function.is_slow is waiting.function.is_slow is is_slow


def test_handling_by_hand_needs_no_worker(server):
    server.serve(lambda: Deadline(1.0).limit).run(None)
    assert server.result() == 1.0
