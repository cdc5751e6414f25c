"""Find, end and collect processes that ranks started and that left their rank's session.

``setsid`` takes a process out of its rank's process group, and when its parent ends, it is no
longer a descendant of the rank. So the launcher becomes a subreaper (``PR_SET_CHILD_SUBREAPER``,
Linux): the kernel makes such a process the launcher's child. Where that is not possible,
``is_adopting`` is False and nothing is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection
from pathlib import Path

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.launch.reaper import DEAD, Reaper, descendants, send_signal

_PR_SET_CHILD_SUBREAPER = 36
# Seconds; until it is collected, a dead process only occupies a process id.
_COLLECT_EVERY = 0.5


class Subreaper:
    """Adopt orphans of ranks from construction until ``close``. For one thread."""

    def __init__(self, reaper: Reaper) -> None:
        self.reaper = reaper
        # This process may have children that are not of the job, from before an exec. They must be
        # known, or they would be ended too.
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
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0) and os.getpgid(pid) not in ranks:
                    alive.add(pid)
        for pid in self._adopted - alive:
            self.reaper.forget_adopted(pid)
        for pid in alive - self._adopted:
            self.reaper.adopt(pid)
        self._adopted = alive

    def close(self) -> None:
        """Stop adopting. Idempotent."""
        if self.is_adopting:
            _set_subreaper(False)


def _set_subreaper(is_wanted: bool) -> bool:
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
        with contextlib.suppress(OSError):  # the thread ended, or the kernel lacks the file
            found += map(int, path.read_text().split())
    return found
