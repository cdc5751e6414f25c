"""Start, watch and end the ranks of this host.

States, in order until the next ``start``::

    RUNNING    ranks run                                                  -> STOPPING, CLEARING
    STOPPING   all were asked to end; SIGKILL follows after the grace     -> CLEARING
    CLEARING   all have ended; the processes that they left are ended     -> OVER
    OVER       nothing runs, as before the first ``start``

In RUNNING, a rank may be restarted alone; then CLEARING begins only after the order ``Release``.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from rankwire.backends import connect
from rankwire.backends.roles import Roles, format_roles, roles_of_world
from rankwire.clock import REAL_TIME
from rankwire.environment import DEBUG_RANK, RANK
from rankwire.errors import ConfigurationError
from rankwire.launch.output import Loop
from rankwire.launch.process import (
    BREAKPOINT_HOOK,
    Ending,
    OomCounter,
    Process,
    Subreaper,
    Terminal,
)
from rankwire.launch.run_options import RunOptions
from rankwire.observe import tracebacks
from rankwire.override import override
from rankwire.rendezvous import schedulers
from rankwire.rendezvous.launchers import End, Kill, Order, Release, Restart, Start, Stop
from rankwire.rendezvous.runtime_dir import sweep_socket_files
from rankwire.rendezvous.secret import SecretServer
from rankwire.texts import name_ranks
from rankwire.transports.security import files_of
from rankwire.wire.keys import rank_key

# Other sources of a secret, which ranks must not inherit.
_OTHER_SECRETS = ("RANKWIRE_SECRET", "RANKWIRE_SECRET_FILE")
_BREAKPOINT = "PYTHONBREAKPOINT"
_POLL = 0.02
# More than one: a dying process may still start another.
_KILLING_ROUNDS = 10


class LaunchedRank(Process):
    """The process of one rank; a debugged rank gets the terminal."""

    def __init__(
        self,
        rank: int,
        world: Start,
        options: RunOptions,
        *,
        incarnation: int,
        secret: bytes,
        leash: int | None,
        log_file: Path | None,
    ) -> None:
        self.rank = rank
        self.secret = SecretServer(rank_key(secret, rank, incarnation))
        secret_fd = self.secret.theirs.fileno()
        has_terminal = rank == options.debugged
        program = options.by_rank[rank - world.first_rank]
        variables = {
            RANK: rank,
            schedulers.WORLD_SIZE: world.world_size,
            schedulers.ADDRESS: options.hosts.master,
            schedulers.JOB: world.job,
            schedulers.COORDINATOR: "launcher",
            schedulers.RESTART_COUNT: world.attempt + incarnation,
            connect.SECRET_FD: secret_fd,
            connect.ROLES: format_roles(world.roles),
            DEBUG_RANK: options.debugged,
            connect.TLS_DIR: options.tls_dir,
            tracebacks.LOG_FILE: log_file,
        }
        if not has_terminal and _BREAKPOINT not in os.environ:
            variables[_BREAKPOINT] = BREAKPOINT_HOOK
        given = {name: str(value) for name, value in variables.items() if value is not None}
        try:
            super().__init__(
                # Unbuffered, to show output at once; faulthandler shows crashes in native code.
                [sys.executable, "-u", "-X", "faulthandler", *program.command],
                env=_inherited_environment(has_tls=options.tls_dir is not None) | given,
                pass_fds=[secret_fd, *([] if leash is None else [leash])],
                has_terminal=has_terminal,
            )
        except BaseException:
            self.secret.close()
            raise
        self.secret.theirs.close()
        self._terminal = Terminal()
        if has_terminal:
            self._terminal.give(self.pid)

    @override
    def check(self) -> Ending | None:
        ending = super().check()
        if ending is not None:
            self._terminal.take_back()
            self.secret.close()  # its process id may soon be reused
        return ending

    @override
    def close(self) -> None:
        self.secret.close()
        super().close()
        self._terminal.take_back()


def _inherited_environment(*, has_tls: bool) -> dict[str, str]:
    """Return the environment without variables of a world that includes the launcher."""
    unwanted = [*_OTHER_SECRETS, connect.SECRET_FD, connect.TLS_DIR, tracebacks.LOG_FILE]
    if has_tls:  # else they stay, so that a rank does not silently lose TLS
        unwanted += connect.TLS_FILES
    return {name: value for name, value in os.environ.items() if name not in unwanted}


class _Phase(Enum):
    RUNNING = auto()
    STOPPING = auto()
    CLEARING = auto()
    OVER = auto()


class HostRanks:
    """Starts, watches and ends the processes of this host's ranks. For one thread."""

    def __init__(
        self, options: RunOptions, loop: Loop, subreaper: Subreaper, secret: bytes
    ) -> None:
        self.roles = [program.role for program in options.by_rank]
        self.count = len(self.roles)
        self.ranks = range(0)
        self.stopped: list[int] = []
        self.killed: list[int] = []
        self.on_ended: Callable[[int, Ending, bool], None] = lambda rank, ending, by_itself: None
        self._options = options
        self._loop = loop
        self._subreaper = subreaper
        self._secret = secret  # each rank gets a key derived from it
        self._world: Start | None = None
        self._names = Roles()
        self._stays = False  # a rank that ended may be restarted alone
        self._memory = OomCounter()
        self._children: dict[int, LaunchedRank] = {}  # by rank
        self._phase = _Phase.OVER
        self._due = math.inf  # when to kill the remaining processes, in STOPPING and CLEARING

    def start(self, world: Start) -> None:
        """Start all ranks; raise ConfigurationError if one cannot start or has no certificate."""
        ranks = range(world.first_rank, world.first_rank + self.count)
        if self._options.tls_dir is not None:
            for rank in ranks:
                files_of(self._options.tls_dir, rank)
        self.close()
        self._children = {}
        self.stopped, self.killed = [], []
        self.ranks = ranks
        self._due = math.inf
        self._phase = _Phase.RUNNING
        self._world, self._stays = world, world.stays
        self._names = roles_of_world(world.roles, world.world_size)
        for rank in self.ranks:
            self._start(rank)

    def _start(self, rank: int, incarnation: int = 0) -> None:
        assert self._world is not None
        logs = self._loop.output.logs
        try:
            with self._subreaper.reaper.new_leash() as leash:
                child = LaunchedRank(
                    rank,
                    self._world,
                    self._options,
                    incarnation=incarnation,
                    secret=self._secret,
                    leash=leash,
                    log_file=None if logs is None else logs.path_of(rank),
                )
                self._children[rank] = child
                self._subreaper.reaper.watch(child.pid, leash)
        except OSError as error:
            hint = "; raise the limit `ulimit -n`" if error.errno == errno.EMFILE else ""
            raise ConfigurationError(
                f"rank {rank} cannot be started: {error.strerror}{hint}"
            ) from error
        child.secret.serve(self._loop.selector, child.pid)
        if child.pipes:
            name = self._names.name_of(rank) if len(self._names) > 1 else ""
            self._loop.output.attach(rank, *child.pipes, name=name)

    def obey(self, order: Order) -> None:
        """Execute an order of the job."""
        match order:
            case Start():
                self.start(order)
            case Restart(rank, incarnation) if self._phase is _Phase.RUNNING:
                self._restart(rank, incarnation)
            case End(rank) if self._phase is _Phase.RUNNING:
                if rank in self.alive:
                    self._children[rank].send_group(signal.SIGKILL)
            case Release():
                self._stays = False  # the phase ends when all ranks have ended
            case Stop(number):
                self.stop(number)
            case Kill():
                self.kill()

    def _restart(self, rank: int, incarnation: int) -> None:
        old = self._children[rank]
        self._loop.output.detach(rank)
        old.send_group(signal.SIGKILL)
        old.reap()
        self._subreaper.reaper.forget(old.pid)
        del self._children[rank]
        self._start(rank, incarnation)

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, child in self._children.items() if child.ending is None]

    @property
    def is_over(self) -> bool:
        """Whether nothing runs."""
        return self._phase is _Phase.OVER

    @property
    def wake_in(self) -> float:
        """Seconds until the owner must call ``look``."""
        if self._phase is _Phase.CLEARING:
            return _POLL
        return self._due - REAL_TIME.now()

    def ending_of(self, rank: int) -> str:
        """Return how the process of a rank ended, or "" if unknown. Thread-safe."""
        child = self._children.get(rank)
        ending = None if child is None else child.coming_end()
        return "" if ending is None else f"its process ended: {ending}"

    def errors_of(self, rank: int) -> list[str]:
        """Return the last lines that a rank wrote to stderr."""
        return self._loop.output.last_errors(rank)

    def look(self) -> None:
        """Handle ranks that ended, kill those that did not end in time, and end their orphans."""
        if self.is_over:
            return
        self._check_children()
        self._subreaper.collect(self._groups)
        if self._phase is _Phase.STOPPING and REAL_TIME.now() >= self._due:
            self.kill()
        is_waiting = self._stays and self._phase is _Phase.RUNNING
        if self._phase is not _Phase.CLEARING and not self.alive and not is_waiting:
            self._begin_clearing()
        if self._phase is _Phase.CLEARING:
            self._clear()

    def stop(self, number: int) -> None:
        """Ask all ranks to end, once."""
        if self._phase is not _Phase.RUNNING:
            return
        self._check_children()  # a rank that ended before this ended by itself
        self._phase = _Phase.STOPPING
        self._due = REAL_TIME.now() + self._options.grace
        if number == signal.SIGINT:
            self._loop.output.fold_interrupts()
        for child in self._children.values():
            if child.ending is None:
                self.stopped.append(child.rank)
                child.send(number)

    def kill(self) -> None:
        """Kill all remaining processes."""
        if self._phase is _Phase.RUNNING:
            self.stop(signal.SIGTERM)
        self._due = -math.inf if self._phase is _Phase.CLEARING else math.inf
        if blocked := [rank for rank in self.alive if rank in self.killed]:
            self._loop.output.say(
                f"killed already, but blocked in the kernel: {name_ranks(blocked)}", "bold yellow"
            )
        for child in self._children.values():
            if child.ending is None:
                if child.rank not in self.killed:
                    self.stopped.remove(child.rank)
                    self.killed.append(child.rank)
                child.send_group(signal.SIGKILL)

    def close(self) -> None:
        """Kill the remaining ranks. Idempotent."""
        for child in self._children.values():
            child.close()

    @property
    def _groups(self) -> set[int]:
        return {child.pid for child in self._children.values()}

    def _check_children(self) -> None:
        for child in self._children.values():
            ending = child.check()
            if ending is None:
                continue
            by_itself = self._phase is _Phase.RUNNING
            if by_itself and ending.signal == signal.SIGKILL and self._memory.has_grown():
                ending = child.ending = replace(ending, is_oom=True)
            self.on_ended(child.rank, ending, by_itself)

    def _begin_clearing(self) -> None:
        self._phase = _Phase.CLEARING
        self._due = -math.inf if self.killed else REAL_TIME.now() + self._options.grace
        number = signal.SIGKILL if self.killed else signal.SIGTERM
        for child in self._children.values():
            child.send_group(number)
            child.reap()
        self._subreaper.send(number, self._groups)

    def _clear(self) -> None:
        left = [child for child in self._children.values() if child.has_group()]
        if (left or self._subreaper.find(self._groups)) and REAL_TIME.now() < self._due:
            return
        for child in left:
            child.send_group(signal.SIGKILL)
        for _ in range(_KILLING_ROUNDS):
            if not self._subreaper.send(signal.SIGKILL, self._groups):
                break
        for child in self._children.values():
            self._subreaper.reaper.forget(child.pid)
        self._loop.output.detach()
        sweep_socket_files()  # killed ranks could not remove their own
        self._phase, self._due = _Phase.OVER, math.inf
