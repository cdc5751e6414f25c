"""The memory of tensors, as arrays on it.

Never ``tensor.numpy()``: after that torch refuses to resize the tensor's storage, for ever, and
programs that free the memory of their parameters between two uses fail. An array made here holds
the storage as long as somebody uses it. It knows torch and never imports it: who holds a tensor
has.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NUMBERS = "biufc"  # the kinds of numpy's own dtypes that torch has too; others are of extensions


@lru_cache(maxsize=256)
def carrier_of(dtype: Any) -> tuple[np.dtype[Any], str, bool]:
    """Return numpy's dtype for the elements of a torch dtype, and that one's name.

    Where numpy has no such dtype, that is of whole numbers of the same size; the last item is
    whether they are only moved.
    """
    name = str(dtype).removeprefix("torch.")
    try:
        same = np.dtype(name)
    except TypeError:
        same = None
    if same is not None and same.kind in _NUMBERS:
        return same, name, False
    return np.dtype(f"i{dtype.itemsize}"), name, name != "bfloat16"


def map_tensor(tensor: Any, carrier: np.dtype[Any]) -> Array | None:
    """Return an array on the memory of a dense tensor of the CPU; None if it has too little.

    Lazy views are not resolved: their memory is as it is. The array can not be written if some of
    its elements are the same memory, as of an expanded tensor.

    Args:
        tensor: Which.
        carrier: The dtype of the array, of the same size as the tensor's.
    """
    shape, reach = tuple(tensor.shape), tensor.numel()
    if not reach:  # it need not have an address
        return np.empty(shape, carrier)
    strides, is_frozen, itemsize = None, False, carrier.itemsize
    if not tensor.is_contiguous():
        steps = tensor.stride()
        strides = tuple(step * itemsize for step in steps)
        is_frozen = any(not step and extent > 1 for step, extent in zip(steps, shape, strict=True))
        reach = 1 + sum(step * (extent - 1) for step, extent in zip(steps, shape, strict=True))
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    if storage.nbytes() < (offset + reach) * itemsize:
        return None
    interface = {
        "shape": shape,
        "typestr": carrier.str,
        "strides": strides,
        "data": (storage.data_ptr() + offset * itemsize, is_frozen),
        "version": 3,
    }
    return np.asarray(_HeldMemory(storage, interface))


def bytes_of(tensor: Any) -> memoryview | None:
    """Return the memory of a dense tensor of the CPU as bytes; None if it is not just that.

    So if it has gaps, is a lazy view, is elsewhere, is empty, or has too little memory.

    Args:
        tensor: One of torch's own classes.
    """
    if tensor.layout is not sys.modules["torch"].strided or not tensor.is_cpu:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return None
    nbytes, start = tensor.nbytes, tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()
    if not nbytes or storage.nbytes() < start + nbytes:
        return None
    interface = {
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (storage.data_ptr() + start, False),
        "version": 3,
    }
    return np.asarray(_HeldMemory(storage, interface)).data


class _HeldMemory:
    """The memory of a tensor. An array made of it holds this, and so the storage.

    Not the tensor: that may be given another storage while a message leaves (``p.data = ...``).
    """

    __slots__ = ("__array_interface__", "storage")

    def __init__(self, storage: Any, interface: dict[str, Any]) -> None:
        self.storage = storage
        self.__array_interface__ = interface
