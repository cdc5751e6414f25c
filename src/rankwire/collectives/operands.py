"""Operands: the user's arrays and tensors, as flat memory that the algorithms work on.

It knows torch, as ``half_types`` does, and never imports it: who holds a tensor has. A tensor is an
array on its memory (``codec.tensor_memory``).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from rankwire.codec.arrays import advice_for_array, dtype_code, is_plain_array
from rankwire.codec.tensors import advice_for, carrier_of, is_tensor, map_tensor
from rankwire.errors import ConfigurationError, UnsupportedTypeError

Array = np.ndarray[Any, Any]


class Operand:
    """One array or tensor.

    Attributes:
        value: What the user passed.
        array: An array on its memory; of whole numbers for what numpy has no dtype for.
        dtype_name: What to call its dtype.
        shape: Its shape.
        has_gaps: Whether its elements do not lie in C order, one after the other.
        is_bfloat16: Whether its elements are that.
        is_opaque: Whether they can be moved only, and not computed with.
    """

    __slots__ = (
        "array",
        "dtype_name",
        "has_gaps",
        "is_bfloat16",
        "is_opaque",
        "shape",
        "value",
    )

    def __init__(
        self,
        value: Any,
        array: Array,
        dtype_name: str,
        *,
        is_bfloat16: bool = False,
        is_opaque: bool = False,
    ) -> None:
        self.value = value
        self.array = array
        self.dtype_name = dtype_name
        self.shape = array.shape
        self.is_bfloat16 = is_bfloat16
        self.is_opaque = is_opaque
        self.has_gaps = not array.flags.c_contiguous

    @property
    def rows(self) -> int:
        """The extent of dim 0; 1 if there is none."""
        return self.shape[0] if self.shape else 1

    def part(self, flat: Array, shape: tuple[int, ...]) -> Operand:
        """Return some of its elements as an operand of its kind, whose value is the whole."""
        array = flat.reshape(shape)
        is_bfloat16, is_opaque = self.is_bfloat16, self.is_opaque
        return Operand(
            self.value, array, self.dtype_name, is_bfloat16=is_bfloat16, is_opaque=is_opaque
        )

    def flat(self) -> Array:
        """Return the elements in C order, one-dimensional: its own memory, or a copy if need be."""
        if self.has_gaps:
            return self.array.ravel()
        return self.array if len(self.shape) == 1 else self.array.reshape(-1)

    def check_writable(self, name: str) -> None:
        """Raise unless it can be written."""
        if not self.array.flags.writeable:
            raise ConfigurationError(f"{name} is read-only")

    def check_like(self, other: Operand, shape: tuple[int, ...], name: str) -> None:
        """Raise unless it has the dtype of another one and this shape, and can be written."""
        if self.dtype_name != other.dtype_name or self.shape != shape:
            raise ConfigurationError(
                f"{name} is {self.dtype_name} {self.shape}, "
                f"the result is {other.dtype_name} {shape}"
            )
        self.check_writable(name)

    def store(self, flat: Array) -> None:
        """Take the elements from what ``flat`` returned, if that was a copy."""
        if self.has_gaps:
            self.array[...] = flat.reshape(self.shape)


def operand(value: Any, name: str = "array") -> Operand:
    """Return an array or tensor as an operand.

    Raises:
        UnsupportedTypeError: It is neither, or of a kind that is not carried.
    """
    if type(value) is not np.ndarray and is_tensor(value):
        obstacle = advice_for(value, any_dtype=True)
        if obstacle is not None:
            raise UnsupportedTypeError(name, type(value).__qualname__, obstacle)
        return _tensor_operand(value, name)
    if is_plain_array(value):
        dtype_name = _name_of(value.dtype)
        if dtype_name is None:
            advice = f"Arrays of dtype {value.dtype} are not carried."
            raise UnsupportedTypeError(name, type(value).__qualname__, advice)
        return Operand(value, value, dtype_name)
    raise UnsupportedTypeError(name, type(value).__qualname__, advice_for_array(value))


def new_like(other: Operand, shape: tuple[int, ...]) -> Operand:
    """Return a new operand of the same kind and dtype, with whatever its memory holds."""
    if isinstance(other.value, np.ndarray):
        return operand(np.empty(shape, other.array.dtype))
    torch = sys.modules["torch"]
    return _tensor_operand(torch.empty(shape, dtype=other.value.dtype), "out")


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str | None:
    """Return what to call a dtype: one name for each, and one that reads well.

    None if it is not carried.
    """
    if dtype_code(dtype) is None:
        return None
    return f"big-endian {dtype.name}" if dtype.str.startswith(">") else dtype.name


def _tensor_operand(tensor: Any, name: str) -> Operand:
    if tensor.is_conj() or tensor.is_neg():
        call = ".resolve_conj()" if tensor.is_conj() else ".resolve_neg()"
        raise UnsupportedTypeError(name, "Tensor", f"It is a lazy view: call {call} first.")
    carrier, dtype_name, is_opaque = carrier_of(tensor.dtype)
    array = map_tensor(tensor, carrier)
    if array is None:
        advice = "Its storage is smaller than the tensor: it has been freed or resized."
        raise UnsupportedTypeError(name, "Tensor", advice)
    is_bfloat16 = dtype_name == "bfloat16"
    return Operand(tensor, array, dtype_name, is_bfloat16=is_bfloat16, is_opaque=is_opaque)
