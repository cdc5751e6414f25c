"""Direct a job from the launcher of node 0: gather hosts, start ranks, handle failures, restart.

The ranks of each host are a *part*: local ones, or remote ones through the host's launcher. Rules:

- ``--on-failure stop``: the first failure ends the attempt on all hosts with SIGTERM, and SIGKILL
  after the grace. The rank to blame gets the grace to exit by itself, as its exit code becomes the
  job's. If restarts are left, all ranks start again.
- ``continue``: the other ranks continue, and the job ends when all have ended.
- ``restart``: the failed rank alone restarts after a pause, and is killed first if it was declared
  lost. Without restarts left, its failure ends the job.
- The loss of a launcher ends the job.
- A signal to any launcher goes to every rank once; a second one to the same launcher, or a later
  one to another, kills on all hosts.
"""

from __future__ import annotations

import contextlib
import math
import signal

from rankwire import runtime
from rankwire.backends.roles import roles_of_world
from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError, RankwireError
from rankwire.launch.attempt import Attempt, Restarts, first_failure
from rankwire.launch.host_ranks import HostRanks
from rankwire.launch.nodes import GATHER_LIMIT, LAST_WORDS, LauncherEvents, Parts, RemoteRanks
from rankwire.launch.output import Loop
from rankwire.launch.process import Ending, signal_name
from rankwire.launch.reporter import STATUS_EVERY, Reporter
from rankwire.launch.run_options import ExitCode, OnFailure, RunOptions
from rankwire.rendezvous.coordinator_host import CoordinatorHost
from rankwire.rendezvous.launchers import End, Kill, LauncherLink, Release, Restart, Start, Stop
from rankwire.rendezvous.reports import Told
from rankwire.texts import name_ranks
from rankwire.transports.security import Policy
from rankwire.transports.wakeup import Wakeup
from rankwire.wire.control_messages import Gone

# Schedulers signal the launchers of all hosts at once: that is one request. Two signals to one
# launcher are two requests (``Loop`` removes their echoes).
_ECHO_OF_NODES = 2.0


class _Requests:
    def __init__(self) -> None:
        self.first: int | None = None
        self.is_impatient = False  # a signal came when no rank was alive
        self._last_node, self._last_at = 0, -math.inf

    def add(self, number: int, node: int) -> bool:
        """Add a signal; return False if it is an echo."""
        if REAL_TIME.now() - self._last_at < _ECHO_OF_NODES and node != self._last_node:
            return False
        self._last_node, self._last_at = node, REAL_TIME.now()
        self.first = number if self.first is None else self.first
        return True


