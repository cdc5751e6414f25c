"""Ranks that disagree: all of them are told within a second, by name, and no array is touched.

An ``Op`` is one collective as data; ranks run lists of them. Two lists agree up to the first place
at which their words differ. There every rank must raise, and all that came before must be right.
"""

import contextlib
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import rankwire
from rankwire.collectives.sequence import OperationSequence
from rankwire.errors import CollectiveMismatchError, DeadlineExceededError, RankwireError
from rankwire.testing import in_parallel, simulated_world, sub_world, tcp_world
from rankwire.wire.frames import Channel
from several_hosts import hosts_world
from worlds import Running

SOON = 8.0  # measured: 0.05 to 0.15 s, on a busy machine up to 1.7
TIMEOUT = 20.0  # of every operation: far above

WORLDS = {
    "simulated": simulated_world,
    "auto": partial(tcp_world, transport="auto"),
    "tcp": partial(tcp_world, transport="tcp"),
    "hosts": hosts_world,
    "sub-auto": sub_world(partial(tcp_world, transport="auto")),
}
BIG = (1 << 16, 4)  # 2 MiB of float64 from each rank: lent where that is possible


@pytest.fixture(params=list(WORLDS))
def make_world(request):
    return WORLDS[request.param]


# -- operations as data


class Op(NamedTuple):
    """One collective; ``shape`` is that of one rank's part."""

    kind: str = "all_reduce"
    op: str = "sum"
    dtype: str = "float64"
    shape: tuple[int, ...] = (4, 2)
    root: int = 0

    def normal(self) -> "Op":
        """Return it with what does not matter to its kind as by default."""
        default = Op(self.kind)
        return Op(self.kind, *(getattr(self if f in MATTERS[self.kind] else default, f)
                               for f in ("op", "dtype", "shape", "root")))  # fmt: skip

    def words(self) -> list[str]:
        """Return what its description must say."""
        names = {"op": self.op, "dtype": self.dtype, "root": f"root {self.root}"}
        return [*DESCRIBED.get(self.kind, self.kind).split(), *(names[f] for f in names
                if f in MATTERS[self.kind])]  # fmt: skip


_ALL = ("op", "dtype", "shape", "root")
MATTERS = {
    "all_reduce": _ALL[:3],
    "all_reduce_out": _ALL[:3],
    "all_reduce_ordered": _ALL[:3],
    "coalesced": _ALL[:3],
    "reduce": _ALL,
    "reduce_scatter": _ALL[:3],
    "broadcast": _ALL[1:],
    "all_gather": _ALL[1:3],
    "gather": _ALL[1:],
    "scatter": ("root",),
    "all_to_all": _ALL[1:3],
    "all_to_all_uneven": ("dtype",),
    "barrier": (),
    "all_gather_object": (),
    "gather_object": ("root",),
    "broadcast_object": ("root",),
    "scatter_object": ("root",),
    "all_to_all_object": (),
}
DESCRIBED = {
    "all_reduce_out": "all_reduce",
    "all_reduce_ordered": "ordered all_reduce",
    "coalesced": "all_reduce_coalesced",
    "all_to_all_uneven": "all_to_all uneven",
}
SAME_WORDS = {"all_reduce_out": "all_reduce"}  # not a difference


def contribution(op: Op, rank: int, size: int) -> np.ndarray:
    """Return what a rank passes: small whole numbers, so that sums are exact in every dtype."""
    parts = size if op.kind in ("reduce_scatter", "scatter", "all_to_all") else 1
    shape = (parts * op.shape[0], *op.shape[1:])
    values = (np.arange(np.prod(shape, dtype=int)) * (rank + 3) + rank) % 7
    return values.reshape(shape).astype(op.dtype)


def counts(rank: int, size: int) -> list[int]:
    return [(rank + 2 * dst) % 3 for dst in range(size)]


