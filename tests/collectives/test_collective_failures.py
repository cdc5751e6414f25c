"""Ranks that die or fail in the middle of a collective: the others end soon, and say who it was.

On the simulated backend a rank is killed after each of its messages, in each algorithm: every
survivor ends with the right result or with ``PeerLostError`` for that rank, never with another
result, and never late. Processes are killed for real, also while others read their memory.
"""

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from queued import keep_workers_away

import rankwire
from interrupts import interrupt_main_thread_in
from rankwire.backends.faults import FaultPlan
from rankwire.collectives import algorithms
from rankwire.collectives.algorithms import split
from rankwire.collectives.reductions import reduction
from rankwire.collectives.sequence import OperationSequence
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.testing import in_parallel, simulated_world, sub_world, tcp_world
from several_hosts import hosts_world
from worlds import Running, deaf, process_world

SOON = 8.0  # measured: up to 0.06 s with 32 worlds at once, on a busy machine more than 1
TIMEOUT = 20.0
COUNT = 12  # elements of one rank


# -- every algorithm, as a function of a backend that returns its result


def own(backend, count: int = COUNT) -> np.ndarray:
    return np.arange(count) * (backend.rank + 2.0) + backend.rank


def total(size: int, count: int = COUNT) -> np.ndarray:
    return np.sum([np.arange(count) * (rank + 2.0) + rank for rank in range(size)], axis=0)


def steps(backend, name: str, run) -> None:
    OperationSequence.of(backend).call(name, lambda **_: (name, run), timeout=TIMEOUT)


def reducing(algorithm):
    """Return an all_reduce by one algorithm."""

    def run(backend):
        source, out = own(backend), np.zeros(COUNT)
        r = reduction("sum", source.dtype)
        steps(backend, algorithm.__name__, lambda x: algorithm(x, source, out, r))
        return out

    return run, lambda rank, size: total(size)


def reducing_to(algorithm, root: int):
    def run(backend):
        source = own(backend)
        out = np.zeros(COUNT) if backend.rank == root else None
        r = reduction("sum", source.dtype)
        steps(backend, algorithm.__name__, lambda x: algorithm(x, source, out, root, r))
        return out

    return run, lambda rank, size: total(size) if rank == root else None


def broadcasting(algorithm, root: int):
    def run(backend):
        array = own(backend)
        steps(backend, algorithm.__name__, lambda x: algorithm(x, array, root))
        return array

    return run, lambda rank, size: np.arange(COUNT) * (root + 2.0) + root


def gathered(size: int) -> np.ndarray:
    return np.concatenate([np.arange(COUNT) * (rank + 2.0) + rank for rank in range(size)])


def gathering_directly():
    def run(backend):
        out = np.zeros(COUNT * backend.world_size)
        parts = split(out, backend.world_size)
        parts[backend.rank][...] = own(backend)
        steps(
            backend,
            "all_gather_directly",
            lambda x: algorithms.all_gather_directly(x, parts[x.rank], parts),
        )
        return out

    return run, lambda rank, size: gathered(size)


def whole(backend) -> np.ndarray:
    """Return an array with one part for each rank."""
    return own(backend, COUNT * backend.world_size)


def exchanged(rank: int, size: int) -> np.ndarray:
    parts = [np.split(np.arange(COUNT * size) * (src + 2.0) + src, size) for src in range(size)]
    return np.concatenate([parts[src][rank] for src in range(size)])


def uneven(backend):
    counts = [COUNT] * backend.world_size
    return rankwire.all_to_all(backend, whole(backend), send_counts=counts, timeout=TIMEOUT)


