"""From one rank's error to another's: what a rank that fails reports, and what the others raise.

The notices themselves are ``wire.notices``; the coordinator passes them on. Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
)
from rankwire.wire.notices import Notice


def error_of(
    notice: Notice, sender: int, rank: int = -1, *, is_news: bool = False
) -> RankwireError:
    """Return the error to raise because an operation has failed on another rank.

    Args:
        notice: How it failed.
        sender: The rank that reported it.
        rank: The rank that raises the error.
        is_news: Whether the operation had succeeded there.
    """
    peer = sender if notice.culprit == rank else notice.culprit
    text = notice.text
    if is_news:
        text += f" (number {notice.sequence} of this group, which had gone well on rank {rank})"
    if notice.state == "mismatch":
        return CollectiveMismatchError(text).during(peer=peer)
    if notice.state == "lost" and notice.culprit == rank:
        return PeerLostError(sender, f"it has lost this rank: {text}")
    if notice.state == "lost":
        return PeerLostError(peer, f"{text} (rank {sender} says)")
    said = "" if sender == peer else f" (rank {sender} says)"
    if notice.state == "left" and notice.culprit != rank:
        return ChannelClosedError(f"{text}{said}").during(peer=peer)
    if notice.state == "failed" and notice.culprit not in (sender, -1):  # it had heard of that
        return CollectiveAbortedError(peer, f"{text}{said}")
    reason = f"{notice.description}: {text}"
    return CollectiveAbortedError(sender, reason, waiting_for=notice.missing)


def failure_notice(
    waiting: Notice, rank: int, error: BaseException, *, refused: bool = False
) -> Notice:
    """Return what a rank that fails reports.

    Args:
        waiting: What it would report if it waited.
        rank: The rank.
        error: Why it fails.
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
    elif isinstance(error, CollectiveAbortedError) and error.peer >= 0:
        culprit, text = error.peer, error.reason
    missing = tuple(error.waiting_for) if isinstance(error, DeadlineExceededError) else ()
    return replace(waiting, state=state, text=text, culprit=culprit, missing=missing, before=())
