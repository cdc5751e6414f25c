"""The port of calls, on worlds in one process: who polls is the test itself."""

import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest

from rankwire.backends.faults import FaultPlan
from rankwire.backends.simulated import SimulatedBackend
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
)
from rankwire.mesh.calls import CallCancelled, CallerGone, IncomingCall
from real_time import Deadline

SOON = 10.0  # what must happen "at once" happens within it on the slowest machine
LATER = 40.0  # a time limit that no operation here may need
SERVICE = 7


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def make_world():
    worlds = []

    def make(world_size, **options):
        worlds.append(SimulatedBackend.create_group(world_size, **{"timeout": LATER, **options}))
        return worlds[-1]

    yield make
    for world in worlds:
        for backend in world:
            backend.close()


@pytest.fixture
def make_ports(make_world):
    def make(world_size, service=SERVICE, **options):
        return [backend.open_calls(service) for backend in make_world(world_size, **options)]

    return make


def until(condition):
    limit = monotonic() + SOON
    while not condition():
        assert monotonic() < limit
        sleep(0.001)


def call(port, dst, request_id, payload=b"?", on_reply=None, timeout=LATER):
    return port.call(dst, request_id, ([payload], len(payload)), Deadline(timeout), on_reply)


def reply(port, request, payload):
    port.reply(request, ([payload], len(payload)), Deadline(LATER))


def wait(receive, timeout=LATER):
    return receive.wait(Deadline(timeout))


def poll(port, timeout=LATER, *, count=1):
    """Return what comes: so many events at least, or less at the deadline."""
    deadline = Deadline(timeout)
    events = port.poll(deadline)
    while len(events) < count and not deadline.expired:
        events += port.poll(deadline)
    return events


def call_and_answer(caller, callee, request_id):
    receive = call(caller, 1, request_id)
    (request,) = poll(callee)
    reply(callee, request, b"next")
    return receive


def origin_of_the_gone(events):
    """Return the stream whose end was told."""
    (gone,) = (event for event in events if isinstance(event, CallerGone))
    return gone.origin


def kinds(events):
    return [type(event) for event in events]


# -- requests and replies --------------------------------------------------------------------------


def test_a_request_and_its_reply(make_ports):
    caller, callee = make_ports(2)
    receive = call(caller, 1, 11, b"question")
    (request,) = poll(callee)
    assert isinstance(request, IncomingCall)
    assert (request.src, request.request_id, request.payload) == (0, 11, b"question")
    assert caller.in_flight() == 1
    reply(callee, request, b"answer")
    assert wait(receive) == b"answer"
    assert caller.in_flight() == 0


def test_the_caller_may_reuse_its_buffer(make_ports):
    caller, callee = make_ports(2)
    buffer = bytearray(b"before")
    receive = caller.call(1, 1, ([buffer, b"!"], 7), Deadline(LATER))
    buffer[:] = b"after."
    (request,) = poll(callee)
    assert request.payload == b"before!"
    answer = bytearray(b"yes")
    reply(callee, request, answer)
    answer[:] = b"no."
    assert wait(receive) == b"yes"


def test_a_waiting_caller_is_woken_by_its_reply(make_ports, pool):
    caller, callee = make_ports(2)
    answers = [pool.submit(wait, call(caller, 1, number)) for number in range(3)]
    requests = []
    while len(requests) < 3:
        requests += poll(callee)
    for request in reversed(requests):
        reply(callee, request, bytes([request.request_id]))
    assert [answer.result(SOON) for answer in answers] == [b"\0", b"\1", b"\2"]


def test_replies_may_come_in_any_order(make_ports):
    caller, callee = make_ports(2)
    receives = [call(caller, 1, number) for number in range(5)]
    requests = poll(callee, count=5)
    for request in (requests[index] for index in (3, 0, 4, 1, 2)):
        reply(callee, request, bytes([request.request_id]))
    assert [wait(receive)[0] for receive in receives] == [0, 1, 2, 3, 4]


def test_requests_of_one_caller_keep_their_order(make_ports):
    caller, callee = make_ports(2)
    for number in range(20):
        call(caller, 1, number)
    assert [request.request_id for request in poll(callee, count=20)] == list(range(20))


def test_the_same_request_id_of_two_callers_is_two_calls(make_ports):
    ports = make_ports(3)
    receives = [call(ports[src], 2, 1, bytes([src])) for src in (0, 1)]
    for request in poll(ports[2], count=2):
        reply(ports[2], request, b"for " + str(request.src).encode())
    assert [wait(receives[src]) for src in (0, 1)] == [b"for 0", b"for 1"]


