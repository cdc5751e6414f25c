"""Group calls: messages, arguments, and what a hostile or slow rank can do."""

import gc
import itertools
import math
import os
import signal
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import pytest

import rankwire
from interrupts import every_interrupt
from rankwire import (
    CallCancelledError,
    ConfigurationError,
    FaultPlan,
    GroupCallError,
    GroupResult,
    PeerLostError,
    RpcAgent,
    UnsupportedTypeError,
)
from rankwire.deadline import Deadline
from rankwire.rpc.messages import encode_result
from rankwire.rpc.registry import Function
from rankwire.services import group_members
from rankwire.services.group_gathering import RELAY, Gathering, Plan
from rankwire.services.group_result import failure_of
from rankwire.testing import run_ranks, simulated_world
from worlds import eventually


@contextmanager
def agents(size, *, faults=None, **options):
    with simulated_world(size, faults=faults) as world:
        made = [RpcAgent(backend, **options) for backend in world]
        try:
            yield made
        finally:
            for agent in made:
                agent.close(grace=1.0)


def remembered(agent):
    return [*agent._groups._members._remembered()]


@pytest.mark.parametrize("settings", [{}, {"reduce": "sum"}, {"collect": [3]}])
@pytest.mark.parametrize("caller", [0, 31])
def test_the_busiest_of_64_ranks_handles_few_messages(caller, settings):
    size = 64
    with agents(size, faults=FaultPlan().kill(0, after=10**9)) as made:
        for agent in made:
            agent.register("rank", lambda agent=agent: agent.rank)
        sent = made[0].backend.network.traffic.sent
        made[caller].call_all("rank", **settings)
        before = dict(sent)
        for _ in range(3):
            made[caller].call_all("rank", **settings)
        busiest = max(sent[rank] - before[rank] for rank in range(size)) / 3
        # Each message that a rank sends is a request or a reply; it receives as many.
        assert 2 * busiest <= 2 * math.log2(size) + 4


def test_arguments_are_encoded_once():
    takes = []

    class Batch:
        pass

    with agents(20) as made:
        for agent in made:
            agent.codec.register(
                Batch,
                name="batch",
                take=lambda value, sending, agent=agent: takes.append(agent.rank) or 7,
                build=lambda state, receiving: state,
            )
            agent.register("same", lambda batch: batch)
        assert list(made[4].call_all("same", Batch())) == [7] * 20
    assert takes == [4]


def test_settings_that_the_function_has_too_are_refused():
    def sample(need, ranks=None, timeout=1):
        return [need, ranks, timeout]

    with agents(2) as made:
        for agent in made:
            agent.register(sample)
        for settings in ({"need": 1}, {"ranks": [0]}, {"timeout": 2}):
            with pytest.raises(ConfigurationError, match=r"agent\.to_all\("):
                made[0].call_all("sample", **settings)
        proxy = made[0].to_all(ranks=[1])
        assert proxy.sample(need=3, ranks=4, timeout=5)[1] == [3, 4, 5]
        assert "1 ranks" in repr(proxy)


@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": []},
        {"ranks": [2]},
        {"need": 0},
        {"need": 3},
        {"collect": [1], "ranks": [0]},
        {"collect": [1], "reduce": "sum"},
        {"timeout": -1},
        {"reduce": "first"},
    ],
)
def test_invalid_settings_are_refused(settings):
    with agents(2) as made:
        with pytest.raises(ConfigurationError):
            made[0].to_all(**settings)


@pytest.mark.parametrize("size", [2, 12])
def test_an_argument_that_cannot_be_sent_is_refused(size):
    with agents(size) as made:
        for agent in made:
            agent.register("f", print)
        with pytest.raises(UnsupportedTypeError, match=r"args\[0\]"):
            made[0].call_all("f", object())
        for agent in made:
            assert agent.activity()[:2] == (0, 0)


@pytest.mark.parametrize("size", [2, 12])
def test_an_iterator_that_all_ranks_would_share_is_refused(size):
    with agents(size) as made:
        for agent in made:
            agent.register("f", lambda items: [*items])
        for settings in ({}, {"need": 1}):
            with pytest.raises(UnsupportedTypeError, match=r"args\[0\]"):
                made[0].to_all(**settings).f(iter([1, 2]))
            with pytest.raises(UnsupportedTypeError, match="items"):
                made[0].to_all(**settings).f(items=iter([1, 2]))
        with pytest.raises(UnsupportedTypeError, match=r"args\[0\]"):
            made[0].as_completed("f", iter([1, 2]))
        result = made[0].to_all(args_of=lambda rank: (iter([rank, 7]),)).f()
        assert result.values == {rank: [rank, 7] for rank in range(size)}


