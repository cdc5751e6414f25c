"""Conformance checks of messages, timeouts, barriers, closing, and knowledge of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.clock import REAL_TIME
from rankwire.collectives import operations
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MessageTooLargeError,
    PeerLostError,
    RankwireError,
    SelfSendError,
    SizeMismatchError,
)
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.conformance.tools import (
    PATIENCE,
    SIZES,
    expect,
    leave,
    on_every_rank,
    run_in_worlds,
    until,
)
from rankwire.testing.ranks import MakeWorld, in_parallel

# -- ranks -----------------------------------------------------------------------------------------


def ranks_count_from_zero(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        assert [backend.rank for backend in world] == [0, 1, 2]
        assert {backend.world_size for backend in world} == {3}


def a_world_of_one_works(make_world: MakeWorld) -> None:
    with make_world(1) as (alone,):
        assert (alone.rank, alone.world_size) == (0, 1)
        alone.barrier()


def a_world_of_none_is_refused(make_world: MakeWorld) -> None:
    error = expect(InvalidWorldSizeError, lambda: make_world(0).__enter__())
    assert error.world_size == 0


def wrong_ranks_are_refused(make_world: MakeWorld) -> None:
    with make_world(2) as (first, _):
        for wrong in (2, 5, -1):
            error = expect(InvalidRankError, partial(first.send, b"x", wrong))
            assert (error.invalid_rank, error.world_size) == (wrong, 2)
            array = expect(InvalidRankError, partial(first.send_array, np.ones(1), wrong))
            assert str(wrong) in str(array)
            expect(InvalidRankError, partial(first.recv, wrong))
            expect(InvalidRankError, partial(first.recv_array, wrong))


def sending_to_oneself_is_refused(make_world: MakeWorld) -> None:
    with make_world(2) as (first, _):
        expect(SelfSendError, lambda: first.send(b"x", 0))
        expect(SelfSendError, lambda: first.recv(0))
        expect(SelfSendError, lambda: first.sendrecv(np.ones(1), 0))
    with make_world(1) as (alone,):
        expect(SelfSendError, lambda: alone.send_array(np.ones(1), 0))


# -- messages --------------------------------------------------------------------------------------


@on_every_rank(2)
def messages_have_any_length(backend: Backend) -> None:
    for length in (0, 1, 7, 65503, 65504, 65505, 65536, 1_000_003):
        message = bytes([length % 251]) * length
        if backend.rank == 0:
            backend.send(message, 1)
        else:
            assert backend.recv(0) == message


def pieces_arrive_as_one(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        first.send([b"one ", bytearray(b"message "), memoryview(b"in pieces")], 1)
        assert second.recv(0) == b"one message in pieces"


def messages_of_a_tag_keep_their_order(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for number in range(200):
            first.send(number.to_bytes(2), 1, tag=number % 2)
        for tag in (1, 0):
            got = [int.from_bytes(second.recv(0, tag=tag)) for _ in range(100)]
            assert got == list(range(tag, 200, 2))


def the_sender_may_reuse_its_buffer(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        for nbytes in (8, 50_000):
            buffer = bytearray(b"a" * nbytes)
            first.send(buffer, 1)
            buffer[:] = b"b" * nbytes
            assert second.recv(0) == b"a" * nbytes


def a_receiver_owns_its_message(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        first.send(b"abc", 1)
        message = second.recv(0)
        message[0] = ord("x")
        assert message == b"xbc"


@on_every_rank(4)
def every_pair_talks_directly(backend: Backend) -> None:
    others = [peer for peer in range(4) if peer != backend.rank]
    for peer in others:
        backend.send(f"{backend.rank} to {peer}".encode(), peer)
    for peer in others:
        assert backend.recv(peer) == f"{peer} to {backend.rank}".encode()


@on_every_rank(2)
def a_waiting_receive_does_not_delay_a_send(backend: Backend) -> None:
    other = 1 - backend.rank

    def send() -> None:
        REAL_TIME.sleep(0.05)  # both receives wait by now
        backend.send(b"go on", other, tag=1)

    in_parallel([send, lambda: backend.recv(other, tag=1)], timeout=10)


def too_large_a_message_is_refused_at_once(make_world: MakeWorld) -> None:
    with make_world(2, max_message_nbytes=1000) as (first, second):
        error = expect(MessageTooLargeError, lambda: first.send(bytes(1001), 1))
        assert (error.nbytes, error.limit) == (1001, 1000)
        first.send(bytes(1000), 1)
        assert len(second.recv(0)) == 1000


# -- receiving into a buffer -----------------------------------------------------------------------


def a_message_is_received_into_a_buffer(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        first.send(b"abcd", 1)
        buffer = bytearray(b"\xff" * 4)
        assert second.recv_into(buffer, 0) == 4
        assert buffer == b"abcd"


def a_mismatch_loses_nothing(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        first.send(bytes(16), 1)
        first.send(b"next", 1)
        buffer = bytearray(b"\xff" * 32)
        error = expect(SizeMismatchError, lambda: second.recv_into(buffer, 0))
        assert (error.expected, error.got) == (32, 16)
        assert buffer == b"\xff" * 32
        assert second.recv(0) == bytes(16)
        assert second.recv(0) == b"next"


# -- timeouts --------------------------------------------------------------------------------------


def zero_polls(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        expect(DeadlineExceededError, lambda: second.recv(0, timeout=0))
        first.send(b"now", 1)

        def arrives() -> bool:  # not the moment it is sent
            with suppress(DeadlineExceededError):
                return second.recv(0, timeout=0) == b"now"
            return False

        until(arrives)


def a_time_limit_is_exact_and_harmless(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        begin = REAL_TIME.now()
        error = expect(DeadlineExceededError, lambda: second.recv(0, tag=3, timeout=0.15))
        assert 0.14 < REAL_TIME.now() - begin < 5.0
        assert (error.limit, error.op, error.rank, error.tag) == (0.15, "recv", 1, 3)
        assert isinstance(error, TimeoutError)
        first.send(b"late", 1, tag=3)
        assert second.recv(0, tag=3) == b"late"


def a_second_receiver_has_its_own_limit(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):

        def be_late() -> None:
            REAL_TIME.sleep(0.05)  # the other one waits by now
            begin = REAL_TIME.now()
            expect(DeadlineExceededError, lambda: second.recv(0, tag=2, timeout=0.1))
            assert REAL_TIME.now() - begin < 5.0
            first.send(b"x", 1, tag=1)

        in_parallel([be_late, lambda: second.recv(0, tag=1)], timeout=20)


def a_send_that_nobody_receives_ends_in_time(make_world: MakeWorld) -> None:
    with make_world(2) as (first, _):

        def send_for_ever() -> None:
            while True:
                first.send(bytes(1 << 20), 1, timeout=0.2)

        expect(DeadlineExceededError, send_for_ever)


# -- barriers --------------------------------------------------------------------------------------


def no_rank_leaves_a_barrier_before_all_have_entered(make_world: MakeWorld) -> None:
    for size in SIZES:
        entered: list[int] = []

        def each(backend: Backend, size: int = size, entered: list[int] = entered) -> None:
            for episode in range(1, 20):
                entered.append(backend.rank)
                backend.barrier()
                assert len(entered) >= size * episode
                operations.barrier(backend)  # the same

        run_in_worlds(make_world, each, (size,))


def a_barrier_names_the_missing(make_world: MakeWorld) -> None:
    with make_world(4) as world:

        def wait(rank: int) -> list[int]:
            try:
                world[rank].barrier(timeout=1.5)
            except (DeadlineExceededError, CollectiveAbortedError) as error:  # the first, then all
                return error.waiting_for
            raise AssertionError("it has not waited for rank 2")

        assert in_parallel([partial(wait, rank) for rank in (0, 1, 3)]) == [[2]] * 3
        expect(CollectiveAbortedError, world[2].barrier)  # the others have aborted it
        in_parallel([backend.barrier for backend in world])


@on_every_rank(3)
def barriers_and_messages_never_mix(backend: Backend) -> None:
    right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
    for number in range(50):
        backend.send(bytes([number]), right)
        backend.barrier()
    for number in range(50):
        assert backend.recv(left) == bytes([number])


# -- threads and closing ---------------------------------------------------------------------------


def many_threads_each_get_their_own(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):

        def send(tag: int) -> None:
            for number in range(50):
                first.send(f"{tag}/{number}".encode(), 1, tag=tag)

        def receive(tag: int) -> None:
            for number in range(50):
                assert second.recv(0, tag=tag) == f"{tag}/{number}".encode()

        in_parallel([partial(do, tag) for tag in range(12) for do in (receive, send)])


def close_wakes_whoever_waits(make_world: MakeWorld) -> None:
    with make_world(2) as (first, _):

        def close() -> None:
            REAL_TIME.sleep(0.1)  # the others wait by now
            first.close()
            first.close()

        waits = (lambda: first.recv(1), lambda: first.recv(1, tag=1), first.barrier)
        actions: list[Callable[[], object]] = [close]
        actions += [partial(expect, ChannelClosedError, wait) for wait in waits]
        in_parallel(actions, timeout=10)
        expect(ChannelClosedError, lambda: first.send(b"x", 1))
        expect(ChannelClosedError, lambda: first.recv(1))


def closing_again_does_nothing(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        agent = RpcAgent(first)
        for _ in range(2):
            agent.close()
        first.close()
        first.close(error=ValueError("the second time"))  # the first close has told the others why
        assert first.closed
        assert not second.closed
        error = expect(RankwireError, lambda: second.recv(0, timeout=0.2))
        assert "the second time" not in str(error)


# -- what ranks know of each other -----------------------------------------------------------------


def at_first_all_are_alive(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        for backend in world:
            assert backend.alive == (0, 1, 2)
            status = backend.status()
            assert (status.rank, status.world_size) == (backend.rank, 3)
            assert {peer.state for peer in status.peers.values()} == {"up"}
            assert sorted([*status.peers, backend.rank]) == [0, 1, 2]


def the_status_shows_what_a_rank_waits_for(make_world: MakeWorld) -> None:
    with make_world(2, timeout=PATIENCE) as (first, second):
        waiting = runtime.Thread(target=partial(first.recv, 1, 5))
        waiting.start()
        wanted = ("a message with tag 5",)
        until(lambda: first.status().peers[1].waiting_for == wanted)
        assert first.status().waiting_on == [1]
        assert "a message with tag 5" in str(first.status())
        second.send(b"", 0, 5)
        waiting.join()
        assert first.status().waiting_on == []


def unreceived_messages_are_reported(make_world: MakeWorld) -> None:
    with make_world(2, timeout=PATIENCE) as (first, second):
        for tag in (9, 7, 9):
            second.send(b"", 0, tag)
        second.send(b"last", 0, 1)
        assert first.recv(1, 1) == b"last"  # the others were read before it
        late = expect(DeadlineExceededError, partial(first.recv, 1, 5, 0.05))
        waiting = "3 messages are waiting to be received from rank 1: 1 with tag 7, 2 with tag 9"
        assert waiting in str(late)
        assert first.status().peers[1].unreceived == ("1 with tag 7", "2 with tag 9")
        assert "unreceived: 1 with tag 7, 2 with tag 9" in str(first.status())
        for tag in (7, 9, 9):
            first.recv(1, tag)
        assert first.status().peers[1].unreceived == ()


def the_error_of_a_failed_rank_reaches_the_others(make_world: MakeWorld) -> None:
    with make_world(3, timeout=PATIENCE) as world:
        told: list[PeerLostError] = []
        world[0].on_peer_lost(told.append)
        try:
            raise ValueError("bad batch")
        except ValueError as error:
            leave(world[1], error)
        for other in (world[0], world[2]):
            lost = expect(PeerLostError, partial(other.recv, 1))
            assert lost.peer == 1
            assert lost.reason == "it raised ValueError: bad batch"
            assert "the_error_of_a_failed_rank" in lost.remote_traceback
            until(lambda other=other: other.alive == (0, 2))  # type: ignore[misc]
            assert other.status().peers[1].state == "lost"
        until(lambda: [error.peer for error in told] == [1])
        late: list[PeerLostError] = []
        world[0].on_peer_lost(late.append)
        until(lambda: [error.peer for error in late] == [1])


def a_rank_that_leaves_is_not_lost(make_world: MakeWorld) -> None:
    with make_world(3, timeout=PATIENCE) as world:
        told: list[PeerLostError] = []
        world[0].on_peer_lost(told.append)
        leave(world[2])
        expect(ChannelClosedError, lambda: world[0].recv(2))
        until(lambda: world[0].alive == (0, 1))
        assert world[0].status().peers[2].state == "left"
        assert told == []
