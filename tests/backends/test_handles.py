"""Messages that are under way: what their handles promise, with real streams, interrupts, forks."""

import gc
import os
import random
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from interrupts import Interrupt, every_interrupt
from rankwire import (
    ANY_RANK,
    ChannelClosedError,
    DeadlineExceededError,
    ForkedProcessError,
    InvalidRankError,
    PeerLostError,
    SubBackend,
)
from rankwire.links import lender
from rankwire.links.borrower import Borrowed
from rankwire.links.connection import Connection
from rankwire.testing import simulated_world
from worlds import (
    LEND_FROM,
    PATIENCE,
    Running,
    eventually,
    process_world,
    runtime_folder_of_its_own,
    tcp_world,
)

SOON = 8.0
LARGE = 3 << 20
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_world(kind, size=2, **options):
    if kind == "simulated":
        return simulated_world(size, **options)
    return tcp_world(size, transport=kind, **options)


@pytest.fixture(params=["auto", "tcp", "simulated"])
def pair(request):
    with make_world(request.param) as (near, far):
        yield near, far


@pytest.fixture(params=["auto", "tcp", "simulated"])
def three(request):
    with make_world(request.param, 3) as world:
        yield world


# -- what is sent ----------------------------------------------------------------------------------


def test_a_small_message_has_left_when_isend_returns(pair):
    near, far = pair
    handle = near.isend(b"x", 1)
    assert handle.done()
    assert far.recv(0) == b"x"
    assert "isend" in repr(handle)
    assert "done" in repr(handle)


def test_two_ranks_that_both_post_64_mib_do_not_wait_for_each_other(pair):
    def exchange(backend):
        other = 1 - backend.rank
        sent, out = np.full(8 << 20, backend.rank), np.empty(8 << 20, np.int64)
        sending = backend.isend_array(sent, other)
        assert backend.irecv_array(other, out=out).wait() is out
        sending.wait()
        assert out[0] == out[-1] == other

    for running in [Running(exchange, backend) for backend in pair]:
        running.result(60.0)


def test_what_is_posted_goes_on_though_nobody_waits_for_it(pair):
    near, far = pair
    sent = [bytes([number]) * 1_000_000 for number in range(20)]
    for data in sent:
        near.isend(data, 1)
    assert [far.recv(0, timeout=SOON) for _ in sent] == sent


def test_a_wait_does_not_wait_for_what_was_posted_later():
    with tcp_world(2, transport="tcp") as (near, far):
        first = near.isend(bytes(8 << 20), 1)
        later = near.isend(bytes(64 << 20), 1, tag=1)
        receiving = Running(far.recv, 0)
        first.wait(timeout=SOON)
        receiving.result()
        assert not later.done()
        assert far.recv(0, tag=1) == bytes(64 << 20)
        later.wait(timeout=SOON)


def test_a_message_whose_time_is_up_is_not_read_out_of_its_memory_any_more(monkeypatch):
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)
    with tcp_world(2) as (near, far):
        data = bytearray([1]) * LEND_FROM
        handle = near.isend(data, 1, timeout=0.5)  # a part leaves within it on a busy machine too
        with pytest.raises(DeadlineExceededError) as caught:
            handle.wait()
        assert (caught.value.op, caught.value.peer, caught.value.tag) == ("isend", 1, 0)
        assert not caught.value.may_have_arrived
        data[:] = bytes([2]) * LEND_FROM
        near.send(b"end", 1)
        assert far.recv(0) == b"end"


def test_a_message_of_which_a_part_has_left_arrives_as_it_was():
    with tcp_world(2, transport="tcp") as (near, far):
        data = bytearray([1]) * (32 << 20)
        handle = near.isend(data, 1, timeout=0.5)  # a part leaves within it on a busy machine too
        with pytest.raises(DeadlineExceededError) as caught:
            handle.wait()
        assert caught.value.may_have_arrived
        data[:] = bytes([2]) * len(data)
        near.isend(b"end", 1)
        assert far.recv(0, timeout=SOON) == bytes([1]) * len(data)
        assert far.recv(0, timeout=SOON) == b"end"


def test_a_time_limit_holds_while_another_thread_sends():
    with tcp_world(2, transport="tcp") as (near, far):
        near.isend(bytes(16 << 20), 1)
        late = near.isend(bytes(16 << 20), 1, timeout=0.3)
        sending = Running(near.send, bytes(1000), 1)
        with pytest.raises(DeadlineExceededError):
            late.wait()
        assert far.recv(0, timeout=SOON) == bytes(16 << 20)
        assert far.recv(0, timeout=SOON) in (bytes(16 << 20), bytes(1000))
        sending.result()


