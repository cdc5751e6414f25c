"""Child processes that cannot outlive the harness.

Every child leads a process group of its own and is a context manager: leaving the block ends the
group, first politely, then not. Its stdout is a line protocol; its stderr goes to a temporary file,
so no pipe can fill up, and is shown when something fails.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

# Long enough to close sockets and remove files; short enough not to be felt when a peer ignores it.
GRACE = 5.0
POLL_INTERVAL = 0.005
STDERR_TAIL_NBYTES = 4096
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildError(Exception):
    """A child died, or said nothing in time; carries the end of what it wrote to stderr."""

    def __init__(self, reason: str, stderr: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stderr = stderr


class Child:
    """A Python process started from this interpreter.

    Args:
        arguments: what follows the interpreter on the command line.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,
            # An installed package has its bytecode, whatever this shell says.
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def read_line(self, timeout: float) -> str:
        """Return the next line of stdout.

        Raises:
            ChildError: stdout ended, or no whole line came within ``timeout`` seconds.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                raise ChildError(f"no answer within {timeout:.0f} s", self._stderr_tail())
            data = os.read(descriptor, 65536)
            if not data:
                raise ChildError(self._describe_end(), self._stderr_tail())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def close_stdin(self) -> None:
        """Let a child that waits on its stdin go on."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        """Give the child time to end by itself.

        Returns:
            Its exit code, negative for a signal; ``None`` if it still runs.
        """
        # WNOWAIT leaves it unreaped: as long as it is a zombie its id, which is also the id of its
        # group, belongs to nobody else, so that `stop` cannot hit a stranger.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        deadline = time.monotonic() + timeout
        while True:
            ended = os.waitid(os.P_PID, self._process.pid, options)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                return ended.si_status if exited else -ended.si_status
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_INTERVAL)

    def stop(self) -> None:
        """End the child's whole process group and reap it. Idempotent."""
        if self._process.returncode is not None:
            return
        if self.wait(0.0) is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self.wait(GRACE)
        # The child itself if it would not go, and whatever it may have started.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.close_stdin()
        for stream in (self._process.stdout, self._stderr):
            assert stream is not None
            stream.close()

    def _describe_end(self) -> str:
        code = self.wait(GRACE)
        if code is None:
            return "closed its stdout without an answer"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _stderr_tail(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL_NBYTES))
        return self._stderr.read().decode(errors="replace").strip()


def free_address() -> str:
    """Return a loopback ``host:port`` nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the main thread, so that ``finally`` and ``with`` do their work."""

    def leave(number: int, frame: object) -> None:
        # Once is enough: a second signal must not interrupt the unwinding.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def take_stdout() -> TextIO:
    """Return the real stdout for the report, and point everyone else's at stderr."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return report


def die_with_parent() -> None:
    """Have the kernel end this process if the harness is killed outright."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
