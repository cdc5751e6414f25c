"""Call the members of a group call, over relays, and gather what comes back.

The caller and every relay have a gathering. If a relay fails, the gathering that called it calls
the members below it instead; they know the group call by its key and do not begin it again.

Lock: ``Gathering._lock``, a leaf, guards the open ranges; nothing is called under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    CircularCallError,
    DeadlineExceededError,
    InvalidMessageError,
    MessageTooLargeError,
    PeerLostError,
    RankwireError,
)
from rankwire.rpc.call import Call
from rankwire.rpc.caller import Caller
from rankwire.rpc.future import RpcFuture
from rankwire.services.group_tree import Range, delegations, height

RELAY = "\0group"  # calls a member, and those below it

_LEVEL = 0.1  # seconds for a relay to report, after the deadline, who did not answer
_MOMENT, _MOST_ROUNDS = 0.001, 20
_GIVEN_UP = (DeadlineExceededError, CallCancelledError, CircularCallError)


class Plan(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A group call, as one of its members gets it.

    Attributes:
        origin: The rank that made it.
        agent: A random number of that rank's agent.
        number: The number of the group call among those of that agent.
        key: A random number of the group call, which only its members know.
        settled: All group calls of that agent with a lower number are over.
        name: The function.
        low: The position of the first of the ranks.
        ranks: The member itself, then those that it calls.
        reduce: The name of a reduction, or "".
        wanted: The positions whose values the caller wants; None for all.
    """

    origin: int
    agent: int
    number: int
    key: int
    settled: int
    name: str
    low: int
    ranks: list[int]
    reduce: str
    wanted: list[int] | None

    def part(self, low: int, high: int) -> Plan:
        """Return what the first member of a range gets."""
        ranks = self.ranks[low - self.low : high - self.low]
        wanted = self.wanted and [each for each in self.wanted if low <= each < high]
        return msgspec.structs.replace(self, low=low, ranks=ranks, wanted=wanted)


def reporting_time(size: int) -> float:
    """Return how long after the deadline a member with that many ranks must have answered."""
    return _LEVEL * (1 + height(size))


class Starter:
    """Starts calls of ranks, as long as each is the process that it was. Safe from any thread.

    Attributes:
        stopped: Whether the group call was given up: no thread would cancel another call.
    """

    def __init__(self, caller: Caller, backend: Backend, ranks: Iterable[int]) -> None:
        self._caller = caller
        self._backend = backend
        self.stopped = False
        self._incarnations = {rank: backend.incarnation_of(rank) for rank in ranks}

    def start(self, rank: int, deadline: Deadline, call: Call | None, args: Any) -> RpcFuture[Any]:
        """Have a rank relay; raise if it was restarted: its former process may have run it."""
        if self.stopped:
            raise CallCancelledError("the group call was given up")
        if self._backend.incarnation_of(rank) != self._incarnations[rank]:
            error = PeerLostError(rank, "it was restarted during the group call")
            error.may_have_run = True
            raise error
        return self._caller.start(rank, RELAY, deadline, call, args, {})


