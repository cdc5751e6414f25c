"""Mark a method that keeps its base class's contract (``typing.override`` from Python 3.12)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method):
        """Return the method as it is."""
        return method


__all__ = ["override"]
