"""Says how something that may fail has ended, as a text."""

from collections.abc import Callable
from typing import Any


def error_of(function: Callable[[], Any]) -> str:
    """Return the name of the error's class, or ``"no error"``."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "no error"