OPERATIONS = {
    "all_reduce_by_gathering": reducing(algorithms.all_reduce_by_gathering),
    "all_reduce_by_doubling": reducing(algorithms.all_reduce_by_doubling),
    "all_reduce_by_ring": reducing(algorithms.all_reduce_by_ring),
    "all_reduce_directly": reducing(algorithms.all_reduce_directly),
    "reduce_by_gathering": reducing_to(algorithms.reduce_by_gathering, 1),
    "reduce_by_scattering": reducing_to(algorithms.reduce_by_scattering, 0),
    "broadcast_by_tree": broadcasting(algorithms.broadcast_by_tree, 0),
    "broadcast_directly": broadcasting(algorithms.broadcast_directly, 1),
    "broadcast_by_scattering": broadcasting(algorithms.broadcast_by_scattering, 0),
    "all_gather_directly": gathering_directly(),
    "all_gather": (
        lambda b: rankwire.all_gather(b, own(b), timeout=TIMEOUT),
        lambda rank, size: gathered(size),
    ),
    "gather": (
        lambda b: rankwire.gather(b, own(b), 1, timeout=TIMEOUT),
        lambda rank, size: gathered(size) if rank == 1 else None,
    ),
    "scatter": (
        lambda b: rankwire.scatter(b, whole(b) if b.rank == 0 else None, timeout=TIMEOUT),
        lambda rank, size: np.split(np.arange(COUNT * size) * 2.0, size)[rank],
    ),
    "reduce_scatter": (
        lambda b: rankwire.reduce_scatter(b, whole(b), timeout=TIMEOUT),
        lambda rank, size: np.split(total(size, COUNT * size), size)[rank],
    ),
    "all_to_all": (lambda b: rankwire.all_to_all(b, whole(b), timeout=TIMEOUT), exchanged),
    "all_to_all uneven": (uneven, exchanged),
    "all_reduce_coalesced": (
        lambda b: rankwire.all_reduce_coalesced(b, [own(b), own(b).astype("f4")], timeout=TIMEOUT),
        lambda rank, size: [total(size), total(size).astype("f4")],
    ),
    "barrier": (lambda b: rankwire.barrier(b, timeout=TIMEOUT), lambda rank, size: None),
    "all_gather_object": (
        lambda b: rankwire.all_gather_object(b, {"rank": b.rank}, timeout=TIMEOUT),
        lambda rank, size: [{"rank": src} for src in range(size)],
    ),
    "gather_object": (
        lambda b: rankwire.gather_object(b, b.rank, timeout=TIMEOUT),
        lambda rank, size: [*range(size)] if rank == 0 else None,
    ),
    "broadcast_object": (
        lambda b: rankwire.broadcast_object(b, b.rank, 1, timeout=TIMEOUT),
        lambda rank, size: 1,
    ),
    "scatter_object": (
        lambda b: rankwire.scatter_object(b, [*range(b.world_size)], timeout=TIMEOUT),
        lambda rank, size: rank,
    ),
    "all_to_all_object": (
        lambda b: rankwire.all_to_all_object(b, [*range(b.world_size)], timeout=TIMEOUT),
        lambda rank, size: [rank] * size,
    ),
    "in the background": (
        lambda b: rankwire.all_reduce(b, own(b), async_op=True, timeout=TIMEOUT).wait(),
        lambda rank, size: total(size),
    ),
    "large, exchanged by the selection": (
        lambda b: rankwire.all_reduce(b, own(b, 20_000), timeout=TIMEOUT),
        lambda rank, size: total(size, 20_000),
    ),
}


def messages_sent(name: str, size: int) -> list[int]:
    """Return how many messages each rank sends in an operation; it must go well."""
    run, expected = OPERATIONS[name]
    plan = FaultPlan().kill(0, after=1_000_000)  # only to have them counted
    with simulated_world(size, timeout=TIMEOUT, faults=plan) as world:
        for rank, result in enumerate(in_parallel([partial(run, b) for b in world])):
            np.testing.assert_equal(result, expected(rank, size))
        return [world[0].network.traffic.sent[rank] for rank in range(size)]


def kill_after(name: str, size: int, victim: int, count: int) -> int:
    """Kill a rank after so many messages; check all others, and return how many succeeded."""
    run, expected = OPERATIONS[name]
    succeeded = 0
    with simulated_world(size, timeout=TIMEOUT, faults=FaultPlan().kill(victim, after=count)) as w:
        runs = {rank: Running(run, w[rank]) for rank in range(size) if rank != victim}
        dying = Running(run, w[victim])
        for rank, survivor in runs.items():
            result, error = outcome(survivor, PeerLostError)
            if error is None:
                np.testing.assert_equal(result, expected(rank, size))
                succeeded += 1
            else:
                assert error.peer == victim, (rank, error)
                assert error.rank == rank
            assert survivor.seconds < SOON, (rank, survivor.seconds)
        result, error = outcome(dying, PeerLostError)
        if error is None:
            np.testing.assert_equal(result, expected(victim, size))
    return succeeded


