"""A hang says where: what the ranks are doing that were waited for in vain."""

import asyncio
import os
import signal
import threading
import time

import msgspec
import numpy as np
import pytest

import rankwire
from rankwire import (
    DeadlineExceededError,
    FaultPlan,
    RpcAgent,
    SimulatedBackend,
    SubBackend,
)
from rankwire.deadline import AT_ONCE
from rankwire.mesh.inquiries import ControlInquiries, Inquiries
from rankwire.rendezvous.control_protocol import tell
from rankwire.testing import run_ranks, simulated_world, tcp_world
from rankwire.wire.control_messages import ActiveCall, Answer, Beat, Key, Question, unpack
from rankwire.wire.frames import whole_of
from rankwire.wire.handshake import Purpose
from real_time import Deadline
from worlds import PATIENCE, eventually, process_world, runtime_folder_of_its_own

LIMIT = 0.4


@pytest.fixture(scope="module")
def world():
    """Two ranks in processes of their own."""
    with rankwire.local(2) as world:
        world.run(time_out, receive, time.monotonic)  # all is imported there from now on
        yield world


def sleep_in_the_program():
    time.sleep(1.5)


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(1.5, lock.release).start()
    with lock:
        pass


def wait_for_an_event():
    threading.Event().wait(1.5)


def compute():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        sum(range(1000))


def receive(backend):
    backend.recv(1, timeout=LIMIT)


def send_much(backend):
    backend.send(bytes(64 << 20), 1, timeout=LIMIT)


def receive_later(backend):
    backend.irecv(1, timeout=LIMIT).wait()


def receive_from_any(backend):
    backend.recv(rankwire.ANY_RANK, timeout=LIMIT)


def meet(backend):
    rankwire.barrier(backend, timeout=LIMIT)


def add_up(backend):
    rankwire.all_reduce(backend, np.ones(4), timeout=LIMIT)


def time_out(backend, on_zero, on_one):
    """Run as rank 0 what times out, and as rank 1 what it waits for in vain; return the error."""
    if backend.rank == 1:
        return on_one()
    with pytest.raises(DeadlineExceededError) as info:
        on_zero(backend)
    return str(info.value)


# -- where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [receive, receive_later, receive_from_any, meet, add_up])
def test_an_operation_whose_time_is_up_says_where_the_other_rank_is(operation, world):
    text, _ = world.run(time_out, operation, sleep_in_the_program)
    assert "rank 1 says: MainThread sleeps in sleep_in_the_program (" in text
    assert f"test_inquiries.py:{sleep_in_the_program.__code__.co_firstlineno + 1})" in text


def test_a_send_that_is_not_taken_says_where_the_other_rank_is():
    with rankwire.local(2) as world:  # its own: what was sent stays there
        text, _ = world.run(time_out, send_much, sleep_in_the_program)
    assert "rank 1 says: MainThread sleeps in sleep_in_the_program (" in text


@pytest.mark.parametrize(
    ("on_one", "doing"),
    [
        (wait_for_a_lock, "waits for a lock in wait_for_a_lock ("),
        (wait_for_an_event, "waits for a lock in wait_for_an_event ("),
        (compute, "in compute ("),
    ],
)
def test_it_says_whether_the_other_rank_runs_or_waits(on_one, doing, world):
    text, _ = world.run(time_out, receive, on_one)
    assert f"rank 1 says: MainThread {doing}" in text or (on_one is compute and doing in text)


def test_a_rank_that_receives_itself_is_said_to():
    def wait_for_each_other(backend):
        with pytest.raises(rankwire.RankwireError) as info:  # rank 0 leaves after its own
            backend.recv(1 - backend.rank, timeout=LIMIT + backend.rank)
        return str(info.value)

    text, _ = run_ranks(2, wait_for_each_other)
    circle = "it waits for the rank that asks, so the two wait for each other"
    assert f"rank 1 says: {circle}; rank 1 is in recv(), called in wait_for_each_other (" in text


def test_ranks_whose_time_is_up_at_once_say_that_they_wait_for_each_other(monkeypatch):
    asking = threading.Barrier(2)
    ask = Inquiries.ask

    def ask_together(*args):
        asking.wait()  # both receives are over
        return ask(*args)

    def wait_for_each_other(backend):
        with pytest.raises(rankwire.RankwireError) as info:
            backend.recv(1 - backend.rank, timeout=LIMIT)
        told = str(info.value)
        backend.barrier()  # neither leaves before the other has its answer
        return told

    monkeypatch.setattr(Inquiries, "ask", ask_together)
    for text in run_ranks(2, wait_for_each_other):
        assert "so the two wait for each other" in text


