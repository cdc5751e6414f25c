"""Errors as torch programs expect them: ``DistBackendError``, from ours.

Whoever catches ``RuntimeError`` around a collective, as torch programs do, catches these; what
exactly happened, and whose fault it was, is in ``__cause__`` and in the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistBackendError

from rankwire.errors import ConfigurationError, DeadlineExceededError, RankwireError


@contextmanager
def as_torch() -> Iterator[None]:
    """Raise what torch's own backends would: an error of ours becomes theirs."""
    try:
        yield
    except RankwireError as error:
        raise translated(error) from error


def translated(error: BaseException) -> BaseException:
    """Return what to raise instead of an error; another one than ours stays as it is."""
    if isinstance(error, ConfigurationError):
        return ValueError(str(error))
    if not isinstance(error, RankwireError):
        return error
    is_late = isinstance(error, DeadlineExceededError)
    # The words by which programs tell a time limit from other errors, as Gloo writes them.
    text = f"rankwire: Timed out in an operation: {error}" if is_late else str(error)
    theirs: BaseException = DistBackendError(text)
    return theirs
