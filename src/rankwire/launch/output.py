"""Show the ranks' output on the launcher's stdout and stderr: whole lines, each with its rank.

Nothing here blocks: the launcher must handle Ctrl-C even while ``less`` does not read its stdout.
While too much output is queued, it does not read from the ranks that write it, so they wait.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rich.text import Text

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.launch.lines import InterruptFilter, PrintedErrors, RepeatFilter, StreamLines
from rankwire.launch.output_streams import HeldErrors, LogFolder, OutputQueue, RankOutput
from rankwire.texts import name_ranks

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Wrappers forward the SIGINT that the terminal also sent to the launcher: that is one Ctrl-C.
_ECHO = 0.5
# Seconds for a reader to read our last lines, even if the user is impatient.
_LEAST_PATIENCE = 0.2
_MAX_SLEEP = 1.0  # seconds between two checks of the processes
# Queued bytes at which to stop, and to resume, reading from the ranks of an output.
_QUEUE_HIGH_NBYTES = 1024 * 1024
_QUEUE_LOW_NBYTES = 256 * 1024
_LAST_WORD = 0.2  # seconds for the launcher's last line, if the reader has stopped reading
REMIND_AFTER, REMIND_EVERY = 5.0, 30.0  # seconds; a line each second would fill a log
# Seconds between two updates: each of 64 ranks may redraw its bar ten times a second.
_PROGRESS_EVERY = 0.1
# Without red, which is for errors.
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")


class Output:
    """Reads, prints and logs the output of all ranks of this host. For one thread.

    The owner of the selector calls ``key.data()`` for each event. A terminal shows a status line
    only with ``has_status``, which is off while a rank uses the terminal.
    """

    def __init__(
        self,
        selector: runtime.BaseSelector,
        *,
        has_prefix: bool = True,
        has_status: bool = True,
        log_dir: Path | None = None,
        folds_repeats: bool = True,
    ) -> None:
        self._selector = selector
        self._has_prefix = has_prefix
        self._has_status = has_status
        self.logs = LogFolder(log_dir, self.say) if log_dir is not None else None
        self._stdout = OutputQueue(sys.stdout, 1)
        self._stderr = OutputQueue(sys.stderr, 2)
        if self._stderr.is_terminal and os.path.sameopenfile(1, 2):
            # One queue for one screen, so that no line is written into the status line.
            self._stdout = self._stderr
        self._queues = {self._stdout: None, self._stderr: None}  # one if they are the same
        self._remind_at = REAL_TIME.now() + REMIND_AFTER
        self._progress_at = -math.inf
        self._streams: list[RankOutput] = []
        self._errors: dict[int, RankOutput] = {}
        self._printed = PrintedErrors() if folds_repeats else None
        self._held = HeldErrors(self._errors)

    def attach(self, rank: int, stdout: IO[bytes], stderr: IO[bytes], *, name: str = "") -> None:
        """Start to read both pipes of a rank, which this then owns; show ``name`` with it."""
        log = None
        if self.logs is not None:
            self.logs.open(rank)
            log = partial(self.logs.write, rank)
        if self._printed is not None and rank in self._errors:
            self._printed.clear()
        for pipe, queue in ((stdout, self._stdout), (stderr, self._stderr)):
            prefix = b""
            if self._has_prefix:
                who = f"rank {rank} {name}".rstrip()
                label = Text(f"[{who}]", _COLORS[rank % len(_COLORS)])
                prefix = queue.render(label) + b" "
            repeats = None
            if self._printed is not None and pipe is stderr:
                repeats = RepeatFilter(rank, self._printed)
            lines = StreamLines(redraws=self._has_status and queue.is_terminal)
            stream = RankOutput(rank, pipe, queue, prefix, log, lines, repeats)
            self._streams.append(stream)
            self._watch(stream)
        self._errors[rank] = stream

    def fold_interrupts(self) -> None:
        """Shorten the traceback of an interrupt to one line on all ranks."""
        for stream in self._errors.values():
            stream.fold = stream.fold or InterruptFilter()

    def detach(self, rank: int | None = None) -> None:
        """Read what the pipes of ended ranks hold, and close them: a daemon may keep them open."""
        for stream in [stream for stream in self._streams if rank in (None, stream.rank)]:
            # 16 reads empty the largest pipe that an unprivileged process can make.
            for _ in range(16):
                if not stream.read():
                    break
            self._end(stream)
        if rank is None:
            self._name_repeats()

    def say(self, text: str, style: str = "bold") -> None:
        """Print a line of the launcher to stderr."""
        self._name_repeats()
        self._say(self._stderr, text, style)

    def _say(self, queue: OutputQueue, text: str, style: str) -> None:
        queue.put(queue.render(Text(f"rankwire: {text}", style)) + b"\n")
        self._balance(queue)

    def quote(self, lines: list[str]) -> None:
        """Print lines of a rank, indented, as part of the launcher's output."""
        self._stderr.put("".join(f"    {line}\n" for line in lines).encode())
        self._balance(self._stderr)

    def show_status(self, text: str) -> None:
        """Show a line below all others if stderr is a terminal that keeps up; "" removes it."""
        is_shown = self._has_status and self._stderr.is_terminal
        if is_shown and (not text or not self._stderr.pending):
            self._stderr.show_status(text)
            self._balance(self._stderr)

    def remind(self, text: str) -> None:
        """Print occasionally what the launcher is waiting for, where there is no status line."""
        if not self._stderr.is_terminal and REAL_TIME.now() >= self._remind_at:
            self._remind_at = REAL_TIME.now() + REMIND_EVERY
            self.say(text)

    def last_errors(self, rank: int) -> list[str]:
        """Return the last lines that ``rank`` wrote to its stderr."""
        return list(self._errors[rank].tail) if rank in self._errors else []

    def is_in_view(self, rank: int) -> bool:
        """Return whether the last lines of ``rank`` on stderr are probably still on the screen."""
        return rank in self._errors and self._errors[rank].is_in_view

    def refresh(self) -> None:
        """Print errors that were held back long enough, and progress rows; called every turn."""
        for stream in list(self._held.streams):
            self._held.settle(stream)
            self._balance(stream.queue)
        if REAL_TIME.now() < self._progress_at:
            return
        self._progress_at = REAL_TIME.now() + _PROGRESS_EVERY
        for stream in self._streams:
            stream.show_progress()
        for queue in self._queues:
            queue.draw()
            self._balance(queue)

    def _name_repeats(self) -> None:
        for stream in list(self._held.streams):
            if stream.pipe.closed:
                self._held.settle(stream, waits=False)
                self._balance(stream.queue)
        for other, ranks in self._held.take_same().items():
            self.say(f"{name_ranks(sorted(ranks))} ended with the same error as rank {other}")

    @property
    def stdout_trouble(self) -> OSError | None:
        """Why stdout is no longer writable, or None."""
        return self._stdout.trouble

    @property
    def is_written(self) -> bool:
        """Whether nothing is queued."""
        return not any(queue.pending for queue in self._queues)

    def drop_rest(self) -> None:
        """Drop the queued output, and print how many lines of which ranks were lost."""
        lost: Counter[int] = Counter()
        for queue in self._queues:
            queue.drop()
            lost += queue.lost
        if not lost:
            return
        where = self._stdout if self._stderr.trouble else self._stderr
        each = (f"{n} line{'s'[: n > 1]} of rank {rank}" for rank, n in sorted(lost.items()))
        self._say(where, f"not written: {', '.join(each)}", "bold red")
        end = Deadline(_LAST_WORD, REAL_TIME)
        while where.pending and not end.expired:
            for key, _ in self._selector.select(end.remaining()):
                key.data()

    def close(self) -> None:
        """Close pipes and logs. Idempotent."""
        for stream in list(self._streams):
            self._end(stream)
        if self.logs is not None:
            self.logs.close()

    def _watch(self, stream: RankOutput) -> None:
        self._selector.register(stream.pipe, runtime.EVENT_READ, partial(self._read, stream))
        stream.is_paused = False

    def _read(self, stream: RankOutput) -> None:
        if stream.is_paused:
            return  # an earlier handler paused it in this turn
        if stream.read() == 0:
            self._end(stream)
        elif stream.repeats is not None and stream.repeats.is_holding:
            self._held.streams[stream] = None
        self._balance(stream.queue)

    def _end(self, stream: RankOutput) -> None:
        self._streams.remove(stream)
        if not stream.is_paused:
            self._selector.unregister(stream.pipe)
        stream.finish()
        self._held.settle(stream)
        self._balance(stream.queue)

    def _write(self, queue: OutputQueue) -> None:
        queue.write()
        self._balance(queue)

    def _balance(self, queue: OutputQueue) -> None:
        """Watch an output while data is queued, and read its ranks while it keeps up."""
        is_waiting = queue.fd in self._selector.get_map()
        if queue.pending and not is_waiting:
            self._selector.register(queue.fd, runtime.EVENT_WRITE, partial(self._write, queue))
        elif is_waiting and not queue.pending:
            self._selector.unregister(queue.fd)
        for stream in [stream for stream in self._streams if stream.queue is queue]:
            if not stream.is_paused and len(queue.pending) > _QUEUE_HIGH_NBYTES:
                self._selector.unregister(stream.pipe)
                stream.is_paused = True
            elif stream.is_paused and len(queue.pending) < _QUEUE_LOW_NBYTES:
                self._watch(stream)