def outcome(run: Running, kind: type[Exception]):
    """Return the result and None, or None and an error of that kind."""
    try:
        return run.result(), None
    except kind as error:
        return None, error


def check_all(cases) -> list:
    """Run many worlds at once: they mostly wait."""

    def check(case):
        try:
            return kill_after(*case)
        except BaseException as error:
            error.add_note(f"case {case}")
            raise

    with ThreadPoolExecutor(24) as pool:
        return [done.result() for done in [pool.submit(check, case) for case in cases]]


@pytest.mark.fault(
    48, "whatever a rank of a collective had sent when it died, all others end and name it"
)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_dies_after_each_of_its_messages(name, size):
    cases = [
        (name, size, victim, count)
        for victim, sent in enumerate(messages_sent(name, size))
        for count in range(sent + 1)
    ]
    check_all(cases)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_rank_dies_somewhere_in_worlds_of_other_sizes(size):
    rng = random.Random(size)
    cases = []
    for name in OPERATIONS:
        victim = rng.randrange(size)
        count = rng.randrange(messages_sent(name, size)[victim] + 1)
        cases.append((name, size, victim, count))
    check_all(cases)


def test_nobody_needs_a_rank_that_has_sent_everything():
    """The matrix above would be worth little if every survivor always failed."""
    sent = messages_sent("broadcast_directly", 4)
    assert sum(check_all([("broadcast_directly", 4, 1, sent[1])] * 10)) > 0


def test_two_ranks_die():
    for first, second in ((0, 1), (3, 1), (2, 3)):
        plan = FaultPlan().kill(first, after=1).kill(second, after=2)
        with simulated_world(5, timeout=TIMEOUT, faults=plan) as world:
            alive = [backend for backend in world if backend.rank not in (first, second)]
            run, _ = OPERATIONS["all_reduce_directly"]
            runs = [Running(run, backend) for backend in world]
            for backend in alive:
                error = runs[backend.rank].error()
                assert isinstance(error, PeerLostError)
                assert error.peer in (first, second)
                assert runs[backend.rank].seconds < SOON


def test_a_broken_link_ends_the_operation_everywhere():
    with simulated_world(4, timeout=TIMEOUT, faults=FaultPlan().drop_link(1, 2, after=1)) as world:
        run, _ = OPERATIONS["all_reduce_directly"]
        runs = [Running(run, backend) for backend in world]
        for rank, other in enumerate(runs):
            error = other.error()
            assert isinstance(error, PeerLostError), (rank, error)
            assert error.peer in (1, 2)
            assert other.seconds < SOON


def test_the_dead_are_known_by_their_rank_in_the_group():
    with sub_world(simulated_world)(3, timeout=TIMEOUT) as group:
        runs = [Running(rankwire.all_reduce, backend, np.ones(3)) for backend in group[:2]]
        time.sleep(0.08)
        group[0].parent.network.kill(3)
        for run in runs:
            error = run.error()
            assert isinstance(error, PeerLostError)
            assert error.peer == 2
            assert run.seconds < SOON


@pytest.mark.fault(48, "later collectives fail at once, and a group of the others works")
@pytest.mark.parametrize("size", [3, 4])
def test_after_a_death_everything_fails_at_once_and_a_group_of_the_others_works(size):
    with simulated_world(size, timeout=TIMEOUT, faults=FaultPlan().kill(1, after=1)) as world:
        alive = [backend for backend in world if backend.rank != 1]

        def run(backend):
            for _ in range(3):
                begin = time.monotonic()
                with pytest.raises(PeerLostError) as caught:
                    rankwire.all_reduce(backend, np.ones(3))
                assert caught.value.peer == 1
                assert time.monotonic() - begin < SOON
            group = rankwire.SubBackend(backend, [b.rank for b in alive])
            return rankwire.all_reduce(group, np.ones(3))

        dying = Running(rankwire.all_reduce, world[1], np.ones(3))
        for result in in_parallel([partial(run, backend) for backend in alive]):
            np.testing.assert_array_equal(result, np.full(3, size - 1))
        assert isinstance(dying.error(), PeerLostError)