def uneven(op: Op, rank: int, size: int) -> np.ndarray:
    total = sum(counts(rank, size))
    return (np.arange(total) + 10 * rank).astype(op.dtype)


class Call:
    """One operation on one rank: its arrays, how they were, and how it goes."""

    def __init__(self, op: Op, backend) -> None:
        self.op = op = op.normal()
        self.backend = backend
        self.rank, self.size = backend.rank, backend.world_size
        self.root = op.root % self.size
        make = uneven if op.kind == "all_to_all_uneven" else contribution
        self.inputs = [make(op, rank, self.size) for rank in range(self.size)]
        self.array = self.inputs[self.rank].copy()
        self.out = self._new_out()
        self.before = [array.copy() for array in self._arrays()]

    def _arrays(self):
        return [array for array in (self.array, self.out) if array is not None]

    def _new_out(self):
        expected = self.expected()
        if self.op.kind == "all_to_all_uneven" or not isinstance(expected, np.ndarray):
            return None
        if self.op.kind in ("all_reduce", "all_reduce_ordered", "coalesced", "broadcast"):
            return None  # in place
        return np.full_like(expected, 99)

    def run(self, **options):
        b, op, root = self.backend, self.op, self.root
        collective = getattr(rankwire, op.kind, None)
        match op.kind:
            case "all_reduce":
                return rankwire.all_reduce(b, self.array, op.op, **options)
            case "all_reduce_out":
                return rankwire.all_reduce(b, self.array, op.op, out=self.out, **options)
            case "all_reduce_ordered":
                return rankwire.all_reduce(b, self.array, op.op, ordered=True, **options)
            case "coalesced":
                return rankwire.all_reduce_coalesced(b, [self.array], op.op, **options)
            case "reduce":
                return collective(b, self.array, root, op.op, out=self.out, **options)
            case "reduce_scatter":
                return collective(b, self.array, op.op, out=self.out, **options)
            case "broadcast":
                return collective(b, self.array, root, **options)
            case "gather" | "scatter":
                return collective(b, self.array, root, out=self.out, **options)
            case "all_gather" | "all_to_all":
                return collective(b, self.array, out=self.out, **options)
            case "all_to_all_uneven":
                sent = counts(self.rank, self.size)
                return rankwire.all_to_all(b, self.array, send_counts=sent, **options)
            case "barrier":
                return collective(b, **options)
            case "all_gather_object":
                return collective(b, {"rank": self.rank}, **options)
            case "gather_object" | "broadcast_object":
                return collective(b, {"rank": self.rank}, root, **options)
            case "scatter_object":
                return collective(b, [*range(self.size)], root, **options)
            case "all_to_all_object":
                return collective(b, [[self.rank, dst] for dst in range(self.size)], **options)
        raise AssertionError(op.kind)

    def expected(self):
        op, rank, size, inputs = self.op, self.rank, self.size, self.inputs
        at_root = rank == self.root
        reduced = None
        if "reduce" in op.kind or op.kind == "coalesced":
            reduced = (np.sum if op.op == "sum" else np.max)(inputs, axis=0).astype(op.dtype)
        parts = [np.split(x, size) for x in inputs] if op.kind in PARTED else None
        match op.kind:
            case "all_reduce" | "all_reduce_out" | "all_reduce_ordered":
                return reduced
            case "coalesced":
                return [reduced]
            case "reduce":
                return reduced if at_root else None
            case "reduce_scatter":
                return np.split(reduced, size)[rank]
            case "broadcast":
                return inputs[self.root]
            case "all_gather":
                return np.concatenate(inputs)
            case "gather":
                return np.concatenate(inputs) if at_root else None
            case "scatter":
                return parts[self.root][rank]
            case "all_to_all":
                return np.concatenate([parts[src][rank] for src in range(size)])
            case "all_to_all_uneven":
                starts = [np.cumsum([0, *counts(src, size)]) for src in range(size)]
                return np.concatenate(
                    [x[s[rank] : s[rank + 1]] for x, s in zip(inputs, starts, strict=True)]
                )
            case "barrier":
                return None
            case "all_gather_object":
                return [{"rank": src} for src in range(size)]
            case "gather_object":
                return [{"rank": src} for src in range(size)] if at_root else None
            case "broadcast_object":
                return {"rank": self.root}
            case "scatter_object":
                return rank
            case "all_to_all_object":
                return [[src, rank] for src in range(size)]
        raise AssertionError(op.kind)

    def check(self, result) -> None:
        np.testing.assert_equal(result, self.expected())

    def check_untouched(self) -> None:
        for now, before in zip(self._arrays(), self.before, strict=True):
            np.testing.assert_array_equal(now, before)


