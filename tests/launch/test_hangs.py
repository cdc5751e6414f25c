"""What the launcher prints about a rank that holds up others, and about an interrupt."""

import re
import signal

import pytest

from rankwire.launch.attempt import waiting_chain, waiting_circle

HANG = """
import threading, rankwire
def hang():
    threading.Event().wait(60)
"""


def test_the_last_rank_in_a_chain_of_waits_is_to_blame():
    assert waiting_chain(0, {}) == [0]
    assert waiting_chain(0, {0: [2]}) == [0, 2]
    assert waiting_chain(0, {0: [1], 1: [2]}) == [0, 1, 2]
    # Of several, the one that does not wait itself.
    assert waiting_chain(0, {0: [1, 2, 3], 1: [2], 3: [2]}) == [0, 2]
    assert waiting_chain(0, {0: [1], 1: []}) == [0, 1]


def test_ranks_that_wait_in_a_circle_are_followed_once():
    assert waiting_chain(0, {0: [1], 1: [0]}) == [0, 1]
    assert waiting_chain(0, {0: [1], 1: [2], 2: [1]}) == [0, 1, 2]
    assert waiting_chain(0, {0: [0]}) == [0]


def test_a_chain_that_comes_back_is_a_circle_if_all_in_it_did_nothing_but_wait():
    assert waiting_circle([0, 1], {0: [1], 1: [0]}) == [0, 1]
    assert waiting_circle([0, 1, 2], {0: [1], 1: [2], 2: [1]}) == [1, 2]
    assert waiting_circle([0, 1, 2], {0: [1], 1: [2], 2: [0]}) == [0, 1, 2]
    assert waiting_circle([0, 1], {0: [1]}) == []
    assert waiting_circle([0, 1, 2], {0: [1], 2: [0]}) == []
    assert waiting_circle([0], {0: [0]}) == []


def test_ranks_that_receive_from_each_other_are_reported_as_a_circle(run):
    done = run(
        """
import rankwire
def both_receive_first(backend):
    backend.recv(1 - rank, timeout=1.0 + 20.0 * rank)
with rankwire.connect() as backend:
    both_receive_first(backend)
"""
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("[rank")]
    waited = "rank 0 waited for rank 1, rank 1 waited for rank 0"
    assert said[0] == f"rankwire: ranks 0, 1 waited for each other: {waited}"
    assert said[1] == "rankwire: rank 1 was here:"
    assert "in both_receive_first" in done.stderr
    assert "it waits for the rank that asks, so the two wait for each other" in done.stderr
    assert "held up" not in done.stderr


def test_a_receive_that_no_thread_waits_for_makes_no_circle(run):
    done = run(
        HANG
        + """
with rankwire.connect() as backend:
    if rank == 1:
        handle = backend.irecv(0)
        hang()
    backend.recv(1, timeout=1.0)
"""
    )
    assert "rank 1 held up the others: rank 0 waited for rank 1; it was here:" in done.stderr
    assert "each other" not in done.stderr


def test_the_rank_that_was_waited_for_is_blamed_and_shown_where_it_was(run):
    done = run(
        HANG
        + """
with rankwire.connect() as backend:
    if rank == 2:
        hang()
    backend.barrier(timeout=1.0 + 10.0 * rank)
""",
        ranks=3,
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("[rank")]
    assert said[0] == (
        "rankwire: rank 2 held up the others: rank 0 waited for rank 2; it was here:"
    )
    assert said[1] == "    MainThread:"
    assert "    threading.Event().wait(60)" in done.stderr
    assert "in hang" in done.stderr
    (gave_up,) = [line for line in said if "gave up first" in line]
    assert gave_up.startswith("rankwire: rank 0 gave up first: exit code 1 (it raised Deadline")
    assert "failed first" not in done.stderr