def test_ranks_call_each_other_at_the_same_time(make_ports):
    ports = make_ports(2)
    receives = [call(ports[rank], 1 - rank, 1) for rank in (0, 1)]
    for port in ports:
        (request,) = poll(port)
        reply(port, request, b"ok")
    assert [wait(receives[rank]) for rank in (0, 1)] == [b"ok", b"ok"]


def test_a_callback_runs_without_locks_once_the_reply_is_read(make_world):
    world = make_world(2)
    caller, callee = (backend.open_calls(SERVICE) for backend in world)
    seen = []

    def on_reply(receive):
        world[0].send(b"from the callback", 1)
        seen.append((receive.result(), threading.current_thread(), caller.in_flight()))

    call(caller, 1, 1, on_reply=on_reply)
    (request,) = poll(callee)
    reply(callee, request, b"answer")
    assert caller.attend()
    (due,) = poll(caller)
    assert seen == []
    due.call_back()
    assert seen == [(b"answer", threading.current_thread(), 0)]
    assert world[1].recv(0) == b"from the callback"


def test_a_reply_that_is_attended_to_is_polled_for_whoever_reads_meanwhile(make_ports, pool):
    caller, callee = make_ports(2)
    told = []
    attended = call(caller, 1, 1, on_reply=told.append)
    waiting = pool.submit(wait, call(caller, 1, 2))
    requests = {request.request_id: request for request in poll(callee, count=2)}
    (inbox,) = caller._calls.inboxes()
    until(lambda: inbox.is_read)
    caller.attend_to(1, attended)
    assert not inbox.is_armed  # whoever reads will do that
    reply(callee, requests[2], b"second")
    assert waiting.result(SOON) == b"second"
    until(lambda: inbox.is_armed)
    reply(callee, requests[1], b"first")
    (due,) = poll(caller)
    due.call_back()
    assert told == [attended]
    assert not inbox.is_armed


@pytest.mark.fault(37, "a reply that an interrupted thread has read is not forgotten")
def test_who_looks_after_replies_calls_back_what_an_interrupted_thread_has_left(make_ports):
    """It was interrupted between reading and calling back."""
    caller, callee = make_ports(2)
    told = []
    receive = call(caller, 1, 1, on_reply=told.append)
    reply(callee, poll(callee)[0], b"!")
    (inbox,) = caller._calls.inboxes()
    until(lambda: inbox.read_quietly() or receive.done)
    assert told == []
    caller.attend(patiently=True)
    for event in poll(caller):
        event.call_back()
    assert told == [receive]


def test_a_full_queue_of_messages_does_not_hold_up_calls(make_world):
    world = make_world(2, queue_nbytes=10)
    caller, callee = (backend.open_calls(SERVICE) for backend in world)
    world[0].send(bytes(10), 1)
    call(caller, 1, 1, timeout=0)
    assert len(poll(callee)) == 1


# -- polling ---------------------------------------------------------------------------------------


def test_poll_returns_nothing_at_its_deadline(make_ports):
    caller, _ = make_ports(2)
    assert poll(caller, 0) == []
    assert poll(caller, 0.01) == []


def test_wake_ends_a_poll_once(make_ports, pool):
    port, _ = make_ports(2)
    waiting = pool.submit(port.poll, Deadline(LATER))
    port.wake()
    assert waiting.result(SOON) == []
    begin = monotonic()
    assert port.poll(Deadline(0.05)) == []
    assert monotonic() - begin >= 0.05


def test_a_waiting_poll_gets_the_request(make_ports, pool):
    caller, callee = make_ports(2)
    waiting = pool.submit(poll, callee)
    call(caller, 1, 1)
    assert [event.request_id for event in waiting.result(SOON)] == [1]


# -- before the port is open -----------------------------------------------------------------------


def test_a_request_waits_for_the_port_to_open(make_world):
    world = make_world(2)
    caller = world[0].open_calls(SERVICE)
    receive = call(caller, 1, 1, b"early")
    callee = world[1].open_calls(SERVICE)
    (request,) = poll(callee)
    assert request.payload == b"early"
    reply(callee, request, b"in time")
    assert wait(receive) == b"in time"


def test_requests_that_nobody_takes_are_bounded(make_world, pool):
    world = make_world(2, queue_nbytes=10)
    caller = world[0].open_calls(SERVICE)
    call(caller, 1, 1, bytes(10))
    with pytest.raises(DeadlineExceededError) as caught:
        call(caller, 1, 2, b"x", timeout=0)
    assert caught.value.waiting_for == [1]
    assert caller.in_flight() == 1
    blocked = pool.submit(call, caller, 1, 3, b"x")
    callee = world[1].open_calls(SERVICE)
    assert [event.request_id for event in poll(callee)] == [1]
    blocked.result(SOON)
    assert [event.request_id for event in poll(callee)] == [3]