PARTED = ("reduce_scatter", "scatter", "all_to_all")


# -- how a list goes


class Outcome(NamedTuple):
    """How the list of one rank went: ``entered`` and ``ended`` are of its last operation."""

    index: int
    error: Exception | None
    entered: float
    ended: float


def go_through(backend, ops: list[Op]) -> Outcome:
    """Run a list up to the first error; everything before that must be right."""
    for index, op in enumerate(ops):
        call = Call(op, backend)
        entered = time.monotonic()
        try:
            result = call.run(timeout=TIMEOUT)
        except RankwireError as error:
            ended = time.monotonic()
            call.check_untouched()
            return Outcome(index, error, entered, ended)
        call.check(result)
    return Outcome(len(ops), None, 0.0, 0.0)


def go_through_in_background(backend, ops: list[Op]) -> Outcome:
    """Begin the whole list at once, and see how it goes up to the first error."""
    calls = [Call(op, backend) for op in ops]
    begin = time.monotonic()
    works = [call.run(timeout=TIMEOUT, async_op=True) for call in calls]
    for index, (call, work) in enumerate(zip(calls, works, strict=True)):
        try:
            result = work.wait()
        except RankwireError as error:
            ended = time.monotonic()
            call.check_untouched()
            return Outcome(index, error, begin, ended)
        call.check(result)
    return Outcome(len(ops), None, 0.0, 0.0)


def key(op: Op) -> Op:
    op = op.normal()
    return op._replace(kind=SAME_WORDS.get(op.kind, op.kind))


def first_difference(one: list[Op], other: list[Op]) -> int | None:
    for index, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if key(ours) != key(theirs):
            return index
    return None


def check_disagreement(
    world, common: list[Op], odd: list[Op], odd_rank: int, go_through=go_through
) -> None:
    """Let one rank run another list, and check what all ranks see."""
    index = first_difference(common, odd)
    lists = [odd if rank == odd_rank else common for rank in range(len(world))]
    outcomes = in_parallel(
        [partial(go_through, backend, ops) for backend, ops in zip(world, lists, strict=True)]
    )
    if index is None:
        assert [outcome.error for outcome in outcomes] == [None] * len(world)
        return
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, CollectiveMismatchError), (rank, outcome)
        assert outcome.index == index, (rank, outcome)
        assert outcome.error.rank == rank
        check_names_both_sides(outcome.error, common[index], odd[index], odd_rank)
    all_there = max(outcome.entered for outcome in outcomes)
    assert max(outcome.ended for outcome in outcomes) - all_there < SOON


def check_names_both_sides(error, common: Op, odd: Op, odd_rank: int) -> None:
    said = re.search(r" is (.*) on rank (\d+) and (.*) on rank (\d+);", str(error))
    assert said is not None, str(error)
    of_rank = {int(said[2]): said[1], int(said[4]): said[3]}
    assert len(of_rank) == 2
    assert odd_rank in of_rank, str(error)
    for rank, words in of_rank.items():
        for word in (odd if rank == odd_rank else common).words():
            assert word in words, (word, str(error))


# -- what can differ

