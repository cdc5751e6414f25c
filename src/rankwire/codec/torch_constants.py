"""What torch has beside tensors: sizes, dtypes, devices, layouts and memory formats.

A size is a list of ints. The others travel by kind and name, and are looked up among the things of
that kind, so a name reaches nothing else. As with tensors, torch is never imported to send.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from rankwire.errors import InvalidMessageError

_KINDS = ("dtype", "layout", "memory_format")
_DEVICE = "device"
_DEVICE_NAME = re.compile(r"[a-z_0-9]{1,32}(:[0-9]{1,3})?")
_INT = frozenset({int})


def size_of(value: object) -> list[int] | None:
    """Return the extents of a ``torch.Size``; None for any other value."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not getattr(torch, "Size", None):
        return None
    extents = list(value)  # type: ignore[call-overload]
    return extents if _INT.issuperset(map(type, extents)) else None


def build_size(extents: list[Any]) -> Any:
    """Return the ``torch.Size`` of these extents."""
    if not _INT.issuperset(map(type, extents)):
        raise InvalidMessageError("an extent of a torch.Size is not an int")
    return _torch().Size(extents)


def constant_of(value: object) -> list[str] | None:
    """Return kind and name of a dtype, device, layout or memory format; None for any other."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    kind = type(value).__name__
    if kind not in (*_KINDS, _DEVICE) or type(value) is not getattr(torch, kind, None):
        return None
    return [kind, str(value).removeprefix("torch.")]


def build_constant(parts: list[Any]) -> Any:
    """Return what :func:`constant_of` took apart.

    Raises:
        InvalidMessageError: There is no such thing here.
    """
    kind, name = parts
    torch = _torch()
    if kind in _KINDS and type(name) is str:
        found = vars(torch).get(name)  # not getattr, which may import more of torch
        if type(found) is getattr(torch, kind):
            return found
    if kind == _DEVICE and type(name) is str and _DEVICE_NAME.fullmatch(name):
        device = torch.device(name)
        if str(device) == name:
            return device
    raise InvalidMessageError(f"torch has no {str(kind)[:32]} {str(name)[:64]!r} here")


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise InvalidMessageError(
            f"the payload holds something of torch, which is not installed here: {error}"
        ) from error
