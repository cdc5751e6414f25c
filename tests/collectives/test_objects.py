"""The collectives on any value that the codec carries."""

import dataclasses
import datetime
import enum
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import counting_world, on_all, run

import rankwire
from faults.sizes import examples
from rankwire.backends.sub import SubBackend
from rankwire.errors import (
    CollectiveMismatchError,
    ConfigurationError,
    InvalidMessageError,
    RankwireError,
    UnsupportedTypeError,
)
from rankwire.testing import simulated_world

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)

OF_EVERY_TYPE = [
    None,
    True,
    2**100,
    1.5,
    2 + 3j,
    "text",
    b"bytes",
    bytearray(b"more"),
    [1, [2]],
    (3, (4,)),
    {"a": {1: None}},
    {5, 6},
    frozenset({7}),
    datetime.datetime(2030, 1, 2, 3, 4, 5),
    datetime.timedelta(seconds=3),
    np.float32(2.5),
]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    weights: object = None


def codec():
    return rankwire.Codec([Color, Point])


def exactly(value, expected):
    return value == expected and type(value) is type(expected)


# -- every operation -------------------------------------------------------------------------------


@given(st.lists(PLAIN, min_size=1, max_size=4), st.data())
@settings(max_examples=examples(40))
def test_values_of_any_kind_different_on_every_rank(values, data):
    size = len(values)
    root = data.draw(st.integers(0, size - 1))

    def each(backend):
        rank, own = backend.rank, values[backend.rank]
        assert rankwire.all_gather_object(backend, own) == values
        gathered = rankwire.gather_object(backend, own, root)
        assert gathered == (values if rank == root else None)
        assert exactly(rankwire.broadcast_object(backend, own, root), values[root])
        scattered = rankwire.scatter_object(backend, values if rank == root else None, root)
        assert exactly(scattered, own)
        received = rankwire.all_to_all_object(backend, [(rank, value) for value in values])
        assert received == [(src, own) for src in range(size)]

    run(size, each)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_type_of_value_arrives_as_it_was(size):
    def each(backend):
        for number in range(len(OF_EVERY_TYPE)):
            turn = [OF_EVERY_TYPE[(number + r) % len(OF_EVERY_TYPE)] for r in range(size)]
            for value, expected in zip(
                rankwire.all_gather_object(backend, turn[backend.rank]), turn, strict=True
            ):
                assert exactly(value, expected)

    run(size, each)


@pytest.mark.parametrize("backend", ["simulated", "auto", "tcp"])
def test_arrays_inside_of_values_small_and_large(backend):
    def each(backend):
        rank = backend.rank
        mine = {"small": np.arange(rank), "large": np.full(1 << 18, rank, np.float64)}
        for src, value in enumerate(rankwire.all_gather_object(backend, mine)):
            assert value["small"].tolist() == list(range(src))
            assert (value["large"] == src).all()
        last = rankwire.broadcast_object(backend, mine if rank == 2 else None, root=2)
        assert (last["large"] == 2.0).all()
        sent = [np.full((dst + 1) << 16, 10 * rank + dst) for dst in range(3)]
        for src, value in enumerate(rankwire.all_to_all_object(backend, sent)):
            assert value.shape == ((rank + 1) << 16,)
            assert (value == 10 * src + rank).all()

    run(3, each, backend=backend)


def test_received_arrays_belong_to_the_receiver():
    def each(backend):
        mine = np.full(1000, backend.rank)
        received = rankwire.all_gather_object(backend, mine)[1 - backend.rank]
        received += 10
        rankwire.barrier(backend)
        assert (mine == backend.rank).all()

    run(2, each)


def test_the_own_value_is_returned_as_it_is():
    def each(backend):
        mine = ["own"]
        assert rankwire.all_gather_object(backend, mine)[backend.rank] is mine
        assert rankwire.all_to_all_object(backend, [mine, mine])[backend.rank] is mine
        if backend.rank == 0:
            assert rankwire.broadcast_object(backend, mine) is mine
        else:
            assert rankwire.broadcast_object(backend) == mine

    run(2, each)


