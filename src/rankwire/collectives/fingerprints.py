"""Fingerprints: what an operation is, in the tag of every one of its messages.

All ranks describe an operation in the same words: kind, op, root, dtype, shape. The tag of a
message is made of a digest of these words, the operation's number and its epoch (48 bits), and of
the step (16 bits). The epoch is the number after the last operation that failed: ranks that do not
agree on whether that one failed do not get past the next one. Messages of different operations
therefore never match, and ranks that disagree wait for each other instead of taking each other's
bytes; ``sequence`` finds out why. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from typing import Any

_DIGEST_NBYTES = 6
_DIGEST_MASK = (1 << 8 * _DIGEST_NBYTES) - 1
_STEP_BITS = 16
# Of a list of arrays. A notice carries only so much of a text (``wire.notices``), and one that was
# cut would be taken for another operation.
_MOST_WORDS = 1000
# Odd, so that two numbers of one operation never meet; its bits are those of the golden ratio.
_SPREAD = 0x9E3779B97F4B
_EPOCH_SPREAD = 0xBB67AE8584CB  # the same of the root of 3
MAX_STEP = (1 << _STEP_BITS) - 2


@lru_cache(maxsize=1024)
def describe(kind: str, *details: Any) -> str:
    """Return an operation in words, such as ``all_reduce(sum, <f4, (1024,))``."""
    return f"{kind}({', '.join(map(str, details))})"


@lru_cache(maxsize=1024)
def describe_many(kind: str, *details: Any, each: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Return an operation on many arrays in words: equal ones once, and no more than can be told.

    Args:
        kind: What it is.
        *details: What else it says.
        each: The dtype and shape of each array.
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
    """Return the tag of step 0; the others follow."""
    place = sequence * _SPREAD + epoch * _EPOCH_SPREAD
    return ((_digest(description) + place) & _DIGEST_MASK) << _STEP_BITS