def test_a_result_says_what_is_in_it():
    result = GroupResult("f", [3, 1, 2])
    result.values, result.errors, result.missing = {1: 5}, {2: PeerLostError(2, "gone")}, [3]
    assert repr(result) == (
        "<GroupResult of 'f': 1 values of 3 ranks, errors of rank 2, rank 3 missing>"
    )
    with pytest.raises(PeerLostError):
        result[2]
    with pytest.raises(KeyError):
        result[3]
    error = failure_of(result)
    assert str(error) == (
        "it failed on rank 2 and rank 3 did not answer in time: "
        "rank 2: rankwire.errors.PeerLostError: rank 2 is lost: gone"
    )
    assert error.__cause__ is result.errors[2]


def test_no_more_run_at_once_than_there_are_workers():
    running, most, lock = [0] * 12, [0] * 12, threading.Lock()

    def work(rank):
        with lock:
            running[rank] += 1
            most[rank] = max(most[rank], running[rank])
        time.sleep(0.003)
        with lock:
            running[rank] -= 1

    with agents(12, workers=1) as made:
        for agent in made:
            agent.register("work", lambda agent=agent: work(agent.rank))
        threads = [
            threading.Thread(target=agent.call_all, args=("work",)) for agent in made for _ in "ab"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 12


def test_a_rank_that_its_relay_cannot_reach_is_called_by_the_caller():
    with agents(12, faults=FaultPlan().drop_link(6, 9)) as made:
        for agent in made:
            agent.register("rank", lambda agent=agent: agent.rank)
        assert list(made[0].call_all("rank")) == [*range(12)]
        assert made[0].call_all("rank", reduce="sum") == 66


def kill_a_relay(backend):
    """Call ten ranks, of which one that passes the call on is killed in its function."""

    def work():
        if backend.rank == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return backend.rank

    with RpcAgent(backend) as agent:
        agent.register(work)
        backend.barrier()
        if backend.rank > 0:
            return None
        result = agent.call_all("work", partial=True)
        return list(result), [(rank, type(e).__name__) for rank, e in result.errors.items()]


def test_a_relay_that_is_killed_is_bypassed_by_processes():
    first, *others = run_ranks(10, kill_a_relay, processes=True, outcomes=True)
    assert first.value == ([0, 1, 2, 3, 4, 6, 7, 8, 9], [(5, "PeerLostError")])
    assert [each.killed for each in others] == [rank == 5 for rank in range(1, 10)]


def test_large_arguments_wait_for_room():
    array = np.zeros(3 << 20, np.uint8)
    with agents(10, max_queued_nbytes=1 << 20, workers=2) as made:
        for agent in made:
            agent.register("size", len)
        threads = [
            threading.Thread(target=lambda: found.append(sum(made[0].call_all("size", array))))
            for _ in range(6)
        ]
        found = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [10 * len(array)] * 6


def test_a_group_call_is_forgotten_with_the_next_one():
    with agents(10) as made:
        for agent in made:
            agent.register("big", lambda n: np.zeros(n))
        for _ in range(20):
            made[0].call_all("big", 10)
        for agent in made:
            assert len(remembered(agent)) == 1
        made[0].call_all("big", 100_000)  # taken by the caller
        for agent in made:
            assert sum(each.nbytes for each in remembered(agent)) < 1000


def test_group_calls_of_a_lost_caller_are_forgotten(monkeypatch):
    monkeypatch.setattr(group_members, "_SWEEP_EVERY", 0.0)
    with agents(10) as made:
        for agent in made:
            agent.register("rank", lambda agent=agent: agent.rank)
        made[0].call_all("rank")
        made[0].backend.close(error=ValueError("this rank fails"))
        eventually(lambda: made[9].backend.failure_of(0) is not None)
        made[1].call_all("rank", ranks=range(1, 10))
        for agent in made[1:]:
            assert [each.src for each in remembered(agent)] == [1]


def test_a_cancelled_caller_cancels_all_members():
    started, ended = threading.Semaphore(0), threading.Semaphore(0)

    def work():
        started.release()
        call = rankwire.current_call()
        eventually(lambda: call.cancelled)
        ended.release()

    with agents(12) as made:
        for agent in made:
            agent.register("work", work)
        made[1].register("outer", lambda: made[1].call_all("work"))
        future = made[0].rpc_async(1, "outer")
        for _ in made:
            assert started.acquire(timeout=10)
        future.cancel()
        for _ in made:
            assert ended.acquire(timeout=10)
        for agent in made:
            eventually(lambda agent=agent: agent.activity()[:2] == (0, 0))


def test_a_call_that_is_cancelled_gets_its_own_error():
    errors, inside = [], threading.Semaphore(0)

    def outer(agent):
        inside.release()
        try:
            agent.call_all("work")
        except rankwire.RankwireError as error:
            errors.append(error)

    def work():
        call = rankwire.current_call()
        eventually(lambda: call.cancelled)

    for size in (3, 12):
        with agents(size) as made:
            for agent in made:
                agent.register("work", work)
            made[1].register("outer", lambda made=made: outer(made[1]))
            future = made[0].rpc_async(1, "outer")
            assert inside.acquire(timeout=10)
            future.cancel()
            eventually(lambda: errors)
            assert isinstance(errors.pop(), CallCancelledError)


@pytest.mark.parametrize(("size", "settings"), [(3, {}), (3, {"need": 3}), (12, {})])
def test_a_circle_through_a_group_call_is_reported(size, settings):
    last = size - 1
    with agents(size) as made:

        async def outer():
            return made[0].to_all(timeout=30, **settings).inner()  # blocks the event loop

        async def inner(agent):
            return agent.rpc_sync(0, "needed") if agent.rank == last else 0

        async def needed():
            return 1

        made[0].register(outer)
        made[0].register(needed)
        for agent in made[1:]:

            async def inner_here(agent=agent):
                return await inner(agent)

            agent.register("inner", inner_here)
        made[0].register("inner", lambda: 0)
        began = time.monotonic()
        with pytest.raises(rankwire.RemoteError) as info:
            made[1].rpc_sync(0, "outer", timeout=30)
        assert "calls wait for each other in a circle" in str(info.value)
        assert f"rank {last}" in str(info.value)
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("end", ["close", "with", "drop", "drop in a cycle"])
def test_values_that_are_not_taken_are_cancelled(end, taken):
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def work(rank):
        call = rankwire.current_call()
        if rank > 0:
            begun.release()
            eventually(lambda: call.cancelled)
            ended.release()

    with agents(3) as made:
        for agent in made:
            agent.register("work", lambda agent=agent: work(agent.rank))
        values = made[0].as_completed("work")
        for _ in "ab":
            assert begun.acquire(timeout=10)
        assert not taken or next(values) == (0, None)
        assert "work" in repr(values)
        if end == "close":
            values.close()
            assert [*values] == []
        elif end == "with":
            with values:
                pass
        elif end == "drop in a cycle":
            ring = [values]
            ring.append(ring)
            canceller = noted_cancels(made[0])
            del ring, values
            gc.collect()
            eventually(lambda: canceller)
            assert threading.get_ident() not in canceller, "a finalizer takes no lock"
        else:
            del values
        for _ in "ab":
            assert ended.acquire(timeout=10)
        for agent in made:
            eventually(lambda agent=agent: agent.activity()[:2] == (0, 0))


def noted_cancels(agent):
    """Return a list of the threads that cancel calls of an agent."""
    threads, cancel = [], agent._caller.port.cancel

    def noting(*args, **kwargs):
        threads.append(threading.get_ident())
        return cancel(*args, **kwargs)

    agent._caller.port.cancel = noting
    return threads


def test_a_group_call_that_is_complete_when_the_agent_closes_has_a_result(monkeypatch):
    wait = Gathering.wait

    def closing(self):
        wait(self)
        made[0]._caller.closed = True

    with agents(12) as made:
        for agent in made:
            agent.register("rank", lambda agent=agent: agent.rank)
        monkeypatch.setattr(Gathering, "wait", closing)
        assert list(made[0].call_all("rank")) == [*range(12)]


def test_a_closed_agent_says_which_group_call_it_ended():
    with agents(12) as made:
        begun = threading.Semaphore(0)
        for agent in made:
            agent.register("work", lambda: begun.release() or time.sleep(0.5))
        thread = threading.Thread(
            target=lambda: begun.acquire(timeout=10) and made[0].close(grace=0.0)
        )
        thread.start()
        with pytest.raises(rankwire.ChannelClosedError, match="call_all 'work', rank 0"):
            made[0].call_all("work")
        thread.join()


def test_a_gathering_that_was_cancelled_starts_no_more_calls():
    runs = []
    with agents(12) as made:
        for agent in made:
            agent.register("note", lambda agent=agent: runs.append(agent.rank))
        plan = msgspec.structs.replace(PLAN, origin=0, ranks=[*range(12)])
        members, deadline = made[0]._groups._members, Deadline(5.0, made[0]._clock)
        starter = members.starter(plan.ranks)
        payload = payload_of(made[0])
        gathering = Gathering(starter, members.run_soon, plan, payload, None, deadline)
        gathering.expect([(6, 12)])
        gathering.cancel()
        gathering._bypass((6, 12))
        gathering.wait()
        assert runs == []
        assert isinstance(gathering.failures[7], CallCancelledError)


# -- what a rank that was taken over sends ---------------------------------------------------------


def call_own(agent, dst, name, *arguments):
    """Call a function of the agent itself; return its future."""
    return agent._caller.start(dst, name, Deadline(5.0, agent._clock), None, arguments, {})


def relayed(agent, dst, plan, payload):
    """Pass a group call on; return the error of that."""
    header = list(msgspec.structs.astuple(plan))
    return call_own(agent, dst, RELAY, header, payload).exception(10)


def payload_of(agent, *args):
    message = agent.codec.encode_record([list(args), {}], ("args", "kwargs"), levels=2)
    return np.frombuffer(b"".join(map(bytes, message[0])), np.uint8)


PLAN = Plan(2, 5, 1, 77, 0, "note", 0, [1], "", None)


def test_a_rank_cannot_be_made_to_call_in_its_own_name():
    runs = []
    with agents(3) as made:
        for agent in made:
            agent.register("note", lambda: runs.append(rankwire.current_call().src), direct=True)
        plan = msgspec.structs.replace(PLAN, origin=1, ranks=[1, 0])
        error = relayed(made[2], 1, plan, payload_of(made[2]))
        assert isinstance(error, PermissionError)
        assert "has not made" in str(error)
        plan = msgspec.structs.replace(PLAN, origin=2, ranks=[1, 0])
        assert relayed(made[2], 1, plan, payload_of(made[2])) is None
        assert runs == [2], "rank 1 was called by rank 2 itself; rank 0 refused the relay"


def test_a_rank_cannot_answer_for_a_group_call_whose_key_it_does_not_know():
    runs = []
    with agents(3) as made:
        made[1].register("note", lambda: runs.append(1))
        assert relayed(made[2], 1, PLAN, payload_of(made[2])) is None
        wrong = msgspec.structs.replace(PLAN, key=78)
        assert isinstance(relayed(made[0], 1, wrong, payload_of(made[0])), PermissionError)
        assert relayed(made[0], 1, PLAN, payload_of(made[0])) is None
        assert runs == [1], "a repeat joins"
        over = msgspec.structs.replace(PLAN, number=2, settled=2)
        assert relayed(made[2], 1, over, payload_of(made[2])) is None
        assert "is over" in str(relayed(made[2], 1, PLAN, payload_of(made[2])))
        assert runs == [1, 1]


def test_a_rank_cannot_end_group_calls_that_it_did_not_pass_on():
    runs = []
    with agents(4) as made:
        made[1].register("note", lambda: runs.append(1))
        assert relayed(made[2], 1, PLAN, payload_of(made[2])) is None
        forged = msgspec.structs.replace(PLAN, settled=2**60, key=78)
        assert isinstance(relayed(made[3], 1, forged, payload_of(made[3])), PermissionError)
        forged = msgspec.structs.replace(forged, number=2)
        assert relayed(made[3], 1, forged, payload_of(made[3])) is None
        assert relayed(made[2], 1, PLAN, payload_of(made[2])) is None
        assert runs == [1, 1], "the first call is remembered: its repeat joins"
        later = msgspec.structs.replace(PLAN, number=3, settled=3)
        assert relayed(made[2], 1, later, payload_of(made[2])) is None
        assert runs == [1, 1, 1]


def test_a_relay_ends_the_group_calls_that_it_passed_on():
    with agents(4) as made:
        made[1].register("note", lambda: 1)
        for number in (1, 2, 3):
            plan = msgspec.structs.replace(PLAN, number=number, settled=number)
            assert relayed(made[3], 1, plan, payload_of(made[3])) is None
        assert [each.plan.number for each in remembered(made[1])] == [3]


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": 9},
        {"origin": "2"},
        {"low": -1},
        {"ranks": []},
        {"ranks": [0]},
        {"ranks": [1, 9]},
        {"ranks": "1"},
        {"reduce": "median"},
        {"wanted": 3},
    ],
)
def test_a_malformed_group_call_is_refused(changes):
    with agents(3) as made:
        made[1].register("note", lambda: 1)
        values = dict(zip(Plan.__struct_fields__, msgspec.structs.astuple(PLAN), strict=True))
        header = [*(values | changes).values()]
        future = call_own(made[2], 1, RELAY, header, payload_of(made[2]))
        assert future.exception(10) is not None
        assert remembered(made[1]) == []


