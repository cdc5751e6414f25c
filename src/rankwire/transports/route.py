"""What a message in memory meets on its way: a delay, a slow reader, and that it is counted.

It knows the headers of frames and the clock; streams and ranks are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rankwire.wire.frames import HEADER_NBYTES, Channel, unpack_size

_COURTESIES = (Channel.FAREWELL, Channel.GREETING)


@dataclass(slots=True, eq=False)
class Gate:
    """Lets one message through at a time, from all streams to one reader.

    Attributes:
        seconds: Between two of them.
        free_at: When the next one may pass, in monotonic time.
    """

    seconds: float
    free_at: float = 0.0


class Position(NamedTuple):
    """Where in a message a writer is."""

    left: int = 0  # bytes of it that are still to come; 0 at a header
    head: bytes = b""  # what has come of the header
    when: float = 0.0  # when it becomes visible, in monotonic time
    is_message: bool = False  # and not a greeting or a farewell

    @property
    def is_at_header(self) -> bool:
        """Whether the next byte is the first one of a frame."""
        return not self.left and not self.head

    @property
    def is_behind_message(self) -> bool:
        """Whether a message has just been written whole."""
        return self.is_message and self.is_at_header


@dataclass(slots=True, eq=False)
class Route:
    """What the messages of one direction meet on their way.

    Attributes:
        now: The clock's, by which they are late.
        delays: How many seconds each takes in turn; None if they take none.
        gate: What lets them through at the reader.
        on_message: Called in the writer's thread when a message is written whole; it must not wait.
    """

    now: Callable[[], float]
    delays: Iterator[float] | None = None
    gate: Gate | None = None
    on_message: Callable[[], None] = lambda: None

    def follow(self, position: Position, data: bytes) -> tuple[int, bool, Position]:
        """Follow what is written next, as far as it belongs to one message or part of a header.

        Messages stay in order; greetings and farewells take no time of their own.

        Returns:
            How many bytes that is; whether a message begins with them; and where the writer is
            behind them, which also says when they are visible.
        """
        left, head, when, is_message = position
        begins = False
        if not left:
            missing = HEADER_NBYTES - len(head)
            if len(data) < missing:
                return len(data), False, Position(0, head + data, when, is_message)
            channel, nbytes = unpack_size(head + data[:missing])
            left = missing + nbytes
            begins = is_message = channel not in _COURTESIES
            if is_message and self.delays is not None:
                when = max(when, self.now() + next(self.delays))
        taken = min(left, len(data))
        return taken, begins, Position(left - taken, b"", when, is_message)
