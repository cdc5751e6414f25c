"""Notices: what ranks tell each other about an operation, beside its messages.

Only when something is wrong or late: a rank that has waited for a while says in which operation it
is, and a rank that fails says so to all. The wire form is msgpack; ``pack`` and ``unpack`` are
mirrors. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rankwire.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    InvalidMessageError,
    PeerLostError,
    RankwireError,
)
from rankwire.wire.texts import printable

__all__ = ["Notice", "failure_notice", "pack", "unpack"]

_MAX_TEXT = 4000


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank says.

    Attributes:
        sequence: The number of the operation in its group.
        description: What the operation is.
        state: Whether it waits in it, or how it failed.
        text: What went wrong.
        culprit: The rank whose fault it is, if it failed.
    """

    sequence: int
    description: str
    state: Literal["waiting", "mismatch", "lost", "failed"] = "waiting"
    text: str = ""
    culprit: int = -1

    @property
    def is_failure(self) -> bool:
        """Whether the sender has given the operation up."""
        return self.state != "waiting"

    def error(self, sender: int, rank: int = -1) -> RankwireError:
        """Return the error to raise on ``rank`` because of a failure that ``sender`` reported."""
        peer = sender if self.culprit == rank else self.culprit
        if self.state == "mismatch":
            return CollectiveMismatchError(self.text).during(peer=peer)
        if self.state == "lost" and self.culprit == rank:
            return PeerLostError(sender, f"it has lost this rank: {self.text}")
        if self.state == "lost":
            return PeerLostError(peer, f"{self.text} (rank {sender} says)")
        return CollectiveAbortedError(sender, f"{self.description}: {self.text}")


def failure_notice(sequence: int, description: str, rank: int, error: BaseException) -> Notice:
    """Return what a rank that fails tells the others."""
    if isinstance(error, CollectiveMismatchError):
        culprit = rank if error.peer is None else error.peer
        return Notice(sequence, description, "mismatch", _sayable(error.message), culprit)
    if isinstance(error, PeerLostError) and error.peer is not None:
        return Notice(sequence, description, "lost", _sayable(error.reason), error.peer)
    text = error.message if isinstance(error, RankwireError) else repr(error)
    return Notice(sequence, description, "failed", _sayable(text), rank)


def _sayable(text: str) -> str:
    """Return a text as it may be told and printed."""
    return printable(text, _MAX_TEXT)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Notice).decode


def pack(notice: Notice) -> bytes:
    """Return the bytes of a notice."""
    return _encode(notice)


def unpack(payload: bytearray) -> Notice:
    """Return the notice in a payload.

    Raises:
        InvalidMessageError: It is none.
    """
    try:
        notice = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessageError(f"not a notice of a collective: {error}") from error
    texts = {"description": _sayable(notice.description), "text": _sayable(notice.text)}
    return msgspec.structs.replace(notice, **texts)
