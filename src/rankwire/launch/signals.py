"""Signals as events of a selector, instead of interruptions at any line of the launcher."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterable, Iterator


class SignalInbox:
    """The signals that came and were not taken yet."""

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def take(self) -> list[int]:
        """Return their numbers in order of arrival; several of one kind may count as one."""
        with contextlib.suppress(BlockingIOError):
            return list(self._reader.recv(4096))
        return []


@contextlib.contextmanager
def collected_signals(
    selector: selectors.BaseSelector, numbers: Iterable[int]
) -> Iterator[SignalInbox]:
    """Collect ``numbers`` in an inbox and wake ``selector`` for each. Main thread only.

    A signal that was ignored stays ignored: ``nohup`` and shells in the background rely on it.
    """
    with contextlib.ExitStack() as stack:
        reader, writer = socket.socketpair()
        stack.callback(reader.close)
        stack.callback(writer.close)
        reader.setblocking(False)
        writer.setblocking(False)
        for number in numbers:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                # The interpreter writes the number to the wakeup socket; that is all we need.
                signal.signal(number, lambda number, frame: None)
                stack.callback(signal.signal, number, before)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, previous)
        selector.register(reader, selectors.EVENT_READ, lambda: None)
        stack.callback(selector.unregister, reader)
        yield SignalInbox(reader)
