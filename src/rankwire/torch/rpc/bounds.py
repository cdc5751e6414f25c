"""Check the arguments of a call by name, and the size of its result.

Another rank chose the arguments, so each check sees them before torch does. ``TypeError``: one is
not a number, dtype or dense CPU tensor. ``ValueError``: the result would have too many elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch

from rankwire.codec.tensors import CODES

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Check = Callable[[Args, Kwargs], None]


class ResultLimits:
    """Limits of one call by name; tests lower them."""

    elements = 1 << 27  # of a result: 1 GiB of float64, which fits in a message
    work = 1 << 38  # multiplications of a matrix product: at most minutes of one core
    pieces = 1 << 16  # of a result that is a list; each needs the interpreter
    allocation = 1 << 15  # the least number of elements that an allocation of a layer counts for
    bits = 1 << 16  # of an int passed to a Python operator


# Not float8: hardly any function supports it.
_DTYPES = frozenset(getattr(torch, name) for name in CODES if not name.startswith("float8"))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (bool, int, float, complex)
_SCALARS = frozenset((NoneType, *_NUMBERS))
_SEQUENCES = (list, tuple, torch.Size)
_CONTAINERS = (*_SEQUENCES, set, frozenset)
_MAX_DEPTH = 32

# Not "out", which writes; not "device", "layout", "names", "memory_format", which select other
# kernels; not "rounding_mode": torch.div(-2**63, -1, rounding_mode="trunc") ends the process.
_KEYWORDS = frozenset(
    (
        *("alpha", "atol", "axis", "chunks", "condition", "copy", "descending", "dim", "dim0"),
        *("dim1", "dtype", "end_dim", "equal_nan", "exponent", "fill_value", "input", "keepdim"),
        *("mat2", "max", "min", "non_blocking", "other", "p", "requires_grad", "rtol"),
        *("self", "shape", "size", "split_size_or_sections", "start_dim", "tensor", "tensors"),
        *("value", "vec"),
    )
)


def tensors_in(args: Args, kwargs: Kwargs, *, sparse: bool = False) -> list[torch.Tensor]:
    """Return the tensors among the arguments; raise ``TypeError`` if one is not accepted."""
    for name in kwargs:
        if name not in _KEYWORDS:
            raise TypeError(
                f"a call from another rank has no argument {name!r}: call a function of the program"
            )
    found: list[torch.Tensor] = []
    _collect((*args, *kwargs.values()), found, sparse, 0)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor], sparse: bool, depth: int) -> None:
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            _check_tensor(value, sparse)
            found.append(value)
        elif kind in _SEQUENCES and depth < _MAX_DEPTH:
            _collect(value, found, sparse, depth + 1)
        elif kind not in _SCALARS and not (kind is torch.dtype and value in _DTYPES):
            raise TypeError(
                "a call from another rank takes numbers, dtypes and tensors, not "
                f"{str(value) if kind is torch.dtype else kind.__name__}"
            )


def _check_tensor(tensor: torch.Tensor, sparse: bool) -> None:
    is_known = tensor.layout is torch.strided or (sparse and tensor.layout is torch.sparse_coo)
    if not is_known or tensor.device.type != "cpu" or tensor.dtype not in _DTYPES:
        raise TypeError(
            f"a call from another rank takes dense tensors of the CPU, not {tensor.dtype} with "
            f"{tensor.layout} on {tensor.device}"
        )
    if not tensor.numel():  # the sum of a tensor of 0 x 2**40 has 2**40 elements
        check_elements(_size(tensor.shape))


def check_elements(count: float, tensors: Iterable[torch.Tensor] = ()) -> None:
    """Raise ``ValueError`` if a result is larger than the limit and than each of some tensors."""
    if not count <= ResultLimits.elements and not any(count <= each.numel() for each in tensors):
        raise ValueError(
            f"a call from another rank makes at most {ResultLimits.elements} elements, not "
            f"{count}: call a function of the program"
        )


def check_work(count: float) -> None:
    """Raise ``ValueError`` if a product would take too long."""
    if not count <= ResultLimits.work:
        raise ValueError(
            f"a call from another rank does at most {ResultLimits.work} multiplications, not "
            f"{count}: call a function of the program"
        )


def _broadcast_size(shapes: Iterable[Sequence[int]]) -> int:
    extents: list[int] = []
    for shape in shapes:
        for place, extent in enumerate(reversed(shape)):
            if place == len(extents):
                extents.append(extent)
            elif extent > extents[place]:
                extents[place] = extent
    return math.prod(extents)


def broadcast(args: Args, kwargs: Kwargs, *, sparse: bool = False) -> None:
    """Check a function whose result is no larger than its tensors' broadcast shape."""
    tensors = tensors_in(args, kwargs, sparse=sparse)
    if len(tensors) > 1:
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
        check_elements(_broadcast_size(each.shape for each in dense), dense)


