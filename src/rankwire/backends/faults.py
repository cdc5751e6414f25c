"""Fault plans of a simulated world, and the thread that applies timed faults.

Every decision depends only on the seed and the place (source, destination, kind of traffic), never
on thread scheduling: the n-th message of a link is delayed alike in every run with the same seed.
``simulated_network`` applies delays and breaks to the ranks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

from rankwire import runtime
from rankwire.backends.arguments import check_rank
from rankwire.clock import Clock
from rankwire.errors import ConfigurationError, NoConnectionError
from rankwire.public_dir import PublicDir

Operation = Literal["call", "message", "collective"]  # what a rank begins, and a plan can fail
Link = tuple[int, int]  # two ranks, the lower first: both directions

_LONGEST_SLEEP = 86_400.0  # condition variables have an upper limit


@dataclass(frozen=True, slots=True)
class _Delay:
    seconds: float
    jitter: float
    src: int | None
    dst: int | None

    def concerns(self, src: int, dst: int) -> bool:
        return self.src in (None, src) and self.dst in (None, dst)

    def draw(self, generator: runtime.Random) -> float:
        return self.seconds + (generator.uniform(0.0, self.jitter) if self.jitter else 0.0)


class FaultPlan(PublicDir):
    """The faults of a simulated world. Each method adds one and returns the plan.

    A world takes a copy, so several worlds can use one plan. Not safe from several threads.

    Args:
        seed: The seed of all random decisions.

    Example:
        >>> plan = FaultPlan(seed=7).delay(0.001, jitter=0.004).kill(2, after=100)
        >>> plan
        FaultPlan(seed=7, 2 faults)
    """

    _SHOWN = ("delay", "drop_link", "fail", "kill", "partition", "seed", "slow_reader")

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reader_seconds: dict[int, float] = {}
        self.kill_after_messages: dict[int, int] = {}
        self.kill_after_seconds: dict[int, float] = {}
        self.break_after_messages: dict[Link, int] = {}
        self.break_after_seconds: dict[Link, float] = {}
        self.failures: dict[tuple[int, Operation], dict[int, Exception]] = {}
        self._delays: list[_Delay] = []
        self._ranks: set[int] = set()
        self._count = 0

    # -- what users call ---------------------------------------------------------------------------

    def delay(
        self, seconds: float, *, jitter: float = 0.0, src: int | None = None, dst: int | None = None
    ) -> Self:
        """Delay messages; those of one link still arrive in order.

        Delays that apply to the same link add up.

        Args:
            seconds: The smallest delay of a message.
            jitter: The largest random addition, drawn for each message.
            src: Only messages from this rank.
            dst: Only messages to this rank.
        """
        rule = _Delay(_seconds(seconds), _seconds(jitter), src, dst)
        self._delays.append(rule)
        return self._added(rank for rank in (src, dst) if rank is not None)

    def drop_link(self, a: int, b: int, *, after: int = 0) -> Self:
        """Break the link between two ranks, both ways: each sees the other as lost.

        Args:
            a: One end.
            b: The other end.
            after: How many messages the link carries first, both ways together; 0 breaks it from
                the start.
        """
        self.break_after_messages[link_between(a, b)] = _messages(after)
        return self._added((a, b))

    def partition(self, sides: Sequence[Sequence[int]], *, after: float = 0.0) -> Self:
        """Break all links between ranks of different sides.

        Args:
            sides: Groups of ranks. A rank in none of them keeps its links.
            after: Seconds from the start of the world.
        """
        ranks = [rank for side in sides for rank in side]
        if len(set(ranks)) < len(ranks):
            raise ConfigurationError(f"a rank can be on one side of a partition only: {sides!r}")
        for one, other in itertools.combinations(sides, 2):
            for a, b in itertools.product(one, other):
                self.break_after_seconds[link_between(a, b)] = _seconds(after)
        return self._added(ranks)

    def kill(
        self, rank: int, *, after: int | None = None, after_seconds: float | None = None
    ) -> Self:
        """Kill a rank; without ``after`` or ``after_seconds``, from the start.

        Args:
            rank: The rank.
            after: How many messages it sends first; calls, replies and barriers count too.
            after_seconds: Seconds from the start of the world. With ``after`` too, whichever comes
                first applies.
        """
        if after is not None or after_seconds is None:
            self.kill_after_messages[rank] = _messages(after or 0)
        if after_seconds is not None:
            self.kill_after_seconds[rank] = _seconds(after_seconds)
        return self._added((rank,))

    def slow_reader(self, rank: int, seconds_per_message: float) -> Self:
        """Make a rank read one message at a time, so that its senders wait for a full queue."""
        self.reader_seconds[rank] = _seconds(seconds_per_message)
        return self._added((rank,))

    def fail(
        self,
        rank: int,
        *,
        call: int | None = None,
        message: int | None = None,
        collective: int | None = None,
        error: Exception | None = None,
    ) -> Self:
        """Make one operation of a rank fail before it has sent anything. The rank goes on.

        With ``fail(1, call=3)``, the third call that rank 1 makes raises. Operations are counted
        from 1, in the order in which the rank begins them, to any peer; retries count too.

        Args:
            rank: The rank whose operation fails.
            call: The number of a call, made with ``rpc_sync`` or ``rpc_async``.
            message: The number of a message, sent with ``send`` or its variants.
            collective: The number of a collective, of any group. It fails with
                ``CollectiveAbortedError`` on the other ranks, and all are in step afterwards.
            error: The exception that the operation or its handle raises; ``NoConnectionError`` by
                default.
        """
        given = {"call": call, "message": message, "collective": collective}
        chosen = [(kind, number) for kind, number in given.items() if number is not None]
        if not chosen:
            raise ConfigurationError("say which operation fails: call=, message= or collective=")
        for kind, number in chosen:
            if not isinstance(number, int) or number < 1:
                raise ConfigurationError(f"operations are counted from 1, not {number!r}")
            text = f"the fault plan fails {kind} {number} of rank {rank}"
            failing = self.failures.setdefault((rank, cast(Operation, kind)), {})
            failing[number] = NoConnectionError(text) if error is None else error
        return self._added((rank,))

    # -- what the simulated network asks -----------------------------------------------------------

    @property
    def counts_messages(self) -> bool:
        """Whether any fault happens after a number of messages."""
        return bool(self.kill_after_messages or self.break_after_messages)

    def check(self, world_size: int) -> None:
        """Raise ``InvalidRankError`` if the plan names a rank that the world does not have."""
        for rank in sorted(self._ranks):
            check_rank(rank, world_size)

    def delays(self, src: int, dst: int, kind: str = "") -> Iterator[float] | None:
        """Return the delays of a link's messages of one kind in seconds; None if it has none."""
        rules = [rule for rule in self._delays if rule.concerns(src, dst)]
        if not rules:
            return None
        generator = runtime.Random(f"{self.seed}/{src}/{dst}/{kind}")
        return map(_draw, itertools.repeat(rules), itertools.repeat(generator))

    def _added(self, ranks: Iterable[int]) -> Self:
        self._ranks.update(ranks)
        self._count += 1
        return self

    def __repr__(self) -> str:
        return f"FaultPlan(seed={self.seed}, {self._count} fault{'' if self._count == 1 else 's'})"


