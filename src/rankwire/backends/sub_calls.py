"""The call port of a group: the parent's port, with ranks of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rankwire.backends.calls import (
    CallCancelled,
    CallerGone,
    CallPort,
    IncomingCall,
    PortEvent,
    RepliesDue,
)
from rankwire.deadline import Deadline
from rankwire.errors import RankwireError
from rankwire.wire.frames import Buffer
from rankwire.wire.mailbox import Receive

__all__ = ["SubCallPort"]


class _Group(Protocol):
    """The group, as far as it is known here."""

    rank: int

    def to_global(self, local: int) -> int: ...
    def translating(self, rank: int) -> AbstractContextManager[int]: ...
    def to_local(self, parent_rank: int) -> int | None: ...
    def forget_port(self, port: SubCallPort) -> None: ...


class SubCallPort(CallPort):
    """A port of the parent, with ranks of the group. As safe from threads as the parent's is.

    Args:
        group: Translates.
        port: The parent's port, for this group and service alone.
    """

    def __init__(self, group: _Group, port: CallPort) -> None:
        self._group = group
        self._port = port

    def call(
        self,
        dst: int,
        request_id: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        *,
        hold: bool = False,
    ) -> Receive:
        """See ``CallPort.call``."""
        with self._group.translating(dst) as rank:
            return self._port.call(rank, request_id, buffers, nbytes, deadline, on_reply, hold=hold)

    def wait(self, dst: int, receive: Receive, deadline: Deadline) -> bytearray:
        """See ``CallPort.wait``."""
        with self._group.translating(dst) as rank:
            return self._port.wait(rank, receive, deadline)

    def drive(self, dst: int, receive: Receive, deadline: Deadline) -> bool:
        """See ``CallPort.drive``."""
        with self._group.translating(dst) as rank:
            return self._port.drive(rank, receive, deadline)

    def forget(self, dst: int, receive: Receive) -> bool:
        """See ``CallPort.forget``."""
        return self._port.forget(self._group.to_global(dst), receive)

    def abort(self, dst: int, receive: Receive, error: RankwireError) -> bool:
        """See ``CallPort.abort``."""
        return self._port.abort(self._group.to_global(dst), receive, error)

    def cancel(self, dst: int, request_id: int) -> None:
        """See ``CallPort.cancel``."""
        self._port.cancel(self._group.to_global(dst), request_id)

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """See ``CallPort.wait_for_room``."""
        with self._group.translating(dst) as rank:
            return self._port.wait_for_room(rank, limit, deadline)

    def calls_to(self, dst: int) -> list[int]:
        """See ``CallPort.calls_to``."""
        return self._port.calls_to(self._group.to_global(dst))

    def attend(self, *, patiently: bool = False) -> bool:
        """See ``CallPort.attend``."""
        return self._port.attend(patiently=patiently)

    def poll(self, deadline: Deadline) -> list[PortEvent]:
        """See ``CallPort.poll``."""
        with self._group.translating(self._group.rank):
            return [self._translated(event) for event in self._port.poll(deadline)]

    def wake(self) -> None:
        """See ``CallPort.wake``."""
        self._port.wake()

    def reply(
        self,
        call: IncomingCall,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        *,
        hold: bool = False,
    ) -> None:
        """See ``CallPort.reply``."""
        with self._group.translating(call.src):
            self._port.reply(call.origin, buffers, nbytes, deadline, hold=hold)

    def drop_reply(self, call: IncomingCall) -> None:
        """See ``CallPort.drop_reply``."""
        super().drop_reply(call)
        self._port.drop_reply(call.origin)

    def flush(self) -> None:
        """See ``CallPort.flush``."""
        self._port.flush()

    def in_flight(self) -> int:
        """See ``CallPort.in_flight``."""
        return self._port.in_flight()

    def close(self) -> None:
        """See ``CallPort.close``."""
        self._port.close()
        self._group.forget_port(self)

    def _translated(self, event: PortEvent) -> PortEvent:
        if isinstance(event, RepliesDue):
            return event
        src = self._group.to_local(event.src)
        assert src is not None  # the service number is known to members alone
        match event:
            case IncomingCall():
                # Kept in one place, so that whoever lets go of it lets go of the memory.
                payload, event.payload = event.payload, bytearray()
                return IncomingCall(src, event.request_id, payload, event, event.link)
            case CallCancelled():
                return CallCancelled(src, event.request_id)
            case CallerGone():
                return CallerGone(src, event.link)