broadcast_sparse: Check = partial(broadcast, sparse=True)  # also tensors in coordinate format


def dense(args: Args, kwargs: Kwargs) -> None:
    """Check a function that makes a sparse tensor dense."""
    for tensor in tensors_in(args, kwargs, sparse=True):
        check_elements(_size(tensor.shape))


def joined(args: Args, kwargs: Kwargs) -> None:
    """Check a function whose result has the elements of all its tensors."""
    tensors = tensors_in(args, kwargs)
    check_elements(sum(tensor.numel() for tensor in tensors), tensors)


def divided(args: Args, kwargs: Kwargs) -> None:
    """Check a function that returns parts of a tensor along one dimension."""
    for tensor in tensors_in(args, kwargs):
        _check_pieces(max(tensor.shape, default=0))


def listed(args: Args, kwargs: Kwargs) -> None:
    """Check a function that returns the elements of a tensor as numbers."""
    for tensor in tensors_in(args, kwargs):
        _check_pieces(max(tensor.numel(), *tensor.shape, 0))


def _check_pieces(count: int) -> None:
    if count > ResultLimits.pieces:
        raise ValueError(
            f"a call from another rank returns at most {ResultLimits.pieces} pieces of a tensor, "
            f"not {count}: call a function of the program"
        )


def _size(extents: Iterable[Any]) -> int:
    """Return the number of elements of a size. An extent of 0 does not hide the others."""
    found = 1
    for extent in extents:
        if isinstance(extent, int):
            found *= max(1, abs(extent))
        elif isinstance(extent, _SEQUENCES):
            found *= _size(extent)
    return found


def sized(args: Args, kwargs: Kwargs) -> None:
    """Check a function that creates a tensor whose size is given by ints and lists of ints."""
    tensors_in(args, kwargs)
    check_elements(_size((*args, *kwargs.values())))


def multiplied(args: Args, kwargs: Kwargs) -> None:
    """Check a product of the last two tensors, as matrices or batches of them."""
    tensors = tensors_in(args, kwargs)
    if len(tensors) < 2:
        return
    left, right = tensors[-2:]
    rows, inner = (1, 1, *left.shape)[-2:]
    columns = right.shape[-1] if right.ndim > 1 else 1
    result = rows * columns * _broadcast_size((left.shape[:-2], right.shape[:-2]))
    check_elements(result, tensors)
    check_work(result * inner)


def plain(args: Args, kwargs: Kwargs) -> None:
    """Check a Python function whose time is proportional to the length of its arguments."""
    if kwargs:
        raise TypeError("a function of Python takes no named arguments from another rank")
    _check_plain(args, 0)


def _check_plain(values: Iterable[Any], depth: int) -> None:
    for value in values:
        kind = type(value)
        if kind is dict and depth < _MAX_DEPTH:
            _check_plain((*value.keys(), *value.values()), depth + 1)
        elif kind in _CONTAINERS and depth < _MAX_DEPTH:
            _check_plain(value, depth + 1)
        elif kind not in _SCALARS and kind not in (bytes, str):
            raise TypeError(f"a function of Python takes no {kind.__name__} from another rank")


def numbers(args: Args, kwargs: Kwargs) -> None:
    """Check an operator on numbers or tensors; on texts and lists it might repeat or format."""
    if kwargs:
        raise TypeError("an operator takes no named arguments")
    for value in args:
        if type(value) not in _NUMBERS and type(value) not in _TENSORS:
            raise TypeError(f"this operator takes no {type(value).__name__} from another rank")
        if type(value) is int and value.bit_length() > ResultLimits.bits:
            raise ValueError("this operator takes no int of so many digits from another rank")
    broadcast(args, {})


def same_kind(*kinds: type) -> Check:
    """Return the check of a container's constructor: no argument, or one of these classes."""

    def check(args: Args, kwargs: Kwargs) -> None:
        if kwargs or len(args) > 1 or any(type(value) not in kinds for value in args):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"from another rank it is made of nothing, or of one {names}")

    return check
