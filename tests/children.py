"""Programs in Python that tests start and watch from outside.

With ``TESTS_QUICK``, which ``make test`` sets, they are forks of the nursery; in other runs each
is a new interpreter, as a user starts it.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from faults.sizes import QUICK
from nursery import nursery


class Text:
    """What a child writes, as it comes.

    Nothing is read ahead: a stream of :mod:`subprocess` keeps what it has read beyond a line from
    ``communicate()``.
    """

    def __init__(self, descriptor: int) -> None:
        self._raw = open(descriptor, "rb", buffering=0)

    def readline(self) -> str:
        return self._raw.readline().decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")

    def read(self) -> str:
        return self._raw.read().decode()

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()


class Ended(NamedTuple):
    """How a child has ended, and all that it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Child:
    """A program that runs. Has what the tests use of ``subprocess.Popen``."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        self.stdout: Text | None = Text(out)
        self.stderr: Text | None = Text(err)
        self.returncode: int | None = None
        chosen = dict(os.environ) if env is None else env
        folder = os.fspath(os.getcwd() if cwd is None else cwd)
        try:
            if QUICK and command[0] == sys.executable:
                self._process: _Forked | subprocess.Popen[bytes] = _Forked(
                    command[1:], chosen, folder, (their_out, their_err)
                )
            else:
                self._process = subprocess.Popen(
                    command, stdout=their_out, stderr=their_err, env=chosen, cwd=folder
                )
        finally:
            os.close(their_out)
            os.close(their_err)
        self.pid = self._process.pid

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode

    def wait(self, timeout: float) -> int:
        self.returncode = self._process.wait(timeout)
        return self.returncode

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Return the rest of what it writes, once it has ended."""
        end = time.monotonic() + timeout
        written = {stream: bytearray() for stream in (self.stdout, self.stderr) if stream}
        is_open = {stream.fileno(): stream for stream in written}
        while is_open:
            left = end - time.monotonic()
            ready, _, _ = select.select(is_open, (), (), max(0.0, left))
            if not ready and left <= 0:
                said = [bytes(data) for data in written.values()]
                raise subprocess.TimeoutExpired(str(self.pid), timeout, *said)
            for descriptor in ready:
                data = os.read(descriptor, 1 << 16)
                written[is_open[descriptor]] += data
                if not data:
                    del is_open[descriptor]
        self.wait(max(0.0, end - time.monotonic()))
        texts = [written.get(stream, b"").decode() for stream in (self.stdout, self.stderr)]
        self._close_streams()
        return texts[0], texts[1]

    def result(self, timeout: float = 60.0) -> Ended:
        """Wait for its end; one that does not end is killed."""
        try:
            out, err = self.communicate(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running: {error.output} {error.stderr}") from error
        finally:
            self.close()
        assert self.returncode is not None
        return Ended(self.returncode, out, err)

    def close(self) -> None:
        """Kill it if it runs."""
        if self.poll() is None:
            self.kill()
            self.wait(60.0)
        self._close_streams()

    def _close_streams(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.stdout = self.stderr = None

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Forked:
    """A fork of the nursery, which reaps it and tells its status."""

    def __init__(
        self, arguments: list[str], env: dict[str, str], cwd: str, outputs: tuple[int, int]
    ) -> None:
        self.returncode: int | None = None
        self._status, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            with nursery() as shared:
                self.pid = shared.fork_program(arguments, env, cwd, [nothing, *outputs], theirs)
        finally:
            os.close(theirs)
            os.close(nothing)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return  # it has just ended

    def poll(self) -> int | None:
        return self._ended_within(0)

    def wait(self, timeout: float) -> int:
        status = self._ended_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def _ended_within(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._status], (), (), timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status, 64)))
            os.close(self._status)
        return self.returncode