LIKE = Op(shape=(6, 2))
DIFFERENCES = {
    "kind": ([Op("all_reduce")], [Op("all_gather")]),
    "kind, array or object": ([Op("all_gather")], [Op("all_gather_object")]),
    "kind, nothing to send": ([Op("barrier")], [Op("all_reduce")]),
    "kind, even or uneven": ([Op("all_to_all")], [Op("all_to_all_uneven")]),
    "kind, one or many": ([Op("all_reduce")], [Op("coalesced")]),
    "whether ordered": ([Op("all_reduce")], [Op("all_reduce_ordered")]),
    "op": ([Op("all_reduce")], [Op("all_reduce", "max")]),
    "op of reduce": ([Op("reduce")], [Op("reduce", "max")]),
    "op of reduce_scatter": ([Op("reduce_scatter")], [Op("reduce_scatter", "max")]),
    "dtype of one size": (
        [Op("all_reduce", dtype="float32")],
        [Op("all_reduce", dtype="int32")],
    ),
    "dtype of another size": ([Op("all_to_all")], [Op("all_to_all", dtype="float32")]),
    "shape of one size": ([Op("all_reduce", shape=(4, 2))], [Op("all_reduce", shape=(2, 4))]),
    "shape": ([Op("all_gather", shape=(4, 2))], [Op("all_gather", shape=(5, 2))]),
    "empty": ([Op("all_reduce")], [Op("all_reduce", shape=(0, 2))]),
    "not empty": ([Op("all_gather", shape=(0,))], [Op("all_gather", shape=(1,))]),
    "root of broadcast": ([Op("broadcast", root=0)], [Op("broadcast", root=1)]),
    "root of reduce": ([Op("reduce", root=1)], [Op("reduce", root=0)]),
    "root of gather": ([Op("gather", root=0)], [Op("gather", root=1)]),
    "root of scatter": ([Op("scatter", root=1)], [Op("scatter", root=0)]),
    "root of gather_object": ([Op("gather_object")], [Op("gather_object", root=1)]),
    "root of broadcast_object": ([Op("broadcast_object")], [Op("broadcast_object", root=1)]),
    "root of scatter_object": ([Op("scatter_object")], [Op("scatter_object", root=1)]),
    "order": ([LIKE, Op(), Op("barrier")], [Op(), LIKE, Op("barrier")]),
    "order, twice the same first": (
        [Op(), Op(), LIKE, Op("barrier")],
        [Op(), LIKE, Op(), Op("barrier")],
    ),
    "one more": ([Op(), Op("broadcast"), Op("barrier")], [Op(), Op(), Op("broadcast")]),
    "one less": ([Op(), Op("gather"), Op("barrier")], [Op("gather"), Op("barrier")]),
    "one less at the end": ([Op(), Op(), Op("barrier")], [Op(), Op("barrier")]),
}
FEW = ["dtype of one size", "empty", "one more"]
LARGE = {
    "op": ([Op("all_reduce", shape=BIG)], [Op("all_reduce", "max", shape=BIG)]),
    "dtype": ([Op(dtype="float32", shape=BIG)], [Op(dtype="int32", shape=BIG)]),
    "large or empty": ([Op("all_reduce_out", shape=BIG)], [Op("all_reduce_out", shape=(0, 4))]),
    "root": ([Op("broadcast", shape=BIG)], [Op("broadcast", shape=BIG, root=1)]),
    "root of reduce": ([Op("reduce", shape=BIG)], [Op("reduce", shape=BIG, root=1)]),
    "one less": (
        [Op(shape=BIG), Op("all_gather", shape=BIG), Op("barrier")],
        [Op("all_gather", shape=BIG), Op("barrier")],
    ),
}


def disagree(make_world, size: int, difference, odd_rank: int) -> None:
    common, odd = difference
    with make_world(size, timeout=TIMEOUT) as world:
        check_disagreement(world, common, odd, odd_rank)