def test_a_rank_that_leaves_before_it_opens_fails_the_calls(make_world):
    world = make_world(2)
    caller = world[0].open_calls(SERVICE)
    receive = call(caller, 1, 1)
    world[1].close()
    with pytest.raises(ChannelClosedError, match="rank 1 has left"):
        wait(receive)


# -- services --------------------------------------------------------------------------------------


def test_two_services_never_meet(make_world):
    world = make_world(2)
    a, b = ([backend.open_calls(service) for backend in world] for service in (1, 2))
    receives = [call(a[0], 1, 5, b"a"), call(b[0], 1, 5, b"b")]
    for ports, expected in ((b, b"b"), (a, b"a")):
        (request,) = poll(ports[1])
        assert request.payload == expected
        reply(ports[1], request, b"to " + expected)
    assert wait(receives[0]) == b"to a"
    assert wait(receives[1]) == b"to b"
    a[1].close()
    call(b[0], 1, 6)
    assert [type(event) for event in poll(b[1])] == [IncomingCall]


def test_a_service_has_one_port_a_rank(make_world):
    world = make_world(2)
    port = world[0].open_calls(SERVICE)
    with pytest.raises(ConfigurationError):
        world[0].open_calls(SERVICE)
    world[1].open_calls(SERVICE)
    port.close()
    world[0].open_calls(SERVICE)


def test_a_port_that_is_opened_again_is_a_new_one(make_world):
    world = make_world(2)
    old, callee = (backend.open_calls(SERVICE) for backend in world)
    call(old, 1, 1)
    (request,) = poll(callee)
    old.close()
    new = world[0].open_calls(SERVICE)
    receive = call(new, 1, 1)
    with pytest.raises(ChannelClosedError):
        reply(callee, request, b"for the old one")
    events = poll(callee, count=2)
    assert set(kinds(events)) == {IncomingCall, CallerGone}
    (request,) = (event for event in events if isinstance(event, IncomingCall))
    reply(callee, request, b"for the new one")
    assert wait(receive) == b"for the new one"


def test_a_callee_that_is_opened_again_can_be_called(make_world):
    world = make_world(2)
    caller, old = (backend.open_calls(SERVICE) for backend in world)
    lost = call(caller, 1, 1)
    old.close()
    with pytest.raises(ChannelClosedError):
        call(caller, 1, 2)
    new = world[1].open_calls(SERVICE)
    receive = call(caller, 1, 3)
    (request,) = poll(new)
    assert request.request_id == 3
    reply(new, request, b"ok")
    assert wait(receive) == b"ok"
    with pytest.raises(ChannelClosedError):
        wait(lost)


# -- giving up -------------------------------------------------------------------------------------


def test_a_wait_that_times_out_takes_the_call_back(make_ports):
    caller, callee = make_ports(2)
    receive = call(caller, 1, 1)
    with pytest.raises(DeadlineExceededError) as caught:
        wait(receive, timeout=0.01)
    assert (caught.value.waiting_for, caller.in_flight()) == ([1], 0)
    (request,) = poll(callee)
    reply(callee, request, b"late")
    assert wait(call_and_answer(caller, callee, 2)) == b"next"


def test_a_drive_that_times_out_leaves_the_call_as_it_is(make_ports):
    caller, callee = make_ports(2)
    receive = call(caller, 1, 1)
    assert not receive.drive(Deadline(0.01))
    assert caller.in_flight() == 1
    (request,) = poll(callee)
    reply(callee, request, b"in the end")
    assert receive.drive(Deadline(LATER))
    assert receive.result() == b"in the end"


def test_several_threads_may_drive_one_call(make_ports, pool):
    caller, callee = make_ports(2)
    receive = call(caller, 1, 1)
    patient = [pool.submit(receive.drive, Deadline(LATER)) for _ in range(3)]
    assert not receive.drive(Deadline(0.01))
    (request,) = poll(callee)
    reply(callee, request, b"x")
    assert [future.result(SOON) for future in patient] == [True] * 3


def test_a_late_reply_is_dropped(make_ports):
    caller, callee = make_ports(2)
    called_back = []
    receive = call(caller, 1, 1, on_reply=called_back.append)
    (request,) = poll(callee)
    assert receive.withdraw()
    assert not receive.withdraw()
    reply(callee, request, b"late")
    assert wait(call_and_answer(caller, callee, 2)) == b"next"
    assert (caller.in_flight(), called_back) == (0, [])


