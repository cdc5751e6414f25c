"""Ask a rank what became of calls that it serves, and answer such inquiries.

The polling thread of the callee answers, whatever its functions do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.calls import Serving
from rankwire.observe.stacks import place_awaited, place_of
from rankwire.rpc.call import Call
from rankwire.rpc.call_cycles import ActiveCall, Key, unpack
from rankwire.rpc.messages import decode_reply, describe_error, encode_request
from rankwire.rpc.pool import JobQueue
from rankwire.texts import one_of

if TYPE_CHECKING:
    from rankwire.rpc.served_call import ServedCall
    from rankwire.rpc.server import Server

_log = logging.getLogger("rankwire")

# Called like a function; no function can be registered by this name. Its arguments are the calls in
# question, as [rank, src, request id].
INQUIRY = "\0calls"
_LATE_CALLS = 64  # that failed after their deadline, whose errors are kept
_NOTEWORTHY = 0.1  # seconds: a shorter wait for a worker is not reported
# Adds what is known of a call to an error, given its request id and its function's name.
Explain: TypeAlias = Callable[[DeadlineExceededError, int, str], None]

_ASK_LIMIT = 0.2  # seconds for asking what became of a call whose deadline has passed


@dataclass(frozen=True, slots=True)
class CallInquiries:
    """Asks callees about calls. ``ids`` are shared with the calls. Safe from any thread."""

    backend: Backend
    port: CallPort
    codec: Codec
    ids: Iterator[int]
    server: Server

    def ask(
        self, rank: int, keys: Iterable[Key], deadline: Deadline
    ) -> dict[Key, ActiveCall] | None:
        """Ask a rank about calls that it serves; return None without an answer."""
        if rank == self.backend.rank:
            return self.server.active.describe(keys)
        try:
            told = self.request(rank, INQUIRY, tuple(list(key) for key in keys), deadline)
            return unpack(told, rank, self.backend.world_size)
        except RankwireError as error:
            _log.debug("rank %d did not say what it is doing: %s", rank, error)
            return None

    def request(self, rank: int, name: str, arguments: tuple[Any, ...], deadline: Deadline) -> Any:
        """Send a request that the polling thread of a rank answers, and return the answer."""
        left = deadline.remaining()
        question = encode_request(self.codec, name, left, [], arguments, {})
        reply = self.port.call(rank, next(self.ids), question, deadline)
        assert reply is not None  # inquiries are not limited
        try:
            return decode_reply(self.codec, reply.wait(deadline), rank, deadline.limit)
        except RankwireError:
            raise
        except BaseException:  # an interrupt, perhaps before ``wait`` began
            reply.withdraw()
            raise

    def explain_late(self, dst: int, request_ids: Sequence[int], limit: float) -> Explain:
        """Ask a callee once about calls whose deadline has passed.

        Return a function that adds the answer to the error of one of these calls. ``limit`` is
        their timeout; the inquiry takes at most a quarter of it.
        """
        clock = self.backend.clock
        patience = min(_ASK_LIMIT, limit / 4)
        keys = {number: Key(dst, self.backend.rank, number) for number in request_ids}
        answer: dict[Key, ActiveCall] | None = {}
        if patience > 0.0:
            answer = self.ask(dst, keys.values(), Deadline(patience, clock))
        of_all = DeadlineExceededError(limit, waiting_for=[dst])
        if len(keys) > 1:  # for one call, the backend adds this when it explains its error
            self.backend.explained(of_all, "rpc_async", Deadline(0.0, clock), dst)

        def explain(error: DeadlineExceededError, request_id: int, name: str) -> None:
            if answer is None:
                error.explain(f"rank {dst} does not say what it is doing")
            # A call that it does not know has ended or not arrived: then there is nothing to add.
            elif (call := answer.get(keys[request_id])) is not None:
                seconds = f"{call.seconds:.3g} s"
                error.explain(f"rank {dst} has had {name!r} for {seconds}; it {call.doing}")
            if of_all.detail:
                error.explain(of_all.detail).is_explained = True

        return explain


class ServedCalls(dict[tuple[int, int], "ServedCall"]):
    """The calls in service, by the caller's rank and request id. Safe from any thread."""

    def __init__(self, rank: int, workers: int, queue: JobQueue) -> None:
        self.workers = workers
        self._rank = rank
        self._queue = queue
        self._late: dict[Key, ActiveCall] = {}

    def describe(self, keys: Iterable[Key]) -> dict[Key, ActiveCall]:
        """Describe calls that are served here, and those here that they need."""
        keys = list(keys)
        jobs = {Key(self._rank, *key): job for key, job in list(self.items())}
        late = {key: call for key in keys if (call := self._late.get(key)) is not None}
        active = ActiveCalls(self._rank, self.workers, jobs, set(self._queue.jobs()))
        return late | active.describe(keys)

    def serving(self) -> list[Serving]:
        """Return what ``status`` shows of the calls in service, the oldest first."""
        queued = set(self._queue.jobs())
        return [
            Serving(job.src, job.name, job.seconds, self.workers if job in queued else 0)
            for job in list(self.values())
        ]

    def remember_late(self, job: ServedCall, error: BaseException) -> None:
        """Keep the error of a call that failed after its deadline, for a caller that asks."""
        key = Key(self._rank, job.src, job.incoming.request_id)
        text = f"failed too late with {describe_error(error)}"
        self._late[key] = ActiveCall(job.name, job.depth, job.deadline.waited, text)
        while len(self._late) > _LATE_CALLS:
            self._late.pop(next(iter(self._late)), None)

    def key_of(self, call: Call) -> Key | None:
        """Return the key of a call, if it is served here."""
        for key, job in list(self.items()):
            if job is call:
                return Key(self._rank, *key)
        return None


