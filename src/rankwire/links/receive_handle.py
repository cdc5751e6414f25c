"""Expect a message: what its receiver holds until it has come and has been read.

A large message may still be in the sender's memory when it has come. ``ReceiveHandle.take`` reads
it straight to its destination, and releases the sender.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.links.inbox import Inbox
from rankwire.override import override
from rankwire.wire.frames import Envelope, Payload
from rankwire.wire.receive import Destination, MessageWithdrawnError, PostedReceive

T = TypeVar("T")


def drop(payload: Payload) -> None:
    """Release the sender of a message that was not read."""
    if not isinstance(payload, bytearray):
        with suppress(MessageWithdrawnError):
            payload.release()


class ReceiveHandle(ABC):
    """A message that is expected, perhaps in a given place. Used by one thread at a time.

    Nothing happens before ``post`` or ``take``. After them it must be taken or given up.

    Attributes:
        index: Which of several possible senders has sent it, once it has come.
        explain: As for ``SendHandle``.
    """

    __slots__ = ("_result", "explain", "index")

    def __init__(self) -> None:
        self.index = 0
        self.explain: Callable[[RankwireError], RankwireError] | None = None
        self._result: list[Any] = []  # of a message that may have to be released again

    @abstractmethod
    def post(self) -> None:
        """Ask for the message, so that it can arrive in its place. Does not wait. Idempotent."""

    @abstractmethod
    def give_up(self) -> None:
        """Leave the message to the next receive; its place is free on return. Idempotent."""

    @abstractmethod
    def _wait(self, deadline: Deadline) -> Payload:
        """Return the message; raises as ``take`` does."""

    def take(self, deadline: Deadline, read: Callable[[Payload], T]) -> T:
        """Wait for the message and return ``read(message)``. Safe to repeat after an interrupt.

        ``read`` may be called again until the sender has been released.

        Raises:
            DeadlineExceededError: It has not come, and is still expected.
            MessageWithdrawnError: The sender withdrew it before it was read; expect the next one.
            RankwireError: It will not come; nothing is written to its place any more.
        """
        try:
            payload = self._wait(deadline)
            if isinstance(payload, bytearray):
                return read(payload)
            result = self._result
            try:
                if not result:
                    result[:] = (read(payload),)
            except MessageWithdrawnError:
                raise
            except RankwireError:
                payload.release()  # a message that cannot be read is dropped
                raise
            payload.release()
            return result[0]  # type: ignore[no-any-return]
        except RankwireError as error:
            raise self._explained(error) from error.__cause__

    def take_now(self, deadline: Deadline, read: Callable[[Payload], T]) -> T:
        """Do as ``take``, but only once: a message that does not come in time is given up.

        If reading fails, or is interrupted, the message is dropped.
        """
        try:
            try:
                payload = self._wait(deadline)
            except BaseException:
                try:
                    self.give_up()
                finally:
                    self.give_up()  # an interrupt may have fallen into the first
                raise
            try:
                result = read(payload)
                if not isinstance(payload, bytearray):
                    payload.release()
                return result
            except BaseException:
                drop(payload)
                raise
        except RankwireError as error:
            raise self._explained(error) from error.__cause__

    def _explained(self, error: RankwireError) -> RankwireError:
        if self.explain is None or isinstance(error, MessageWithdrawnError):
            return error
        return self.explain(error)


class PeerReceive(ReceiveHandle):
    """A message that is expected from one peer, in ``into`` if that is given."""

    __slots__ = ("_inbox", "_is_posted", "_receive")

    def __init__(
        self,
        inbox: Inbox,
        envelope: Envelope,
        nbytes: int | None = None,
        into: Destination | None = None,
    ) -> None:
        # Not by the class above: a message of 8 bytes there and back takes 13 us.
        self.index = 0
        self.explain = None
        self._result = []
        self._inbox = inbox
        self._receive = PostedReceive(envelope, nbytes=nbytes, into=into)
        self._is_posted = False

    @override
    def post(self) -> None:
        if not self._is_posted:
            self._is_posted = True
            self._inbox.post(self._receive)

    @override
    def _wait(self, deadline: Deadline) -> Payload:
        self.post()
        inbox, receive = self._inbox, self._receive
        if not inbox.drive_posted(receive, deadline):
            raise inbox.too_late(deadline)
        if receive.payload is None:
            inbox.vacate(receive)
        return receive.take()

    @override
    def give_up(self) -> None:
        if self._is_posted:
            self._inbox.give_up(self._receive)
