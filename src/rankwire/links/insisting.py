"""Insisting: what puts things in order after an interrupt must itself survive one.

A second Ctrl-C may fall into the handler of the first. What is called here is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["insist"]

T = TypeVar("T")


def insist(step: Callable[[T], None], argument: T) -> None:
    """Take a step to its end although an interrupt falls into it, once or twice."""
    try:
        step(argument)
    except Exception:
        raise
    except BaseException:
        try:
            step(argument)
        except Exception:
            raise
        except BaseException:
            step(argument)
        raise
