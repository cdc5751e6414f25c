"""Who has which key, so that a rank that knows its own cannot act as another.

::

    secret              the job's: launchers, or all ranks where each is given it
    key of rank r       from the secret; proves r when it joins, wraps what the coordinator hands it
    world key           the coordinator's own, drawn for each world
    key of ranks a, b   from the world key; handed to a and b alone, opens connections between them

A rank that is started anew alone is another *incarnation* of it, and has other keys: its number is
part of the rank's key and of those of all its pairs. So nothing that the process before it knew,
has said or has kept opens a connection as the new one.

A rank that was given the secret can make the key of every rank, one that a launcher started has its
own alone (``RankKey``). The keys of pairs travel wrapped: encrypted by a stream that the rank's
key and a fresh salt make, so that who reads the network without that key does not learn them.
Whether they were altered is seen by the seals of that connection.

Pure: random bytes are handed in. ``wire.handshake`` uses the keys, ``rendezvous`` hands them out.
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
    """A key that no log or traceback shows."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    __str__ = __repr__


class RankKey(HiddenKey):
    """The key of one rank; in the place of a secret, it says that this is all there is."""


def rank_key(secret: bytes, rank: int, incarnation: int = 0) -> RankKey:
    """Return the key by which a rank joins.

    Args:
        secret: The job's.
        rank: Which rank.
        incarnation: How many times it was started anew alone.
    """
    who = _RANK.pack(rank) + (_RANK.pack(incarnation) if incarnation else b"")
    return RankKey(hmac.digest(secret, b"rankwire v3 rank" + who, sha256))


def pair_keys(world_key: bytes, rank: int, incarnations: Sequence[int]) -> bytes:
    """Return the keys of a rank with every rank, in order; the one with itself is of no use.

    Args:
        world_key: The coordinator's.
        rank: Whose keys they are.
        incarnations: Of all ranks of the world.
    """
    return b"".join(
        pair_key(world_key, rank, other, incarnations) for other in range(len(incarnations))
    )


def pair_key(world_key: bytes, rank: int, other: int, incarnations: Sequence[int]) -> bytes:
    """Return the key of two ranks."""
    low, high = min(rank, other), max(rank, other)
    # BLAKE2b takes 0.6 us a key, HMAC-SHA256 1.6; a world of 1024 ranks needs a million.
    return blake2b(
        _PAIR.pack(low, high),
        key=world_key,
        salt=_INCARNATIONS.pack(incarnations[low], incarnations[high]),
        digest_size=KEY_NBYTES,
        person=b"rankwire pair",
    ).digest()


def wrap(key: bytes, keys: bytes, salt: bytes) -> bytes:
    """Return the keys of pairs as they travel to the rank that has ``key``.

    Args:
        key: The rank's.
        keys: What ``pair_keys`` or ``pair_key`` returned.
        salt: Random bytes that were never used before.
    """
    return salt + _masked(key, keys, salt)


def unwrap(key: bytes, wrapped: bytes, rank: int, world_size: int) -> Mapping[int, HiddenKey]:
    """Return the keys of a rank by the other rank.

    Raises:
        InvalidMessageError: There are not as many as there are ranks.
    """
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
    """Return the one key that was wrapped.

    Raises:
        InvalidMessageError: It is not one.
    """
    if len(wrapped) != SALT_NBYTES + KEY_NBYTES:
        raise InvalidMessageError(f"{len(wrapped)} bytes do not hold the key of two ranks")
    return HiddenKey(_masked(key, wrapped[SALT_NBYTES:], wrapped[:SALT_NBYTES]))


def _masked(key: bytes, keys: bytes, salt: bytes) -> bytes:
    stream = shake_256(hmac.digest(key, b"K" + salt, sha256)).digest(len(keys))
    mixed = int.from_bytes(keys, "little") ^ int.from_bytes(stream, "little")
    return mixed.to_bytes(len(keys), "little")
