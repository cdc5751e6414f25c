"""What a queue uses of its agent: calls to the owner, and the numbers of its requests."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError
from rankwire.rpc.agent import Agent
from rankwire.rpc.call import serving
from rankwire.rpc.future import RpcFuture
from rankwire.services.queue_owner import PREFIX

_LEAVE_LIMIT = 0.5  # seconds to tell an owner that this agent closes


class QueueClient:
    """What queues use of an agent. Every method is safe from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.rank = agent.rank
        self.codec = agent.codec
        self.is_closing = False  # the owners are told; what they gave later would not come back
        self._user = [agent.backend.incarnation, runtime.randbits(48)]
        self._numbers = itertools.count(1)
        # Of all ``Queue`` objects together, by owner and queue, as the owner counts deliveries.
        self.received: dict[tuple[int, int], deque[int]] = {}

    def call(self, owner: int, function: str, deadline: Deadline, *args: Any) -> Any:
        """Call the owner of a queue."""
        if self.is_closing:
            raise ChannelClosedError("this agent is closed")
        return self._call(owner, function, deadline, *args)

    def _call(self, owner: int, function: str, deadline: Deadline, *args: Any) -> Any:
        caller = self._agent._caller
        return caller.call(owner, PREFIX + function, deadline, serving.get(), args, {})

    def call_soon(self, owner: int, function: str, *args: Any) -> RpcFuture[Any]:
        """Start such a call, which does not end with the call that is being served."""
        start: Callable[..., RpcFuture[Any]] = self._agent.rpc_async
        return Context().run(start, owner, PREFIX + function, *args)

    def deadline_of(self, timeout: float | None) -> Deadline:
        """Return the deadline for a user's ``timeout=``."""
        call = serving.get()
        deadline = Deadline.of(timeout, self._agent.timeout, self._agent.backend.clock)
        return deadline if call is None else call.deadline_of_nested(deadline)

    def new_request(self, number: int) -> list[int]:
        """Return what a request of the queue ``number`` begins with; its last item is its own."""
        return [number, *self._user, next(self._numbers)]

    def leave(self, owner: int) -> None:
        """Tell an owner that this agent closes."""
        deadline = Deadline(_LEAVE_LIMIT, self._agent.backend.clock)
        self._call(owner, "leave", deadline, self.new_request(0))
