"""Interrupts at every place at which a signal can end a thread, one after the other.

CPython runs signal handlers between two bytecodes, and looks for them when a function begins, after
each call of a function in C and at each jump backwards. ``every_interrupt`` counts those places
within the package while an operation runs, and runs it again and again with an interrupt at the
first, the second, and so on, until one run ends without.
"""

import dis
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest

import rankwire
from rankwire.links import connection, inbox
from rankwire.links.insisting import insist

LIBRARY = str(Path(rankwire.__file__).parent)
_LOOKS_AFTER = ("CALL", "JUMP_BACKWARD")


class Interrupt(BaseException):
    """What a signal raises, as ``KeyboardInterrupt`` does."""


class Interrupting:
    """A ``with`` block whose thread is interrupted at one place of the package, if it gets there.

    Args:
        numbers: Which places, counted from 0.

    Attributes:
        happened: How many of the interrupts have been raised.
        where: Where, for the message of a test that fails.
    """

    _operations: ClassVar[dict[CodeType, dict[int, str]]] = {}
    _handlers: ClassVar[dict[CodeType, list[Any]]] = {}

    def __init__(self, *numbers: int) -> None:
        self._numbers = set(numbers)
        self._count = 0
        self._last: dict[FrameType, tuple[int, str]] = {}  # the last instruction of each
        self.happened = 0
        self.where: list[str] = []

    def __enter__(self) -> "Interrupting":
        self._patch = pytest.MonkeyPatch()
        for module in (connection, inbox):
            self._patch.setattr(module, "insist", self._insist)
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._patch.undo()

    def _insist(self, step: Callable[[Any], None], argument: Any) -> None:
        """Go on with the tracing, which an interrupt has ended, where one is dealt with."""
        sys.settrace(self._on_call)
        insist(step, argument)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_back in self._last and frame.f_code.co_name != "__init__":
            self._last[frame.f_back] = (0, "")  # this is what it calls: a function in Python
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._place(frame)
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            offset, operation = self._last.get(frame, (0, ""))
            # A signal after a call is raised by the call. Here it is raised by what follows, which
            # is the same only if it is within the same ``try`` and ``with``.
            if operation.startswith(_LOOKS_AFTER) and self._is_alike(frame, offset):
                self._place(frame)
            self._last[frame] = (frame.f_lasti, self._operation(frame))
        elif event == "return":
            self._last.pop(frame, None)
        return self._on_event

    def _operation(self, frame: FrameType) -> str:
        code = frame.f_code
        if code not in self._operations:
            self._operations[code] = {
                instruction.offset: instruction.opname for instruction in dis.get_instructions(code)
            }
        return self._operations[code].get(frame.f_lasti, "")

    def _is_alike(self, frame: FrameType, offset: int) -> bool:
        """Whether an error is handled by the same code as one of an earlier instruction."""
        if frame.f_code not in self._handlers:
            self._handlers[frame.f_code] = dis._parse_exception_table(frame.f_code)  # type: ignore[attr-defined]
        handlers = [
            [
                entry.target
                for entry in self._handlers[frame.f_code]
                if entry.start <= at < entry.end
            ]
            for at in (offset, frame.f_lasti)
        ]
        return handlers[0] == handlers[1]

    def _place(self, frame: FrameType) -> None:
        number, self._count = self._count, self._count + 1
        if number in self._numbers:
            self.happened += 1
            name = Path(frame.f_code.co_filename).name
            self.where.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            self._last.pop(frame, None)
            raise Interrupt


def every_interrupt(
    run: Callable[[Interrupting], None], *, second_after: int | None = None, step: int = 1
) -> int:
    """Call ``run`` with an interrupt at each place in turn; return how many places there were.

    Args:
        run: Runs the operation within ``with interrupting:`` and checks what holds afterwards.
        second_after: So many places after each interrupt comes another one.
        step: 2 tries every other place, and so on.
    """
    for number in _numbers(step):
        numbers = (number,) if second_after is None else (number, number + second_after)
        interrupting = Interrupting(*numbers)
        try:
            run(interrupting)
        except BaseException as error:
            error.add_note(f"interrupted at {', then '.join(interrupting.where) or 'no place'}")
            raise
        if not interrupting.happened:
            return number
    raise AssertionError("unreachable")


def _numbers(step: int) -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += step
