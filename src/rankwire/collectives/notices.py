"""Notices: what ranks tell each other about an operation, beside its messages.

Only when something is wrong or late: a rank that has waited for a while says in which operation it
is, and a rank that fails says so to all. The wire form is msgpack; ``pack`` and ``unpack`` are
mirrors. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
    RankwireError,
)
from rankwire.texts import printable

_MAX_TEXT = 4000
_RANKS = msgspec.Meta(max_length=65536)  # more than there are; looked at before they are decoded


_FAILURES = ("mismatch", "lost", "left", "failed", "refused")


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank says.

    Attributes:
        sequence: The number of the operation in its group.
        description: What the operation is.
        state: What it says. That it waits: to a convener, or *convening* itself, or *asking* it for
            the roll. As convener: the *roll*, or that it is *done*. How it failed; or that it
            *refused* to begin (its arguments were wrong, and ``description`` is only the name of
            what was called).
        text: What went wrong.
        culprit: The rank whose fault it is, if it failed.
        epoch: The number after the last one that had failed there; ranks that do not agree on it
            do not take each other's messages.
        here: The ranks that wait in this operation, in a roll.
        missing: Those that a rank whose time was up has waited for.
        ahead: Those that are in a later one, each with its number and description.
        to_relay: Whether the receiver is to tell all others of the failure.
        said_by: Who said so, if another rank has told it.
    """

    sequence: int
    description: str
    state: Literal[
        "waiting",
        "convening",
        "asking",
        "roll",
        "done",
        "mismatch",
        "lost",
        "left",
        "failed",
        "refused",
    ] = "waiting"
    text: str = ""
    culprit: int = -1
    epoch: int = 0
    here: Annotated[tuple[int, ...], _RANKS] = ()
    ahead: Annotated[tuple[tuple[int, int, str], ...], _RANKS] = ()
    to_relay: bool = False
    said_by: int = -1
    missing: Annotated[tuple[int, ...], _RANKS] = ()

    @property
    def is_failure(self) -> bool:
        """Whether the sender has given the operation up."""
        return self.state in _FAILURES

    def error(self, sender: int, rank: int = -1, *, is_news: bool = False) -> RankwireError:
        """Return the error to raise on ``rank`` because of a failure that ``sender`` reported.

        Args:
            sender: Who reported it.
            rank: Where it is raised.
            is_news: Whether the operation had gone well there.
        """
        sender = sender if self.said_by < 0 else self.said_by
        peer = sender if self.culprit == rank else self.culprit
        text = self.text
        if is_news:
            text += f" (number {self.sequence} of this group, which had gone well on rank {rank})"
        if self.state == "mismatch":
            return CollectiveMismatchError(text).during(peer=peer)
        if self.state == "lost" and self.culprit == rank:
            return PeerLostError(sender, f"it has lost this rank: {text}")
        if self.state == "lost":
            return PeerLostError(peer, f"{text} (rank {sender} says)")
        if self.state == "left" and self.culprit != rank:
            return ChannelClosedError(f"{text} (rank {sender} says)").during(peer=peer)
        reason = f"{self.description}: {text}"
        return CollectiveAbortedError(sender, reason, waiting_for=self.missing)


def failure_notice(
    waiting: Notice, rank: int, error: BaseException, *, refused: bool = False
) -> Notice:
    """Return what a rank that fails tells the others.

    Args:
        waiting: What it would say if it waited.
        rank: Which rank that is.
        error: Why.
        refused: Whether it has not even begun.
    """
    state, culprit = "refused" if refused else "failed", rank
    text = error.message if isinstance(error, RankwireError) else repr(error)
    if isinstance(error, CollectiveMismatchError):
        state, culprit = "mismatch", rank if error.peer is None else error.peer
    elif isinstance(error, PeerLostError) and error.peer is not None:
        state, culprit, text = "lost", error.peer, error.reason
    elif isinstance(error, ChannelClosedError) and error.peer is not None:
        state, culprit = "left", error.peer
    missing = tuple(error.waiting_for) if isinstance(error, DeadlineExceededError) else ()
    return replace(waiting, state=state, text=_sayable(text), culprit=culprit, missing=missing)


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
    return replace(
        notice,
        description=_sayable(notice.description),
        text=_sayable(notice.text),
        ahead=tuple((rank, number, _sayable(what)) for rank, number, what in notice.ahead),
    )
