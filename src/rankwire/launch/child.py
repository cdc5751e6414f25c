"""The process of one rank: what it inherits, how it is started, and how it ended.

A rank leads its own session, so that Ctrl-C reaches only the launcher and a signal to its process
group reaches what it started. A debugged rank stays in the launcher's session, in its own process
group. The exit status is not collected before ``reap``: until then the kernel does not reuse the
process id, so a signal cannot reach another process.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rankwire.backends import connect
from rankwire.environment import DEBUG_RANK, RANK
from rankwire.launch import debug
from rankwire.launch.reaper import DEAD, families, send_signal
from rankwire.observe import tracebacks
from rankwire.rendezvous import schedulers
from rankwire.rendezvous.secret import SecretServer
from rankwire.wire.keys import rank_key

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
# Other sources of a secret, which ranks must not inherit beside the launcher's own.
_OTHER_SECRETS = ("RANKWIRE_SECRET", "RANKWIRE_SECRET_FILE")
# Fields of /proc/PID/stat after the name, see proc(5), and the kernel's flag PF_EXITING.
_FLAGS, _EXIT_CODE, _IS_EXITING = 6, 49, 4
_OOM_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
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


@dataclass(frozen=True)
class Ending:
    """How a process ended: with an exit code, or killed by a signal."""

    code: int | None = None
    signal: int | None = None
    is_oom: bool = False  # whether the kernel probably killed it because memory ran out

    @property
    def is_failure(self) -> bool:
        """Whether the exit code is not 0."""
        return self.code != 0

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would report."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        hint = ""
        if self.is_oom:
            hint = " by the kernel: out of memory"
        elif self.signal == signal.SIGKILL:
            hint = " (the kernel does that too, when memory runs out)"
        elif self.signal in _FAULTS:
            hint = " (a crash in native code)"
        return f"killed by {signal_name(self.signal)}{hint}"


class OomCounter:
    """Notice when the kernel kills a process because memory ran out.

    The kernel counts such kills for the memory cgroup of this process, which its ranks share, or
    for the whole host. It does not say which process; the caller saw a rank die by SIGKILL.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = _counter_files(root)
        self._seen = self._count()

    def has_grown(self) -> bool:
        """Whether the kernel has killed a process since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for path in self._files:
            with suppress(OSError):
                if found := _OOM_COUNT.search(path.read_text()):
                    return int(found[1])
        return 0


def _counter_files(root: Path) -> list[Path]:
    """Return the files with a count, the most specific first."""
    files = []
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # In a container the path may be the host's, while the mount starts at our own group.
            for folder in (path.lstrip("/"), ""):
                if "memory" in controllers.split(","):
                    files.append(mounted / "memory" / folder / "memory.oom_control")
                elif not controllers:
                    files.append(mounted / folder / "memory.events")
    return [*files, root / "proc/vmstat"]


class Child:
    """Start and watch the process of one rank. For one thread.

    Args:
        rank: Its number.
        world: The settings that all ranks share.
        command: The interpreter's arguments.
        incarnation: How many times this rank was restarted alone.
        debugged: The rank that is debugged, if any. It has the launcher's terminal and no pipes.
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
        self.ending: Ending | None = None
        self.has_terminal = rank == debugged
        self._handover = SecretServer(rank_key(world.secret, rank, incarnation))
        secret_fd = self._handover.theirs.fileno()
        try:
            variables = {
                RANK: str(rank),
                schedulers.WORLD_SIZE: str(world.size),
                schedulers.ADDRESS: world.address,
                schedulers.JOB: world.job,
                schedulers.COORDINATOR: "launcher",
                schedulers.RESTART_COUNT: str(world.attempt + incarnation),
                connect.SECRET_FD: str(secret_fd),
            }
            if debugged is not None:
                variables[DEBUG_RANK] = str(debugged)
            if not self.has_terminal and _BREAKPOINT not in os.environ:
                variables[_BREAKPOINT] = debug.HOOK
            if tls_dir is not None:
                variables[connect.TLS_DIR] = str(tls_dir)
            if log_file is not None:
                variables[tracebacks.LOG_FILE] = str(log_file)
            self._process = subprocess.Popen(
                # Unbuffered, to show output when it is written; faulthandler prints a traceback of
                # a crash in native code.
                [sys.executable, "-u", "-X", "faulthandler", *command],
                stdin=None if self.has_terminal else subprocess.DEVNULL,
                stdout=None if self.has_terminal else subprocess.PIPE,
                stderr=None if self.has_terminal else subprocess.PIPE,
                bufsize=0,
                env=_inherited_environment(has_tls=tls_dir is not None) | variables,
                pass_fds=[secret_fd, *([] if leash is None else [leash])],
                # Only processes in the session of a terminal can read from it.
                start_new_session=not self.has_terminal,
                process_group=0 if self.has_terminal else None,
            )
        except BaseException:
            self._handover.close()
            raise
        self.pid = self._process.pid  # also that of its process group
        self._handover.theirs.close()

    @property
    def pipes(self) -> tuple[IO[bytes], ...]:
        """Its stdout and stderr; empty if it has the terminal."""
        return tuple(filter(None, (self._process.stdout, self._process.stderr)))

    def serve(self, selector: selectors.BaseSelector) -> None:
        """Send it the secret on request; the owner of the selector calls ``key.data()``."""
        self._handover.serve(selector, self.pid)

    def check(self) -> Ending | None:
        """Return how it ended, once; None if it runs or if this was returned before."""
        if self.ending is not None:
            return None
        # WNOWAIT: the process id stays taken until reap().
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        self._handover.close()  # its process id may soon be reused
        if found.si_code == os.CLD_EXITED:
            self.ending = Ending(code=found.si_status)
        else:
            self.ending = Ending(signal=found.si_status)
        return self.ending

    def coming_end(self) -> Ending | None:
        """Return how it ended or is ending; None if it runs. Thread-safe.

        Its connections close some milliseconds before ``waitid`` returns its status, but
        /proc/PID/stat has the status by then. The kernel shows it to processes that may trace the
        child, as a launcher may; others read 0.
        """
        if self.ending is not None:
            return self.ending
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:  # it was reaped, or there is no /proc
            return None
        fields = stat.rpartition(b")")[2].split()  # the name before it may contain anything
        status = int(fields[_EXIT_CODE])
        if not int(fields[_FLAGS]) & _IS_EXITING or not status:
            return None
        if os.WIFSIGNALED(status):
            return Ending(signal=os.WTERMSIG(status))
        return Ending(code=os.WEXITSTATUS(status))

    def send(self, number: int) -> None:
        """Send a signal to the rank, not to what it started: the rank handles its own children."""
        os.kill(self.pid, number)

    def send_group(self, number: int) -> bool:
        """Send a signal to its process group; return whether a process was there."""
        return send_signal(os.killpg, self.pid, number)

    def has_group(self) -> bool:
        """Whether a process still runs in its process group."""
        return self.send_group(0) and _is_any_running(self.pid)

    def reap(self) -> None:
        """Wait for its end and collect the exit status."""
        self._process.wait()

    def close(self) -> None:
        """Kill what is left of its group and collect it. Idempotent."""
        self._handover.close()
        if self._process.returncode is None:
            self.send_group(signal.SIGKILL)
            self._process.wait()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGTERM``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def _is_any_running(group: int) -> bool:
    """Whether a process of the group runs; in containers dead ones may never be collected."""
    everyone = (process for family in families().values() for process in family)
    return any(found == group and state not in DEAD for _, found, state in everyone)


def _inherited_environment(*, has_tls: bool) -> dict[str, str]:
    """Return the environment without variables of a world that the launcher itself is in."""
    unwanted = [*_OTHER_SECRETS, connect.SECRET_FD, connect.TLS_DIR, tracebacks.LOG_FILE]
    if has_tls:  # else they stay, so that a rank does not silently lose TLS
        unwanted += connect.TLS_FILES
    return {name: value for name, value in os.environ.items() if name not in unwanted}