def test_a_reply_that_has_come_cannot_be_forgotten(make_ports):
    caller, callee = make_ports(2)
    receive = call(caller, 1, 1)
    (request,) = poll(callee)
    reply(callee, request, b"x")
    assert receive.drive(Deadline(LATER))
    assert not receive.withdraw()
    assert wait(receive) == b"x"


def test_a_cancelled_call_is_an_event_after_its_request(make_ports):
    caller, callee = make_ports(2)
    call(caller, 1, 4)
    caller.cancel(1, 4)
    request, cancelled = poll(callee, count=2)
    assert (request.request_id, cancelled) == (4, CallCancelled(0, 4))


def test_a_cancel_says_whether_the_time_was_up(make_ports):
    caller, callee = make_ports(2)
    call(caller, 1, 4)
    caller.cancel(1, 4, expired=True)
    caller.cancel(0, 5, expired=True)  # of a call to oneself
    assert poll(callee, count=2)[1] == CallCancelled(0, 4, expired=True)
    assert poll(caller) == [CallCancelled(0, 5, expired=True)]


def test_cancelling_where_nobody_listens_is_harmless(make_world):
    world = make_world(3)
    caller = world[0].open_calls(SERVICE)
    caller.cancel(1, 1)  # never called
    call(caller, 1, 1)
    world[1].close()
    caller.cancel(1, 1)
    caller.close()
    caller.cancel(2, 1)


def test_room_for_calls_comes_with_replies(make_ports, pool):
    caller, callee = make_ports(2)
    assert caller.wait_for_room(1, 1, Deadline(0))
    receives = [call(caller, 1, number) for number in range(2)]
    assert not caller.wait_for_room(1, 2, Deadline(0.01))
    waiting = pool.submit(caller.wait_for_room, 1, 2, Deadline(LATER))
    request, _ = poll(callee, count=2)
    reply(callee, request, b"x")
    assert waiting.result(SOON)
    receives[1].withdraw()
    assert caller.wait_for_room(1, 1, Deadline(0))


# -- ending ----------------------------------------------------------------------------------------


def test_a_closed_port_fails_its_own_calls_and_waits(make_ports, pool):
    caller, callee = make_ports(2)
    called_back = []
    receive = call(caller, 1, 1, on_reply=called_back.append)
    waiting = [pool.submit(wait, receive), pool.submit(poll, caller)]
    until(lambda: all(future.running() for future in waiting))
    caller.close()
    caller.close()
    assert [type(future.exception(SOON)) for future in waiting] == [ChannelClosedError] * 2
    assert called_back == [receive]
    for action in (lambda: call(caller, 1, 2), lambda: poll(caller)):
        with pytest.raises(ChannelClosedError):
            action()
    (request, gone) = poll(callee, count=2)
    assert (type(gone), gone.src) == (CallerGone, 0)
    with pytest.raises(ChannelClosedError):
        reply(callee, request, b"too late")


def test_a_closed_callee_fails_the_calls_to_it(make_ports, pool):
    caller, callee, other = make_ports(3)
    called_back = []
    waiting = pool.submit(wait, call(caller, 1, 1, on_reply=called_back.append))
    unharmed = call(caller, 2, 2)
    callee.close()
    assert isinstance(waiting.exception(SOON), ChannelClosedError)
    assert len(called_back) == 1
    (request,) = poll(other)
    reply(other, request, b"still here")
    assert wait(unharmed) == b"still here"


def test_a_callee_that_has_never_been_called_by_a_rank_does_not_miss_it(make_ports):
    silent, callee = make_ports(2)
    silent.close()
    assert poll(callee, 0) == []


def test_a_kill_fails_calls_and_is_told_to_the_callees(make_world, pool):
    world = make_world(3)
    ports = [backend.open_calls(SERVICE) for backend in world]
    called_back = []
    to_the_dead = call(ports[0], 1, 1, on_reply=called_back.append)
    waiting = pool.submit(wait, to_the_dead)
    of_the_dead = call(ports[1], 0, 1)
    (request,) = poll(ports[0])
    world[0].network.kill(1)
    error = waiting.exception(SOON)
    assert (type(error), error.peer) == (PeerLostError, 1)
    assert called_back == [to_the_dead]
    assert [event.src for event in poll(ports[0]) if isinstance(event, CallerGone)] == [1]
    for action in (
        lambda: call(ports[0], 1, 2),
        lambda: reply(ports[0], request, b"x"),
        lambda: wait(of_the_dead),
        lambda: poll(ports[1]),
        lambda: call(ports[1], 2, 2),
    ):
        with pytest.raises(PeerLostError) as caught:
            action()
        assert caught.value.peer == 1
    unharmed = call(ports[0], 2, 3)
    (request,) = poll(ports[2])
    reply(ports[2], request, b"fine")
    assert wait(unharmed) == b"fine"


