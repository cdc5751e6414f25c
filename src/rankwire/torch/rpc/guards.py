"""Decide which methods of shared objects other ranks may call, and check arguments.

Sharing an object does not share all that its class can do: an array can write a file. A method may
be called if the naming rule opens the class that defines it, or if it is in a table here, which
follows the rule of ``listed_functions`` (not with ``allow="decorated"``). It is looked up in the
class, so that nothing stored in the object is called. With pickle, every method may be called.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rankwire.torch.rpc import bounds
from rankwire.torch.rpc.bounds import Args, Check, Kwargs
from rankwire.torch.rpc.listed_functions import (
    TORCH_CHECKS,
    check_of,
    check_run,
    is_layer,
    is_run,
    make_layer,
)
from rankwire.torch.rpc.naming_rule import (
    NameRefusedError,
    NamingRule,
    constructors_of,
    member_of,
)

_DUNDERS = frozenset(
    (
        *("__call__", "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__"),
        *("__next__", "__setitem__"),
    )
)


def _any(args: Args, kwargs: Kwargs) -> None:
    """Check nothing: the method stores its arguments, or compares each once."""


def _nothing(args: Args, kwargs: Kwargs) -> None:
    if len(args) > 1 or kwargs:
        raise TypeError("from another rank this method takes no arguments")


# fmt: off
_OF_CONTAINERS: dict[type, dict[Check, tuple[str, ...]]] = {
    list: {
        _any: (
            "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__", "append", "clear",
            "copy", "insert", "pop", "reverse",
        ),
        bounds.same_kind(list, tuple): ("extend",),
        bounds.plain: ("__contains__", "count", "index", "remove"),
    },
    tuple: {
        _any: ("__getitem__", "__iter__", "__len__"),
        bounds.plain: ("__contains__", "count", "index"),
    },
    dict: {
        _any: (
            "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__",
            "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "values",
        ),
        bounds.same_kind(dict): ("update",),
    },
    set: {
        _any: (
            "__contains__", "__iter__", "__len__", "add", "clear", "copy", "discard", "pop",
            "remove",
        ),
    },
}
# In addition to the methods with names of functions in torch's table. None that changes a tensor's
# size or memory (resize_, set_, t_, a sparse add_): another thread may be reading it. Not
# indices(), by which other ranks could write to the indices of a sparse tensor.
_OF_TENSORS: dict[Check, tuple[str, ...]] = {
    bounds.broadcast_sparse: ("clone", "coalesce", "detach", "dim", "is_coalesced", "size", "sum"),
    bounds.dense: ("to_dense",),
    bounds.broadcast: (
        "add_", "bool", "contiguous", "copy_", "div_", "double", "fill_", "float", "half", "int",
        "is_contiguous", "item", "long", "mul_", "normal_", "requires_grad_", "stride", "sub_",
        "to", "uniform_", "view", "zero_",
    ),
    bounds.listed: ("tolist",),
}
_OF_MODULES = frozenset((
    "buffers", "children", "eval", "load_state_dict", "modules", "named_buffers", "named_children",
    "named_modules", "named_parameters", "parameters", "requires_grad_", "state_dict", "train",
    "zero_grad",
))
# Not load_state_dict and add_param_group: fused kernels do not check sizes.
_OF_OPTIMIZERS = frozenset(("state_dict", "step", "zero_grad"))
# fmt: on


def _of_rest(check: Check) -> Check:
    return lambda args, kwargs: check(args[1:], kwargs)


_CONTAINER_CHECKS = {
    cls: {name: _of_rest(check) for check, names in table.items() for name in names}
    for cls, table in _OF_CONTAINERS.items()
}
TENSOR_CHECKS = {
    **{name: check for name, check in TORCH_CHECKS.items() if hasattr(torch.Tensor, name)},
    **{name: check for check, names in _OF_TENSORS.items() for name in names},
}


def find_method(rule: NamingRule, value: object, name: str) -> Callable[..., Any]:
    """Return a method of an object that other ranks may call, or raise with the reason."""
    if rule.anything:
        return _callable(getattr(value, name), name)
    if name.startswith("_") and name not in _DUNDERS:
        raise NameRefusedError(f"the method {name!r} is private")
    cls = type(value)
    # Calling a module runs its forward, so the same rule applies.
    sought = "forward" if name == "__call__" and isinstance(value, torch.nn.Module) else name
    owner, raw = _defined(cls, sought)
    if name in getattr(value, "__dict__", ()):
        raise NameRefusedError(f"the method {name!r} is covered by an attribute of the object")
    is_open = rule.allows_methods_of(owner) and _is_defined_by(rule, owner, sought, raw)
    check = None if is_open else _required_check(rule, value, owner, sought, name)
    defined = raw if sought == name else _defined(cls, name)[1]
    bound = _callable(defined.__get__(value, cls), name)
    if check is None:
        return bound
    return partial(_run, lambda args, kwargs: check((value, *args), kwargs), bound)


def _callable(found: Any, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise NameRefusedError(f"{name!r} is not a method")
    return found  # type: ignore[no-any-return]


def _required_check(rule: NamingRule, value: Any, owner: type, sought: str, name: str) -> Check:
    check = None if rule.is_strict else _check_of(rule, value, owner, sought)
    if check is None:
        raise NameRefusedError(
            f"the method {name!r} of {owner.__module__}.{owner.__qualname__} is refused: its "
            "class is not one of the program's, and the method is not in the table of those "
            "that are safe with any arguments. Call a function of the program. To allow it on "
            "purpose, decorate the class with @rankwire.torch.rpc.exposed, or name its module: "
            f"init_rpc(..., allow=[{owner.__module__!r}])"
        )
    return check


def _defined(cls: type, name: str) -> tuple[type, Any]:
    owner, raw = member_of({}, cls, name)
    if owner is None or raw is None:
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
    return owner, raw


def _is_defined_by(rule: NamingRule, owner: type, name: str, raw: Any) -> bool:
    """Return whether a class defines a method, and not only its name for another function.

    The function may also come from another open module: decorated, or of the same package.
    """
    plain = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if isinstance(plain, types.FunctionType):
        is_near = plain.__module__ == owner.__module__ or rule.allows_module(plain.__module__)
        return is_near and plain.__name__ == name
    return isinstance(plain, types.MethodDescriptorType | types.WrapperDescriptorType)


def _check_of(rule: NamingRule, value: Any, owner: type, name: str) -> Check | None:
    if owner in _OF_CONTAINERS:
        return _CONTAINER_CHECKS[owner].get(name)
    if owner in (torch.Tensor, torch._C.TensorBase, torch.nn.Parameter):
        return TENSOR_CHECKS.get(name)
    if issubclass(owner, torch.nn.Module) and owner.__module__.startswith("torch.nn.modules."):
        if name == "forward":
            return _check_forward if _is_runnable(rule, value) else None
        return _check_of_module if name in _OF_MODULES else None
    if issubclass(owner, torch.optim.Optimizer) and owner.__module__.startswith("torch.optim."):
        return _nothing if name in _OF_OPTIMIZERS else None
    return None


def _is_runnable(rule: NamingRule, module: torch.nn.Module) -> bool:
    cls = type(module)
    if cls is torch.nn.Sequential:
        return all(_is_runnable(rule, child) for child in module.children())
    owner, _ = _defined(cls, "forward")
    known = (base for base in cls.__mro__ if is_run(base))
    return rule.allows_methods_of(owner) or any(
        _defined(base, "forward")[0] is owner for base in known
    )


def _check_forward(args: Args, kwargs: Kwargs) -> None:
    check_run(args[0], args[1:], kwargs)


def _check_of_module(args: Args, kwargs: Kwargs) -> None:
    if "assign" in kwargs or len(args) > 3:
        raise TypeError("from another rank, load_state_dict() copies into the parameters")


def guarded(function: Any) -> Callable[..., Any]:
    """Return a function or class, or a wrapper that checks its arguments first."""
    if isinstance(function, type):
        owners = constructors_of(function)
        if any(map(is_layer, owners)):
            return partial(make_layer, function)
        check = next(filter(None, map(check_of, owners)), None)
    else:
        check = check_of(function)
    return function if check is None else partial(_run, check, function)


def _run(check: Check, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    check(args, kwargs)
    return function(*args, **kwargs)
