"""Wait for output, signals, connections and threads in one thread with one selector."""

from __future__ import annotations

import contextlib
import errno
import math
import signal
from collections.abc import Callable, Iterable, Iterator

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.launch.output import Output

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Wrappers forward the SIGINT that the terminal also sent to the launcher: that is one Ctrl-C.
_ECHO = 0.5
# Seconds that a reader of our output gets for the last lines, even if the user is impatient.
_LEAST_PATIENCE = 0.2
# Check the processes at least this often, without any event.
_MAX_SLEEP = 1.0


class Loop:
    """Wait for events and call the handlers in the selector's data. For one thread."""

    def __init__(
        self,
        selector: runtime.BaseSelector,
        take_signals: Callable[[], list[int]],
        output: Output,
    ) -> None:
        self.selector = selector
        self.output = output
        self.on_turn: Callable[[], None] = lambda: None
        self._take_signals = take_signals
        self._received_at = -math.inf
        self._has_told_trouble = False

    def turn(self, timeout: float) -> list[int]:
        """Wait for events, at most ``timeout`` seconds; return signals that ask to end."""
        for key, _ in self.selector.select(min(max(timeout, 0.0), _MAX_SLEEP)):
            # An earlier handler may have unregistered this one.
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        asked = []
        for number in self._take_signals():
            if number in STOPPING and REAL_TIME.now() - self._received_at >= _ECHO:
                self._received_at = REAL_TIME.now()
                asked.append(number)
        self.output.refresh()
        self.on_turn()
        return asked

    def new_stdout_trouble(self, where: str = "") -> tuple[str, int] | None:
        """Return, once, why stdout cannot be written to and the exit code for that; else None."""
        trouble = self.output.stdout_trouble
        if self._has_told_trouble or trouble is None:
            return None
        self._has_told_trouble = True
        text = f"stdout{where} cannot be written to any more ({trouble.strerror})"
        code = 128 + signal.SIGPIPE if trouble.errno == errno.EPIPE else 1
        return text, code

    def write_rest(self, code: int, *, patience: float = math.inf) -> int:
        """Write the remaining output for ``patience`` seconds; a signal ends the wait too."""
        self.on_turn = lambda: None
        end = REAL_TIME.now() + max(patience, _LEAST_PATIENCE)
        while True:
            if (trouble := self.new_stdout_trouble()) is not None:
                text, code_for_it = trouble
                self.output.say(text, "bold red")
                code = code or code_for_it
            if self.output.is_written or REAL_TIME.now() >= end or self.turn(end - REAL_TIME.now()):
                break
        self.output.drop_rest()
        return code


@contextlib.contextmanager
def collected_signals(
    selector: runtime.BaseSelector, numbers: Iterable[int]
) -> Iterator[Callable[[], list[int]]]:
    """Yield a function that returns the signals since its last call. Main thread only.

    Signals wake ``selector``. Several of one kind may count as one. An ignored signal stays
    ignored, as ``nohup`` and background shells expect.
    """
    with contextlib.ExitStack() as stack:
        reader, writer = (stack.enter_context(end) for end in runtime.socketpair())
        reader.setblocking(False)
        writer.setblocking(False)
        for number in numbers:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                # The interpreter writes the number to the wakeup socket.
                signal.signal(number, lambda number, frame: None)
                stack.callback(signal.signal, number, before)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, previous)
        selector.register(reader, runtime.EVENT_READ, lambda: None)
        stack.callback(selector.unregister, reader)

        def take() -> list[int]:
            with contextlib.suppress(BlockingIOError):
                return list(reader.recv(4096))
            return []

        yield take
