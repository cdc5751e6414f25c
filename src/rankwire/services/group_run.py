"""How a group call is made: ranks one by one, or along a tree.

Few ranks are called one by one, and so are those whose values the program takes as they come, or
that get different arguments. More ranks are called along a tree (``group_members``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    CircularCallError,
    ConfigurationError,
    DeadlineExceededError,
    RankwireError,
    UnsupportedTypeError,
)
from rankwire.rpc.argument_streams import is_iterator
from rankwire.rpc.call import Call
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.messages import decode_reply
from rankwire.services.group_completions import Arrivals, Completions, cancel_all
from rankwire.services.group_gathering import Gathering, Plan
from rankwire.services.group_members import Members
from rankwire.services.group_result import GroupResult, failure_of, put_in_order
from rankwire.services.group_tree import (
    Combine,
    Range,
    combined,
    combiner,
    delegations,
    finished,
)

if TYPE_CHECKING:
    from rankwire.rpc.agent import Agent

ArgsOf: TypeAlias = Callable[[int], tuple[Any, ...]]

DIRECT = 8  # up to so many ranks are called one by one
_PATHS = ("args", "kwargs")
_ONE_RANK_ONLY = "One rank would take its items: send a list, or give each rank its own by args_of"


class GroupCall(NamedTuple):
    """The settings and arguments of one group call."""

    ranks: list[int]
    reduce: str | Combine | None
    need: int | None
    collect: list[int] | None
    partial: bool
    args_of: ArgsOf | None
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    deadline: Deadline
    call: Call | None


class GroupRuns:
    """Makes the group calls of an agent. Safe from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._rank = agent.rank
        self._codec = agent.codec
        self._caller = agent._caller
        self._members = Members(agent)
        self._numbers = _Numbers()

    def run(self, group: GroupCall) -> Any:
        """Make a group call; return its result, or the combined value."""
        result: GroupResult[Any] = GroupResult(group.name, group.ranks)
        is_flat = group.need is not None or group.args_of is not None
        if is_flat or (len(group.ranks) <= DIRECT and group.collect is None):
            parts = self._call_each(group, result)
        else:
            parts = self._call_by_tree(group, result)
        put_in_order(result)
        count = len(result.values) if group.reduce is None else len(group.ranks)
        count -= 0 if group.reduce is None else len(result.errors) + len(result.missing)
        failed = result.errors or result.missing if group.need is None else count < group.need
        if failed and not group.partial:
            raise failure_of(result).during(op=f"call_all {group.name!r}", rank=self._rank)
        if group.reduce is None:
            return result
        value = combined(0, len(group.ranks), parts, combiner(group.reduce))
        result.value = finished(group.reduce, value, count) if count else None
        return result if group.partial else result.value

    def start(self, group: GroupCall) -> Completions:
        """Make a group call; return an iterator of ranks and their values."""
        futures = self._start_each(group)
        try:
            arrivals = Arrivals(futures)
            result: GroupResult[Any] = GroupResult(group.name, group.ranks)
            values = self._completions(group, arrivals, result)
            return Completions(group.name, values, arrivals)
        except BaseException:
            cancel_all(futures.values())
            raise

    # -- ranks called one by one -------------------------------------------------------------------

    def _start_each(self, group: GroupCall) -> dict[int, RpcFuture[Any]]:
        for place, value in [*enumerate(group.args), *group.kwargs.items()]:
            if is_iterator(value):
                path = f"args[{place}]" if type(place) is int else f'kwargs["{place}"]'
                raise UnsupportedTypeError(path, type(value).__qualname__, _ONE_RANK_ONLY)
        futures: dict[int, RpcFuture[Any]] = {}
        start, deadline, call = self._caller.start, group.deadline, group.call
        try:
            for rank in group.ranks:
                args = group.args if group.args_of is None else self._args_of(group, rank)
                futures[rank] = start(rank, group.name, deadline, call, args, group.kwargs)
        except BaseException:
            cancel_all(futures.values())
            raise
        return futures

    def _args_of(self, group: GroupCall, rank: int) -> tuple[Any, ...]:
        assert group.args_of is not None
        args = group.args_of(rank)
        if type(args) is not tuple:
            raise ConfigurationError(f"args_of returns a tuple of arguments, not {args!r:.100}")
        return group.args + args

    def _call_each(self, group: GroupCall, result: GroupResult[Any]) -> dict[Range, Any]:
        futures = self._start_each(group)
        try:
            if group.need is None:
                for rank, future in futures.items():
                    self._note(group, result, rank, future)
            else:
                arrivals = Arrivals(futures)
                for _ in self._completions(group, arrivals, result, keep=True):
                    if len(result.values) == group.need:
                        break
                result.missing += arrivals.pending
                arrivals.cancel()
        except BaseException:
            cancel_all(futures.values())
            raise
        if group.reduce is None:
            return {}
        values, result.values = result.values, {}
        return {
            (position, position + 1): values[rank]
            for position, rank in enumerate(group.ranks)
            if rank in values
        }

    def _completions(
        self,
        group: GroupCall,
        arrivals: Arrivals,
        result: GroupResult[Any],
        *,
        keep: bool = False,
    ) -> Iterator[tuple[int, Any]]:
        wait_for_any = self._caller.wait_for_any
        most_errors = len(group.ranks) - (group.need or 0)
        while arrivals.pending and len(result.errors) <= most_errors:
            if (ended := arrivals.take()) is not None:
                rank, future = ended
                if self._note(group, result, rank, future):
                    yield rank, result.values[rank] if keep else result.values.pop(rank)
            elif not wait_for_any(arrivals.pending.values(), arrivals.wait, group.deadline):
                while arrivals.pending:  # late, or ended just now
                    rank = next(iter(arrivals.pending))
                    if self._note(group, result, rank, arrivals.pending.pop(rank)):
                        yield rank, result.values[rank] if keep else result.values.pop(rank)
        if not keep and (result.errors or result.missing):
            put_in_order(result)
            error = failure_of(result)
            raise error.during(op=f"as_completed {group.name!r}", rank=self._rank)

    def _note(
        self, group: GroupCall, result: GroupResult[Any], rank: int, future: RpcFuture[Any]
    ) -> bool:
        """Wait for a rank and note its outcome; return whether it succeeded."""
        if result.missing and group.deadline.expired and not future.done():
            # The others were asked why they are late: one of them is enough.
            self._caller.futures.expire(future, lambda *_: None)
        try:
            result.values[rank] = future.result()
        except RankwireError as error:
            self._note_error(group, result, rank, error.with_traceback(None))
            return False
        return True

    def _note_error(
        self, group: GroupCall, result: GroupResult[Any], rank: int, error: BaseException
    ) -> None:
        is_over = isinstance(error, ChannelClosedError) and self._caller.closed
        if is_over or isinstance(error, (CircularCallError, CallCancelledError)):
            raise error
        if not isinstance(error, RankwireError):  # a fault plan's own
            raise error
        error.op = f"call_all {group.name!r}"
        if isinstance(error, DeadlineExceededError):
            if group.call is not None and group.call.cancelled:
                raise error
            result.missing.append(rank)
        else:
            result.errors[rank] = error

    # -- ranks called along a tree -----------------------------------------------------------------

    def _call_by_tree(self, group: GroupCall, result: GroupResult[Any]) -> dict[Range, Any]:
        count, own = len(group.ranks), self._rank
        place = group.ranks.index(own) if own in group.ranks else None
        message = self._codec.encode_record([list(group.args), group.kwargs], _PATHS, levels=2)
        payload = np.frombuffer(bytearray().join(message[0]), np.uint8)
        number, agent = self._numbers.next(), self._numbers.agent
        name, key = group.name, runtime.randbits(63)
        reduce = group.reduce if isinstance(group.reduce, str) else ""
        wanted = None
        if group.collect is not None:
            wanted = [at for at, rank in enumerate(group.ranks) if rank in group.collect]
        plan = Plan(
            own, agent, number.value, key, number.settled, name, 0, group.ranks, reduce, wanted
        )
        starter, run_soon = self._members.starter(group.ranks), self._members.run_soon
        gathering = Gathering(starter, run_soon, plan, payload, group.call, group.deadline)
        try:
            if count > DIRECT:
                gathering.open([*delegations(0, count, place), *_single(place)])
                gathering.wait()
            missing = self._missing(group, gathering)
            # These cannot be reached over relays, refuse them, or have a large value. A new agent
            # or process of a rank would not know that the former one began the call.
            left = [at for at in missing if not gathering.may_have_run(at)]
            if left and not group.deadline.expired:
                gathering.open((at, at + 1) for at in left)
                gathering.wait()
                self._missing(group, gathering)
        finally:
            gathering.cancel()
        return self._outcomes(group, result, gathering)

    def _missing(self, group: GroupCall, gathering: Gathering) -> list[int]:
        """Return from where nothing came back; raise if the caller itself is the reason."""
        missing = [at for at in range(len(group.ranks)) if not _has(gathering, at)]
        if missing and self._caller.closed:
            closed = ChannelClosedError("this agent is closed")
            closed.may_have_run = True
            raise closed.during(op=f"call_all {group.name!r}", rank=self._rank)
        for error in gathering.failures.values():
            if isinstance(error, (CircularCallError, CallCancelledError)):
                raise error
        return missing

    def _outcomes(
        self, group: GroupCall, result: GroupResult[Any], gathering: Gathering
    ) -> dict[Range, Any]:
        explained, codec = self._caller.explained, self._codec
        parts = dict(gathering.parts)
        for at, rank in enumerate(group.ranks):
            payload = gathering.outcomes.get(at)
            error: BaseException | None = None
            if payload:
                try:
                    value = decode_reply(codec, bytearray(payload), rank, group.deadline.limit)
                    if group.reduce is None:
                        result.values[rank] = value
                    else:
                        parts[at, at + 1] = value
                except RankwireError as raised:
                    arguments = "call_all", group.name, rank, group.deadline, group.call
                    error = explained(raised, *arguments)
            elif payload is None and not _has(gathering, at):
                error = gathering.failures.get(at)
                if error is None:
                    error = DeadlineExceededError(group.deadline.limit, waiting_for=[rank])
            if error is not None:
                self._note_error(group, result, rank, error)
        return parts


class _Number:
    """The number of a group call, which is open as long as this object exists."""

    __slots__ = ("__weakref__", "settled", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.settled = value  # those with lower numbers are over


class _Numbers:
    """Numbers the group calls of an agent. Safe from any thread."""

    def __init__(self) -> None:
        self.agent = runtime.randbits(63)
        self._count = itertools.count(1)
        # By weak references: an interrupt cannot leave one open.
        self._open: WeakValueDictionary[int, _Number] = WeakValueDictionary()
        self._lock = runtime.Lock()

    def next(self) -> _Number:
        """Return the next number; keep it until the group call is over."""
        with self._lock:
            number = _Number(next(self._count))
            self._open[number.value] = number
            number.settled = min(self._open.keys())
            return number


def _single(place: int | None) -> list[Range]:
    return [] if place is None else [(place, place + 1)]


def _has(gathering: Gathering, at: int) -> bool:
    """Return whether something came back from a member."""
    return at in gathering.outcomes or any(low <= at < high for low, high in gathering.parts)
