"""Falling: what a rank that leaves because of an error says about it. Pure.

An error that passes a backend's ``with`` block is that rank's fall: the others are told which
error it was, with the traceback, and do not take it for an orderly end. If the rank fell because
it lost another, they are told which one (see ``blame``).
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

from rankwire.backends.blame import is_consequence, root_of

__all__ = ["Fall", "describe", "fall_by"]

_INTERRUPTED = 130  # the interpreter ends itself by SIGINT
_MAX_REASON = 500
_MAX_TRACEBACK = 32768


class Fall(NamedTuple):
    """Why a rank fell.

    Attributes:
        reason: In one line.
        traceback: Of the error.
        cause: The rank because of whose failure it fell; None for a reason of its own.
        exit_code: What the interpreter exits with if nobody catches the error.
    """

    reason: str
    traceback: str
    cause: int | None = None
    exit_code: int = 1


def fall_by(error: BaseException | None, *, first_lost: int | None = None) -> Fall | None:
    """Return what to tell the others; None if a rank that leaves by this leaves in good order.

    Args:
        error: What it leaves by.
        first_lost: The first rank that it has lost, for a consequence that does not say of whom.
    """
    if error is None or isinstance(error, GeneratorExit):
        return None
    cause = root_of(error)
    if cause is None and is_consequence(error):
        cause = first_lost
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None
        code = error.code & 0xFF if isinstance(error.code, int) else 1
        return Fall(_shortened(f"it exited with {error.code!r}"), "", cause, code)
    return Fall(
        _shortened(f"it raised {describe(error)}"),
        _printable(_traceback(error)),
        cause,
        _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1,
    )


def describe(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as second:  # a user's __str__ may raise anything
        text = f"<its text could not be made: {type(second).__name__}>"
    first_line = text.split("\n", 1)[0]
    return f"{name}: {first_line}" if first_line else name


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as second:
        return f"<the traceback could not be made: {type(second).__name__}>"
    if len(text) <= _MAX_TRACEBACK:
        return text
    half = _MAX_TRACEBACK // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _shortened(text: str) -> str:
    return _printable(text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}...")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
