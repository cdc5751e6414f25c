"""Pickle, for codecs that were made with ``allow_pickle=True``. Nothing else imports this module.

A sender of pickles may run code on the receiving rank. So ``pickle`` is imported here and
nowhere else in the package, the codec imports this module only when the option is on, and a codec
without the option refuses pickles before it would get here. There is no "restricted unpickler":
those have been bypassed, and a half-safe format invites trust.
"""

from __future__ import annotations

import pickle
from typing import Any

# Fixed, so that ranks on different Python versions agree: every supported version reads it.
_PROTOCOL = 5


def dumps(value: Any) -> bytes:
    """Pickle a value; raises whatever its classes raise."""
    return pickle.dumps(value, protocol=_PROTOCOL)


def loads(data: memoryview) -> Any:
    """Unpickle, which runs what the sender wants; raises anything."""
    return pickle.loads(data)  # noqa: S301 - the user enabled it on this end