def test_members_of_a_group_are_asked(world):
    def meet_in_a_group(backend):
        with SubBackend(backend, [1, 0], keep_order=True) as group:
            if backend.rank == 1:
                time.sleep(1.5)
                return None
            with pytest.raises(DeadlineExceededError) as info:
                group.recv(0, timeout=LIMIT)
            return str(info.value)

    text, _ = world.run(meet_in_a_group)
    assert "rank 0 says: MainThread sleeps in meet_in_a_group (" in text


def test_a_rank_that_stands_still_does_not_say_and_costs_little_time():
    with rankwire.local(2) as world:
        pid = world.on(1).run(lambda backend: os.getpid())
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        text = world.on(0).run(time_out, receive, None)
        assert "rank 1 does not say what it is doing" in text
        assert time.monotonic() - began < 20
        os.kill(pid, signal.SIGCONT)


def test_who_only_looks_asks_nobody(monkeypatch):
    asked = []
    monkeypatch.setattr(Inquiries, "ask", lambda *args: asked.append(args))
    with tcp_world(2) as (backend, _):
        for timeout in (0.0, 0.01):
            with pytest.raises(DeadlineExceededError):
                backend.recv(1, timeout=timeout)
        assert not asked
        with pytest.raises(DeadlineExceededError):
            backend.recv(1, timeout=0.25)
        assert len(asked) == 1


def answering(answer):
    """Return what a rank says in the place of what it is doing."""
    return lambda self, question: msgspec.structs.replace(
        answer, number=question.number, asker=question.asker
    )


def test_what_another_rank_says_is_only_text(monkeypatch):
    hostile = Answer(
        places=("\x1b[2J\n" + "x" * 5000,) * 3, calls=(ActiveCall(Key(1, 0, 1), "f\n" * 1000, 1.0),)
    )
    monkeypatch.setattr(Inquiries, "answer", answering(hostile))
    with tcp_world(2) as (backend, _):
        with pytest.raises(DeadlineExceededError) as info:
            backend.recv(1, timeout=0.25)
    text = str(info.value)
    assert "rank 1 says: \\x1b[2J xxx" in text
    assert len(text) < 1500
    assert "\n" not in text


def test_a_rank_with_thousands_of_threads_leaves_most_of_them_out(monkeypatch):
    monkeypatch.setattr(Inquiries, "_places", lambda self: ["x" * 400] * 10_000)
    with tcp_world(2) as world:
        for rank in (0, 1):  # from the coordinator, and to it
            with pytest.raises(DeadlineExceededError, match=f"rank {1 - rank} says: xxx"):
                world[rank].recv(1 - rank, timeout=0.25)


def test_a_defect_in_an_answer_is_logged_and_ends_no_connection(monkeypatch, caplog):
    monkeypatch.setattr(Inquiries, "_places", lambda self: 1 / 0)
    with tcp_world(2) as world:
        for rank in (0, 1):
            assert world[rank].mesh.inquiries.ask(1 - rank, Deadline(PATIENCE)).places == ()
        assert "could not be told what this one is doing" in caplog.text
        world[0].send(b"still there", 1)
        assert world[1].recv(0) == b"still there"


# -- which way -------------------------------------------------------------------------------------


def directly(inquiries):
    """Have a rank ask without the coordinator."""
    inquiries._count_silences = lambda: {inquiries._mesh.roll.keeper: 1.0}


@pytest.mark.parametrize("asker", [0, 1, 2])
@pytest.mark.parametrize("is_direct", [False, True])
def test_each_rank_can_ask_each_other_in_both_ways(asker, is_direct, monkeypatch):
    ways = []
    put = ControlInquiries._put_directly
    monkeypatch.setattr(
        ControlInquiries, "_put_directly", lambda *args: ways.append(1) or put(*args)
    )
    with tcp_world(3) as world:
        inquiries = world[asker].mesh.inquiries
        if is_direct:
            directly(inquiries)
        for rank in {0, 1, 2} - {asker}:
            answer = inquiries.ask(rank, Deadline(PATIENCE))
            assert answer.asker == asker
            assert any("test_inquiries.py" in place for place in answer.places)
        assert len(ways) == 2 * is_direct


@pytest.mark.parametrize("is_noticed", [False, True], ids=["just now", "a beat ago"])
def test_a_rank_says_what_it_is_doing_although_the_coordinator_is_stopped(is_noticed):
    with runtime_folder_of_its_own(), process_world(3) as (coordinator, asker, asked):
        asked.start("eval", "__import__('time').sleep(6)")
        coordinator.stop()
        if is_noticed:
            silent = "backend.mesh.inquiries.silences().get(0)"
            eventually(lambda: asker.call("eval", silent))
        began = time.monotonic()
        error = asker.start("eval", "backend.recv(2, timeout=0.5)").error()
        assert "rank 2 says: MainThread " in error.detail
        assert time.monotonic() - began < 5.0
        coordinator.signal(signal.SIGCONT)