def test_a_broken_link_ends_calls_in_both_directions(make_world):
    world = make_world(2)
    ports = [backend.open_calls(SERVICE) for backend in world]
    receives = [call(ports[rank], 1 - rank, 1) for rank in (0, 1)]
    world[0].network.break_link(0, 1)
    for rank in (0, 1):
        with pytest.raises(PeerLostError) as caught:
            wait(receives[rank])
        assert caught.value.peer == 1 - rank
        assert kinds(poll(ports[rank], count=2)) == [IncomingCall, CallerGone]


def test_closing_the_backend_closes_its_ports(make_world, pool):
    world = make_world(2)
    ports = [backend.open_calls(SERVICE) for backend in world]
    receive = call(ports[0], 1, 1)
    waiting = pool.submit(poll, ports[0])
    world[0].close()
    assert isinstance(waiting.exception(SOON), ChannelClosedError)
    with pytest.raises(ChannelClosedError):
        wait(receive)
    assert kinds(poll(ports[1], count=2)) == [IncomingCall, CallerGone]
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        call(ports[1], 0, 1)


def test_a_caller_that_waits_for_room_hears_that_its_port_was_closed(make_ports, pool):
    caller, _ = make_ports(2, queue_nbytes=10)
    call(caller, 1, 1, bytes(10))
    blocked = pool.submit(call, caller, 1, 2)
    until(blocked.running)
    sleep(0.02)
    caller.close()
    with pytest.raises(ChannelClosedError):  # at once, or as its reply
        wait(blocked.result(SOON))


def test_a_caller_that_waits_for_room_hears_that_the_callee_was_closed(make_ports, pool):
    caller, callee = make_ports(2, queue_nbytes=10)
    call(caller, 1, 1, bytes(10))
    blocked = pool.submit(call, caller, 1, 2)
    until(blocked.running)
    sleep(0.02)
    callee.close()
    assert isinstance(blocked.exception(SOON), ChannelClosedError)


# -- on a slow network -----------------------------------------------------------------------------


def test_a_reply_under_way_arrives_before_the_news_that_its_sender_closed(make_ports):
    caller, callee = make_ports(2, faults=FaultPlan().delay(0.03))
    answered, unanswered = call(caller, 1, 1), call(caller, 1, 2)
    requests = poll(callee)
    reply(callee, requests[0], b"just in time")
    callee.close()
    assert wait(answered) == b"just in time"
    with pytest.raises(ChannelClosedError):
        wait(unanswered)


def test_a_request_under_way_arrives_before_the_news_that_its_caller_closed(make_ports):
    caller, callee = make_ports(2, faults=FaultPlan().delay(0.03))
    call(caller, 1, 1)
    caller.close()
    events = []
    while len(events) < 2:
        events += poll(callee)
    assert [type(event) for event in events] == [IncomingCall, CallerGone]


def test_a_caller_opened_again_is_not_mistaken_for_the_one_that_closed(make_world):
    world = make_world(2, faults=FaultPlan(seed=2).delay(0.0, jitter=0.02))
    old, callee = (backend.open_calls(SERVICE) for backend in world)
    call(old, 1, 1)
    old.close()
    new = world[0].open_calls(SERVICE)
    receive = call(new, 1, 1)
    events = []
    while len(events) < 3:
        events += poll(callee)
    # They came on two streams: each has an order of its own.
    of_the_old = [event for event in events if event.origin is origin_of_the_gone(events)]
    assert kinds(of_the_old) == [IncomingCall, CallerGone]
    (request,) = (event for event in events if event not in of_the_old)
    reply(callee, request, b"new")
    assert wait(receive) == b"new"


def test_a_kill_loses_what_is_under_way(make_world):
    world = make_world(2, faults=FaultPlan().delay(60.0, dst=0))
    ports = [backend.open_calls(SERVICE) for backend in world]
    receive = call(ports[0], 1, 1)
    (request,) = poll(ports[1])
    reply(ports[1], request, b"never arrives")
    world[1].network.kill(1)
    with pytest.raises(PeerLostError):
        wait(receive)
