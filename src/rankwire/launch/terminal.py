"""The terminal of a launcher, lent to the one rank that is debugged.

The rank's process group becomes the one in the foreground: it reads what is typed, and Ctrl-C goes
to it, which a debugger takes for an interrupt of the program. When the rank has ended, the launcher
has the terminal again. Without a terminal there is nothing to lend.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_STDIN = 0


class Terminal:
    """Who is in the foreground. One thread."""

    def __init__(self) -> None:
        self._owner: int | None = None  # the group that had it before

    def give(self, group: int) -> None:
        """Put a process group of this session in the foreground."""
        with contextlib.suppress(OSError):  # no terminal, or not ours
            owner = os.tcgetpgrp(_STDIN)
            with _background_may_change_it():
                os.tcsetpgrp(_STDIN, group)
            self._owner = owner
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGCONT)  # it may have read too early, which has stopped it

    def take_back(self) -> None:
        """Put the group in the foreground that was there before. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            with contextlib.suppress(OSError), _background_may_change_it():
                os.tcsetpgrp(_STDIN, owner)


@contextlib.contextmanager
def _background_may_change_it() -> Iterator[None]:
    """Keep the kernel from stopping this process because it is in the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