def test_what_other_ranks_than_the_root_pass_is_not_looked_at():
    def each(backend):
        passed = object() if backend.rank else "from the root"
        assert rankwire.broadcast_object(backend, passed) == "from the root"
        passed = object() if backend.rank else ["a", "b"]
        assert rankwire.scatter_object(backend, passed) == "ab"[backend.rank]

    run(2, each)


def test_in_the_background():
    def each(backend):
        works = [
            rankwire.all_gather_object(backend, backend.rank, async_op=True),
            rankwire.gather_object(backend, backend.rank, 1, async_op=True),
            rankwire.broadcast_object(backend, "b", async_op=True),
            rankwire.scatter_object(backend, "sc", async_op=True),
            rankwire.all_to_all_object(backend, [backend.rank, "x"], async_op=True),
        ]
        return [work.wait() for work in reversed(works)]

    assert run(2, each) == [
        [[0, 1], "s", "b", None, [0, 1]],
        [["x", "x"], "c", "b", [0, 1], [0, 1]],
    ]


def test_in_groups():
    def each(backend):
        if backend.rank == 0:
            return None
        group = SubBackend(backend, [1, 3, 2])
        return rankwire.all_gather_object(group, f"world {backend.rank}")

    expected = ["world 1", "world 2", "world 3"]
    assert run(4, each) == [None, expected, expected, expected]


# -- classes of one's own --------------------------------------------------------------------------


def test_registered_classes_travel():
    def each(backend):
        options = {"codec": codec()}
        mine = [Color.BLUE, Point(backend.rank, [Color.RED])]
        everyone = [[Color.BLUE, Point(rank, [Color.RED])] for rank in range(2)]
        assert rankwire.all_gather_object(backend, mine, **options) == everyone
        gathered = rankwire.gather_object(backend, mine, **options)
        assert gathered == (None if backend.rank else everyone)
        assert rankwire.broadcast_object(backend, mine, 1, **options) == everyone[1]
        assert rankwire.scatter_object(backend, mine, 0, **options) == everyone[0][backend.rank]
        received = rankwire.all_to_all_object(backend, mine, **options)
        assert received == [everyone[src][backend.rank] for src in range(2)]

    run(2, each)


def test_a_class_that_the_receiver_has_not_registered_is_an_error():
    def each(backend):
        known = codec() if backend.rank == 0 else None
        return rankwire.broadcast_object(backend, Color.RED, codec=known)

    with pytest.raises(InvalidMessageError):
        run(2, each)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda b, x: rankwire.all_gather_object(b, {"a": [1, x]}), '["a"][1]'),
        (lambda b, x: rankwire.gather_object(b, (x,)), "[0]"),
        (lambda b, x: rankwire.broadcast_object(b, [x], b.rank), "[0]"),
        (lambda b, x: rankwire.scatter_object(b, [1, [x]], b.rank), "values[1][0]"),
        (lambda b, x: rankwire.all_to_all_object(b, [{"k": x}, 1]), 'values[0]["k"]'),
    ],
)
def test_a_type_that_is_not_carried_is_refused_by_its_path_before_anything_is_sent(call, path):
    with counting_world(2) as world:
        for backend in world:
            with pytest.raises(UnsupportedTypeError) as caught:
                call(backend, threading.Lock())
            assert caught.value.path.endswith(path)
            assert caught.value.type_name == "_thread.lock"
            assert caught.value.rank == backend.rank
            assert not backend.sent


@pytest.mark.parametrize("values", [None, [], [1], [1, 2, 3]])
def test_there_is_one_value_for_each_rank(values):
    given = "none" if values is None else str(len(values))
    with simulated_world(2) as world:
        with pytest.raises(ConfigurationError, match=f"2 ranks is needed, not {given}"):
            rankwire.scatter_object(world[0], values)
        with pytest.raises(ConfigurationError, match=f"2 ranks is needed, not {given}"):
            rankwire.all_to_all_object(world[0], values)


