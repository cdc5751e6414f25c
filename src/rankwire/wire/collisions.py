"""Keeps a sender from choosing dict keys that all have one hash.

Python hashes numbers and tuples without a secret, so such keys are easy to make, and a dict of n
of them takes n**2 comparisons: a quarter of a megabyte stops the interpreter for seconds. Keys
that arrive in an extension are counted by hash before they meet in a dict or set. Native msgpack
maps are built by msgspec without asking, so the codec writes only short ones, where collisions do
not matter, and a head that may hide a longer one is scanned for it.

Contract: linear time, ``InvalidMessageError`` or nothing. Knows msgpack's tokens and nothing of
what they mean to the codec.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rankwire.errors import InvalidMessageError

__all__ = [
    "MAX_NATIVE_MAP",
    "MIN_SCANNED_NBYTES",
    "check_hashes",
    "may_hold_wide_maps",
    "refuse_wide_maps",
]

# What a fixmap can hold, so that a longer map begins with one of two bytes.
MAX_NATIVE_MAP = 15

# Honest keys share a hash too: 34 powers of two do, and classes may hash by one field.
_MAX_EQUAL_HASHES = 128
# Too short to hold enough keys to matter.
MIN_SCANNED_NBYTES = 1024

# Hashed with a secret of this process, or there are only three.
_HASHED_SAFELY: frozenset[type] = frozenset({type(None), bool, str, bytes})

_MAP16, _MAP32 = 0xDE, 0xDF
# Tokens of a fixed length, frequent ones first; fixmap is among them.
_SHORT_TOKENS = re.compile(
    rb"(?:(?:\xcb.{8})++|[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]|[\xca\xce\xd2\xdd].{4}"
    rb"|[\xcd\xd1\xd4\xdc]..|[\xcc\xd0].|[\xcf\xd3].{8}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
    + b"|".join(b"%c.{%d}" % (0xA0 + nbytes, nbytes) for nbytes in range(1, 32))
    + rb")*+",
    re.DOTALL,
)
# Tokens that say their length (bin, str, ext): the width of the length, and what else follows it.
_LONG_TOKENS = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0)},
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},
    **{0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
}


def check_hashes(keys: Sequence[Any]) -> None:
    """Refuse keys of which too many have the same hash."""
    if len(keys) <= _MAX_EQUAL_HASHES or _HASHED_SAFELY.issuperset(map(type, keys)):
        return
    if max(Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES:
        raise InvalidMessageError(f"more than {_MAX_EQUAL_HASHES} keys have the same hash")


def may_hold_wide_maps(payload: bytearray, end: int) -> bool:
    """Tell in two fast searches whether there can be anything to refuse in ``payload[:end]``."""
    return payload.find(_MAP16, 0, end) >= 0 or payload.find(_MAP32, 0, end) >= 0


def refuse_wide_maps(body: memoryview) -> None:
    """Refuse msgpack that holds a map of more than 15 entries, except if it is too short to matter.

    The bodies of extensions are opaque here. Those that are msgpack again need a call of their own.
    """
    if len(body) <= MIN_SCANNED_NBYTES:
        return
    position = 0
    while (position := _skip_short_tokens(body, position)) < len(body):
        token = body[position]
        if token not in _LONG_TOKENS:
            raise InvalidMessageError(f"a native map of more than {MAX_NATIVE_MAP}, or no msgpack")
        width, besides = _LONG_TOKENS[token]
        nbytes = int.from_bytes(body[position + 1 : position + 1 + width], "big")
        position += 1 + width + besides + nbytes


def _skip_short_tokens(body: memoryview, position: int) -> int:
    match = _SHORT_TOKENS.match(body, position)  # matches at least the empty string
    return match.end() if match else position
