"""Methods: which methods other ranks can call on an object that its owner has shared with them.

Sharing an object is not sharing all that its class can do: an array can write itself to a file, a
path can delete what it names. So a method can be called if the class that defines it is one that
the naming rule lets others reach, and else only if it is in a list: torch's operators on tensors,
the usual methods of modules and optimizers, and those of Python's own containers and texts that
compute. The name is public, or one of a few with underscores, and the method is found in the
class, not in the object: nothing that was merely stored there is called. In worlds with pickle, in
which every rank can run what it likes on every other, every method can be called, as with torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from rankwire.torch.rpc.naming import NameRefusedError, NamingRule
from rankwire.torch.rpc.pure_functions import operator_names

_CONTAINER_DUNDERS = frozenset(
    ("__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__next__", "__setitem__")
)
_DUNDERS = _CONTAINER_DUNDERS | {"__call__"}

_VALUES = (list, dict, set, frozenset, tuple, str, bytes, bytearray, bool, int, float, complex)
# A format can walk from its arguments to whatever they refer to.
_NOT_OF_VALUES = frozenset(("format", "format_map"))

_OF_TENSORS = frozenset(
    (
        *("T", "backward", "bernoulli_", "bfloat16", "bool", "byte", "char", "coalesce", "copy_"),
        *("contiguous", "cpu", "dense_dim", "dim", "double", "element_size", "expand", "expand_as"),
        *("exponential_", "float", "half", "indices", "int", "is_coalesced", "is_contiguous"),
        *("item", "long", "ndimension", "nelement", "new_full", "new_ones", "new_tensor"),
        *("new_zeros", "normal_", "random_", "repeat", "requires_grad_", "reshape_as", "short"),
        *("size", "sparse_dim", "squeeze_", "storage_offset", "stride", "t_", "to", "to_dense"),
        *("to_sparse", "tolist", "transpose_", "type_as", "uniform_", "unfold", "unique"),
        *("unsqueeze_", "values", "view", "view_as", *_CONTAINER_DUNDERS),
    )
)
_OF_MODULES = frozenset(
    (
        *("__call__", "bfloat16", "buffers", "children", "cpu", "double", "eval", "extra_repr"),
        *("float", "forward", "half", "load_state_dict", "modules", "named_buffers"),
        *("named_children", "named_modules", "named_parameters", "parameters", "requires_grad_"),
        *("state_dict", "to", "train", "zero_grad"),
    )
)
_OF_OPTIMIZERS = frozenset(
    ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
)


def find_method(rule: NamingRule, value: object, name: str) -> Callable[..., Any]:
    """Return a method of an object that other ranks can call.

    Raises:
        NameRefusedError: They must not; it says why.
        AttributeError: There is none of that name.
    """
    if rule.anything:
        return _any_method(value, name)
    if name.startswith("_") and name not in _DUNDERS:
        raise NameRefusedError(f"the method {name!r} is private")
    cls = type(value)
    for owner in type.__dict__["__mro__"].__get__(cls):
        raw = vars(owner).get(name)
        if raw is not None:
            break
    else:
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
    if not _is_listed(owner, name) and not (
        rule.allows_methods_of(owner) and _is_defined_by(rule, owner, name, raw)
    ):
        raise NameRefusedError(
            f"the method {name!r} of {owner.__module__}.{owner.__qualname__} is refused: its class "
            "is not one of the program's. To allow it on purpose, decorate the class with "
            "@rankwire.torch.rpc.exposed, or name its module: init_rpc(..., "
            f"allow=[{owner.__module__!r}])"
        )
    if name in getattr(value, "__dict__", ()):
        raise NameRefusedError(f"the method {name!r} is covered by an attribute of the object")
    bound = raw.__get__(value, cls)
    if not callable(bound):
        raise NameRefusedError(f"{name!r} is no method")
    return bound  # type: ignore[no-any-return]


def _any_method(value: object, name: str) -> Callable[..., Any]:
    """Return whatever an object has under a name, if it can be called."""
    found = getattr(value, name)
    if not callable(found):
        raise NameRefusedError(f"{name!r} is no method")
    return found  # type: ignore[no-any-return]


def _is_defined_by(rule: NamingRule, owner: type, name: str, raw: Any) -> bool:
    """Tell whether a class defines a method, and does not merely call something by that name.

    A package may say that its classes are its own where their methods are of modules in it, and a
    class may take over a decorated method of its base: both are fine if that module is open too.
    """
    plain = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if isinstance(plain, types.FunctionType):
        is_near = plain.__module__ == owner.__module__ or rule.allows_module(plain.__module__)
        return is_near and plain.__name__ == name
    return isinstance(plain, types.MethodDescriptorType | types.WrapperDescriptorType)


def _is_listed(owner: type, name: str) -> bool:
    """Tell whether a method of a class that is not the program's is known to be harmless."""
    module = owner.__module__
    if owner in _VALUES:
        return name not in _NOT_OF_VALUES and (name in _CONTAINER_DUNDERS or name[0] != "_")
    if owner in (torch.Tensor, torch._C.TensorBase, torch.nn.Parameter):
        return name in _tensor_methods()
    if issubclass(owner, torch.nn.Module):
        return name in _OF_MODULES and module.startswith("torch.nn.modules.")
    if issubclass(owner, torch.optim.Optimizer):
        return name in _OF_OPTIMIZERS and module.startswith("torch.optim.")
    return False


@cache
def _tensor_methods() -> frozenset[str]:
    names = {name for name in dir(torch.Tensor) if name.removesuffix("_") in operator_names()}
    return _OF_TENSORS | {name for name in names if name[0] != "_"}
