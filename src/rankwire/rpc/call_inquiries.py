"""Ask a rank about calls that it serves, and describe the calls that this rank serves.

Calls are named by world ranks, also in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from rankwire.backends.base import Backend
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.mesh.call_port import CallPort
from rankwire.observe.inquiry import calls_of
from rankwire.observe.stacks import place_awaited, place_of
from rankwire.rpc.call import Call
from rankwire.rpc.pool import JobQueue
from rankwire.texts import one_of
from rankwire.wire.control_messages import ActiveCall, Key

if TYPE_CHECKING:
    from rankwire.rpc.served_call import ServedCall
    from rankwire.rpc.server import Server

_LATE_CALLS = 64  # that failed after their deadline, whose errors are kept
_NOTEWORTHY = 0.1  # seconds: a shorter wait for a worker is not reported
# Adds what is known of a call to an error, given the request id and function name of the call.
Explain: TypeAlias = Callable[[DeadlineExceededError, int, str], None]

_ASK_LIMIT = 0.2  # seconds for asking what became of a call whose deadline has passed


@dataclass(frozen=True, slots=True)
class CallInquiries:
    """Asks callees about calls. Safe from any thread."""

    backend: Backend
    port: CallPort
    server: Server

    def ask(
        self, rank: int, keys: Collection[Key], deadline: Deadline
    ) -> dict[Key, ActiveCall] | None:
        """Ask a world rank about calls that it serves; return None if it does not answer."""
        backend = self.backend
        if rank == backend.world[backend.rank]:
            return {call.key: call for call in self.server.active.describe(keys)}
        answer = backend.mesh.inquiries.ask(rank, deadline, self.port.service, keys)
        return None if answer is None else calls_of(answer, rank, backend.world)

    def ask_about(
        self, dst: int, request_ids: Sequence[int], patience: float = _ASK_LIMIT
    ) -> dict[int, ActiveCall] | None:
        """Ask a callee about calls of this rank; return those that it serves, or None."""
        world = self.backend.world
        src = world[self.backend.rank]
        keys = [Key(world[dst], src, number) for number in request_ids]
        answer = self.ask(world[dst], keys, Deadline(patience, self.backend.clock))
        if answer is None:
            return None
        return {key.request_id: answer[key] for key in keys if key in answer}

    def explain_late(self, dst: int, request_ids: Sequence[int], limit: float) -> Explain:
        """Ask a callee once about late calls; return a function that adds the answer to an error.

        ``limit`` is the timeout of the calls; the inquiry takes at most a quarter of it.
        """
        clock = self.backend.clock
        patience = min(_ASK_LIMIT, limit / 4)
        answer: dict[int, ActiveCall] | None = {}
        if patience > 0.0:
            answer = self.ask_about(dst, request_ids, patience)
        of_all = DeadlineExceededError(limit, waiting_for=[dst])
        if len(request_ids) > 1:  # for one call, the backend adds this when it explains its error
            self.backend.explained(of_all, "rpc_async", Deadline(0.0, clock), dst)

        def explain(error: DeadlineExceededError, request_id: int, name: str) -> None:
            if answer is None:
                error.explain(f"rank {dst} does not say what it is doing")
            # A call that it does not know has ended or not arrived: then there is nothing to add.
            elif (call := answer.get(request_id)) is not None:
                name = name.lstrip("\0")  # an internal one
                error.explain(f"rank {dst} has had {name!r} for {call.age:.3g} s; it {call.doing}")
            if of_all.detail:
                error.explain(of_all.detail).is_explained = True

        return explain


class ServedCalls(dict[tuple[int, int], "ServedCall"]):
    """The calls in service, by the caller's rank and request id. Safe from any thread."""

    def __init__(self, world: Sequence[int], rank: int, workers: int, queue: JobQueue) -> None:
        self.world = world
        self.workers = workers
        self._rank = world[rank]
        self._queue = queue
        self._late: dict[Key, ActiveCall] = {}

    def describe(self, keys: Collection[Key]) -> list[ActiveCall]:
        """Describe calls served here, and those here that they need; without keys all, in brief."""
        jobs = {self._key(job): job for job in list(self.values())}
        active = ActiveCalls(self.world, self._rank, self.workers, jobs, set(self._queue.jobs()))
        if not keys:
            return list(map(active.outline, jobs))
        late = {key: call for key in keys if (call := self._late.get(key)) is not None}
        return [*(late | active.describe(keys)).values()]

    def _key(self, job: ServedCall) -> Key:
        return Key(self._rank, self.world[job.src], job.incoming.request_id)

    def remember_late(self, job: ServedCall, doing: str) -> None:
        """Keep what a call did that ended after its deadline, for a caller that asks."""
        key, age = self._key(job), job.deadline.waited
        self._late[key] = ActiveCall(key, job.name, age, depth=job.depth, doing=doing)
        while len(self._late) > _LATE_CALLS:
            self._late.pop(next(iter(self._late)), None)

    def key_of(self, call: Call) -> Key | None:
        """Return the key of a call, if it is served here."""
        return next((self._key(job) for job in list(self.values()) if job is call), None)