# -- a rank that fails

WORLDS = {
    "simulated": simulated_world,
    "auto": partial(tcp_world, transport="auto"),
    "tcp": partial(tcp_world, transport="tcp"),
    "hosts": hosts_world,
    "sub-auto": sub_world(partial(tcp_world, transport="auto")),
}
SMALL, LARGE = 100, 1 << 18  # 2 MiB of float64


@pytest.fixture(params=list(WORLDS))
def make_world(request):
    return partial(WORLDS[request.param], timeout=30.0)


def check_aborted(runs: dict[int, Running], culprit: int, reason: str, since: float) -> None:
    for rank, run in runs.items():
        error = run.error()
        assert isinstance(error, CollectiveAbortedError), (rank, repr(error))
        assert error.peer == culprit
        assert reason in str(error)
        assert run.ended - since < SOON


def check_late(world, runs: list[Running], total, culprit: int, reason: str) -> None:
    """Whoever comes later is told too; if it has found all that it needs, then in the next one."""
    errors = []
    for run in runs:
        result, error = outcome(run, CollectiveAbortedError)
        assert run.seconds < SOON
        if error is None:
            assert np.all(result == total)
        else:
            assert error.peer == culprit
        errors.append(error)
    if None in errors:
        nexts = [Running(rankwire.all_reduce, backend, np.ones(SMALL)) for backend in world]
        errors += [run.error() for run in nexts]
    for error in filter(None, errors):
        assert isinstance(error, CollectiveAbortedError)
        assert reason in str(error)


def check_works(world, count: int = SMALL) -> None:
    arrays = [np.full(count, b.rank + 1.0) for b in world]
    for result in in_parallel(
        [partial(rankwire.all_reduce, b, a) for b, a in zip(world, arrays, strict=True)]
    ):
        assert (result == sum(range(1, len(world) + 1))).all()


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_rank_whose_time_is_up_ends_the_others_long_before_theirs(make_world, count):
    with make_world(4) as world:
        begin = time.monotonic()
        runs = {
            rank: Running(
                rankwire.all_reduce, world[rank], np.ones(count), timeout=0.8 if rank == 1 else 30
            )
            for rank in (0, 1, 3)  # 2 does not come
        }
        error = runs.pop(1).error()
        assert isinstance(error, DeadlineExceededError)
        assert error.waiting_for == [2]
        check_aborted(runs, 1, "no result within 0.8 s waiting for rank 2", begin + 0.8)
        late = Running(rankwire.all_reduce, world[2], np.ones(count), timeout=30)
        check_late(world, [late], 4, 1, "no result within 0.8 s")
        check_works(world, count)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_rank_without_memory_ends_the_others(make_world, monkeypatch, count):
    """It fails after it has sent its contribution, in some cases while others read it."""
    fold = type(reduction("sum", np.dtype("f8"))).fold

    def out_of_memory(self, *args, **kwargs):
        if threading.current_thread().name == "the poor one":
            raise MemoryError("no memory for a test")
        time.sleep(0.05)
        return fold(self, *args, **kwargs)

    def poor(backend):
        threading.current_thread().name = "the poor one"
        rankwire.reduce_scatter(backend, np.ones(3 * count))

    with make_world(3) as world:
        monkeypatch.setattr(type(reduction("sum", np.dtype("f8"))), "fold", out_of_memory)
        runs = [
            Running(rankwire.reduce_scatter, world[0], np.ones(3 * count)),
            Running(poor, world[1]),
            Running(rankwire.reduce_scatter, world[2], np.ones(3 * count)),
        ]
        assert isinstance(runs[1].error(), MemoryError)
        monkeypatch.undo()
        check_late(world, [runs[0], runs[2]], 3, 1, "MemoryError('no memory for a test')")
        check_works(world, count)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_an_interrupt_ends_the_others(make_world, count):
    with make_world(3) as world:
        check_works(world)  # connected
        waiting = Running(rankwire.all_reduce, world[1], np.ones(count))
        interrupting = Running(interrupt_main_thread_in, "all_reduce")
        with pytest.raises(KeyboardInterrupt):
            rankwire.all_reduce(world[0], np.ones(count))
        interrupted = interrupting.result()
        assert time.monotonic() - interrupted < SOON
        check_aborted({1: waiting}, 0, "KeyboardInterrupt", interrupted)
        late = Running(rankwire.all_reduce, world[2], np.ones(count))
        check_late(world, [late], 3, 0, "KeyboardInterrupt")
        check_works(world, count)


