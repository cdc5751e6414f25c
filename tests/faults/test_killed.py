"""Ranks that are killed: idle, in the middle of a message, again and again, by the system."""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from faults.sizes import time_limit, trials
from rankwire import PeerLostError
from rankwire.wire.frames import HEADER_NBYTES
from worlds import (
    RankProcess,
    eventually,
    free_port,
    introduce,
    nursery,
    process_world,
    spawn_ranks,
    until_in_a_barrier,
)

pytestmark = pytest.mark.timeout(time_limit(60, 1200))

NAMED_LIMIT = 0.1
AGREED_LIMIT = 0.5


def until_waiting(rank, src, count=1):
    wanted = f"backend.mesh.peers[{src}].inbox._mailbox.wanted"
    eventually(lambda: rank.call("eval", wanted) >= count)


def assert_lost(command, victim):
    error = command.error()
    assert isinstance(error, PeerLostError), repr(error)
    assert error.peer == victim


@pytest.mark.fault(1, "every operation that waits on a killed rank fails and names it")
@pytest.mark.fault(1, "operations among the survivors go on")
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_f01_a_rank_is_killed_while_idle(world_size, measured):
    for trial in range(trials(10, 100, quick=3)):
        with process_world(world_size) as ranks:
            if trial % 2:
                introduce(*ranks)
            victim = ranks[(trial + 1) % world_size]
            others = [rank for rank in ranks if rank is not victim]
            pending = []
            for rank in others:
                pending.append(rank.start("recv", victim.rank))
                pending.append(rank.start("barrier"))
            for rank in others:
                until_waiting(rank, victim.rank)
                until_in_a_barrier(rank)
            killed = victim.kill()
            for command in pending:
                assert_lost(command, victim.rank)
                measured("killed rank named", command.ended - killed, limit=NAMED_LIMIT)
            for one, other in itertools.pairwise(others):
                one.call("send", b"still there?", other.rank)
                assert other.call("recv", one.rank) == b"still there?"


@pytest.mark.fault(47, "all survivors of a barrier name the same killed rank")
def test_f47_all_of_8_survivors_name_the_same_dead_rank(measured):
    for trial in range(trials(10, 100, quick=3)):
        with process_world(9) as ranks:
            victim = ranks[trial % 9]
            others = [rank for rank in ranks if rank is not victim]
            pending = [rank.start("barrier") for rank in others]
            for rank in others:
                until_in_a_barrier(rank)
            killed = victim.kill()
            for command in pending:
                assert_lost(command, victim.rank)
            agreed = max(command.ended for command in pending) - killed
            measured("all 8 survivors agree on who died", agreed, limit=AGREED_LIMIT)


INSTALL = "__import__('faults.failpoints').failpoints.install(backend, 0, '{point}')"
PAYLOAD_NBYTES = 10_000
# Every place in the header, and 20 in the payload; some bytes more than a plain frame has, in case
# that frames carry a seal.
OFFSETS = [
    *range(1, HEADER_NBYTES + 1),
    *range(HEADER_NBYTES + 1, PAYLOAD_NBYTES, PAYLOAD_NBYTES // 20),
]


@pytest.mark.fault(2, "of a message whose sender is killed half-way nothing is delivered")
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_f02_a_rank_is_killed_in_the_middle_of_a_message(transport, measured):
    """Each of several ranks is killed at another place, so that a world shows many of them."""
    in_a_world = 13
    for start in range(0, len(OFFSETS), in_a_world):
        offsets = OFFSETS[start : start + in_a_world]
        # The failpoint is in the socket: nothing is to go through a ring.
        with process_world(len(offsets) + 1, transport=transport, spin=0.0) as ranks:
            for victim in ranks[1:]:
                victim.call("send", b"whole", 0)
                assert ranks[0].call("recv", victim.rank) == b"whole"
            for victim, offset in zip(ranks[1:], offsets, strict=True):
                victim.call("eval", INSTALL.format(point=f"sent:{offset}=kill"))
                pending = ranks[0].start("recv", victim.rank)
                until_waiting(ranks[0], victim.rank)
                began = time.monotonic()
                victim.start("eval", f"backend.send(b'x' * {PAYLOAD_NBYTES}, 0)")
                assert_lost(pending, victim.rank)
                measured("killed mid-message: named", pending.ended - began, limit=1.0)
                assert_lost(ranks[0].start("recv", victim.rank), victim.rank)


@pytest.mark.fault(
    24, "what waited on a killed rank fails, and never gets the answer of its successor"
)
def test_f24_a_rank_is_killed_and_started_again_at_the_same_address(measured):
    """Rank 2 keeps its backend of the world before, as a process does that has not noticed."""
    with spawn_ranks(3) as ranks, nursery() as shared, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        past = None
        for incarnation in range(trials(5, 200)):
            began = time.monotonic()
            forming = [rank.form(3, address) for rank in ranks]
            for command in forming:
                command.result()
            measured("world formed again", time.monotonic() - began)
            answer = f"incarnation {incarnation}".encode()
            ranks[1].call("send", answer, 2)
            assert bytes(ranks[2].call("recv", 1)) == answer
            if past is not None:
                assert isinstance(past.error(), PeerLostError)
                assert ranks[2].call("eval", "repr(old)").endswith("gone: [0, 1]>")
            past = ranks[2].start("recv", 1, 5)
            until_waiting(ranks[2], 1)
            ranks[1].kill()
            ranks[1] = stack.enter_context(contextlib.closing(RankProcess(1, shared)))
            eventually(lambda: "gone: [1]" in ranks[0].call("eval", "repr(backend)"))
            ranks[0].call("close")
            ranks[2].call("eval", "globals().__setitem__('old', backend)")


GROUPS = Path("/sys/fs/cgroup/memory")


def memory_group():
    """Return a new control group of this process's own, or why there is none."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":")[2] for line in lines if ":memory:" in line), "")
    group = GROUPS / own.strip("/") / f"rankwire-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for memory can be made: {error.strerror}")
    return group


@pytest.mark.fault(53, "a rank that the system kills for its memory is named like any killed rank")
def test_f53_the_system_kills_a_rank_for_its_memory():
    group = memory_group()
    try:
        with process_world(3) as ranks:
            introduce(*ranks)
            (group / "memory.limit_in_bytes").write_text(str(64 << 20))
            (group / "cgroup.procs").write_text(str(ranks[2].pid))
            pending = [rank.start("recv", 2) for rank in ranks[:2]]
            for rank in ranks[:2]:
                until_waiting(rank, 2)
            ranks[2].start("eval", "len([b'x' * (1 << 20) for _ in range(256)])")
            ranks[2].wait()
            for command in pending:  # when it died only the kernel knows: there is no figure
                assert_lost(command, 2)
            ranks[0].call("send", b"still there?", 1)
            assert ranks[1].call("recv", 0) == b"still there?"
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.fault(2, "a rank that is stopped in the middle of a message goes on there")
def test_f02_a_rank_is_stopped_in_the_middle_of_a_message():
    with process_world(2, transport="tcp") as ranks:
        ranks[1].call("send", b"first", 0)
        assert ranks[0].call("recv", 1) == b"first"
        ranks[1].call("eval", INSTALL.format(point="sent:40=stop"))
        sending = ranks[1].start("eval", f"backend.send(b'x' * {PAYLOAD_NBYTES}, 0)")
        status = Path(f"/proc/{ranks[1].pid}/stat")
        eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
        ranks[1].signal(signal.SIGCONT)
        sending.result()
        assert ranks[0].call("recv", 1) == b"x" * PAYLOAD_NBYTES
