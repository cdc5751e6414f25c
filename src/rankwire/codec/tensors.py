"""torch tensors, parameters and constants as a short description and their bytes, like ``arrays``.

A description is a msgpack array of torch's name for the dtype, from a closed list, and the shape.
A parameter's begins with ``requires_grad``. Sending never imports torch; receiving does.

Arrays on a tensor's memory are never made by ``tensor.numpy()``: after that torch refuses to resize
the storage, and programs that free their parameters between two uses fail.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache, lru_cache
from typing import Any

import msgspec
import numpy as np

from rankwire.codec.arrays import (
    MAX_NDIM,
    Array,
    ArrayHead,
    array_bytes,
    checked_head,
    description_parts,
    dtype_of,
)
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

# torch's names with the little-endian numpy type of the same bytes; numpy has no bfloat16 and no
# float8.
_SAME_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
CODES = {name: np.dtype(name).newbyteorder("<").str for name in _SAME_NAMES}
CODES["bfloat16"] = "<i2"
_FLOAT8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
CODES |= {f"float8_{kind}": "|i1" for kind in _FLOAT8}
_IS_LITTLE_ENDIAN = sys.byteorder == "little"

_pack = msgspec.msgpack.Encoder().encode


def is_tensor(value: object) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_parameter(tensor: Any) -> bool:
    """Return whether a tensor is an ``nn.Parameter``, not a subclass."""
    return type(tensor) is sys.modules["torch"].nn.Parameter


def advice_for(tensor: Any, *, any_dtype: bool = False) -> str | None:
    """Return advice for a tensor that cannot be sent, or None; ``any_dtype`` allows all dtypes."""
    torch = sys.modules["torch"]
    if not tensor.is_cpu:
        return f"It is on {tensor.device}: call .cpu() first."
    if type(tensor) is not torch.Tensor and not is_parameter(tensor):
        return "It is a subclass: convert it to a plain torch.Tensor, such as by .detach()."
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "It is not dense: call .to_dense() or .dequantize() first."
    if not any_dtype and carrier_of(tensor.dtype)[1] not in CODES:
        return f"Its dtype {tensor.dtype} is not carried: convert it with .to()."
    if tensor.ndim > MAX_NDIM:
        return f"It has more than {MAX_NDIM} dimensions: reshape it."
    return None


def tensor_body(tensor: Any, *first: bool) -> tuple[bytes, memoryview]:
    """Return a tensor's description, after ``first``, and its bytes; raise if they were freed."""
    carrier, name, _ = carrier_of(tensor.dtype)
    elements = bytes_of(tensor) if _IS_LITTLE_ENDIAN else None
    if elements is None:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        array = map_tensor(dense, carrier)
        if array is None:
            advice = "Its storage is smaller than the tensor: it has been freed or resized."
            raise UnsupportedTypeError("array", "Tensor", advice)
        elements = array_bytes(np.asarray(array, dtype=CODES[name]))
    return _pack([*first, name, *tensor.shape]), elements


@lru_cache(maxsize=256)
def tensor_head(body: bytes) -> tuple[str, ArrayHead]:
    """Check the description of a tensor; return the dtype's name and the array below it."""
    return _tensor_head(*description_parts(body))


