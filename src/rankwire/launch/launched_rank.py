"""The process of one launched rank: what it inherits, and how it gets its secret."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankwire import runtime
from rankwire.backends import connect
from rankwire.environment import DEBUG_RANK, RANK
from rankwire.launch.process import BREAKPOINT_HOOK, Ending, Process, Terminal
from rankwire.observe import tracebacks
from rankwire.override import override
from rankwire.rendezvous import schedulers
from rankwire.rendezvous.secret import SecretServer
from rankwire.wire.keys import rank_key

# Other sources of a secret, which ranks must not inherit beside the launcher's own.
_OTHER_SECRETS = ("RANKWIRE_SECRET", "RANKWIRE_SECRET_FILE")
_BREAKPOINT = "PYTHONBREAKPOINT"


@dataclass(frozen=True)
class JobSettings:
    """The settings that all ranks of a job share.

    Attributes:
        size: The number of ranks on all hosts.
        address: The address of the launcher's coordinator.
        secret: Each rank gets a key derived from it, not the secret itself.
        attempt: How many times all ranks were started before.
        stays: Whether a rank that has ended may be restarted alone.
    """

    size: int
    address: str
    job: str
    secret: bytes = field(repr=False)
    attempt: int = 0
    stays: bool = False


class LaunchedRank(Process):
    """Start and watch the process of one rank. For one thread.

    Args:
        rank: Its number.
        world: The settings that all ranks share.
        command: The interpreter's arguments.
        incarnation: How many times this rank was restarted alone.
        debugged: The rank that is debugged, if any. It has the launcher's terminal.
        tls_dir: The folder with its certificate, if any.
        leash: A descriptor to inherit, see ``reaper``.
        log_file: The log of its output, if any.
    """

    def __init__(
        self,
        rank: int,
        world: JobSettings,
        command: Sequence[str],
        *,
        incarnation: int = 0,
        debugged: int | None = None,
        tls_dir: Path | None = None,
        leash: int | None = None,
        log_file: Path | None = None,
    ) -> None:
        self.rank = rank
        self._secret = SecretServer(rank_key(world.secret, rank, incarnation))
        secret_fd = self._secret.theirs.fileno()
        has_terminal = rank == debugged
        variables = {
            RANK: rank,
            schedulers.WORLD_SIZE: world.size,
            schedulers.ADDRESS: world.address,
            schedulers.JOB: world.job,
            schedulers.COORDINATOR: "launcher",
            schedulers.RESTART_COUNT: world.attempt + incarnation,
            connect.SECRET_FD: secret_fd,
            DEBUG_RANK: debugged,
            connect.TLS_DIR: tls_dir,
            tracebacks.LOG_FILE: log_file,
        }
        if not has_terminal and _BREAKPOINT not in os.environ:
            variables[_BREAKPOINT] = BREAKPOINT_HOOK
        given = {name: str(value) for name, value in variables.items() if value is not None}
        try:
            super().__init__(
                # Unbuffered, to show output when it is written; faulthandler prints a traceback of
                # a crash in native code.
                [sys.executable, "-u", "-X", "faulthandler", *command],
                env=_inherited_environment(has_tls=tls_dir is not None) | given,
                pass_fds=[secret_fd, *([] if leash is None else [leash])],
                has_terminal=has_terminal,
            )
        except BaseException:
            self._secret.close()
            raise
        self._secret.theirs.close()
        self._terminal = Terminal()
        if has_terminal:
            self._terminal.give(self.pid)

    def serve(self, selector: runtime.BaseSelector) -> None:
        """Send it the secret on request; the owner of the selector calls ``key.data()``."""
        self._secret.serve(selector, self.pid)

    @override
    def check(self) -> Ending | None:
        ending = super().check()
        if ending is not None:
            self._terminal.take_back()
            self._secret.close()  # its process id may soon be reused
        return ending

    @override
    def close(self) -> None:
        self._secret.close()
        super().close()
        self._terminal.take_back()


def _inherited_environment(*, has_tls: bool) -> dict[str, str]:
    """Return the environment without variables of a world that the launcher itself is in."""
    unwanted = [*_OTHER_SECRETS, connect.SECRET_FD, connect.TLS_DIR, tracebacks.LOG_FILE]
    if has_tls:  # else they stay, so that a rank does not silently lose TLS
        unwanted += connect.TLS_FILES
    return {name: value for name, value in os.environ.items() if name not in unwanted}
