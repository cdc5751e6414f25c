"""Keep code correct when an interrupt (Ctrl-C, or a signal handler that raises) comes anywhere.

CPython runs signal handlers in the main thread: when a function begins, after each call of a C
function and at each jump backwards. So an interrupt may come between a system call and the line
that notes its result. The world must still work after that. Four rules, used everywhere:

1. **Act and note in one C call.** ``notes.extend(map(function, ...))`` calls a C function and
   stores its result without a place for an interrupt between. Use ``call_and_note`` and
   ``pop_into``, or write it out where every message passes, because a Python call costs 40 ns.
   Create the notes before the ``try`` whose ``finally`` reads them::

       grip: list[bool] = []
       try:
           call_and_note(grip, lock.acquire, False)
           ...
       finally:
           if grip == [True]:
               lock.release()

2. **Clean up twice.** A second interrupt may end the cleanup after the first, so cleanup is safe to
   repeat. It is not a function, where an interrupt could come before its ``try``::

       try:
           self._leave(visit)
       except BaseException:
           self._leave(visit)  # interrupted
           raise

3. **Change state in one assignment.** Values that belong together are one tuple. Until it is
   replaced, the old one holds, and the next thread repeats the work.
4. **Note an intention before it has effects**, and remove the note last.

``tests/interrupts.py`` raises an interrupt at every such place in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import Any, TypeVar

T = TypeVar("T")

# ``starmap(items.pop, ONCE)`` removes an item in the same C call that consumes it.
ONCE: tuple[tuple[()]] = ((),)


def call_and_note(notes: list[T], function: Callable[..., T], *args: Any) -> None:
    """Call a C function and append its result to ``notes``, in one step."""
    notes.extend(starmap(function, (args,)))


def pop_into(function: Callable[[T], object], items: list[T]) -> None:
    """Remove the last item and pass it to a C function, in one step."""
    deque(map(function, starmap(items.pop, ONCE)), 0)
