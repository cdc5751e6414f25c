"""A rank is killed, or stopped, at the steps of every collective that meets in a segment.

The survivors live on: in one world many ranks are killed, one after the other, each in a group of
its own with the same two others. At which passages is counted first, in a group where nothing
happens (``steps``).
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from faults.meetings import BY_MESSAGES, MEETINGS, SEGMENT_NBYTES
from faults.step_errands import AGREEMENT, Outcome, Survival
from faults.steps import SENT, STEP_WRITTEN
from rankwire.transports.shared_memory import CAN_SHARE
from worlds import Command, RankProcess, eventually, process_world, state_of

pytestmark = [
    pytest.mark.skipif(not CAN_SHARE, reason="memory is shared on Linux and x86 only"),
    pytest.mark.timeout(300),
]

ERRANDS = "__import__('faults.step_errands').step_errands"
SOON = 5.0
OPERATIONS = [AGREEMENT, *MEETINGS]
PLACES = (0, 1, 2)  # of the victim among the three of a group; the first makes the segment
VICTIMS = 12  # of one world


class Kill(NamedTuple):
    """One rank that is killed or stopped.

    Attributes:
        name: In which operation.
        place: Its rank in the group.
        passages: All of this operation on this rank.
        at: At which of them that happens.
        is_late: Whether one of the others comes after that.
    """

    name: str
    place: int
    passages: list[str]
    at: int
    is_late: bool

    @property
    def is_before_its_part(self) -> bool:
        """Whether others need something that it has not done."""
        part = SENT if self.name in BY_MESSAGES else STEP_WRITTEN
        return part in self.passages[self.at + 1 :]

    def __str__(self) -> str:
        late = ", another one late" if self.is_late else ""
        return f"{self.name}: rank {self.place} at {self.at}, {self.passages[self.at]}{late}"


def start(rank: RankProcess, errand: str, *args: Any) -> Command:
    """Begin what a rank is to do."""
    return rank.start("eval", f"{ERRANDS}.{errand}(backend, *args)", args=args)


class Field:
    """A world in which ranks are killed, and the same two survive."""

    def __init__(self, ranks: list[RankProcess], place: int) -> None:
        last = len(ranks) - 1
        self._ranks = ranks
        self._place = place
        self._survivors = [(last - 1, last), (0, last), (0, 1)][place]
        # The coordinator, rank 0, is the last of them.
        self.victims = [rank for rank in range(last, -1, -1) if rank not in self._survivors]
        self._run(self._survivors, "passages", [*self._survivors], "barrier")

    def passages(self, name: str) -> list[str]:
        """Return what the victim passes in an operation in which nothing happens."""
        members = self._members(self.victims[0])
        found: list[list[str]] = self._run(members, "passages", members, name)
        return found[self._place]

    def kill(self, kill: Kill) -> list[Survival]:
        """Kill the next victim; return what the survivors have seen."""
        return self._kill([False, kill.is_late], kill.name, "fall", kill.name, kill.at)

    def kill_asleep(self, kill: Kill) -> list[Survival]:
        """Kill the next victim when it sleeps until others come, which they do thereafter."""
        return self._kill([True, True], kill.name, "fall_asleep", kill.name)

    def _kill(self, late: list[bool], name: str, errand: str, *args: Any) -> list[Survival]:
        victim = self.victims.pop(0)
        members = self._members(victim)
        self._start(victim, errand, members, *args)
        commands = [
            self._start(rank, "survive", members, name, victim, is_late)
            for rank, is_late in zip(self._survivors, late, strict=True)
        ]
        return [command.result() for command in commands]

    def _members(self, victim: int) -> list[int]:
        return sorted([*self._survivors, victim])

    def _run(self, ranks: Sequence[int], errand: str, *args: Any) -> list[Any]:
        return [
            command.result() for command in [self._start(rank, errand, *args) for rank in ranks]
        ]

    def _start(self, rank: int, errand: str, *args: Any) -> Command:
        return start(self._ranks[rank], errand, *args)


@contextmanager
def field(place: int, victims: int) -> Iterator[Field]:
    with process_world(victims + 2, segment_nbytes=SEGMENT_NBYTES) as ranks:
        yield Field(ranks, place)


def kills_of(name: str, place: int, passages: list[str]) -> list[Kill]:
    """Return all of an operation: at each passage, and there also with somebody who comes late.

    Who waits for that one does not get any further.
    """
    waits = (passed in ("after meet", "after receive") for passed in passages)
    until = next(at for at, is_after_waiting in enumerate(waits) if is_after_waiting)
    punctual = [Kill(name, place, passages, at, False) for at in range(len(passages))]
    return punctual + [kill._replace(is_late=True) for kill in punctual[:until]]


def assert_survived(kill: Kill, survivals: list[Survival]) -> None:
    for survival in survivals:
        assert_named(kill, survival.during)
        after = survival.after
        assert (after.error, after.named) == ("PeerLostError", (kill.place,)), kill
        assert after.seconds < SOON, kill
        assert survival.is_right, kill
        assert max(survival.left) <= 0, (str(kill), survival.left)
    if kill.is_before_its_part:
        errors = [survival.during.error for survival in survivals]
        assert any(errors) if kill.name in BY_MESSAGES else all(errors), kill


def assert_named(kill: Kill, during: Outcome) -> None:
    assert during.seconds < SOON, kill
    if not during.error:
        assert during.is_right, kill
        return
    assert (during.error, during.named) == ("PeerLostError", (kill.place,)), kill
    if kill.name == "all_reduce in pieces":
        assert during.state != "broken", kill
    elif "not fit" not in kill.name:
        assert during.state in ("untouched", "whole"), (str(kill), during.state)


@pytest.mark.fault(48, "a rank killed at any step of a collective in shared memory is named by all")
@pytest.mark.fault(32, "nothing is left of the segment of a group in which a rank was killed")
@pytest.mark.fault(33, "of a slot whose writer is killed before it is published nothing is read")
@pytest.mark.parametrize(
    "place", [0, *(pytest.param(place, marks=pytest.mark.slow) for place in PLACES[1:])]
)
def test_a_rank_is_killed_at_a_step_of_a_collective(place):
    """A few of all steps: in each operation one, in each place another operation."""
    names = OPERATIONS[place :: len(PLACES)]
    with field(place, len(names)) as world:
        for number, name in enumerate(names):
            kills = kills_of(name, place, world.passages(name))
            kill = kills[(7 * number + 5 * place + 3) % len(kills)]
            assert_survived(kill, world.kill(kill))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_is_killed_at_every_step_of_a_collective(name, place):
    with field(place, 1) as world:
        kills = kills_of(name, place, world.passages(name))
    while kills:
        now, kills = kills[:VICTIMS], kills[VICTIMS:]
        with field(place, len(now)) as world:
            for kill in now:
                assert_survived(kill, world.kill(kill))


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed_while_it_sleeps_in_a_collective(place):
    names = ("all_reduce", "all_reduce with shared work", "broadcast")
    with field(place, len(names)) as world:
        for name in names:
            passages = world.passages(name)
            kill = Kill(name, place, passages, passages.index("after publish"), True)
            assert_survived(kill, world.kill_asleep(kill))


# -- ranks that are stopped ------------------------------------------------------------------------

LIMIT = 0.7  # seconds for the operation in which one is stopped
IN_TIME = ("DeadlineExceededError", "CollectiveAbortedError")


def stops_of(name: str, place: int, passages: list[str]) -> list[Kill]:
    """Return the first and the last before a rank has done its part, and the first thereafter."""
    every = [Kill(name, place, passages, at, False) for at in range(len(passages))]
    before = [stop for stop in every if stop.is_before_its_part]
    return [before[0], before[-1], every[len(before)]]


def stop(ranks: list[RankProcess], case: Kill) -> None:
    """Stop a rank; the others name it at their limit, and all are in step once it goes on."""
    members = [0, 1, 2]
    stopped = ranks[case.place]
    others = [rank for rank in ranks if rank is not stopped]
    halting = start(stopped, "halt", members, case.name, case.at, LIMIT)
    waiting = [start(rank, "outwait", members, case.name, LIMIT) for rank in others]
    outcomes = [command.result() for command in waiting]
    eventually(lambda: state_of(stopped.pid) == "T")
    stopped.signal(signal.SIGCONT)
    for outcome in [*outcomes, halting.result()]:
        assert outcome.is_right if not outcome.error else outcome.error in IN_TIME, case
        assert outcome.seconds < SOON, case
    late = [outcome for outcome in outcomes if outcome.error == "DeadlineExceededError"]
    for outcome in late:
        assert case.place in outcome.named, (str(case), outcome)
        # Who has all that it waits for has returned, and does not tell the others that it came.
        assert len(outcome.named) == 1 or case.name in BY_MESSAGES, (str(case), outcome)
    if case.is_before_its_part:
        assert late, (str(case), outcomes)
    elif case.name not in BY_MESSAGES:  # what was lent to it is not given back
        assert not late, (str(case), outcomes)
    assert_in_step(ranks, case)


def assert_in_step(ranks: list[RankProcess], case: Kill) -> None:
    name = "all_reduce" if case.name == AGREEMENT else case.name
    # By messages one may have done its part, and hears in the next one that another has not.
    for _ in range(2 if case.name in BY_MESSAGES else 1):
        outcomes = [c.result() for c in [start(rank, "again", name) for rank in ranks]]
        if all(outcome.is_right for outcome in outcomes):
            break
    assert [outcome.error for outcome in outcomes] == [""] * len(ranks), case
    assert all(outcome.is_right for outcome in outcomes), case
    for command in [start(rank, "part") for rank in ranks]:
        command.result()


def passages_of(ranks: list[RankProcess], name: str) -> list[list[str]]:
    """Return what each rank passes in an operation in which nothing happens."""
    return [c.result() for c in [start(rank, "passages", [0, 1, 2], name) for rank in ranks]]


@pytest.mark.fault(3, "a rank stopped in a collective in shared memory is named; then all go on")
def test_a_rank_is_stopped_in_a_collective():
    cases = [("all_reduce with shared work", 1), ("broadcast", 0), ("scatter_object", 2)]
    with process_world(3, segment_nbytes=SEGMENT_NBYTES) as ranks:
        for number, (name, place) in enumerate(cases):
            passages = passages_of(ranks, name)[place]
            stop(ranks, stops_of(name, place, passages)[number])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_is_stopped_in_every_collective(name):
    with process_world(3, segment_nbytes=SEGMENT_NBYTES) as ranks:
        for place, passages in enumerate(passages_of(ranks, name)):
            for case in stops_of(name, place, passages):
                stop(ranks, case)
