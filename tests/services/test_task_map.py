"""``agent.map``: every task has one outcome, whatever happens to ranks, callers and threads."""

import contextlib
import gc
import random
import sys
import threading
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankwire
from children import Child
from faults.sizes import QUICK
from interrupts import Interrupt, every_interrupt
from rankwire import FaultPlan, PeerLostError, RankwireError, RpcAgent, SimulatedBackend
from worlds import eventually


@contextlib.contextmanager
def agents_of(world_size, faults=None, **options):
    world = SimulatedBackend.create_group(world_size, timeout=10.0, faults=faults)
    agents = [RpcAgent(backend, **options) for backend in world]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.close(grace=1.0)
        for backend in world:
            backend.close()


def is_quiet(agent):
    activity = agent.activity()
    return not activity.in_flight and not activity.in_service


def run_with_deaths(faults, *, tasks=12, idempotent=False, **options):
    """Run a map on rank 0; return its outcomes, the runs of each task and how often it ended."""
    runs = Counter()

    def work(task):
        runs[task] += 1
        return -task

    with agents_of(3, faults) as agents:
        for agent in agents:
            agent.register("work", work, idempotent=idempotent)
        outcomes = []
        try:
            outcomes.extend(agents[0].map("work", range(tasks), **options))
        except RankwireError:
            assert agents[0].backend.network.was_killed(0)
        eventually(lambda: is_quiet(agents[0]))
    return outcomes, runs


