"""The ranks' output on the launcher's own: whole lines, each with the rank it came from.

``Sink`` is one of the launcher's outputs, ``RankOutput`` one pipe of one rank, and ``Output`` joins
them on the launcher's selector. Nothing here starts, stops or judges a rank.

Nothing here blocks either: the launcher must answer Ctrl-C while ``less`` at the other end of its
stdout does not read. When too much waits for an output, the ranks that write to it are no longer
read, so that they wait, as they would with that output as their own. What in the end no reader took
is counted by rank, and said.
"""

from __future__ import annotations

import io
import os
import select
import selectors
import sys
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from rich.console import Console
from rich.text import Text

from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.launch.lines import LineSplitter
from rankwire.launch.logfiles import Log, LogFolder

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
# What one line of the launcher may wait for a reader that took no other.
_LAST_WORD = 0.2
# What is further up than this on a screen has to be looked for.
_SCREEN_LINES = 40
# What takes no longer is not worth a line, and a line each second fills a log.
REMIND_AFTER = 5.0
REMIND_EVERY = 30.0
_ERASE = b"\r\x1b[K"
# Red is left for errors.
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")


class _Likeness(io.StringIO):
    """Tells rich whether an output is a terminal, and takes what rich would write there.

    rich writes even what it captures, as an empty text: a full disk refuses that too.
    """

    def __init__(self, file: TextIO | None) -> None:
        super().__init__()
        self._file = file  # None if it was closed when the interpreter started

    def isatty(self) -> bool:
        return self._file is not None and self._file.isatty()