@pytest.mark.fault(37, "an interrupt of who waits for background work ends the others")
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_an_interrupt_of_who_waits_for_work_ends_the_others(make_world, monkeypatch, count):
    """It runs the operation itself, which fails as a blocking one does."""
    keep_workers_away(monkeypatch)
    with make_world(3) as world:
        check_works(world)  # connected
        waiting = Running(rankwire.all_reduce, world[1], np.ones(count))
        work = rankwire.all_reduce(world[0], np.ones(count), async_op=True)
        interrupting = Running(interrupt_main_thread_in, "help")
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        interrupted = interrupting.result()
        assert time.monotonic() - interrupted < SOON
        assert isinstance(work.exception(0), KeyboardInterrupt)
        check_aborted({1: waiting}, 0, "KeyboardInterrupt", interrupted)
        late = Running(rankwire.all_reduce, world[2], np.ones(count))
        check_late(world, [late], 3, 0, "KeyboardInterrupt")
        check_works(world, count)


# A closed group is not told to its other members, who may have done their part.
LEAVABLE = pytest.mark.parametrize("kind", [kind for kind in WORLDS if "sub" not in kind])


@LEAVABLE
def test_operations_that_are_queued_when_a_rank_leaves_fail_with_the_first(kind):
    with WORLDS[kind](3, timeout=30.0) as world:
        check_works(world)
        world[1].close()
        begin = time.monotonic()
        works = [
            [rankwire.all_reduce(world[rank], np.ones(SMALL), async_op=True) for _ in range(60)]
            for rank in (0, 2)
        ]
        for work in works[0] + works[1]:
            error = work.exception()
            assert isinstance(error, ChannelClosedError)
            assert error.peer == 1
        assert time.monotonic() - begin < 5  # each took 0.2 s, one after the other


@pytest.mark.parametrize("kind", ["simulated", "auto", "tcp"])  # where rank 1 needs rank 2 itself
@pytest.mark.parametrize("begun", [0, 5])
def test_a_rank_that_leaves_because_of_another_is_not_blamed(kind, monkeypatch, begun):
    """Rank 2 leaves with operations in its queue, then rank 1, then rank 0 looks at its own."""
    keep_workers_away(monkeypatch)
    with WORLDS[kind](3, timeout=30.0) as world:
        check_works(world)
        counts = {0: 10, 1: 10, 2: begun}
        works = {
            rank: [
                rankwire.all_reduce(world[rank], np.ones(SMALL), async_op=True)
                for _ in range(count)
            ]
            for rank, count in counts.items()
        }
        world[2].close()
        assert works[1][-1].exception().peer == 2
        world[1].close()
        for work in reversed(works[0]):
            assert work.exception().peer == 2


def test_a_stuck_send_does_not_outlive_the_operation():
    """One waits for nobody in particular, but cannot send on; another one's failure ends it too."""
    with tcp_world(3, transport="tcp", timeout=TIMEOUT) as world:
        array = np.ones(48 << 20, np.uint8)
        failing = Running(rankwire.all_reduce, world[1], array.copy(), timeout=0.3)
        stuck = Running(rankwire.all_reduce, world[0], array)
        assert isinstance(failing.error(), DeadlineExceededError)
        error = stuck.error()
        assert isinstance(error, CollectiveAbortedError), repr(error)
        assert stuck.ended - failing.ended < SOON