class LaunchedJob:
    """Runs a job on all its hosts, and owns its listener. For one thread."""

    def __init__(
        self,
        loop: Loop,
        local: HostRanks,
        options: RunOptions,
        *,
        listener: runtime.Socket,
        secret: bytes,
        policy: Policy,
    ) -> None:
        self._loop = loop
        self._parts = Parts(local, options.hosts.nodes)
        self._reporter = Reporter(loop.output, self._parts)
        self._options = options
        restarts_alone = options.failures.on_failure is OnFailure.RESTART
        self._restarts = Restarts(options.failures.max_restarts if restarts_alone else 0)
        self._name = f"run-{runtime.token_hex(4)}"
        self._attempt = Attempt()
        self._trouble = ("", 0)  # what else ended the job, and its exit code
        self._requests = _Requests()
        local.on_ended = self._rank_ended
        loop.on_turn = lambda: self._reporter.show_status(self._attempt)
        self._closing = contextlib.ExitStack()
        wakeup = self._closing.enter_context(contextlib.closing(Wakeup(loop.selector)))
        told = Told(
            on_formed=lambda world: wakeup.post(lambda: self._attempt.formed(len(world.members))),
            on_gone=lambda gone: wakeup.post(lambda: self._rank_gone(gone)),
            on_suspected=lambda said: wakeup.post(lambda: self._attempt.rank_suspected(said)),
            on_hopeless=lambda reason: wakeup.post(lambda: self._say_began(reason)),
            on_joined=lambda member: wakeup.post(lambda: self._attempt.rank_joined(member.rank)),
            on_doing=lambda rank, doing: wakeup.post(
                lambda: self._attempt.doing.update({rank: doing})
            ),
            ending_of=local.ending_of,
        )
        self._host = CoordinatorHost(
            listener,
            local.count,
            secret=secret,
            job=self._name,
            clock=REAL_TIME,
            policy=policy,
            told=told,
            are_restarted=self._restarts.limit > 0,
            nodes=options.hosts.nodes,
            on_launcher=lambda node, link: wakeup.post(lambda: self._launcher_came(node, link)),
        )
        self._closing.callback(self._host.close)

    def run(self) -> int:
        """Return the job's exit code; raise ConfigurationError if launchers are missing."""
        self._gather()
        restarts = self._options.failures.restarts
        for attempt in range(restarts + 1):
            if self._requests.first is None:
                self._start(attempt)
                self._supervise()
            failures = self._attempt.failures(self._parts)
            if not failures or self._requests.first is not None or self._trouble[0]:
                break
            if attempt < restarts:
                count = f"restart {attempt + 1} of {restarts}"
                self._reporter.announce_restart(self._attempt, count)
        text = self._reporter.report(self._attempt, self._trouble[0])
        code, patience, asked = self._trouble[1], math.inf, self._requests.first
        if asked is not None:
            text = text or f"{signal_name(asked)}: the job was stopped"
            code, patience = 128 + asked, 0.0 if self._requests.is_impatient else LAST_WORDS
        if failures:
            code = first_failure(failures).ending.exit_code
        if self._is_up_to_rank_0():
            code = self._attempt.ended[0][0].exit_code
        for part in self._parts.remote.values():
            part.finish(code, text, was_asked=asked is not None)
        return self._loop.write_rest(code, patience=patience)

    def _is_up_to_rank_0(self) -> bool:
        """Whether the job's exit code is that of rank 0, which ended by itself."""
        is_wanted = self._options.failures.exit_code is ExitCode.RANK0
        is_stopped = self._requests.first is not None or bool(self._trouble[0])
        return is_wanted and not is_stopped and self._attempt.ended.get(0, (None, False))[1]

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for part in self._parts.remote.values():
            part.close()
        self._closing.close()

    def _gather(self) -> None:
        deadline, address = Deadline(GATHER_LIMIT, REAL_TIME), self._options.hosts.master
        while missing := self._parts.missing_nodes():
            if deadline.expired:
                raise ConfigurationError(
                    f"no launcher came for node {', '.join(map(str, missing))} within"
                    f" {deadline.limit:g} s; start it there with --master {address}"
                )
            for number in self._loop.turn(STATUS_EVERY):
                self._obey(number)
            nodes = ", ".join(map(str, missing))
            self._loop.output.remind(f"waiting for the launcher of node {nodes} at {address}")
            if self._requests.first is not None:
                return

    def _launcher_came(self, node: int, link: LauncherLink) -> None:
        if node in self._parts.remote:
            self._loop.output.say(f"rejected a second launcher for node {node}")
            link.close()
            return
        part = RemoteRanks(node, self._loop, link)
        part.events = LauncherEvents(
            on_ended=self._rank_ended,
            on_asked=lambda number: self._obey(number, node),
            on_trouble=self._give_up,
            on_lost=lambda error: self._launcher_lost(part, error),
        )
        self._parts.remote[node] = part

    def _launcher_lost(self, part: RemoteRanks, error: RankwireError) -> None:
        if not part.ranks:  # nothing was started: it may connect again
            del self._parts.remote[part.node]
            return
        where = f" on {part.host}" if part.host else ""
        self._give_up(f"the launcher of node {part.node}{where} is gone: {error.message}")

    def _give_up(self, trouble: str, code: int = 1) -> None:
        """End the job for a reason other than a rank."""
        if not self._trouble[0]:
            self._trouble = trouble, code
            self._loop.output.say(f"{trouble}; stopping all ranks", "bold red")
        self._stop(signal.SIGTERM)

    def _start(self, attempt: int) -> None:
        size = sum(part.count for part in self._parts)
        job = f"{self._name}.{attempt}"
        self._attempt = Attempt()
        self._restarts = Restarts(self._restarts.limit)
        self._host.expect(world_size=size, job=job)
        roles = [role for part in self._parts for role in part.roles]
        self._parts.names = roles_of_world(roles, size)
        first_rank = 0
        for part in self._parts:
            part.obey(Start(size, first_rank, job, attempt, self._restarts.limit > 0, roles))
            first_rank += part.count

    def _supervise(self) -> None:
        while not all(part.is_over for part in self._parts):
            wake_in = min(part.wake_in for part in self._parts)
            due_in = min(self._stop_due(), self._restarts.next_at) - REAL_TIME.now()
            for number in self._loop.turn(min(due_in, wake_in)):
                self._obey(number)
            for part in self._parts:
                part.look()
            if REAL_TIME.now() >= self._stop_due():
                self._stop(signal.SIGTERM)
            self._restart_due()
            self._reporter.name_who_is_left(self._attempt)
            if self._attempt.is_stopping:
                continue
            where = " of node 0" if self._parts.nodes > 1 else ""
            if (trouble := self._loop.new_stdout_trouble(where)) is not None:
                self._give_up(*trouble)

    def _restart_due(self) -> None:
        for rank in self._restarts.take_due(REAL_TIME.now()):
            incarnation = self._restarts.counts[rank]
            self._attempt.rank_restarts(rank)
            # First, so that the coordinator does not confuse the old process with the new one.
            self._host.expect_again(rank, incarnation)
            try:
                self._parts.part_of(rank).obey(Restart(rank, incarnation))
            except ConfigurationError as error:
                self._give_up(error.message)
        if self._restarts.limit and not self._restarts.due and not self._parts.alive:
            self._parts.obey(Release())

    def _stop_due(self) -> float:
        return self._attempt.stop_due(self._parts.alive, self._options.grace)

    def _stop(self, number: int) -> None:
        self._attempt.stop()
        self._restarts.due.clear()
        self._parts.obey(Stop(number))

    def _obey(self, number: int, node: int = 0) -> None:
        if not self._requests.add(number, node):
            return
        alive = self._parts.alive
        self._requests.is_impatient = self._requests.is_impatient or not alive
        where = f" on node {node}" if node else ""
        if not self._parts.have_started:
            self._loop.output.say(f"{signal_name(number)}{where}: the job ends before it began")
        if self._attempt.is_stopping or not alive:
            self._parts.obey(Kill())
        else:
            hint = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
            self._loop.output.say(
                f"{signal_name(number)}{where}: stopping {name_ranks(alive)}{hint}"
            )
            self._stop(number)

    def _rank_ended(self, rank: int, ending: Ending, by_itself: bool) -> None:
        self._attempt.ended[rank] = ending, by_itself
        goes_on = self._options.failures.on_failure is OnFailure.CONTINUE
        if ending.is_failure and by_itself and not self._attempt.is_stopping:
            if goes_on:
                self._reporter.announce_failure(rank, ending, "the others go on")
            elif (pause := self._restarts.plan(rank, REAL_TIME.now())) is not None:
                count = f"restart {self._restarts.counts[rank]} of {self._restarts.limit}"
                again = f"it starts again in {pause:g} s, {count}"
                self._reporter.announce_failure(rank, ending, again)
            else:
                self._attempt.stop_soon()
        if goes_on or not ending.is_failure:
            self._host.expect_never(rank, f"rank {rank} ended ({ending}) before it joined")

    def _rank_gone(self, gone: Gone) -> None:
        self._attempt.rank_gone(gone)
        if not gone.silent or gone.orderly:
            return
        restarts_alone = self._options.failures.on_failure is OnFailure.RESTART
        if restarts_alone and not self._attempt.is_stopping:
            self._loop.output.say(f"rank {gone.rank} is killed: {gone.reason}", "bold yellow")
            self._parts.part_of(gone.rank).obey(End(gone.rank))
        else:
            self._say_began(f"rank {gone.rank} was given up: {gone.reason}")

    def _say_began(self, reason: str) -> None:
        self._attempt.began = self._attempt.began or reason
        self._loop.output.say(reason, "bold red")