@pytest.mark.parametrize("payload", [b"abc", np.zeros(3), np.zeros(3, np.uint8), None])
def test_malformed_arguments_are_refused(payload):
    with agents(3) as made:
        made[1].register("note", lambda: 1)
        header = list(msgspec.structs.astuple(PLAN))
        future = call_own(made[2], 1, RELAY, header, payload)
        error = future.exception(10)
        if error is None:  # the outcome of the member says it
            ((_, outcome),) = future.result()[1]
            assert b"InvalidMessageError" in bytes(outcome)


def test_the_members_of_a_relay_are_limited(monkeypatch):
    monkeypatch.setattr(group_members, "_MOST_BEGUN", 3)
    with agents(3) as made:
        made[1].register("note", lambda: 1)
        for number in range(1, 4):
            plan = msgspec.structs.replace(PLAN, number=number)
            assert relayed(made[2], 1, plan, payload_of(made[2])) is None
        plan = msgspec.structs.replace(PLAN, number=4)
        assert "too many group calls" in str(relayed(made[2], 1, plan, payload_of(made[2])))
        plan = msgspec.structs.replace(PLAN, number=4)
        assert relayed(made[0], 1, plan, payload_of(made[0])) is None, "another rank has its own"


def test_arguments_count_until_a_relay_has_answered(monkeypatch):
    monkeypatch.setattr(group_members, "_MOST_NBYTES", 50_000)
    begun, go = threading.Semaphore(0), threading.Event()
    with agents(4) as made:
        made[1].register("note", lambda _: begun.release())
        made[3].register("note", lambda _: begun.release() or (go.wait(10) and None))
        payload = payload_of(made[2], b"a" * 100_000)
        plan = msgspec.structs.replace(PLAN, ranks=[1, 3])
        header = list(msgspec.structs.astuple(plan))
        first = call_own(made[2], 1, RELAY, header, payload)
        assert begun.acquire(timeout=10)
        assert begun.acquire(timeout=10)
        other = msgspec.structs.replace(plan, number=2)
        for one in (plan, other):  # a repeat, and another
            assert "too many group calls" in str(relayed(made[2], 1, one, payload))
        go.set()
        assert first.exception(10) is None
        assert relayed(made[2], 1, other, payload) is None