def test_a_dead_peer_ends_what_waits_to_leave():
    with simulated_world(2) as world:
        near = world[0]
        handles = [near.isend(bytes(16 << 20), 1) for _ in range(10)]
        near.network.kill(1)
        eventually(handles[-1].done)
        with pytest.raises(PeerLostError) as caught:
            handles[-1].wait()
        assert (caught.value.op, caught.value.peer) == ("isend", 1)
        with pytest.raises(PeerLostError):
            handles[-1].wait()


def test_messages_are_not_sent_to_any_rank(pair):
    with pytest.raises(InvalidRankError):
        pair[0].isend(b"x", ANY_RANK)
    assert repr(ANY_RANK) == "ANY_RANK"


# -- what is received ------------------------------------------------------------------------------


def test_a_large_message_comes_into_place_while_the_thread_waits_for_another():
    with tcp_world(2, transport="tcp") as (near, far):
        buffer = bytearray(LARGE)
        coming = near.irecv_into(buffer, 1)
        sending = far.isend(bytes([7]) * LARGE, 0)
        far.isend(b"behind", 0, tag=1)
        assert near.recv(1, tag=1, timeout=SOON) == b"behind"
        assert bytes(buffer) == bytes([7]) * LARGE
        assert coming.wait(timeout=0) == LARGE
        sending.wait()


@pytest.mark.parametrize("src", [1, ANY_RANK])
def test_a_message_that_its_sender_took_back_is_passed_over(monkeypatch, src):
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)
    whole, is_revoked = Borrowed.whole, threading.Event()

    def whole_too_late(borrowed):
        assert is_revoked.wait(PATIENCE)
        return whole(borrowed)

    with tcp_world(2) as (near, far):
        monkeypatch.setattr(Borrowed, "whole", whole_too_late)
        receiving = Running(near.irecv(src).wait)
        with pytest.raises(DeadlineExceededError):
            far.isend(bytes(LEND_FROM), 0, timeout=0.1).wait()
        is_revoked.set()
        far.send(b"next", 0)
        assert receiving.result() == b"next"


def test_a_message_that_is_lent_has_been_taken_when_done_says_so(monkeypatch):
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)
    with tcp_world(2) as (near, far):
        for src in (1, ANY_RANK):
            coming, buffer = near.irecv(src, 1), bytearray(LEND_FROM)
            filling = near.irecv_into(buffer, src, 2)
            sending = [far.isend(bytes([tag]) * LEND_FROM, 0, tag) for tag in (1, 2)]
            for receiving, sent in zip((coming, filling), sending, strict=True):
                eventually(receiving.done)
                sent.wait(timeout=SOON)
            assert coming.wait() == bytes([1]) * LEND_FROM
            assert (filling.wait(), buffer) == (LEND_FROM, bytes([2]) * LEND_FROM)


def test_handles_of_a_closed_group_end(three):
    making = [Running(SubBackend, backend, [0, 1]) for backend in three[:2]]
    group, _ = (running.result() for running in making)
    coming = [group.irecv(1), group.irecv(ANY_RANK)]
    group.close()
    for handle in coming:
        with pytest.raises(ChannelClosedError):
            handle.wait(timeout=SOON)


def test_a_thread_that_waits_for_any_rank_is_woken_by_one_that_reads(three):
    first, second, _ = three
    for number in range(50):
        waiting = Running(first.recv_any, tag=1, timeout=SOON)
        other = Running(first.recv, 1, tag=2, timeout=SOON)
        if number % 2:
            time.sleep(0.002)
        second.send(b"mine", 0, tag=1)
        assert waiting.result() == (1, b"mine")
        second.send(b"other", 0, tag=2)
        assert other.result() == b"other"


def test_a_rank_that_has_not_sent_before_is_heard_at_once(three):
    first, _, third = three
    waiting = Running(first.recv_any, timeout=SOON)
    eventually(lambda: first.mesh.peers[1].inbox.wanted())
    third.send(b"first words", 0)
    assert waiting.result() == (2, b"first words")