def all_at_once(checks, width: int = 8) -> None:
    """Run checks side by side: most of their time they wait."""
    with ThreadPoolExecutor(width) as pool:
        for done in [pool.submit(check) for check in checks]:
            done.result()


@pytest.mark.fault(50, "any difference in a collective's arguments is named on all ranks")
@pytest.mark.parametrize("odd_rank", [0, 1, 2])
def test_whatever_differs_is_found_by_all(odd_rank):
    all_at_once(
        partial(disagree, simulated_world, 3, difference, odd_rank)
        for difference in DIFFERENCES.values()
    )


def test_whatever_differs_is_found_between_sockets():
    all_at_once(
        (
            partial(disagree, WORLDS["auto"], 3, difference, 1)
            for difference in DIFFERENCES.values()
        ),
        width=3,
    )


@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_difference_is_found_on_every_backend_and_size(make_world, size):
    all_at_once(
        (partial(disagree, make_world, size, DIFFERENCES[name], size - 1) for name in FEW), width=3
    )


@pytest.mark.fault(49, "a mismatch is found before arrays are written")
def test_large_arrays_are_not_touched(make_world):
    all_at_once(
        (partial(disagree, make_world, 3, difference, 1) for difference in LARGE.values()), width=3
    )


def test_large_arrays_of_many_ranks_are_not_touched():
    disagree(WORLDS["auto"], 7, LARGE["op"], 3)


def test_in_groups_ranks_are_those_of_the_group():
    with sub_world(simulated_world)(3, timeout=TIMEOUT) as group:
        errors = in_parallel(
            [
                lambda b=b: Running(rankwire.all_reduce, b, np.ones(2 + b.rank)).error()
                for b in group
            ]
        )
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveMismatchError)
        assert error.rank == rank
        named = {int(number) for number in re.findall(r"on rank (\d+)", error.message)}
        assert len(named) == 2
        assert named < {0, 1, 2}


def test_the_peer_of_a_disagreement_is_another_rank():
    """Also for who did not find it but was told."""
    for _ in range(3):
        with simulated_world(3, timeout=TIMEOUT) as world:
            runs = [Running(rankwire.all_gather, b, np.ones(1 + b.rank % 2)) for b in world]
            for rank, run in enumerate(runs):
                assert run.error().peer in {0, 1, 2} - {rank}


def test_a_rank_that_comes_late_is_told_too():
    with simulated_world(3, timeout=TIMEOUT) as world:

        def run(backend):
            if backend.rank == 2:
                time.sleep(0.4)
            call = Call(Op(dtype="int32" if backend.rank else "int64"), backend)
            begin = time.monotonic()
            with pytest.raises(CollectiveMismatchError):
                call.run()
            call.check_untouched()
            return time.monotonic() - begin

        assert max(in_parallel([partial(run, backend) for backend in world])) < SOON


def test_all_ranks_may_differ_from_all_others():
    with simulated_world(4, timeout=TIMEOUT) as world:
        runs = [Running(rankwire.all_gather, b, np.ones(b.rank + 1)) for b in world]
        for run in runs:
            assert isinstance(run.error(), CollectiveMismatchError)
            assert run.seconds < SOON


def test_many_arrays_must_be_the_same_ones():
    """An empty list sends nothing; its rank is ahead of the others, and they must find out."""
    with simulated_world(3, timeout=TIMEOUT) as world:

        def run(backend):
            arrays = [] if backend.rank == 1 else [np.ones(3)]
            rankwire.all_reduce_coalesced(backend, arrays)
            rankwire.all_reduce(backend, np.ones(4))

        begin = time.monotonic()
        for rank in [Running(run, backend) for backend in world]:
            assert isinstance(rank.error(), CollectiveMismatchError)
        assert time.monotonic() - begin < SOON


