"""Encode what torch programs send: tensors, references, workers, functions and classes.

Functions and classes are sent by name under ``naming_rule``, or as pickles where these are allowed.
Every number from another rank is checked before torch sees it.

The owner counts a handle before the message is sent; a rank that passes one on notifies the owner
(``object_requests``). If the message is certainly not sent, that is undone.
"""

from __future__ import annotations

import abc
import math
import types
from typing import Any

import torch

from rankwire import runtime
from rankwire.codec.codec import Codec
from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import ConfigurationError, InvalidMessageError
from rankwire.torch.rpc.autograd_contexts import received, sent
from rankwire.torch.rpc.call_results import CallFuture
from rankwire.torch.rpc.naming_rule import NamingRule, name_of
from rankwire.torch.rpc.owned_objects import ObjectId
from rankwire.torch.rpc.remote_module import RemoteModule, build_remote_module, take_remote_module
from rankwire.torch.rpc.rref import RRef
from rankwire.torch.rpc.session import WorkerInfo, current

# A tensor with larger gaps arrives without them, to save memory.
_MOST_GAPS = 16
_SPARE_ELEMENTS = 1024
_MAX_NDIM = 32
_DENSE, _COO, _ROWS, _COLUMNS = 0, 1, 2, 3
_COMPRESSED = {torch.sparse_csr: _ROWS, torch.sparse_csc: _COLUMNS}
_CLASSES: dict[str, type] = {
    "torch:Tensor": torch.Tensor,
    "torch.nn.parameter:Parameter": torch.nn.Parameter,
    "torch:Size": torch.Size,
    "builtins:NoneType": type(None),
}


def register_hooks(codec: Codec, rule: NamingRule) -> None:
    """Register the hooks with a codec."""
    codec.register(torch.Tensor, name="torch.Tensor", take=take_tensor, build=build_tensor)
    codec.register(
        torch.nn.Parameter, name="torch.Parameter", take=_take_parameter, build=_build_parameter
    )
    codec.register(RRef, name="torch.rpc.RRef", take=take_rref, build=build_rref)
    codec.register(
        RemoteModule,
        name="torch.rpc.RemoteModule",
        take=take_remote_module,
        build=build_remote_module,
    )
    codec.register(WorkerInfo, name="torch.rpc.WorkerInfo", take=_take_worker, build=_build_worker)
    for future in (CallFuture, torch.futures.Future, torch._C.Future):
        codec.register(
            future, name=f"{future.__module__}.{future.__name__}", take=_refuse, build=_build_none
        )
    if not codec.allows_pickle:
        _register_named(codec, rule)


def take_tensor(tensor: torch.Tensor, sending: TakeContext) -> Any:
    """Return a tensor in encoded form."""
    if tensor.layout is torch.strided:
        is_plain = tensor.is_contiguous() and not tensor.requires_grad
        return NotImplemented if is_plain or tensor.device.type != "cpu" else _take_strided(tensor)
    plain = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        parts = [plain._indices(), plain._values(), tensor.is_coalesced()]
        return [_COO, _history(tensor), list(tensor.shape), *parts]
    if tensor.layout in _COMPRESSED:
        kind = _COMPRESSED[tensor.layout]
        inner, outer = (
            (plain.crow_indices(), plain.col_indices())
            if kind == _ROWS
            else (plain.ccol_indices(), plain.row_indices())
        )
        return [kind, _history(tensor), list(tensor.shape), inner, outer, plain.values()]
    return NotImplemented


def build_tensor(parts: Any, receiving: BuildContext) -> torch.Tensor:
    """Return the tensor that another rank encoded."""
    match parts:
        case [0, int() as history, torch.Tensor() as dense, list() as strides]:
            tensor = _strided(dense, strides)
        case [1, int() as history, list() as shape, *rest] if _are_tensors(rest[:2]):
            indices, values, is_coalesced = rest
            tensor = torch.sparse_coo_tensor(
                indices, values, _shape(shape), check_invariants=True, is_coalesced=is_coalesced
            )
        case [(2 | 3) as kind, int() as history, list() as shape, *rest] if _are_tensors(rest):
            make = torch.sparse_csr_tensor if kind == _ROWS else torch.sparse_csc_tensor
            tensor = make(*rest, _shape(shape), check_invariants=True)
        case _:
            raise InvalidMessageError("malformed tensor")
    return _with_history(tensor, history, receiving)


