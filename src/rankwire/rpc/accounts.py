"""What a rank tells of the calls that it serves, when another one asks (``circles``).

The server knows the jobs; here is what each of them needs to go on, and how that is said in words.
A job about which nothing is known for certain counts as going on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwire.observe.stacks import place_awaited, place_of
from rankwire.rpc.circles import ActiveCall, Key
from rankwire.texts import one_of

if TYPE_CHECKING:
    from rankwire.rpc.served_call import ServedCall

# Called like a function, but no function can be registered by such a name. Its arguments are the
# calls in question, as [rank, src, request id].
QUESTION = "\0calls"
_NOTEWORTHY = 0.1  # seconds: a shorter wait for a worker is not told


@dataclass(frozen=True, slots=True)
class Accounts:
    """The calls in service at one moment, and what is told of them.

    Attributes:
        rank: This rank.
        workers: How many calls of depth 0 run at once.
        jobs: All calls in service.
        queued: The jobs that have not begun.
    """

    rank: int
    workers: int
    jobs: Mapping[Key, ServedCall]
    queued: Collection[object]

    def of(self, asked: Iterable[Key]) -> dict[Key, ActiveCall]:
        """Tell of the calls asked for, and of those at this rank that they need."""
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
        elif (waiting := job.waiting) is not None:  # its thread may end the wait meanwhile
            needs = [Key(waiting.dst, self.rank, request_id) for request_id in waiting.request_ids]
            wait = waiting.number
            turn = " its turn to call" if waiting.is_for_room else ""
            doing = f"waits for{turn} rank {waiting.dst} {waiting.name!r}"
        elif job.needs_event_loop and (holder := self._event_loop_holder()) is not None:
            needs = [holder]
            doing = f"waits for the event loop, which {self.jobs[holder].name!r} blocks"
        elif job.deferred is not None:
            doing = "waits for the future that it returned"
            made = job.made_for(job.deferred.future)
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
        """Say where its thread is in the program, or its coroutine."""
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
        """Return the calls that have all the places of workers; none if that is not sure."""
        running = [
            key for key, job in self.jobs.items() if job.depth == 0 and job.worker is not None
        ]
        return sorted(running) if len(running) >= self.workers else []

    def _event_loop_holder(self) -> Key | None:
        """Return the coroutine that blocks the event loop with a call, if there is one."""
        holders = [
            key
            for key, job in self.jobs.items()
            if job.needs_event_loop and job.waiting is not None
        ]
        return holders[0] if len(holders) == 1 else None