def test_a_rank_that_fails_in_the_middle_ends_those_that_send_to_it():
    """All have met, and know that they are in one operation; it takes nothing of what they send."""
    with tcp_world(3, transport="tcp", timeout=TIMEOUT) as world:
        array = np.ones(48 << 20, np.uint8)

        def run(backend):
            def steps(x):
                if x.rank == 1:
                    algorithms.meet(x)
                    raise MemoryError("no memory for a test")
                out = np.empty(16 << 20, np.uint8)
                r = reduction("sum", array.dtype)
                algorithms.reduce_scatter_directly(x, split(array, 3), out, r)

            OperationSequence.of(backend).call("printing", lambda: ("reduce_scatter", steps))

        runs = {backend.rank: Running(run, backend) for backend in world}
        failing = runs.pop(1)
        assert isinstance(failing.error(), MemoryError)
        check_aborted(runs, 1, "no memory for a test", failing.ended)
        check_works(world)


def test_a_stuck_dial_does_not_outlive_the_operation():
    """The same, but the rank that does not come was never connected and does not answer."""
    with tcp_world(3, timeout=TIMEOUT) as world, deaf(world[2]):
        failing = Running(rankwire.all_gather_object, world[1], 1, timeout=0.2)
        stuck = Running(rankwire.all_gather_object, world[0], 1)
        assert isinstance(failing.error(), DeadlineExceededError)
        assert isinstance(stuck.error(), CollectiveAbortedError)
        assert stuck.ended - failing.ended < SOON


def test_a_value_that_one_rank_cannot_decode_ends_the_others(monkeypatch):
    """An error of the layers below, in one rank only."""
    with simulated_world(3, timeout=30.0) as world:
        codec = rankwire.Codec()
        decode = codec.decode

        def picky(payload, **options):
            if threading.current_thread().name == "picky":
                raise rankwire.InvalidMessageError("not to my taste")
            return decode(payload, **options)

        codec.decode = picky

        def run(backend):
            if backend.rank == 2:
                threading.current_thread().name = "picky"
            return rankwire.all_gather_object(backend, backend.rank, codec=codec)

        runs = [Running(run, backend) for backend in world]
        assert isinstance(runs[2].error(), rankwire.InvalidMessageError)
        check_late(world, runs[:2], [0, 1, 2], 2, "not to my taste")
        check_works(world)


# -- processes


ALL_REDUCE = "__import__('rankwire').all_reduce(backend, __import__('numpy').ones({count}))[-1]"
FOR_EVER = "[{operation} for _ in range(10**6)]"


def start_all(ranks, operation: str):
    return {rank.rank: rank.start("eval", operation) for rank in ranks}


def connect(ranks) -> None:
    for command in start_all(ranks, ALL_REDUCE.format(count=10)).values():
        assert command.result() == len(ranks)


def check_survivors(commands, victim: int, killed: float) -> None:
    for rank, command in commands.items():
        error = command.error()
        assert isinstance(error, PeerLostError), (rank, repr(error))
        assert error.peer == victim, (rank, repr(error))
        assert command.ended - killed < SOON


def check_group(ranks) -> None:
    """Show that the survivors can go on among themselves."""
    members = [rank.rank for rank in ranks]
    group = f"__import__('rankwire').SubBackend(backend, {members})"
    operation = ALL_REDUCE.format(count=1 << 18).replace("backend", group)
    for command in start_all(ranks, operation).values():
        assert command.result() == len(ranks)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_is_killed_before_it_comes(transport, victim):
    with process_world(4, transport=transport) as ranks:
        connect(ranks)
        others = [rank for rank in ranks if rank.rank != victim]
        waiting = start_all(others, ALL_REDUCE.format(count=10))
        time.sleep(0.1)
        killed = ranks[victim].kill()
        check_survivors(waiting, victim, killed)
        again = time.monotonic()
        check_survivors(start_all(others, ALL_REDUCE.format(count=1 << 18)), victim, again)
        check_group(others)


