"""Interrupts at every place at which a signal can end a thread, one after the other.

CPython runs signal handlers between two bytecodes, and looks for them when a function begins, after
each call of a function in C and at each jump backwards. ``every_interrupt`` counts those places
within the package while an operation runs, and runs it again and again with an interrupt at the
first, the second, and so on, until one run ends without.
"""

import contextlib
import ctypes
import dis
import gc
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import rankwire
from faults.sizes import QUICK

LIBRARY = str(Path(rankwire.__file__).parent)
_LOOKS = ("CALL", "JUMP_BACKWARD")
_SIGNAL = signal.SIGUSR2
_QUICK_STEP = 7
_PATIENCE = 20.0  # seconds until the main thread must be where it is to be interrupted
_MOMENT = 0.05  # seconds that it then has to send, and to begin to wait


class Interrupt(KeyboardInterrupt):
    """What a signal raises."""


class Interrupting:
    """A ``with`` block whose thread, the main one, is interrupted at some places of the package.

    A tracer that raised would be the last one that is called. So it only says that a signal has
    come, as a handler in C does, and the interpreter raises where it looks next. That must be in
    the traced code: between the signal and the tracer's return there is no call. Where a function
    in C raises, the interpreter looks next when it calls the tracer; that is passed on to the next
    place, or a read that finds nothing would end all that ``every_interrupt`` tries.

    Args:
        numbers: Which places, counted from 0.
        since: If given, places count from the first one on at which it returns True.
        apart_from: Names of files whose places do not count.

    Attributes:
        happened: How many of the interrupts have been raised.
        where: Where, for the message of a test that fails.
    """

    _operations: ClassVar[dict[CodeType, dict[int, str]]] = {}

    def __init__(
        self,
        *numbers: int,
        since: Callable[[], bool] | None = None,
        apart_from: Sequence[str] = (),
    ) -> None:
        self._numbers = set(numbers)
        self._since = since
        self._apart_from = tuple(apart_from)
        self._count = 0
        # Looking up a number that is not there sends the signal.
        self._signal: defaultdict[int | None, int] = defaultdict(
            partial(ctypes.pythonapi.PyErr_SetInterruptEx, int(_SIGNAL))
        )
        self._is_missed = False  # a signal was seen in the tracer
        self._before: Any = None
        self.happened = 0
        self.where: list[str] = []

    def __enter__(self) -> "Interrupting":
        gc.disable()  # an interrupt in a callback of the collector would be swallowed
        self._before = signal.signal(_SIGNAL, self._on_signal)
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(_SIGNAL, self._before)
        gc.enable()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        at, is_missed = frame, False
        while at is not None and not at.f_code.co_filename.startswith(LIBRARY):
            is_missed = is_missed or at.f_code.co_filename == __file__
            at = at.f_back
        if at is None:
            return  # the operation ended before the interpreter looked
        if is_missed:
            self._is_missed = True
            self._signal.clear()
            return
        assert frame is not None
        self.happened += 1
        name = Path(frame.f_code.co_filename).name
        self.where.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        raise Interrupt

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARY) or name.endswith(self._apart_from):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        number = self._next()
        if number in self._numbers or self._is_missed:
            self._is_missed = False
            self._signal[number]
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and self._operation(frame).startswith(_LOOKS):
            number = self._next()
            if number in self._numbers:
                self._signal[number]
        if self._is_missed:
            self._is_missed = False
            self._signal[None]
        return self._on_event

    def _next(self) -> int:
        """Return the number of a place; -1 if places do not count yet."""
        if self._since is not None:
            if not self._since():
                return -1
            self._since = None
        number, self._count = self._count, self._count + 1
        return number

    def _operation(self, frame: FrameType) -> str:
        code = frame.f_code
        if code not in self._operations:
            self._operations[code] = {
                instruction.offset: instruction.opname for instruction in dis.get_instructions(code)
            }
        return self._operations[code].get(frame.f_lasti, "")


def every_interrupt(
    run: Callable[[Interrupting], None],
    *,
    second_after: int | None = None,
    step: int = 1,
    apart_from: Sequence[str] = (),
) -> int:
    """Call ``run`` with an interrupt at each place in turn; return how many places there were.

    Args:
        run: Runs the operation within ``with interrupting:`` and checks what holds afterwards.
        second_after: So many places after each interrupt comes another one.
        step: 2 tries every other place, and so on. ``make test`` tries a seventh.
        apart_from: Names of files whose places are not tried.
    """
    for number in _numbers(step * _QUICK_STEP if QUICK else step):
        numbers = (number,) if second_after is None else (number, number + second_after)
        interrupting = Interrupting(*numbers, apart_from=apart_from)
        try:
            run(interrupting)
        except BaseException as error:
            error.add_note(f"interrupted at {', then '.join(interrupting.where) or 'no place'}")
            raise
        if not interrupting.happened:
            return number
    raise AssertionError("unreachable")


def interrupt_main_thread_in(name: str, number: int = signal.SIGINT) -> float:
    """Send the main thread a signal while it waits; return when that was.

    To be called by another thread. The signal is not sent before the main thread has been in that
    function of the package for a moment: it would hit what the test does before.
    """
    ident = threading.main_thread().ident
    assert ident is not None
    end = time.monotonic() + _PATIENCE
    while not _is_in(ident, name):
        assert time.monotonic() < end, f"the main thread does not call {name}"
        time.sleep(0.001)
    with no_collection():
        time.sleep(_MOMENT)
        signal.pthread_kill(ident, number)
    return time.monotonic()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the collector from running: an interrupt in one of its callbacks would be swallowed.

    Hypothesis has one. A collection that runs already should end before the interrupt is sent.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_in(ident: int, name: str) -> bool:
    """Whether a thread is in a function of the package that has this name."""
    frame: FrameType | None = sys._current_frames().get(ident)
    while frame is not None:
        code = frame.f_code
        if code.co_name == name and code.co_filename.startswith(LIBRARY):
            return True
        frame = frame.f_back
    return False


def _numbers(step: int) -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += step
