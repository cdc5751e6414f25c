"""Read a rank's pipe, log it, and queue its lines for the launcher's outputs.

On a terminal, progress rows and the status line are below all lines. Nothing here blocks but writes
to a log; ``Output`` decides when to read and write.

In a shared folder such as ``/tmp``, another user may have planted a link to a file of this user, a
readable file, or a FIFO. So a log is a new file of mode 0600, created through the folder's
descriptor, and replaces only a regular file of this user without hard links. The path may contain
links of this user, but not of other users in folders where others can write.
"""

from __future__ import annotations

import io
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from rich.console import Console
from rich.text import Text

from rankwire import runtime
from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError
from rankwire.launch.lines import InterruptFilter, RepeatFilter, StreamLines

_READ_NBYTES = 64 * 1024  # the default capacity of a Linux pipe, so one read empties it
_TAIL_LINES = 60  # enough for the traceback of a deep call
_TAIL_LINE_CHARACTERS = 500
# Seconds to hold back a repeated error: most processes exit sooner after their last error.
_HOLD = 2.0
_SCREEN_LINES = 40  # that a user sees without scrolling
# POSIX: a pipe that poll() reports as writable accepts this much without blocking.
_WRITE_NBYTES = runtime.PIPE_BUF
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ADVICE = "remove it, or choose another --log-dir"


class _Likeness(io.StringIO):
    """Tells rich whether an output is a terminal; rich's own writes fail on a full disk."""

    def __init__(self, file: TextIO | None) -> None:
        super().__init__()
        self._file = file  # None if closed when the interpreter started

    def isatty(self) -> bool:
        return self._file is not None and self._file.isatty()


