"""Debugging one rank: the launcher lends it the terminal; ``breakpoint()`` elsewhere says how.

The debugged rank's process group becomes the foreground group, so it reads what is typed and gets
Ctrl-C, which a debugger takes as an interrupt of the program. Other ranks pass a breakpoint and
continue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from rankwire.environment import DEBUG_RANK, RANK

# The value of PYTHONBREAKPOINT in ranks without a terminal. The interpreter imports it when the
# program first calls breakpoint(), so this module imports little.
HOOK = f"{__name__}.pass_by"

_STDIN = 0
_seen: set[tuple[str, int]] = set()


class Terminal:
    """The launcher's terminal and the process group that had it before. For one thread."""

    def __init__(self) -> None:
        self._owner: int | None = None

    def give(self, group: int) -> None:
        """Put a process group of this session in the foreground."""
        with contextlib.suppress(OSError):  # no terminal, or not ours
            owner = os.tcgetpgrp(_STDIN)
            with _sigttou_blocked():
                os.tcsetpgrp(_STDIN, group)
            self._owner = owner
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGCONT)  # the kernel stops it if it read before this

    def take_back(self) -> None:
        """Put the previous group back in the foreground. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            with contextlib.suppress(OSError), _sigttou_blocked():
                os.tcsetpgrp(_STDIN, owner)


@contextlib.contextmanager
def _sigttou_blocked() -> Iterator[None]:
    """Keep the kernel from stopping this process for changing the terminal in the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pass_by(*args: Any, **kwargs: Any) -> None:
    """Print, once for each place, how to debug this rank; the program continues."""
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
