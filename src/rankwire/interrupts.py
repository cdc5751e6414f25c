"""How code here survives an interrupt (Ctrl-C, or any exception of a signal handler).

CPython runs signal handlers in the main thread, when a function begins, after each call of a C
function and at each jump backwards. So an interrupt may fall between a system call and the line
that notes its result. After it is caught, the world must still work. Four rules, used everywhere:

1. **Act and note in one C call.** ``notes.extend(map(function, ...))`` calls a C function and
   stores what it returns with no place for an interrupt between. ``call_and_note`` and
   ``pop_into`` have names for it; paths that every message takes write it out, because a Python
   call costs 40 ns. The function must be written in C, and the notes are made before the ``try``
   whose ``finally`` reads them::

       grip: list[bool] = []
       try:
           call_and_note(grip, lock.acquire, False)
           ...
       finally:
           if grip == [True]:
               lock.release()

2. **Clean up twice.** A second interrupt may end the cleaning up after the first, so it is made
   safe to repeat, and written as::

       try:
           self._leave(visit)
       except BaseException:
           self._leave(visit)  # interrupted
           raise

   This is no function: an interrupt could fall where that begins, before its ``try``.

3. **Change state in one assignment.** What belongs together is one tuple. Until it is replaced the
   old one holds, and the next thread repeats the work.

4. **Note an intention before it has effects**, and remove the note last.

``tests/interrupts.py`` raises an interrupt at every such place in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import Any, TypeVar

T = TypeVar("T")

# ``starmap(items.pop, ONCE)`` removes an item when it is consumed, in the C function that does so.
ONCE: tuple[tuple[()]] = ((),)


def call_and_note(notes: list[T], function: Callable[..., T], *args: Any) -> None:
    """Call a C function and append its result to ``notes``, in one step."""
    notes.extend(starmap(function, (args,)))


def pop_into(function: Callable[[T], object], items: list[T]) -> None:
    """Remove the last item and pass it to a C function, in one step."""
    deque(map(function, starmap(items.pop, ONCE)), 0)
