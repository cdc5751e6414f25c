"""The process that outlives a killed launcher: it ends the ranks that would be left alone.

Run as a script with nothing but the standard library: ``python -I -S reaper.py GRACE``. It reads
from stdin the process ids of the ranks, one a line, as they start, and again with a minus sign once
they are gone and their numbers may be others'; in the same way, after a ``+``, the processes that
the launcher has adopted (see ``strays``). The line ``done`` says that all have ended. The end of
the pipe without it says that the launcher is dead: then every rank's process group, what is
adopted, and what descends from these gets SIGTERM, and after GRACE seconds SIGKILL.

If the reaper is killed with the launcher, the kernel ends the ranks. Both hold the writing end of
one pipe, and each rank has a *leash*, a reading end with ``O_ASYNC`` whose owner is the rank's
process group and whose signal is SIGKILL: it is sent when the last writer is gone. A rank that
closes descriptors which it did not open has no leash.

A parent-death signal (``PR_SET_PDEATHSIG``) would not do: it comes when the launcher alone is dead,
so as SIGKILL it would leave no grace, and any other a rank may catch or ignore; what the rank
started does not get it; and it needs code between fork and exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Self

DEAD = (b"Z", b"X")  # states of processes that are only still to be collected


class Reaper:
    """The launcher's end: tell it of each rank, and leave the ``with`` block when all are gone."""

    def __init__(self, grace: float) -> None:
        self._leash, self._hold = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_loader_settings(),
            pass_fds=[self._hold],
            start_new_session=True,  # what ends the launcher's group must not end it
        )
        self.pid = self._process.pid

    @contextlib.contextmanager
    def new_leash(self) -> Iterator[int | None]:
        """Return a descriptor for a rank to inherit; None where the kernel has none for it."""
        try:
            # Not a copy: the owner of each rank's is another.
            leash = os.open(f"/proc/self/fd/{self._leash}", os.O_RDONLY)
        except OSError:
            yield None
            return
        try:
            yield leash
        finally:
            os.close(leash)

    def watch(self, pid: int, leash: int | None) -> None:
        """From now on end ``pid`` and its process group if the launcher dies."""
        self._write(f"{pid}\n")
        if leash is not None and hasattr(fcntl, "F_SETSIG"):
            with contextlib.suppress(OSError):  # a kernel that only looks like Linux
                fcntl.fcntl(leash, fcntl.F_SETOWN, -pid)
                fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)

    def forget(self, pid: int) -> None:
        """``pid`` and its process group are gone."""
        self._write(f"-{pid}\n")

    def adopt(self, pid: int) -> None:
        """From now on end ``pid`` too."""
        self._write(f"+{pid}\n")

    def disown(self, pid: int) -> None:
        """``pid`` is gone."""
        self._write(f"+-{pid}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("done\n")
        self.close()

    def close(self) -> None:
        """Wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._leash)
        os.close(self._hold)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            pass  # it was killed; the job goes on without


def _loader_settings() -> dict[str, str]:
    """Return all that the reaper needs of the environment, which may hold secrets.

    An interpreter with a shared library outside of the system's folders is not found without.
    """
    return {name: value for name, value in os.environ.items() if name.startswith(("LD_", "DYLD_"))}


def keep(grace: float) -> None:
    """Do the reaper's work."""
    groups: list[int] = []
    adopted: list[int] = []
    for line in sys.stdin:
        if line == "done\n":
            return
        kind = adopted if line.startswith("+") else groups
        number = int(line.removeprefix("+"))
        if number > 0:
            kind.append(number)
        else:
            kind.remove(-number)
    end = time.monotonic() + grace
    young = descendants(groups + adopted)  # while they are a family
    strays = adopted + [pid for pid, group, _ in young if group not in groups]
    left = [(os.killpg, group) for group in groups] + [(os.kill, pid) for pid in strays]
    left = [one for one in left if send_signal(*one, signal.SIGTERM)]
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [one for one in left if send_signal(*one, 0)]
    for one in left:
        send_signal(*one, signal.SIGKILL)


def send_signal(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Send a signal by ``os.kill`` or ``os.killpg``; return whether anyone was there."""
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def families() -> dict[int, list[tuple[int, int, bytes]]]:
    """Return the process id, group and state of all processes, by their parent."""
    found: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile
            with open(f"/proc/{pid}/stat", "rb") as file:
                # "pid (name) state parent group ...", and the name may hold anything
                state, parent, group = file.read().rpartition(b")")[2].split()[:3]
            found[int(parent)].append((int(pid), int(group), state))
    return found


def descendants(
    ancestors: Iterable[int], but: Collection[int] = ()
) -> Iterator[tuple[int, int, bytes]]:
    """Yield who descends from these, without those in ``but`` and theirs."""
    children, parents = families(), list(ancestors)
    while parents:
        for pid, group, state in children[parents.pop()]:
            if pid not in but:
                parents.append(pid)
                yield pid, group, state


if __name__ == "__main__":
    keep(float(sys.argv[1]))
