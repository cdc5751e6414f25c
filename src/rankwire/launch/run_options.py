"""Hold the options of ``rankwire run``, and reject invalid ones."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rankwire.backends.roles import LONGEST_ROLE, check_role
from rankwire.environment import default_timeout
from rankwire.errors import ConfigurationError, InvalidWorldSizeError

MAKE_A_SECRET = "(umask 077; head -c 32 /dev/urandom | base64 > job.secret)"


class OnFailure(StrEnum):
    """What happens to the other ranks when one fails."""

    STOP = "stop"  # they are stopped
    CONTINUE = "continue"  # they continue without it
    RESTART = "restart"  # they continue, and it alone is restarted


class ExitCode(StrEnum):
    """Whose failure is that of the job."""

    ANY = "any"  # that of the rank that failed first
    RANK0 = "rank0"  # that of rank 0, unless the launcher stopped it


@dataclass(frozen=True)
class Program:
    """A program of a job."""

    command: Sequence[str]  # the interpreter's arguments, then the program's own
    ranks: int  # on this host
    role: str = "rank"  # of its ranks


def role_of(program: str) -> str:
    """Return the role of a program that was given none: its name, without other characters."""
    return re.sub(r"[^\w.-]", "_", program)[:LONGEST_ROLE] or "_"


@dataclass(frozen=True)
class JobHosts:
    """The number of hosts, and this host's place among them."""

    nodes: int = 1  # each with its own launcher
    node: int = 0  # this one; world ranks are numbered in this order
    master: str | None = None  # host:port where the launcher of node 0 listens


@dataclass(frozen=True)
class FailureRules:
    """What to do when a rank fails."""

    restarts: int = 0  # of all ranks
    on_failure: OnFailure = OnFailure.STOP
    max_restarts: int = 3  # of each rank alone
    exit_code: ExitCode = ExitCode.ANY


@dataclass(frozen=True)
class RunOptions:
    """The options of a launcher."""

    programs: Sequence[Program]  # of this host, in rank order
    hosts: JobHosts = JobHosts()
    secret_file: Path | None = None  # the same secret on all hosts; None creates one
    tls_dir: Path | None = None  # with the certificates of the launcher and of this host's ranks
    failures: FailureRules = FailureRules()
    debugged: int | None = None  # the rank that gets this launcher's terminal
    grace: float = 5.0  # seconds from the request to stop to SIGKILL
    has_prefix: bool = True
    log_dir: Path | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks on this host."""
        return sum(program.ranks for program in self.programs)

    @property
    def by_rank(self) -> list[Program]:
        """The program of each rank on this host."""
        return [program for program in self.programs for _ in range(program.ranks)]

    def check(self) -> None:
        """Raise ConfigurationError if an option, or ``RANKWIRE_TIMEOUT``, is invalid."""
        for program in self.programs:
            if program.ranks < 1:
                raise InvalidWorldSizeError(program.ranks)
            check_role(program.role)
        if not 0 <= self.grace < math.inf:
            raise ConfigurationError(f"the grace is 0 or more seconds, not {self.grace!r}")
        default_timeout()  # fail once here instead of once in each rank
        self._check_nodes()
        on_failure = self.failures.on_failure
        if self.failures.restarts and on_failure is not OnFailure.STOP:
            raise ConfigurationError(
                f"--restarts starts all ranks again when one fails, --on-failure {on_failure}"
                " lets the others go on: choose one of the two"
            )
        is_here = self.debugged is None or 0 <= self.debugged < self.ranks
        if self.hosts.nodes == 1 and not is_here:
            raise ConfigurationError(
                f"--debug-rank {self.debugged}: there are ranks 0 to {self.ranks - 1}"
            )

    def _check_nodes(self) -> None:
        nodes, node, master = self.hosts.nodes, self.hosts.node, self.hosts.master
        if nodes < 1 or not 0 <= node < nodes:
            raise ConfigurationError(f"there is no node {node} of {nodes}: nodes count from 0")
        if nodes == 1:
            return
        if master is None:
            raise ConfigurationError(
                f"{nodes} nodes need --master host:port, the same on all:"
                " where the launcher of node 0 shall listen"
            )
        if master.rpartition(":")[0] in ("0.0.0.0", "[::]", "*"):
            raise ConfigurationError(f"--master {master}: name the host as the others reach it")
        if master.endswith(":0"):
            raise ConfigurationError(
                f"--master {master}: choose a port, the others have to know it"
            )
        if self.secret_file is None:
            raise ConfigurationError(
                f"{nodes} nodes need a secret, so that no other process can join. Make one with"
                f" {MAKE_A_SECRET}, copy it to all hosts, and add --secret-file job.secret"
            )
