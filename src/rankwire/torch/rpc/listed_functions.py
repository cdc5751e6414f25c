"""The functions of torch and Python, and the layers of torch, that another rank may use by name.

With any arguments that pass the check in its row (``bounds``), a listed function

- returns or raises, and does not end or corrupt the process;
- returns a value that depends only on its arguments and torch's random state: no uninitialized or
  foreign memory, no address, no files or settings;
- creates no more elements than ``bounds.ResultLimits``, in time proportional to the elements and
  multiplications, or for a Python function, to its arguments.

torch promises none of this; ``test_rpc_hostile_arguments.py`` tests every row. Run it with
``TESTS_NIGHTLY=1`` when you add a row, and add only functions that programs call by name: a
function of the program can call everything else.

More layers can be run than created. A layer is created on zeroed, counted memory, so that
``torch.empty`` in a constructor shows nothing. Safe from any thread.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rankwire.torch.rpc import bounds
from rankwire.torch.rpc.bounds import Args, Check, Kwargs, ResultLimits

# fmt: off
_OF_TORCH: dict[Check, tuple[str, ...]] = {
    bounds.broadcast_sparse: ("add",),
    # At most one element of the result for each of the broadcast tensors.
    bounds.broadcast: (
        "abs", "all", "allclose", "any", "argmax", "argmin", "clamp", "clone", "cos", "div", "eq",
        "equal", "exp", "flatten", "ge", "gt", "le", "log", "log_softmax", "lt", "max", "maximum",
        "mean", "min", "minimum", "mul", "ne", "neg", "nonzero", "norm", "numel", "ones_like",
        "pow", "rand_like", "randn_like", "relu", "reshape", "sigmoid", "sign", "sin", "softmax",
        "sqrt", "square", "squeeze", "sub", "sum", "t", "tanh", "transpose", "unsqueeze", "where",
        "zeros_like",
    ),
    bounds.joined: ("cat", "stack"),
    bounds.divided: ("chunk", "split"),
    bounds.multiplied: ("bmm", "dot", "matmul", "mm", "mv"),
    bounds.sized: ("ones", "rand", "randn", "zeros"),
}
# Not pow, <<, range, bytes: results can be large; nor sum, which may add a long int repeatedly.
_OF_BUILTINS: dict[Check, tuple[str, ...]] = {
    bounds.plain: ("bool", "float", "int", "len", "max", "min"),
    bounds.numbers: ("abs",),
    bounds.same_kind(list, tuple): ("list", "tuple"),
    bounds.same_kind(dict): ("dict",),
    bounds.same_kind(set, frozenset): ("set",),
}
_OF_OPERATORS: dict[Check, tuple[str, ...]] = {
    bounds.numbers: (
        "abs", "add", "eq", "ge", "gt", "le", "lt", "mul", "ne", "neg", "sub", "truediv",
    ),
}
# fmt: on
# The modules, with the names under which their functions travel.
_TABLES: tuple[tuple[str, Any, dict[Check, tuple[str, ...]]], ...] = (
    ("torch", torch, _OF_TORCH),
    ("builtins", builtins, _OF_BUILTINS),
    ("_operator", operator, _OF_OPERATORS),
)


LISTED_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module}:{name}": getattr(place, name)
    for module, place, table in _TABLES
    for names in table.values()
    for name in names
}
NAMES_OF_LISTED = {function: name for name, function in reversed(LISTED_FUNCTIONS.items())}
TORCH_CHECKS = {name: check for check, names in _OF_TORCH.items() for name in names}
_CHECKS = {
    id(getattr(place, name)): check
    for _, place, table in _TABLES
    for check, names in table.items()
    for name in names
}


def check_of(function: Any) -> Check | None:
    """Return the check of a function in the table, or None."""
    return _CHECKS.get(id(function))  # by id: no metaclass runs


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


# The layers that can be created, by the names under which they travel.
LAYERS: dict[str, type] = {
    f"{layer.__module__}:{layer.__name__}": layer
    for names in _MADE.values()
    for layer in (getattr(nn, name) for name in names)
}
_MADE_IDS = frozenset(map(id, LAYERS.values()))
_BOUNDS = {
    id(getattr(nn, name)): bound
    for bound, names in {**_MADE, _same: (*_MADE[_same], *_RUN)}.items()
    for name in names
}


def is_layer(target: object) -> bool:
    """Return whether an object is the class of a layer that another rank may create."""
    return id(target) in _MADE_IDS  # by id: no metaclass runs


def is_run(target: object) -> bool:
    """Return whether an object is the class of a layer that another rank may run."""
    return id(target) in _BOUNDS


def make_layer(layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Create a layer for another rank; raise if an argument or the layer's size is not accepted."""
    for name in kwargs:
        if name.startswith("_") or name == "device":
            raise TypeError(f"a layer is made for another rank without {name!r}")
    numbers = [value for value in (*args, *kwargs.values()) if type(value) is not str]
    bounds.tensors_in(numbers, {})
    with _Cleared():
        return layer(*args, **kwargs)


def check_run(module: Any, args: Args, kwargs: Kwargs) -> None:
    """Raise if another rank may not run a layer or container with these arguments."""
    if kwargs or not args or not isinstance(args[0], torch.Tensor):
        raise TypeError("a layer takes a tensor, and no named arguments, from another rank")
    given = bounds.tensors_in(args, {})
    bounds.broadcast(given, {})
    bound = next((_BOUNDS[id(cls)] for cls in type(module).__mro__ if is_run(cls)), None)
    if bound is not None:
        elements, work = bound(module, args)
        bounds.check_elements(elements, given)
        bounds.check_work(work)


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
