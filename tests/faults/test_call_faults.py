"""Faults of calls: functions that hang, nest, or meet a collective."""

import contextlib
import threading
import time

import numpy as np
import pytest

from faults.sizes import trials
from rankwire import (
    CollectiveAbortedError,
    DeadlineExceededError,
    OverloadedError,
    RemoteError,
    RpcAgent,
    SubBackend,
    all_reduce,
)
from rankwire.rpc.server import MAX_DEPTH
from rankwire.testing.ranks import in_parallel
from worlds import PATIENCE, eventually, process_world, tcp_world


@contextlib.contextmanager
def agents(world_size, **options):
    with tcp_world(world_size) as world, contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(RpcAgent(b, **options))) for b in world]


@pytest.mark.fault(26, "a caller of a function that hangs ends at its deadline")
@pytest.mark.fault(26, "a function that hangs keeps nobody else from being served")
def test_f26_functions_hang(measured):
    with agents(2, workers=4) as (caller, callee):
        awake = threading.Event()
        callee.register("hang", lambda: awake.wait(PATIENCE) and None)
        callee.register("fine", lambda: "fine")
        deadline = 0.3
        hanging = [caller.rpc_async(1, "hang", timeout=PATIENCE) for _ in range(3)]
        for _ in range(trials(5, 100)):
            began = time.monotonic()
            with pytest.raises(DeadlineExceededError) as info:
                caller.rpc_sync(1, "hang", timeout=deadline)
            assert info.value.may_have_run
            measured("late by", time.monotonic() - began - deadline, limit=0.1)
            awake.set()
            for future in hanging:
                future.result(PATIENCE)
            assert caller.rpc_sync(1, "fine") == "fine"
            awake.clear()
            hanging = [caller.rpc_async(1, "hang", timeout=PATIENCE) for _ in range(3)]
            assert caller.rpc_sync(1, "fine") == "fine", "a worker is left, and is used"
        awake.set()


@pytest.mark.fault(27, "calls nest to the limit in a circle of ranks, although each has one worker")
@pytest.mark.fault(27, "a call nested beyond the limit is refused, and does not hang")
@pytest.mark.parametrize("world_size", [2, 3])
def test_f27_calls_nest_in_a_circle(world_size):
    with agents(world_size, workers=1) as ranks:
        for agent in ranks:
            following = (agent.rank + 1) % world_size

            def descend(left, agent=agent, following=following):
                return 0 if left == 0 else 1 + agent.rpc_sync(following, "descend", left - 1)

            agent.register("descend", descend)
        for depth in (1, 2, 8, MAX_DEPTH - 1, MAX_DEPTH):
            assert ranks[0].rpc_sync(1, "descend", depth) == depth
        with pytest.raises((OverloadedError, RemoteError), match="nest"):
            ranks[0].rpc_sync(1, "descend", MAX_DEPTH + 1)


@pytest.mark.fault(28, "a collective inside called functions works on a group of its own")
def test_f28_a_collective_inside_called_functions():
    """While the main threads use the world's own collectives."""
    with agents(3) as ranks:
        worlds = [agent.backend for agent in ranks]
        groups = in_parallel(
            [lambda b=b: SubBackend(b, [1, 2]) if b.rank else None for b in worlds]
        )
        for agent, group in zip(ranks[1:], groups[1:], strict=True):
            agent.register("sum", lambda group=group: all_reduce(group, np.ones(4)).tolist())
        futures = [ranks[0].rpc_async(rank, "sum") for rank in (1, 2)]
        in_parallel([lambda b=b: all_reduce(b, np.ones(1)) for b in worlds])
        assert [future.result(PATIENCE) for future in futures] == [[2.0] * 4] * 2


@pytest.mark.fault(52, "a deadline names the ranks that were slow")
def test_f52_a_slow_rank_is_named():
    with process_world(3) as ranks:
        early = [rank.start("barrier", timeout=1.5) for rank in ranks[:2]]
        for command in early:
            error = command.error()
            assert isinstance(error, DeadlineExceededError | CollectiveAbortedError), repr(error)
            assert error.waiting_for == [2]
        late = [rank.start("barrier") for rank in ranks[:2]]
        assert isinstance(ranks[2].start("barrier").error(), CollectiveAbortedError)
        ranks[2].call("barrier")
        for command in late:
            command.result()


@pytest.mark.fault(52, "the status says which rank is waited for")
def test_f52_the_status_names_the_rank_that_operations_wait_for():
    with tcp_world(2) as world:
        waiting = threading.Thread(target=lambda: world[0].recv(1), daemon=True)
        waiting.start()
        try:
            eventually(lambda: world[0].status().waiting_on == [1])
            assert "a message with tag 0" in str(world[0].status())
        finally:
            world[1].send(b"there", 0)
            waiting.join()