class Timetable:
    """A thread that runs actions at their times; it starts only if there are any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._agenda: list[tuple[float, Callable[[], None]]] = []
        self._has_ended = runtime.Event()
        self._thread = runtime.Thread(target=self._run, name="rankwire-timetable", daemon=True)

    def begin(self, agenda: Iterable[tuple[float, Callable[[], None]]]) -> None:
        """Start the actions, each at its time, equal times in list order. No action may wait."""
        self._agenda = sorted(agenda, key=operator.itemgetter(0))
        if self._agenda and not self._has_ended.is_set():
            self._thread.start()

    def end(self) -> None:
        """Cancel the remaining actions, and end the thread."""
        self._has_ended.set()
        if self._thread.ident is not None and self._thread is not runtime.current_thread():
            self._clock.join(self._thread)

    def _run(self) -> None:
        for when, action in self._agenda:
            while (left := when - self._clock.now()) > 0.0:
                if self._clock.wait(self._has_ended, min(left, _LONGEST_SLEEP)):
                    return
            if self._has_ended.is_set():
                return
            action()


def link_between(a: int, b: int) -> Link:
    """Return the link of two ranks, in either order."""
    if a == b:
        raise ConfigurationError(f"rank {a} has no link to itself")
    return (a, b) if a < b else (b, a)


def _draw(rules: Sequence[_Delay], generator: runtime.Random) -> float:
    return sum(rule.draw(generator) for rule in rules)


def _seconds(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"a fault takes 0 or more seconds, not {value!r}")
    return value


def _messages(value: int) -> int:
    # a float is probably a time, meant for another argument
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"a fault comes after 0 or more messages, not {value!r}")
    return value
