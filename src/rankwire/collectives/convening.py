"""Convening: how the ranks that wait in one operation learn where all others are.

Among few ranks each tells all others that it waits. Among many that would be N squared messages, so
one of them, the *convener*, asks for all: it tells every other rank that it waits, those who wait
too answer it, and it hands the roll to all who did. If its time is nearly up, a rank asks for the
roll once more. A rank that fails where all fail at once tells the convener, which tells all. So
everything together is a few messages for each rank.

The lowest rank that waits convenes: each rank waits for its turn to do so, a little longer than the
one below it, and does it if it has heard of no other. A rank that is missing or dead is therefore
no convener, whichever it is. One that is done with the operation says so, and another takes over.

Used by the thread that runs the operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from rankwire.collectives.exchange import LOOK_EVERY
from rankwire.collectives.notices import Notice
from rankwire.deadline import Deadline

if TYPE_CHECKING:
    from rankwire.collectives.sequence import OperationSequence, Roll

# Up to so many ranks everyone tells everyone: it is quicker, and at most 56 messages.
_FEW = 8
# With so many ranks, and each more of them, they wait 50 ms longer before they tell others.
_MANY = 32
_ASK_BEFORE = 3.5 * LOOK_EVERY  # seconds before its limit at which a rank asks for the roll


class Convening:
    """What one rank does about it, in one operation.

    Args:
        operations: What is known of the others.
        waiting: What this rank says.
        deadline: Of the operation.
    """

    def __init__(self, operations: OperationSequence, waiting: Notice, deadline: Deadline) -> None:
        self._operations = operations
        self._waiting = waiting
        self._deadline = deadline
        self._is_convener = False
        self._since = 0.0  # seconds of waiting after which there was no convener
        self._untold: list[int] = []  # who does not know yet that we convene
        self._answered: set[int] = set()  # conveners that know that we wait
        self._has_asked = False
        self._roll: Roll = ((), ())  # as it was last handed to all
        self._interval = LOOK_EVERY
        self._next_roll = 0.0

    @property
    def relay(self) -> list[int] | None:
        """Who tells all others of a failure; None if this rank does."""
        convener = self._operations.convener(self._waiting.sequence)
        return None if self._is_few or self._is_convener or convener is None else [convener]

    @property
    def _is_few(self) -> bool:
        return self._operations.backend.world_size <= _FEW

    def look(self) -> None:
        """Tell whom there is to tell, after what was told has been taken in."""
        if not self._is_convener:
            self._convene_if_due()
        if self._untold:
            convening = replace(self._waiting, state="convening")
            self._untold = self._operations.tell(convening, self._untold)
        if not self._is_few:
            self._answer()
            if self._is_convener:
                self._call_roll()
            else:
                self._ask_in_time()

    def end(self) -> None:
        """It went well here: ranks that still wait must not count on this rank any more."""
        if self._is_convener and not self._is_few:
            self._operations.tell(replace(self._waiting, state="done"))

    def _convene_if_due(self) -> None:
        if not self._is_few and self._operations.convener(self._waiting.sequence) is not None:
            self._since = self._deadline.waited
        elif self._deadline.waited - self._since >= self._patience:
            self._is_convener = True
            self._untold = self._operations.others

    @property
    def _patience(self) -> float:
        """Seconds without a convener after which this rank is one."""
        rank, size = self._operations.backend.rank, self._operations.backend.world_size
        delay = LOOK_EVERY * max(1, size // _MANY)
        if self._is_few:
            return delay
        # One look apart, for a quarter of the time that there is; the rest within the next quarter.
        turn, quarter = LOOK_EVERY * rank, self._deadline.limit / 4
        return delay + (turn if turn <= quarter else quarter + quarter * rank / size)

    def _answer(self) -> None:
        for src in self._operations.conveners(self._waiting.sequence - 1):
            if src not in self._answered and not self._operations.tell(self._waiting, [src]):
                self._answered.add(src)

    def _call_roll(self) -> None:
        """Hand on who is here: to who asks, and to all if it has changed, but ever less often."""
        roll = self._operations.roll(self._waiting.sequence)
        asking = self._operations.take_asking()
        if roll != self._roll and self._deadline.waited >= self._next_roll:
            here, ahead = self._roll = roll
            asking = [*here, *(rank for rank, _, _ in ahead)]
            self._next_roll = self._deadline.waited + self._interval
            self._interval *= 2
        if asking:
            here, ahead = roll
            self._operations.tell(
                replace(self._waiting, state="roll", here=here, ahead=ahead), asking
            )

    def _ask_in_time(self) -> None:
        convener = self._operations.convener(self._waiting.sequence)
        if convener is None or self._has_asked or self._deadline.remaining() > _ASK_BEFORE:
            return
        self._has_asked = not self._operations.tell(
            replace(self._waiting, state="asking"), [convener]
        )
