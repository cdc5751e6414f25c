"""The call that is being served: who asked, how much time is left, how deep it is nested.

A function asks for it with ``current_call()``. Calls that the function makes in turn inherit from
it: their deadline cannot outlive its own, and their depth is one more.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from rankwire.deadline import Deadline

__all__ = ["Call", "current_call", "serving"]


class Call:
    """A call in service.

    Attributes:
        src: The rank that called.
        name: The function's name.
        deadline: When the caller gives up.
        depth: 0 for a call made by a program, 1 for one made while serving that, and so on.
        cancelled: Whether the caller does not want the result any more. Long-running functions look
            at it now and then.
    """

    __slots__ = ("cancelled", "deadline", "depth", "name", "src", "worker")

    def __init__(self, src: int, name: str, deadline: Deadline, depth: int) -> None:
        self.src = src
        self.name = name
        self.deadline = deadline
        self.depth = depth
        self.cancelled = False
        self.worker: Any = None  # the serving thread's record, None on the event loop

    def __repr__(self) -> str:
        return (
            f"<Call of {self.name!r} from rank {self.src}, depth {self.depth}, {self.deadline!r}>"
        )


serving: ContextVar[Call | None] = ContextVar("rankwire_call", default=None)


def current_call() -> Call | None:
    """Return the call that this function was called by, or None outside of one."""
    return serving.get()
