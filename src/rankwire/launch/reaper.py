"""End the ranks of a launcher that was killed.

The reaper is a process of the standard library alone: ``python -I -S reaper.py GRACE``. It reads
lines from stdin: the process id of each started rank; ``+`` and the id of each adopted process;
``-`` and one of these ids when the process is gone and the id may be reused; and ``done`` when all
have ended. If the pipe ends without ``done``, the launcher is dead: the reaper sends SIGTERM, and
SIGKILL after GRACE seconds, to the ranks' process groups, adopted processes and descendants.

If the reaper is killed too, the kernel ends the ranks. It and the launcher hold the writing end of
a pipe, and each rank inherits a *leash*: a reading end with ``O_ASYNC`` whose owner is the rank's
process group and whose signal is SIGKILL, sent when the last writer is gone. A rank that closes
descriptors which it did not open loses its leash.

A parent-death signal (``PR_SET_PDEATHSIG``) does not suffice: it leaves no grace or can be ignored,
it does not reach the rank's children, and it needs code between fork and exec.
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

DEAD = (b"Z", b"X")  # states of ended processes that were not collected


class Reaper:
    """Starts the reaper and reports ranks to it; leave the ``with`` block when all are gone."""

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
            start_new_session=True,  # a signal to the launcher's group must not end it
        )
        self.pid = self._process.pid

    @contextlib.contextmanager
    def new_leash(self) -> Iterator[int | None]:
        """Yield a descriptor for a rank to inherit, or None without /proc."""
        try:
            # Not a duplicate: each rank's leash has another owner.
            leash = os.open(f"/proc/self/fd/{self._leash}", os.O_RDONLY)
        except OSError:
            yield None
            return
        try:
            yield leash
        finally:
            os.close(leash)

    def watch(self, pid: int, leash: int | None) -> None:
        """End ``pid`` and its process group if the launcher dies."""
        self._write(f"{pid}\n")
        if leash is not None and hasattr(fcntl, "F_SETSIG"):
            with contextlib.suppress(OSError):  # a kernel that emulates Linux
                fcntl.fcntl(leash, fcntl.F_SETOWN, -pid)
                fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)

    def forget(self, pid: int) -> None:
        """Report that ``pid`` is gone, and its process group if it was a rank."""
        self._write(f"-{pid}\n")

    def adopt(self, pid: int) -> None:
        """End the adopted process ``pid`` if the launcher dies."""
        self._write(f"+{pid}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("done\n")
        self.close()

    def close(self) -> None:
        """Wait for the reaper's end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._leash)
        os.close(self._hold)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed; the job continues without it
            self._process.stdin.write(line.encode())


def _loader_settings() -> dict[str, str]:
    # An interpreter may not start without these. The rest of the environment may contain secrets.
    return {name: value for name, value in os.environ.items() if name.startswith(("LD_", "DYLD_"))}


def keep(grace: float) -> None:
    """Run as the reaper: read lines until ``done``, or end the remaining processes."""
    is_rank: dict[int, bool] = {}  # by process id; else it was adopted
    for line in sys.stdin:
        if line == "done\n":
            return
        number = int(line)
        if number < 0:
            del is_rank[-number]
        else:
            is_rank[number] = not line.startswith("+")
    end = time.monotonic() + grace
    groups = [pid for pid in is_rank if is_rank[pid]]
    outside = [pid for pid in is_rank if not is_rank[pid]]
    young = descendants(is_rank)  # before SIGTERM makes some of them orphans
    outside += [pid for pid, group, _ in young if group not in groups]
    left = [(os.killpg, group) for group in groups] + [(os.kill, pid) for pid in outside]
    left = [one for one in left if send_signal(*one, signal.SIGTERM)]
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [one for one in left if send_signal(*one, 0)]
    for one in left:
        send_signal(*one, signal.SIGKILL)


def send_signal(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Send a signal by ``os.kill`` or ``os.killpg``; return whether the target exists."""
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def families() -> dict[int, list[tuple[int, int, bytes]]]:
    """Return the process id, group and state of all processes, by parent."""
    found: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):  # the process ended meanwhile
            with open(f"/proc/{pid}/stat", "rb") as file:
                # "pid (name) state parent group ...", where the name may contain anything
                state, parent, group = file.read().rpartition(b")")[2].split()[:3]
            found[int(parent)].append((int(pid), int(group), state))
    return found


def descendants(
    ancestors: Iterable[int], but: Collection[int] = ()
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the descendants of these processes, except those in ``but`` and their descendants."""
    children, parents = families(), list(ancestors)
    while parents:
        for pid, group, state in children[parents.pop()]:
            if pid not in but:
                parents.append(pid)
                yield pid, group, state


if __name__ == "__main__":
    keep(float(sys.argv[1]))
