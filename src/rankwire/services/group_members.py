"""What a rank does as a member of group calls: it relays them, and calls its own function once.

A member remembers the group calls that it has begun, by the caller's rank, agent and number. If a
relay is lost, the rank that bypasses it calls the members below it again, and they join what they
have begun. A member is not cancelled with a lost relay, but with the last rank that waits for it,
or with the caller. It forgets a group call when its caller says, with a later one, that it is over;
when the caller is lost; or a minute after its deadline.

The function is a call of this rank to itself, so that it waits for a worker, runs on the event
loop, and is cancelled like any other. Its reply goes up the tree as it was encoded, unless it is
combined with others, or is large: then it stays here, until the caller calls this member itself.

Lock: ``Members._lock``, a leaf, guards the group calls that are remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rankwire import runtime
from rankwire.backends.arguments import check_ranks
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    InvalidMessageError,
    OverloadedError,
    RankwireError,
)
from rankwire.rpc.call import Call, GroupSource, serving
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.messages import (
    Outcome,
    decode_reply,
    encode_failure,
    encode_reply,
    is_result,
)
from rankwire.rpc.registry import Function
from rankwire.rpc.served_call import ServedCall
from rankwire.services.group_gathering import (
    RELAY,
    Gathered,
    Gathering,
    Plan,
    Starter,
    reporting_time,
)
from rankwire.services.group_tree import combiner, delegations, merged

if TYPE_CHECKING:
    from rankwire.rpc.agent import Agent
    from rankwire.wire.frames import Message

PART, PART_ASYNC = "\0part", "\0async part"

CARRIED_NBYTES = 64 << 10  # a larger reply does not travel over relays
_MOST_BEGUN = 4096  # remembered group calls, for each rank that has passed them on
_MOST_NBYTES = 256 << 20  # of their arguments and of replies that are kept
_MOST_KEPT = 64 << 20  # of replies that were sent, in case that a relay is lost
_MOST_AGENTS = 1024
_FORGET_AFTER = 60.0  # seconds after the deadline
_SWEEP_EVERY = 1.0


class JoinedCall(Call):
    """A group call at one member. The calls that it makes for it are this call's."""

    def __init__(self, plan: Plan, sender: int, deadline: Deadline, links: Any) -> None:
        self.src = plan.origin
        self.name = plan.name
        self.deadline = deadline
        self.outgoing = {}
        self.links = links
        self.plan = plan
        self.sender = sender
        self.source: GroupSource | None = None  # once the function has been called
        self.outcome: bytes | bytearray | None = None  # the encoded reply of the function
        self.held_nbytes = 0  # of a copy of the arguments that waits
        self.gatherings: dict[Gathering, int] = {}  # and the ranks that wait for them

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return self.held_nbytes + len(self.outcome or b"")

    def chain_of_nested(self, rank: int) -> list[Any]:
        """Return the chain of the group call itself: relays are not nested in each other."""
        return list(self.links)

    def cancel(self) -> None:
        """Cancel the function, and the members below."""
        self.was_late = self.deadline.expired
        self.cancelled = True
        self.give_up_nested()