@pytest.mark.parametrize(
    "calls",
    [
        (
            lambda b: rankwire.broadcast_object(b, 1, 0),
            lambda b: rankwire.broadcast_object(b, 1, 1),
        ),
        (lambda b: rankwire.gather_object(b, 1, 0), lambda b: rankwire.gather_object(b, 1, 1)),
        (lambda b: rankwire.all_gather_object(b, 1), lambda b: rankwire.gather_object(b, 1)),
        (
            lambda b: rankwire.all_gather_object(b, np.ones(2)),
            lambda b: rankwire.all_gather(b, np.ones(2)),
        ),
    ],
    ids=["root of broadcast", "root of gather", "kind", "object or array"],
)
def test_ranks_that_disagree_are_told(calls):
    def each(backend):
        with pytest.raises(CollectiveMismatchError):
            calls[backend.rank](backend)

    run(2, each)


def test_a_value_that_is_too_large_is_an_error_for_all():
    def each(backend):
        with pytest.raises(RankwireError):
            rankwire.all_gather_object(backend, bytes(3000 if backend.rank else 10), timeout=5)

    run(2, each, max_message_nbytes=2000)


# -- messages --------------------------------------------------------------------------------------


def test_what_is_sent():
    def counts(each):
        with counting_world(4) as world:
            on_all(world, each)
            return [len(backend.sent) for backend in world]

    # All of them meet first: two rounds among four.
    assert counts(lambda b: rankwire.all_gather_object(b, 1)) == [5, 5, 5, 5]
    assert counts(lambda b: rankwire.all_to_all_object(b, [1] * 4)) == [5, 5, 5, 5]
    assert counts(lambda b: rankwire.gather_object(b, 1, 2)) == [3, 3, 2, 3]
    assert counts(lambda b: rankwire.broadcast_object(b, 1, 2)) == [2, 2, 5, 2]
    assert counts(lambda b: rankwire.scatter_object(b, [1] * 4, 2)) == [2, 2, 5, 2]


# -- hooks -----------------------------------------------------------------------------------------


class Handle:
    def __init__(self, key):
        self.key = key


def hooked():
    """A codec for handles, who was to have them, and who sent them."""
    held, came_from = [], []

    def take(handle, sending):
        held.append(sending.peer)
        sending.undo(lambda: held.remove(sending.peer))
        return handle.key

    def build(key, receiving):
        came_from.append(receiving.peer)
        return Handle(key)

    codec = rankwire.Codec()
    codec.register(Handle, take=take, build=build)
    return codec, held, came_from


def test_hooks_learn_who_gets_a_value_and_who_sent_it():
    def each(backend):
        rank, others = backend.rank, [r for r in range(3) if r != backend.rank]
        codec, held, came_from = hooked()

        def seen():
            ranks = (sorted(held, key=str), sorted(came_from))
            held.clear(), came_from.clear()
            return ranks

        values = [Handle((rank, dst)) for dst in range(3)]
        received = rankwire.all_to_all_object(backend, values, codec=codec)
        assert [handle.key for handle in received] == [(src, rank) for src in range(3)]
        assert seen() == (others, others)
        scattered = rankwire.scatter_object(backend, values if rank == 1 else None, 1, codec=codec)
        assert scattered.key == (1, rank)
        assert seen() == (([0, 2], []) if rank == 1 else ([], [1]))
        rankwire.gather_object(backend, Handle(rank), 2, codec=codec)
        assert seen() == ([2], [0, 1] if rank == 2 else [])
        rankwire.all_gather_object(backend, Handle(rank), codec=codec)
        assert seen() == ([None], others)
        rankwire.broadcast_object(backend, Handle(rank), 0, codec=codec)
        assert seen() == ([None] if rank == 0 else [], [] if rank == 0 else [0])

    run(3, each)


def test_values_that_cannot_all_be_sent_are_undone():
    def each(backend):
        codec, held, _ = hooked()
        with pytest.raises(UnsupportedTypeError, match=r"values\[1\]"):
            rankwire.all_to_all_object(backend, [Handle(0), object()], codec=codec)
        assert held == []

    run(2, each)