def test_blame_follows_the_chain_of_waits(run):
    done = run(
        HANG
        + """
with rankwire.connect() as backend:
    if rank == 2:
        hang()
    backend.recv(rank + 1, timeout=1.0 + 20.0 * rank)
""",
        ranks=3,
    )
    assert done.returncode == 1
    chain = "rank 0 waited for rank 1, rank 1 waited for rank 2"
    assert f"rank 2 held up the others: {chain}; it was here:" in done.stderr
    assert "in hang" in done.stderr


def test_ranks_that_call_different_collectives_hold_up_no_rank(run):
    """The report says what they called, and where."""
    done = run(
        """
import numpy as np, rankwire
with rankwire.connect() as backend:
    if rank == 1:
        rankwire.all_reduce(backend, np.ones(5))
    else:
        rankwire.all_reduce(backend, np.ones(4))
""",
        ranks=3,
    )
    assert done.returncode == 1
    assert "held up" not in done.stderr
    assert "failed first: exit code 1 (it raised CollectiveMismatchError" in done.stderr
    error = next(line for line in done.stderr.splitlines() if "collective number 0" in line)
    assert "all_reduce(sum, float64, (4,)) on rank" in error
    assert "all_reduce(sum, float64, (5,)) on rank 1" in error
    lines = {int(r): int(line) for r, line in re.findall(r"rank (\d) at \S+\.py:(\d+)", error)}
    odd_line = lines.pop(1)
    assert list(lines.values()) == [odd_line + 2]


@pytest.mark.parametrize(
    "wait", ["group.barrier(timeout=1.0)", "rankwire.barrier(group, timeout=1.0)"]
)
def test_in_a_group_the_rank_of_the_world_is_blamed(run, wait):
    done = run(
        HANG
        + f"""
with rankwire.connect() as backend:
    if rank > 0:
        group = rankwire.SubBackend(backend, [1, 2])
        if rank == 1:
            {wait}
    hang()
""",
        ranks=3,
    )
    assert done.returncode == 1
    assert "rank 2 held up the others: rank 1 waited for rank 2; it was here:" in done.stderr


def test_a_call_that_takes_too_long_is_shown_where_it_is(run):
    done = run(
        HANG
        + """
with rankwire.connect() as backend:
    with rankwire.RpcAgent(backend) as agent:
        agent.register("slow", hang)
        if rank == 0:
            agent.rpc_sync(1, "slow", timeout=1.0)
        threading.Event().wait(60)
"""
    )
    assert done.returncode == 1
    assert "rank 1 held up the others: rank 0 waited for rank 1; it was here:" in done.stderr
    stacks = done.stderr[done.stderr.index("it was here:") :]
    assert "in hang" in stacks


def test_a_rank_that_cannot_say_where_it_is_is_blamed_all_the_same(run):
    done = run(
        HANG
        + """
with rankwire.connect() as backend:
    backend.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    backend.recv(1, timeout=1.0)
""",
        "--grace",
        "0.5",
    )
    assert done.returncode == 1
    line = "rank 1 held up the others: rank 0 waited for rank 1; it did not say where it is"
    assert line in done.stderr


# -- an interrupt

CONNECTED = """
import rankwire
with rankwire.connect() as backend:
    backend.barrier()
    ready()
    if rank % 2:
        time.sleep(60)
    backend.recv((rank + 1) % 4)
"""
NOT_CONNECTED = """
def work():
    ready()
    time.sleep(60)
work()
"""
SERVING = """
import rankwire
def slow():
    ready()
    for _ in range(600):
        time.sleep(0.1)
with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
    agent.register("slow", slow)
    backend.barrier()
    agent.rpc_sync((rank + 1) % 4, "slow")
"""


@pytest.mark.parametrize("program", [CONNECTED, NOT_CONNECTED, SERVING])
def test_an_interrupt_of_four_ranks_is_six_lines(start, program):
    launched = start(program, ranks=4)
    launched.send(signal.SIGINT)
    code, _, stderr = launched.wait(30.0)
    assert code == 128 + signal.SIGINT
    lines = stderr.splitlines()
    assert len(lines) <= 6, stderr
    assert sum("KeyboardInterrupt (" in line for line in lines) == 4, stderr
