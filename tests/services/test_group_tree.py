"""The tree of a group call, and the order in which values are combined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire import ConfigurationError
from rankwire.services.group_tree import (
    ABSENT,
    combined,
    combiner,
    delegations,
    finished,
    height,
    merged,
)

sizes = st.integers(1, 200)


def text(a, b):
    return f"({a}{b})"


def letters(size):
    return {(at, at + 1): chr(0x4E00 + at) for at in range(size)}


@given(sizes, st.data())
def test_ranges_that_are_handed_on_and_the_own_position_are_the_whole_range(size, data):
    own = data.draw(st.none() | st.integers(0, size - 1))
    given_away = [*delegations(0, size, own)]
    positions = [at for low, high in given_away for at in range(low, high)]
    assert sorted([*positions, *([] if own is None else [own])]) == [*range(size)]
    assert len(given_away) <= height(size) + 1


@given(sizes)
def test_no_rank_is_further_away_than_the_tree_is_high(size):
    def depth(low, high):
        return max((1 + depth(*span) for span in delegations(low, high, low)), default=0)

    assert depth(0, size) <= height(size)


@given(sizes, st.data())
def test_the_association_depends_on_the_list_alone(size, data):
    """Wherever parts are combined first, and whichever positions are absent."""
    parts = letters(size)
    for at in data.draw(st.lists(st.integers(0, size - 1), max_size=3)):
        parts.pop((at, at + 1), None)
    expected = combined(0, size, parts, text)
    for low, high in data.draw(st.permutations([*delegations(0, size, None)])):
        inside = {span: v for span, v in parts.items() if low <= span[0] < high}
        parts = {span: v for span, v in parts.items() if span not in inside}
        parts |= merged(low, high, inside, text)
    assert combined(0, size, parts, text) == expected


def test_values_are_combined_in_order():
    assert combined(0, 5, letters(5), lambda a, b: a + b) == "".join(letters(5).values())
    assert combined(0, 3, {}, text) is ABSENT


@pytest.mark.parametrize(
    ("reduce", "expected"), [("sum", 9), ("prod", 24), ("max", 4), ("min", 2), ("mean", 3)]
)
def test_reductions_of_numbers_and_arrays(reduce, expected):
    combine = combiner(reduce)
    assert finished(reduce, combine(combine(2, 3), 4), 3) == expected
    arrays = [np.array([value, value]) for value in (2, 3, 4)]
    found = finished(reduce, combine(combine(*arrays[:2]), arrays[2]), 3)
    assert found.tolist() == [expected] * 2
    assert [array.tolist() for array in arrays] == [[2, 2], [3, 3], [4, 4]]


@pytest.mark.parametrize("reduce", ["median", 3, "", b"sum"])
def test_other_reductions_are_refused(reduce):
    with pytest.raises(ConfigurationError, match="reduce="):
        combiner(reduce)
