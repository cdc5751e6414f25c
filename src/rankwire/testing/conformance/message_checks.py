"""Conformance checks of message handles, and of receiving from any rank."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial

import numpy as np

from rankwire.backends.base import Backend
from rankwire.backends.handles import MessageHandle
from rankwire.backends.posting import ANY_RANK
from rankwire.backends.sub import SubBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    MessageTooLargeError,
    SelfSendError,
    SizeMismatchError,
)
from rankwire.testing.conformance.tools import (
    expect,
    leave,
    on_every_rank,
    run_all,
    until,
)
from rankwire.testing.ranks import MakeWorld, in_parallel

_LARGE = 3 << 20  # bytes: more than a stream takes at once, and enough for single copy


# -- in the background -----------------------------------------------------------------------------


@on_every_rank(2, 3)
def messages_go_on_in_the_background(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    to, source = (rank + 1) % size, (rank - 1) % size
    for nbytes in (0, 8, 70_000, _LARGE):
        sending = backend.isend(bytes([rank]) * nbytes, to, tag=nbytes)
        coming = backend.irecv(source, tag=nbytes)
        assert coming.wait() == bytes([source]) * nbytes
        assert sending.wait() is None
        assert (coming.source, sending.source) == (source, None)
        assert coming.wait() == bytes([source]) * nbytes, "it can be asked for again"


@on_every_rank(2)
def arrays_come_into_place_in_the_background(backend: Backend) -> None:
    other = 1 - backend.rank
    sent = np.arange(_LARGE // 8) + backend.rank
    out, buffer = np.zeros_like(sent), bytearray(sent.nbytes)
    coming = [
        backend.irecv_array(other, out=out),
        backend.irecv_array(other),
        backend.irecv_into(buffer, other, tag=1),
    ]
    sending = [
        backend.isend_array(sent, other),
        backend.isend_array(sent, other),
        backend.isend(sent.view(np.uint8).data, other, tag=1),
    ]
    assert coming[0].wait() is out
    assert coming[2].wait() == sent.nbytes
    for got in (out, coming[1].wait(), np.frombuffer(buffer, sent.dtype)):
        assert np.array_equal(got, np.arange(_LARGE // 8) + other)
    for handle in sending:
        handle.wait()


@on_every_rank(2, 3)
def all_may_send_before_anyone_receives(backend: Backend) -> None:
    others = [rank for rank in range(backend.world_size) if rank != backend.rank]
    sending: list[MessageHandle] = []
    for number in range(40):
        data = bytes([number]) * 200_000
        sending += [backend.isend(data, other) for other in others]
    for number in range(40):  # no send is waited for before everything has come
        for other in others:
            assert backend.irecv(other).wait() == bytes([number]) * 200_000
    for handle in sending:
        handle.wait()


def messages_leave_in_the_order_of_the_calls(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        handles, sizes = [], [8, 100_000, _LARGE, 8, 1_000_000] * 8

        def send() -> None:
            for number, nbytes in enumerate(sizes):
                data = bytes([number]) * nbytes
                if number % 5 == 4:
                    first.send(data, 1)
                else:
                    handles.append(first.isend(data, 1))
            for handle in handles:
                handle.wait()

        def receive() -> None:
            for number, nbytes in enumerate(sizes):
                assert second.recv(0) == bytes([number]) * nbytes

        in_parallel([send, receive])


def receives_are_served_in_the_order_of_the_calls(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        coming = [second.irecv(0) for _ in range(10)]
        for number in range(10):
            first.send(bytes([number]), 1)
        for number in reversed(range(10)):
            assert coming[number].wait() == bytes([number])


def a_handle_tells_whether_it_is_done(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        coming = second.irecv(0)
        assert not coming.done()
        sending = first.isend(b"x", 1)
        until(coming.done)
        assert coming.wait(timeout=0) == b"x"
        until(sending.done)
        sending.wait(timeout=0)


def a_wait_that_is_too_short_changes_nothing(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for src in (0, ANY_RANK):
            coming = second.irecv(src, tag=3)
            error = expect(DeadlineExceededError, partial(coming.wait, 0.01))
            assert (error.op, error.rank, error.tag) == ("irecv", 1, 3)
            assert error.waiting_for == [0]
            assert error.waited is not None
            first.send(b"late", 1, tag=3)
            assert coming.wait() == b"late"


def the_limit_of_a_handle_counts_from_the_call(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for src in (0, ANY_RANK):
            coming = second.irecv(src, timeout=0.05)
            REAL_TIME.sleep(0.06)
            before = REAL_TIME.now()
            expect(DeadlineExceededError, coming.wait)
            assert REAL_TIME.now() - before < 2.0
            first.send(b"for the next", 1)
            expect(DeadlineExceededError, coming.wait)
            assert second.recv(0) == b"for the next"


def a_receive_that_is_dropped_leaves_its_message(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for src in (0, ANY_RANK):
            for number in range(3):
                first.send(bytes([number]), 1)
            dropped = [second.irecv(src) for _ in range(2)]
            first.send(b"behind them", 1, tag=1)
            assert second.recv(0, tag=1) == b"behind them"  # so the earlier ones have come
            del dropped
            gc.collect()
            assert [second.recv(0) for _ in range(3)] == [b"\0", b"\1", b"\2"]


def a_message_whose_handle_is_dropped_arrives(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for number, nbytes in enumerate([8, 100_000, _LARGE, _LARGE, 8]):
            first.isend(bytes([number]) * nbytes, 1)
        gc.collect()
        for number, nbytes in enumerate([8, 100_000, _LARGE, _LARGE, 8]):
            assert second.recv(0) == bytes([number]) * nbytes


def a_message_that_nobody_takes_in_time_counts_as_not_sent(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        kept = [first.isend(bytes([1]) * _LARGE, 1, timeout=30.0) for _ in range(40)]
        late = first.isend(bytearray([2]) * _LARGE, 1, timeout=0.05)
        error = expect(DeadlineExceededError, late.wait)
        assert not error.may_have_arrived
        behind = first.isend(b"end", 1)
        got = [second.recv(0) for _ in kept]
        assert got == [bytes([1]) * _LARGE] * len(kept)
        assert second.recv(0) == b"end"
        for handle in (*kept, behind):
            handle.wait()


def a_wrong_size_in_the_background_is_an_error(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for src in (0, ANY_RANK):
            coming = second.irecv_into(bytearray(3), src)
            first.send(b"four", 1)
            error = expect(SizeMismatchError, coming.wait)
            assert error.op == "irecv_into"
            expect(SizeMismatchError, coming.wait)
            assert second.recv(0) == b"four"


def wrong_arguments_start_nothing(make_world: MakeWorld) -> None:
    with make_world(2, max_message_nbytes=1 << 20) as (first, _):
        expect(InvalidRankError, partial(first.isend, b"x", 2))
        expect(InvalidRankError, partial(first.irecv, -1))
        expect(SelfSendError, partial(first.isend, b"x", 0))
        expect(SelfSendError, partial(first.irecv, 0))
        expect(ConfigurationError, partial(first.isend, memoryview(bytes(8))[::2], 1))
        expect(ConfigurationError, partial(first.irecv, 1, tag=-1))
        expect(ConfigurationError, partial(first.irecv, ANY_RANK, tag=-1))
        expect(ConfigurationError, partial(first.irecv, 1, timeout=-1))
        expect(ConfigurationError, partial(first.irecv_into, b"read-only", 1))
        expect(ConfigurationError, partial(first.irecv_array, 1, out=np.array([None])))
        expect(MessageTooLargeError, partial(first.isend, bytes(2 << 20), 1))


def closing_ends_handles(make_world: MakeWorld) -> None:
    with make_world(2) as (first, _):
        coming = [first.irecv(1), first.irecv_into(bytearray(_LARGE), 1), first.irecv(ANY_RANK)]
        sending = [first.isend(bytes(_LARGE), 1) for _ in range(60)]
        first.close()
        for handle in coming:
            assert handle.done()
            error = expect(ChannelClosedError, handle.wait)
            assert error.rank == 0
        for handle in sending:
            with suppress(ChannelClosedError):  # it may have been sent
                handle.wait()


# -- from any rank ---------------------------------------------------------------------------------


def _from_any(backend: Backend, tag: int = 0) -> tuple[int, bytes]:
    source, message = backend.recv_any(tag)
    return source, bytes(message)


@on_every_rank(2, 3, 4)
def messages_of_any_rank_are_received(backend: Backend) -> None:
    size, rank = backend.world_size, backend.rank
    others = [other for other in range(size) if other != rank]
    for nbytes in (8, 100_000, _LARGE):
        sending = [
            backend.isend_array(np.full(nbytes // 8, rank * 10 + number), other, tag=nbytes)
            for number in range(3)
            for other in others
        ]
        seen: dict[int, list[int]] = {}
        for _ in range(3 * len(others)):
            handle = backend.irecv_array(ANY_RANK, tag=nbytes)
            array = handle.wait()
            assert array.size == nbytes // 8
            assert handle.source is not None
            seen.setdefault(handle.source, []).append(int(array[-1]))
        assert seen == {other: [other * 10, other * 10 + 1, other * 10 + 2] for other in others}
        for handle in sending:
            handle.wait()


def every_receive_takes_any_rank(make_world: MakeWorld) -> None:
    with make_world(3) as (first, second, third):
        second.send(b"one", 0)
        assert first.recv(ANY_RANK) == b"one"
        third.send(b"two", 0)
        buffer = bytearray(3)
        assert first.recv_into(buffer, ANY_RANK) == 3
        assert buffer == b"two"
        second.send_array(np.arange(5), 0)
        out = np.zeros(5, np.int64)
        assert first.recv_array(ANY_RANK, out=out) is out
        assert out.tolist() == [0, 1, 2, 3, 4]
        third.send(b"three", 0, tag=7)
        assert _from_any(first, tag=7) == (2, b"three")
        error = expect(DeadlineExceededError, partial(first.recv_any, tag=7, timeout=0.01))
        assert (error.op, error.waiting_for) == ("recv_any", [1, 2])


def no_rank_is_starved(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        for backend in world[1:]:
            for _ in range(50):
                backend.send(b"x", 0)
            backend.send(b"all sent", 0, tag=1)
        for source in (1, 2, 3):
            world[0].recv(source, tag=1)
        got = [world[0].recv_any()[0] for _ in range(30)]
        assert list(map(got.count, (1, 2, 3))) == [10, 10, 10], got


def what_any_rank_did_not_take_is_there_for_one(make_world: MakeWorld) -> None:
    with make_world(3) as (first, second, third):
        coming = first.irecv(ANY_RANK)
        second.send(b"second", 0)
        until(coming.done)
        third.send(b"third", 0)
        assert first.recv(2) == b"third"
        assert (coming.wait(), coming.source) == (b"second", 1)


def a_receive_from_any_rank_waits_for_the_last(make_world: MakeWorld) -> None:
    with make_world(3) as (first, second, third):
        coming = first.irecv(ANY_RANK)
        second.send(b"before", 0, tag=1)
        leave(second)
        assert first.recv(1, tag=1) == b"before"
        until(lambda: first.failure_of(1) is not None)
        assert not coming.done()
        third.send(b"still here", 0)
        assert (coming.wait(), coming.source) == (b"still here", 2)
        again = first.irecv(ANY_RANK)
        leave(third)
        expect(ChannelClosedError, again.wait)


def messages_of_another_group_are_not_taken(make_world: MakeWorld) -> None:
    with make_world(3) as world:

        def each(backend: Backend) -> None:
            if backend.rank == 0:
                backend.send(b"of the world", 2)
                return
            with SubBackend(backend, [1, 2]) as group:
                if group.rank == 0:
                    group.send(b"of the group", 1)
                    assert _from_any(group) == (1, b"answer")
                    return
                handle = group.irecv(ANY_RANK)
                assert (handle.wait(), handle.source) == (b"of the group", 0)
                error = expect(DeadlineExceededError, partial(group.recv_any, timeout=0.05))
                assert error.waiting_for == [0]
                assert _from_any(backend) == (0, b"of the world")
                group.send(b"answer", 0)

        run_all(world, each)


def alone_there_is_nobody_to_receive_from(make_world: MakeWorld) -> None:
    with make_world(1) as (alone,):
        expect(ConfigurationError, alone.recv_any)
