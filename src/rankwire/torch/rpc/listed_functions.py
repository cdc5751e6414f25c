"""The functions of torch and Python that another rank may call by name.

With any arguments that pass the check in its row (``bounds``), a listed function

- returns or raises, and does not end or corrupt the process;
- returns a value that depends only on its arguments and torch's random state: no uninitialized or
  foreign memory, no address, no files or settings;
- creates no more elements than ``bounds.ResultLimits``, in time proportional to the elements and
  multiplications;
- if it is Python's, and so holds the interpreter: takes time proportional to its arguments.

``test_rpc_hostile_arguments.py`` applies this to every row with hostile shapes, strides, indices,
values, dtypes and sizes. torch promises none of it. So run that test in its nightly size
(``TESTS_NIGHTLY=1``) when you add a row, and add only functions that programs call by name: a
function of the program can call everything else.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from rankwire.torch.rpc import bounds
from rankwire.torch.rpc.bounds import Check

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
# Not pow, <<, range and bytes, whose results can be large; nor sum, which may add a long int as
# often as there are others.
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


class Listed(NamedTuple):
    """A row of the table."""

    function: Callable[..., Any]
    check: Check


@cache
def listed_functions() -> dict[str, Listed]:
    """Return the table, by the names under which the functions travel."""
    return {
        f"{module}:{name}": Listed(getattr(place, name), check)
        for module, place, table in _TABLES
        for check, names in table.items()
        for name in names
    }


@cache
def names_of_listed() -> dict[Callable[..., Any], str]:
    """Return the names by function."""
    names: dict[Callable[..., Any], str] = {}
    for name, listed in listed_functions().items():
        names.setdefault(listed.function, name)
    return names


@cache
def torch_checks() -> dict[str, Check]:
    """Return the checks of torch's functions, by short name (``add``, ``matmul``)."""
    return {name: check for check, names in _OF_TORCH.items() for name in names}


@cache
def _checks() -> dict[int, Check]:
    return {id(listed.function): listed.check for listed in listed_functions().values()}


def check_of(function: Any) -> Check | None:
    """Return the check of a function in the table, else None."""
    return _checks().get(id(function))  # by id: no metaclass runs
