"""What rank processes do where one of them is killed or stopped at a step of a collective."""

import contextlib
import gc
import os
import signal
import threading
import time
from typing import NamedTuple

import rankwire
from faults.meetings import MEETINGS, state_of
from faults.steps import watching
from rankwire import Backend, SubBackend, TcpBackend
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.transports import shared_segment
from worlds import eventually

AGREEMENT = "agreement"  # the first operation of a group, which agrees on a segment


class Outcome(NamedTuple):
    """How an operation has ended on one rank.

    Attributes:
        error: The name of the error's class; empty if there was none.
        named: The ranks of the group that the error is about.
        seconds: How long it took.
        is_right: Whether the result was right, where there was no error.
        state: What is in the arrays that it was to change.
    """

    error: str
    named: tuple[int, ...]
    seconds: float
    is_right: bool
    state: str


class Survival(NamedTuple):
    """What one rank has seen of another one's death.

    Attributes:
        during: The operation in which it died.
        after: The next one of that group.
        is_right: Whether the survivors alone got the right result, sharing memory.
        left: Descriptors, mappings and threads that were not there before.
    """

    during: Outcome
    after: Outcome
    is_right: bool
    left: tuple[int, ...]


def outcome_of(name: str, group: Backend, timeout: float | None = None) -> Outcome:
    """Run one operation."""
    meeting = MEETINGS[name](group)
    before = [array.copy() for array in meeting.changed]
    error, named, is_right = "", (), False
    began = time.monotonic()
    try:
        is_right = meeting.is_right(meeting.call(timeout=timeout))
    except RankwireError as raised:
        error, named = type(raised).__name__, () if raised.peer is None else (raised.peer,)
        if isinstance(raised, DeadlineExceededError):
            named = tuple(raised.waiting_for)
    seconds = time.monotonic() - began
    return Outcome(error, named, seconds, is_right, state_of(meeting, before))


def group_for(backend: Backend, members: list[int], name: str) -> tuple[SubBackend, str]:
    """Return a new group, and the name of the meeting that is next in it."""
    group = SubBackend(backend, members)
    if name == AGREEMENT:
        return group, "all_reduce"
    rankwire.barrier(group)
    assert shares(group)
    return group, name


def shares(group: Backend) -> bool:
    assert group.operations is not None
    return group.operations.agreement.slots is not None


def passages(backend: Backend, members: list[int], name: str) -> list[str]:
    """Do one operation, in which nothing happens; return what this rank has passed."""
    group, meeting = group_for(backend, members, name)
    with group, watching() as passed:
        assert outcome_of(meeting, group).is_right
    return passed.names


def fall(backend: Backend, members: list[int], name: str, at: int) -> None:
    """Be killed at a passage of an operation."""
    introduce(backend, members)
    group, meeting = group_for(backend, members, name)
    with watching(at, signal.SIGKILL):
        outcome_of(meeting, group)


def fall_asleep(backend: Backend, members: list[int], name: str) -> None:
    """Be killed in an operation to which no other rank comes, when this one goes to sleep."""
    introduce(backend, members)
    group, meeting = group_for(backend, members, name)
    shared_segment.sleep_while = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    outcome_of(meeting, group)


def survive(
    backend: TcpBackend, members: list[int], name: str, victim: int, is_late: bool
) -> Survival:
    """Be in an operation in which another rank is killed, and go on without it.

    Args:
        backend: The world.
        members: Who is in it.
        name: Which operation.
        victim: Who is killed.
        is_late: Whether this rank comes when it knows that already.
    """
    introduce(backend, members)
    before = held()
    group, meeting = group_for(backend, members, name)
    with group:
        if is_late:
            eventually(lambda: backend.failure_of(victim) is not None)
        during = outcome_of(meeting, group)
        after = outcome_of("barrier", group)
    del group
    survivors = [rank for rank in members if rank != victim]
    with SubBackend(backend, survivors) as group:
        is_right = outcome_of(meeting, group).is_right and shares(group)
    del group
    with contextlib.suppress(AssertionError):
        eventually(lambda: max(left_since(before)) <= 0, 5.0)
    return Survival(during, after, is_right, left_since(before))


def introduce(backend: Backend, members: list[int]) -> None:
    """Have all of them connected: what stays of that stays as long as the backend."""
    with SubBackend(backend, members) as group:
        group.barrier()


def left_since(before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(held(), before, strict=True))


def held() -> tuple[int, ...]:
    """Return how many descriptors, mappings and threads this process has."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:rankwire" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mappings, threading.active_count()


# -- a rank that is stopped

_current: list[SubBackend] = []  # the group in which this process has operations


def halt(backend: Backend, members: list[int], name: str, at: int, timeout: float) -> Outcome:
    """Be stopped at a passage of an operation; return how it has ended when this rank goes on."""
    group, meeting = group_for(backend, members, name)
    _current.append(group)
    with watching(at, signal.SIGSTOP):
        return outcome_of(meeting, group, timeout)


def outwait(backend: Backend, members: list[int], name: str, timeout: float) -> Outcome:
    """Be in an operation in which another rank is stopped."""
    group, meeting = group_for(backend, members, name)
    _current.append(group)
    return outcome_of(meeting, group, timeout)


def again(backend: Backend, name: str) -> Outcome:
    """Do an operation in the group in which one was stopped."""
    return outcome_of(name, _current[0])


def part(backend: Backend) -> None:
    """Be done with that group."""
    _current.pop().close()
