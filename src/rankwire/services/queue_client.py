"""What a queue uses of its agent: calls to the owner, and the numbers of its requests."""

from __future__ import annotations

import itertools
from typing import Any

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError, RankwireError
from rankwire.rpc.agent import Agent
from rankwire.rpc.call import Call, serving
from rankwire.rpc.future import RpcFuture
from rankwire.services.queue_owner import PREFIX, QueueOwner, WaitingRequest

_CHECK_EVERY = 0.1  # seconds, for the end of the call that is being served
_LEAVE_LIMIT = 0.5  # seconds to tell an owner that this agent closes


class QueueClient:
    """What queues use of an agent. Every method is safe from any thread."""

    def __init__(self, agent: Agent, here: QueueOwner) -> None:
        self._agent = agent
        self._here = here
        self.rank = agent.rank
        self.codec = agent.codec
        self._user = [agent.backend.incarnation, runtime.randbits(48)]
        self._numbers = itertools.count(1)

    def call(self, owner: int, function: str, deadline: Deadline, *args: Any) -> Any:
        """Call the owner of a queue. The owner itself makes no call, which takes half the time."""
        caller, call = self._agent._caller, serving.get()
        if owner != self.rank:
            return caller.call(owner, PREFIX + function, deadline, call, args, {})
        if caller.closed:
            raise ChannelClosedError("this agent is closed")
        reply = self._here.serve(function, self.rank, *args)
        if isinstance(reply, WaitingRequest):
            if call is not None:
                caller._before_waiting(call)
            reply = self._wait(reply, deadline, call)
        return reply

    def _wait(self, request: WaitingRequest, deadline: Deadline, call: Call | None) -> Any:
        done = runtime.Event()
        request.add_done_callback(lambda _: done.set())
        try:
            while not deadline.clock.wait(done, deadline.sooner(_CHECK_EVERY).sleep_limit()):
                error: RankwireError | None = None
                if call is not None and call.cancelled:
                    error = call.cancellation()
                elif deadline.expired:
                    error = DeadlineExceededError(deadline.limit, detail=f"it {request.doing}")
                if isinstance(error, DeadlineExceededError):
                    error.may_have_run = True
                if error is not None:
                    raise error
        finally:
            request.cancel()  # unless it is done
        return request.result()

    def call_soon(self, owner: int, function: str, *args: Any) -> RpcFuture[Any]:
        """Start such a call; return its future."""
        return self._agent.to_async(owner)(PREFIX + function, *args)

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
        self.call(owner, "leave", deadline, self.new_request(0))
