"""The ranks' output on the launcher's own: whole lines, each with the rank it came from.

``Sink`` is one of the launcher's outputs, ``Stream`` one pipe of one rank, and ``Output`` joins
them on the launcher's selector. Nothing here starts, stops or judges a rank.

Nothing here blocks either: the launcher must answer Ctrl-C while ``less`` at the other end of its
stdout does not read. When too much waits for an output, the ranks that write to it are no longer
read, so that they wait, as they would with that output as their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import IO, BinaryIO

from rich.console import Console
from rich.text import Text

from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.launch.lines import LineSplitter

__all__ = ["Output", "Sink", "Stream"]

# The capacity of a Linux pipe, so one read empties it.
_READ_NBYTES = 64 * 1024
# POSIX: a pipe that poll() calls writable takes this much without blocking.
_WRITE_NBYTES = select.PIPE_BUF
# What may wait for one output before its ranks are made to wait, and when they go on.
_SINK_HIGH_NBYTES = 1024 * 1024
_SINK_LOW_NBYTES = 256 * 1024
# Enough for the traceback of a deep call; lines beyond a screen's width are cut.
_TAIL_LINES = 60
_TAIL_LINE_CHARACTERS = 500
# What is further up than this on a screen has to be looked for.
_SCREEN_LINES = 40
# What takes no longer is not worth a line, and a line each second fills a log.
REMIND_AFTER = 5.0
REMIND_EVERY = 30.0
_ERASE = b"\r\x1b[K"
# Red is left for errors.
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")

Handler = Callable[[], None]


class Sink:
    """One of the launcher's own outputs."""

    def __init__(self, console: Console, fd: int) -> None:
        self._console = console
        self.fd = fd
        self.is_broken = False
        self.pending = bytearray()
        self.lines = 0
        self._status = ""

    def put(self, data: bytes) -> None:
        """Queue ``data``, which is whole lines."""
        if data and not self.is_broken:
            self.show_status("")
            self.pending += data
            self.lines += data.count(b"\n")

    def show_status(self, text: str) -> None:
        """Show ``text`` below all lines, on a terminal; it goes when the next line comes."""
        if text == self._status or self.is_broken:
            return
        # Never behind the last column: the terminal would begin another line.
        width = self._console.width - 1
        self.pending += _ERASE + (self.render(text[:width], "dim") if text else b"")
        self._status = text

    @property
    def is_terminal(self) -> bool:
        """Whether someone watches who can see a line change."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def write(self) -> None:
        """Write what the output takes without blocking; call when it is writable."""
        try:
            # A copy of the chunk: a view would forbid the deletion.
            written = os.write(self.fd, bytes(self.pending[:_WRITE_NBYTES]))
        except BlockingIOError:
            return
        except OSError:  # the reader is gone, or the disk is full
            self.is_broken = True
            self.pending.clear()
        else:
            del self.pending[:written]

    def render(self, text: str, style: str) -> bytes:
        """Return ``text`` as this output shows it: rich knows of terminals and ``NO_COLOR``."""
        with self._console.capture() as capture:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
        return capture.get().encode()


class Stream:
    """One pipe of one rank, on its way to a sink."""

    def __init__(
        self,
        pipe: IO[bytes],
        sink: Sink,
        prefix: bytes,
        log: BinaryIO | None,
        name: str = "a rank",
    ) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.sink = sink
        self.is_paused = False
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._prefix = prefix
        self._log = log
        self._name = name
        self._last_line = 0
        self._splitter = LineSplitter()

    def read(self) -> int | None:
        """Take what the pipe holds; return how much, 0 at its end, None if there is nothing now."""
        try:
            data = os.read(self.pipe.fileno(), _READ_NBYTES)
        except BlockingIOError:
            return None
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:  # a full disk stops the log, not the job
                self._log = None
                text = f"rankwire: the log of {self._name} ends here: {error}\n"
                self.sink.put(text.encode())
        self._put(self._splitter.feed(data) if data else self._splitter.finish())
        return len(data)

    def finish(self) -> None:
        """Pass on an unfinished last line, and close."""
        self._put(self._splitter.finish())
        self.pipe.close()

    def _put(self, lines: list[bytes]) -> None:
        texts = [line.decode("utf-8", "replace") for line in lines]
        self.tail.extend(text[:_TAIL_LINE_CHARACTERS] for text in texts[-_TAIL_LINES:])
        self.sink.put(b"".join(self._prefix + text.encode() + b"\n" for text in texts))
        if texts:
            self._last_line = self.sink.lines

    @property
    def is_in_view(self) -> bool:
        """Whether the last line is not far above what was written to the sink since."""
        return self.sink.lines - self._last_line < _SCREEN_LINES


class Output:
    """All output of a job. One thread; handlers in the selector's data are called by its owner.

    Args:
        selector: Where to register; whoever owns it calls ``key.data()`` for each event.
        has_prefix: Whether lines begin with ``[rank N]``.
        log_dir: Where to write each rank's bytes, unchanged, as ``rank_N.log``.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        has_prefix: bool = True,
        log_dir: Path | None = None,
    ) -> None:
        self._selector = selector
        self._has_prefix = has_prefix
        self._log_dir = log_dir
        self._stdout = Sink(Console(file=sys.stdout), 1)
        self._stderr = Sink(Console(file=sys.stderr), 2)
        if self._stderr.is_terminal and _are_one_file(1, 2):
            # One queue for one screen: lines of both must not meet the status line.
            self._stdout = self._stderr
        self._remind_at = monotonic() + REMIND_AFTER
        self._streams: list[Stream] = []
        self._errors: dict[int, Stream] = {}
        self._closing = contextlib.ExitStack()
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(f"--log-dir {log_dir}: {error.strerror}") from error

    def attach(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Read both pipes of a rank from now on; they are closed here."""
        log = self._open_log(rank)
        for pipe, sink in ((stdout, self._stdout), (stderr, self._stderr)):
            prefix = b""
            if self._has_prefix:
                prefix = sink.render(f"[rank {rank}]", _COLORS[rank % len(_COLORS)]) + b" "
            stream = Stream(pipe, sink, prefix, log, f"rank {rank}, {self.log_of(rank)},")
            self._streams.append(stream)
            self._selector.register(pipe, selectors.EVENT_READ, self._reader(stream))
        self._errors[rank] = stream

    def say(self, text: str, style: str = "bold") -> None:
        """Write a line of the launcher itself to stderr."""
        self._stderr.put(self._stderr.render(f"rankwire: {text}", style) + b"\n")
        self._balance(self._stderr)

    def quote(self, lines: list[str]) -> None:
        """Write lines of a rank to stderr once more, as part of what the launcher says."""
        self._stderr.put("".join(f"    {line}\n" for line in lines).encode())
        self._balance(self._stderr)

    def show_status(self, text: str) -> None:
        """Show a line below all others, if stderr is a terminal that keeps up; "" removes it."""
        if self._stderr.is_terminal and (not text or not self._stderr.pending):
            self._stderr.show_status(text)
            self._balance(self._stderr)

    def remind(self, text: str) -> None:
        """Say now and then what is waited for, where no status line can; call it as often."""
        if not self._stderr.is_terminal and monotonic() >= self._remind_at:
            self._remind_at = monotonic() + REMIND_EVERY
            self.say(text)

    def last_errors(self, rank: int) -> list[str]:
        """Return the last lines that ``rank`` wrote to its stderr."""
        return list(self._errors[rank].tail) if rank in self._errors else []

    def is_in_view(self, rank: int) -> bool:
        """Whether what ``rank`` wrote to its stderr was shown here, and not long ago."""
        return rank in self._errors and self._errors[rank].is_in_view

    def log_of(self, rank: int) -> Path | None:
        """Return where a rank's output is written besides, as an absolute path; None if nowhere."""
        return None if self._log_dir is None else (self._log_dir / f"rank_{rank}.log").absolute()

    def take_rest(self) -> None:
        """Take what the pipes still hold and end the reading, without waiting for their end.

        For when the ranks are gone: a process that has left its rank's session may hold a pipe
        open for ever.
        """
        for stream in list(self._streams):
            # At most what a pipe can be enlarged to without privileges.
            for _ in range(16):
                if not stream.read():
                    break
            self._end(stream)

    @property
    def is_stdout_broken(self) -> bool:
        """Whether nobody reads our stdout any more."""
        return self._stdout.is_broken

    @property
    def is_written(self) -> bool:
        """Whether all that was read has been written."""
        return not self._stdout.pending and not self._stderr.pending

    def flush(self, seconds: float) -> None:
        """Wait until all is written, at most so long."""
        end = Deadline(seconds)
        while not self.is_written and not end.expired:
            for key, _ in self._selector.select(end.remaining()):
                key.data()

    def close(self) -> None:
        """Close pipes and logs, whatever they still hold. Idempotent."""
        for stream in list(self._streams):
            self._end(stream)
        self._closing.close()

    def _open_log(self, rank: int) -> BinaryIO | None:
        path = self.log_of(rank)
        if path is None:
            return None
        try:
            # A rank that is started again goes on where it ended. Always appending, because a rank
            # does so too when it falls (see ``tracebacks``).
            fresh = 0 if rank in self._errors else os.O_TRUNC
            file = open(
                path,
                "ab",
                buffering=0,
                opener=lambda name, flags: os.open(name, flags | fresh, 0o666),
            )
            return self._closing.enter_context(file)
        except OSError as error:
            raise ConfigurationError(f"the log {path}: {error.strerror}") from error

    def _reader(self, stream: Stream) -> Handler:
        def read() -> None:
            if stream.is_paused:
                return  # by another stream, in the same turn of the selector
            if stream.read() == 0:
                self._end(stream)
            self._balance(stream.sink)

        return read

    def _writer(self, sink: Sink) -> Handler:
        def write() -> None:
            sink.write()
            self._balance(sink)

        return write

    def _end(self, stream: Stream) -> None:
        self._streams.remove(stream)
        if not stream.is_paused:
            self._selector.unregister(stream.pipe)
        stream.finish()
        self._balance(stream.sink)

    def _balance(self, sink: Sink) -> None:
        """Wait for a sink while something waits for it, and for its ranks while it keeps up."""
        is_waiting = sink.fd in self._selector.get_map()
        if sink.pending and not is_waiting:
            self._selector.register(sink.fd, selectors.EVENT_WRITE, self._writer(sink))
        elif is_waiting and not sink.pending:
            self._selector.unregister(sink.fd)
        for stream in self._streams:
            if stream.sink is not sink:
                continue
            if not stream.is_paused and len(sink.pending) > _SINK_HIGH_NBYTES:
                self._selector.unregister(stream.pipe)
                stream.is_paused = True
            elif stream.is_paused and len(sink.pending) < _SINK_LOW_NBYTES:
                self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))
                stream.is_paused = False


def _are_one_file(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same place."""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:  # one is closed
        return False
