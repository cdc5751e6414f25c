"""Everything at once: many operations, groups, threads, messages, calls; nothing is mixed up.

And the user's memory: what an operation was given may be changed as soon as it has returned, and
no other rank sees that, also where ranks read each other's memory.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from test_mismatch import Call, Op, random_op

import rankwire
from rankwire.errors import CollectiveAbortedError, ConfigurationError, DeadlineExceededError
from rankwire.testing import in_parallel, simulated_world, tcp_world
from several_hosts import hosts_world
from worlds import Running, process_world

WORLDS = {
    "simulated": simulated_world,
    "auto": partial(tcp_world, transport="auto"),
    "tcp": partial(tcp_world, transport="tcp"),
    "hosts": hosts_world,
}
TIMEOUT = 20.0
LARGE = (1 << 16, 2)  # 1 MiB of float64 from each rank


# That ranks of several hosts fail alike, test_mismatch and test_collective_failures show sooner.
@pytest.fixture(
    params=[pytest.param(w, marks=pytest.mark.slow) if w == "hosts" else w for w in WORLDS]
)
def make_world(request):
    return partial(WORLDS[request.param], timeout=TIMEOUT)


# -- many at once


def test_many_operations_are_outstanding(make_world):
    with make_world(3) as world:

        def run(backend):
            rng = random.Random(7)  # the same on all ranks
            calls = [Call(random_op(rng), backend) for _ in range(150)]
            works = [call.run(async_op=True) for call in calls]
            order = list(range(150))
            random.Random(backend.rank).shuffle(order)  # they are waited for in any order
            for index in order:
                calls[index].check(works[index].wait())

        in_parallel([partial(run, backend) for backend in world])


def test_operations_of_both_kinds_at_once(make_world):
    """Some in the background, some not, and those overtake the others."""
    with make_world(3) as world:

        def run(backend):
            rng = random.Random(11)
            pending = []
            for number in range(120):
                shape = LARGE if number % 40 == 0 else (4, 2)
                call = Call(random_op(rng)._replace(shape=shape), backend)
                if rng.random() < 0.6:
                    pending.append((call, call.run(async_op=True)))
                else:
                    call.check(call.run())
                while len(pending) > 8:
                    call, work = pending.pop(0)
                    call.check(work.wait())
            for call, work in pending:
                call.check(work.wait())

        in_parallel([partial(run, backend) for backend in world])


GROUPS = [[0, 1], [1, 2, 3], [0, 1, 2, 3], [0, 2], [1, 3], [0, 1, 2, 3]]
ROUNDS = 30


def test_groups_threads_messages_barriers_and_calls_at_once(make_world):
    """Messages are of the sizes that collectives and barriers have too: 0, 8 and 64 bytes."""
    failures = []
    with make_world(4) as world:

        def collectives(seed: int, group) -> None:
            rng = random.Random(seed)
            works = []
            for number in range(ROUNDS):
                op = random_op(rng)
                if number % 20 == 7:
                    op = op._replace(shape=LARGE)
                call = Call(op, group)
                if rng.random() < 0.5:
                    call.check(call.run())
                else:
                    works.append((call, call.run(async_op=True)))
            for call, work in works:
                call.check(work.wait())

        def messages(backend) -> None:
            right, left = (backend.rank + 1) % 4, (backend.rank - 1) % 4
            for number in range(3 * ROUNDS):
                data = bytes([number % 251, backend.rank]) * [0, 4, 32][number % 3]
                backend.send(data, right, tag=number % 2)
                expected = bytes([number % 251, left]) * [0, 4, 32][number % 3]
                assert backend.recv(left, tag=number % 2) == expected

        def barriers(backend) -> None:
            for _ in range(ROUNDS):
                backend.barrier()

        def calls(agent, backend) -> None:
            for number in range(ROUNDS):
                dst = (backend.rank + 1 + number % 3) % 4
                value = np.full(8, float(number))
                assert (agent.rpc_sync(dst, "add", value, backend.rank) == number + dst).all()

        def run(backend) -> None:
            groups = [
                rankwire.SubBackend(backend, members)
                for members in GROUPS
                if backend.rank in members
            ]
            seeds = [seed for seed, members in enumerate(GROUPS) if backend.rank in members]
            meeting = rankwire.SubBackend(backend, range(4))  # a thread a group: both are in order
            with rankwire.RpcAgent(backend) as agent:
                agent.register("add", lambda x, src: x + backend.rank)
                backend.barrier()
                tasks = [
                    *(partial(collectives, s, g) for s, g in zip(seeds, groups, strict=True)),
                    partial(collectives, 99, backend),
                    partial(messages, backend),
                    partial(barriers, meeting),
                    partial(calls, agent, backend),
                ]
                with ThreadPoolExecutor(len(tasks)) as pool:
                    running = [pool.submit(task) for task in tasks]
                    failures.extend(filter(None, (done.exception(TIMEOUT) for done in running)))
                backend.barrier()  # nobody leaves while others still call

        in_parallel([partial(run, backend) for backend in world])
    if failures:
        raise failures[0]


def test_good_and_bad_rounds_take_turns(make_world):
    """One rank is late and the others give up, or not; then all are in step again.

    If the late rank had done its part before it heard that the others gave up, it is told in the
    next operation, which fails on all ranks (docs/collectives.md, "After a failure").
    """
    with make_world(3) as world:
        rng = random.Random(3)
        for _ in range(3):
            shape = rng.choice([(4, 2), LARGE])
            late_rank, gives_up = rng.randrange(3), rng.random() < 0.7
            kind = rng.choice(["all_reduce", "all_gather", "broadcast", "reduce_scatter"])

            def bad(backend, shape=shape, late_rank=late_rank, gives_up=gives_up, kind=kind):
                call = Call(Op(kind, shape=shape), backend)
                late = backend.rank == late_rank
                time.sleep(0.15 * late)
                try:
                    call.check(call.run(timeout=0.08 if gives_up and not late else TIMEOUT))
                    return False
                except (DeadlineExceededError, CollectiveAbortedError):
                    assert gives_up
                    return True
                finally:
                    call.array[...] = 55  # it is ours again, also after an error

            def told(backend):
                with pytest.raises(CollectiveAbortedError):
                    backend.barrier()

            def good(backend, shape=shape):
                for kind in ("all_reduce", "all_to_all", "broadcast"):
                    call = Call(Op(kind, shape=shape), backend)
                    call.check(call.run())

            failed = in_parallel([partial(bad, backend) for backend in world])
            if any(failed) and not all(failed):
                in_parallel([partial(told, backend) for backend in world])
            in_parallel([partial(good, backend) for backend in world])


def test_results_of_dropped_work_do_not_disturb_anyone():
    with simulated_world(3, timeout=TIMEOUT) as world:

        def run(backend):
            for number in range(50):
                rankwire.all_reduce(backend, np.full(8, number), async_op=True)
            return rankwire.all_reduce(backend, np.ones(8), async_op=True).wait()

        for result in in_parallel([partial(run, backend) for backend in world]):
            assert (result == 3).all()


# -- the user's memory

COUNTS = [3, 1 << 12, 1 << 15, 1 << 17, 3 << 17]  # elements of float64 of one part; up to 3 MiB


def change_at_once(backend, rounds: int) -> None:
    """Overwrite everything as soon as an operation returns; what all others get must be right."""
    rank, size = backend.rank, backend.world_size
    sum_of_ranks = size * (size - 1) // 2

    def is_right(array, value) -> None:
        assert (array == value).all(), (rank, np.unique(array), value)

    for number in range(rounds):
        count = COUNTS[number % len(COUNTS)]
        root = number % size
        value = float(number * size + rank)
        total = number * size * size + sum_of_ranks
        one, many = np.full(count, value), np.repeat(np.arange(size) + value, count)

        result = rankwire.all_reduce(backend, one).copy()
        one[...] = np.nan
        is_right(result, total)

        one[...] = value
        result = rankwire.all_gather(backend, one)
        one[...] = np.nan
        for src, part in enumerate(np.split(result, size)):
            is_right(part, number * size + src)

        result = rankwire.reduce_scatter(backend, many)
        many[...] = np.nan
        is_right(result, total + size * rank)

        many[...] = np.repeat(np.arange(size) + value, count)
        result = rankwire.all_to_all(backend, many)
        many[...] = np.nan
        for src, part in enumerate(np.split(result, size)):
            is_right(part, number * size + src + rank)

        one[...] = value
        result = rankwire.broadcast(backend, one, root).copy()
        one[...] = np.nan
        is_right(result, number * size + root)

        one[...] = value
        result = rankwire.reduce(backend, one, root)
        one[...] = np.nan
        if rank == root:
            is_right(result, total)

        one[...] = value
        result = rankwire.gather(backend, one, root)
        one[...] = np.nan
        if rank == root:
            for src, part in enumerate(np.split(result, size)):
                is_right(part, number * size + src)

        many[...] = np.repeat(np.arange(size) + value, count)
        result = rankwire.scatter(backend, many if rank == root else None, root)
        many[...] = np.nan
        is_right(result, number * size + root + rank)

        one[...] = value
        values = rankwire.all_gather_object(backend, one)
        one[...] = np.nan
        for src, part in enumerate(values):
            if src != rank:  # one's own is the very object
                is_right(part, number * size + src)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_was_passed_may_be_changed_at_once(make_world, size):
    with make_world(size) as world:
        in_parallel([partial(change_at_once, backend, 5) for backend in world])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("size", [2, 4])
def test_what_was_passed_may_be_changed_at_once_between_processes(size):
    with process_world(size) as ranks:
        module = "__import__('importlib').import_module('collectives.test_collective_stress')"
        path = "__import__('sys').path.append(__file__.rpartition('/')[0] + '/collectives')"
        for rank in ranks:
            rank.call("eval", path)
        commands = [
            rank.start("eval", f"{module}.change_at_once(backend, rounds)", rounds=5)
            for rank in ranks
        ]
        for command in commands:
            command.result(30)


def test_what_an_operation_in_the_background_was_given_may_be_changed_when_it_is_done(make_world):
    with make_world(3) as world:

        def run(backend):
            arrays = [np.full(1 << 16, float(number + backend.rank)) for number in range(8)]
            works = [rankwire.all_gather(backend, array, async_op=True) for array in arrays]
            for number, (array, work) in enumerate(zip(arrays, works, strict=True)):
                result = work.wait()
                array[...] = np.nan
                for src, part in enumerate(np.split(result, 3)):
                    assert (part == number + src).all()

        in_parallel([partial(run, backend) for backend in world])


def right_or_refused(run) -> bool:
    """Memory that is given twice must not be mixed up silently: refuse it, or get it right."""
    try:
        return run()
    except ConfigurationError:
        return True


def reduce_scatter_elsewhere(backend, count: int) -> bool:
    array = np.repeat([10.0, 20.0], count) + backend.rank
    other = 1 - backend.rank
    out = array[other * count : (other + 1) * count]
    result = rankwire.reduce_scatter(backend, array, out=out)
    return bool((result == [21, 41][backend.rank]).all())


def scatter_elsewhere(backend, count: int) -> bool:
    array = np.repeat([10.0, 20.0], count)
    if backend.rank == 1:
        result = rankwire.scatter(backend, array, 1, out=array[:count])
    else:
        result = rankwire.scatter(backend, root=1)
    return bool((result == [10, 20][backend.rank]).all())


def all_gather_from_elsewhere(backend, count: int) -> bool:
    out = np.zeros(2 * count)
    other = 1 - backend.rank
    array = out[other * count : (other + 1) * count]
    array[...] = backend.rank + 1
    result = rankwire.all_gather(backend, array, out=out)
    return bool((result == np.repeat([1.0, 2.0], count)).all())


def gather_from_elsewhere(backend, count: int) -> bool:
    if backend.rank == 1:
        return rankwire.gather(backend, np.full(count, 2.0)) is None
    out = np.zeros(2 * count)
    array = out[count:]
    array[...] = 1
    result = rankwire.gather(backend, array, out=out)
    return bool((result == np.repeat([1.0, 2.0], count)).all())


def all_reduce_shifted(backend, count: int) -> bool:
    memory = np.full(count + 1000, backend.rank + 1.0)
    result = rankwire.all_reduce(backend, memory[:count], out=memory[1000:])
    return bool((result == 3).all())


@pytest.mark.parametrize("kind", ["auto", "tcp"])
@pytest.mark.parametrize(
    "operation",
    [
        reduce_scatter_elsewhere,
        scatter_elsewhere,
        all_gather_from_elsewhere,
        gather_from_elsewhere,
        all_reduce_shifted,
    ],
)
def test_out_may_overlap_what_others_still_read(kind, operation):
    """``out`` is another part of ``array`` than one's own: right, or refused, but never wrong."""
    with WORLDS[kind](2, timeout=TIMEOUT) as world:
        rights = [
            in_parallel([partial(right_or_refused, partial(operation, b, 1 << 17)) for b in world])
            for _ in range(12)
        ]
        assert rights == [[True, True]] * 12


