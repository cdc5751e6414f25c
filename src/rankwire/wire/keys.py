"""The keys of a job. A rank that knows only its own key cannot act as another rank.

::

    secret              of the job: launchers have it, or all ranks if each is given it
    key of rank r       from the secret; proves r when it joins, wraps the keys that it is sent
    world key           the coordinator's, random for each world
    key of ranks a, b   from the world key; only a and b get it; opens connections between them

The key of a rank and its pair keys depend on its *incarnation* number, so the keys of a process
that was replaced open nothing. The keys of pairs travel wrapped: encrypted by a stream derived from
the rank's key and a fresh salt. The seals of the connection detect changes.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256, shake_256

from rankwire.errors import InvalidMessageError

KEY_NBYTES = 32
SALT_NBYTES = 16
_RANK = struct.Struct("<I")
_PAIR = struct.Struct("<II")
_INCARNATIONS = struct.Struct("<II")


class HiddenKey(bytes):
    """A key that logs and tracebacks do not show."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    __str__ = __repr__


class RankKey(HiddenKey):
    """The key of one rank, of a process without the secret."""


def rank_key(secret: bytes, rank: int, incarnation: int = 0) -> RankKey:
    """Return the key by which a rank joins, in its ``incarnation``: 0 until it is restarted."""
    who = _RANK.pack(rank) + (_RANK.pack(incarnation) if incarnation else b"")
    return RankKey(hmac.digest(secret, b"rankwire v3 rank" + who, sha256))


def pair_keys(world_key: bytes, rank: int, incarnations: Sequence[int]) -> bytes:
    """Return the keys of a rank with every rank, in order; the one with itself is unused."""
    return b"".join(
        pair_key(world_key, rank, other, incarnations) for other in range(len(incarnations))
    )


def pair_key(world_key: bytes, rank: int, other: int, incarnations: Sequence[int]) -> bytes:
    """Return the key of two ranks."""
    low, high = min(rank, other), max(rank, other)
    # BLAKE2b takes 0.6 us per key, HMAC-SHA256 1.6 us; a world of 1024 ranks needs a million.
    return blake2b(
        _PAIR.pack(low, high),
        key=world_key,
        salt=_INCARNATIONS.pack(incarnations[low], incarnations[high]),
        digest_size=KEY_NBYTES,
        person=b"rankwire pair",
    ).digest()


def wrap(key: bytes, keys: bytes, salt: bytes) -> bytes:
    """Encrypt pair keys for the rank that has ``key``; ``salt`` is random and never reused."""
    return salt + _masked(key, keys, salt)


def unwrap(key: bytes, wrapped: bytes, rank: int, world_size: int) -> Mapping[int, HiddenKey]:
    """Return the keys of a rank by the other rank, or raise ``InvalidMessageError``."""
    if len(wrapped) != SALT_NBYTES + KEY_NBYTES * world_size:
        raise InvalidMessageError(
            f"{len(wrapped)} bytes do not hold the keys of a world of {world_size}"
        )
    keys = _masked(key, wrapped[SALT_NBYTES:], wrapped[:SALT_NBYTES])
    return {
        other: HiddenKey(keys[KEY_NBYTES * other : KEY_NBYTES * (other + 1)])
        for other in range(world_size)
        if other != rank
    }


def unwrap_one(key: bytes, wrapped: bytes) -> HiddenKey:
    """Return the single key that was wrapped, or raise ``InvalidMessageError``."""
    if len(wrapped) != SALT_NBYTES + KEY_NBYTES:
        raise InvalidMessageError(f"{len(wrapped)} bytes do not hold the key of two ranks")
    return HiddenKey(_masked(key, wrapped[SALT_NBYTES:], wrapped[:SALT_NBYTES]))


def _masked(key: bytes, keys: bytes, salt: bytes) -> bytes:
    stream = shake_256(hmac.digest(key, b"K" + salt, sha256)).digest(len(keys))
    mixed = int.from_bytes(keys, "little") ^ int.from_bytes(stream, "little")
    return mixed.to_bytes(len(keys), "little")