def dial_to_ask(backend):
    """Return a connection by which rank 1 can be asked."""
    mesh = backend.mesh
    stream = mesh.connections.open_stream(mesh.peers[1], Purpose.INQUIRY, 0, Deadline(PATIENCE))
    return mesh.inquiries._wrap(1, *stream)


def test_a_rank_that_asks_without_end_on_connections_of_its_own_has_only_a_few():
    with tcp_world(2) as (first, second):
        made = [dial_to_ask(first) for _ in range(40)]
        connections = second.mesh.inquiries._connections
        tell(made[-1], Question(5, 1, asker=7))
        answer = unpack(whole_of(made[-1].read(Deadline(PATIENCE))[0].payload))
        assert (answer.number, answer.asker) == (5, 0)  # and not for whom it says
        assert len(connections[0]) == 16
        for connection in made:
            connection.close()
        eventually(lambda: not connections[0])


def test_what_is_no_question_ends_only_the_connection_that_it_came_on(caplog):
    with tcp_world(2) as (first, second):
        for message in (Beat(), Answer()):
            connection = dial_to_ask(first)
            tell(connection, message)
            with pytest.raises(rankwire.RankwireError, match="ended"):
                connection.read(Deadline(PATIENCE))
            connection.close()
        assert first.mesh.inquiries.ask(1, Deadline(PATIENCE)) is not None
        second.send(b"still there", 0)
        assert first.recv(1) == b"still there"


def test_an_answer_that_no_thread_waits_for_is_dropped():
    with tcp_world(2) as (first, _):
        inquiries = first.mesh.inquiries
        inquiries.on_answer(Answer(77, 0, places=("unasked",)))
        assert "unasked" not in inquiries.ask(1, Deadline(PATIENCE)).places


def test_a_rank_that_has_left_or_is_this_one_has_nothing_to_say():
    for make_world in (tcp_world, simulated_world):
        with make_world(2) as (first, second):
            assert first.mesh.inquiries.ask(0, AT_ONCE) == Answer()
            second.close()
            eventually(lambda first=first: first.failure_of(1) is not None)
            assert first.mesh.inquiries.ask(1, AT_ONCE) == Answer()
            assert first.mesh.inquiries.doing_of(1, AT_ONCE) is None


# -- which calls -----------------------------------------------------------------------------------


def test_the_calls_that_a_rank_serves_are_told():
    go_on = threading.Event()
    with tcp_world(2) as world, RpcAgent(world[0]) as zero, RpcAgent(world[1]) as one:
        one.register("slow", lambda: go_on.wait(20))
        running = zero.rpc_async(1, "slow")
        with pytest.raises(DeadlineExceededError) as info:
            world[0].recv(1, timeout=LIMIT)
        assert "it has served 'slow' of rank 0 for 0." in str(info.value)
        assert world[1].status().peers[0].serving == ("slow",)
        assert "serving: slow" in str(world[1].status())
        go_on.set()
        assert running.result()


def test_a_call_whose_time_is_up_says_where_the_function_is():
    go_on = threading.Event()

    def hang_there():
        go_on.wait(20)

    with tcp_world(2) as world, RpcAgent(world[0]) as zero, RpcAgent(world[1]) as one:
        one.register(hang_there)
        try:
            with pytest.raises(DeadlineExceededError) as info:
                zero.rpc_sync(1, "hang_there", timeout=0.8)
        finally:
            go_on.set()
    line = hang_there.__code__.co_firstlineno + 1
    assert "it is running: it waits for a lock in hang_there (" in str(info.value)
    assert f"test_inquiries.py:{line})" in str(info.value)


def test_a_coroutine_whose_time_is_up_says_where_it_awaits():
    async def nap():
        await asyncio.sleep(20)

    with tcp_world(2) as world, RpcAgent(world[0]) as zero, RpcAgent(world[1]) as one:
        one.register(nap)
        with pytest.raises(DeadlineExceededError) as info:
            zero.rpc_sync(1, "nap", timeout=0.8)
    assert "it is running: it awaits in nap (" in str(info.value)


def test_a_rank_that_has_nothing_to_say_is_left_out():
    backend, other = SimulatedBackend.create_group(2)
    with backend, other, pytest.raises(DeadlineExceededError) as info:
        backend.recv(1, timeout=0.25)  # no thread is called "rank 1"
    assert "rank 1 says" not in str(info.value)
    assert "does not say" not in str(info.value)


def test_an_inquiry_is_no_message_of_the_program():
    plan = FaultPlan().kill(1, after=1)
    backend, other = SimulatedBackend.create_group(2, faults=plan)
    with backend, other:
        for _ in range(3):
            with pytest.raises(DeadlineExceededError):
                backend.recv(1, timeout=0.25)
        assert backend.alive == (0, 1)
