"""The process group: every operation of ``torch.distributed``, on a rankwire backend.

DDP, functional collectives and compiled graphs call the methods below by these names and by older
ones. A blocking call (``opts.asyncOp`` is False) runs in the caller's thread and returns None.
Other calls run in the background and return a work. Errors are torch's (``group_operations``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import rankwire
from rankwire.backends.base import Backend
from rankwire.backends.posting import ANY_RANK
from rankwire.backends.sub import SubBackend
from rankwire.codec.tensors import bytes_of
from rankwire.collectives.operands import operand
from rankwire.errors import RankwireError
from rankwire.finalizers import hand_over
from rankwire.observe.stacks import show_as
from rankwire.override import override
from rankwire.torch.devices import Devices, plain
from rankwire.torch.group_operations import (
    MessageWork,
    OperationWork,
    add_sparse,
    as_torch,
    bytes_view,
    cut,
    flattened,
    meet_monitored,
    only_list,
    only_tensor,
    op_of,
    options_of,
    seconds_of,
    translated,
)
from rankwire.torch.torch_rendezvous import form_world, register_launchers, take_formed

Tensors = Sequence[torch.Tensor]

_COPIED = 4 << 10  # bytes; up to this size, copying a message (0.1 us) costs less than a check


def create_group(options: Any, backend_options: Any = None) -> RankwireGroup:
    """Create a group of the rankwire world, or a new world whose ranks meet at the store."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    world = dist.group.WORLD if dist.is_initialized() else None
    with as_torch:
        if isinstance(world, RankwireGroup):
            members = list(options.global_ranks_in_group)
            seconds = timeout.total_seconds()
            ranks: Backend = SubBackend(world.ranks, members, keep_order=True, timeout=seconds)
        else:
            formed = take_formed(rank, size) if world is None else None
            ranks = formed or form_world(options.store, rank, size, timeout)
            ranks.timeout = timeout.total_seconds()
    return RankwireGroup(ranks, options.store)


def register() -> None:
    """Register with torch. Torch calls this during its import, or we during ours. Idempotent."""
    if not hasattr(dist.Backend, "RANKWIRE"):
        dist.Backend.register_backend("rankwire", create_group, extended_api=True, devices=["cpu"])
    register_launchers()


