"""Join the world, run functions and report how they ended: the program of a rank process.

The main thread runs the functions one after the other, so code that needs the main thread works and
SIGINT reaches the function. A second thread reads from the starter. It replies to requests for
stacks while a function runs, and ends this process when the starter has gone.

Orders are numbered, so that an interrupt reaches only the function it is meant for, even if that
has not started yet.

=====================================  =========================================================
starter                                process
=====================================  =========================================================
``("join", number, pickled options)``  ``("ended", pickled RunReport)`` of joining
``("run", number, pickled, leaves)``   ``("ended", pickled RunReport)`` of the function
``("interrupt", number)``              no reply: ``KeyboardInterrupt`` is raised in the function
``("stacks",)``                        ``("stacks", text)``
``("leave",)``                         no reply: it leaves the world and exits
=====================================  =========================================================
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import RankFailedError
from rankwire.launch.function_pickle import pack, unpack
from rankwire.observe.stacks import stacks
from rankwire.observe.tracebacks import FULL_TRACEBACK, folded
from rankwire.texts import text_of, traceback_of, type_name

_END_PATIENCE = 5.0  # seconds for a function to end after the starter has gone


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report a value, or an error as text and, if it can be pickled, itself."""

    value: Any = None
    error: BaseException | None = None
    error_name: str = ""
    error_text: str = ""
    traceback: str = ""


def main(rank: int, control: int, listener: int = -1) -> None:
    """Run as a rank; ``control`` and, at rank 0, ``listener`` are descriptors."""
    _RankProgram(rank, Connection(control), listener).run()


class _RankProgram:
    def __init__(self, rank: int, control: Connection, listener: int) -> None:
        self._rank = rank
        self._control = control
        self._listener = listener
        self._backend: Backend | None = None
        self._is_interruptible = False
        self._running = 0  # the number of the current order
        self._interrupted = 0  # the number of the last interrupted order
        self._saying = runtime.Lock()  # guards sending one tuple
        self._orders: runtime.SimpleQueue[tuple[Any, ...]] = runtime.SimpleQueue()

    def run(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        runtime.Thread(target=self._listen, name="rankwire-starter", daemon=True).start()
        goes_on = True
        while goes_on:
            goes_on = self._obey(*self._orders.get())
        if self._backend is not None:
            self._backend.close()

    # -- orders ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                order = self._control.recv()
                if order[0] == "stacks":
                    self._say("stacks", stacks(but=[runtime.get_ident()]))
                elif order[0] == "interrupt":
                    self._interrupted = order[1]  # first, as the main thread checks it
                    if self._running == order[1]:
                        os.kill(runtime.getpid(), signal.SIGINT)
                else:
                    self._orders.put(order)
        except (EOFError, OSError):  # the starter closed the pipe or died
            self._orders.put(("leave",))
            os.kill(runtime.getpid(), signal.SIGINT)
            REAL_TIME.sleep(_END_PATIENCE)
            os._exit(1)

    def _obey(self, verb: str, number: int = 0, *words: Any) -> bool:
        """Carry out one order; return whether to continue."""
        self._running = number
        if verb == "join":
            report = self._report(words[0], self._join)
            self._say("ended", _packed(report))
            return report.error_name == ""
        if verb == "run":
            pickled, leaves = words
            report = self._report(pickled, self._call)
            packed = _packed(report)
            if leaves:  # as in any program, peers see it leave before the starter gets the result
                self._close(report)
            self._say("ended", packed)
            return not leaves
        return False

    def _join(self, path: list[str], world_size: int, options: dict[str, Any]) -> None:
        sys.path[:] = path
        listener = runtime.Socket(fileno=self._listener) if self._listener >= 0 else None
        self._backend = TcpBackend(self._rank, world_size, listener=listener, **options)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self._backend, *args)

    def _close(self, report: RunReport) -> None:
        assert self._backend is not None
        error = report.error
        if error is None and report.error_name:
            error = RankFailedError(self._rank, f"{report.error_name}: {report.error_text}")
        self._backend.close(error=error)

    # -- execution ---------------------------------------------------------------------------------

    def _report(self, pickled: bytes, obey: Callable[..., Any]) -> RunReport:
        """Call ``obey`` with the unpickled arguments and report the result.

        Unpickling imports modules and is not interruptible: a module whose import was interrupted
        stays broken, so that a later "import asyncio" would fail.
        """
        try:
            words = unpack(pickled)
            self._is_interruptible = True
            if self._interrupted == self._running:
                raise KeyboardInterrupt
            return RunReport(obey(*words))
        except BaseException as error:  # SystemExit too is reported to the starter
            self._is_interruptible = False
            return RunReport(None, error, type(error).__name__, text_of(error), _traceback(error))
        finally:
            self._is_interruptible = False
            _flush()

    def _interrupt(self, number: int, frame: object) -> None:
        """Raise KeyboardInterrupt in the function, once, and never outside of it."""
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def _say(self, *words: Any) -> None:
        with self._saying:
            self._control.send(words)


def _packed(report: RunReport) -> bytes:
    """Pickle a report, without an error or value that cannot be pickled."""
    try:
        if report.error is not None:
            unpack(pack(report.error))  # many exceptions can be pickled but not unpickled
        return pack(report)
    except Exception as trouble:  # a user's class may raise anything
        if report.error is not None:
            return pack(replace(report, error=None))
        what = f"its result, of type {type_name(report.value)}, cannot be sent: {text_of(trouble)}"
        return pack(RunReport(None, TypeError(what), "TypeError", what))


def _traceback(error: BaseException) -> str:
    lines = traceback_of(error).splitlines()
    if os.environ.get(FULL_TRACEBACK, "0") in ("", "0"):
        lines = folded(lines)
    return "\n".join(lines)


def _flush() -> None:
    """Flush the output, so that the starter reads it before the report."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