def test_a_relay_frees_the_arguments_when_it_has_answered(monkeypatch):
    made_here = []
    init = Gathering.__init__

    def noting(self, *args, **kwargs):
        made_here.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(Gathering, "__init__", noting)
    with agents(12) as made:
        for agent in made:
            agent.register("size", len)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                made[0].call_all("size", b"a" * 1000)
            assert len(made_here) == 39
            # Threads may keep what they worked on last.
            eventually(lambda: sum(ref() is not None for ref in made_here) <= 13)
        finally:
            gc.enable()


def test_a_relay_answers_for_its_own_members_only():
    with agents(12) as made:
        for agent in made:
            agent.register("rank", lambda agent=agent: agent.rank)
        result = [[], [[0, b"".join(map(bytes, encode_result(made[6].codec, 99)[0]))]]]
        made[6]._registry.own[RELAY] = Function(RELAY, lambda *_: result)
        with pytest.raises(GroupCallError) as info:
            made[0].call_all("rank")
        assert [*info.value.errors] == [6]
        assert "not its own" in str(info.value)
        assert [*info.value.values] == [rank for rank in range(12) if rank != 6]


def test_part_is_called_by_the_agent_alone():
    with agents(2) as made:
        error = call_own(made[0], 1, group_members.PART, 1).exception(10)
        assert isinstance(error, PermissionError)


@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("settings", [{}, {"need": 2}, {"reduce": "sum"}])
def test_an_interrupted_caller_leaves_nothing(size, settings):
    runs = Counter()
    with agents(size) as made:
        for agent in made:
            agent.register("run", lambda n, agent=agent: runs.update([(agent.rank, n)]))
        if "reduce" in settings:
            for agent in made:
                agent.register("run", lambda n, rank=agent.rank: rank, replace=True)
        number = itertools.count()

        def run(interrupting):
            one = next(number)
            with interrupting, suppress(KeyboardInterrupt):
                made[0].to_all(**settings).run(one)
            for agent in made:
                eventually(lambda agent=agent: agent.activity()[:2] == (0, 0))
            assert not [key for key, count in runs.items() if count > 1]
            runs.clear()

        assert every_interrupt(run, step=5) > 20
        assert made[0].call_all("run", -1).errors == {}
        for agent in made:
            assert len(remembered(agent)) <= 1
