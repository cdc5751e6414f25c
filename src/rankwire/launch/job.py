"""The job as node 0's launcher conducts it: gather the hosts, start, stop at a failure, start anew.

The ranks of each host are a *part*: this host's own, or another's by way of its launcher. Rules:

- The first rank that fails ends the attempt on all hosts: the others get SIGTERM, and SIGKILL after
  the grace. A rank that is known to have begun it, by its own word or that of others, has the grace
  to end by itself before that, so that its exit code is the job's. If restarts are left, the whole
  world is started anew.
- A launcher that is gone ends the job.
- A signal to any launcher goes to every rank once; a second one to the same launcher, or a later
  one to another, kills on all hosts.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import socket
from collections.abc import Iterable
from time import monotonic
from typing import Protocol

from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, RankwireError
from rankwire.launch.child import Ending, JobSettings, signal_name
from rankwire.launch.local_ranks import LocalRanks
from rankwire.launch.loop import Loop, describe_stdout, stdout_exit_code
from rankwire.launch.nodes import GATHER_LIMIT, LAST_WORDS, RemoteRanks
from rankwire.launch.status_line import Counts, describe
from rankwire.launch.summary import (
    Failure,
    blamed,
    first_failure,
    in_order_of_loss,
    list_ranks,
)
from rankwire.launch.wakeup import Wakeup
from rankwire.links.security import Policy
from rankwire.rendezvous.control_messages import Gone, Suspected
from rankwire.rendezvous.launchers import LauncherLink
from rankwire.rendezvous.standalone import CoordinatorHost

__all__ = ["Job"]

# After the first failure, others that fail by themselves are waited for: the one to blame may be
# among them (see summary.py). Above the time between a raise and the end of an interpreter.
_SETTLE = 0.3
# Schedulers signal the launchers of all hosts at once: that is one request, not two. But two to one
# launcher are two (``Loop`` knows echoes of its own).
_ECHO_OF_NODES = 2.0
_STATUS_EVERY = 0.25
# Nothing is said about a job that is over at once.
_STATUS_AFTER = 1.0


class _Part(Protocol):
    """The ranks of one host, see ``LocalRanks``."""

    count: int
    stopped: list[int]
    killed: list[int]

    @property
    def alive(self) -> list[int]: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def wake_in(self) -> float: ...
    @property
    def ranks(self) -> range: ...
    def start(self, world: JobSettings, first_rank: int) -> None: ...
    def stop(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def look(self) -> None: ...
    def errors_of(self, rank: int) -> list[str]: ...


class Job:
    """See the module. One thread.

    Args:
        loop: The launcher's.
        local: The ranks of this host.
        listener: Where ranks and other launchers find this one; bound. Owned from now on.
        address: That place as ``host:port``, for the ranks.
        secret: The job's.
        policy: How connections of ranks and launchers are protected.
        nodes: How many hosts there are.
        restarts: How many times the world may be started anew.
        grace: Seconds that a rank may take to end.
    """

    def __init__(
        self,
        loop: Loop,
        local: LocalRanks,
        *,
        listener: socket.socket,
        address: str,
        secret: bytes,
        policy: Policy,
        nodes: int,
        restarts: int,
        grace: float,
    ) -> None:
        self._loop = loop
        self._output = loop.output
        self._local = local
        self._remote: dict[int, RemoteRanks] = {}
        self._address = address
        self._secret = secret
        self._nodes = nodes
        self._restarts = restarts
        self._grace = grace
        self._name = f"run-{secrets.token_hex(4)}"
        self._age = Deadline(math.inf)
        self._ended: dict[int, tuple[Ending, bool]] = {}
        self._lost: dict[int, Gone] = {}
        self._fell: set[int] = set()  # by errors of their own, before anyone was asked to end
        self._present: set[int] = set()
        self._suspected: set[int] = set()
        self._trouble = ""  # what ended the job besides a rank
        self._trouble_code = 1
        self._began = ""  # what ranks may fall by besides the failure of one
        self._received: int | None = None  # the signal that ended the job
        self._received_at, self._received_by = -math.inf, 0
        self._is_stopping = False
        self._has_said_left = False
        self._is_impatient = False
        self._stop_at = math.inf
        self._status = ""
        self._status_at = monotonic() + _STATUS_AFTER
        local.on_ended = self._rank_ended
        loop.on_turn = self._show_status
        self._closing = contextlib.ExitStack()
        wakeup = self._closing.enter_context(contextlib.closing(Wakeup(loop.selector)))
        self._host = CoordinatorHost(
            listener,
            local.count,
            secret=secret,
            job=self._name,
            policy=policy,
            on_formed=lambda world: wakeup.post(lambda: self._formed(len(world.members))),
            on_gone=lambda gone: wakeup.post(lambda: self._rank_gone(gone)),
            on_suspected=lambda suspected: wakeup.post(lambda: self._rank_suspected(suspected)),
            on_hopeless=lambda reason: wakeup.post(lambda: self._say_began(reason)),
            nodes=nodes,
            on_launcher=lambda node, link: wakeup.post(lambda: self._launcher_came(node, link)),
        )
        self._closing.callback(self._host.close)

    def run(self) -> int:
        """Run the job to its end and return the exit code.

        Raises:
            ConfigurationError: Nothing was started, because hosts are missing.
        """
        self._gather()
        for attempt in range(self._restarts + 1):
            if self._received is None:
                self._start(attempt)
                self._supervise()
            if not self._failures() or self._received is not None or self._trouble:
                break
            if attempt < self._restarts:
                self._announce_restart(attempt + 1)
        text = self._report()
        if not text and self._received is not None:
            text = f"{signal_name(self._received)}: the job was stopped"
        code, was_asked = self.exit_code, self._received is not None
        for part in self._remote.values():
            part.finish(code, text, was_asked=was_asked)
        patience = LAST_WORDS if was_asked else math.inf
        return self._loop.write_rest(code, patience=0.0 if self._is_impatient else patience)

    @property
    def exit_code(self) -> int:
        """What all launchers exit with."""
        failures = self._failures()
        if failures:
            return first_failure(failures).ending.exit_code
        if self._received is not None:
            return 128 + self._received
        return self._trouble_code if self._trouble else 0

    def close(self) -> None:
        """Hang up on everyone. Idempotent."""
        self._loop.on_turn = lambda: None
        for part in self._remote.values():
            part.close()
        self._closing.close()

    # -- the parts ---------------------------------------------------------------------------------

    @property
    def _parts(self) -> list[_Part]:
        return [self._local, *(self._remote[node] for node in sorted(self._remote))]

    def _gather(self) -> None:
        """Wait for the launchers of all hosts."""
        deadline = Deadline(GATHER_LIMIT)
        while missing := self._missing_nodes():
            if deadline.expired:
                raise ConfigurationError(
                    f"no launcher came for node {', '.join(map(str, missing))} within"
                    f" {deadline.limit:g} s; start it there with --master {self._address}"
                )
            for number in self._loop.turn(_STATUS_EVERY):
                self._obey(number)
            nodes = ", ".join(map(str, missing))
            self._output.remind(f"waiting for the launcher of node {nodes} at {self._address}")
            if self._received is not None:
                return

    def _missing_nodes(self) -> list[int]:
        here = {node for node, part in self._remote.items() if part.count}
        return [node for node in range(1, self._nodes) if node not in here]

    def _launcher_came(self, node: int, link: LauncherLink) -> None:
        if node in self._remote:
            self._output.say(f"a second launcher came for node {node}, and was sent away")
            link.close()
            return
        part = RemoteRanks(node, self._loop, link)
        part.on_ended = self._rank_ended
        part.on_asked = lambda number: self._obey(number, node)
        part.on_trouble = self._give_up
        part.on_lost = lambda error: self._launcher_lost(part, error)
        self._remote[node] = part

    def _launcher_lost(self, part: RemoteRanks, error: RankwireError) -> None:
        if not part.ranks:  # nothing was started: it may come again
            del self._remote[part.node]
            return
        where = f" on {part.host}" if part.host else ""
        self._give_up(f"the launcher of node {part.node}{where} is gone: {error.message}")

    def _give_up(self, trouble: str, code: int = 1) -> None:
        """End the job for a reason that is no rank's."""
        if not self._trouble:
            self._trouble, self._trouble_code = trouble, code
            self._output.say(f"{trouble}; stopping all ranks", "bold red")
        self._stop(signal.SIGTERM)

    # -- one attempt -------------------------------------------------------------------------------

    def _start(self, attempt: int) -> None:
        size = sum(part.count for part in self._parts)
        job = f"{self._name}.{attempt}"
        self._ended, self._lost, self._present, self._suspected = {}, {}, set(), set()
        self._fell, self._began = set(), ""
        self._is_stopping, self._stop_at = False, math.inf
        self._has_said_left = False
        self._host.expect(world_size=size, job=job)
        world = JobSettings(size, self._address, job, self._secret, attempt)
        first_rank = 0
        for part in self._parts:
            part.start(world, first_rank)
            first_rank += part.count

    def _supervise(self) -> None:
        """Wait until all parts are over, and see to it that they are."""
        while not all(part.is_over for part in self._parts):
            wake_in = min(part.wake_in for part in self._parts)
            for number in self._loop.turn(min(self._stop_due() - monotonic(), wake_in)):
                self._obey(number)
            for part in self._parts:
                part.look()
            if monotonic() >= self._stop_due():
                self._stop(signal.SIGTERM)
            self._name_who_is_left()
            if not self._is_stopping and (trouble := self._loop.new_stdout_trouble()) is not None:
                where = " of node 0" if self._nodes > 1 else ""
                self._give_up(describe_stdout(trouble, where), stdout_exit_code(trouble))

    def _stop_due(self) -> float:
        """Return when to stop the others after a failure: not while who began it is ending."""
        if self._stop_at == math.inf:
            return math.inf
        is_ending = any(not blamed(self._lost.values()).isdisjoint(p.alive) for p in self._parts)
        return self._stop_at + (self._grace if is_ending else 0.0)

    def _stop(self, number: int) -> None:
        self._is_stopping = True
        self._stop_at = math.inf
        for part in self._parts:
            part.stop(number)

    def _obey(self, number: int, node: int = 0) -> None:
        """Act on a signal that asks the launcher of a node to end."""
        is_recent = monotonic() - self._received_at < _ECHO_OF_NODES
        if is_recent and node != self._received_by:
            return
        self._received_at, self._received_by = monotonic(), node
        self._received = number if self._received is None else self._received
        alive = [rank for part in self._parts for rank in part.alive]
        self._is_impatient = self._is_impatient or not alive
        where = f" on node {node}" if node else ""
        if not self._local.ranks:
            self._output.say(f"{signal_name(number)}{where}: the job ends before it began")
        if self._is_stopping or not alive:
            for part in self._parts:
                part.kill()
        else:
            hint = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
            self._output.say(f"{signal_name(number)}{where}: stopping {list_ranks(alive)}{hint}")
            self._stop(number)

    # -- what is heard -----------------------------------------------------------------------------

    def _rank_ended(self, rank: int, ending: Ending, by_itself: bool) -> None:
        self._ended[rank] = ending, by_itself
        if not ending.is_failure:
            self._host.expect_never(rank, f"rank {rank} ended ({ending}) before it joined")
        if ending.is_failure and by_itself and not self._is_stopping:
            self._stop_at = min(self._stop_at, monotonic() + _SETTLE)

    def _formed(self, world_size: int) -> None:
        self._present = set(range(world_size))
        self._lost, self._fell = {}, set()  # of an earlier world of the same processes

    def _rank_gone(self, gone: Gone) -> None:
        self._present.discard(gone.rank)
        self._suspected.discard(gone.rank)
        if not gone.orderly:
            self._lost.setdefault(gone.rank, gone)
            if gone.exit_code is not None and gone.cause is None and not self._is_stopping:
                self._fell.add(gone.rank)
            if gone.silent:
                self._say_began(f"rank {gone.rank} was given up: {gone.reason}")

    def _say_began(self, reason: str) -> None:
        self._began = self._began or reason
        self._output.say(reason, "bold red")

    def _rank_suspected(self, suspected: Suspected) -> None:
        if suspected.seconds:
            self._suspected.add(suspected.rank)
        else:
            self._suspected.discard(suspected.rank)

    def _failures(self) -> list[Failure]:
        found = []
        for rank, (ending, by_itself) in self._ended.items():
            if ending.is_failure and (by_itself or rank in self._fell):
                part = next(part for part in self._parts if rank in part.ranks)
                gone = self._lost.get(rank)
                if not by_itself and ending.signal is not None and gone is not None:
                    # But for us it would have ended as it said; never well, whatever it said.
                    ending = Ending(code=(gone.exit_code or 0) & 0xFF or 1)
                found.append(Failure(rank, ending, part.errors_of(rank), gone))
        return in_order_of_loss(found, list(self._lost))

    # -- what is said ------------------------------------------------------------------------------

    def _show_status(self) -> None:
        """Draw the status line, again after each line that took its place."""
        if monotonic() >= self._status_at:
            self._status_at = monotonic() + _STATUS_EVERY
            self._status = self._describe()
        self._output.show_status(self._status)

    def _describe(self) -> str:
        endings = [ending for ending, _ in self._ended.values()]
        counts = Counts(
            running=sum(len(part.alive) for part in self._parts),
            up=len(self._present),
            done=sum(not ending.is_failure for ending in endings),
            failed=sum(ending.is_failure for ending in endings),
            suspected=len(self._suspected),
            missing_nodes=len(self._missing_nodes()) if not self._local.ranks else 0,
        )
        return describe(counts, self._age.waited)

    def _name_who_is_left(self) -> None:
        """Say once that all who still run were given up: they may never end by themselves."""
        silent = {gone.rank for gone in self._lost.values() if gone.silent}
        if not silent or self._is_stopping or self._has_said_left:
            return
        left = self._all(part.alive for part in self._parts)
        if left and silent.issuperset(left):
            self._has_said_left = True
            one = "is left, which was given up: waiting for its end; Ctrl-C stops it"
            more = "are left, which were given up: waiting for their end; Ctrl-C stops them"
            text = f"only {list_ranks(left)} {one if len(left) == 1 else more}"
            self._output.say(text, "bold yellow")

    def _report(self) -> str:
        """Say what became of the job; return the gist of it."""
        self._output.show_status("")
        gist = self._trouble
        failures = self._failures()
        if self._is_because_of_began(failures):
            gist = self._began
            fell = ", ".join(f"rank {failure.rank} ({failure.ending})" for failure in failures)
            self._output.say(f"failed because of that: {fell}", "bold red")
        elif failures:
            first = first_failure(failures)
            reason = f" ({first.reason})" if first.reason else ""
            gist = (
                f"rank {first.rank} failed first: {first.ending}{reason}{self._where(first.rank)}"
            )
            self._output.say(gist, "bold red")
            self._quote(first)
            others = [f"rank {f.rank} ({f.ending})" for f in failures if f.rank != first.rank]
            if others:
                self._output.say(f"failed too: {', '.join(others)}")
        for word, ranks in (
            ("stopped", self._all(part.stopped for part in self._parts)),
            ("killed", self._all(part.killed for part in self._parts)),
        ):
            if ranks:
                self._output.say(f"{word}: {list_ranks(ranks)}")
        return gist

    def _announce_restart(self, number: int) -> None:
        failures = self._failures()
        first = first_failure(failures)
        count = f"restart {number} of {self._restarts}"
        if self._is_because_of_began(failures):
            self._output.say(f"starting all ranks again because of that, {count}", "bold yellow")
        else:
            cause = f"rank {first.rank} failed ({first.ending})"
            self._output.say(f"{cause}: starting all ranks again, {count}", "bold yellow")
            self._quote(first)

    def _is_because_of_began(self, failures: list[Failure]) -> bool:
        """Whether ranks fell by what was said already, and not by the failure of one."""
        return bool(self._began and failures and first_failure(failures).is_consequence)

    def _quote(self, failure: Failure) -> None:
        """Show what a failed rank said, unless it is still to be seen."""
        is_here = failure.rank in self._local.ranks
        is_seen = is_here and failure.is_in_its_stderr and self._output.is_in_view(failure.rank)
        if failure.excerpt and not is_seen:
            source = "the last lines of its stderr" if failure.is_in_its_stderr else "its traceback"
            self._output.say(f"{source}:")
            self._output.quote(failure.excerpt)

    def _where(self, rank: int) -> str:
        for part in self._remote.values():
            if rank in part.ranks:
                return f", on node {part.node} ({part.host})"
        return ", on node 0" if self._nodes > 1 else ""

    @staticmethod
    def _all(lists: Iterable[list[int]]) -> list[int]:
        return [rank for ranks in lists for rank in ranks]