class Sink:
    """One of the launcher's own outputs.

    Attributes:
        fd: Where it leads.
        pending: What waits to be written.
        trouble: Why nothing can be written any more, or None.
        lost: How many lines of each rank were not written and will not be.
    """

    def __init__(self, file: TextIO | None, fd: int) -> None:
        self._console = Console(file=_Likeness(file))
        self.fd = fd
        self.trouble: OSError | None = None
        self.pending = bytearray()
        self.lost: Counter[int] = Counter()
        # Whose the pending bytes are, in their order; None for the launcher's own.
        self._owners: deque[tuple[int | None, int]] = deque()
        self._is_inside_line = False
        self.lines = 0
        self._status = ""

    def put(self, data: bytes, rank: int | None = None) -> None:
        """Queue ``data``, which is whole lines, of a rank or of the launcher itself."""
        if not data:
            return
        self.show_status("")
        self._queue(data, rank)
        self.lines += data.count(b"\n")
        if self.trouble is not None:
            self.drop()

    def show_status(self, text: str) -> None:
        """Show ``text`` below all lines, on a terminal; it goes when the next line comes."""
        if text == self._status or self.trouble is not None:
            return
        # Never behind the last column: the terminal would begin another line.
        width = self._console.width - 1
        self._queue(_ERASE + (self.render(text[:width], "dim") if text else b""), None)
        self._status = text

    def drop(self) -> None:
        """Give up what waits, and count the lines."""
        begin = 0
        for rank, nbytes in self._owners:
            if rank is not None:
                self.lost[rank] += self.pending.count(b"\n", begin, begin + nbytes)
            begin += nbytes
        self._owners.clear()
        self.pending.clear()
        if self._is_inside_line:  # what is said next begins a line of its own
            self._queue(b"\n", None)

    @property
    def is_terminal(self) -> bool:
        """Whether a person may watch, who can see a line change."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def write(self) -> None:
        """Write what the output takes without blocking; call when it is writable."""
        try:
            # A copy of the chunk: a view would forbid the deletion.
            written = os.write(self.fd, bytes(self.pending[:_WRITE_NBYTES]))
        except BlockingIOError:
            return
        except OSError as error:  # the reader is gone, or the disk is full
            self.trouble = error
            self._is_inside_line = False
            self.drop()
        else:
            self._is_inside_line = self.pending[written - 1 : written] != b"\n"
            del self.pending[:written]
            self._disown(written)

    def render(self, text: str, style: str) -> bytes:
        """Return ``text`` as this output shows it: rich knows of terminals and ``NO_COLOR``."""
        with self._console.capture() as capture:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
        return capture.get().encode()

    def _queue(self, data: bytes, rank: int | None) -> None:
        self.pending += data
        before = 0
        if self._owners and self._owners[-1][0] == rank:
            _, before = self._owners.pop()
        self._owners.append((rank, before + len(data)))

    def _disown(self, nbytes: int) -> None:
        while nbytes:
            rank, owned = self._owners.popleft()
            if owned > nbytes:
                self._owners.appendleft((rank, owned - nbytes))
            nbytes -= min(owned, nbytes)


class RankOutput:
    """One pipe of one rank, on its way to a sink."""

    def __init__(
        self, rank: int, pipe: IO[bytes], sink: Sink, prefix: bytes, log: Log | None
    ) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.rank = rank
        self.pipe = pipe
        self.sink = sink
        self.is_paused = False
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._prefix = prefix
        self._log = log
        self._last_line = 0
        self._splitter = LineSplitter()

    def read(self) -> int | None:
        """Take what the pipe holds; return how much, 0 at its end, None if there is nothing now."""
        try:
            data = os.read(self.pipe.fileno(), _READ_NBYTES)
        except BlockingIOError:
            return None
        if self._log is not None:
            self._log.write(data)
        self._put(self._splitter.feed(data) if data else self._splitter.finish())
        return len(data)

    def finish(self) -> None:
        """Pass on an unfinished last line, and close."""
        self._put(self._splitter.finish())
        self.pipe.close()

    def _put(self, lines: list[bytes]) -> None:
        texts = [line.decode("utf-8", "replace") for line in lines]
        self.tail.extend(text[:_TAIL_LINE_CHARACTERS] for text in texts[-_TAIL_LINES:])
        self.sink.put(b"".join(self._prefix + text.encode() + b"\n" for text in texts), self.rank)
        if texts:
            self._last_line = self.sink.lines

    @property
    def is_in_view(self) -> bool:
        """Whether the last line is not far above what was written to the sink since."""
        return self.sink.lines - self._last_line < _SCREEN_LINES


class Output:
    """All output of a job. One thread; handlers in the selector's data are called by its owner.

    Args:
        selector: Where to register; its owner calls ``key.data()`` for each event.
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
        self._logs = LogFolder(log_dir) if log_dir is not None else None
        self._stdout = Sink(sys.stdout, 1)
        self._stderr = Sink(sys.stderr, 2)
        if self._stderr.is_terminal and _are_one_file(1, 2):
            # One queue for one screen: lines of both must not meet the status line.
            self._stdout = self._stderr
        self._remind_at = REAL_TIME.now() + REMIND_AFTER
        self._streams: list[RankOutput] = []
        self._errors: dict[int, RankOutput] = {}

    def attach(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Read both pipes of a rank from now on; they are closed here."""
        log = None
        if self._logs is not None:
            named = f"the log of rank {rank}, {self.log_of(rank)},"
            log = Log(self._logs.open(rank), named, self.say)
        for pipe, sink in ((stdout, self._stdout), (stderr, self._stderr)):
            prefix = b""
            if self._has_prefix:
                prefix = sink.render(f"[rank {rank}]", _COLORS[rank % len(_COLORS)]) + b" "
            stream = RankOutput(rank, pipe, sink, prefix, log)
            self._streams.append(stream)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, stream))
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
        if not self._stderr.is_terminal and REAL_TIME.now() >= self._remind_at:
            self._remind_at = REAL_TIME.now() + REMIND_EVERY
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
    def stdout_trouble(self) -> OSError | None:
        """Why our stdout takes nothing any more, or None."""
        return self._stdout.trouble

    @property
    def is_written(self) -> bool:
        """Whether all that was read has been written."""
        return not self._stdout.pending and not self._stderr.pending

    def drop_rest(self) -> None:
        """Give up what is not written yet, and say how many lines of which rank were lost."""
        lost: Counter[int] = Counter()
        for sink in {self._stdout, self._stderr}:
            sink.drop()
            lost += sink.lost
        if not lost:
            return
        where = self._stdout if self._stderr.trouble else self._stderr
        each = (f"{n} line{'s'[: n > 1]} of rank {rank}" for rank, n in sorted(lost.items()))
        where.put(where.render(f"rankwire: not written: {', '.join(each)}", "bold red") + b"\n")
        self._balance(where)
        end = Deadline(_LAST_WORD, REAL_TIME)
        while where.pending and not end.expired:
            for key, _ in self._selector.select(end.remaining()):
                key.data()

    def close(self) -> None:
        """Close pipes and logs, whatever they still hold. Idempotent."""
        for stream in list(self._streams):
            self._end(stream)
        if self._logs is not None:
            self._logs.close()

    def _read(self, stream: RankOutput) -> None:
        if stream.is_paused:
            return  # by another stream, in the same turn of the selector
        if stream.read() == 0:
            self._end(stream)
        self._balance(stream.sink)

    def _write(self, sink: Sink) -> None:
        sink.write()
        self._balance(sink)

    def _end(self, stream: RankOutput) -> None:
        self._streams.remove(stream)
        if not stream.is_paused:
            self._selector.unregister(stream.pipe)
        stream.finish()
        self._balance(stream.sink)

    def _balance(self, sink: Sink) -> None:
        """Wait for a sink while something waits for it, and for its ranks while it keeps up."""
        is_waiting = sink.fd in self._selector.get_map()
        if sink.pending and not is_waiting:
            self._selector.register(sink.fd, selectors.EVENT_WRITE, partial(self._write, sink))
        elif is_waiting and not sink.pending:
            self._selector.unregister(sink.fd)
        for stream in self._streams:
            if stream.sink is not sink:
                continue
            if not stream.is_paused and len(sink.pending) > _SINK_HIGH_NBYTES:
                self._selector.unregister(stream.pipe)
                stream.is_paused = True
            elif stream.is_paused and len(sink.pending) < _SINK_LOW_NBYTES:
                self._selector.register(
                    stream.pipe, selectors.EVENT_READ, partial(self._read, stream)
                )
                stream.is_paused = False


def _are_one_file(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same place."""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:  # one is closed
        return False
