"""Work handles and errors as torch programs expect them.

torch waits for a ``Work``, asks for its state, and takes a future from it. rankwire's errors are
raised as ``DistBackendError``, a ``RuntimeError``, with the original error as ``__cause__``.
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


class _AsTorch:
    """The type of ``as_torch``. Not made of a generator, which takes 0.7 us more a message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RankwireError):
            raise translated(error) from error


as_torch: Final = _AsTorch()
"""In its block an error of ours is raised as torch's own backends would. Safe from any thread."""


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


_NO_LIMIT = timedelta(0)


def seconds_of(limit: timedelta | None) -> float | None:
    """Return a time limit of torch in seconds; None if it says none (unset is below zero)."""
    if limit is None or limit <= _NO_LIMIT:
        return None
    return limit.total_seconds()


class DoneWork(dist._Work):  # type: ignore[misc]
    """An operation that is done.

    Args:
        tensors: Its result, for the future.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It is."""
        return True

    def exception(self) -> None:
        """There is none."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return list(self._tensors)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


class PendingWork(dist._Work):  # type: ignore[misc]
    """An operation in the background.

    Args:
        work: What runs it.
        tensors: Its result; they are held until it is done.
    """

    def __init__(self, work: Work[Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._tensors = list(tensors)
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until it is done.

        Raises:
            DistBackendError: It has failed, or is not done in time.
        """
        with as_torch:
            self._work.wait(seconds_of(timeout))
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._work.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.done() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """Return its error, if it has ended with one."""
        error = self._work.exception() if self._work.done() else None
        return None if error is None else translated(error)

    def synchronize(self) -> None:
        """Wait until it is done."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that ends with it; its callbacks may use the group."""
        if self._future is None:
            ended: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            # Only what raises in a callback of torch's is an error for its C++ code as well: DDP's
            # reads the exception of ``set_exception`` as if it were tensors, and crashes.
            self._future = ended.then(lambda _: self._outcome())
            self._work.add_done_callback(lambda _: ended.set_result([]))
        return self._future

    def _outcome(self) -> list[torch.Tensor]:
        error = self._work.exception()
        if error is not None:
            raise translated(error) from error
        return self._tensors


class MessageWork(dist._Work):  # type: ignore[misc]
    """A tensor on its way from or to another rank.

    Args:
        handle: The message.
        tensor: The tensor.
        store: Puts what has come into it, if it does not come there.
    """

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

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until it is there, or has left.

        Raises:
            DistBackendError: It cannot come any more, or not in time.
        """
        if not self._is_done:
            with as_torch:
                self._handle.wait(seconds_of(timeout))
            if self._store is not None:
                self._store()
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Whether it is there, has left, or cannot any more."""
        return self._is_done or self._handle.done()

    def is_success(self) -> bool:
        """Whether it is there, or has left."""
        return self._is_done

    def synchronize(self) -> None:
        """Wait until it is there, or has left."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that it came from."""
        source = self._handle.source
        return -1 if source is None else source

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Return the tensor."""
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done: whoever wants it waits for the message here."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        try:
            self.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self.result())
        return future
