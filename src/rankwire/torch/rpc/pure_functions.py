"""Functions that any rank may call on any other: they compute, and touch nothing else.

These are torch's operators without those that look at files, addresses or settings, and a list of
Python's own. None of them is given up by an argument: what travels as an argument is a value, or
again one of these or a function of the program.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch

_BUILTINS = (
    *("abs", "all", "any", "bool", "bytes", "chr", "complex", "dict", "divmod", "float"),
    *("frozenset", "int", "len", "list", "max", "min", "ord", "pow", "range", "round", "set"),
    *("slice", "sorted", "str", "sum", "tuple"),
)
# Not attrgetter and methodcaller, which reach whatever an object has.
_OPERATORS = (
    *("abs", "add", "and_", "concat", "contains", "countOf", "eq", "floordiv", "ge", "getitem"),
    *("gt", "index", "indexOf", "inv", "invert", "is_", "is_not", "le", "lshift", "lt", "matmul"),
    *("mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "truth"),
    "xor",
)
# ``from_file`` maps a file, ``empty`` shows what memory held before, and the others make a tensor
# of memory or of any object that they are given.
_NOT_PURE = frozenset(
    (
        *("as_tensor", "asarray", "from_dlpack", "from_file", "from_numpy", "frombuffer"),
        *("empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided"),
    )
)


@cache
def pure_functions() -> dict[str, Callable[..., Any]]:
    """Return them by the names under which they travel."""
    found = {f"builtins:{name}": getattr(builtins, name) for name in _BUILTINS}
    found |= {f"_operator:{name}": getattr(operator, name) for name in _OPERATORS}
    for name in dir(torch._C._VariableFunctions):
        function = getattr(torch, name, None)
        if not name.startswith("_") and name not in _NOT_PURE and callable(function):
            found[f"torch:{name}"] = function
    for module in (torch.fft, torch.linalg, torch.special, torch.nn.functional):
        for name, function in vars(module).items():
            if isinstance(function, BuiltinFunctionType) and not name.startswith("_"):
                found.setdefault(f"{module.__name__}:{name}", function)
    return found


@cache
def names_of_pure_functions() -> dict[Callable[..., Any], str]:
    """Return the names by function."""
    names: dict[Callable[..., Any], str] = {}
    for name, function in pure_functions().items():
        names.setdefault(function, name)
    return names


@cache
def operator_names() -> frozenset[str]:
    """Return the names of torch's operators among them: ``add``, ``matmul`` ..."""
    return frozenset(
        name.removeprefix("torch:") for name in pure_functions() if name.startswith("torch:")
    )
