"""Values with codec hooks in calls: who is told what, and what is undone when nothing is sent."""

import asyncio
import concurrent.futures
import threading

import pytest

from rankwire import (
    Codec,
    DeadlineExceededError,
    InvalidMessageError,
    MessageTooLargeError,
    OverloadedError,
    PeerLostError,
    RemoteError,
    RpcAgent,
    SubBackend,
    UnsupportedTypeError,
    current_call,
)
from rankwire.testing import in_parallel, simulated_world, tcp_world
from worlds import eventually

MIB = 1 << 20


class Handle:
    def __init__(self, key):
        self.key = key


class Speechless(BaseException):
    def __str__(self):
        raise ValueError(self)


# What would end a thread, or has no text.
FATAL = {
    "exit": SystemExit(3),
    "generator": GeneratorExit(),
    "cancelled": asyncio.CancelledError(),
    "speechless": Speechless(),
    "wide": KeyError(1 << 16_000),
}


class Desk:
    """A codec that counts the handles which it has sent, by the rank that has them."""

    def __init__(self):
        self.held = []
        self.came_from = []
        self.codec = Codec()
        self.codec.register(Handle, take=self.take, build=self.build)

    def take(self, handle, sending):
        hold = (sending.peer, handle.key)
        self.held.append(hold)
        sending.undo(lambda: self.held.remove(hold))
        return handle.key

    def build(self, key, receiving):
        if key == "bad":
            raise ValueError("no such handle")
        if key == "worse":
            raise InvalidMessageError("handles are closed today")
        if key in FATAL:
            raise FATAL[key]
        self.came_from.append(receiving.peer)
        return Handle(key)


@pytest.fixture(params=[simulated_world, tcp_world], ids=["simulated", "tcp"])
def pair(request):
    with request.param(2) as world:
        desks = [Desk(), Desk()]
        agents = [
            RpcAgent(backend, codec=desk.codec, max_in_flight=1)
            for backend, desk in zip(world, desks, strict=True)
        ]
        yield agents, desks
        for agent in agents:
            agent.close(grace=0.5)


def test_both_ends_of_a_call_and_of_its_reply_learn_the_peer(pair):
    (caller, callee), (near, far) = pair
    callee.register("next", lambda handle: Handle(handle.key + 1))
    assert caller.rpc_sync(1, "next", Handle(1)).key == 2
    assert caller.rpc_async(1, "next", handle=Handle(5)).result().key == 6
    assert near.held == [(1, 1), (1, 5)]
    assert far.held == [(0, 2), (0, 6)]
    assert (near.came_from, far.came_from) == ([1, 1], [0, 0])


def test_a_call_to_oneself_has_oneself_as_peer(pair):
    (caller, _), (near, _) = pair
    caller.register("echo", lambda handle: handle)
    assert caller.rpc_sync(0, "echo", Handle(1)).key == 1
    assert near.held == [(0, 1), (0, 1)]
    assert near.came_from == [0, 0]


def test_in_a_group_peers_are_ranks_of_the_group():
    with simulated_world(3) as world:
        desk = Desk()

        def agent_of(backend):
            return lambda: RpcAgent(SubBackend(backend, [2, 0]), codec=desk.codec)

        callee, caller = in_parallel([agent_of(world[0]), agent_of(world[2])])
        callee.register("echo", lambda handle: handle.key)
        assert caller.rpc_sync(1 - caller.backend.rank, "echo", Handle(7)) == 7
        assert desk.held == [(callee.backend.rank, 7)]
        assert desk.came_from == [caller.backend.rank]
        for agent in (caller, callee):
            agent.close(grace=0.5)


@pytest.mark.parametrize(
    ("key", "text"), [("bad", "raised ValueError: no such handle"), ("worse", "closed today")]
)
def test_a_build_that_fails_refuses_the_call_and_the_agent_serves_on(pair, key, text):
    (caller, callee), _ = pair
    callee.register("echo", lambda handle: handle.key)
    with pytest.raises(InvalidMessageError, match=f"could not read the call: .*{text}"):
        caller.rpc_sync(1, "echo", Handle(key), timeout=10)
    with pytest.raises(InvalidMessageError, match=text):
        caller.rpc_async(1, "echo", Handle(key), timeout=10).result()
    assert caller.rpc_sync(1, "echo", Handle("good")) == "good"


def test_a_build_that_fails_in_a_reply_is_an_error_of_the_caller(pair):
    (caller, callee), _ = pair
    callee.register("make", Handle)
    with pytest.raises(InvalidMessageError, match="no such handle"):
        caller.rpc_sync(1, "make", "bad", timeout=10)
    with pytest.raises(InvalidMessageError, match="no such handle"):
        caller.rpc_async(1, "make", "bad", timeout=10).result()
    assert caller.rpc_sync(1, "make", "good").key == "good"


@pytest.mark.parametrize("key", FATAL)
def test_calls_and_replies_that_cannot_be_read_do_not_lose_those_beside_them(key):
    with tcp_world(3) as world:
        agents = [RpcAgent(backend, codec=Desk().codec) for backend in world]
        callee, caller, bystander = agents
        callee.register("keep", lambda handle: None)
        callee.register("make", Handle)
        callee.register("echo", lambda value: value)
        began = threading.Event()

        def interfere():
            began.set()
            calls = [caller.rpc_async(0, "keep", Handle(key), timeout=30) for _ in range(50)]
            calls += [caller.rpc_async(0, "make", key, timeout=30) for _ in range(50)]
            return [type(call.exception()) for call in calls]

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            refused = pool.submit(interfere)
            began.wait()
            honest = [bystander.rpc_async(0, "echo", n, timeout=30) for n in range(300)]
            honest += [caller.rpc_async(0, "echo", n, timeout=30) for n in range(300)]
            assert [call.result() for call in honest] == [*range(300)] * 2
            assert refused.result() == [InvalidMessageError] * 100
        for agent in agents:
            agent.close(grace=0.5)


