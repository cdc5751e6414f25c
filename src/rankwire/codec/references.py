"""Which buffers hold references: addresses of objects, which mean nothing in another process.

Sent as bytes, they would be another process's pointers at the receiver, and looking at one ends the
process. An array of objects is such a buffer, a record with an object in it, and ctypes arrays of
``py_object`` or of pointers. Pure: types and formats in, a yes or no out.
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import Any

import numpy as np

_PLAIN_OWNERS = (bytes, bytearray)
_CTYPES = (
    ctypes.Structure,
    ctypes.Union,
    ctypes.Array,
    ctypes._SimpleCData,
    ctypes._Pointer,
    ctypes._CFuncPtr,  # type: ignore[attr-defined]
)
# Of PEP 3118: objects, pointers of several kinds, functions. "Zd" is a complex number.
_REFERENCE = re.compile(r"[OPz&X]|Z(?![efdg])")
_FIELD_NAME = re.compile(r":[^:]*:")
_REFERRING_CODES = "OPzZX"  # of simple ctypes


def holds_references(view: memoryview) -> bool:
    """Tell whether a buffer holds references, also if it was cast to bytes."""
    owner = view.obj
    if type(owner) in _PLAIN_OWNERS:
        return False
    if isinstance(owner, np.ndarray):
        return _array_refers(owner)
    if isinstance(owner, _CTYPES):
        return _is_referring(type(owner))
    return _names_references(view.format) or _names_references(memoryview(owner).format)


def _array_refers(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.hasobject:
        return True
    # Some fields of a record: those left out lie between them.
    base = array.base if array.dtype.names is not None else None
    while isinstance(base, np.ndarray):
        if base.dtype.hasobject:
            return True
        base = base.base
    return False


@lru_cache(maxsize=256)
def _names_references(code: str) -> bool:
    return _REFERENCE.search(_FIELD_NAME.sub("", code)) is not None


@lru_cache(maxsize=256)
def _is_referring(kind: Any) -> bool:
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        # Its format may be that of bytes, so it is not asked.
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return any(_is_referring(field[1]) for field in fields)
    if issubclass(kind, ctypes.Array):
        return _is_referring(kind._type_)
    return not issubclass(kind, ctypes._SimpleCData) or kind._type_ in _REFERRING_CODES