@pytest.mark.parametrize("count", [3, 1 << 17])
def test_ones_own_part_may_be_the_result(make_world, count):
    """As all_gather and reduce_scatter are often called: in one array."""
    with make_world(3) as world:

        def run(backend):
            whole = np.zeros(3 * count)
            mine = np.split(whole, 3)[backend.rank]
            mine[...] = backend.rank + 1
            rankwire.all_gather(backend, mine, out=whole)
            assert (whole == np.repeat([1.0, 2.0, 3.0], count)).all()
            rankwire.reduce_scatter(backend, whole, out=mine)
            assert (mine == 3.0 * (backend.rank + 1)).all()

        for _ in range(5):
            in_parallel([partial(run, backend) for backend in world])


# -- threads


def test_threads_come_and_go_with_the_work(make_world):
    """The worker ends when there is nothing to do, at any moment, and loses no work."""
    with make_world(2) as world:
        during = set(threading.enumerate())

        def run(backend):
            rng = random.Random(backend.rank)
            for number in range(40):
                work = rankwire.all_reduce(backend, np.full(4, number), async_op=True)
                assert (work.wait() == 2 * number).all()
                time.sleep(rng.choice([0, 0, 0.008, 0.01, 0.011]))  # the worker ends after 0.01

        in_parallel([partial(run, backend) for backend in world])
        end = Running(lambda: [t.join(5) for t in threading.enumerate() if "collectives" in t.name])
        end.result()
        assert {t for t in threading.enumerate() if t.name != "test"} <= during