@dataclass(frozen=True, slots=True)
class ActiveCalls:
    """The calls in service at one moment, and this rank's report about them."""

    world: Sequence[int]  # of the ranks that the agent may call
    rank: int  # of the world, as in keys
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
                account[key] = self._describe(key)
                to_tell += [need for need in account[key].needs if need in self.jobs]
        return account

    def outline(self, key: Key) -> ActiveCall:
        """Return how long a call has been here, and whether it runs."""
        job = self.jobs[key]
        workers = self.workers if job in self.queued else 0
        return ActiveCall(key, job.name, job.deadline.waited, job.seconds, workers)

    def _describe(self, key: Key) -> ActiveCall:
        job = self.jobs[key]
        needs: Iterable[Key] = ()
        wait = 0
        if job in self.queued:
            needs = self._running()
            doing = f"waits for {one_of(self.workers, 'worker')}"
        elif (waiting := job.waiting) is not None:  # read once: its thread may end the wait
            needs = [self._made(waiting.dst, number) for number in waiting.request_ids]
            needs += [self._made(made.dst, made.reply.request_id) for made in waiting.others]
            wait = waiting.number
            turn = " its turn to call" if waiting.is_for_room else ""
            doing = f"waits for{turn} rank {waiting.dst} {waiting.name!r}"
        elif job.needs_event_loop and (holder := self._event_loop_holder()) is not None:
            needs = [holder]
            doing = f"waits for the event loop, which {self.jobs[holder].name!r} blocks"
        elif job.is_suspended:
            doing = f"is suspended until rank {job.src} takes more of its items"
        elif job.deferred is not None:
            future = job.deferred.future
            doing = getattr(future, "doing", "waits for the future that it returned")
            # Only an ``RpcFuture`` has a request id.
            made = job.outgoing.get(getattr(future, "request_id", -1))
            awaited = list((job.awaited or {}).values()) if made is None else [made]
            needs = [self._made(made.dst, made.reply.request_id) for made in awaited]
            if awaited:
                named = ", ".join(f"rank {made.dst} {made.shown!r}" for made in awaited[:3])
                doing += f", of {named}"
        else:
            doing = self._describe_running(job)
            if job.outgoing:
                calls = [f"rank {made.dst} {made.shown!r}" for made in list(job.outgoing.values())]
                doing += f" and has calls in flight: {', '.join(calls[:3])}"
            elif job.unanswered is not None:
                late = job.unanswered
                doing += f" after it waited for rank {late.dst} {late.shown!r} until its deadline"
        outline = self.outline(key)
        return replace(outline, depth=job.depth, doing=doing, needs=tuple(needs), wait=wait)

    def _made(self, dst: int, request_id: int) -> Key:
        return Key(self.world[dst], self.rank, request_id)

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
