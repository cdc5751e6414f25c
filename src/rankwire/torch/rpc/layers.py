"""Layers of torch that another rank may create here, and those that it may run.

Both follow the rule of ``listed_functions``. More layers can be run than created, because a
function of the program created them. A layer is created on zeroed, counted memory, so
``torch.empty`` in a constructor shows nothing. Pure, and safe from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rankwire.torch.rpc.bounds import (
    Args,
    Kwargs,
    ResultLimits,
    broadcast,
    check_elements,
    check_work,
    tensors_in,
)

_Bound = Callable[[Any, Args], tuple[float, float]]  # most elements and multiplications


def _rows(x: torch.Tensor) -> int:
    return math.prod(max(1, extent) for extent in x.shape[:-1])


def _linear(layer: Any, args: Args) -> tuple[float, float]:
    elements = _rows(args[0]) * layer.out_features
    return elements, elements * layer.in_features


def _embedding(layer: Any, args: Args) -> tuple[float, float]:
    return args[0].numel() * layer.embedding_dim, 0


def _recurrent(layer: Any, args: Args) -> tuple[float, float]:
    # Four gates of each layer and direction.
    elements = _rows(args[0]) * 4 * layer.hidden_size * layer.num_layers * 2
    return elements, elements * (layer.input_size + layer.hidden_size)


def _same(layer: Any, args: Args) -> tuple[float, float]:
    return 0, 0


# fmt: off
# Not EmbeddingBag and GroupNorm: hostile inputs crash the process.
_MADE: dict[_Bound, tuple[str, ...]] = {
    _linear: ("Linear",),
    _embedding: ("Embedding",),
    _recurrent: ("GRU", "LSTM", "RNN"),
    _same: (
        "Dropout", "Flatten", "GELU", "Identity", "LayerNorm", "ReLU", "Sigmoid", "Softmax", "Tanh",
    ),
}
_RUN = (
    "AvgPool1d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d", "CrossEntropyLoss",
    "ELU", "LeakyReLU", "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d", "NLLLoss", "SiLU",
    "Softplus",
)
# fmt: on
_UNINITIALIZED = (torch.empty, torch.empty_like, torch.empty_permuted, torch.empty_strided)
_ALLOCATING = frozenset((*_UNINITIALIZED, torch.full, torch.ones, torch.zeros))


@cache
def layers() -> dict[str, type]:
    """Return the classes that can be created, by the names under which they travel."""
    found = (getattr(nn, name) for names in _MADE.values() for name in names)
    return {f"{layer.__module__}:{layer.__name__}": layer for layer in found}


@cache
def _bounds() -> dict[int, _Bound]:
    made = {id(getattr(nn, name)): bound for bound, names in _MADE.items() for name in names}
    return made | {id(getattr(nn, name)): _same for name in _RUN}


@cache
def _made() -> frozenset[int]:
    return frozenset(map(id, layers().values()))


def is_layer(target: object) -> bool:
    """Tell whether an object is the class of a layer that another rank may create."""
    return id(target) in _made()  # by id: no metaclass runs


def is_run(target: object) -> bool:
    """Tell whether an object is the class of a layer that another rank may run."""
    return id(target) in _bounds()


def make_layer(layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Create a layer for another rank; raise if an argument or the layer's size is not accepted."""
    for name in kwargs:
        if name.startswith("_") or name == "device":
            raise TypeError(f"a layer is made for another rank without {name!r}")
    numbers = [value for value in (*args, *kwargs.values()) if type(value) is not str]
    tensors_in(numbers, {})
    with _Cleared():
        return layer(*args, **kwargs)


def check_run(module: Any, args: Args, kwargs: Kwargs) -> None:
    """Raise if the arguments with which another rank runs a layer or container are not accepted."""
    if kwargs or not args or not isinstance(args[0], torch.Tensor):
        raise TypeError("a layer takes a tensor, and no named arguments, from another rank")
    given = tensors_in(args, {})
    broadcast(given, {})
    bound = next((_bounds()[id(cls)] for cls in type(module).__mro__ if is_run(cls)), None)
    if bound is not None:
        elements, work = bound(module, args)
        check_elements(elements, given)
        check_work(work)


class _Cleared(TorchFunctionMode):  # type: ignore[misc]
    """Limits and zeroes the tensors that this thread creates while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._left = ResultLimits.elements

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _ALLOCATING:
            return func(*args, **(kwargs or {}))
        named = kwargs or {}
        size = func(*args, **{**named, "device": "meta"})
        self._left -= max(ResultLimits.allocation, size.numel())
        if self._left < 0:
            raise ValueError(
                f"a layer for another rank has at most {ResultLimits.elements} elements: call a "
                "function of the program that makes it"
            )
        made = func(*args, **named)
        return made.zero_() if func in _UNINITIALIZED else made