class OutputQueue:
    """Queues data for one of the launcher's outputs."""

    def __init__(self, file: TextIO | None, fd: int) -> None:
        self._console = Console(file=_Likeness(file))
        self.fd = fd
        self.trouble: OSError | None = None  # why it is no longer writable
        self.pending = bytearray()
        self.lost: Counter[int] = Counter()  # dropped lines of each rank
        # The rank of each run of pending bytes, in order; None for the launcher's own.
        self._owners: deque[tuple[int | None, int]] = deque()
        self._is_inside_line = False
        self.lines = 0  # queued so far
        self._status = ""
        self._progress: dict[tuple[int, int], list[bytes]] = {}  # rows, by rank and stream
        self._drawn: list[bytes] = []  # the rows currently below all lines

    def put(self, data: bytes, rank: int | None = None) -> None:
        """Queue whole lines of a rank, or of the launcher."""
        if not data:
            return
        self._status = ""
        if self._drawn:
            self._erase()
        self._queue(data, rank)
        self.lines += data.count(b"\n")
        if self.trouble is not None:
            self.drop()

    def show_status(self, text: str) -> None:
        """Show ``text`` below all lines until the next line."""
        if text != self._status:
            self._status = text
            self.draw()

    def set_progress(self, rank: int, stream: int, rows: Sequence[bytes]) -> None:
        """Set the rows of a rank that the next ``draw`` shows below all lines."""
        if rows:
            self._progress[rank, stream] = [
                self._cut(Text.from_ansi(row.decode("utf-8", "replace"))) for row in rows
            ]
        else:
            self._progress.pop((rank, stream), None)

    def draw(self) -> None:
        """Redraw the rows below all lines, unless lines are still queued."""
        if self.pending or self.trouble is not None:
            return
        wanted = [row for _, rows in sorted(self._progress.items()) for row in rows]
        room = max(1, self._console.height - 2)
        if len(wanted) > room:
            wanted[room - 1 :] = [self._cut(Text(f"({len(wanted) - room + 1} more)", "dim"))]
        if self._status:
            wanted.append(self._cut(Text(self._status, "dim")))
        if wanted != self._drawn:
            self._erase()  # also erases what the terminal echoed
            self._queue(b"\n".join(wanted), None)
            self._drawn = wanted

    def _erase(self) -> None:
        rows = len(self._drawn)
        self._queue(b"\r\x1b[%dA\x1b[J" % (rows - 1) if rows > 1 else b"\r\x1b[K", None)
        self._drawn = []

    def _cut(self, text: Text) -> bytes:
        """Return a row cut before the last column, so that the terminal does not wrap it."""
        text.expand_tabs()
        text.truncate(self._console.width - 1, overflow="crop")
        return self.render(text)

    def drop(self) -> None:
        """Drop the queued data, and count the lines of each rank."""
        begin = 0
        for rank, nbytes in self._owners:
            if rank is not None:
                self.lost[rank] += self.pending.count(b"\n", begin, begin + nbytes)
            begin += nbytes
        self._owners.clear()
        self.pending.clear()
        self._drawn = []
        if self._is_inside_line:  # the next line starts a new one
            self._queue(b"\n", None)

    @property
    def is_terminal(self) -> bool:
        """Whether the output is a terminal that can redraw lines."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def write(self) -> None:
        """Write what the output accepts without blocking."""
        try:
            # A copy: a view of a bytearray forbids deleting from it.
            written = os.write(self.fd, bytes(self.pending[:_WRITE_NBYTES]))
        except BlockingIOError:
            return
        except OSError as error:  # the reader closed the pipe, or the disk is full
            self.trouble = error
            self._is_inside_line = False
            self.drop()
        else:
            self._is_inside_line = self.pending[written - 1 : written] != b"\n"
            del self.pending[:written]
            while written > 0:
                rank, owned = self._owners.popleft()
                written -= owned
            if written < 0:
                self._owners.appendleft((rank, -written))
            self.draw()

    def render(self, text: Text) -> bytes:
        """Return styled text for this output; rich handles terminals and ``NO_COLOR``."""
        with self._console.capture() as capture:
            self._console.print(text, end="", soft_wrap=True)
        return capture.get().encode()

    def _queue(self, data: bytes, rank: int | None) -> None:
        self.pending += data
        before = 0
        if self._owners and self._owners[-1][0] == rank:
            _, before = self._owners.pop()
        self._owners.append((rank, before + len(data)))


@dataclass(eq=False)
class RankOutput:
    """Reads one pipe of a rank, logs it, and queues its lines."""

    rank: int
    pipe: IO[bytes]
    queue: OutputQueue
    prefix: bytes
    log: Callable[[bytes], None] | None
    lines: StreamLines
    repeats: RepeatFilter | None
    fold: InterruptFilter | None = None
    is_paused: bool = False
    last_line: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    _rows: list[bytes] = field(default_factory=list)  # currently shown by the queue

    def __post_init__(self) -> None:
        os.set_blocking(self.pipe.fileno(), False)

    def read(self) -> int | None:
        """Read the pipe; return the number of bytes, 0 at its end, None if it is empty now."""
        try:
            data = os.read(self.pipe.fileno(), _READ_NBYTES)
        except BlockingIOError:
            return None
        if self.log is not None:
            self.log(data)
        self._put(self.lines.feed(data))
        self.show_progress()
        return len(data)

    def show_progress(self) -> None:
        """Show the rank's progress rows, if they are due."""
        self.write(_decoded(self.lines.due(REAL_TIME.now())))
        if self.lines.rows != self._rows:
            self._rows = self.lines.rows
            rows = [self.prefix + row for row in self._rows]
            self.queue.set_progress(self.rank, self.pipe.fileno(), rows)

    def finish(self) -> None:
        """Queue an unfinished last line, and close the pipe."""
        self._put(self.lines.feed(b""))
        self.show_progress()
        if self.fold is not None:
            self._show(self.fold.finish())
        self.pipe.close()

    def _put(self, lines: list[bytes]) -> None:
        texts = _decoded(lines)
        self.tail.extend(text[:_TAIL_LINE_CHARACTERS] for text in texts[-_TAIL_LINES:])
        self._show(texts if self.fold is None else self.fold.feed(texts))

    def _show(self, texts: list[str]) -> None:
        if self.repeats is not None:
            was_holding = self.repeats.is_holding
            texts = self.repeats.feed(texts)
            if self.repeats.is_holding and not was_holding:
                self.repeats.held_until = REAL_TIME.now() + _HOLD
        self.write(texts)

    def write(self, texts: list[str]) -> None:
        """Queue lines of the rank."""
        self.queue.put(b"".join(self.prefix + text.encode() + b"\n" for text in texts), self.rank)
        if texts:
            self.last_line = self.queue.lines

    @property
    def is_in_view(self) -> bool:
        """Whether the last line is probably still on the screen."""
        return self.queue.lines - self.last_line < _SCREEN_LINES


