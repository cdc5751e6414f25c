"""The end of a connection: why its stream has ended, and which error that is.

Failure is sticky: the first cause is kept in ``failure`` and raised by every later use. Only errors
of this package leave from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankwire.errors import ChannelClosedError, ProtocolError, RankwireError
from rankwire.transports.byte_stream import ByteStream
from rankwire.wire.frames import HEADER_NBYTES, SEAL_NBYTES
from rankwire.wire.parser import FrameParser
from rankwire.wire.protocol import ConnectionState, Protocol, StreamEvent, left

if TYPE_CHECKING:
    from rankwire.links.outbox import Outbox

_PEEK_NBYTES = 1 << 16
Explain = Callable[[RankwireError], RankwireError]


class ConnectionEnd:
    """The part of a connection that knows its end; see ``Connection`` for the arguments.

    ``fail`` and ``look_for_end`` are safe from any thread.

    Attributes:
        failure: Why the connection cannot be used any more; None if it can.
    """

    outbox: Outbox

    def __init__(
        self,
        stream: ByteStream,
        protocol: Protocol,
        parser: FrameParser,
        *,
        peer: int,
        is_sealed: bool,
        on_lost: Explain | None,
        on_left: Explain | None,
    ) -> None:
        self.stream = stream
        self.peer = peer
        self.failure: RankwireError | None = None
        self._protocol = protocol
        self.parser = parser
        self._ending: RankwireError | None = None  # the first cause, while its owner is asked
        self._on_lost = on_lost
        self._on_left = on_left
        self._farewell_nbytes = HEADER_NBYTES + (SEAL_NBYTES if is_sealed else 0)

    def _ended(self, error: OSError | None = None) -> RankwireError:
        cause = self._end_of_stream(error)
        if self.failure is None:  # else this end has closed it
            self._protocol.on_event(StreamEvent.END)
        return self.fail(cause)

    def _spoiled(self, error: ProtocolError) -> RankwireError:
        self._protocol.on_event(StreamEvent.VIOLATION)
        return self.fail(error.during(peer=self.peer))

    def _end_of_stream(self, error: OSError | None = None) -> RankwireError:
        reason = "" if error is None else error.strerror or str(error)
        return self._protocol.end_of_stream(in_frame=self.parser.in_frame, reason=reason)

    def _why_not_sent(self, error: OSError) -> RankwireError:
        if self._protocol.state is ConnectionState.OPEN and self._farewell_is_waiting():
            return left(self.peer)
        return self._end_of_stream(error)

    @property
    def was_given_up(self) -> bool:
        """Whether the peer closed it without having sent anything."""
        if self._protocol.state is not ConnectionState.UNUSED or self.failure is not None:
            return self._protocol.state is ConnectionState.GIVEN_UP
        try:
            return not self.stream.peek(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def look_for_end(self) -> None:
        """Raise if the connection has ended, even if no thread reads it. Safe from any thread."""
        if self.failure is None:
            try:
                waiting = self.stream.peek(_PEEK_NBYTES)
                if waiting and not self._is_only_a_farewell(waiting):
                    return  # the reader will come to it
                cause = left(self.peer) if waiting else self._end_of_stream()
            except BlockingIOError:
                return
            except OSError as error:
                cause = self._end_of_stream(error)
            self.fail(cause)
        assert self.failure is not None
        raise self.failure.copy()

    def _is_only_a_farewell(self, waiting: bytes) -> bool:
        if len(waiting) != self._farewell_nbytes or self.parser.in_frame:
            return False
        return self.parser.is_farewell(waiting)

    def _farewell_is_waiting(self) -> bool:
        """Whether the last bytes in the stream are a farewell, which is always the last frame.

        The reader may not have come to it, and a connection that is only written has no reader.
        """
        try:
            waiting = self.stream.peek(_PEEK_NBYTES)
        except OSError:
            return False
        return self.parser.is_farewell(waiting)

    def fail(self, cause: RankwireError) -> RankwireError:
        """Fail the connection and wake its threads; return the first cause, ready to be raised."""
        # First of all, for what follows can wait and be interrupted: nothing can be sent any more.
        cause = self._ending = self._ending or cause.kept()
        self.stream.shut_down()
        if self.failure is None:
            if self._on_lost is not None and not isinstance(cause, ChannelClosedError):
                cause = self._on_lost(cause)
            self._end(cause)
        assert self.failure is not None
        return self.failure.copy()

    def _end(self, cause: RankwireError) -> None:
        """Keep the first cause. The writer's first: it must not send when nothing is read."""
        self.outbox.failure = self.outbox.failure or cause
        self.failure = self.failure or cause

    def explain_end(self, error: RankwireError) -> RankwireError:
        """Return the cause of an end for a waiting caller; a farewell may have a reason."""
        if self._on_left is not None and isinstance(error, ChannelClosedError):
            return self._on_left(error)
        return error
