"""Signals as events of a selector, instead of interruptions at any line of the launcher."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def collected_signals(
    selector: selectors.BaseSelector, numbers: Iterable[int]
) -> Iterator[Callable[[], list[int]]]:
    """Collect ``numbers`` and wake ``selector`` for each. Main thread only.

    What it gives returns those that came since the last time, in order of arrival; several of one
    kind may count as one. A signal that was ignored stays ignored: ``nohup`` and shells in the
    background rely on it.
    """
    with contextlib.ExitStack() as stack:
        reader, writer = (stack.enter_context(end) for end in socket.socketpair())
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

        def take() -> list[int]:
            with contextlib.suppress(BlockingIOError):
                return list(reader.recv(4096))
            return []

        yield take
