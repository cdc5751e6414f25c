"""Join the world, run functions and report how they ended: the program of a rank process.

The main thread runs the functions, one at a time, so code that needs the main thread works and
SIGINT reaches the function. A second thread reads from the starter. It replies to requests for
stacks while a function runs, and ends this process after the starter is gone. Orders are numbered,
so that an interrupt reaches only its function, even if that has not started yet.

=====================================  =========================================================
starter                                process
=====================================  =========================================================
``("join", number, pickled options)``  ``("ended", pickled outcome)`` of joining
``("run", number, pickled, leaves)``   ``("ended", pickled outcome)`` of the function
``("interrupt", number)``              no reply: ``KeyboardInterrupt`` is raised in the function
``("stacks",)``                        ``("stacks", text)``
``("leave",)``                         no reply: it leaves the world and exits
=====================================  =========================================================

A process cannot import functions from the ``__main__`` of another (a notebook, script or prompt).
So cloudpickle sends a function by value, with its closure and the globals that it names. In the
rank, its globals are those of ``__main__`` there, so one cell can use what another has set.

Unpickling runs code. That is safe only here: the bytes come from the starter, over a socket pair
that it created, both processes belong to one user, and running its functions is the purpose.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.codec.classes import message, options_of
from rankwire.errors import RankFailedError
from rankwire.launch.function_run import RankOutcome
from rankwire.observe.stacks import stacks
from rankwire.observe.tracebacks import folded, is_everything_printed
from rankwire.texts import text_of, traceback_of, type_name

_END_PATIENCE = 5.0  # seconds for a function to end after the starter is gone
_MAIN = "the globals of __main__"


def main(rank: int, control: int, listener: int = -1) -> None:
    """Run as a rank; ``control`` and, on rank 0, ``listener`` are descriptors."""
    _RankProgram(rank, Connection(control), listener).run()


@dataclass(eq=False)
class _RankProgram:
    rank: int
    control: Connection
    listener: int
    backend: Backend | None = None
    is_interruptible: bool = False
    running: int = 0  # the number of the current order
    interrupted: int = 0  # the number of the last interrupted order
    saying: runtime.Lock = field(default_factory=runtime.Lock)  # guards sending one tuple
    orders: runtime.SimpleQueue[tuple[Any, ...]] = field(default_factory=runtime.SimpleQueue)

    def run(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        runtime.Thread(target=self._listen, name="rankwire-starter", daemon=True).start()
        goes_on = True
        while goes_on:
            goes_on = self._obey(*self.orders.get())
        if self.backend is not None:
            self.backend.close()

    def _listen(self) -> None:
        try:
            while True:
                order = self.control.recv()
                if order[0] == "stacks":
                    self._say("stacks", stacks(but=[runtime.get_ident()]))
                elif order[0] == "interrupt":
                    self.interrupted = order[1]  # first, as the main thread checks it
                    if self.running == order[1]:
                        os.kill(runtime.getpid(), signal.SIGINT)
                else:
                    self.orders.put(order)
        except (EOFError, OSError):  # the starter closed the pipe or died
            self.orders.put(("leave",))
            os.kill(runtime.getpid(), signal.SIGINT)
            REAL_TIME.sleep(_END_PATIENCE)
            os._exit(1)

    def _obey(self, verb: str, number: int = 0, *words: Any) -> bool:
        self.running = number
        if verb == "join":
            outcome = self._outcome(words[0], self._join)
            self._say("ended", _packed(outcome))
            return outcome.returned
        if verb == "run":
            pickled, leaves = words
            outcome = self._outcome(pickled, lambda function, args: function(self.backend, *args))
            packed = _packed(outcome)
            if leaves:  # as in any program, peers see it leave before the starter gets the result
                assert self.backend is not None
                self.backend.close(error=outcome.error)
            self._say("ended", packed)
            return not leaves
        return False

    def _join(self, path: list[str], world_size: int, options: dict[str, Any]) -> None:
        sys.path[:] = path
        listener = runtime.Socket(fileno=self.listener) if self.listener >= 0 else None
        self.backend = TcpBackend(self.rank, world_size, listener=listener, **options)

    def _outcome(self, pickled: bytes, obey: Callable[..., Any]) -> RankOutcome[Any]:
        try:
            # Not interruptible: a module whose import was interrupted stays broken.
            words = unpack(pickled)
            self.is_interruptible = True
            if self.interrupted == self.running:
                raise KeyboardInterrupt
            return RankOutcome(self.rank, obey(*words))
        except BaseException as error:  # SystemExit is also reported to the starter
            self.is_interruptible = False
            return RankOutcome(self.rank, error=error, remote_traceback=_traceback(error))
        finally:
            self.is_interruptible = False
            for stream in (sys.stdout, sys.stderr):  # the starter reads it before the report
                stream.flush()

    def _interrupt(self, number: int, frame: object) -> None:
        """Raise KeyboardInterrupt in the function, once, and never outside it."""
        if self.is_interruptible:
            self.is_interruptible = False
            raise KeyboardInterrupt

    def _say(self, *words: Any) -> None:
        with self.saying:
            self.control.send(words)


def _packed(outcome: RankOutcome[Any]) -> bytes:
    """Pickle an outcome; replace an error or value that cannot be pickled by an error."""
    rank, error, traceback = outcome.rank, outcome.error, outcome.remote_traceback
    try:
        if error is not None:
            unpack(pack(error))  # many exceptions can be pickled but not unpickled
        return pack(outcome)
    except Exception as trouble:  # a user's class may raise anything
        if error is not None:
            text = f"{type(error).__name__}: {text_of(error)}"
            failed = RankFailedError(rank, text, remote_traceback=traceback)
            return pack(replace(outcome, error=failed))
        what = f"its result, of type {type_name(outcome.value)}, cannot be sent: {text_of(trouble)}"
        return pack(RankOutcome(rank, error=TypeError(what)))


def _traceback(error: BaseException) -> str:
    lines = traceback_of(error).splitlines()
    return "\n".join(lines if is_everything_printed() else folded(lines))


def pack(value: Any) -> bytes:
    """Pickle a value; a user's class may raise any exception."""
    import cloudpickle  # here: importing it takes 20 ms, and most programs do not need it

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]
        """Replaces the globals of ``__main__`` by a reference to those of the other process."""

        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            own = sys.modules["__main__"].__dict__
            self._stand_in = {"__name__": "__main__"}
            self.globals_ref[id(own)] = self._stand_in

        def reducer_override(self, thing: Any) -> Any:
            reduced = super().reducer_override(thing)
            options = options_of(thing) if isinstance(thing, type) else None
            if options is None or type(reduced) is not tuple or len(reduced) != 6:
                return reduced
            make, args, state, *rest, set_state = reduced  # a class that is pickled by value
            return make, args, (set_state, state, options), *rest, _set_message

        def persistent_id(self, thing: Any) -> str | None:
            return _MAIN if thing is self._stand_in else None

    file = io.BytesIO()
    Packer(file).dump((value, _sources_of(value)))
    return file.getvalue()


def unpack(pickled: bytes) -> Any:
    """Unpickle bytes from the starter's pipe, and only those; may raise any exception."""
    value, sources = _Unpacker(io.BytesIO(pickled)).load()
    for name, lines in sources.items():  # mtime None: linecache does not look for a file
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return value


def _set_message(cls: type, details: tuple[Any, Any, dict[str, Any]]) -> None:
    set_state, state, options = details
    set_state(cls, state)
    message(cls, **options)


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        if name != _MAIN:
            raise pickle.UnpicklingError(f"unknown reference {name!r}")
        return sys.modules["__main__"].__dict__


def _sources_of(value: Any) -> dict[str, list[str]]:
    """Return sources that are not in a file, for tracebacks in the rank."""
    function = value[0] if isinstance(value, tuple) and value else value
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {}
    names = {each.co_filename for each in _codes_of(function, code)}
    return {name: linecache.getlines(name) for name in names if _is_cell(name)}


def _codes_of(function: Any, code: CodeType) -> Iterator[CodeType]:
    yield code
    for name in code.co_names:
        named = getattr(function.__globals__.get(name), "__code__", None)
        if isinstance(named, CodeType):
            yield named


def _is_cell(name: str) -> bool:
    return name in linecache.cache and not os.path.exists(name)
