"""Supervise processes, for ``rankwire run``, ``rankwire.local`` and the tests.

A process leads its own session, so that Ctrl-C reaches only its starter, and a signal to its
process group reaches its children. A debugged rank has the starter's terminal and stays in its
session. The exit status is not collected before ``reap``: until then the kernel does not reuse the
process id, so a signal cannot reach another process. Ranks load this module too, for ``pass_by``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.environment import DEBUG_RANK, RANK
from rankwire.launch.reaper import DEAD, Reaper, descendants, families, send_signal

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
# Fields of /proc/PID/stat after the name, see proc(5), and the kernel's flag PF_EXITING.
_FLAGS, _EXIT_CODE, _IS_EXITING = 6, 49, 4
_OOM_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# The value of PYTHONBREAKPOINT in ranks without a terminal.
BREAKPOINT_HOOK = f"{__name__}.pass_by"
_STDIN = 0
_PR_SET_CHILD_SUBREAPER = 36
# Seconds; a dead process that is not collected only occupies a process id.
_COLLECT_EVERY = 0.5
_seen: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class Ending:
    """How a process ended: with an exit code, or killed by a signal."""

    code: int | None = None
    signal: int | None = None
    is_oom: bool = False  # the kernel probably killed it for lack of memory

    @classmethod
    def of_status(cls, status: int) -> Ending:
        """Return the ending of a wait status."""
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status))
        return cls(code=os.WEXITSTATUS(status))

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
        hint = " (a crash in native code)" if self.signal in _FAULTS else ""
        if self.is_oom:
            hint = " by the kernel: out of memory"
        elif self.signal == signal.SIGKILL:
            hint = " (the kernel does that too, when memory runs out)"
        return f"killed by {signal_name(self.signal)}{hint}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGTERM``."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


class Process:
    """A process that leads its group, with the starter's terminal or ``pipes``. For one thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        has_terminal: bool = False,
    ) -> None:
        stream = None if has_terminal else subprocess.PIPE
        self._popen = subprocess.Popen(
            command,
            stdin=None if has_terminal else subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            bufsize=0,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            # Only processes in the session of a terminal can read from it.
            start_new_session=not has_terminal,
            process_group=0 if has_terminal else None,
        )
        self._watch(self._popen.pid, self._popen.stdout, self._popen.stderr)

    def _watch(self, pid: int, *pipes: IO[bytes] | None) -> None:
        self.pid = pid
        self.ending: Ending | None = None
        self.pipes = tuple(filter(None, pipes))
        self._descriptor = -1

    def open_descriptor(self) -> int:
        """Return a descriptor that becomes readable when the process ends; ``close`` closes it."""
        if self._descriptor < 0:
            self._descriptor = os.pidfd_open(self.pid)
        return self._descriptor

    def check(self) -> Ending | None:
        """Return once how it ended; None while it runs or after that."""
        if self.ending is not None:
            return None
        self.ending = self._find_ending()
        return self.ending

    def _find_ending(self) -> Ending | None:
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_code == os.CLD_EXITED:
            return Ending(code=found.si_status)
        return Ending(signal=found.si_status)

    def coming_end(self) -> Ending | None:
        """Return how it ended or is ending; None if it runs. Thread-safe.

        Its connections close some milliseconds before ``waitid`` returns its status. /proc/PID/stat
        has it by then, for processes that may trace the child, such as its starter.
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
        return Ending.of_status(status)

    def send(self, number: int) -> None:
        """Send a signal to the process only."""
        send_signal(os.kill, self.pid, number)

    def send_group(self, number: int) -> bool:
        """Send a signal to its process group; return whether the group has a process."""
        return send_signal(os.killpg, self.pid, number)

    def has_group(self) -> bool:
        """Return whether a process runs in its group; in containers dead ones may stay in it."""
        if not self.send_group(0):
            return False
        everyone = (process for family in families().values() for process in family)
        return any(group == self.pid and state not in DEAD for _, group, state in everyone)

    def reap(self) -> None:
        """Wait for its end and collect the exit status."""
        self._popen.wait()

    def is_reaped(self) -> bool:
        """Return whether the exit status was collected, so that another process may have its id."""
        return self._popen.returncode is not None

    def close(self) -> None:
        """Kill the rest of its group, collect it and close its pipes. Idempotent."""
        if not self.is_reaped():
            self.send_group(signal.SIGKILL)
            self.reap()
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class OomCounter:
    """Notices when the kernel kills a process because memory ran out.

    The kernel counts these in the memory cgroup or on the host, without naming the process.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = _counter_files(root)
        self._seen = self._count()

    def has_grown(self) -> bool:
        """Return whether the kernel has killed a process since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for path in self._files:
            with suppress(OSError):
                if found := _OOM_COUNT.search(path.read_text()):
                    return int(found[1])
        return 0


def _counter_files(root: Path) -> list[Path]:
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


class Subreaper:
    """Adopts orphans of ranks from construction until ``close``. For one thread.

    A process that calls ``setsid`` leaves its rank's group and, when its parent ends, the rank's
    descendants. As a subreaper (Linux only: ``is_adopting``), the launcher becomes its parent.
    """

    def __init__(self, reaper: Reaper) -> None:
        self.reaper = reaper
        # Exclude children from before an exec, which are not of the job, or they would be ended
        # too.
        self.is_adopting = _can_list_children() and _set_subreaper(True)
        self._others = {reaper.pid, *_children()}
        self._adopted: set[int] = set()  # known to the reaper
        self._collect_at = 0.0

    def find(self, groups: Collection[int]) -> list[int]:
        """Return running descendants of this process outside the ranks' process groups."""
        if not self.is_adopting or not set(_children()) - self._others:
            return []
        return [
            pid
            for pid, group, state in descendants([runtime.getpid()], but=self._others)
            if group not in groups and state not in DEAD
        ]

    def send(self, number: int, groups: Collection[int]) -> bool:
        """Send a signal to all that ``find`` returns; return whether there was any."""
        found = self.find(groups)
        for pid in found:
            send_signal(os.kill, pid, number)
        return bool(found)

    def collect(self, ranks: Collection[int]) -> None:
        """Collect adopted processes that have ended, and report the others to the reaper."""
        if not self.is_adopting or REAL_TIME.now() < self._collect_at:
            return
        self._collect_at = REAL_TIME.now() + _COLLECT_EVERY
        alive = set()
        for pid in _children():
            if pid in self._others or pid in ranks:
                continue
            with suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0) and os.getpgid(pid) not in ranks:
                    alive.add(pid)
        for pid in self._adopted - alive:
            self.reaper.forget(pid)
        for pid in alive - self._adopted:
            self.reaper.adopt(pid)
        self._adopted = alive

    def close(self) -> None:
        """Stop adopting. Idempotent."""
        if self.is_adopting:
            _set_subreaper(False)


