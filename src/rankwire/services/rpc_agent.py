"""``RpcAgent``: an agent with the services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rankwire.override import override
from rankwire.rpc.registry import Function, Vary
from rankwire.services.agent_pool import AgentPool
from rankwire.services.agent_queues import AgentQueues
from rankwire.services.chunks import EACH, make_each
from rankwire.services.group_calls import AgentGroupCalls
from rankwire.services.group_run import GroupRuns
from rankwire.services.workers import PROBE


class RpcAgent(AgentGroupCalls, AgentPool, AgentQueues):
    """Register functions and call them on any rank. An agent serves from construction on.

    Safe from any thread. A call runs at most once; nothing is retried. Calls from one thread to one
    rank are delivered in order, and may finish in any order.

    As a context manager, it serves without a time limit until all agents of its name on other ranks
    have left their blocks, only serve (``serve``), or are lost. An exception or Ctrl-C closes it at
    once.

    Args:
        backend: Any backend; the agent does not close it.
        name: Agents of one name call each other. Agents of different names are independent.
        timeout: Seconds for calls without their own timeout; None is the backend's.
        workers: Calls that run at once, nested calls apart.
        max_in_flight: Calls to one rank that wait for a reply; further ones wait, then fail with
            ``OverloadedError``. Threads that call at the same moment may exceed it together.
        max_queued: Incoming calls that wait for a worker; further ones are refused.
        max_queued_nbytes: Bytes of incoming calls of more than 64 KiB that wait for a worker.
            Callers of further ones wait before they send, until their deadline. One call of any
            size is always accepted, and each rank may have 8 MiB more in flight. Nested calls and
            calls of ``async def`` functions do not count.
        max_nested: Nested calls that run at once.
        codec: Encodes values; register your dataclasses, enums and Structs on it.
        resolve: Finds functions that are not registered: returns the function of a name, or None,
            or raises ``FunctionNotFoundError(name, reason=...)``. Its ``OverloadedError`` reaches
            the caller as it is, another ``RankwireError`` as ``RemoteError``. Other exceptions are
            logged, and the caller gets ``FunctionNotFoundError``. The polling thread runs it at
            every call, so it must be quick and must not call other ranks. Two calls of
            ``handle_request`` may run it at once. The agent drops the function after the call.
        serve: Functions and objects by name, registered before any other rank can call: a rank that
            was restarted is called at once. ``serve={"rollout": rollout}`` registers the public
            methods that the object's own class defines, as ``"rollout.step"`` and so on;
            ``{"rollout": (rollout, ["step", "reset"])}`` these methods, which may be inherited.
    """

    _variants: ClassVar[Mapping[str, Vary]] = {EACH: make_each}

    @override
    def _begin_services(self) -> None:
        super()._begin_services()
        self._registry.own[PROBE] = Function(PROBE, list)
        self._groups = GroupRuns(self)
