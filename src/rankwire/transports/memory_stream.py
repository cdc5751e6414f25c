"""Streams in memory: two ends in one process, without descriptors.

Two pipes (``pipe``) are a connection, one each way; each end is a ``Stream``. What messages meet on
their way is a ``route``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankwire.clock import Clock
from rankwire.transports.pipe import Pipe
from rankwire.transports.route import Route
from rankwire.transports.stream import Watched
from rankwire.transports.wakeup import Sleepers, sleeper
from rankwire.wire.frames import Buffer
from rankwire.wire.ring import RingReader


class MemoryStream:
    """One end of two pipes, which a connection uses as it uses a socket (``Stream``).

    Attributes:
        incoming: What the other end writes.
        outgoing: What it reads.
    """

    __slots__ = ("_clock", "incoming", "outgoing")

    transport = "memory"
    # A parser that never reads more at once makes a small buffer: there may be 65,000 of them.
    buffer_nbytes = 512
    recv_pending = None
    ring: RingReader | None = None

    def __init__(self, incoming: Pipe, outgoing: Pipe, clock: Clock) -> None:
        self._clock = clock
        self.incoming = incoming
        self.outgoing = outgoing

    @property
    def write(self) -> Callable[[Sequence[Buffer], list[int]], None]:
        """Takes the beginning of several pieces and notes how much, as one step."""
        return self.outgoing.write

    @property
    def read(self) -> Callable[[memoryview, list[int]], None]:
        """Fills the beginning of a buffer and notes how much, as one step."""
        return self.incoming.read

    def send(self, data: Buffer) -> int:
        """Write what there is room for, as a socket does; return how much that was."""
        return self.sendmsg((data,))

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        """Send what can be taken now of several pieces."""
        counts: list[int] = []
        self.outgoing.write(pieces, counts)
        return counts[0]

    def recv_into(self, buffer: memoryview) -> int:
        """Read into a buffer, as a socket does; return how much."""
        counts: list[int] = []
        self.incoming.read(buffer, counts)
        return counts[0]

    def look_away(self) -> bool:
        """There is no ring."""
        return False

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of what is there to read, and leave it; empty at the end."""
        return self.incoming.peek(nbytes)

    def wait_readable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until there is something to read, the end included.

        Returns False if the time passes, or as soon as one of the others has something to read.
        """
        incoming = self.incoming
        return self._wait(lambda: incoming.readable_in() == 0.0, seconds, [incoming], (), beside)

    def wait_writable(self, seconds: float, beside: Sequence[Watched] = ()) -> bool:
        """Sleep until something can be written.

        Returns False if the time passes, or as soon as one of the others has something to read.
        """
        outgoing = self.outgoing
        return self._wait(lambda: outgoing.is_writable, seconds, [], (outgoing.writers,), beside)

    def _wait(
        self,
        is_ready: Callable[[], bool],
        seconds: float,
        pipes: list[Pipe],
        places: tuple[Sleepers, ...],
        beside: Sequence[Watched],
    ) -> bool:
        """Sleep until it is ready or a pipe can be read; return whether it is ready."""
        limit = self._clock.now() + seconds
        others = [other.incoming for other in beside if isinstance(other, MemoryStream)]
        pipes = [*pipes, *others]
        while not is_ready():
            left = limit - self._clock.now()
            if left <= 0.0 or _is_any_readable(others):
                return False
            with sleeper(self._clock, *places, *(pipe.readers for pipe in pipes)) as sleep:
                if is_ready() or _is_any_readable(others):
                    continue
                gaps = [gap for pipe in pipes if (gap := pipe.readable_in()) is not None]
                sleep(min(left, *gaps) if gaps else left)
        return True

    def unsent_nbytes(self) -> int:
        """Return how many bytes have been written that the other end has not read."""
        return self.outgoing.load_nbytes

    def tcp_info(self) -> None:
        """Return None: it is no TCP connection."""
        return None

    def peer_pid(self) -> int:
        """Return 0: there is no other process."""
        return 0

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def shut_down(self) -> None:
        """End both directions: what was written arrives, what is visible here can be read."""
        self.outgoing.end()
        self.incoming.cut()

    def abort(self) -> None:
        """End both directions as if a cable were cut: what is not visible by now is lost."""
        self.outgoing.cut()
        self.incoming.cut()

    def close(self) -> None:
        """End both directions and forget what nobody will read."""
        self.shut_down()
        self.incoming.discard()


def memory_pair(
    limit: int, clock: Clock, there: Route | None = None, back: Route | None = None
) -> tuple[MemoryStream, MemoryStream]:
    """Return two ends that are connected.

    Args:
        limit: Bytes of one direction above which a writer waits; a message may be larger if there
            is no other.
        clock: By which waits end.
        there: What messages from the first end to the second one meet.
        back: The same for those from the second one.
    """
    one, other = Pipe(limit, there), Pipe(limit, back)
    return MemoryStream(other, one, clock), MemoryStream(one, other, clock)


def _is_any_readable(pipes: Sequence[Pipe]) -> bool:
    return any(pipe.readable_in() == 0.0 for pipe in pipes)