def check(outcomes, runs, tasks, *, idempotent):
    assert sorted(outcome.index for outcome in outcomes) == list(range(tasks))
    for outcome in outcomes:
        if outcome.error is None:
            assert outcome.value == -outcome.task
            assert runs[outcome.task] >= 1
        else:
            assert isinstance(outcome.error, RankwireError), outcome.error
            assert "map 'work'" in str(outcome.error)
    if not idempotent:
        assert max(runs.values(), default=0) <= 1


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_worker_may_die_at_every_message(victim, chunk, idempotent):
    for count in range(1, 30 // chunk):
        faults = FaultPlan().kill(victim, after=count)
        outcomes, runs = run_with_deaths(faults, idempotent=idempotent, chunk=chunk)
        check(outcomes, runs, 12, idempotent=idempotent)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        assert len(failed) <= (0 if idempotent else 2 * chunk)
        for outcome in failed:
            assert isinstance(outcome.error, PeerLostError)
            assert outcome.rank == outcome.error.peer == victim


@pytest.mark.parametrize("chunk", [1, 4])
def test_the_caller_may_die_at_every_message(chunk):
    for count in range(1, 30 // chunk):
        outcomes, runs = run_with_deaths(FaultPlan().kill(0, after=count), chunk=chunk)
        assert max(runs.values(), default=0) <= 1
        assert len({outcome.index for outcome in outcomes}) == len(outcomes)


def test_all_workers_may_die_at_every_message():
    for count in range(1, 16, 2 if QUICK else 1):
        faults = FaultPlan().kill(1, after=count).kill(2, after=count + 1)
        outcomes, runs = run_with_deaths(faults, tasks=40)
        check(outcomes, runs, 40, idempotent=False)
        assert any(outcome.error is not None for outcome in outcomes)


@settings(max_examples=25 if QUICK else 200, deadline=None)
@given(
    tasks=st.integers(0, 40),
    kills=st.dictionaries(st.integers(1, 2), st.integers(1, 30)),
    idempotent=st.booleans(),
    depth=st.integers(1, 4),
    chunk=st.integers(1, 5),
    ordered=st.booleans(),
    retries=st.integers(0, 3),
)
def test_it_agrees_with_a_model(tasks, kills, idempotent, depth, chunk, ordered, retries):
    faults = FaultPlan()
    for rank, count in kills.items():
        faults.kill(rank, after=count)
    options = {"depth": depth, "chunk": chunk, "ordered": ordered, "retries": retries}
    outcomes, runs = run_with_deaths(faults, tasks=tasks, idempotent=idempotent, **options)
    check(outcomes, runs, tasks, idempotent=idempotent)
    assert max(runs.values(), default=0) <= 1 + retries
    if ordered:
        assert [outcome.index for outcome in outcomes] == list(range(tasks))
    if not kills:
        assert all(outcome.error is None for outcome in outcomes)
        assert runs == Counter(range(tasks))


def test_a_task_that_kills_its_ranks_ends_after_its_retries():
    with agents_of(5) as agents:
        for agent in agents:

            def work(task, agent=agent):
                if task == 3:
                    agent.backend.network.kill(agent.rank)
                return task

            agent.register("work", work, idempotent=True)
        outcomes = list(agents[0].map("work", range(10), ordered=True, depth=1, retries=2))
    errors = {outcome.task: outcome.error for outcome in outcomes if outcome.error is not None}
    assert list(errors) == [3]
    assert "it has been on 3 ranks that were lost" in str(errors[3])


def test_a_map_that_is_dropped_cancels_its_tasks():
    with agents_of(2) as agents:
        agents[1].register("wait", lambda task: threading.Event().wait(0.1 * task))
        outcomes = agents[0].map("wait", iter(int, 1))
        assert "2 of" not in repr(outcomes)
        next(outcomes)
        del outcomes
        gc.collect()
        eventually(lambda: is_quiet(agents[0]))


def test_an_error_of_the_tasks_ends_the_map():
    def tasks():
        yield 1
        raise ZeroDivisionError

    with agents_of(2) as agents:
        agents[1].register("work", lambda task: task)
        outcomes = agents[0].map("work", tasks())
        with pytest.raises(ZeroDivisionError):
            list(outcomes)
        assert outcomes.closed
        assert "ended" in repr(outcomes)
        eventually(lambda: is_quiet(agents[0]))


def test_nothing_is_left_wherever_an_interrupt_falls():
    with agents_of(2) as agents:
        for agent in agents:
            agent.register("work", lambda task: task)

        def run(interrupting):
            with contextlib.suppress(Interrupt), interrupting:
                list(agents[0].map("work", range(2)))
            if not is_quiet(agents[0]):  # the frames of an error may hold it in a cycle
                gc.collect()
            eventually(lambda: is_quiet(agents[0]))

        every_interrupt(run, step=9)
        assert [outcome.value for outcome in agents[0].map("work", [5])] == [5]


def test_a_closed_agent_ends_its_maps():
    with agents_of(2) as agents:
        agents[1].register("wait", lambda task: threading.Event().wait(0.2))
        outcomes = agents[0].map("wait", range(100))
        next(outcomes)
        agents[0].close(grace=0.0)
        with pytest.raises(rankwire.ChannelClosedError, match=r"this agent is closed .*map 'wait'"):
            list(outcomes)


def test_a_served_function_may_use_a_map():
    with agents_of(3, workers=1) as agents:
        for agent in agents:
            agent.register("square", lambda task: task * task)

        def total(count):
            return sum(each.value for each in agents[1].map("square", range(count)))

        agents[1].register("total", total)
        assert agents[0].rpc_sync(1, "total", 10) == 285


def test_progress_is_told():
    told = []
    with agents_of(2) as agents:
        agents[1].register("work", lambda task: task)
        list(agents[0].map("work", [1, 2, 3], progress=lambda *args: told.append(args)))
        list(agents[0].map("work", iter([1]), progress=lambda *args: told.append(args)))
    assert told == [(1, 3), (2, 3), (3, 3), (1, None)]


RETURNING = """
import os, signal
import rankwire

def work(task):
    if task == 20 and incarnation == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank, incarnation

functions = {"work": work}
with rankwire.connect() as backend, rankwire.RpcAgent(backend, resolve=functions.get) as agent:
    rank, incarnation = backend.rank, backend.incarnation
    if rank == 0:
        seen, counts = [], 0
        def tasks():
            number = 0
            while (1, 1) not in seen:  # until the rank that died works again
                number += 1
                yield 20 if number > 20 else number
        for outcome in agent.map("work", tasks(), idempotent=True):
            seen.append(outcome.value)
            counts += 1
        print("came back", counts > 20)
        agent.stop()
    else:
        agent.serve()
"""


def test_a_rank_that_was_restarted_gets_tasks_again(tmp_path):
    program = tmp_path / "returning.py"
    program.write_text(RETURNING)
    command = [sys.executable, "-m", "rankwire", "run", "-n", "2", "--no-prefix"]
    done = Child([*command, "--on-failure", "restart", str(program)]).result(50)
    assert "came back True" in done.stdout, done.stdout + done.stderr


def test_ten_thousand_tasks_over_three_workers_keep_no_memory():
    read = 0

    def tasks():
        nonlocal read
        for read in range(1, 10_001):  # noqa: B007
            yield bytes(random.randrange(100))

    with agents_of(4) as agents:
        for agent in agents:
            agent.register("size", len)
        for taken, outcome in enumerate(agents[0].map("size", tasks()), 1):
            assert outcome.value == len(outcome.task)
            assert read - taken <= 6
    assert read == taken == 10_000


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_map_ends_once_its_agent_has_ended_by_itself(is_gone):
    with agents_of(2) as agents:
        agents[1].register("work", lambda task: task)
        agents[0].backend.close()
        if is_gone:  # and its threads have noted that
            eventually(lambda: not agents[0]._server.pool._threads)
        with pytest.raises(rankwire.ChannelClosedError, match="this agent is closed"):
            list(agents[0].map("work", range(3)))


def test_a_task_that_is_an_iterator_has_no_copy():
    go_on = threading.Event()
    with agents_of(3) as agents:
        for agent in agents:

            def total(numbers):
                first = next(numbers)
                go_on.wait(0.5)
                return first + sum(numbers)

            agent.register("total", total, idempotent=True)
        tasks = [(n for n in range(5))]
        outcomes = list(agents[0].map("total", tasks, hedge_after=0.01))
    assert [outcome.value for outcome in outcomes] == [10]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_chunk_copies_each_result_of_a_function_that_reuses_its_memory(is_async):
    memory = np.zeros(2000)

    def fill(task):
        memory[:] = task
        return memory

    async def fill_async(task):
        return fill(task)

    with agents_of(2) as agents:
        agents[1].register("fill", fill_async if is_async else fill, copy=True)
        outcomes = list(agents[0].map("fill", range(4), chunk=4, ordered=True))
    assert [outcome.value[0] for outcome in outcomes] == [0, 1, 2, 3]


def test_a_future_in_a_chunk_leaves_the_event_loop_free():
    with agents_of(2) as agents:
        future, has_begun = Future(), threading.Event()

        async def later(task):
            has_begun.set()
            return future

        async def end():
            future.set_result(5)

        agents[1].register("later", later)
        agents[1].register("end", end)
        outcomes = agents[0].map("later", range(3), chunk=3)
        taken = []
        reader = threading.Thread(target=lambda: taken.extend(outcomes), daemon=True)
        reader.start()
        assert has_begun.wait(20)
        agents[0].rpc_sync(1, "end", timeout=5)
        reader.join(20)
        assert [outcome.value for outcome in taken] == [5, 5, 5]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_future_in_a_chunk_that_never_ends_frees_its_worker(is_async):
    def later(task):
        return Future()

    async def later_async(task):
        return Future()

    with agents_of(2, workers=1) as agents:
        agents[1].register("later", later_async if is_async else later)
        agents[1].register("add", lambda a, b: a + b)
        for outcome in agents[0].map("later", range(2), chunk=2, timeout=0.1):
            assert isinstance(outcome.error, rankwire.DeadlineExceededError)
        assert agents[0].rpc_sync(1, "add", 2, 3, timeout=5) == 5
        eventually(lambda: not agents[1].activity().in_service)
