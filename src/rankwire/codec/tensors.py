"""torch tensors and parameters as a short description and their own bytes, as ``arrays`` does it.

A description is a msgpack array of torch's name for the dtype and the shape; that of a parameter
has whether it requires a gradient in front. The names are a closed list.

torch is never imported to send: who holds a tensor has imported it. Receiving a tensor imports
it.
"""

from __future__ import annotations

import importlib
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
from rankwire.codec.tensor_memory import bytes_of, carrier_of, map_tensor
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

# torch's names with the little-endian numpy type that has the same bytes: mostly that of the same
# name. numpy has no bfloat16, and no float8.
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
    """Tell whether a value is a torch tensor, without importing torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_parameter(tensor: Any) -> bool:
    """Tell whether a tensor is an ``nn.Parameter``, and of no class made of that."""
    return type(tensor) is sys.modules["torch"].nn.Parameter


def advice_for(tensor: Any, *, any_dtype: bool = False) -> str | None:
    """Return what to do with a tensor that is not carried as it is, or None if it is carried.

    Args:
        tensor: Which.
        any_dtype: Whether its elements are carried as bytes, whatever they are.
    """
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


def tensor_body(tensor: Any) -> tuple[bytes, memoryview]:
    """Return the description of a carried tensor, and its bytes: its own memory, or a copy.

    Raises:
        UnsupportedTypeError: Its memory has been freed.
    """
    carrier, name, _ = carrier_of(tensor.dtype)
    elements = bytes_of(tensor) if _IS_LITTLE_ENDIAN else None
    if elements is None:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        array = map_tensor(dense, carrier)
        if array is None:
            advice = "Its storage is smaller than the tensor: it has been freed or resized."
            raise UnsupportedTypeError("array", "Tensor", advice)
        elements = array_bytes(np.asarray(array, dtype=CODES[name]))
    return _pack([name, *tensor.shape]), elements


def tensor_head(body: memoryview) -> tuple[str, ArrayHead]:
    """Check the description of a tensor; return its dtype's name and the array it is a view of.

    Raises:
        InvalidMessageError: It is not one that :func:`tensor_body` makes.
    """
    return _known_head(bytes(body))


@lru_cache(maxsize=256)
def _known_head(body: bytes) -> tuple[str, ArrayHead]:
    return _tensor_head(*description_parts(body))


def view_tensor(name: str, array: Array) -> Any:
    """Return a tensor on an array's memory.

    Raises:
        InvalidMessageError: torch is not installed here, or too old to know the dtype.
    """
    try:
        torch = _torch()
        dtype = getattr(torch, name)
    except (ImportError, AttributeError) as error:
        raise InvalidMessageError(
            f"the payload holds a torch tensor of dtype {name}; no torch for it here: {error}"
        ) from error
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


@cache
def _torch() -> Any:
    """Return torch, once it is imported: another thread may be about to."""
    return importlib.import_module("torch")


def parameter_body(parameter: Any) -> tuple[bytes, memoryview]:
    """Return what :func:`tensor_body` does, with whether a gradient is wanted in front."""
    _, elements = tensor_body(parameter)
    name = carrier_of(parameter.dtype)[1]
    return _pack([parameter.requires_grad, name, *parameter.shape]), elements


def parameter_head(body: memoryview) -> tuple[bool, str, ArrayHead]:
    """Check the description of a parameter; return its gradient, and as :func:`tensor_head`.

    Raises:
        InvalidMessageError: It is not one that :func:`parameter_body` makes.
    """
    requires_grad, *parts = description_parts(body)
    if type(requires_grad) is not bool:
        raise InvalidMessageError("malformed description of a parameter")
    return requires_grad, *_tensor_head(*parts)


def view_parameter(requires_grad: bool, name: str, array: Array) -> Any:
    """Return an ``nn.Parameter`` on an array's memory; raises as :func:`view_tensor`."""
    tensor = view_tensor(name, array)
    return _torch().nn.Parameter(tensor, requires_grad=requires_grad)


def _tensor_head(name: Any, *shape: Any) -> tuple[str, ArrayHead]:
    if type(name) is not str or name not in CODES:
        raise InvalidMessageError("malformed description of a tensor")
    return name, checked_head(dtype_of(CODES[name]), [*shape], is_fortran=False)
