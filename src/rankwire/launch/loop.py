"""The launcher's loop: one thread and one selector for output, signals, links and other threads.

Whoever has something to wait for registers a handler with the selector; ``turn`` waits and calls
them. What a signal means is left to the caller, which gets those that ask the launcher to end.
"""

from __future__ import annotations

import math
import selectors
import signal
from collections.abc import Callable
from time import monotonic

from rankwire.launch.output import Output
from rankwire.launch.signals import SignalInbox

__all__ = ["STOPPING", "Loop"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Wrappers pass on the SIGINT that the terminal sent to the launcher as well: that is one Ctrl-C.
_ECHO = 0.5
# However long nothing happens, look at the processes themselves.
_MAX_SLEEP = 1.0


class Loop:
    """See the module. One thread.

    Attributes:
        selector: Handlers are the data of its keys.
        output: Where the launcher speaks.
        on_turn: Called after each turn.
    """

    def __init__(
        self, selector: selectors.BaseSelector, inbox: SignalInbox, output: Output
    ) -> None:
        self.selector = selector
        self.output = output
        self.on_turn: Callable[[], None] = lambda: None
        self._inbox = inbox
        self._received_at = -math.inf

    def turn(self, timeout: float) -> list[int]:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it.

        Returns:
            The signals that ask the launcher to end.
        """
        for key, _ in self.selector.select(min(max(timeout, 0.0), _MAX_SLEEP)):
            # A handler may have ended another one's registration in the same round.
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        asked = []
        for number in self._inbox.take():
            if number in STOPPING and monotonic() - self._received_at >= _ECHO:
                self._received_at = monotonic()
                asked.append(number)
        self.on_turn()
        return asked
