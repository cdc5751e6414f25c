"""Advice for a value that cannot be sent: one sentence for its kind.

It imports no library to find the kind: the program that holds the value has. The first kind that
matches counts, so special kinds come before general ones.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rankwire.codec.arrays import ADVICE_FOR_MASKED, is_masked
from rankwire.codec.classes import is_namedtuple

# ``Codec.how_to_pickle`` replaces this text in errors.
HOW_TO_PICKLE = "set allow_pickle=True on both ends"

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    np.ufunc,
    partial,
)
_BUILTINS = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
# Modules whose objects belong to one process.
_OF_THIS_PROCESS = (
    *("_thread", "threading", "_queue", "queue", "multiprocessing", "subprocess", "asyncio"),
    *("concurrent", "socket", "_socket", "ssl", "_ssl", "select", "selectors", "weakref"),
    *("_contextvars", "contextvars", "logging"),
)


def advice_for(value: Any) -> str:
    """Return what to do instead of sending a value."""
    for kind, advice in _KINDS:
        if isinstance(value, kind) if isinstance(kind, (type, tuple)) else kind(value):
            return advice if isinstance(advice, str) else advice(value)
    return (
        "Make it a dataclass and put @rankwire.message above it, register its class by"
        f" codec.register with take= and build=, send what it holds, or {HOW_TO_PICKLE}."
    )


def _register(value: Any) -> str:
    name = type(value).__qualname__
    return f"Put @rankwire.message above class {name}, or codec.register({name}), on all ranks."


def _convert(value: Any) -> str:
    base = next(base for base in type(value).__mro__ if base in _BUILTINS).__name__
    return (
        f"It is a subclass of {base}, which may hold more: send {base}(value), or register its"
        " class with take= and build=."
    )


def _is_of(*modules: str) -> Callable[[Any], bool]:
    """Return a test for values whose class is from one of these modules or their submodules."""

    def is_kind(value: Any) -> bool:
        home = str(type(value).__module__)
        return home in modules or home.startswith(tuple(f"{module}." for module in modules))

    return is_kind


def _is_torch(name: str, module: str) -> Callable[[Any], bool]:
    """Return a test for values of a class of torch, looked up only if torch is loaded."""

    def is_kind(value: Any) -> bool:
        cls = getattr(sys.modules.get(module), name, None)
        return isinstance(cls, type) and isinstance(value, cls)

    return is_kind


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or is_namedtuple(type(value))


def _is_array(value: Any) -> bool:
    return hasattr(type(value), "__array__") or hasattr(type(value), "__dlpack__")


_Kind: TypeAlias = type | tuple[type, ...] | Callable[[Any], bool]

_KINDS: list[tuple[_Kind, str | Callable[[Any], str]]] = [
    (
        _FUNCTIONS,
        "A function stays where it is: register it there with agent.register, and send its name.",
    ),
    (type, "A class stays where it is: send an instance, or a name that the receiver looks up."),
    (types.ModuleType, "A module stays where it is: send its name."),
    (
        BaseException,
        "Raise it: the caller gets a RemoteError. Or send its type's name and its text.",
    ),
    (
        AsyncIterator,
        "It runs in this process: send [item async for item in value], or item by item.",
    ),
    (Awaitable, "It runs in this process: await it, and send the result."),
    (
        _is_of("_io", "io", "tempfile"),
        "A file is open in this process only: send its path, or what is in it.",
    ),
    (
        _is_of(*_OF_THIS_PROCESS),
        "It means something in this process only: leave it out of what is sent.",
    ),
    (Iterator, "It would be used up: send list(value)."),
    ((Enum, msgspec.Struct), _register),
    (_is_record, _register),
    (
        _is_torch("Module", "torch.nn"),
        f"A module stays where it is: send its state_dict(), or {HOW_TO_PICKLE}.",
    ),
    (
        _is_torch("Optimizer", "torch.optim"),
        "An optimizer stays where it is: send its state_dict().",
    ),
    (_is_torch("Generator", "torch"), "Send its get_state(), and pass that to set_state()."),
    (
        _is_of("pandas", "polars", "pyarrow"),
        "Send its columns as arrays: a dict of names and value.to_numpy().",
    ),
    (_is_of("numpy.random"), "Send its state (generator.bit_generator.state), or a seed."),
    (_BUILTINS, _convert),
    (is_masked, ADVICE_FOR_MASKED),
    (_is_array, "Send numpy.asarray(value)."),
    (Mapping, "Send dict(value)."),
    ((Set, type({}.values())), "Send list(value) or set(value)."),
]
