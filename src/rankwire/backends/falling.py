"""Falling: what a rank that leaves because of an error says about it. Pure.

An error that passes a backend's ``with`` block is that rank's fall: the others are told which
error it was, with the traceback, and do not take it for an orderly end.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

from rankwire.wire.texts import one_line, printable

__all__ = ["Fall", "fall_by"]


class Fall(NamedTuple):
    """Why a rank fell, in one line, and the traceback."""

    reason: str
    traceback: str


def fall_by(error: BaseException | None) -> Fall | None:
    """Return what to tell the others; None if a rank that leaves by this leaves in good order."""
    if error is None or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None
        return Fall(one_line(f"it exited with {error.code!r}"), "")
    return Fall(one_line(f"it raised {_describe(error)}"), printable(_traceback(error)))


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as second:  # a user's __str__ may raise anything
        text = f"<its text could not be made: {type(second).__name__}>"
    first_line = text.split("\n", 1)[0]
    return f"{name}: {first_line}" if first_line else name


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as second:
        return f"<the traceback could not be made: {type(second).__name__}>"
