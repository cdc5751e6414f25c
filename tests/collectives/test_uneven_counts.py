"""all_to_all with parts of different sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import counting_world, on_all, run, same

import rankwire
from faults.sizes import examples
from rankwire.collectives.operands import operand
from rankwire.collectives.uneven_parts import all_to_all_by_counts
from rankwire.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    RankwireError,
    UnsupportedTypeError,
)
from rankwire.testing import simulated_world


def expected_of(counts, rank, row=()):
    """What a rank gets if the rows that rank s sends to rank d are all 10 s + d."""
    rows = [10 * src + rank for src in range(len(counts)) for _ in range(counts[src][rank])]
    return np.broadcast_to(
        np.array(rows, np.int64).reshape(-1, *(1 for _ in row)), (len(rows), *row)
    )


def rows_of(counts, rank, row=()):
    """What a rank sends, likewise."""
    rows = [10 * rank + dst for dst, count in enumerate(counts[rank]) for _ in range(count)]
    flat = np.array(rows, np.int64).reshape(-1, *(1 for _ in row))
    return np.broadcast_to(flat, (len(rows), *row)).copy()


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 4), min_size=size, max_size=size), min_size=size, max_size=size
        )
    ),
    st.sampled_from([(), (3,), (2, 2), (0,)]),
    st.booleans(),
)
@settings(max_examples=examples(40))
def test_any_counts_and_any_rows(counts, row, with_recv_counts):
    def each(backend):
        receives = [counts[src][backend.rank] for src in range(len(counts))]
        return rankwire.all_to_all(
            backend,
            rows_of(counts, backend.rank, row),
            send_counts=counts[backend.rank],
            recv_counts=receives if with_recv_counts else None,
        )

    for rank, result in enumerate(run(len(counts), each)):
        assert same(result, expected_of(counts, rank, row))


def test_counts_may_be_any_sequence_of_whole_numbers():
    def each(backend):
        counts = [np.array([1, 1]), (1, 1)][backend.rank]
        return rankwire.all_to_all(backend, np.arange(2), send_counts=counts).tolist()

    assert run(2, each) == [[0, 0], [1, 1]]


# -- out -------------------------------------------------------------------------------------------

COUNTS = [[1, 2], [0, 3]]


@pytest.mark.parametrize("strided", [False, True])
def test_results_go_where_they_are_wanted(strided):
    def each(backend):
        rows = len(expected_of(COUNTS, backend.rank))
        out = np.full(2 * rows, -1)[::2] if strided else np.full(rows, -1)
        mine = rows_of(COUNTS, backend.rank)
        result = rankwire.all_to_all(backend, mine, send_counts=COUNTS[backend.rank], out=out)
        assert result is out
        assert same(mine, rows_of(COUNTS, backend.rank))
        return out.copy()

    for rank, result in enumerate(run(2, each)):
        assert same(result, expected_of(COUNTS, rank))


def test_out_may_be_the_array_if_the_sizes_are_equal():
    counts = [[1, 2], [2, 1]]

    def each(backend):
        mine = rows_of(counts, backend.rank)
        return rankwire.all_to_all(backend, mine, send_counts=counts[backend.rank], out=mine)

    for rank, result in enumerate(run(2, each)):
        assert same(result, expected_of(counts, rank))


@pytest.mark.parametrize("out", [np.empty(4, int), np.empty(2, np.int32), np.empty((2, 1), int)])
def test_an_out_that_does_not_fit_fails_here_and_ends_it_for_all(out):
    def each(backend):
        with pytest.raises(RankwireError) as caught:
            rankwire.all_to_all(
                backend,
                np.ones(3, int),
                send_counts=[1, 1, 1],
                out=out if backend.rank == 1 else None,
            )
        return type(caught.value), caught.value.peer

    assert run(3, each) == [
        (CollectiveAbortedError, 1),
        (ConfigurationError, None),
        (CollectiveAbortedError, 1),
    ]


def test_what_is_no_array_is_refused_as_out():
    def each(backend):
        with pytest.raises(UnsupportedTypeError) as caught:
            rankwire.all_to_all(backend, np.ones(2), send_counts=[1, 1], out=[0, 0])
        return caught.value.path

    assert run(2, each) == ["out"] * 2


# -- counts that cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"send_counts": [4]}, "send_counts must have length 2, not 1"),
        ({"send_counts": [2, 2], "recv_counts": [1, 1, 1]}, "recv_counts must have length 2"),
        ({"send_counts": [2, 3]}, "sum up to 5, dim 0 of the array is 4"),
        ({"send_counts": [5, -1]}, "negative"),
        ({"send_counts": [2, 2], "recv_counts": [2, -1]}, "recv_counts .* negative"),
        ({"recv_counts": [2, 2]}, "recv_counts without send_counts"),
    ],
)
def test_wrong_counts_are_refused_before_anything_is_sent(counts, words):
    with counting_world(2) as world:
        with pytest.raises(ConfigurationError, match=words):
            rankwire.all_to_all(world[0], np.ones(4), **counts)
        assert not world[0].sent


def test_a_count_that_is_no_whole_number_is_refused():
    with simulated_world(2) as world, pytest.raises(ConfigurationError):
        rankwire.all_to_all(world[0], np.ones(4), send_counts=[2.0, 2.0])


def test_an_array_without_rows_has_no_parts():
    with simulated_world(1) as (alone,), pytest.raises(ConfigurationError, match="dim 0"):
        rankwire.all_to_all(alone, np.array(1.0), send_counts=[1])


# -- ranks that disagree ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_counts_that_disagree_are_told_to_all_ranks(size):
    def each(backend):
        array = np.full(2 * size, -1.0)
        receives = [2] * size
        if backend.rank == size - 1:
            receives[0] = 5
        out = np.full(2 * size, -7.0)
        with pytest.raises(CollectiveMismatchError) as caught:
            rankwire.all_to_all(
                backend, array, send_counts=[2] * size, recv_counts=receives, out=out
            )
        assert (out == -7.0).all(), "nothing must have moved"
        return caught.value.message

    words = f"rank 0 sends 2 rows to rank {size - 1}, which expects 5"
    assert run(size, each) == [words] * size


def test_a_rank_may_disagree_with_itself():
    with simulated_world(1) as (alone,), pytest.raises(CollectiveMismatchError):
        rankwire.all_to_all(alone, np.ones(2), send_counts=[2], recv_counts=[1])


@pytest.mark.parametrize("other", ["even", "dtype", "row"])
def test_a_rank_that_calls_something_else_is_told(other):
    def each(backend):
        array, counts = np.ones((2, 3)), {"send_counts": [1, 1]}
        if backend.rank == 1:
            if other == "even":
                counts = {}
            array = array.astype(np.float32) if other == "dtype" else array
            array = np.ones((2, 4)) if other == "row" else array
        with pytest.raises(CollectiveMismatchError):
            rankwire.all_to_all(backend, array, **counts)

    run(2, each)


def test_the_group_agrees_again_after_a_disagreement():
    def each(backend):
        for receives in ([1, 1], [1, 3 if backend.rank else 1]):
            try:
                rankwire.all_to_all(backend, np.ones(2), send_counts=[1, 1], recv_counts=receives)
            except CollectiveMismatchError:
                backend.barrier()
        return rankwire.all_to_all(backend, np.ones(2), send_counts=[1, 1]).tolist()

    assert run(2, each) == [[1.0, 1.0]] * 2


def test_the_words_that_all_ranks_must_share_leave_the_counts_out():
    few, _ = all_to_all_by_counts(operand(np.ones((2, 3))), [1, 1], None, None, 2)
    many, _ = all_to_all_by_counts(operand(np.ones((7, 3))), [0, 7], [7, 1], None, 2)
    assert few == many == "all_to_all uneven(float64, (3,))"


def test_all_ranks_learn_all_counts_in_log_n_messages():
    with counting_world(4) as world:
        on_all(world, lambda b: rankwire.all_to_all(b, np.ones(0), send_counts=[0] * 4))
        assert [len(backend.sent) for backend in world] == [2 + 3] * 4
