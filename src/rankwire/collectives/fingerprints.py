"""Fingerprints: an operation's description, and the tag of its messages.

All ranks describe an operation in the same words. A tag has 48 bits hashed from the description,
the operation's number and its epoch (the number after the last failure), and 16 bits for the step.
So messages of different operations never match.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from typing import Any

_DIGEST_NBYTES = 6
_DIGEST_MASK = (1 << 8 * _DIGEST_NBYTES) - 1
_STEP_BITS = 16
# A notice truncates long descriptions (``wire.notices``), and then they would no longer be equal.
_MOST_WORDS = 1000
# Odd, so that different numbers give different tags; the bits of the golden ratio.
_SPREAD = 0x9E3779B97F4B
_EPOCH_SPREAD = 0xBB67AE8584CB  # the bits of the root of 3
MAX_STEP = (1 << _STEP_BITS) - 2


@lru_cache(maxsize=1024)
def describe(kind: str, *details: Any) -> str:
    """Return a description such as ``all_reduce(sum, <f4, (1024,))``."""
    return f"{kind}({', '.join(map(str, details))})"


@lru_cache(maxsize=1024)
def describe_many(kind: str, *details: Any, each: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Return the description of an operation on many arrays, with runs of equal ones counted.

    ``each`` has the dtype and shape of each array.
    """
    counted = ((words, len(list(same))) for words, same in groupby(f"{d} {s}" for d, s in each))
    text = ", ".join(words if count == 1 else f"{count} x {words}" for words, count in counted)
    if len(text) > _MOST_WORDS:
        text = f"{text[:_MOST_WORDS]}..., {len(each)} in all, digest {_digest(text):x}"
    return describe(kind, *details, f"[{text}]")


@lru_cache(maxsize=1024)
def _digest(description: str) -> int:
    digest = blake2b(description.encode(), digest_size=_DIGEST_NBYTES).digest()
    return int.from_bytes(digest, "little")


def tag_of(description: str, sequence: int, epoch: int = 0) -> int:
    """Return the tag of step 0; the tags of later steps follow it."""
    place = sequence * _SPREAD + epoch * _EPOCH_SPREAD
    return ((_digest(description) + place) & _DIGEST_MASK) << _STEP_BITS
