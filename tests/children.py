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
from typing import IO, NamedTuple

from faults.sizes import QUICK
from nursery import nursery, wait
from rankwire.launch.process import Process


class Text:
    """What a child writes, as it comes.

    Nothing is read ahead: a stream of :mod:`subprocess` keeps what it has read beyond a line from
    ``communicate()``.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

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
        folder = os.fspath(os.getcwd() if cwd is None else cwd)
        if QUICK and command[0] == sys.executable:
            with nursery() as shared:
                chosen = dict(os.environ) if env is None else env
                self._process: Process = shared.fork_program(command[1:], chosen, folder)
        else:
            self._process = Process(command, env=env, cwd=folder)
        out, err = self._process.pipes
        self.stdout: Text | None = Text(out)  # None where a test has closed it
        self.stderr: Text | None = Text(err)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As that of ``Popen``: minus the number of the signal that killed it."""
        ending = self._process.ending
        return (
            ending if ending is None else ending.code if ending.signal is None else -ending.signal
        )

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._process.send(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self._process.check() is not None:
            self._process.reap()
        return self.returncode

    def wait(self, timeout: float) -> int:
        if wait(self._process, timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self._process.reap()
        assert self.returncode is not None
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
        self._process.close()
        out, err = (written.get(stream, b"").decode() for stream in (self.stdout, self.stderr))
        return out, err

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
        self._process.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
