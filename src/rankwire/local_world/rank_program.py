"""The program of a rank that a starter has started: join the world, run what comes, say how it was.

The main thread runs the functions, one after the other, so that what needs the main thread finds
itself there, and an interrupt (SIGINT) reaches the function. A second thread reads what the starter
says: it answers questions about stacks at once, whatever the function does, and sees the starter's
end, upon which this process ends too.

What is said, both ways, are tuples; functions and results are parcels in them, as bytes. Orders
have numbers, so that an interrupt reaches the function that was meant: also one that has not begun,
and none after it.

=======================================  =======================================================
starter                                  process
=======================================  =======================================================
``("join", number, parcel of options)``  ``("ended", parcel of a RunReport)``, of joining
``("run", number, parcel, leaves)``      ``("ended", parcel of a RunReport)``, of the function
``("interrupt", number)``                nothing: the function ends by ``KeyboardInterrupt``
``("stacks",)``                          ``("stacks", text)``
``("leave",)``                           nothing: it leaves the world and ends
=======================================  =======================================================
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rankwire.backends.base import Backend
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import RankFailedError
from rankwire.local_world.function_pickle import pack, unpack
from rankwire.observe.stacks import stacks
from rankwire.observe.tracebacks import FULL_TRACEBACK, folded
from rankwire.texts import text_of, traceback_of, type_name

_END_PATIENCE = 5.0  # seconds for a function to end whose starter has gone


@dataclass(frozen=True, slots=True)
class RunReport:
    """How something ended: with a value, or by an error, of which a copy may not exist."""

    value: Any = None
    error: BaseException | None = None
    error_name: str = ""
    error_text: str = ""
    traceback: str = ""


def main(rank: int, control: int, listener: int = -1) -> None:
    """Be a rank. The starter has this called in a process that it made.

    Args:
        rank: Which.
        control: The descriptor of the pipe to the starter.
        listener: For rank 0: that of the socket at which the ranks meet.
    """
    _RankProgram(rank, Connection(control), listener).run()


class _RankProgram:
    def __init__(self, rank: int, control: Connection, listener: int) -> None:
        self._rank = rank
        self._control = control
        self._listener = listener
        self._backend: Backend | None = None
        self._is_interruptible = False
        self._running = 0  # the number of the order that it carries out
        self._interrupted = 0  # the number of the last that was interrupted
        self._saying = threading.Lock()  # one tuple at a time
        self._orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def run(self) -> None:
        """Do what the starter says, to the end."""
        signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._listen, name="rankwire-starter", daemon=True).start()
        goes_on = True
        while goes_on:
            goes_on = self._obey(*self._orders.get())
        if self._backend is not None:
            self._backend.close()

    # -- the starter's words -----------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                order = self._control.recv()
                if order[0] == "stacks":
                    self._say("stacks", stacks(but=[threading.get_ident()]))
                elif order[0] == "interrupt":
                    self._interrupted = order[1]  # before the look: the other thread looks too
                    if self._running == order[1]:
                        os.kill(os.getpid(), signal.SIGINT)
                else:
                    self._orders.put(order)
        except (EOFError, OSError):  # the starter has closed, or has died
            self._orders.put(("leave",))
            os.kill(os.getpid(), signal.SIGINT)
            REAL_TIME.sleep(_END_PATIENCE)
            os._exit(1)

    def _obey(self, verb: str, number: int = 0, *words: Any) -> bool:
        """Do one thing; return whether there is more to do."""
        self._running = number
        if verb == "join":
            report = self._report(words[0], self._join)
            self._say("ended", _packed(report))
            return report.error_name == ""
        if verb == "run":
            parcel, leaves = words
            report = self._report(parcel, self._call)
            packed = _packed(report)
            if leaves:  # others hear of its end before the starter does, as from any program
                self._close(report)
            self._say("ended", packed)
            return not leaves
        return False

    def _join(self, path: list[str], world_size: int, options: dict[str, Any]) -> None:
        sys.path[:] = path
        listener = socket.socket(fileno=self._listener) if self._listener >= 0 else None
        self._backend = TcpBackend(self._rank, world_size, listener=listener, **options)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self._backend, *args)

    def _close(self, report: RunReport) -> None:
        assert self._backend is not None
        error = report.error
        if error is None and report.error_name:
            error = RankFailedError(self._rank, f"{report.error_name}: {report.error_text}")
        self._backend.close(error=error)

    # -- running -----------------------------------------------------------------------------------

    def _report(self, parcel: bytes, obey: Callable[..., Any]) -> RunReport:
        """Carry out an order with the words of a parcel.

        Unpacking imports the program's modules. An interrupt waits for its end: Python does not
        finish an import that was interrupted, so that "import asyncio" would fail ever after.
        """
        try:
            words = unpack(parcel)
            self._is_interruptible = True
            if self._interrupted == self._running:
                raise KeyboardInterrupt
            return RunReport(obey(*words))
        except BaseException as error:  # whatever it is, SystemExit included, is the starter's
            self._is_interruptible = False
            return RunReport(None, error, type(error).__name__, text_of(error), _traceback(error))
        finally:
            self._is_interruptible = False
            _flush()

    def _interrupt(self, number: int, frame: object) -> None:
        """Interrupt the function; once, and nothing else than it."""
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def _say(self, *words: Any) -> None:
        with self._saying:
            self._control.send(words)


def _packed(report: RunReport) -> bytes:
    """Return a report as a parcel; without what cannot travel."""
    try:
        if report.error is not None:
            unpack(pack(report.error))  # many can be packed and not unpacked
        return pack(report)
    except Exception as trouble:  # whatever a user's class raises
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
    """Have the starter see what was printed before it sees the end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
