"""One pipe of one rank, on its way to one of the launcher's outputs.

Here bytes become lines with a prefix, and rows that the rank redraws. Reading does not block, and
``Output`` says when to read.
"""

from __future__ import annotations

import math
import os
from collections import deque
from typing import IO

from rankwire.clock import REAL_TIME
from rankwire.launch.interrupts import InterruptFold
from rankwire.launch.lines import LineSplitter
from rankwire.launch.logfiles import Log
from rankwire.launch.progress import ProgressLines
from rankwire.launch.repeats import RepeatFold
from rankwire.launch.sink import Sink

# The capacity of a Linux pipe, so one read empties it.
_READ_NBYTES = 64 * 1024
# Enough for the traceback of a deep call; lines beyond a screen's width are cut.
_TAIL_LINES = 60
_TAIL_LINE_CHARACTERS = 500
# How long an error is held back that may be the last of a rank and that of another: a process that
# has printed its last error ends within this, mostly.
_HOLD = 2.0
# What is further up than this on a screen has to be looked for.
_SCREEN_LINES = 40


class RankOutput:
    """One pipe of one rank, on its way to a sink.

    Args:
        rank: Whose it is.
        pipe: Where to read; set to non-blocking.
        sink: Where to write.
        prefix: What each line begins with.
        log: Where to write all bytes besides.
        redraws: Whether rows that the rank redraws, such as progress bars, are redrawn there, too.
            Else they become a line every few seconds.
    """

    def __init__(
        self,
        rank: int,
        pipe: IO[bytes],
        sink: Sink,
        prefix: bytes,
        log: Log | None,
        *,
        redraws: bool,
    ) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.rank = rank
        self.pipe = pipe
        self.sink = sink
        self._progress = None if redraws else ProgressLines()
        self._rows: list[bytes] = []  # that the sink redraws
        self.is_paused = False
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._prefix = prefix
        self._log = log
        self.last_line = 0
        self._splitter = LineSplitter()
        self._fold: InterruptFold | None = None
        self.repeats: RepeatFold | None = None
        self.held_until = -math.inf

    def fold_interrupts(self) -> None:
        """Show what Python prints of an interrupt as one line, from now on."""
        self._fold = self._fold or InterruptFold()

    def read(self) -> int | None:
        """Take what the pipe holds; return how much, 0 at its end, None if there is nothing now."""
        try:
            data = os.read(self.pipe.fileno(), _READ_NBYTES)
        except BlockingIOError:
            return None
        if self._log is not None:
            self._log.write(data)
        self._put(self._splitter.feed(data) if data else self._splitter.finish())
        self.show_progress()
        return len(data)

    def show_progress(self) -> None:
        """Show the rows that the rank redraws, if it is time for them."""
        rows = self._splitter.progress
        if self._progress is not None:
            self._write(_decoded(self._progress.due(rows, REAL_TIME.now())))
        elif rows != self._rows:
            self._rows = rows
            where = self.pipe.fileno()
            self.sink.set_progress(self.rank, where, [self._prefix + row for row in rows])

    def finish(self) -> None:
        """Pass on an unfinished last line, and close."""
        self._put(self._splitter.finish())
        self.show_progress()
        if self._fold is not None:
            self._show(self._fold.finish())
        self.pipe.close()

    def settle(self, *, waits: bool = True) -> bool:
        """Print an error that is held back, unless it may still turn out to be that of another.

        Args:
            waits: Whether it may be held back any longer, up to its time.

        Returns:
            Whether nothing is held back any more.
        """
        if self.repeats is None:
            return True
        waits = waits and REAL_TIME.now() < self.held_until
        if self.pipe.closed:
            self._write(self.repeats.finish(waits=waits))
        elif not waits:
            self._write(self.repeats.release())
        return not self.repeats.is_holding

    def _put(self, lines: list[bytes]) -> None:
        self.tail.extend(text[:_TAIL_LINE_CHARACTERS] for text in _decoded(lines[-_TAIL_LINES:]))
        if self._progress is not None:
            lines = self._progress.unprinted(lines)
        texts = _decoded(lines)
        self._show(texts if self._fold is None else self._fold.feed(texts))

    def _show(self, texts: list[str]) -> None:
        if self.repeats is not None:
            was_holding = self.repeats.is_holding
            texts = self.repeats.feed(texts)
            if self.repeats.is_holding and not was_holding:
                self.held_until = REAL_TIME.now() + _HOLD
        self._write(texts)

    def _write(self, texts: list[str]) -> None:
        self.sink.put(b"".join(self._prefix + text.encode() + b"\n" for text in texts), self.rank)
        if texts:
            self.last_line = self.sink.lines

    @property
    def is_in_view(self) -> bool:
        """Whether the last line is not far above what was written to the sink since."""
        return self.sink.lines - self.last_line < _SCREEN_LINES


def _decoded(lines: list[bytes]) -> list[str]:
    return [line.decode("utf-8", "replace") for line in lines]