def _are_tensors(values: list[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _history(tensor: torch.Tensor) -> int:
    """Return whether a tensor requires a gradient, or its number in a message of a context."""
    number = sent(tensor) if tensor.requires_grad else None
    return tensor.requires_grad if number is None else number


def _with_history(tensor: torch.Tensor, history: int, receiving: BuildContext) -> torch.Tensor:
    if type(history) is not bool:
        return received(tensor, history, receiving)
    return tensor.requires_grad_() if history else tensor


def _take_strided(tensor: torch.Tensor) -> list[Any]:
    dense = tensor.detach()
    if dense.is_contiguous() or not _may_have_strides(tensor.shape, tensor.stride()):
        return [_DENSE, _history(tensor), dense.contiguous(), []]
    return [_DENSE, _history(tensor), dense.contiguous(), list(tensor.stride())]


def _strided(dense: torch.Tensor, strides: list[Any]) -> torch.Tensor:
    if not strides:
        return dense
    if len(strides) != dense.ndim or not all(map(_is_natural, strides)):
        raise InvalidMessageError("malformed strides of a tensor")
    if not _may_have_strides(dense.shape, strides):
        raise InvalidMessageError("a tensor with gaps that are too large, or that overlaps itself")
    # Zeros in the gaps: as_strided() would show old memory.
    reach = 1 + sum(
        stride * (extent - 1) for stride, extent in zip(strides, dense.shape, strict=True)
    )
    return dense.new_zeros(reach).as_strided(dense.shape, strides).copy_(dense)


def _may_have_strides(shape: Any, strides: Any) -> bool:
    """Return whether no two elements share memory, and the gaps are small."""
    count = math.prod(shape)
    if count == 0:
        return False
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return False
            reach += stride * (extent - 1)
    return bool(reach <= _MOST_GAPS * count + _SPARE_ELEMENTS)


def _take_parameter(parameter: torch.nn.Parameter, sending: TakeContext) -> Any:
    number = sent(parameter) if parameter.requires_grad else None
    return NotImplemented if number is None else [number, parameter.detach()]


def _build_parameter(parts: Any, receiving: BuildContext) -> torch.Tensor:
    match parts:
        case [int() as number, torch.Tensor() as data]:
            return received(data, number, receiving)
    raise InvalidMessageError("malformed parameter")


def _take_worker(worker: WorkerInfo, sending: TakeContext) -> list[Any]:
    return [worker.name, worker.id]


def _build_worker(parts: Any, receiving: BuildContext) -> WorkerInfo:
    match parts:
        case [str() as name, int() as id]:
            return WorkerInfo(name, id)
    raise InvalidMessageError("malformed WorkerInfo")


def _refuse(future: Any, sending: TakeContext) -> Any:
    raise ConfigurationError(
        "Can not pickle torch.futures.Future: nor does it travel otherwise. Wait for it, or "
        "decorate a function that returns one with @rpc.functions.async_execution."
    )


def _build_none(parts: Any, receiving: BuildContext) -> Any:
    raise InvalidMessageError("futures do not travel")


def _shape(extents: Any) -> list[int]:
    if type(extents) is not list or len(extents) > _MAX_NDIM or not all(map(_is_natural, extents)):
        raise InvalidMessageError("malformed shape")
    return extents


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _register_named(codec: Codec, rule: NamingRule) -> None:
    names = {cls: name for name, cls in _CLASSES.items()}

    def take(value: Any, sending: TakeContext) -> str:
        return names.get(value) or name_of(value)

    def build(name: Any, receiving: BuildContext) -> Any:
        if not isinstance(name, str):
            raise InvalidMessageError("malformed name of a function")
        return _CLASSES.get(name) or rule.find(name)

    kinds = {
        types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, abc.ABCMeta,
        type(torch.Tensor), type(torch.nn.Parameter),
    }  # fmt: skip
    for kind in kinds:
        codec.register(kind, name=f"{kind.__module__}.{kind.__qualname__}", take=take, build=build)


_sent_back_lock = runtime.Lock()  # guards ``RRef._sent_back``; a leaf


def take_rref(rref: RRef[Any], sending: TakeContext) -> list[int]:
    """Return a handle in encoded form, and count it or notify its owner."""
    session = rref._usable("Cannot call fork an UserRRef after deletion.")
    peer, id = sending.peer, rref._id
    if peer is None:
        raise ConfigurationError("An RRef can be sent to one rank at a time.")
    if rref._owned is not None:
        session.owned.give(rref._owned, peer)
        sending.undo(lambda: session.owned.release(id, peer, session.me.id))
    elif peer == rref._owner:
        _send_back(rref, 1)
        sending.undo(lambda: _send_back(rref, -1))
    else:
        session.updates.passed_on(rref._owner, id, peer)
        sending.undo(lambda: session.updates.passed_on(rref._owner, id, peer, -1))
    return [rref._owner, *id]


def build_rref(handle: Any, receiving: BuildContext) -> RRef[Any]:
    """Return the handle that another rank sent."""
    session, peer = current(), receiving.peer
    if type(handle) is not list or len(handle) != 4 or not all(map(_is_natural, handle)):
        raise InvalidMessageError("a handle is four numbers")
    owner, id = handle[0], ObjectId(*handle[1:])
    if peer is None or owner >= len(session.workers) or id.creator >= len(session.workers):
        raise InvalidMessageError("a handle of no rank")
    me = session.me.id
    if owner != me:
        return RRef._of(session, owner, id, giver=peer)
    if peer != me:
        return RRef._of(session, me, id, session.owned.came_back(id, peer))
    owned = session.owned.expect(id, me)
    session.owned.release(id, me, me)
    return RRef._of(session, me, id, owned)


def _send_back(rref: RRef[Any], count: int) -> None:
    with _sent_back_lock:
        rref._sent_back += count