@pytest.mark.fault(48, "a process killed while large arrays travel ends the collective for all")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_to_all"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_process_is_killed_while_large_arrays_travel(transport, operation):
    """They run one after the other until it happens, at a time that is different each time."""
    rng = random.Random(f"{transport} {operation}")
    with process_world(3, transport=transport) as ranks:
        connect(ranks)
        array = "__import__('numpy').ones(3 << 18)"  # 6 MiB
        call = f"__import__('rankwire').{operation}(backend, {array})[-1]"
        running = start_all(ranks, FOR_EVER.format(operation=call))
        time.sleep(rng.uniform(0.05, 0.2))
        victim = rng.randrange(3)
        killed = ranks[victim].kill()
        del running[victim]
        check_survivors(running, victim, killed)
        check_group([rank for rank in ranks if rank.rank != victim])


SLOW_READER = """
import time
from rankwire.links import borrower
pull = borrower.Borrowed._pull
reading = []
def slowly(self, start, view):
    reading.append(start)
    if len(reading) == 2:
        time.sleep(0.3)
    pull(self, start, view)
borrower.Borrowed._pull = slowly
"""


@pytest.mark.usefixtures("folder")
def test_a_process_is_killed_while_others_read_its_memory():
    """They have read a block and stop; when they go on, its memory is gone."""
    with process_world(3, segment_nbytes=0) as ranks:
        connect(ranks)
        for rank in ranks:
            rank.call("eval", "exec(code, globals())", code=SLOW_READER)
        waiting = start_all(ranks, ALL_REDUCE.format(count=3 << 19))
        time.sleep(0.15)
        killed = ranks[1].kill()
        del waiting[1]
        check_survivors(waiting, 1, killed)


@pytest.mark.usefixtures("folder")
def test_a_process_is_killed_that_reads_the_memory_of_others():
    with process_world(3, segment_nbytes=0) as ranks:
        connect(ranks)
        ranks[2].call("eval", "exec(code, globals())", code=SLOW_READER.replace("0.3", "30"))
        waiting = start_all(ranks, ALL_REDUCE.format(count=3 << 19))
        time.sleep(0.15)
        killed = ranks[2].kill()
        del waiting[2]
        check_survivors(waiting, 2, killed)


@pytest.mark.usefixtures("folder")
def test_a_process_is_killed_after_it_was_done():
    with process_world(3) as ranks:
        connect(ranks)
        killed = ranks[1].kill()
        operation = ALL_REDUCE.format(count=10)
        check_survivors(
            start_all([ranks[0], ranks[2]], operation), 1, max(killed, time.monotonic())
        )


@pytest.mark.usefixtures("folder")
def test_a_death_ends_also_a_rank_that_cannot_send_on():
    """The third one has given up because of it, and takes nothing more."""
    with process_world(3, transport="tcp", timeout=TIMEOUT) as ranks:
        connect(ranks)
        killed = ranks[2].kill()
        check_survivors(start_all([ranks[1]], ALL_REDUCE.format(count=10)), 2, killed)
        begin = time.monotonic()
        check_survivors(start_all([ranks[0]], ALL_REDUCE.format(count=6 << 20)), 2, begin)


@pytest.mark.usefixtures("folder")
def test_a_process_that_stops_is_named_at_the_time_limit():
    with process_world(3) as ranks:
        connect(ranks)
        ranks[1].stop()
        operation = ALL_REDUCE.format(count=10).replace("ones(10)", "ones(10), timeout=1.5")
        for command in start_all([ranks[0], ranks[2]], operation).values():
            error = command.error()
            assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
            assert "waiting for rank 1" in str(error)
        ranks[1].signal(signal.SIGCONT)
        with pytest.raises(CollectiveAbortedError):
            ranks[1].call("eval", ALL_REDUCE.format(count=10))
        connect(ranks)


@pytest.mark.usefixtures("folder")
def test_the_first_process_is_killed_in_a_world_that_has_just_formed():
    """Nobody is connected to anybody yet, and rank 0 was the one who tells of deaths."""
    with process_world(4) as ranks:
        waiting = start_all(ranks[1:], ALL_REDUCE.format(count=10))
        time.sleep(0.02)
        killed = ranks[0].kill()
        for rank, command in waiting.items():
            error = command.error()
            assert isinstance(error, RankwireError)
            assert isinstance(error, PeerLostError), (rank, repr(error))
            assert error.peer == 0
            assert command.ended - killed < SOON
