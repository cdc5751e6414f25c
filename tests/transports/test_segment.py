"""A segment, with bytes alone: steps, slots, tags, and who may write when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.transports.shared_segment import ASLEEP, Segment, is_segment_of, segment_nbytes

TAG = 0xABCDEF << 16


def make(size, slots_nbytes=1 << 16):
    memory = memoryview(bytearray(segment_nbytes(slots_nbytes, size)))
    return [Segment(memory, rank, size) for rank in range(size)]


def step(segment, tag=TAG, payload=b""):
    """Do a step up to its meeting; return whether the slot could be written at once."""
    at_once = segment.begin()
    segment.slots[segment.step & 1][segment.rank][: len(payload)] = payload
    segment.publish(tag, len(payload))
    return at_once


def read(segment, rank):
    return bytes(segment.slots[segment.step & 1][rank][: segment.nbytes_of(rank)])


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_slots_are_apart_and_as_large_as_was_asked_for(size):
    (first, *_) = make(size, 2 * size * 8192 + 5)
    assert first.slot_nbytes == 8192
    slots = [slot for slots in first.slots for slot in slots]
    assert len(slots) == 2 * size
    for number, slot in enumerate(slots):
        assert len(slot) == 8192
        slot[:] = bytes([number]) * 8192
    assert [slot[0] for slot in slots] == list(range(2 * size))
    assert set(first.words) == {0}


def test_a_slot_is_not_larger_than_what_goes_through_one():
    assert make(2, 1 << 30)[0].slot_nbytes == 2 << 20


def test_too_little_memory_gives_no_segment():
    assert segment_nbytes(0, 2) == 0
    assert segment_nbytes(4095 * 4, 2) == 0
    assert segment_nbytes(4096 * 4, 2) > 0


@given(st.integers(1, 300), st.integers(0, 1 << 26))
def test_the_size_of_a_segment_limits_its_number_of_ranks(size, nbytes):
    whole = segment_nbytes(nbytes, size)
    if whole:
        assert is_segment_of(size, whole)
        assert not is_segment_of(size, whole + 1)
        assert not is_segment_of(size, whole - 1)
    assert not is_segment_of(size, 0)


def test_a_step_is_there_for_all_once_it_is_published():
    ranks = make(3)
    step(ranks[0], payload=b"zero")
    assert not ranks[0].all_came(TAG)
    step(ranks[1], payload=b"one")
    assert not ranks[0].all_came(TAG)
    step(ranks[2], payload=b"two")
    for rank in ranks:
        assert rank.all_came(TAG)
        assert [read(rank, other) for other in range(3)] == [b"zero", b"one", b"two"]


def test_what_is_written_and_not_published_is_not_there():
    near, far = make(2)
    step(near)
    far.begin()
    far.slots[1][1][:4] = b"half"
    assert not near.all_came(TAG)
    assert not near.came(1, TAG)


def test_another_tag_is_not_taken_for_this_one():
    near, far = make(2)
    step(near)
    step(far, TAG + 1)
    assert not near.all_came(TAG)
    assert not near.came(1, TAG)
    assert near.tag_of(1) == TAG + 1


def test_what_is_retracted_is_not_there_any_more():
    near, far = make(2)
    step(far)
    far.retract(TAG)
    step(near)
    assert not near.all_came(TAG)


def test_what_was_published_before_by_an_operation_that_went_well_is_not_retracted():
    near, far = make(2)
    step(far)
    far.retract(TAG + 1)  # of the next one, which has published nothing
    step(near)
    assert near.all_came(TAG)


def test_a_rank_may_be_one_step_ahead_and_the_last_one_stays_readable():
    near, far = make(2)
    step(near, payload=b"near 1")
    step(far, payload=b"far 1")
    assert far.all_came(TAG)
    assert step(far, payload=b"far 2")
    assert near.all_came(TAG)
    assert read(near, 1) == b"far 1"
    step(near)
    assert read(near, 1) == b"far 2"


def test_a_slot_that_may_still_be_read_is_not_overwritten():
    near, _far = make(2)
    step(near)
    assert not step(near)  # nobody has said that it has read the first one


def test_after_a_step_of_all_ranks_each_may_write_at_once():
    near, far = make(2)
    for _ in range(5):
        assert step(near)
        assert step(far)
        assert near.all_came(TAG)
        assert far.all_came(TAG)


@given(st.data())
def test_any_order_of_ranks_gives_each_what_the_others_have_put(data):
    size = data.draw(st.integers(2, 4))
    ranks = make(size)
    steps_done = [0] * size
    waiting = [False] * size
    for _ in range(60):
        rank = data.draw(st.integers(0, size - 1))
        segment = ranks[rank]
        if not waiting[rank]:
            at_once = step(segment, TAG, b"%d %d" % (rank, steps_done[rank]))
            assert at_once
            waiting[rank] = True
        elif segment.all_came(TAG):
            expected = [b"%d %d" % (other, steps_done[rank]) for other in range(size)]
            assert [read(segment, other) for other in range(size)] == expected
            steps_done[rank] += 1
            waiting[rank] = False
    assert max(steps_done) - min(steps_done) <= 1


def test_each_rank_has_its_own_words():
    ranks = make(3)
    ranks[1].words[ranks[1].lines[1] + ASLEEP] = 1
    assert [ranks[0].words[line + ASLEEP] for line in ranks[0].lines] == [0, 1, 0]
    assert len({line // 16 for line in ranks[0].lines}) == 3