def test_any_rank_goes_on_while_one_lives_and_names_a_loss_at_the_end():
    with simulated_world(3) as (first, _, third):
        coming = first.irecv(ANY_RANK)
        first.network.kill(1)
        assert not coming.done()
        third.send(b"here", 0)
        assert (coming.wait(), coming.source) == (b"here", 2)
        waiting = Running(first.recv_any, timeout=SOON)
        first.network.kill(2)
        error = waiting.error()
        assert isinstance(error, PeerLostError)
        assert (error.op, error.peer) == ("recv_any", 1)


# -- interrupts ------------------------------------------------------------------------------------


def drain(backend, tag):
    """Return the messages of a tag up to the last one."""
    got = []
    while (message := backend.recv(0, tag=tag, timeout=SOON)) != b"end":
        got.append(bytes(message))
    return got


def drain_later(backend, tag):
    """Drain when whoever sends has begun to wait for that."""
    time.sleep(0.01)
    return drain(backend, tag)


@pytest.mark.fault(37, "after a caught interrupt in isend the world goes on")
@pytest.mark.parametrize("nbytes", [8, 1_000_000])
def test_an_interrupt_anywhere_in_posting_a_message(pair, nbytes):
    near, far = pair
    near.send(b"connected", 1, tag=1 << 40)
    numbers = iter(range(1 << 30))

    def run(interrupting):
        tag = next(numbers)
        receiving = Running(drain, far, tag)
        sent = bytes([tag % 251]) * nbytes
        handle = None
        with suppress(Interrupt), interrupting:
            handle = near.isend(sent, 1, tag=tag)
        if handle is not None:
            handle.wait(timeout=SOON)
        near.send(b"end", 1, tag=tag, timeout=SOON)
        got = receiving.result(SOON)
        assert got in ([], [sent])
        assert handle is None or got

    assert every_interrupt(run) >= 15


@pytest.mark.fault(37, "a wait that is interrupted can be repeated")
@pytest.mark.parametrize("kind", ["tcp", "simulated"])
def test_an_interrupt_anywhere_in_waiting_for_what_leaves(kind):
    nbytes = (16 << 20) if kind == "tcp" else 300_000
    options = {} if kind == "tcp" else {"queue_nbytes": 1 << 16}
    numbers = iter(range(1 << 30))
    with make_world(kind, **options) as (near, far):
        near.send(b"connected", 1, tag=1 << 40)
        data = bytes(nbytes)

        def run(interrupting):
            tag = next(numbers)
            handles = [near.isend(data, 1, tag=tag) for _ in range(2)]
            receiving = Running(drain_later, far, tag)
            with suppress(Interrupt), interrupting:
                for handle in handles:
                    handle.wait(timeout=SOON)
            for handle in handles:
                handle.wait(timeout=SOON)
            near.send(b"end", 1, tag=tag, timeout=SOON)
            assert list(map(len, receiving.result(SOON))) == [nbytes, nbytes]

        assert every_interrupt(run, step=3) >= 5


@pytest.mark.fault(37, "a receive that is interrupted loses nothing")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("src", [1, ANY_RANK])
@pytest.mark.parametrize("nbytes", [8, LEND_FROM])
def test_an_interrupt_anywhere_in_a_receive_loses_nothing(pair, src, nbytes, monkeypatch):
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)
    near, far = pair
    far.send(b"connected", 0)
    assert near.recv(1) == b"connected"
    numbers = iter(range(1 << 30))

    def run(interrupting):
        tag = next(numbers)
        sent = bytes([tag % 251]) * nbytes
        buffer = bytearray(nbytes)
        sending = far.isend(sent, 0, tag=tag)
        handle = None
        with suppress(Interrupt), interrupting:
            handle = near.irecv_into(buffer, src, tag=tag)
            handle.wait(timeout=SOON)
        if handle is None:
            gc.collect()  # what the exception held
            assert near.recv(1, tag=tag, timeout=SOON) == sent
        else:
            assert handle.wait(timeout=SOON) == nbytes
            assert handle.source == 1
            assert bytes(buffer) == sent
        sending.wait(timeout=SOON)
        assert not near.mesh.peers[1].inbox.wanted()

    assert every_interrupt(run, step=2) >= 30