def _on_any_device(operation: Callable[..., Any]) -> Callable[..., Any]:
    name = operation.__name__

    @wraps(operation)
    def route(group: RankwireGroup, *args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else None
        if type(first) is list and first:
            first = first[0]
        if type(first) is torch.Tensor and first.is_cpu:  # the usual case: 0.7 us less
            return operation(group, *args, **kwargs)
        device = group.devices.device_of(args)
        if device == "cpu":
            return operation(group, *args, **kwargs)
        return group.devices.run(name, device, partial(operation, group), args, kwargs)

    show_as(name, route)
    return route


class _GroupBase(dist.ProcessGroup):  # type: ignore[misc]
    def __init__(self, ranks: Backend, store: Any) -> None:
        super().__init__(ranks.rank, ranks.world_size)
        self.ranks = ranks
        self.devices = Devices(self, timedelta(seconds=ranks.timeout))
        self._store = store
        self._name = ""
        self._description = "undefined"
        # Not at exit: then the backend closes itself, with the error that ends the process.
        weakref.finalize(self, hand_over, ranks.close).atexit = False

    @override
    def getBackendName(self) -> str:
        return "rankwire"

    @override
    def get_group_store(self) -> Any:
        return self._store

    @override
    def getGroupName(self) -> str:
        return self._name

    @override
    def setGroupName(self, name: str) -> None:
        self._name = name

    @override
    def getGroupDesc(self) -> str:
        return self._description

    @override
    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in ("cpu", *self.devices.others())]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @override
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        meet_monitored(self.ranks, timeout)

    @override
    def shutdown(self) -> None:
        self.ranks.close()

    def abort(self) -> None:
        """Leave the group at once; pending operations fail on all ranks."""
        self.ranks.close(error=RuntimeError("the process group was aborted"))

    def set_timeout(self, timeout: timedelta) -> None:
        self.ranks.timeout = timeout.total_seconds()

    def __repr__(self) -> str:
        return f"<RankwireGroup {self._name!r} on {self.ranks!r}>"

    def _run(
        self, opts: Any, tensors: Tensors, operation: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        is_async = getattr(opts, "asyncOp", True)
        limit = seconds_of(opts.timeout)
        try:
            work = operation(self.ranks, *args, async_op=is_async, timeout=limit, **kwargs)
        except RankwireError as error:
            raise translated(error) from error
        return OperationWork(work, tensors) if is_async else None


class RankwireGroup(_GroupBase):
    """A process group of torch on a rankwire backend. Safe from any thread.

    Attributes:
        ranks: The backend, for calls and messages that torch has no method for.
    """

    @_on_any_device
    @override
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensor = only_tensor(tensors)
        opts = options_of(c10d.AllreduceOptions, opts)
        if tensor.is_sparse:
            with as_torch:
                add_sparse(self.ranks, tensor, op_of(opts.reduceOp), seconds_of(opts.timeout))
            return OperationWork(None, [tensor])
        return self._run(opts, [tensor], rankwire.all_reduce, tensor, op_of(opts.reduceOp))

    @_on_any_device
    @override
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = options_of(c10d.AllreduceCoalescedOptions, opts)
        op = op_of(opts.reduceOp)
        return self._run(opts, tensors, rankwire.all_reduce_coalesced, [*map(plain, tensors)], op)

    @_on_any_device
    @override
    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensor = only_tensor(tensors)
        opts = options_of(c10d.ReduceOptions, opts)
        root, op = opts.rootRank, op_of(opts.reduceOp)
        out = tensor if self.ranks.rank == root else None
        return self._run(opts, [tensor], rankwire.reduce, tensor, root, op, out=out)

    @_on_any_device
    @override
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensor = only_tensor(tensors)
        opts = options_of(c10d.BroadcastOptions, opts)
        return self._run(opts, [tensor], rankwire.broadcast, tensor, opts.rootRank)

    @_on_any_device
    @override
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        out, tensor = only_list(outputs), only_tensor(inputs)
        opts = options_of(c10d.AllgatherOptions, opts)
        return self._run(opts, out, rankwire.all_gather, tensor, out=out)

    @_on_any_device
    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Any:
        """Gather the tensors of all ranks into one tensor on every rank."""
        opts = options_of(c10d.AllgatherOptions, opts)
        return self._run(
            opts, [output], rankwire.all_gather, flattened(source), out=flattened(output)
        )

    @_on_any_device
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Gather many tensors of all ranks, each into one tensor."""
        opts = options_of(c10d.AllgatherOptions, opts)
        flat, out = [flattened(each) for each in inputs], [flattened(each) for each in outputs]
        return self._run(opts, outputs, rankwire.all_gather_coalesced, flat, out=out)

    @_on_any_device
    @override
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Any:
        opts = options_of(c10d.AllgatherOptions, opts)
        works = [
            self._run(opts, out, rankwire.all_gather, tensor, out=list(out))
            for tensor, out in zip(inputs, zip(*output_lists, strict=True), strict=True)
        ]
        return works[-1] if works else OperationWork(None)

    @_on_any_device
    @override
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        tensor = only_tensor(inputs)
        opts = options_of(c10d.GatherOptions, opts)
        out = only_list(outputs) if self.ranks.rank == opts.rootRank else None
        held = [tensor] if out is None else out
        return self._run(opts, held, rankwire.gather, tensor, opts.rootRank, out=out)

    @_on_any_device
    @override
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        out = only_tensor(outputs)
        opts = options_of(c10d.ScatterOptions, opts)
        tensors = only_list(inputs) if self.ranks.rank == opts.rootRank else None
        return self._run(opts, [out], rankwire.scatter, tensors, opts.rootRank, out=out)

    @_on_any_device
    @override
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        out, tensors = only_tensor(outputs), only_list(inputs)
        opts = options_of(c10d.ReduceScatterOptions, opts)
        op = op_of(opts.reduceOp)
        return self._run(opts, [out], rankwire.reduce_scatter, tensors, op, out=out)

    @_on_any_device
    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Any:
        """Reduce a tensor over all ranks; each rank gets its part."""
        opts = options_of(c10d.ReduceScatterOptions, opts)
        op, out = op_of(opts.reduceOp), flattened(output)
        return self._run(opts, [output], rankwire.reduce_scatter, flattened(source), op, out=out)

    @_on_any_device
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Reduce many tensors over all ranks; each rank gets its part of each."""
        opts = options_of(c10d.ReduceScatterOptions, opts)
        op = op_of(opts.reduceOp)
        flat, out = [flattened(each) for each in inputs], [flattened(each) for each in outputs]
        return self._run(opts, outputs, rankwire.reduce_scatter_coalesced, flat, op, out=out)

    @_on_any_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Send part i along dimension 0 to rank i, in equal parts or in the given sizes."""
        opts = options_of(c10d.AllToAllOptions, opts)
        if not output_sizes and not input_sizes:
            return self._run(
                opts, [output], rankwire.all_to_all, flattened(source), out=flattened(output)
            )
        size = self.ranks.world_size
        parts = cut(source, input_sizes or [source.shape[0] // size] * size)
        out = cut(output, output_sizes or [output.shape[0] // size] * size)
        return self._run(opts, [output], rankwire.all_to_all, parts, out=out)

    @_on_any_device
    @override
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = options_of(c10d.AllToAllOptions, opts)
        return self._run(
            opts, outputs, rankwire.all_to_all, [*map(plain, inputs)], out=[*map(plain, outputs)]
        )

    @override
    def barrier(self, opts: Any = None) -> Any:
        return self._run(options_of(c10d.BarrierOptions, opts), [], rankwire.barrier)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send a tensor to a rank; it must not change before the work is done."""
        tensor = only_tensor(tensors)
        with as_torch:
            data: bytes | memoryview = bytes_of(tensor) or bytes_view(operand(tensor).flat())
            if len(data) <= _COPIED:
                data = bytes(data)
            return MessageWork(self.ranks.isend(data, dst, tag), tensor)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from any rank; the work's ``source_rank()`` identifies it."""
        return self.recv(tensors, ANY_RANK, tag)

    @override
    def recv(self, tensors: Any, src: Any, tag: int = 0) -> Any:
        tensor = only_tensor(tensors)
        with as_torch:
            whole = bytes_of(tensor)
            if whole is not None:
                return MessageWork(self.ranks.irecv_into(whole, src, tag), tensor)
            target = operand(tensor)
            flat = target.flat()
            handle = self.ranks.irecv_into(bytes_view(flat), src, tag)
            return MessageWork(handle, tensor, partial(target.store, flat))

    # Older names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
