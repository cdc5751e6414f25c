"""Pickle, for codecs made with ``allow_pickle=True``; only those import this module.

A sender of pickles can run code on the receiver. So ``pickle`` is imported only here, and a codec
without the option refuses pickles before it gets here. There is no "restricted unpickler": those
have been bypassed, and a half-safe format invites trust.
"""

from __future__ import annotations

import pickle
from typing import Any

# Fixed: every supported Python version reads it.
_PROTOCOL = 5


def dumps(value: Any) -> bytes:
    """Pickle a value; raises whatever its classes raise."""
    return pickle.dumps(value, protocol=_PROTOCOL)


def loads(data: memoryview) -> Any:
    """Unpickle, which runs the sender's code; raises anything."""
    return pickle.loads(data)  # noqa: S301 - the user enabled it on this end
