"""Arguments, operations and handles of torch's groups. Errors have rankwire's as ``__cause__``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, ReduceOp

import rankwire
from rankwire.backends.base import Backend
from rankwire.backends.handles import MessageHandle
from rankwire.collectives.operations import all_gather
from rankwire.collectives.reductions import PremulSum
from rankwire.collectives.work import Work
from rankwire.errors import ConfigurationError, DeadlineExceededError, RankwireError
from rankwire.override import override
from rankwire.torch.devices import plain


class _AsTorch:
    """The type of ``as_torch``. A generator-based context manager takes 0.7 us more per message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RankwireError):
            raise translated(error) from error


as_torch: Final = _AsTorch()
"""Raises rankwire's errors in its block as torch's backends would. Safe from any thread."""


def translated(error: BaseException) -> BaseException:
    """Return torch's error for one of rankwire, or any other error unchanged."""
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
    """Return torch's timeout in seconds; None if it is not set (0 or negative)."""
    return None if limit is None or limit <= _NO_LIMIT else limit.total_seconds()


# By number: looking up the enum takes 1 us more, as each access creates an object.
_OPS = {
    int(ReduceOp.SUM): "sum",
    int(ReduceOp.AVG): "mean",
    int(ReduceOp.PRODUCT): "product",
    int(ReduceOp.MIN): "min",
    int(ReduceOp.MAX): "max",
    int(ReduceOp.BAND): "bitwise_and",
    int(ReduceOp.BOR): "bitwise_or",
    int(ReduceOp.BXOR): "bitwise_xor",
}


def op_of(reduce_op: Any) -> Any:
    """Return rankwire's op for a ``ReduceOp``, or raise ``ConfigurationError``."""
    kind = reduce_op.op if type(reduce_op) is ReduceOp else reduce_op
    op = _OPS.get(int(kind))
    if op is not None:
        return op
    if reduce_op == ReduceOp.PREMUL_SUM:
        return PremulSum(reduce_op.factor)
    raise ConfigurationError(f"rankwire has no reduction {reduce_op}")


def add_sparse(backend: Backend, tensor: torch.Tensor, op: object, timeout: float | None) -> None:
    """Replace a sparse tensor by its sum over all ranks, in rank order."""
    if op != "sum":
        raise ConfigurationError("sparse tensors can only be summed (ReduceOp.SUM)")
    own = tensor.coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    counts = torch.empty(backend.world_size, dtype=torch.int64)
    all_gather(backend, torch.tensor([values.shape[0]]), out=counts, timeout=timeout)
    of_all = counts.tolist()
    all_indices = [indices.new_empty((indices.shape[0], count)) for count in of_all]
    all_values = [values.new_empty((count, *values.shape[1:])) for count in of_all]
    all_gather(backend, indices, out=all_indices, timeout=timeout)
    all_gather(backend, values, out=all_values, timeout=timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape, check_invariants=False
    )
    tensor.copy_(total.coalesce())


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks, and name the missing ones on timeout. torch's function is for Gloo only.

    Args:
        group: A process group; the default one if None. Other backends' groups are passed to torch.
        timeout: The group's timeout if None.
        wait_all_ranks: Ignored on rankwire: every rank always names all missing ranks.

    Raises:
        DistBackendError: Ranks are missing; the text and ``__cause__.waiting_for`` name them.
    """
    chosen = dist.group.WORLD if group is None else group
    ranks = getattr(chosen, "ranks", None)
    if isinstance(ranks, Backend):
        meet_monitored(ranks, timeout)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def meet_monitored(ranks: Backend, timeout: timedelta | None) -> None:
    """Run a barrier whose error has Gloo's wording."""
    with as_torch:
        try:
            rankwire.barrier(ranks, timeout=seconds_of(timeout))
        except DeadlineExceededError as error:
            late = ", ".join(map(str, error.waiting_for))
            text = f"[Rank {ranks.rank}]: Ranks {late} failed to pass monitoredBarrier: {error}"
            raise DistBackendError(text) from error


def options_of(kind: type[Any], given: Any) -> Any:
    """Return torch's options; older forms of a call pass an op, or nothing."""
    if type(given) is kind:
        return given
    if given is None:
        return kind()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options = kind()
        options.reduceOp = given
        return options
    return given


def only_tensor(tensors: Any) -> torch.Tensor:
    """Return the only tensor of a call."""
    if isinstance(tensors, torch.Tensor):
        return plain(tensors)
    if len(tensors) != 1:
        raise ConfigurationError(f"one tensor a rank, not {len(tensors)}")
    only = tensors[0]
    return only if type(only) is torch.Tensor else plain(only)


def only_list(lists: Any) -> list[torch.Tensor]:
    """Return the only list of tensors of a call."""
    if lists and isinstance(lists[0], torch.Tensor):
        return [plain(tensor) for tensor in lists]
    if len(lists) != 1:
        raise ConfigurationError(f"one list of tensors a rank, not {len(lists)}")
    return [plain(tensor) for tensor in lists[0]]


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view, or the tensor itself if it is not contiguous."""
    tensor = plain(tensor)
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def bytes_view(flat: Any) -> memoryview:
    """Return the bytes of a flat array."""
    view: memoryview = flat.view(np.uint8).data
    return view


def cut(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split a tensor into these sizes along dimension 0."""
    return list(torch.split(tensor, list(sizes)))


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
        """Return a future that completes with the operation; its callbacks may use the group."""
        if self._future is None:
            ended: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            # In a callback: DDP's C++ reads ``set_exception``'s exception as tensors and crashes.
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
        dist._Work.__init__(self)  # not super(): a message of 8 bytes takes only 15 us
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
        """Wait for the message, and return a completed future."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        try:
            self.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self.result())
        return future
