"""Queues messages that are sent without waiting, until the peer takes them.

A message that the peer does not take at once waits here, in its owner's memory, which must not
change until the message is sent. Any thread that sends to the same peer or waits for it sends it
first; ``on_rest`` has it sent when the stream takes more. A sender releases the send lock from time
to time, so that an owner whose deadline has passed can take its memory back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.interrupts import ONCE
from rankwire.links.lender import Meanwhile
from rankwire.links.writer import JOIN_NBYTES, FrameWriter
from rankwire.wire.frames import HEADER, SEQUENCE_MASK, Buffer, Envelope, Message
from rankwire.wire.seals import SealInProgress

_TURN = 0.05  # seconds that one thread holds the send lock for other threads' messages
_PAUSE = 0.0005  # and then releases it


@dataclass(slots=True, eq=False)
class Queued:
    """A message that waits to be sent."""

    outbox: Outbox
    envelope: Envelope
    message: Message
    number: int | None = None  # of its frame, set before the first attempt
    is_withdrawn: bool = False


class Outbox(FrameWriter):
    """The outgoing direction of a connection, with messages that wait to be sent."""

    def post(self, envelope: Envelope, message: Message, at_once: Deadline) -> Queued | None:
        """Send one message without waiting; ``at_once`` is an expired deadline.

        Returns what to wait for while its buffers must not change; None if the caller may reuse
        them.
        """
        if message[1] <= JOIN_NBYTES and not self.waiting:
            try:
                self.send(envelope, message, at_once)
                return None
            except DeadlineExceededError:  # nothing of it was sent
                pass
        queued = Queued(self, envelope, message)
        try:
            self.enqueue(queued, at_once)
            return None if self.has_left(queued) else queued
        except BaseException:
            try:
                self.withdraw(queued)
            finally:
                self.withdraw(queued)  # a second interrupt may have stopped the first
            raise

    def enqueue(self, queued: Queued, at_once: Deadline) -> None:
        """Send a message without waiting, before all that is sent later. Safe to repeat."""
        if queued not in self.waiting and queued.number is None:  # a sender sets this first
            self.waiting.append(queued)
        try:
            self.flush(at_once)
        except DeadlineExceededError:
            self._on_rest()

    def has_left(self, queued: Queued) -> bool:
        """Whether all of a message is sent."""
        number = queued.number
        sent, held = self._outgoing
        return number is not None and (number + 1 < sent or (number + 1 == sent and not held))

    def finish(self, queued: Queued, deadline: Deadline, meanwhile: Meanwhile | None) -> bool:
        """Send until all of a message is sent; return False if the deadline passes first."""
        return self._locked(self._finish_queued, queued, deadline, meanwhile)

    def _finish_queued(
        self, grip: list[bool], queued: Queued, deadline: Deadline, meanwhile: Meanwhile | None
    ) -> bool:
        while not self.has_left(queued):
            try:
                self._take_lock(grip, deadline.sooner(_TURN))
                if self._sends_waiting(grip, deadline, meanwhile, queued):
                    break
            except DeadlineExceededError:
                if deadline.expired:
                    break
        return self.has_left(queued)

    def withdraw(self, queued: Queued) -> bool:
        """Free the memory of a message; return whether nothing of it was sent. Idempotent.

        If a part was sent, the rest is copied, and follows.
        """
        queued.is_withdrawn = True
        if queued.number is None:  # a sender that is about to try it sees is_withdrawn
            return True
        with self._lock:
            if self._journal is not None:
                self._put_in_order(True)
            number, (sent, held) = queued.number, self._outgoing
            if number is None or number >= sent:
                return True
            if self.waiting and self.waiting[0] is queued:
                self._outgoing = (sent, tuple(map(bytes, held)))
                del self.waiting[0]
        return False

    def _sends_waiting(
        self,
        grip: list[bool],
        deadline: Deadline,
        meanwhile: Meanwhile | None,
        last: Queued | None = None,
    ) -> bool:
        """Send the queue up to ``last``; False, and the lock released, if its turn ended first."""
        turn = deadline.sooner(_TURN)
        try:
            while self.waiting and not (last is not None and self.has_left(last)):
                self._send_first(self.waiting[0], turn, meanwhile)
                del self.waiting[0]
            return True
        except DeadlineExceededError:
            if turn is deadline:
                raise
            grip.extend(starmap(self._lock.release, ONCE))  # type: ignore[arg-type]
            deadline.clock.sleep(_PAUSE)
            return False

    def _send_first(self, queued: Queued, turn: Deadline, meanwhile: Meanwhile | None) -> None:
        sent = self._outgoing[0]
        if queued.number is None or queued.number >= sent:
            queued.number = sent
            if queued.is_withdrawn:
                queued.number = None
                return
            try:
                frame, coming = self._frame_of(queued)
                self._write(frame, turn, meanwhile, is_owned=True, coming=coming)
            except RankwireError:
                if self._outgoing[0] == sent:
                    queued.number = None
                raise
        if self._outgoing[1]:
            self._write((), turn, meanwhile, is_owned=True)

    def _frame_of(self, queued: Queued) -> tuple[list[Buffer], SealInProgress | None]:
        sequence = self._outgoing[0]
        group, channel, tag = queued.envelope
        buffers, nbytes = queued.message
        header = HEADER.pack(channel, sequence & SEQUENCE_MASK, group, tag, nbytes)
        if self._seal is None:
            return [header, *buffers], None
        pieces, coming = self._seal.around(sequence, header, channel, queued.message)
        return [header, *pieces], coming
