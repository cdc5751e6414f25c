"""The starter's side of a rank that is a process: orders to it, its replies and its output.

``rank_program`` is the other side; the reader thread of ``process_world`` calls ``read``. The
process leads its own session, so that Ctrl-C reaches only the starter, and SIGKILL to its group
also ends what it started. It exits when its pipe is closed, hence also when the starter dies.

Lock: ``_lock`` guards what the rank is running and whether it has ended. It is held briefly, and no
other lock is taken under it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError, RankFailedError
from rankwire.launch.lines import LineSplitter, ProgressLines
from rankwire.local_world.function_pickle import pack, unpack
from rankwire.local_world.function_run import RankOutcome
from rankwire.local_world.printer import Printer, StreamName
from rankwire.local_world.rank_program import RunReport
from rankwire.texts import text_of

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from rankwire.local_world.rank_program import main; main({args})"
)
_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
_READ_NBYTES = 65536


class RankProcess:
    """A rank in its own process. Thread-safe except ``read``.

    Args:
        rank: Its number.
        listener: For rank 0, the listening socket of the rendezvous.
        printer: Prints its output.
    """

    def __init__(self, rank: int, listener: socket.socket | None, printer: Printer) -> None:
        self.rank = rank
        self._printer = printer
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._number = 0  # of the last order
        self._running: Future[RankOutcome[Any]] | None = None
        self._running_name = ""
        self._saying: Future[str] | None = None  # the stacks that were requested
        self._ended: RankOutcome[Any] | None = None  # how the process ended
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno()] + ([] if listener is None else [listener.fileno()])
        program = _PROGRAM.format(path=sys.path, args=", ".join(map(str, [rank, *passed])))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=passed,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()  # if a process was started, it ends because of this
            raise
        self._control = Connection(ours.detach())
        self._death = os.pidfd_open(self._process.pid)
        self._outputs: dict[int, _Output] = {}
        for name, pipe in zip(_STREAMS, (self._process.stdout, self._process.stderr), strict=True):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._outputs[pipe.fileno()] = _Output(name)
        self._teller = threading.Thread(
            target=self._pass_on, name=f"rankwire-local-{rank}", daemon=True
        )
        self._teller.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def ended(self) -> str:
        """How the process ended, as text; empty while it is alive."""
        return "" if self._ended is None else self._ended.reason

    # -- orders ------------------------------------------------------------------------------------

    def enter(self, world_size: int, options: dict[str, Any]) -> Future[RankOutcome[Any]]:
        """Have the process join the world."""
        return self._begin("join", "join", pack((sys.path, world_size, options)))

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        """Start ``function(backend, *args)``; with ``leaves``, leave the world when it ends.

        Raises:
            ConfigurationError: The rank is still running a function, or this one cannot be sent.
        """
        name = getattr(function, "__name__", repr(function))
        try:
            pickled = pack((function, args))
        except Exception as error:  # a user's class may raise anything
            raise ConfigurationError(
                f"{name!r}, its arguments or what it names cannot be sent to another process: "
                f"{text_of(error)}"
            ) from error
        return self._begin(name, "run", pickled, leaves)

    def _begin(self, name: str, verb: str, *words: Any) -> Future[RankOutcome[Any]]:
        running: Future[RankOutcome[Any]] = Future()
        with self._lock:
            if self._running is not None:
                raise ConfigurationError(f"rank {self.rank} still runs {self._running_name!r}")
            if self._ended is not None:
                running.set_result(self._ended)
                return running
            self._running, self._running_name = running, name
            self._number += 1
            number = self._number
        self._tell(verb, number, *words)
        return running

    def ask_for_stacks(self) -> Future[str]:
        """Request the stacks of all threads of the process."""
        asking: Future[str] = Future()
        with self._lock:
            self._saying = asking
        self._tell("stacks")
        return asking

    def interrupt(self) -> bool:
        """Interrupt the running function as Ctrl-C would; return whether there was one."""
        with self._lock:
            if self._running is None or self._ended is not None:
                return False
            number = self._number
        self._tell("interrupt", number)
        return True

    def leave(self) -> None:
        """Have the process leave the world and exit when its function has ended."""
        self._tell("leave")

    def kill(self) -> None:
        """Kill the process and everything in its process group."""
        with self._lock:
            if self._ended is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _tell(self, *words: Any) -> None:
        # One step, so that an interrupt falls before or after it.
        self._orders.put(words)

    def _pass_on(self) -> None:
        """Send queued orders, in a thread that no interrupt reaches."""
        with suppress(OSError):  # the process died; the reader thread handles that
            while (words := self._orders.get()) is not None:
                self._control.send(words)

    # -- replies -----------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait for; none once the process has ended."""
        if self._ended is not None:
            return []
        return [self._control.fileno(), self._death, *self._outputs]

    def read(self, ready: Collection[int]) -> None:
        """Process its output, its replies and its end. For one thread."""
        if not set(self.descriptors()) & set(ready):
            return
        is_dead = self._death in ready  # determined first: nothing is written after it
        for output in list(self._outputs):
            self._read_output(output)
        if self._control.fileno() in ready or is_dead:
            self._read_words()
        if is_dead:
            self._handle_death()

    def _read_output(self, number: int) -> None:
        output = self._outputs[number]
        with suppress(BlockingIOError):
            while data := os.read(number, _READ_NBYTES):
                self._print(output, output.feed(data))
            del self._outputs[number]  # the process closed it
            self._print(output, output.finish())

    def _print(self, output: _Output, lines: list[bytes]) -> None:
        texts = [f"[rank {self.rank}] {line.decode(errors='replace')}\n" for line in lines]
        if texts:
            self._printer.put(output.name, "".join(texts))

    def _read_words(self) -> None:
        try:
            while self._control.poll():
                verb, word = self._control.recv()
                for output in list(self._outputs):  # print what it wrote before this reply
                    self._read_output(output)
                if verb == "ended":
                    self._end_running(_outcome(self.rank, word))
                elif self._saying is not None:
                    self._saying.set_result(word)
                    self._printer.wake()
        except (EOFError, OSError):
            return  # the pidfd reports its end

    def _end_running(self, outcome: RankOutcome[Any]) -> None:
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.set_result(outcome)
            self._printer.wake()

    def _handle_death(self) -> None:
        with suppress(ProcessLookupError):  # end what it started and left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for output in self._outputs.values():
            self._print(output, output.finish())
        if code < 0:
            reason = f"its process was killed by {signal.Signals(-code).name}"
        else:
            reason = f"its process ended with exit code {code} and sent no result"
        with self._lock:
            self._ended = RankOutcome(self.rank, killed=code < 0, reason=reason)
            os.close(self._death)
        self._orders.put(None)
        REAL_TIME.join(self._teller)  # soon: its writes fail now
        self._control.close()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        if self._saying is not None and not self._saying.done():
            self._saying.set_result(f"({reason})")
        self._end_running(self._ended)


class _Output:
    """Split one output stream of a rank into lines, with a line for progress bars now and then."""

    def __init__(self, name: StreamName) -> None:
        self.name = name
        self._splitter = LineSplitter()
        self._progress = ProgressLines()

    def feed(self, data: bytes) -> list[bytes]:
        lines = self._progress.unprinted(self._splitter.feed(data))
        return lines + self._progress.due(self._splitter.progress, REAL_TIME.now())

    def finish(self) -> list[bytes]:
        return self._progress.unprinted(self._splitter.finish())


def _outcome(rank: int, pickled: bytes) -> RankOutcome[Any]:
    try:
        report: RunReport = unpack(pickled)
    except Exception as trouble:  # a user's class may raise anything
        what = f"its result cannot be loaded here: {text_of(trouble)}"
        return RankOutcome(rank, error=TypeError(what))
    error = report.error
    if error is None and report.error_name:
        text = f"{report.error_name}: {report.error_text}"
        error = RankFailedError(rank, text, remote_traceback=report.traceback)
    return RankOutcome(rank, report.value, error, remote_traceback=report.traceback)