class Gathered(Future[Any]):
    """The reply of a relay; ``on_cancel`` is called if it is not wanted any more."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cancel: Callable[[], object] | None = None

    def cancel(self) -> bool:
        """Cancel the future, and all calls that were made for it."""
        on_cancel, is_cancelled = self.on_cancel, super().cancel()
        if is_cancelled and on_cancel is not None:
            on_cancel()
        return is_cancelled


class Gathering:
    """What came back from the members of a group call. Safe from any thread.

    ``call`` is the call that the members' calls are made for, if any.

    Attributes:
        parts: Combined values, by range.
        outcomes: Replies of members as they were encoded, by position; ``b""`` for a value that is
            not wanted. Members that the caller must call itself are missing.
        on_done: Called when all open ranges are closed, perhaps twice.
        failures: Why nothing came back from a member, by position.
    """

    def __init__(
        self,
        starter: Starter,
        run_soon: Callable[[Callable[[], None]], None],
        plan: Plan,
        payload: np.ndarray[Any, Any],
        call: Call | None,
        deadline: Deadline,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self._starter = starter
        self._run_soon = run_soon
        self.plan = plan
        self._payload = payload
        self._call = call
        self._deadline = deadline
        self.on_done = on_done
        self.parts: dict[Range, Any] = {}
        self.outcomes: dict[int, bytes | bytearray] = {}
        self.failures: dict[int, BaseException] = {}
        self._open: dict[Range, RpcFuture[Any] | None] = {}
        self._lock = runtime.Lock()

    @property
    def payload_nbytes(self) -> int:
        """The size of the arguments, which it keeps."""
        return int(self._payload.nbytes)

    def expect(self, spans: Iterable[Range]) -> None:
        """Wait for these ranges too; ``close`` ends the wait for one."""
        with self._lock:
            self._open.update(dict.fromkeys(spans))

    def open(self, spans: Iterable[Range]) -> None:
        """Call the first member of each range, and have it call the others of the range."""
        spans = list(spans)
        self.expect(spans)
        for span in spans:
            self._start(span)

    def close(self, span: Range) -> None:
        """Note that all of a range has come back that will. Idempotent."""
        with self._lock:
            self._open.pop(span, None)
            is_done = not self._open
        if is_done and (on_done := self.on_done) is not None:
            on_done()

    def _start(self, span: Range) -> None:
        low, high = span
        part = self.plan.part(low, high)
        clock, left = self._deadline.clock, self._deadline.remaining()
        limit = Deadline(left + reporting_time(high - low), clock)
        arguments = (list(msgspec.structs.astuple(part)), self._payload)
        try:
            future = self._starter.start(part.ranks[0], limit, self._call, arguments)
        except MessageTooLargeError:
            raise  # only the caller's first messages can be: others have shorter lists of ranks
        except RankwireError as error:
            self._failed(span, error)
            return
        with self._lock:
            if span in self._open:
                self._open[span] = future
        if self._starter.stopped:  # perhaps before it was among the open ones
            future.cancel()
        future.when_ended(partial(self._ended, span))
        future.attend()

    def _ended(self, span: Range, future: RpcFuture[Any]) -> None:
        # An interrupt may have this called again.
        if span not in self._open:
            return
        if future.cancelled():
            self._failed(span, CallCancelledError("the group call was given up"))
            return
        error = future.failure
        if error is not None:
            future.disregard()
            self._failed(span, error)
            return
        try:
            self._take(span, *future.result())
        except (TypeError, ValueError) as invalid:
            text = f"rank {future.dst} answered a group call with something else: {invalid}"
            self._failed(span, InvalidMessageError(text))
            return
        self.close(span)

    def _take(self, span: Range, parts: Any, outcomes: Any) -> None:
        found = {(low, high): value for low, high, value in parts}
        came = dict(outcomes)
        if not all(span[0] <= low < high <= span[1] for low, high in found):
            raise ValueError("a range that is not its own")
        for position, payload in came.items():
            if not (span[0] <= position < span[1] and isinstance(payload, (bytes, bytearray))):
                raise ValueError("a member that is not its own")
        self.parts.update(found)
        self.outcomes.update(came)

    def _failed(self, span: Range, error: BaseException) -> None:
        low, high = span
        if isinstance(error, _GIVEN_UP) or self._deadline.expired:
            self.failures.update(dict.fromkeys(range(low, high), error))
            self.close(span)
            return
        self.failures[low] = error
        if high - low == 1:
            self.close(span)
        else:  # on a thread that may wait for connections
            self._run_soon(partial(self._bypass, span))

    def _bypass(self, span: Range) -> None:
        """Call the members below a relay that failed."""
        if span in self._open:
            try:
                self.open(delegations(*span, span[0]))
            finally:
                self.close(span)

    def may_have_run(self, at: int) -> bool:
        """Return whether a lost or closed agent of a member may have begun the function."""
        error = self.failures.get(at)
        return isinstance(error, (PeerLostError, ChannelClosedError)) and error.may_have_run

    # -- for the thread of the caller --------------------------------------------------------------

    def wait(self) -> None:
        """Wait until all ranges are closed, or a little longer than the deadline."""
        clock = self._deadline.clock
        patience = 1.0 + reporting_time(len(self.plan.ranks))
        limit = Deadline(self._deadline.remaining() + patience, clock)
        rounds = 0
        while self._open and not limit.expired:
            futures = [each for each in list(self._open.values()) if each and not each.done()]
            if futures:
                with suppress(Exception):  # ``_ended`` takes it
                    futures[0].result()  # a circle of calls is found while it waits
                rounds = 0
                continue
            clock.sleep(_MOMENT)  # another thread takes a reply, or bypasses a relay
            rounds += 1
            if rounds > _MOST_ROUNDS:  # unless the serving threads have ended
                self._run_soon = _run_now
                for span, future in list(self._open.items()):
                    if future is not None:
                        self._ended(span, future)

    def cancel(self) -> None:
        """Cancel the calls that have not ended, and start no more."""
        self._starter.stopped = True
        for future in list(self._open.values()):
            if future is not None:
                future.cancel()


def _run_now(errand: Callable[[], None]) -> None:
    errand()
