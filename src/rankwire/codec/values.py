"""What msgpack has no type for, as msgpack extensions: how values become a head, and a head values.

msgspec would encode tuples, dates, enums and more by itself, as the nearest thing that msgpack
has: what arrives would be of another type. So a ``Writer`` walks a value before msgspec sees it.
It passes *plain* values, which msgspec carries exactly, at C speed, and *lowers* the rest to
extensions. A ``Reader`` is msgspec's hook for extensions and *lifts* them again. The body of a
tuple, set, dict or record is again msgpack, with the same hook.

Both are mirrors and meet in the order of the head: what the writer puts beside it (``buffers``),
the reader takes in the same order. Each serves one encode or decode and is then thrown away, so
there is nothing to lock. Where the parts of a payload lie is the codec's business; here is what
the two ends have in common: numbers of the wire format, and what is plain.
"""

from __future__ import annotations

import struct
from typing import Any

from rankwire.codec.limits import MAX_NATIVE_MAP

# No dtype needs more, and small arrays are common.
ALIGNMENT = 16
# Below this, a copy into the head costs less than one more buffer for the socket.
MIN_BUFFER_NBYTES = 4096
# Enough for data; a walk this deep stays far from the interpreter's recursion limit.
MAX_DEPTH = 32
# Looking at types costs seven times what msgspec takes for a list; so long floats have a shortcut.
MIN_LONG_LIST = 4096

# What msgspec carries exactly, or refuses: an int too wide, a string with a lone surrogate. After
# such a refusal the walk is repeated with what it never refuses.
PLAIN: frozenset[type] = frozenset({type(None), bool, int, float, str})
ALWAYS_PLAIN = PLAIN - {int, str}


NBYTES = struct.Struct("<Q")


class Code:
    """Types of extensions; those of single values are in ``scalars``."""

    TUPLE, SET, FROZENSET, DICT = 10, 11, 12, 13
    ORDERED_DICT, DEFAULT_DICT, COUNTER, DEQUE, SLICE = 14, 15, 16, 17, 18
    BYTES, BYTEARRAY, PICKLE = 20, 21, 22
    ENUM, RECORD, HOOKED = 30, 31, 32
    ARRAY, NUMPY_SCALAR, TENSOR, STRUCTURED_ARRAY = 40, 41, 42, 43
    PARAMETER, TORCH_SIZE, TORCH_CONSTANT = 44, 45, 46


def is_flat(value: Any) -> bool:
    """Tell whether msgspec carries a value that is not plain exactly: plain ones in a container."""
    kind = type(value)
    if kind is list:
        return not value or (len(value) < MIN_LONG_LIST and PLAIN.issuperset(map(type, value)))
    if kind is dict:
        return not value or (
            len(value) <= MAX_NATIVE_MAP
            and PLAIN.issuperset(map(type, value))
            and PLAIN.issuperset(map(type, value.values()))
        )
    return kind is bytes and len(value) < MIN_BUFFER_NBYTES
