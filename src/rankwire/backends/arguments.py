"""Checks of the arguments that users pass to backends: ranks, tags, buffers. Pure.

An integer of any type, numpy's too, becomes a plain integer: other types cannot be sent, nor found
in every table.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwire.codec.arrays import ADVICE_FOR_MASKED, holds_references, is_masked
from rankwire.errors import ConfigurationError, InvalidRankError, InvalidWorldSizeError
from rankwire.wire.frames import Buffer

if TYPE_CHECKING:
    from rankwire.backends.base import Backend
    from rankwire.backends.roles import Roles

Ranks: TypeAlias = Iterable[int | str] | str | None  # numbers and names; None for all
Sendable = Buffer | Sequence[Buffer]
_MAX_TAG = (1 << 64) - 1


def as_index(value: Any) -> int | None:
    """Return an integer of any type as Python's; None if the value is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_world(rank: int, world_size: int) -> tuple[int, int]:
    """Return both as plain integers; raise unless ``rank`` is one of ``world_size`` ranks."""
    size = as_index(world_size)
    if size is None or size < 1:
        raise InvalidWorldSizeError(world_size)
    return check_rank(rank, size), size


def check_rank(rank: int | str, world_size: int, roles: Roles | None = None) -> int:
    """Return a rank as a plain integer; raise unless it is one of ``world_size`` ranks.

    With ``roles``, the rank may also be given by its name.
    """
    if roles is not None and isinstance(rank, str):
        return roles.rank_of(rank)
    try:
        index = operator.index(rank)  # type: ignore[arg-type]
    except TypeError:
        index = -1
    if not 0 <= index < world_size:
        raise InvalidRankError(rank, world_size)
    return index


def check_ranks(ranks: Ranks, world_size: int, roles: Roles | None = None) -> list[int]:
    """Return ranks as plain integers, each once, in the given order; None means all ranks.

    With ``roles``, names of ranks and roles may stand for ranks, alone or in place of an item.
    Raises ``InvalidRankError`` for an invalid rank, and ``ConfigurationError`` without ranks.
    """
    if ranks is None:
        return [*range(world_size)]
    found: dict[int, None] = {}
    for rank in [ranks] if isinstance(ranks, str) else ranks:
        if roles is not None and isinstance(rank, str):
            found.update(dict.fromkeys(roles.ranks_of(rank)))
        else:
            found[check_rank(rank, world_size)] = None
    chosen = [*found]
    if not chosen:
        raise ConfigurationError("no ranks are given; leave the argument out for all ranks")
    return chosen


def check_pickle(backend: Backend, allowed: bool) -> None:
    """Raise if pickles are allowed on unauthenticated connections."""
    if allowed and backend.security == "insecure":
        raise ConfigurationError(
            'allow_pickle=True together with security="insecure" would let any process that '
            "reaches this rank run code on it"
        )


def check_tag(tag: int) -> int:
    """Return a tag as a plain integer; raise unless it has 64 bits."""
    try:
        index = operator.index(tag)
    except TypeError:
        index = -1
    if not 0 <= index <= _MAX_TAG:
        raise ConfigurationError(f"a tag is an integer from 0 to 2**64 - 1, not {tag!r}")
    return index


def flat_view(buffer: Any) -> memoryview:
    """Return a contiguous buffer as bytes, uncopied; ``ConfigurationError`` if it is invalid."""
    try:
        view = memoryview(buffer)
        refers = holds_references(view)
        # cast() refuses shapes with a zero in them; without elements there is nothing to share
        flat = view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a message is one or more contiguous buffers, not {type(buffer).__name__}: {error}"
        ) from error
    if is_masked(buffer):
        raise ConfigurationError(f"a masked array is no buffer. {ADVICE_FOR_MASKED}")
    if refers:
        raise ConfigurationError(
            f"this {type(buffer).__name__} holds references to objects, which mean nothing to "
            "another process; convert it, or send its values by a call"
        )
    return flat


def writable_view(buffer: Buffer) -> memoryview:
    """Return a writable buffer to receive into as flat bytes, without a copy."""
    view = flat_view(buffer)
    if view.readonly:
        raise ConfigurationError("recv_into needs a writable buffer")
    return view


def as_buffers(data: Sendable) -> tuple[list[Buffer], int]:
    """Return the pieces as flat bytes, without a copy, and their total size."""
    pieces: Sequence[Any] = data if isinstance(data, (list, tuple)) else [data]
    views: list[Buffer] = [flat_view(piece) for piece in pieces]
    return views, sum(map(len, views))


def check_members(
    rank: int, world_size: int, members: Iterable[int], *, keep_order: bool
) -> list[int]:
    """Return the members of a group, each once: in ascending order, or in the given one.

    Raises ``InvalidWorldSizeError`` without members, ``InvalidRankError`` if a member is not a rank
    or this rank is not a member, ``ConfigurationError`` if a member is repeated with
    ``keep_order``.
    """
    chosen = [check_rank(member, world_size) for member in members]
    if not chosen:
        raise InvalidWorldSizeError(0)
    ascending = sorted({*chosen})
    if not keep_order:
        chosen = ascending
    elif len(chosen) > len(ascending):
        repeated = min(member for member in ascending if chosen.count(member) > 1)
        raise ConfigurationError(
            f"rank {repeated} is repeated in {chosen}: it cannot have two places in the order"
        )
    if rank not in chosen:
        error = InvalidRankError(rank, len(chosen))
        error.message = f"rank {rank} is not a member of the group {chosen}"
        raise error
    return chosen