def test_arguments_that_cannot_be_sent_undo_those_that_could(pair):
    (caller, _), (near, _) = pair
    for call in (caller.rpc_sync, caller.rpc_async):
        with pytest.raises(UnsupportedTypeError, match=r"args\[1\]"):
            call(1, "f", Handle(1), object())
    assert near.held == []


def test_a_result_that_cannot_be_sent_is_undone(pair):
    (caller, callee), (_, far) = pair
    callee.register("f", lambda: [Handle(1), object()])
    with pytest.raises(RemoteError, match=r"result\[1\]"):
        caller.rpc_sync(1, "f")
    assert far.held == []


def test_a_call_that_is_too_large_is_undone():
    with simulated_world(2, max_message_nbytes=MIB) as world:
        near, far = Desk(), Desk()
        caller = RpcAgent(world[0], codec=near.codec)
        callee = RpcAgent(world[1], codec=far.codec)
        callee.register("f", lambda: [Handle(1), bytes(2 * MIB)])
        with pytest.raises(MessageTooLargeError):
            caller.rpc_sync(1, "f", Handle(1), bytes(2 * MIB))
        with pytest.raises(MessageTooLargeError):
            caller.rpc_sync(1, "f")
        assert near.held == far.held == []
        for agent in (caller, callee):
            agent.close(grace=0.5)


def test_a_call_that_waits_for_its_turn_is_held_once(pair):
    (caller, callee), (near, _) = pair
    go = threading.Event()
    callee.register("wait", lambda handle: go.wait(20))
    first = caller.rpc_async(1, "wait", Handle(1))
    with pytest.raises(OverloadedError):
        caller.rpc_sync(1, "wait", Handle(2), timeout=0.05)
    assert near.held == [(1, 1)]
    go.set()
    assert first.result() is True
    assert caller.rpc_sync(1, "wait", Handle(3)) is True
    assert near.held == [(1, 1), (1, 3)]


def test_a_large_call_with_a_reservation_is_held_once():
    with tcp_world(2) as world:
        near, far = Desk(), Desk()
        caller = RpcAgent(world[0], codec=near.codec)
        callee = RpcAgent(world[1], codec=far.codec, workers=1, max_queued_nbytes=64 * MIB)
        callee.register("size", lambda handle, data: len(data))
        data = bytes(40 * MIB)
        futures = [caller.rpc_async(1, "size", Handle(n), data) for n in range(4)]
        assert [future.result() for future in futures] == [len(data)] * 4
        assert near.held == [(1, 0), (1, 1), (1, 2), (1, 3)]
        for agent in (caller, callee):
            agent.close(grace=0.5)


def test_a_call_to_a_rank_that_is_lost_is_undone(pair):
    (caller, callee), (near, _) = pair
    callee.register("echo", lambda handle: handle.key)
    callee.backend.close()
    with pytest.raises((PeerLostError, ConnectionError)):
        caller.rpc_sync(1, "echo", Handle(1), timeout=10)
    eventually(lambda: near.held == [])


def test_the_reply_of_a_cancelled_call_is_undone(pair):
    (caller, callee), (_, far) = pair
    go = threading.Event()

    calls = []

    def make(key):
        calls.append(current_call())
        go.wait(20)
        return Handle(key)

    callee.register("make", make)
    with pytest.raises(DeadlineExceededError):
        caller.rpc_sync(1, "make", 1, timeout=0.05)
    eventually(lambda: calls[0].cancelled)  # it has heard of that
    go.set()
    eventually(lambda: not callee.activity().in_service)
    assert far.held == []


def test_a_callback_that_cannot_undo_a_reply_harms_nothing(pair, caplog):
    (caller, callee), (_, far) = pair

    class Stubborn:
        pass

    def take(value, sending):
        sending.undo(lambda: 1 // 0)

    far.codec.register(Stubborn, take=take, build=lambda state, _: None)
    callee.register("f", lambda: [Stubborn(), object()])
    callee.register("ping", lambda: 1)
    with pytest.raises(RemoteError):
        caller.rpc_sync(1, "f")
    assert caller.rpc_sync(1, "ping") == 1


def test_the_result_of_a_future_has_its_caller_as_peer(pair):
    (caller, callee), (near, far) = pair
    future = concurrent.futures.Future()
    callee.register("later", lambda: future)
    call = caller.rpc_async(1, "later")
    eventually(lambda: callee.activity().in_service)
    future.set_result(Handle(3))
    assert call.result().key == 3
    assert far.held == [(0, 3)]
    assert near.came_from == [1]


def test_a_reply_is_built_once_even_if_a_callback_and_a_waiter_come_for_it(pair):
    (agent, other), (desk, _) = pair
    other.register("handle", Handle)
    for number in range(500):
        future = agent.rpc_async(1, "handle", number)
        future.add_done_callback(lambda _: None)  # has the poller end it
        assert future.result().key == number
    assert len(desk.came_from) == 500
