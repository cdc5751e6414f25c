"""The exit report: what a rank that leaves because of an error says about it. Pure.

An error that passes a backend's ``with`` block is that rank's fall: the others are told which
error it was, with the traceback, and do not take it for an orderly end. If the rank fell because
it lost another, they are told which one (see ``blame``); if its time was up, for whom it waited.
"""

from __future__ import annotations

from rankwire.errors import DeadlineExceededError
from rankwire.observe.blame import chain, is_consequence, root_of
from rankwire.texts import one_line, printable, text_of, traceback_of
from rankwire.wire.control_messages import Fallen

_INTERRUPTED = 130  # the interpreter ends itself by SIGINT


def fall_by(
    error: BaseException | None, *, rank: int | None = None, first_lost: int | None = None
) -> Fallen | None:
    """Return what to tell the others; None if a rank that leaves by this leaves in good order.

    Args:
        error: What it leaves by.
        rank: Which it is: it does not fall because of itself.
        first_lost: The first rank that it has lost, for a consequence that does not say of whom.
    """
    if error is None or isinstance(error, GeneratorExit):
        return None
    cause = root_of(error)
    if cause is None and is_consequence(error):
        cause = first_lost
    if cause == rank:
        cause = None
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None
        code = error.code & 0xFF if isinstance(error.code, int) else 1
        return Fallen(one_line(f"it exited with {error.code!r}"), "", cause, code)
    return Fallen(
        one_line(f"it raised {describe(error)}"),
        printable(traceback_of(error)),
        cause,
        _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1,
        _waited_for(error),
    )


def _waited_for(error: BaseException) -> list[int]:
    """Return the ranks of the world that were waited for, if an error says that time was up."""
    late = (link for link in chain(error) if isinstance(link, DeadlineExceededError))
    return next((link.culprits for link in late), [])


def describe(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    name = type(error).__name__
    first_line = text_of(error).split("\n", 1)[0]
    return f"{name}: {first_line}" if first_line else name