def test_counts_that_disagree_are_found_by_all():
    for make in (WORLDS["simulated"], WORLDS["auto"]):
        with make(3, timeout=TIMEOUT) as world:

            def run(backend):
                array = np.arange(6)
                expected = [2, 2, 3] if backend.rank == 0 else [2, 2, 2]
                out = np.full(7 if backend.rank == 0 else 6, 99)
                with pytest.raises(CollectiveMismatchError, match="rank 2 sends 2 rows to rank 0"):
                    rankwire.all_to_all(
                        backend, array, send_counts=[2, 2, 2], recv_counts=expected, out=out
                    )
                assert (out == 99).all()

            in_parallel([partial(run, backend) for backend in world])


# -- large ones that travel as streams


def test_a_rank_that_cannot_send_on_is_told_too():
    """The others have disagreed and read no more; it gets stuck in the middle of a message."""
    with tcp_world(3, transport="tcp", timeout=TIMEOUT) as world:
        for run in [Running(rankwire.all_gather, b, np.ones(b.rank)) for b in world[1:]]:
            assert isinstance(run.error(), CollectiveMismatchError)
        array = np.ones(48 << 20, np.uint8)
        run = Running(rankwire.all_reduce, world[0], array)
        assert isinstance(run.error(), CollectiveMismatchError)
        assert run.seconds < SOON
        assert (array == 1).all()


def test_a_rank_that_cannot_send_a_value_on_is_told_too():
    """The same with a value, of whose size the others know nothing."""
    with tcp_world(3, transport="tcp", timeout=TIMEOUT) as world:
        for run in [Running(rankwire.all_gather, b, np.ones(b.rank)) for b in world[1:]]:
            assert isinstance(run.error(), CollectiveMismatchError)
        run = Running(rankwire.all_gather_object, world[0], bytes(32 << 20))
        assert isinstance(run.error(), CollectiveMismatchError)
        assert run.seconds < SOON


@pytest.mark.parametrize("count", [80_000, 1 << 18])
def test_a_full_queue_does_not_keep_the_news_back(count):
    with simulated_world(2, timeout=TIMEOUT, queue_nbytes=1 << 16) as world:
        runs = [
            Running(rankwire.all_reduce, backend, np.ones(count, ["int32", "float32"][rank]))
            for rank, backend in enumerate(world)
        ]
        for run in runs:
            assert isinstance(run.error(), CollectiveMismatchError)
            assert run.seconds < SOON


def test_news_that_a_rank_did_not_take_are_told_again():
    """As when it has to be dialled first, and that takes longer than the patience for news."""
    with simulated_world(2, timeout=TIMEOUT) as world:
        for backend in world:
            refuse_first_notice(backend)
        runs = [Running(rankwire.all_gather, b, np.ones(b.rank + 1)) for b in world]
        for run in runs:
            assert isinstance(run.error(), CollectiveMismatchError)
            assert run.seconds < SOON


def refuse_first_notice(backend) -> None:
    transmit, refused = backend.messages.transmit, []

    def fussy(dst, envelope, *rest):
        _, channel, tag = envelope
        if channel is Channel.COLLECTIVE and tag == (1 << 64) - 1 and dst not in refused:
            refused.append(dst)
            raise DeadlineExceededError(0.05, waiting_for=[dst])
        transmit(dst, envelope, *rest)

    backend.messages.transmit = fussy


# -- a rank that leaves because of it


@pytest.mark.parametrize("how", ["in good order", "by the error"])
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_a_rank_that_leaves_upon_a_disagreement_does_not_hide_it(make_world, odd_rank, how):
    """It was told to all before that rank was let go: what others see is why, not that it left."""
    with make_world(3, timeout=TIMEOUT) as world:
        in_parallel([partial(rankwire.barrier, backend) for backend in world])

        def odd(backend):
            try:
                rankwire.all_reduce(backend, np.ones(5))
            except CollectiveMismatchError as error:
                leaving = getattr(backend, "parent", backend)
                leaving.close(error=error if how == "by the error" else None)
                raise

        usual = [backend for backend in world if backend.rank != odd_rank]
        runs = [Running(rankwire.all_reduce, backend, np.ones(4)) for backend in usual]
        for run in [*runs, Running(odd, world[odd_rank])]:
            assert isinstance(run.error(), CollectiveMismatchError), repr(run.error())
            assert run.seconds < SOON