def view_tensor(name: str, array: Array) -> Any:
    """Return a tensor that shares an array's memory."""
    torch = _torch()
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise InvalidMessageError(
            f"the payload holds a torch tensor of dtype {name}, which torch does not have here"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


@cache
def _torch() -> Any:
    try:
        return importlib.import_module("torch")  # not sys.modules: a thread may be importing it
    except ImportError as error:
        raise InvalidMessageError(
            f"the payload holds something of torch, which is not installed here: {error}"
        ) from error


def parameter_head(body: memoryview) -> tuple[bool, str, ArrayHead]:
    """Check the description of a parameter; return ``requires_grad``, dtype name and array."""
    requires_grad, *parts = description_parts(body)
    if type(requires_grad) is not bool:
        raise InvalidMessageError("malformed description of a parameter")
    return requires_grad, *_tensor_head(*parts)


def view_parameter(requires_grad: bool, name: str, array: Array) -> Any:
    """Return an ``nn.Parameter`` that shares an array's memory; raise like :func:`view_tensor`."""
    tensor = view_tensor(name, array)
    return _torch().nn.Parameter(tensor, requires_grad=requires_grad)


def _tensor_head(name: Any, *shape: Any) -> tuple[str, ArrayHead]:
    if type(name) is not str or name not in CODES:
        raise InvalidMessageError("malformed description of a tensor")
    return name, checked_head(dtype_of(CODES[name]), [*shape], is_fortran=False)


_KINDS = ("dtype", "layout", "memory_format")
_DEVICE = "device"
_DEVICE_NAME = re.compile(r"[a-z_0-9]{1,32}(:[0-9]{1,3})?")
_INT = frozenset({int})


def size_of(value: object) -> list[int] | None:
    """Return the extents of a ``torch.Size``; None for any other value."""
    if type(value) is not getattr(sys.modules.get("torch"), "Size", None):
        return None
    extents = list(value)  # type: ignore[call-overload]
    return extents if _INT.issuperset(map(type, extents)) else None


def build_size(extents: list[Any]) -> Any:
    """Return the ``torch.Size`` of these extents."""
    if not _INT.issuperset(map(type, extents)):
        raise InvalidMessageError("an extent of a torch.Size is not an int")
    return _torch().Size(extents)


def constant_of(value: object) -> list[str] | None:
    """Return kind and name of a dtype, device, layout or memory format; None for other values."""
    kind, torch = type(value).__name__, sys.modules.get("torch")
    if kind not in (*_KINDS, _DEVICE) or type(value) is not getattr(torch, kind, None):
        return None
    return [kind, str(value).removeprefix("torch.")]


def build_constant(parts: list[Any]) -> Any:
    """Return the dtype, device, layout or memory format of this kind and name."""
    kind, name = parts
    torch = _torch()
    if kind in _KINDS and type(name) is str:
        found = vars(torch).get(name)  # not getattr, which may import more of torch
        if type(found) is getattr(torch, kind):
            return found
    if kind == _DEVICE and type(name) is str and _DEVICE_NAME.fullmatch(name):
        device = torch.device(name)
        if str(device) == name:
            return device
    raise InvalidMessageError(f"torch has no {str(kind)[:32]} {str(name)[:64]!r} here")


_NUMBERS = "biufc"  # the kinds of dtypes that numpy and torch share


@lru_cache(maxsize=256)
def carrier_of(dtype: Any) -> tuple[np.dtype[Any], str, bool]:
    """Return numpy's dtype for the elements of a torch dtype, torch's name, and if it is opaque.

    If numpy lacks the dtype, it is an int of the same size; opaque elements can only be moved.
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
    """Return an array on the memory of a dense tensor of the CPU; None if its memory is too small.

    Lazy views are not resolved. An expanded tensor gives a read-only array.
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
    start = offset * itemsize
    return np.asarray(_HeldMemory(storage, start, shape, carrier.str, strides, is_frozen))


def bytes_of(tensor: Any) -> memoryview | None:
    """Return the memory of a dense, contiguous CPU tensor as bytes, None for any other."""
    if tensor.layout is not sys.modules["torch"].strided or not tensor.is_cpu:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return None
    nbytes, start = tensor.nbytes, tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()
    if not nbytes or storage.nbytes() < start + nbytes:
        return None
    return np.asarray(_HeldMemory(storage, start, (nbytes,), "|u1")).data


class _HeldMemory:
    """Keeps the storage of arrays alive: the tensor may get another one while a message leaves."""

    __slots__ = ("__array_interface__", "storage")

    def __init__(
        self,
        storage: Any,
        start: int,
        shape: tuple[int, ...],
        typestr: str,
        strides: tuple[int, ...] | None = None,
        is_frozen: bool = False,
    ) -> None:
        self.storage = storage
        self.__array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "data": (storage.data_ptr() + start, is_frozen),
            "version": 3,
        }
