"""Print a job's events and result, on the launcher of node 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.launch.attempt import Attempt, Failure, first_failure
from rankwire.launch.nodes import Parts
from rankwire.launch.output import Output
from rankwire.launch.process import Ending
from rankwire.texts import name_ranks

STATUS_EVERY = 0.25
_STATUS_AFTER = 1.0  # seconds; a short job needs no status line
_MOST_PLACES = 2  # shown of ranks that waited for each other


def describe(counts: Mapping[str, int], missing_nodes: int, seconds: float) -> str:
    """Return the status line, without states that no rank is in."""
    states = [f"{count} {state}" for state, count in counts.items() if count or state == "running"]
    if missing_nodes:
        states = [f"waiting for {missing_nodes} node{'s'[: missing_nodes > 1]}"]
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    elapsed = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"rankwire: {', '.join(states)} ({elapsed})"


class Reporter:
    """Prints the events of a job's ranks. For one thread."""

    def __init__(self, output: Output, parts: Parts) -> None:
        self._output = output
        self._parts = parts
        self._age = Deadline(math.inf, REAL_TIME)
        self._status = ""
        self._status_at = REAL_TIME.now() + _STATUS_AFTER

    def show_status(self, attempt: Attempt) -> None:
        """Draw the status line, again after each printed line."""
        if REAL_TIME.now() >= self._status_at:
            self._status_at = REAL_TIME.now() + STATUS_EVERY
            self._status = self._describe(attempt)
        self._output.show_status(self._status)

    def _describe(self, attempt: Attempt) -> str:
        endings = [ending for ending, _ in attempt.ended.values()]
        counts = {
            "running": len(self._parts.alive),
            "up": len(attempt.present),
            "done": sum(not ending.is_failure for ending in endings),
            "failed": sum(ending.is_failure for ending in endings),
            "suspected": len(attempt.suspected),
        }
        missing = 0 if self._parts.have_started else len(self._parts.missing_nodes())
        return describe(counts, missing, self._age.waited)

    def name_who_is_left(self, attempt: Attempt) -> None:
        """Report once that only ranks are left that were declared lost: they may never end."""
        silent = attempt.silent
        if not silent or attempt.is_stopping or attempt.has_said_left:
            return
        left = self._parts.alive
        if left and silent.issuperset(left):
            attempt.has_said_left = True
            one = "is left, which was given up: waiting for its end; Ctrl-C stops it"
            more = "are left, which were given up: waiting for their end; Ctrl-C stops them"
            text = f"only {name_ranks(left)} {one if len(left) == 1 else more}"
            self._output.say(text, "bold yellow")

    def report(self, attempt: Attempt, trouble: str) -> str:
        """Print how the job ended; return a summary."""
        self._output.show_status("")
        gist = trouble
        failures = attempt.failures(self._parts)
        if attempt.is_because_of_began(failures):
            gist = attempt.began
            fell = ", ".join(
                f"{self._parts.who(failure.rank)} ({failure.ending})" for failure in failures
            )
            self._output.say(f"failed because of that: {fell}", "bold red")
        elif failures:
            gist = self._report_failures(attempt, failures)
        for word, ranks in (
            ("stopped", [rank for part in self._parts for rank in part.stopped]),
            ("killed", [rank for part in self._parts for rank in part.killed]),
        ):
            if ranks:
                self._output.say(f"{word}: {name_ranks(ranks)}")
        return gist

    def _report_failures(self, attempt: Attempt, failures: list[Failure]) -> str:
        first = first_failure(failures)
        reason = first.reason.partition(": ")[0] if self._is_seen(first) else first.reason
        reason = f" ({reason})" if reason else ""
        who, where = self._parts.who(first.rank), self._parts.where(first.rank)
        chain = attempt.hold_up(failures)
        if len(chain) > 1:
            gist = self._blame_who_held_up(attempt, chain)
            text = f"{who} gave up first: {first.ending}{reason}{where}"
        else:
            gist = text = f"{who} failed first: {first.ending}{reason}{where}"
        self._output.say(text, "bold red")
        self._quote(first)
        others: dict[str, list[int]] = {}
        for failure in failures:
            if failure.rank != first.rank:
                others.setdefault(str(failure.ending), []).append(failure.rank)
        if others:
            each = (f"{name_ranks(sorted(ranks))} ({ending})" for ending, ranks in others.items())
            self._output.say(f"failed too: {', '.join(each)}")
        return gist

    def _blame_who_held_up(self, attempt: Attempt, chain: list[int]) -> str:
        circle = attempt.circle(chain)
        if circle:
            return self._blame_circle(attempt, circle)
        culprit = chain[-1]
        waited = ", ".join(f"rank {a} waited for rank {b}" for a, b in pairwise(chain))
        gist = (
            f"{self._parts.who(culprit)} held up the others: {waited}{self._parts.where(culprit)}"
        )
        doing = attempt.doing.get(culprit)
        if doing is None:
            silent = "it did not say where it is: it has ended, is stopped, or busy in native code"
            self._output.say(f"{gist}; {silent}", "bold red")
        elif not doing.stacks:
            self._output.say(f"{gist}; none of its threads is in your program", "bold red")
        else:
            self._output.say(f"{gist}; it was here:", "bold red")
            self._output.quote(doing.stacks.splitlines())
        return gist

    def _blame_circle(self, attempt: Attempt, circle: list[int]) -> str:
        waited = ", ".join(
            f"rank {a} waited for rank {b}" for a, b in pairwise([*circle, circle[0]])
        )
        gist = f"{name_ranks(sorted(circle))} waited for each other: {waited}"
        self._output.say(gist, "bold red")
        places: dict[str, list[int]] = {}
        for rank in circle:
            if rank in attempt.doing and attempt.doing[rank].stacks:
                places.setdefault(attempt.doing[rank].stacks, []).append(rank)
        for stacks, ranks in list(places.items())[:_MOST_PLACES]:
            were = "was" if len(ranks) == 1 else "were"
            self._output.say(f"{name_ranks(sorted(ranks))} {were} here:", "bold red")
            self._output.quote(stacks.splitlines())
        return gist

    def announce_failure(self, rank: int, ending: Ending, then: str) -> None:
        """Print that a rank failed, and what happens next."""
        where = self._parts.where(rank)
        self._output.say(f"{self._parts.who(rank)} failed ({ending}){where}: {then}", "bold yellow")

    def announce_restart(self, attempt: Attempt, count: str) -> None:
        """Print that all ranks restart, and why; ``count`` has the number of restarts."""
        failures = attempt.failures(self._parts)
        first = first_failure(failures)
        if attempt.is_because_of_began(failures):
            self._output.say(f"starting all ranks again because of that, {count}", "bold yellow")
        else:
            cause = f"{self._parts.who(first.rank)} failed ({first.ending})"
            self._output.say(f"{cause}: starting all ranks again, {count}", "bold yellow")
            self._quote(first)

    def _quote(self, failure: Failure) -> None:
        if failure.excerpt and not self._is_seen(failure):
            source = "the last lines of its stderr" if failure.is_in_its_stderr else "its traceback"
            self._output.say(f"{source}:")
            self._output.quote(failure.excerpt)

    def _is_seen(self, failure: Failure) -> bool:
        is_here = failure.rank in self._parts.local.ranks
        return is_here and failure.is_in_its_stderr and self._output.is_in_view(failure.rank)
