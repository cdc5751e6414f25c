"""Races and dead ends of the RPC layer; each test is named by what must hold."""

import asyncio
import contextvars
import dataclasses
import os
import threading
import time
from collections import deque
from concurrent.futures import wait

import pytest

from rankwire import (
    ChannelClosedError,
    RankwireError,
    RemoteError,
    RpcAgent,
    runtime,
)
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc import pool as pool_module
from rankwire.testing import simulated_world, tcp_world
from rankwire.transports import byte_stream
from rankwire.wire.frames import Channel
from rankwire.wire.receive import Receive
from real_time import Deadline
from worlds import PATIENCE, eventually


@pytest.fixture
def world():
    with tcp_world(2) as world:
        yield world


@pytest.fixture
def agents(world):
    agents = [RpcAgent(backend) for backend in world]
    yield agents
    for agent in agents:
        agent.close(grace=0.3)


@pytest.fixture
def quiet_threads(monkeypatch):
    """A thread that dies is told by what it does not do any more."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def in_thread(function, *args, **kwargs):
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    return thread


def error_of(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        return error


# -- agents that close while somebody dials ------------------------------------------------------


def test_dialling_an_agent_that_is_closing_does_not_lose_the_peer(world):
    first, second = world
    caller, callee = RpcAgent(first), RpcAgent(second)
    at_the_end, go_on = threading.Event(), threading.Event()
    forget_port = second.mesh.ports.forget

    def late(port):
        at_the_end.set()
        go_on.wait(PATIENCE)
        forget_port(port)

    second.mesh.ports.forget = late
    closing = in_thread(callee.close, 0.0)
    assert at_the_end.wait(PATIENCE)
    error = error_of(caller.rpc_sync, 1, "anything", timeout=PATIENCE / 2)
    go_on.set()
    closing.join(PATIENCE)
    second.mesh.ports.forget = forget_port
    try:
        assert isinstance(error, ChannelClosedError), repr(error)
        # The rank is alive: only its agent has gone.
        first.send(b"still there", 1, timeout=PATIENCE)
        assert bytes(second.recv(0, timeout=PATIENCE)) == b"still there"
    finally:
        caller.close(0.0)


def test_a_connection_let_in_just_before_its_agent_closed_is_ended(world):
    first, second = world
    caller, callee = RpcAgent(first), RpcAgent(second)
    enter = second.mesh.enter

    def late(hello, sock, seals):
        callee.close(0.0)
        enter(hello, sock, seals)

    second.mesh.enter = late
    error = error_of(caller.rpc_sync, 1, "anything", timeout=PATIENCE)
    second.mesh.enter = enter
    try:
        assert isinstance(error, ChannelClosedError), repr(error)
    finally:
        caller.close(0.0)


def test_the_end_of_an_old_agents_connection_does_not_cancel_the_new_ones_calls(world):
    first, second = world
    callee = RpcAgent(second)
    callee.register("hello", lambda: "hello")
    started, go_on = threading.Event(), threading.Event()

    @callee.register
    async def work():
        started.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return "done"

    old = RpcAgent(first)
    assert old.rpc_sync(1, "hello") == "hello"
    (old_connection,) = callee._port._incoming
    read, late = callee._port._read, threading.Event()

    def slowly(connection):  # as if the old connection's end were late on its way
        if connection is old_connection and not late.is_set():
            time.sleep(0.001)
            return []
        return read(connection)

    callee._port._read = slowly
    old.close(0.0)
    new = RpcAgent(first)
    future = new.rpc_async(1, "work", timeout=PATIENCE)
    assert started.wait(PATIENCE)
    late.set()
    time.sleep(0.1)
    go_on.set()
    try:
        assert future.result(PATIENCE) == "done"
    finally:
        new.close(0.3)
        callee.close(0.3)


# -- the serving threads -------------------------------------------------------------------------


def test_a_result_that_no_one_could_foresee_does_not_end_serving(agents, quiet_threads):
    @dataclasses.dataclass
    class Half:
        value: int

    callee = agents[1]
    callee.codec.register(Half)

    def half():
        result = Half(1)
        del result.value
        return result

    def released():
        with memoryview(bytearray(5)) as view:
            return view

    async def released_later():
        return released()

    callee.register("fine", lambda: "fine")
    for function in (half, released, released_later):
        callee.register(function)
        error = error_of(agents[0].rpc_sync, 1, function.__name__, timeout=PATIENCE)
        assert isinstance(error, RemoteError), (function, error)
        assert agents[0].rpc_sync(1, "fine", timeout=PATIENCE) == "fine"
    eventually(lambda: not callee.activity().in_service)


def test_a_result_that_changes_while_it_is_encoded_is_the_functions_error(agents):
    shared = {str(n): [n] for n in range(20_000)}
    stop = threading.Event()

    def change():
        n = 0
        while not stop.is_set():
            n += 1
            shared[f"x{n % 50}"] = [n]
            shared.pop(f"x{(n + 25) % 50}", None)

    agents[1].register("shared", lambda: shared)
    agents[1].register("fine", lambda: "fine")
    changer = in_thread(change)
    try:
        for _ in range(5):
            result = error_of(agents[0].rpc_sync, 1, "shared", timeout=10)
            assert isinstance(result, (dict, RemoteError)), repr(result)
    finally:
        stop.set()
        changer.join()
    assert agents[0].rpc_sync(1, "fine", timeout=10) == "fine"


def test_a_callback_that_raises_anything_does_not_end_serving(agents, quiet_threads):
    caller, callee = agents
    callee.register("nap", lambda: time.sleep(0.05))
    caller.register("fine", lambda: "fine")

    def leave(_):
        if threading.current_thread().name == "rankwire-serving":
            raise SystemExit(1)

    futures = [caller.rpc_async(1, "nap") for _ in range(2)]
    for future in futures:
        future.add_done_callback(leave)
    assert not wait(futures, timeout=PATIENCE).not_done
    assert callee.rpc_sync(0, "fine", timeout=PATIENCE) == "fine"
    eventually(lambda: not caller.activity().in_flight)


def test_a_callback_that_waits_does_not_keep_its_agent_from_serving(agents):
    caller, callee = agents
    caller.register("pong", lambda: "pong")
    callee.register("nap", lambda: time.sleep(0.02))
    callee.register("ping", lambda: callee.rpc_sync(0, "pong"))
    results = []
    done = threading.Event()

    def call_again(_):
        results.append(error_of(caller.rpc_sync, 1, "ping", timeout=PATIENCE))
        done.set()

    caller.rpc_async(1, "nap").add_done_callback(call_again)
    assert done.wait(PATIENCE)
    assert results == ["pong"]


def test_a_call_made_later_in_a_finished_calls_context_makes_no_second_poller(agents):
    caller, callee = agents
    contexts = []
    callee.register("keep", lambda: contexts.append(contextvars.copy_context()))
    callee.register("fine", lambda: "fine")
    caller.register("fine", lambda: "fine")
    polling, most, mutex = [0], [0], threading.Lock()
    poll = callee._port.poll

    def counted():
        with mutex:
            polling[0] += 1
            most[0] = max(most[0], polling[0])
        try:
            return poll()
        finally:
            with mutex:
                polling[0] -= 1

    callee._port.poll = counted
    for _ in range(3):
        caller.rpc_sync(1, "keep")
        time.sleep(0.02)
        assert contexts[-1].run(callee.rpc_sync, 0, "fine", timeout=PATIENCE) == "fine"
        time.sleep(0.02)
        caller.rpc_sync(1, "fine", timeout=PATIENCE)
    assert most[0] == 1


def test_a_future_made_while_the_standby_goes_to_sleep_is_checked(agents, monkeypatch):
    caller, callee = agents
    callee.register("nap", lambda: time.sleep(0.02))
    caller.rpc_sync(1, "nap")
    pool = caller._server.pool
    sleep_between_checks = pool._sleep_between_checks
    futures = []

    def call_at_the_last_moment(worker, quiet, *rest):
        if quiet > pool_module._CHECKS_UNTIL_ASLEEP and not futures:
            futures.append(caller.rpc_async(1, "nap", timeout=PATIENCE))
        return sleep_between_checks(worker, quiet, *rest)

    monkeypatch.setattr(pool, "_sleep_between_checks", call_at_the_last_moment)
    eventually(lambda: futures)
    assert len(wait(futures, timeout=PATIENCE).done) == 1


def test_a_caller_that_reads_no_replies_does_not_stop_the_callee_from_serving_others():
    with tcp_world(3) as world:
        deaf, callee, other = agents = [RpcAgent(backend) for backend in world]
        callee.register("fine", lambda: "fine")
        assert other.rpc_sync(1, "fine") == "fine"
        deaf._port.attend = lambda **_: True  # as a stopped process
        deaf._max_in_flight = 10_000
        futures = [deaf.rpc_async(1, "unknown" * 20, timeout=30) for _ in range(3000)]
        deaf._port._calls.inbox_of(1).send_held(Deadline(1))
        time.sleep(0.3)
        begin = time.monotonic()
        result = error_of(other.rpc_sync, 1, "fine", timeout=20)
        seconds = time.monotonic() - begin
        del deaf._port.attend
        for agent in agents:
            agent.close(0.0)
        assert len(futures) == 3000
        assert result == "fine", repr(result)
        assert seconds < 8


# -- held back frames ----------------------------------------------------------------------------


def cancel(futures):
    futures.pop().cancel()


def look_at(futures):
    with pytest.raises(TimeoutError):
        futures[0].result(timeout=0)


@pytest.mark.parametrize("send_held", [cancel, look_at])
def test_no_wait_for_a_peer_that_takes_nothing_now_does_not_lose_it(send_held):
    with tcp_world(2, transport="tcp") as (first, second):
        caller = RpcAgent(first, max_in_flight=100_000)
        caller._port.attend = lambda **_: True  # only send_held sends: nothing here has a deadline
        futures = [caller.rpc_async(1, "x", timeout=40) for _ in range(10)]
        connection = caller._port._calls.inbox_of(
            1
        ).connection  # there is no agent yet: nobody reads
        for _ in range(2000):
            futures += [caller.rpc_async(1, "x", bytes(15_000), timeout=40) for _ in range(6)]
            send_held(futures)
            if connection.outbox.is_holding or connection.failure is not None:
                break
        lost = connection.failure
        del caller._port.attend
        callee = RpcAgent(second)
        error = error_of(futures[0].exception, PATIENCE)
        caller.close(0.0)
        callee.close(0.0)
        assert lost is None, repr(lost)
        assert "FunctionNotFound" in repr(error)


def test_a_reply_held_back_while_another_worker_flushes_is_sent(agents):
    caller, callee = agents
    callee.register("fine", lambda: 1)
    caller.rpc_sync(1, "fine")
    (connection,) = callee._port._incoming
    request_id = next(caller._caller._ids)
    inbox = caller._port._calls.inbox_of(1)
    receive = Receive((caller._port.service, Channel.REPLY, request_id))
    inbox.post(receive)
    send = connection.send

    def interrupted_by_a_flush(*args, **kwargs):
        callee._port.flush()  # by a worker that has just lost the polling role
        return send(*args, **kwargs)

    connection.send = interrupted_by_a_flush
    call = IncomingCall(0, request_id, bytearray(), connection)
    callee._port.reply(call, callee._server.replies.value(7), Deadline(1), hold=True)
    connection.send = send
    callee._port.flush()  # what the next poll does
    assert inbox.drive(receive, Deadline(1))


def test_what_the_peer_replied_before_its_agent_left_is_not_lost(world):
    first, second = world
    caller, callee = RpcAgent(first), RpcAgent(second)
    callee.register("fine", lambda: "fine")
    caller.rpc_sync(1, "fine")
    attend, caller._port.attend = caller._port.attend, lambda **_: True  # nobody came to look yet
    served = []
    callee.register("fine", lambda: served.append(1) or "fine", replace=True)
    future = caller.rpc_async(1, "fine")
    eventually(lambda: served and not callee.activity().in_service)
    callee.close(1.0)
    errors = [error_of(caller.rpc_sync, 1, "fine", timeout=PATIENCE) for _ in range(2)]
    caller._port.attend = attend
    result = error_of(future.result, PATIENCE)
    caller.close(0.0)
    assert all(isinstance(error, ChannelClosedError) for error in errors), errors
    assert result == "fine", repr(result)


# -- tables --------------------------------------------------------------------------------------


def test_a_discarded_connection_is_not_attended_again(world):
    first, second = world
    caller, callee = RpcAgent(first), RpcAgent(second)
    callee.register("fine", lambda: "fine")
    caller.rpc_sync(1, "fine")
    port = caller._port
    old = port._calls.inbox_of(1)
    callee.close(0.0)
    close = old.close

    def armed_at_the_last_moment(cause):
        port._calls.unread.arm(old)  # by the standby, which had it in its list
        close(cause)

    old.close = armed_at_the_last_moment
    error_of(caller.rpc_sync, 1, "fine", timeout=PATIENCE)
    error_of(caller.rpc_sync, 1, "fine", timeout=PATIENCE)
    try:
        assert not port._poller._keys
    finally:
        caller.close(0.0)


def test_waking_a_port_that_closes_at_that_moment_touches_no_closed_descriptor(world, monkeypatch):
    agent = RpcAgent(world[0])
    agent._server.pool.close(Deadline(1))
    write = os.eventfd_write

    def late(descriptor, value):
        closing = in_thread(agent._port.close)
        closing.join(0.3)
        write(descriptor, value)  # perhaps another one's by now

    monkeypatch.setattr(runtime, "eventfd_write", late)
    error = error_of(agent._port.wake)
    monkeypatch.undo()
    agent.close(0.0)
    assert error is None, repr(error)


def test_closing_the_backend_ends_a_call_that_is_about_to_sleep(world, monkeypatch):
    first, second = world
    caller, callee = RpcAgent(first), RpcAgent(second)
    go_on = threading.Event()
    callee.register("wait", lambda: go_on.wait(PATIENCE))
    wait_for = byte_stream.wait_for
    closing = []

    def late(sock, *args):
        if not closing:
            closing.append(in_thread(first.close))
            closing[0].join(1)
        return wait_for(sock, *args)

    monkeypatch.setattr(byte_stream, "wait_for", late)
    error = error_of(caller.rpc_sync, 1, "wait", timeout=PATIENCE)
    monkeypatch.undo()
    go_on.set()
    caller.close(0.0)
    callee.close(0.5)
    assert isinstance(error, ChannelClosedError), repr(error)


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.fault(45, "an agent that closes refuses calls, which then have not run")
def test_a_call_refused_by_a_closing_agent_has_not_run(agents):
    caller, callee = agents
    go_on = threading.Event()
    callee.register("wait", lambda: go_on.wait(PATIENCE))
    callee.register("fine", lambda: "fine")
    running = caller.rpc_async(1, "wait")
    eventually(lambda: callee.activity().in_service)
    closing = in_thread(callee.close, PATIENCE)
    eventually(lambda: callee._server._draining)
    error = error_of(caller.rpc_sync, 1, "fine", timeout=PATIENCE)
    later = caller.rpc_async(1, "fine", timeout=PATIENCE).exception(PATIENCE)
    go_on.set()
    closing.join(PATIENCE)
    running.exception(PATIENCE)
    assert isinstance(error, ChannelClosedError)
    assert isinstance(later, ChannelClosedError)
    assert not error.may_have_run
    assert not later.may_have_run


# -- ending --------------------------------------------------------------------------------------


def test_a_callback_may_close_the_agent_that_is_closing(quiet_threads):
    with simulated_world(1) as (backend,):
        agent = RpcAgent(backend)
        go_on = threading.Event()
        agent.register("wait", lambda: go_on.wait(PATIENCE))
        future = agent.rpc_async(0, "wait")
        future.add_done_callback(lambda _: agent.close())
        closing = in_thread(agent.close, 0.05)
        closing.join(PATIENCE / 2)
        go_on.set()
        stuck = closing.is_alive()
        if stuck:
            agent._close_lock.release()
            closing.join(3)
        assert not stuck


def test_a_callback_may_close_the_backend_that_is_closing(quiet_threads):
    with tcp_world(2) as (first, second):
        caller, callee = RpcAgent(first), RpcAgent(second)
        go_on = threading.Event()
        callee.register("wait", lambda: go_on.wait(PATIENCE))
        future = caller.rpc_async(1, "wait")
        future.add_done_callback(lambda _: first.close())
        closing = in_thread(first.close)
        closing.join(PATIENCE / 2)
        stuck = closing.is_alive()
        if stuck:
            first._close_lock.release()
            closing.join(3)
        go_on.set()
        caller.close(0.0)
        callee.close(0.5)
        assert not stuck


@pytest.mark.parametrize("make", [tcp_world, simulated_world])
def test_calls_to_oneself_end_when_the_backend_is_closed(make):
    with make(1) as (backend,):
        agent = RpcAgent(backend)
        agent.register("fine", lambda: "fine")
        agent.rpc_sync(0, "fine")
        backend.close()
        time.sleep(0.1)
        begin = time.monotonic()
        error = error_of(agent.rpc_sync, 0, "fine", timeout=20)
        seconds = time.monotonic() - begin
        future = error_of(agent.rpc_async, 0, "fine", timeout=0.5)
        ended = not isinstance(future, RankwireError) and wait([future], timeout=1).done
        agent.close(0.0)
        assert isinstance(error, ChannelClosedError), repr(error)
        assert seconds < 8
        assert isinstance(future, RankwireError) or ended


@pytest.mark.parametrize("make", [tcp_world, simulated_world])
def test_a_function_may_close_the_agent_that_serves_it(make):
    with make(2) as world:
        agents = [RpcAgent(backend) for backend in world]
        agents[1].register("shut_down", lambda: agents[1].close(20.0))
        begin = time.monotonic()
        error_of(agents[0].rpc_sync, 1, "shut_down", timeout=20)
        seconds = time.monotonic() - begin
        for agent in agents:
            agent.close(0.0)
        assert seconds < 8  # nobody waits for itself


def test_a_coroutine_may_close_the_agent_that_serves_it():
    with tcp_world(2) as world:
        caller, callee = [RpcAgent(backend) for backend in world]
        errors = []

        @callee.register
        async def shut_down():
            errors.append(error_of(callee.close, 0.1))

        error_of(caller.rpc_sync, 1, "shut_down", timeout=PATIENCE)
        eventually(lambda: errors)
        closed = callee._port._closed is not None
        caller.close(0.0)
        if not closed:
            callee._server.pool.close(Deadline(1))
            callee._port.close()
        assert errors == [None]
        assert closed


def test_a_cancelled_call_to_oneself_frees_its_slot():
    with simulated_world(1) as (backend,):
        agent = RpcAgent(backend, max_in_flight=1)
        go_on = threading.Event()
        agent.register("wait", lambda: go_on.wait(PATIENCE))
        agent.register("fine", lambda: "fine")
        future = agent.rpc_async(0, "wait")
        results = []
        caller = in_thread(
            lambda: results.append(error_of(agent.rpc_sync, 0, "fine", timeout=PATIENCE))
        )
        time.sleep(0.1)
        future.cancel()
        caller.join(PATIENCE / 2)
        in_time = list(results)
        go_on.set()
        caller.join(PATIENCE)
        agent.close(0.5)
        assert in_time == ["fine"]


def test_looking_for_more_jobs_bears_that_another_thread_takes_the_last():
    class Raced(deque):
        def __bool__(self):
            return True

        def __len__(self):
            return 1

    with simulated_world(1) as (backend,):
        agent = RpcAgent(backend)
        pool = agent._server.pool
        time.sleep(0.02)
        arrived, pool.arrived = pool.arrived, Raced()
        more = error_of(pool.has_more, pool._poller)
        pool.arrived = arrived
        agent.close(0.0)
        assert more is False, repr(more)
