"""Marks a method that keeps the contract of its base class (in ``typing`` from Python 3.12 on)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method):
        """Return the method as it is."""
        return method


__all__ = ["override"]
