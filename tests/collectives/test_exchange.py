"""The messages of one operation: blocks and pieces, envelopes, patience, what is lent."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sums import on_all, run_algorithm

from rankwire.backends.base import Backend
from rankwire.collectives import exchange
from rankwire.collectives.exchange import (
    Exchange,
    Piece,
    blocks,
    receive_array,
    receive_pieces,
    scratch,
    tag_of,
)
from rankwire.errors import CollectiveMismatchError, DeadlineExceededError, SizeMismatchError
from rankwire.testing import simulated_world
from rankwire.wire.frames import Channel, UnreadPayload
from real_time import Deadline


class Lying(UnreadPayload):
    """A payload that lies with its sender; it counts how it is used."""

    def __init__(self, payload):
        self.payload = payload
        self.translate = None
        self.reads = []
        self.returned = 0

    def __len__(self):
        return len(self.payload)

    def read_into(self, start, view):
        self.reads.append((start, len(view)))
        view[:] = self.payload[start : start + len(view)]

    def whole(self):
        self.release()
        return bytearray(self.payload)

    def release(self):
        self.returned += 1


# -- blocks ----------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.sampled_from(["u1", "f2", "f4", "f8", "c16"]))
def test_blocks_cover_every_element_once(count, dtype):
    dtype = np.dtype(dtype)
    covered = [i for start, stop in blocks(count, dtype) for i in range(start, stop)]
    assert covered == list(range(count))


def test_blocks_have_the_size_that_was_measured(monkeypatch):
    monkeypatch.setattr(exchange, "BLOCK_NBYTES", 100)
    assert list(blocks(30, np.dtype("f8"))) == [(0, 12), (12, 24), (24, 30)]
    monkeypatch.setattr(exchange, "BLOCK_NBYTES", 4)
    assert list(blocks(3, np.dtype("f8"))) == [(0, 1), (1, 2), (2, 3)]


def test_scratch_memory_holds_a_block_and_is_a_threads_own():
    first, second = scratch(np.dtype("f4"))
    assert first.nbytes == second.nbytes == exchange.BLOCK_NBYTES
    assert not np.shares_memory(first, second)
    assert np.shares_memory(first, scratch(np.dtype("c16"))[0])
    others = []
    thread = threading.Thread(target=lambda: others.extend(scratch(np.dtype("f4"))))
    thread.start()
    thread.join()
    assert not any(np.shares_memory(first, other) for other in others)


# -- pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytearray, Lying])
def test_a_piece_is_read_in_blocks_or_as_a_whole(kind):
    array = np.arange(10, dtype=np.int32)
    piece = Piece(kind(array.tobytes()), array.dtype)
    memory = np.empty(5, np.int32)
    assert piece.block(3, 7, memory).tolist() == [3, 4, 5, 6]
    assert piece.block(9, 10, memory).tolist() == [9]
    out = np.empty(10, np.int32)
    piece.copy_into(out)
    assert out.tolist() == list(range(10))


def test_a_piece_that_lies_with_its_sender_is_read_once_and_given_back():
    payload = Lying(np.arange(10, dtype=np.int32).tobytes())
    piece = Piece(payload, np.dtype(np.int32))
    piece.block(3, 7, np.empty(5, np.int32))
    assert payload.reads == [(12, 16)]
    assert not payload.returned
    piece.release()
    assert payload.returned == 1
    payload = Lying(np.arange(10, dtype=np.int32).tobytes())
    Piece(payload, np.dtype(np.int32)).copy_into(np.empty(10, np.int32))
    assert (payload.reads, payload.returned) == ([(0, 40)], 1)


def test_an_empty_piece():
    piece = Piece(bytearray(), np.dtype("f8"))
    piece.copy_into(np.empty(0))
    piece.release()


# -- who is there ----------------------------------------------------------------------------------


def test_the_others_begin_with_the_next_one():
    results, _ = run_algorithm(4, lambda x: (x.rank, x.size, x.others))
    assert results == [(0, 4, [1, 2, 3]), (1, 4, [2, 3, 0]), (2, 4, [3, 0, 1]), (3, 4, [0, 1, 2])]
    assert run_algorithm(1, lambda x: x.others)[0] == [[]]


@pytest.mark.parametrize(("hosts", "expected"), [("aaa", True), ("aab", False), ("baa", False)])
def test_one_host_or_several(monkeypatch, hosts, expected):
    monkeypatch.setattr(Backend, "hosts", property(lambda self: list(hosts)))
    results, _ = run_algorithm(3, lambda x: x.is_one_host)
    assert results == [expected] * 3


# -- envelopes -------------------------------------------------------------------------------------


class Watching(Exchange):
    """Counts the looks, and may have a reason to give up."""

    def __init__(self, backend):
        super().__init__(backend, backend.rank, backend.world)
        self.looks = []
        self.reason = None

    def look(self, src):
        self.looks.append(src)
        if self.reason is not None:
            raise self.reason

    def too_late(self, src):
        return DeadlineExceededError(0.0, waiting_for=[src])

    def begin_part(self, part):
        self.tag = tag_of(f"part {part}", 0)


def exchange_of(backend, seconds=20.0, words="test()"):
    exchange = Watching(backend)
    exchange.tag, exchange.deadline = tag_of(words, 0), Deadline(seconds)
    return exchange


def test_a_message_has_the_envelope_of_its_operation_and_step(pair):
    array = np.arange(3.0)
    exchange_of(pair[0]).send(1, 5, array)
    tag = tag_of("test()", 0) + 5
    payload = pair[1].messages.receive(0, (pair[1].group, Channel.COLLECTIVE, tag), Deadline(10.0))
    assert payload == array.tobytes()


def test_steps_and_operations_never_mix(pair):
    first, other = exchange_of(pair[0]), exchange_of(pair[0], words="other()")
    other.send(1, 0, np.array([3]))
    first.send(1, 1, np.array([2]))
    first.send(1, 0, np.array([1]))
    here, there = exchange_of(pair[1]), exchange_of(pair[1], words="other()")
    like = np.empty(1, int)
    assert receive_array(here, 0, 0, like) == [1]
    assert receive_array(here, 0, 1, like) == [2]
    assert receive_array(there, 0, 0, like) == [3]


def test_parts_of_an_operation_begin_their_steps_again(pair):
    first, second = map(exchange_of, pair)
    for part in (0, 1):
        first.begin_part(part)
        first.send(1, 0, np.array([part]))
    for part in (1, 0):
        second.begin_part(part)
        assert receive_array(second, 0, 0, np.empty(1, int)) == [part]


def test_pieces_of_all_others_by_rank():
    def each(backend):
        x = exchange_of(backend)
        for dst in x.others:
            x.send(dst, 0, np.full(2, backend.rank))
        pieces = receive_pieces(x, 0, [np.empty(2, int)] * 3)
        return [
            None if piece is None else piece.block(0, 2, np.empty(0)).tolist() for piece in pieces
        ]

    with simulated_world(3) as world:
        results = on_all(world, each)
    assert results == [[None, [1, 1], [2, 2]], [[0, 0], None, [2, 2]], [[0, 0], [1, 1], None]]


@pytest.mark.parametrize("kind", [bytearray, Lying])
def test_an_array_is_received_as_a_whole_or_into_another_one(pair, monkeypatch, kind):
    sent = np.arange(10, dtype=np.int32)
    payload = kind(sent.tobytes())
    x = exchange_of(pair[1])
    monkeypatch.setattr(type(pair[1].messages), "receive", lambda *_, nbytes: payload)
    received = receive_array(x, 0, 0, sent)
    assert received.dtype == sent.dtype
    assert received.tolist() == list(range(10))
    out = np.empty(10, np.int32)
    x.receive_into(0, 0, out)
    assert out.tolist() == list(range(10))
    if kind is Lying:
        assert payload.returned == 2


def test_a_message_of_another_size_is_not_taken(pair):
    exchange_of(pair[0]).send(1, 0, np.ones(3))
    with pytest.raises(SizeMismatchError):
        exchange_of(pair[1]).receive_piece(0, 0, np.empty(4))


def test_bytes_in_pieces_are_one_message(pair):
    exchange_of(pair[0]).send_buffers(1, 0, (b"ab", b"", b"cd"), 4)
    assert exchange_of(pair[1]).receive(0, 0) == b"abcd"


# -- patience --------------------------------------------------------------------------------------


def test_who_waits_looks_up_now_and_then(pair, monkeypatch):
    monkeypatch.setattr(exchange, "LOOK_EVERY", 0.01)
    waiting = exchange_of(pair[1])
    sender = threading.Timer(0.3, lambda: exchange_of(pair[0]).send(1, 0, np.array([7])))
    begin = time.monotonic()
    sender.start()
    assert receive_array(waiting, 0, 0, np.empty(1, int)) == [7]
    seconds = time.monotonic() - begin
    sender.join()
    assert 2 <= len(waiting.looks) <= seconds / 0.01 + 2


def test_who_does_not_wait_does_not_look(pair):
    exchange_of(pair[0]).send(1, 0, np.array([7]))
    waiting = exchange_of(pair[1])
    waiting.receive_piece(0, 0, np.empty(1, int))
    assert waiting.looks == []


def test_what_a_look_finds_ends_the_wait(pair):
    waiting = exchange_of(pair[1])
    waiting.reason = CollectiveMismatchError("elsewhere")
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatchError):
        waiting.receive(0, 0)
    assert time.monotonic() - begin < 5.0


def test_the_deadline_is_that_of_the_whole_operation(pair):
    waiting = exchange_of(pair[1], seconds=0.12)
    begin = time.monotonic()
    for step in (0, 1):
        with pytest.raises(DeadlineExceededError) as caught:
            waiting.receive(0, step)
        assert caught.value.waiting_for == [0]
    assert 0.11 < time.monotonic() - begin < 5.0


# -- what is lent ----------------------------------------------------------------------------------


class Lending:
    """A backend whose messages stay with their sender until ``taken`` is set."""

    rank, world_size, group, max_message_nbytes = 0, 3, 0, 1 << 30

    def __init__(self):
        self.offers = []
        self.mesh = self.messages = self
        self.world = range(self.world_size)

    def offer(self, dst, *message, check=None):
        self.offers.append(OfferTo(dst))
        return self.offers[-1]


class OfferTo:
    def __init__(self, dst):
        self.dst = dst
        self.taken = threading.Event()
        self.revoked = 0

    def wait(self, deadline):
        return self.taken.wait(deadline.sleep_limit())

    def is_over(self):
        return self.taken.is_set()

    def revoke(self):
        self.revoked += 1
        return self.is_over()


def test_settling_waits_until_everything_has_been_read(monkeypatch):
    monkeypatch.setattr(exchange, "LOOK_EVERY", 0.01)
    backend = Lending()
    x = exchange_of(backend)
    x.send(1, 0, np.ones(3))
    x.send(2, 0, np.ones(3))
    backend.offers[1].taken.set()
    begin = time.monotonic()
    threading.Timer(0.3, backend.offers[0].taken.set).start()
    x.settle()
    assert time.monotonic() - begin > 0.25
    assert 1 in x.looks
    assert [offer.revoked for offer in backend.offers] == [1, 1]
    x.settle()  # there is nothing left
    x.revoke()
    assert [offer.revoked for offer in backend.offers] == [1, 1]


def test_settling_ends_in_time_and_says_who_does_not_read(monkeypatch):
    monkeypatch.setattr(exchange, "LOOK_EVERY", 0.01)
    backend = Lending()
    x = exchange_of(backend, seconds=0.05)
    x.send(2, 0, np.ones(3))
    with pytest.raises(DeadlineExceededError) as caught:
        x.settle()
    assert caught.value.waiting_for == [2]
    x.revoke()
    assert backend.offers[0].revoked == 1


def test_an_operation_that_fails_takes_back_what_was_not_read():
    backend = Lending()
    x = exchange_of(backend)
    x.send(1, 0, np.ones(3))
    x.reason = CollectiveMismatchError("elsewhere")
    with pytest.raises(CollectiveMismatchError):
        x.settle()
    x.revoke()
    assert backend.offers[0].revoked == 1


def test_what_is_sent_is_the_callers_own_memory():
    sent = []
    backend = Lending()

    def offer(dst, envelope, message, deadline, check):
        sent.append(message)

    backend.messages.offer = offer
    array = np.arange(1000.0)
    exchange_of(backend).send(1, 0, array)
    ((buffers, nbytes),) = sent
    assert nbytes == 8000
    assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), array)


def test_a_few_bytes_are_copied_at_once_or_none_at_all():
    sent = []
    backend = Lending()
    backend.messages.offer = lambda dst, envelope, message, deadline, check: sent.append(message)
    for array in (np.arange(4.0), np.empty(0)):
        exchange_of(backend).send(1, 0, array)
        assert sent.pop() == ((array.tobytes(),), array.nbytes)