class _Caller:
    """The group calls of one agent of another rank."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.settled = 0
        self.calls: dict[int, JoinedCall] = {}  # by number

    def settle(self, limit: int, sender: int, *, is_direct: bool) -> list[JoinedCall]:
        """Remove calls below a number; a relay can say that only of those that it passed on."""
        if is_direct:
            self.settled = max(self.settled, limit)
        below = [each for each in self.calls.items() if each[0] < limit]
        over = [number for number, each in below if is_direct or each.sender == sender]
        return [self.calls.pop(number) for number in over]


class Members:
    """The group calls that an agent takes part in. Safe from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._caller = agent._caller
        self._clock = agent.backend.clock
        self._lock = runtime.Lock()
        self._callers: dict[tuple[int, int], _Caller] = {}  # by rank and number of the agent
        self._parts: dict[int, tuple[JoinedCall, Function, Any]] = {}  # functions to call
        self._next_sweep = Deadline(0.0, self._clock)
        self.run_soon = agent._server.run_soon
        own = agent._registry.own
        own[RELAY] = relay = Function(RELAY, self.relay)
        relay.needs_worker = False
        own[PART] = Function(PART, self.run_part)
        own[PART_ASYNC] = Function(PART_ASYNC, self.run_part_async)

    def starter(self, ranks: list[int]) -> Starter:
        """Return what calls these ranks in one group call."""
        return Starter(self._caller, self._agent.backend, ranks)

    # -- relaying ----------------------------------------------------------------------------------

    def relay(self, header: Any, payload: Any) -> Future[Any]:
        """Take part in a group call, and pass it on; the result is what ``Gathering`` takes."""
        call = serving.get()
        assert isinstance(call, ServedCall)
        plan = self._checked(header, payload, call.src)
        joined = self._joined_call(plan, call)
        call.name = plan.name
        call.awaited = joined.outgoing
        reply = Gathered()
        gathering = Gathering(
            self.starter(plan.ranks),
            self.run_soon,
            plan,
            payload,
            joined,
            joined.deadline,
            lambda: self._answer(joined, gathering, reply),
        )
        reply.on_cancel = partial(self._unwanted, joined, gathering, call)
        own, is_direct = (plan.low, plan.low + 1), call.src == plan.origin
        gathering.expect([own])
        joined.gatherings[gathering] = call.src
        try:
            gathering.open(delegations(plan.low, plan.low + len(plan.ranks), plan.low))
            if not self._begin(joined, plan, payload, is_direct=is_direct):
                gathering.close(own)  # the caller must call this member itself
            elif joined.outcome is not None:  # before this gathering was added
                self._take_own(joined, gathering)
        except BaseException:
            joined.gatherings.pop(gathering, None)
            gathering.on_done = None
            raise
        return reply

    def _checked(self, header: Any, payload: Any, src: int) -> Plan:
        own = self._agent.rank
        try:
            plan = msgspec.convert(header, Plan)
            check_ranks([plan.origin, *plan.ranks], self._agent.world_size)
        except (msgspec.ValidationError, RankwireError) as error:
            raise InvalidMessageError(f"a group call is malformed: {error}") from error
        is_sound = plan.ranks[:1] == [own] and plan.low >= 0
        if not (is_sound and type(payload) is np.ndarray and payload.dtype == np.uint8):
            raise InvalidMessageError("a group call is malformed")
        if plan.origin == own and src != own:
            raise PermissionError(f"rank {src} passes on a group call that rank {own} has not made")
        if plan.reduce:
            combiner(plan.reduce)
        return plan

    def _joined_call(self, plan: Plan, call: ServedCall) -> JoinedCall:
        """Return the group call that was begun, or begin it."""
        limit = call.deadline.remaining() - reporting_time(len(plan.ranks))
        deadline = Deadline(max(0.0, limit), self._clock)
        incarnation = self._agent.backend.incarnation_of(plan.origin)
        key = plan.origin, plan.agent
        over = self._sweep()
        try:
            with self._lock:
                caller = self._callers.setdefault(key, _Caller(incarnation))
                joined = caller.calls.get(plan.number)
                if joined is not None and joined.plan.key != plan.key:
                    raise PermissionError(
                        f"rank {call.src} passes on a group call with a wrong key"
                    )
                over += caller.settle(plan.settled, call.src, is_direct=call.src == plan.origin)
                if joined is None and plan.number < caller.settled:
                    raise OverloadedError("this group call is over")
                self._check_room(call.src, is_new=joined is None)
                if joined is None:
                    joined = JoinedCall(plan, call.src, deadline, call.links)
                    caller.calls[plan.number] = joined
        finally:
            for each in over:
                each.cancel()
        return joined

    def _check_room(self, sender: int, *, is_new: bool) -> None:
        begun = waits = nbytes = 0
        for each in self._remembered():
            if each.sender == sender:
                begun += 1
                nbytes += each.nbytes
            for gathering, waiting in list(each.gatherings.items()):
                if waiting == sender:
                    waits += 1
                    nbytes += gathering.payload_nbytes
        if max(begun if is_new else 0, waits) >= _MOST_BEGUN or nbytes > _MOST_NBYTES:
            raise OverloadedError(f"too many group calls that rank {sender} has passed on are open")

    def _remembered(self) -> Iterator[JoinedCall]:
        for caller in self._callers.values():
            yield from caller.calls.values()

    def _sweep(self) -> list[JoinedCall]:
        """Forget what no rank will ask for any more; return what still may run."""
        if not self._next_sweep.expired:
            return []
        self._next_sweep = Deadline(_SWEEP_EVERY, self._clock)
        gone = [key for key, caller in list(self._callers.items()) if self._is_gone(key[0], caller)]
        over: list[JoinedCall] = []
        with self._lock:
            for key in gone:
                over += self._callers.pop(key, _Caller(0)).calls.values()
            for key, caller in list(self._callers.items()):
                for number, joined in list(caller.calls.items()):
                    deadline = joined.deadline
                    if deadline.expired and deadline.waited > deadline.limit + _FORGET_AFTER:
                        over.append(caller.calls.pop(number))
                if not caller.calls and len(self._callers) > _MOST_AGENTS:
                    del self._callers[key]
        return over

    def _is_gone(self, rank: int, caller: _Caller) -> bool:
        backend = self._agent.backend
        if rank == backend.rank:
            return False
        is_lost = backend.failure_of(rank) is not None
        return is_lost or backend.incarnation_of(rank) != caller.incarnation

    def _unwanted(self, joined: JoinedCall, gathering: Gathering, call: ServedCall) -> None:
        joined.gatherings.pop(gathering, None)
        is_orphan = (
            call.lost_caller
            and call.src != joined.plan.origin
            and self._agent.backend.failure_of(joined.plan.origin) is None
        )
        # If its relay is lost or ends, the rank that bypasses that calls the members below again.
        if not (joined.gatherings or is_orphan or self._agent._server.is_stopping):
            joined.cancel()

    def _answer(self, joined: JoinedCall, gathering: Gathering, reply: Gathered) -> None:
        # An interrupt may have this called again.
        plan, parts = gathering.plan, gathering.parts
        is_direct = joined.gatherings.pop(gathering, None) == plan.origin
        for at, error in gathering.failures.items():
            # The caller must not call a new agent there. It may reach a rank that is lost here.
            if isinstance(error, ChannelClosedError) and gathering.may_have_run(at):
                gathering.outcomes.setdefault(at, self._encoded(error))
        if plan.reduce:
            # If they cannot be combined, the caller gets the error itself.
            with suppress(Exception):
                parts = merged(plan.low, plan.low + len(plan.ranks), parts, combiner(plan.reduce))
        ranges = [[low, high, value] for (low, high), value in parts.items()]
        with suppress(InvalidStateError):  # it was cancelled
            reply.set_result([ranges, [[*item] for item in gathering.outcomes.items()]])
        if plan.reduce or plan.low in gathering.outcomes:
            self._forget_large(joined, is_direct)
        # These refer to the gathering, which has the arguments.
        gathering.on_done = reply.on_cancel = None

    def _forget_large(self, joined: JoinedCall, is_direct: bool) -> None:
        """Drop a large reply that was sent, if no rank can ask again, or others take much room."""
        if len(joined.outcome or b"") > CARRIED_NBYTES:
            with self._lock:
                kept = sum(each.nbytes for each in self._remembered())
            if is_direct or kept > _MOST_KEPT:
                error = OverloadedError("the result was sent already, and is not kept")
                joined.outcome = self._encoded(error)

    # -- the function of this rank -----------------------------------------------------------------

    def _begin(self, joined: JoinedCall, plan: Plan, payload: Any, *, is_direct: bool) -> bool:
        """Call the function, if it was not; return False if it must be called directly."""
        registry, server = self._agent._registry, self._agent._server
        refusal: Message | None = None
        function = registry.functions.get(plan.name)
        if function is None and joined.source is None:
            function, refusal = server.resolve(plan.name)
        if function is not None and function.direct and not is_direct:
            return joined.source is not None
        with self._lock:
            if joined.source is not None:
                return True
            joined.source = GroupSource(plan.origin, plan.origin if is_direct else None)
        if function is None:
            assert refusal is not None
            self._settle(joined, bytearray().join(refusal[0]))
            return True
        # Its function may change its arguments, while this rank still passes them on.
        arguments = memoryview(payload) if len(plan.ranks) == 1 else bytearray(payload)
        joined.held_nbytes = len(arguments) if len(plan.ranks) > 1 else 0
        number = id(joined)
        self._parts[number] = joined, function, arguments
        name = PART_ASYNC if function.is_async else PART
        limit = Deadline(joined.deadline.remaining(), self._clock)
        start = self._caller.start
        future = start(self._agent.rank, name, limit, joined, (number,), {}, raw=True)
        future.when_ended(partial(self._ended, joined))
        return True

    def run_part(self, number: Any) -> Any:
        """Call the function of this rank."""
        function, (args, kwargs) = self._prepared(number)
        return function.target(*args, **kwargs)

    async def run_part_async(self, number: Any) -> Any:
        """Call the coroutine function of this rank."""
        function, (args, kwargs) = self._prepared(number)
        return await function.target(*args, **kwargs)

    def _prepared(self, number: Any) -> tuple[Function, Any]:
        call = serving.get()
        if call is None or call.src != self._agent.rank or number not in self._parts:
            raise PermissionError("only a group call has this rank call its function")
        joined, function, payload = self._parts.pop(number)
        call.name, call.group = joined.name, joined.source
        arguments = self._agent.codec.decode(payload, peer=joined.plan.origin)
        joined.held_nbytes = 0
        return function, arguments

    def _ended(self, joined: JoinedCall, future: RpcFuture[Any]) -> None:
        self._parts.pop(id(joined), None)
        joined.held_nbytes = 0
        error = future.failure
        if error is None and not future.cancelled():
            self._settle(joined, future.result())
            return
        future.disregard()
        self._settle(joined, self._encoded(error or joined.cancellation()))

    def _encoded(self, error: BaseException) -> bytes:
        codec = self._agent.codec
        if isinstance(error, DeadlineExceededError):
            message = encode_reply(codec, Outcome.EXPIRED, [error.detail, error.may_have_run])
        elif isinstance(error, ChannelClosedError):
            message = encode_reply(codec, Outcome.CLOSED, [error.message, error.may_have_run])
        else:
            message = encode_failure(codec, error)
        return b"".join(message[0])

    def _settle(self, joined: JoinedCall, outcome: bytes | bytearray) -> None:
        joined.outcome = outcome
        for gathering in list(joined.gatherings):  # an interrupt may have this repeated
            self._take_own(joined, gathering)

    def _take_own(self, joined: JoinedCall, gathering: Gathering) -> None:
        plan, outcome = gathering.plan, joined.outcome
        assert outcome is not None
        low, is_small = plan.low, len(outcome) <= CARRIED_NBYTES
        if not is_result(outcome):
            gathering.outcomes[low] = bytes(outcome)
        elif plan.reduce:
            rank, limit = self._agent.rank, joined.deadline.limit
            try:
                value = decode_reply(self._agent.codec, bytearray(outcome), rank, limit)
                gathering.parts[low, low + 1] = value
            except RankwireError as error:
                gathering.outcomes[low] = self._encoded(error)
        elif plan.wanted is not None and low not in plan.wanted:
            gathering.outcomes[low] = b""
        elif is_small or joined.gatherings.get(gathering) == plan.origin:
            gathering.outcomes[low] = bytes(outcome) if is_small else outcome
        gathering.close((low, low + 1))
