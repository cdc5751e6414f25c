"""Collectives in shared memory: the results of numpy, and those of messages bit for bit."""

import numpy as np
import pytest
from sums import everywhere

import rankwire
from faults.sizes import trials
from random_collectives import SIZES
from rankwire.collectives import algorithms, slot_algorithms
from rankwire.testing import tcp_world
from rankwire.transports.shared_memory import CAN_SHARE
from worlds import process_world

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only")

RANDOM = "__import__('random_collectives').run(backend, seed, count, sizes)"
PATIENCE = 120.0


WORLDS = [(2, 8 << 20), (3, 8 << 20), (4, 1 << 18)]  # ranks, and memory for a group


def do_at_random(world_size, nbytes, count):
    with process_world(world_size, segment_nbytes=nbytes) as ranks:
        options = {"seed": world_size, "count": count, "sizes": SIZES}
        commands = [rank.start("eval", RANDOM, **options) for rank in ranks]
        done = [command.result(PATIENCE + count / 20) for command in commands]
        assert sum(done) >= count


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("world_size", "nbytes"), WORLDS)
def test_random_operations_in_groups_give_what_numpy_gives(world_size, nbytes):
    """With little memory some go by messages, and the next ones by slots again."""
    do_at_random(world_size, nbytes, trials(150, 150, quick=60))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("world_size", "nbytes"), WORLDS)
def test_a_hundred_thousand_random_operations_give_what_numpy_gives(world_size, nbytes):
    do_at_random(world_size, nbytes, trials(0, 34_000))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 1000, 50_000])
def test_sums_are_those_of_messages_bit_for_bit(size, count):
    def run(backend):
        data = np.random.default_rng(backend.rank).normal(size=count).astype(np.float32)
        everywhere = rankwire.all_reduce(backend, data.copy(), ordered=True)
        parts = rankwire.reduce_scatter(backend, np.tile(data, size))
        at_root = rankwire.reduce(backend, data, size - 1)
        return [None if x is None else x.tobytes() for x in (everywhere, parts, at_root)]

    with tcp_world(size) as world:
        shared = everywhere(run, world)
        assert all(backend.operations.agreement.slots is not None for backend in world)
    with tcp_world(size, segment_nbytes=0) as world:
        assert everywhere(run, world) == shared
        assert all(backend.operations.agreement.slots is None for backend in world)


def test_no_message_is_sent_for_what_fits(monkeypatch):
    def run(backend):
        rankwire.barrier(backend)
        sent = []
        monkeypatch.setattr(backend.messages, "offer", lambda *args, **kwargs: sent.append(args))
        array = np.ones(1000)
        rankwire.all_reduce(backend, array)
        rankwire.broadcast(backend, array)
        rankwire.all_gather(backend, array)
        rankwire.all_gather_object(backend, {"a": 1})
        rankwire.scatter(backend, array if backend.rank == 0 else None)
        return sent

    with tcp_world(2) as world:
        assert everywhere(run, world) == [[], []]


def test_objects_of_which_one_is_too_large_go_by_messages():
    large = 3 << 12  # of slots with one page

    def run(backend):
        value = b"x" * (large if backend.rank == 1 else 10)
        lengths = [len(got) for got in rankwire.all_gather_object(backend, value)]
        from_1 = rankwire.broadcast_object(backend, value, 1)
        assert len(from_1) == large
        parts = rankwire.all_to_all_object(backend, [value, value])
        assert [len(part) for part in parts] == lengths
        return lengths

    with tcp_world(2, segment_nbytes=4 << 12) as world:
        assert everywhere(run, world) == [[10, large]] * 2


def test_what_is_for_one_rank_is_cut_out_of_what_is_for_all():
    """Also if another process has written nonsense there."""
    ends = np.array([3, 3, 5], np.int64)
    slot = np.frombuffer(ends.tobytes() + b"abcde", np.uint8)
    parts = [slot_algorithms._part_of(slot, rank, 3) for rank in range(3)]
    assert parts == [b"abc", b"", b"de"]
    for nonsense in ([-(2**60), 2**60, 5], [2**62, -1, -1]):
        slot = np.frombuffer(np.array(nonsense, np.int64).tobytes() + b"abcde", np.uint8)
        for rank in range(3):
            assert len(slot_algorithms._part_of(slot, rank, 3)) <= 5
    assert slot_algorithms._part_of(np.zeros(0, np.uint8), 0, 3) == b""


def test_a_meeting_is_one_step():
    def run(backend):
        rankwire.barrier(backend)
        segment = backend.operations.agreement.slots._segment
        before = segment.step
        rankwire.barrier(backend)
        return segment.step - before

    with tcp_world(3) as world:
        assert everywhere(run, world) == [1, 1, 1]
    assert algorithms.meet is not slot_algorithms.meet


@pytest.mark.parametrize("size", [2, 3])
def test_an_array_that_does_not_fit_goes_through_in_pieces(monkeypatch, size):
    monkeypatch.setattr(slot_algorithms, "PIECE_NBYTES", 8192)
    count = 10_001

    def run(backend):
        array = np.arange(count, dtype=np.float64) * (backend.rank + 1)
        rankwire.all_reduce(backend, array)
        before = np.ones(count)
        out = rankwire.all_reduce(backend, before, out=np.empty(count))
        assert (before == 1).all()
        assert (out == size).all()
        return array

    with tcp_world(size, segment_nbytes=2 * size * 16384) as world:
        for array in everywhere(run, world):
            np.testing.assert_array_equal(array, np.arange(count) * (size * (size + 1) / 2))
