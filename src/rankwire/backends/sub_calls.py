"""The call port of a group: the parent's port, with ranks of the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.links.reply import Reply
from rankwire.mesh.calls import CallPort, IncomingCall, PortEvent, RepliesDue, Serving
from rankwire.wire.frames import Message
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.backends.sub import SubBackend


class SubCallPort(CallPort):
    """A port of the parent, with ranks of the group. As safe from threads as the parent's is.

    Args:
        group: Translates.
        port: The parent's port, for this group and service alone.
    """

    def __init__(self, group: SubBackend, port: CallPort) -> None:
        self._group = group
        self._port = port
        self.presence = port.presence

    def call(
        self,
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        hold: bool = False,
        limit: float = float("inf"),
    ) -> Reply | None:
        """Send a request to a rank of the group."""
        with self._group.translating(dst) as rank:
            reply = self._port.call(rank, request_id, message, deadline, on_reply, hold, limit)
        if reply is not None:
            reply.translate = partial(self._group.ranks.adopt, dst)
        return reply

    def cancel(self, dst: int, request_id: int, *, expired: bool = False) -> None:
        """Tell a rank of the group that the reply is not wanted."""
        self._port.cancel(self._group.world_rank_of(dst), request_id, expired=expired)

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """Wait until fewer than ``limit`` calls are in flight; False if the time passes first."""
        with self._group.translating(dst) as rank:
            return self._port.wait_for_room(rank, limit, deadline)

    def calls_to(self, dst: int) -> list[int]:
        """Return the request ids of the calls to a rank of the group that are in flight."""
        return self._port.calls_to(self._group.world_rank_of(dst))

    def attend(self, *, patiently: bool = False) -> bool:
        """Have replies that no thread waits for looked after by whoever is in ``poll``."""
        return self._port.attend(patiently=patiently)

    def attend_to(self, dst: int, reply: Reply) -> None:
        """Have a reply that no thread waits for read as soon as it comes."""
        self._port.attend_to(self._group.world_rank_of(dst), reply)

    def poll(self, deadline: Deadline | None = None) -> list[PortEvent]:
        """Return what ranks of the group ask."""
        with self._group.translating(self._group.rank):
            return [self._translated(event) for event in self._port.poll(deadline)]

    def wake(self) -> None:
        """Make ``poll`` return."""
        self._port.wake()

    def tell_serving(self, serving: Callable[[], list[Serving]]) -> None:
        """Say how to learn which calls are being served, by world ranks."""
        rank_of = self._group.world_rank_of
        self._port.tell_serving(
            lambda: [each._replace(src=rank_of(each.src)) for each in serving()]
        )

    def reply(
        self, call: IncomingCall, message: Message, deadline: Deadline, hold: bool = False
    ) -> None:
        """Answer a request of a rank of the group."""
        with self._group.translating(call.src):
            self._port.reply(call, message, deadline, hold)

    def drop_reply(self, call: IncomingCall) -> None:
        """Note that the caller does not want the reply."""
        self._port.drop_reply(call)

    def flush(self) -> None:
        """Send the replies that were held back."""
        self._port.flush()

    def in_flight(self) -> int:
        """Return how many calls of this port wait for a reply."""
        return self._port.in_flight()

    def close(self) -> None:
        """Close the port of the parent, and be forgotten by the group."""
        self._port.close()
        self._group.forget_port(self)

    def _translated(self, event: PortEvent) -> PortEvent:
        if isinstance(event, RepliesDue):
            return event
        src = self._group.ranks.find(event.src)
        assert src is not None  # the service number is known to members alone
        if isinstance(event, IncomingCall):
            event.src = src  # where the reply goes does not depend on it
            return event
        return replace(event, src=src)
