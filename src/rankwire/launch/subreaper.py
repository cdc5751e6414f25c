"""Processes that ranks started and that left their rank's session: found, ended and collected.

``setsid`` takes a process out of reach of its rank's process group, and a parent that ends takes it
out of the family. So the launcher is made the reaper of its descendants
(``PR_SET_CHILD_SUBREAPER``, Linux): whose parent ends becomes the launcher's own child, and descent
stays what tells that a process belongs to the job. One thread. Where the kernel does not do that,
``is_adopting`` is False and there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection
from pathlib import Path

from rankwire.clock import REAL_TIME
from rankwire.launch.reaper import DEAD, Reaper, descendants, send_signal

_PR_SET_CHILD_SUBREAPER = 36
# Seconds between two looks; the dead only take up a process id each.
_COLLECT_EVERY = 0.5


class Subreaper:
    """Finds and ends what ranks have started. Adopts from its construction until ``close``.

    Args:
        reaper: Is told of who was adopted.
    """

    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper
        # The caller, or what was this process before, may have children of its own: without
        # knowing them, none is taken for a stray.
        self.is_adopting = _can_list_children() and _set_subreaper(True)
        self._others = {reaper.pid, *_children()}
        self._adopted: set[int] = set()  # and told to the reaper
        self._collect_at = 0.0

    def find(self, groups: Collection[int]) -> list[int]:
        """Return who descends from this process, is in none of these groups, and runs.

        Args:
            groups: The ranks' process groups, which are ended as such.
        """
        if not self.is_adopting or not set(_children()) - self._others:
            return []
        return [
            pid
            for pid, group, state in descendants([os.getpid()], but=self._others)
            if group not in groups and state not in DEAD
        ]

    def send(self, number: int, groups: Collection[int]) -> bool:
        """Send a signal to all of them; return whether there was any."""
        found = self.find(groups)
        for pid in found:
            send_signal(os.kill, pid, number)
        return bool(found)

    def collect(self, ranks: Collection[int]) -> None:
        """Collect adopted processes that have ended, and tell the reaper of the others.

        Done now and then; ranks, and what is in their groups, are left alone.
        """
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
            self._reaper.disown(pid)
        for pid in alive - self._adopted:
            self._reaper.adopt(pid)
        self._adopted = alive

    def close(self) -> None:
        """Adopt no more. Idempotent."""
        if self.is_adopting:
            _set_subreaper(False)


def _set_subreaper(is_wanted: bool) -> bool:
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux
        return False
    return bool(prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_wanted), 0, 0, 0) == 0)


def _can_list_children() -> bool:
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has ended, or a kernel without it
            found += map(int, path.read_text().split())
    return found
