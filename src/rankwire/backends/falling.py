"""Falling: what a rank that leaves because of an error says about it. Pure.

An error that passes a backend's ``with`` block is that rank's fall: the others are told which
error it was, with the traceback, and do not take it for an orderly end.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

__all__ = ["Fall", "fall_by"]

_MAX_REASON = 500
_MAX_TRACEBACK = 32768


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
        return Fall(_shortened(f"it exited with {error.code!r}"), "")
    return Fall(_shortened(f"it raised {_describe(error)}"), _printable(_traceback(error)))


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