# -- in the background


def test_operations_in_the_background_disagree_like_others():
    for make in (WORLDS["simulated"], WORLDS["auto"]):
        with make(3, timeout=TIMEOUT) as world:

            def run(backend):
                odd = backend.rank == 2
                calls = [Call(Op(), backend), Call(Op(dtype="int8" if odd else "int16"), backend)]
                works = [call.run(async_op=True) for call in calls]
                calls[0].check(works[0].wait())
                begin = time.monotonic()
                with pytest.raises(CollectiveMismatchError):
                    works[1].wait()
                calls[1].check_untouched()
                return time.monotonic() - begin

            assert max(in_parallel([partial(run, backend) for backend in world])) < SOON


@pytest.mark.parametrize("skew", [0.0, 0.02, 0.04])
def test_two_operations_at_once_are_each_found_out(skew):
    """One in the background and one not, swapped on one rank: both fail, not only the later one."""
    with simulated_world(2, timeout=TIMEOUT) as world:

        def run(backend):
            first, second = ("int32", "int64") if backend.rank else ("int64", "int32")
            time.sleep(skew * backend.rank)
            begin = time.monotonic()
            work = rankwire.all_reduce(backend, np.ones(4, first), async_op=True)
            with pytest.raises(CollectiveMismatchError):
                rankwire.all_reduce(backend, np.ones(4, second))
            with pytest.raises(CollectiveMismatchError):
                work.wait()
            return time.monotonic() - begin

        assert max(in_parallel([partial(run, backend) for backend in world])) < SOON


def test_a_disagreement_in_the_background_does_not_hide_behind_a_later_operation():
    """The third rank is late for both; when it is there, the second operation is all right."""
    with simulated_world(3, timeout=TIMEOUT) as world:

        def run(backend):
            if backend.rank == 2:
                time.sleep(0.3)
            begin = time.monotonic()
            array = np.ones(4, "int64" if backend.rank else "int32")
            work = rankwire.all_reduce(backend, array, async_op=True)
            with contextlib.suppress(CollectiveMismatchError):  # it may, it need not
                rankwire.barrier(backend)
            with pytest.raises(CollectiveMismatchError):
                work.wait()
            return time.monotonic() - begin

        assert max(in_parallel([partial(run, backend) for backend in world])) < SOON + 0.3


# -- going on afterwards


def test_after_a_disagreement_the_next_operations_work(make_world):
    """Also slow ones, which hear what was told late about the earlier one."""
    with make_world(3, timeout=TIMEOUT) as world:
        check_disagreement(world, *DIFFERENCES["dtype of one size"], 1)
        in_parallel([partial(work_slowly, backend) for backend in world])


def test_after_a_disagreement_about_large_arrays_the_next_operations_work(make_world):
    with make_world(3, timeout=TIMEOUT) as world:
        check_disagreement(world, *LARGE["op"], 2)
        in_parallel([partial(work_slowly, backend, BIG) for backend in world])


def test_what_was_told_of_a_disagreement_while_all_found_it_fails_nothing_later():
    """With 30 ms on the way all ranks find it themselves, and all tell all."""
    delay = rankwire.FaultPlan().delay(0.03)
    with simulated_world(3, timeout=TIMEOUT, faults=delay) as world:
        check_disagreement(world, *DIFFERENCES["op"], 0)
        for _ in range(2):
            in_parallel([partial(work_slowly, backend) for backend in world])