@dataclass(frozen=True, slots=True)
class ActiveCalls:
    """The calls in service at one moment, and what this rank reports of them."""

    rank: int
    workers: int
    jobs: Mapping[Key, ServedCall]  # all calls in service
    queued: Collection[object]  # those that have not begun

    def describe(self, asked: Iterable[Key]) -> dict[Key, ActiveCall]:
        """Describe the given calls, and those at this rank that they need."""
        account: dict[Key, ActiveCall] = {}
        to_tell = [key for key in asked if key in self.jobs]
        while to_tell:
            key = to_tell.pop()
            if key not in account:
                account[key] = self._describe(self.jobs[key])
                to_tell += [need for need in account[key].needs if need in self.jobs]
        return account

    def _describe(self, job: ServedCall) -> ActiveCall:
        needs: Iterable[Key] = ()
        wait = 0
        if job in self.queued:
            needs = self._running()
            doing = f"waits for {one_of(self.workers, 'worker')}"
        elif (waiting := job.waiting) is not None:  # read once: its thread may end the wait
            needs = [Key(waiting.dst, self.rank, request_id) for request_id in waiting.request_ids]
            wait = waiting.number
            turn = " its turn to call" if waiting.is_for_room else ""
            doing = f"waits for{turn} rank {waiting.dst} {waiting.name!r}"
        elif job.needs_event_loop and (holder := self._event_loop_holder()) is not None:
            needs = [holder]
            doing = f"waits for the event loop, which {self.jobs[holder].name!r} blocks"
        elif job.deferred is not None:
            doing = "waits for the future that it returned"
            # Only an ``RpcFuture`` has a request id.
            made = job.outgoing.get(getattr(job.deferred.future, "request_id", -1))
            if made is not None:
                needs = [Key(made.dst, self.rank, made.reply.request_id)]
                doing += f", of rank {made.dst} {made.name!r}"
        else:
            doing = self._describe_running(job)
            if job.outgoing:
                calls = [f"rank {made.dst} {made.name!r}" for made in list(job.outgoing.values())]
                doing += f" and has calls in flight: {', '.join(calls[:3])}"
            elif job.unanswered is not None:
                late = job.unanswered
                doing += f" after it waited for rank {late.dst} {late.name!r} until its deadline"
        return ActiveCall(job.name, job.depth, job.deadline.waited, doing, tuple(needs), wait)

    def _describe_running(self, job: ServedCall) -> str:
        worker, task = job.worker, job.task
        doing, place = "is running", ""
        if worker is not None:
            waited = job.deadline.waited - job.seconds
            if waited > _NOTEWORTHY:
                one = one_of(self.workers, "worker")
                doing = f"waited {waited:.3g} s for {one}, and is running"
            place = place_of(worker.ident)
        elif task is not None:
            place = place_awaited(task.get_coro())
        return f"{doing}: it {place}" if place else doing

    def _running(self) -> list[Key]:
        # A worker may be free if fewer calls run than there are workers.
        running = [
            key for key, job in self.jobs.items() if job.depth == 0 and job.worker is not None
        ]
        return sorted(running) if len(running) >= self.workers else []

    def _event_loop_holder(self) -> Key | None:
        holders = [
            key
            for key, job in self.jobs.items()
            if job.needs_event_loop and job.waiting is not None
        ]
        return holders[0] if len(holders) == 1 else None
