"""Work handles and errors as torch programs expect them.

rankwire's errors become the ``__cause__`` of a ``DistBackendError``, which is a ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError

from rankwire.backends.handles import MessageHandle
from rankwire.collectives.work import Work
from rankwire.errors import ConfigurationError, DeadlineExceededError, RankwireError
from rankwire.override import override


class _AsTorch:
    """The type of ``as_torch``. A generator-based context manager takes 0.7 us more a message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RankwireError):
            raise translated(error) from error


as_torch: Final = _AsTorch()
"""Raises rankwire's errors in its block as torch's backends would. Safe from any thread."""


def translated(error: BaseException) -> BaseException:
    """Return the error to raise instead; errors that are not rankwire's are returned unchanged."""
    if isinstance(error, ConfigurationError):
        return ValueError(str(error))
    if not isinstance(error, RankwireError):
        return error
    is_late = isinstance(error, DeadlineExceededError)
    # Programs recognize a timeout by Gloo's words.
    how = "rankwire: Timed out in an operation: " if is_late else ""
    return DistBackendError(f"{how}{error}")  # type: ignore[no-any-return]


_NO_LIMIT = timedelta(0)


def seconds_of(limit: timedelta | None) -> float | None:
    """Return torch's timeout in seconds; None if it is not set (torch uses values below zero)."""
    return None if limit is None or limit <= _NO_LIMIT else limit.total_seconds()


class OperationWork(dist._Work):  # type: ignore[misc]
    """The handle of a collective. ``work`` is None if it has finished."""

    def __init__(self, work: Work[Any] | None, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._work = work
        self._tensors = list(tensors)
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @override
    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if self._work is not None:
            with as_torch:
                self._work.wait(seconds_of(timeout))
        return True

    @override
    def is_completed(self) -> bool:
        return self._work is None or self._work.done()

    @override
    def is_success(self) -> bool:
        return self.is_completed() and self._error() is None

    @override
    def exception(self) -> BaseException | None:
        error = self._error() if self.is_completed() else None
        return None if error is None else translated(error)

    def _error(self) -> BaseException | None:
        return None if self._work is None else self._work.exception()

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that ends with the operation; its callbacks may use the group."""
        if self._future is None:
            ended: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            # Raise in a callback: DDP's C++ code reads the exception of ``set_exception`` as if
            # it were tensors, and crashes.
            self._future = ended.then(lambda _: self._outcome())
            if self._work is None:
                ended.set_result([])
            else:
                self._work.add_done_callback(lambda _: ended.set_result([]))
        return self._future

    def _outcome(self) -> list[torch.Tensor]:
        error = self._error()
        if error is not None:
            raise translated(error) from error
        return self._tensors


class MessageWork(dist._Work):  # type: ignore[misc]
    """The handle of a message; ``store`` copies it to a tensor that was not received in place."""

    def __init__(
        self,
        handle: MessageHandle,
        tensor: torch.Tensor,
        store: Callable[[], None] | None = None,
    ) -> None:
        dist._Work.__init__(self)  # by its name: a message of 8 bytes takes 15 us
        self._handle = handle
        self._tensor = tensor
        self._store = store
        self._is_done = False

    @override
    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if not self._is_done:
            with as_torch:
                self._handle.wait(seconds_of(timeout))
            if self._store is not None:
                self._store()
            self._is_done = True
        return True

    @override
    def is_completed(self) -> bool:
        return self._is_done or self._handle.done()

    @override
    def is_success(self) -> bool:
        return self._is_done

    @override
    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that sent the message, or -1."""
        source = self._handle.source
        return -1 if source is None else source

    _source_rank = source_rank

    @override
    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait for the message, and return a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        try:
            self.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self.result())
        return future