def work_slowly(backend, shape=(4, 2)) -> None:
    if backend.rank == backend.world_size - 1:
        time.sleep(0.12)  # the others look up twice
    for kind in ("all_reduce", "all_gather", "broadcast", "reduce_scatter"):
        call = Call(Op(kind, shape=shape), backend)
        call.check(call.run(timeout=TIMEOUT))


# -- random lists


def random_op(rng: random.Random) -> Op:
    shape = rng.choice([(4, 2), (2, 4), (8,), (0, 2), (1,), (6, 2)])
    return Op(
        rng.choice([*MATTERS]),
        rng.choice(["sum", "max"]),
        rng.choice(["float64", "float32", "int32", "uint8"]),
        shape,
        rng.randrange(2),
    ).normal()


def mutated(ops: list[Op], rng: random.Random) -> list[Op]:
    """Return the list with one thing done to it; the last one stays the last one."""
    ops = list(ops)
    place = rng.randrange(len(ops) - 1)
    match rng.choice(["insert", "repeat", "delete", "swap", *_ALL]):
        case "insert":
            ops.insert(place, random_op(rng))
        case "repeat":
            ops.insert(place, ops[place])
        case "delete":
            del ops[place]
        case "swap":
            other = rng.randrange(len(ops) - 1)
            ops[place], ops[other] = ops[other], ops[place]
        case field:
            value = getattr(random_op(rng), field)
            ops[place] = ops[place]._replace(**{field: value}).normal()
    return ops


def random_lists(seed: int, size: int):
    rng = random.Random(seed)
    ops = [random_op(rng) for _ in range(rng.randrange(2, 9))]
    end = Op("all_gather", dtype="int16", shape=(3, 1, 1))  # none of the others is like it
    common = [*ops, end]
    return common, mutated(common, rng), rng.randrange(size)


@pytest.mark.fault(
    49, "ranks that call different collectives are told, before any array is written"
)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_random_lists_with_one_rank_mutated(size):
    def check(seed: int) -> None:
        common, odd, odd_rank = random_lists(seed, size)
        with simulated_world(size, timeout=TIMEOUT) as world:
            try:
                check_disagreement(world, common, odd, odd_rank)
            except BaseException as error:
                error.add_note(f"seed {seed}, rank {odd_rank} of {size}: {common} but {odd}")
                raise

    all_at_once((partial(check, seed) for seed in range(36)), width=48 // size)


@pytest.mark.parametrize("size", [2, 3])
def test_random_lists_in_the_background(size):
    def check(seed: int) -> None:
        common, odd, odd_rank = random_lists(seed, size)
        with simulated_world(size, timeout=TIMEOUT) as world:
            check_disagreement(world, common, odd, odd_rank, go_through_in_background)

    all_at_once((partial(check, seed) for seed in range(200, 224)), width=12)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_random_lists_in_groups_of_one_world(transport):
    """Many groups of the same ranks at once; what goes wrong in one does not reach another."""
    size, seeds = 3, range(100, 116)
    with tcp_world(size, transport=transport, timeout=TIMEOUT) as world:
        groups = in_parallel(
            [lambda b=b: [rankwire.SubBackend(b, range(size)) for _ in seeds] for b in world]
        )
        all_at_once(
            partial(check_disagreement, group, *random_lists(seed, size))
            for seed, group in zip(seeds, zip(*groups, strict=True), strict=True)
        )
        in_parallel([partial(work_slowly, backend) for backend in world])


def test_the_mutations_do_and_do_not_change_lists():
    """The random lists above are worth something: most differ, in many places, and some do not."""
    places = [first_difference(*random_lists(seed, 3)[:2]) for seed in range(48)]
    assert places.count(None) in range(2, 20)
    assert len(set(places)) > 5


def test_one_team_a_backend():
    """Whoever asks first; otherwise operations of one rank would have two numberings."""
    with simulated_world(1) as (alone,):
        sequences = in_parallel([partial(OperationSequence.of, alone)] * 16)
        assert len(set(map(id, sequences))) == 1