class HeldErrors:
    """Tracks streams that hold back an error, and ranks that ended with another rank's error."""

    def __init__(self, errors: Mapping[int, RankOutput]) -> None:
        self._errors = errors
        self.streams: dict[RankOutput, None] = {}  # streams that hold back an error
        self._same: dict[int, list[int]] = {}  # by the rank that printed their error

    def settle(self, stream: RankOutput, *, waits: bool = True) -> None:
        """Print a stream's held lines, or note the rank that printed the same error."""
        repeats = stream.repeats
        if repeats is None:
            return
        waits = waits and REAL_TIME.now() < repeats.held_until
        if stream.pipe.closed:
            stream.write(repeats.finish(waits=waits))
        elif not waits:
            stream.write(repeats.release())
        if repeats.is_holding:
            self.streams[stream] = None
            return
        self.streams.pop(stream, None)
        if repeats.same_as is not None:
            stream.last_line = self._errors[repeats.same_as].last_line
            self._same.setdefault(repeats.same_as, []).append(stream.rank)

    def take_same(self) -> dict[int, list[int]]:
        """Return once the ranks that ended with the error of another rank, by that rank."""
        same, self._same = self._same, {}
        return same


def _decoded(lines: list[bytes]) -> list[str]:
    return [line.decode("utf-8", "replace") for line in lines]


class LogFolder:
    """Creates or opens a folder of logs, or raises ConfigurationError. For one thread."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path.absolute()
        self._files: dict[int, BinaryIO] = {}
        self._ended: set[int] = set()
        self._say = say
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_planted_links(path)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"--log-dir {path}: {error.strerror}") from error

    def path_of(self, rank: int) -> Path:
        """Return the absolute path of a rank's log."""
        return self._path / f"rank_{rank}.log"

    def open(self, rank: int) -> BinaryIO:
        """Return the log of a rank, empty at first; the same one after a restart."""
        if rank not in self._files:
            path = self.path_of(rank)
            try:
                with suppress(FileNotFoundError):
                    _check_own(os.stat(path.name, dir_fd=self._descriptor, follow_symlinks=False))
                    # Not reused: another process may have it open for reading.
                    os.unlink(path.name, dir_fd=self._descriptor)
                descriptor = os.open(path.name, _FLAGS, 0o600, dir_fd=self._descriptor)
            except OSError as error:
                raise ConfigurationError(f"the log {path}: {error.strerror}") from error
            self._files[rank] = os.fdopen(descriptor, "wb", buffering=0)
        return self._files[rank]

    def write(self, rank: int, data: bytes) -> None:
        """Write all of ``data`` to the log of a rank; on an error, report it and end the log."""
        rest = memoryview(data)
        try:
            while rest and rank not in self._ended:
                rest = rest[self._files[rank].write(rest) :]
        except OSError as error:
            self._ended.add(rank)
            self._say(f"the log of rank {rank}, {self.path_of(rank)}, ends here: {error.strerror}")

    def close(self) -> None:
        """Close all logs. Idempotent."""
        for file in self._files.values():
            file.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _check_own(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(0, f"it is a symbolic link; {_ADVICE}")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"it is not a regular file; {_ADVICE}")
    if status.st_uid != os.geteuid():
        raise OSError(0, f"it belongs to another user; {_ADVICE}")
    if status.st_nlink != 1:
        raise OSError(0, f"it has another name elsewhere (a hard link); {_ADVICE}")


def _refuse_planted_links(path: Path) -> None:
    way = Path(os.path.abspath(path))
    for place in (*reversed(way.parents), way):
        link, folder = place.lstat(), place.parent.stat()
        is_planted = (
            stat.S_ISLNK(link.st_mode)
            and folder.st_mode & 0o022
            and link.st_uid not in (os.geteuid(), 0, folder.st_uid)
        )
        if is_planted:
            raise OSError(0, f"{place} is a symbolic link that another user has made")
