"""Replace names in the modules of this process, and restore them. Nothing is imported here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

EXTENSION = "torch._C._distributed_rpc"
_MISSING = object()

Names = Mapping[str, Mapping[str, Any]]  # the new values, by module and name
# The module, the name, and the value that was replaced.
Replaced = list[tuple[ModuleType, str, Any]]

_replaced: Replaced = []


def put_in_place(names: Names) -> None:
    """Replace torch's names until ``put_back``, unless torch's own RPC is initialized."""
    is_torchs_set = getattr(sys.modules.get(EXTENSION), "_is_current_rpc_agent_set", None)
    if is_torchs_set is None or not is_torchs_set():
        _replaced.extend(replace(names, everywhere=True))


def put_back() -> None:
    """Restore torch's names. Safe to repeat."""
    restore(_replaced)


def replace(names: Names, *, everywhere: bool) -> Replaced:
    """Replace names in all modules that imported them, or in torch's only; return the old ones."""
    replaced: Replaced = []
    new: dict[int, Any] = {}
    for module_name, values in names.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        for name, ours in values.items():
            theirs = vars(module).get(name, _MISSING)
            if theirs is ours:
                continue
            replaced.append((module, name, theirs))
            if theirs is not _MISSING:
                new[id(theirs)] = ours
            setattr(module, name, ours)
    found = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and (everywhere or module_name.startswith("torch.distributed."))
        for name, value in list(vars(module).items())
        if id(value) in new
    ]
    for module, name, value in found:
        setattr(module, name, new[id(value)])
    return replaced + found


def restore(replaced: Replaced) -> None:
    """Undo ``replace``, and empty the list."""
    while replaced:
        module, name, theirs = replaced.pop()
        if theirs is _MISSING:
            vars(module).pop(name, None)
        else:
            setattr(module, name, theirs)
