"""Sends the items of one stream; small ones that come quickly leave together.

Only items that cannot change are collected: the program may change a list after its ``yield``.
The standby sends what was collected when the generator takes longer for its next item.

Lock: ``ItemSender._lock`` is held while a frame is encoded and sent, so that the standby, which
never waits for it, and the thread that runs the generator keep the items in order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.codec.values import PLAIN
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.wire.credit import Credit
from rankwire.wire.frames import Channel, Message

if TYPE_CHECKING:
    from rankwire.mesh.call_port import CallPort
    from rankwire.mesh.calls import IncomingCall
    from rankwire.rpc.replies import Replies

_ITEM = int(Channel.ITEM)
_COLLECTED = PLAIN | {bytes}
_LONG = 4096  # bytes and characters of an item that leaves alone
_NUMBER_NBYTES = 16
_OVERHEAD_NBYTES = 16  # of an item, and its part of a frame's
# With 32 items of 1 KiB in a frame, an item takes a fifth of the time that it takes alone.
_MOST_ITEMS, _MOST_NBYTES = 32, 32 << 10
_HELD_NBYTES = 16 << 10  # a larger item does not wait for the next one
SMALL_REPLY = 65536  # a larger message is never sent without waiting


class ItemSender:
    """For one thread, or task, that has the items; only ``flush_late`` is safe from any thread.

    Attributes:
        items: How many items were given.
    """

    def __init__(self, call: IncomingCall, port: CallPort, replies: Replies) -> None:
        self._call = call
        self._port = port
        self._replies = replies
        self._lock = runtime.Lock()
        self._collected: deque[tuple[Any, int]] = deque()  # with at least its bytes in a frame
        self._collected_nbytes = 0
        self.is_holding = False  # whether the standby has to send something
        self._single: Message | None = None  # an item that leaves alone, after those
        self._nbytes = 0  # of the frames that were sent
        self.items = 0

    def may_send(self, credit: Credit) -> bool:
        """Return whether the credit allows another item."""
        sent = self._nbytes + self._collected_nbytes
        return self.items < credit.items and sent < credit.nbytes

    def add(self, value: Any, deadline: Deadline, *, is_prompt: bool) -> None:
        """Send an item; a prompt one may leave with the next, or be sent by ``flush``.

        Raises what its encoding raises, and ``RankwireError`` if it cannot be sent.
        """
        kind = type(value)
        if kind in _COLLECTED:
            nbytes = _most_nbytes(value)
            if nbytes < _LONG:
                self.items += 1
                self._collected_nbytes += nbytes
                self._collected.append((value, nbytes))
                self.is_holding = True
                is_full = len(self._collected) >= _MOST_ITEMS
                if is_full or self._collected_nbytes >= _MOST_NBYTES or not is_prompt:
                    self.flush(deadline)
                return
        message = self._replies.items([value], self._call.src)
        self.items += 1
        self._single = message
        is_held = is_prompt and message[1] < _HELD_NBYTES
        self.flush(deadline, hold=is_held)
        self.is_holding = is_held

    def add_at_once(self, value: Any) -> bool:
        """Send an item without waiting; if that is impossible, return False: ``flush`` sends it."""
        try:
            self.add(value, AT_ONCE, is_prompt=False)
        except DeadlineExceededError:
            return False
        return True

    def flush(self, deadline: Deadline, *, hold: bool = False) -> None:
        """Send the items that were given and not sent."""
        with self._lock:
            while self._collected:
                self._send_collected(deadline)
            single = self._single
            if single is not None:
                if deadline is AT_ONCE and single[1] > SMALL_REPLY:
                    raise DeadlineExceededError(0.0)  # a part of it could leave
                self._send(single, deadline, hold=hold)
                self._single = None

    def flush_late(self) -> bool:
        """Send what was collected, if that is possible at once; return whether any is left."""
        if not self._collected:
            return False
        if self._lock.acquire(False):
            try:
                self._send_collected(AT_ONCE)
            except RankwireError:
                pass  # the generator's thread sends them, and gets the error
            finally:
                self._lock.release()
        return bool(self._collected)

    def _send_collected(self, deadline: Deadline) -> None:
        # The lock is held. The generator's thread may append meanwhile.
        taken = [self._collected.popleft() for _ in range(len(self._collected))]
        values = [value for value, _ in taken]
        try:
            self._send(self._replies.items(values, self._call.src), deadline)
        except DeadlineExceededError:
            self._collected.extendleft(reversed(taken))
            raise
        self._collected_nbytes -= sum(nbytes for _, nbytes in taken)

    def _send(self, message: Message, deadline: Deadline, *, hold: bool = False) -> None:
        try:
            self._port.reply(self._call, message, deadline, hold, _ITEM)
        except DeadlineExceededError as error:
            if not error.may_have_arrived:
                raise
            # A part has left, and the connection sends the rest: it must not be sent again.
        self._nbytes += message[1]

    def discard(self) -> None:
        """Undo the effects of hooks on an item that was not sent."""
        if self._single is not None:
            self._replies.discard(self._single)
            self._single = None


def _most_nbytes(value: Any) -> int:
    """Return at least the bytes that an item takes in a frame: credit must never be exceeded."""
    kind = type(value)
    if kind is bytes:
        nbytes = len(value)
    elif kind is str:
        nbytes = len(value) if value.isascii() else 4 * len(value)
    else:
        nbytes = value.bit_length() // 2 if kind is int else _NUMBER_NBYTES
    return nbytes + _OVERHEAD_NBYTES