def _set_subreaper(is_wanted: bool) -> bool:
    import ctypes  # here: ranks load this module too, without needing it

    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux
        return False
    return bool(prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_wanted), 0, 0, 0) == 0)


def _can_list_children() -> bool:
    return Path(f"/proc/self/task/{runtime.getpid()}/children").exists()


def _children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread ended, or the kernel lacks the file
            found += map(int, path.read_text().split())
    return found


class Terminal:
    """Lends the launcher's terminal, and Ctrl-C, to a debugged rank's group. For one thread."""

    def __init__(self) -> None:
        self._owner: int | None = None

    def give(self, group: int) -> None:
        """Put a process group of this session in the foreground."""
        with suppress(OSError):  # no terminal, or not ours
            owner = os.tcgetpgrp(_STDIN)
            _set_foreground(group)
            self._owner = owner
        with suppress(OSError):
            os.killpg(group, signal.SIGCONT)  # the kernel stops it if it read before this

    def take_back(self) -> None:
        """Put the previous group back in the foreground. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            with suppress(OSError):
                _set_foreground(owner)


def _set_foreground(group: int) -> None:
    # Otherwise the kernel stops this process if it is in the background.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(_STDIN, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pass_by(*args: Any, **kwargs: Any) -> None:
    """Print, once for each breakpoint, how to debug this rank; the program continues."""
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    if place in _seen or os.environ.get(DEBUG_RANK):
        return
    _seen.add(place)
    rank = os.environ.get(RANK, "N")
    sys.stderr.write(
        f"breakpoint() at {place[0]}:{place[1]} is passed by: ranks have no terminal. To debug"
        f" this one: rankwire run --debug-rank {rank} ...\n"
    )
    sys.stderr.flush()