@pytest.mark.fault(37, "memory of an interrupted isend is not read any more once it is changed")
def test_an_interrupt_anywhere_in_lending_in_the_background_takes_the_loan_back(monkeypatch):
    monkeypatch.setattr(lender, "_LOOK_FOR", 0.0)
    monkeypatch.setattr(lender, "_SHORTEST_NAP", 1e-3)
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)
    numbers = iter(range(1 << 30))
    with tcp_world(2) as (near, far):
        near.send(b"connected", 1, tag=1 << 40)

        def run(interrupting):
            tag = next(numbers)
            sent = np.full(LEND_FROM // 8, 1)
            handle = None
            with suppress(Interrupt, DeadlineExceededError), interrupting:
                handle = near.isend(sent, 1, tag=tag, timeout=0.002)
                handle.wait()
            if handle is not None:
                with pytest.raises(DeadlineExceededError):
                    handle.wait()
            sent[:] = 2
            near.send(b"end", 1, tag=tag, timeout=SOON)
            assert drain(far, tag) == []

        assert every_interrupt(run) >= 20


# -- many threads ----------------------------------------------------------------------------------


def come(handle, timeout):
    """Return a message if it comes in time; nothing refers to the handle afterwards."""
    with suppress(DeadlineExceededError):
        return handle.wait(timeout)
    return None


@pytest.mark.parametrize("kind", ["auto", "tcp", "simulated"])
def test_many_threads_get_every_message_once_and_in_order(kind):
    size, threads, each = 3, 3, 60
    sizes = [8, 300, 70_000, 400_000]
    with make_world(kind, size) as world:

        def send(backend, tag):
            chance = random.Random(backend.rank * 100 + tag)
            others = [rank for rank in range(size) if rank != backend.rank]
            handles = []
            for number in range(each):
                for other in others:
                    head = bytes([number]) * 8
                    data = head + bytes(chance.choice(sizes))
                    if chance.random() < 0.3:
                        backend.send(data, other, tag=tag, timeout=PATIENCE)
                    else:
                        handles.append(backend.isend(data, other, tag=tag, timeout=PATIENCE))
            for handle in handles:
                handle.wait()

        def receive(backend, tag):
            chance = random.Random(tag)
            seen = {rank: 0 for rank in range(size) if rank != backend.rank}
            for _ in range(each * (size - 1)):
                left = [rank for rank, count in seen.items() if count < each]
                src = ANY_RANK if chance.random() < 0.6 else chance.choice(left)
                handle = backend.irecv(src, tag=tag, timeout=PATIENCE)
                while (message := come(handle, chance.choice([0.0005, 0.01, None]))) is None:
                    if chance.random() < 0.3:  # dropped: the next one gets it
                        handle = None
                        handle = backend.irecv(ANY_RANK, tag=tag, timeout=PATIENCE)
                assert message[0] == seen[handle.source]
                seen[handle.source] += 1
            assert set(seen.values()) == {each}

        running = [
            Running(partial(function, backend, tag))
            for backend in world
            for tag in range(threads)
            for function in (send, receive)
        ]
        for one in running:
            one.result(120.0)


def test_threads_that_share_a_tag_get_every_message_once(three):
    first = three[0]
    count, got, lock = 200, [], threading.Lock()

    def receive():
        for _ in range(count // 2):
            source, message = first.recv_any(timeout=PATIENCE)
            with lock:
                got.append((source, bytes(message)))

    def send(backend):
        for number in range(count):
            backend.isend(b"%d" % number, 0)

    running = [Running(receive) for _ in range(4)] + [Running(send, b) for b in three[1:]]
    for one in running:
        one.result(60.0)
    assert sorted(got) == sorted((rank, b"%d" % n) for rank in (1, 2) for n in range(count))


# -- processes -------------------------------------------------------------------------------------


def test_a_process_that_dies_ends_only_what_needs_it():
    with runtime_folder_of_its_own(), process_world(3) as (first, second, third):
        of_any = first.start("recv_any", tag=1)
        of_third = first.start("recv", 2)
        third.kill()
        error = of_third.error()
        assert isinstance(error, PeerLostError)
        second.call("send", b"alive", 0, tag=1)
        assert of_any.result() == (1, b"alive")
        of_any = first.start("recv_any")
        second.call("close")
        error = of_any.error()
        assert isinstance(error, PeerLostError)
        assert (error.op, error.peer) == ("recv_any", 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_handle_is_of_no_use_in_a_forked_child():
    with tcp_world(2) as (near, far):
        handles = [near.irecv(1), near.irecv(ANY_RANK, tag=1)]
        pid = os.fork()
        if not pid:
            refused = 0
            for handle in handles:
                try:
                    handle.wait(timeout=1)
                except ForkedProcessError:
                    refused += 1
            del handle, handles
            os._exit(0 if refused == 2 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        for tag, handle in enumerate(handles):
            far.send(b"x", 0, tag=tag)
            assert handle.wait(timeout=SOON) == b"x"
