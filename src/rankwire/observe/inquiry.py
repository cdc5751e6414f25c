"""Explain an error by what other ranks are doing.

Answers become short, printable text. Asking takes limited time, and none after a short timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.texts import one_line, one_of
from rankwire.wire.control_messages import MAX_ANSWER_NBYTES, ActiveCall, Answer, Key, pack

_WORTH_ASKING = 0.2  # seconds; shorter timeouts are used to poll
_PATIENCE = 0.5  # seconds for all answers; a busy program lets other threads run only every 5 ms
_MOST_ASKED = 3  # ranks
_MOST_TOLD = 4  # threads, and calls
_MOST_TAGS = 8
_MOST_RUNNING = 100  # calls in one answer
_MOST_NEEDS = 4096
_SILENT = "does not say what it is doing"
_CIRCLE = "it waits for the rank that asks, so the two wait for each other"
_MAX_TEXT = 1000  # characters


def explain_delay(
    ask: Callable[[int, Deadline], str | None], error: DeadlineExceededError, clock: Clock
) -> None:
    """Ask the ranks that an error waited for what they are doing, and add their answers."""
    if error.limit < _WORTH_ASKING:
        return
    deadline = Deadline(_PATIENCE, clock)
    for rank in error.waiting_for[:_MOST_ASKED]:
        said = ask(rank, deadline)
        if said is not None:
            error.explain(f"rank {rank} {f'says: {said}' if said else _SILENT}")


def explain_silence(silent: Mapping[int, float], error: DeadlineExceededError) -> None:
    """Add the silent ranks to an error: awaited ranks may be waiting for them."""
    for rank in sorted(silent)[:_MOST_ASKED]:
        error.explain(f"rank {rank} has not been heard for {silent[rank]:.1f} s")


def explain_unreceived(
    count_unreceived: Callable[[int], dict[int, int]], error: DeadlineExceededError
) -> None:
    """Add to the error of a receive which other messages have arrived."""
    for rank in error.waiting_for[:_MOST_ASKED]:
        tags = count_unreceived(rank)
        if tags:
            listed = ", ".join(f"{tags[tag]} with tag {tag}" for tag in sorted(tags)[:_MOST_TAGS])
            more = ", ..." if len(tags) > _MOST_TAGS else ""
            count = sum(tags.values())
            waiting = "1 message is" if count == 1 else f"{count} messages are"
            error.explain(f"{waiting} waiting to be received from rank {rank}: {listed}{more}")


def text_of(answer: Answer | None, asker: int) -> str | None:
    """Return an answer to ``asker`` as text: "" if no answer came, None if it has no content."""
    if answer is None:
        return ""
    served = [
        f"it has served {call.name!r} of rank {call.key.src} for {call.ran:.3g} s"
        for call in answer.calls
        if not call.workers
    ]
    parts = [*answer.places[:_MOST_TOLD], *served[:_MOST_TOLD]]
    more = len(answer.places) + len(served) - len(parts)
    if asker in answer.blocked_on:
        parts.insert(0, _CIRCLE)
    parts += [f"and {more} more"] if more else []
    queued = [call for call in answer.calls if call.workers]
    if queued:
        verb = "call waits" if answer.queued == 1 else "calls wait"
        worker, longest = one_of(queued[0].workers, "worker"), max(call.age for call in queued)
        parts.append(f"{answer.queued} {verb} for {worker}, up to {longest:.3g} s now")
    return one_line("; ".join(parts), _MAX_TEXT) or None


def list_calls(served: Collection[Collection[ActiveCall]]) -> Answer:
    """Return an answer with the calls that a rank's agents serve."""
    running = [call for calls in served for call in calls if not call.workers]
    queues = [[call for call in calls if call.workers] for calls in served]
    oldest = [max(queue, key=lambda call: call.age) for queue in queues if queue]
    return Answer(calls=(*running[:_MOST_RUNNING], *oldest), queued=sum(map(len, queues)))


def describe_calls(calls: Collection[ActiveCall]) -> Answer:
    """Return an answer with the requested calls."""
    queued = [call for call in calls if call.workers]
    listed = tuple(replace(call, needs=()) if call.workers else call for call in calls)
    return Answer(calls=listed, needs=queued[0].needs if queued else ())


def fit(answer: Answer) -> Answer:
    """Return an answer that is short enough to send; the reader treats omitted calls as unknown."""
    if len(answer.needs) > _MOST_NEEDS:
        answer = replace(answer, needs=())
    while len(pack(answer)) > MAX_ANSWER_NBYTES and (answer.calls or answer.places):
        calls = answer.calls[: len(answer.calls) // 2]
        answer = replace(answer, calls=calls, places=answer.places[: len(answer.places) // 2])
    return answer


def calls_of(answer: Answer, rank: int, ranks: Collection[int]) -> dict[Key, ActiveCall] | None:
    """Return the calls that ``rank`` described, or None if the answer is inconsistent.

    It must name calls of ``rank`` only, which need ``ranks`` only. A call that it omits is running.
    """
    needs = answer.needs if len(answer.needs) <= _MOST_NEEDS else ()
    told = {call.key: replace(call, needs=needs) if call.workers else call for call in answer.calls}
    named = {need.rank for call in told.values() for need in call.needs}
    if any(key.rank != rank for key in told) or not named.issubset(ranks):
        return None
    return told