@dataclass(eq=False)
class Loop:
    """Waits for output, signals, connections and threads with one selector. For one thread."""

    selector: runtime.BaseSelector
    take_signals: Callable[[], list[int]]
    output: Output
    on_turn: Callable[[], None] = lambda: None
    _received_at: float = -math.inf
    _has_told_trouble: bool = False

    def turn(self, timeout: float) -> list[int]:
        """Wait for events, at most ``timeout`` seconds; return the signals that ask to end."""
        for key, _ in self.selector.select(min(max(timeout, 0.0), _MAX_SLEEP)):
            # An earlier handler may have unregistered this one.
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        asked = []
        for number in self.take_signals():
            if number in STOPPING and REAL_TIME.now() - self._received_at >= _ECHO:
                self._received_at = REAL_TIME.now()
                asked.append(number)
        self.output.refresh()
        self.on_turn()
        return asked

    def new_stdout_trouble(self, where: str = "") -> tuple[str, int] | None:
        """Return once why stdout is no longer writable, and the exit code for that; else None."""
        trouble = self.output.stdout_trouble
        if self._has_told_trouble or trouble is None:
            return None
        self._has_told_trouble = True
        text = f"stdout{where} cannot be written to any more ({trouble.strerror})"
        code = 128 + signal.SIGPIPE if trouble.errno == errno.EPIPE else 1
        return text, code

    def write_rest(self, code: int, *, patience: float = math.inf) -> int:
        """Write the remaining output until a timeout or signal; return the exit code."""
        self.on_turn = lambda: None
        end = REAL_TIME.now() + max(patience, _LEAST_PATIENCE)
        while True:
            if (trouble := self.new_stdout_trouble()) is not None:
                self.output.say(trouble[0], "bold red")
                code = code or trouble[1]
            if self.output.is_written or REAL_TIME.now() >= end or self.turn(end - REAL_TIME.now()):
                break
        self.output.drop_rest()
        return code


@contextlib.contextmanager
def collected_signals(
    selector: runtime.BaseSelector, numbers: Iterable[int]
) -> Iterator[Callable[[], list[int]]]:
    """Yield a function that returns the signals since its last call. Main thread only.

    Signals wake ``selector``. Several of one kind may count as one. Ignored ones stay ignored.
    """
    with contextlib.ExitStack() as stack:
        reader, writer = ends = runtime.socketpair()
        for end in ends:
            stack.enter_context(end).setblocking(False)
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
