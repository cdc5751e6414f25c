"""The call port of a simulated rank some of whose calls fail by a fault plan.

A rank without such faults has the port of its mesh, so that it pays nothing. Which call fails is
known to the network (``simulated_network``); here is what counts as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.links.reply import Reply
from rankwire.mesh.call_port import MeshCallPort
from rankwire.wire.frames import Message
from rankwire.wire.receive import Receive

if TYPE_CHECKING:
    from rankwire.backends.mesh import Mesh


class FailingCallPort(MeshCallPort):
    """A port that asks before each call whether it fails. As safe from threads as its base.

    Attributes:
        on_call: Called before each call; raises for one that fails.
    """

    def __init__(self, mesh: Mesh, service: int, on_call: Callable[[], None]) -> None:
        super().__init__(mesh, service)
        self.on_call = on_call
        self._waiting: set[int] = set()  # calls that were counted, and wait for room

    def call(
        self,
        dst: int,
        request_id: int,
        message: Message,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        hold: bool = False,
        limit: float = math.inf,
    ) -> Reply | None:
        """Send a request, unless it fails. Questions of the agent's own, without a limit, pass."""
        if limit != math.inf and request_id not in self._waiting:
            self.on_call()
            self._waiting.add(request_id)
        reply = super().call(dst, request_id, message, deadline, on_reply, hold, limit)
        if reply is not None:
            self._waiting.discard(request_id)
        return reply
