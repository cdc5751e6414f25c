"""Blame: which rank's failure began it. Pure.

A failure spreads: rank 1 raises, rank 0 falls because it lost rank 1, rank 3 because it lost rank
0. A rank that is told of a loss wants to hear of the first one. Every error that another rank's
failure has caused carries that rank as its ``root``, a rank of the world also in groups; a rank
that falls by such an error tells the root along (``exit_report``), and those who lose it look up
here what they know of the root.

What is known of losses comes in the order in which the coordinator tells it, the root before its
consequences. Without a coordinator a rank that falls cannot tell why: then an end without a reason
counts as a consequence of the first loss.
"""

from __future__ import annotations

from typing import NamedTuple

from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    PeerLostError,
    RankwireError,
    RemoteError,
)

# Errors that come from another rank's failure, whatever else they say.
CONSEQUENCES = (PeerLostError, CollectiveAbortedError)
_NAMES_OF_CONSEQUENCES = frozenset(
    {"PeerLostError", "PeerUnresponsiveError", "CollectiveAbortedError"}
)


def root_of(error: BaseException | None) -> int | None:
    """Return the rank whose failure an error is a consequence of, where an error says so.

    Those that it was raised from, or while handling, count too; of a group of errors, all of them.
    """
    for link in chain(error):
        if isinstance(link, RankwireError) and link.root is not None:
            return link.root
        if isinstance(link, BaseExceptionGroup):
            roots = [root_of(each) for each in link.exceptions]
            if None not in roots:
                return roots[0]
    return None


def is_consequence(error: BaseException | None) -> bool:
    """Whether an error comes from the failure of some other rank, whichever that is."""
    for link in chain(error):
        if isinstance(link, CONSEQUENCES):
            return True
        if isinstance(link, RemoteError) and link.remote_type in _NAMES_OF_CONSEQUENCES:
            return True
        if isinstance(link, BaseExceptionGroup) and all(map(is_consequence, link.exceptions)):
            return True
    return False


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and those that it was raised from or while handling, the last one first."""
    found: list[BaseException] = []
    while error is not None and not any(error is link for link in found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


class _Loss(NamedTuple):
    """A rank that is lost, whose failure began that, and what was told of it."""

    rank: int
    root: int
    reason: str
    traceback: str


class Losses:
    """What one rank knows of the ranks that are lost, in the order in which it heard of them.

    Safe from any thread: every change is one step.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Loss] = {}

    @property
    def first(self) -> int | None:
        """The rank whose failure began the first loss."""
        loss = self._first()
        return None if loss is None else loss.root

    def explain(
        self, error: RankwireError, *, cause: int | None = None, is_told: bool = True
    ) -> RankwireError:
        """Return the error to raise because a peer is gone; if it is lost, that is remembered.

        Args:
            error: The peer's end as it was noticed or told.
            cause: The rank because of which the peer fell, if it said so.
            is_told: Whether there was anyone who could have told more.
        """
        peer, first = error.peer, self._first()
        if peer is None or error.root is not None:
            return error
        if isinstance(error, ChannelClosedError):
            return _blaming(error, peer, error.message + _after(first, peer))
        if not isinstance(error, PeerLostError):
            return error
        if cause is None and first is not None and not is_told:
            cause = first.root
        root = self._known[cause].root if cause in self._known else cause
        if root is None or root == peer:
            self._known.setdefault(peer, _Loss(peer, peer, error.reason, error.remote_traceback))
            return _blaming(error, peer, error.reason + _after(first, peer))
        self._known.setdefault(peer, _Loss(peer, root, error.reason, ""))
        begin = self._known.get(root)
        if begin is None:  # it has left in good order, or lives: the peer says that it is to blame
            blaming = _blaming(error, root, error.reason)
            if isinstance(blaming, PeerLostError):
                blaming.told_by = peer
            return blaming
        reason = f"it fell because rank {root} is lost: {begin.reason}"
        if not is_told:
            reason = error.reason + _after(begin, peer)
        return _blaming(error, root, reason, begin.traceback)

    def forget(self, rank: int) -> None:
        """A rank is back: what befalls it from now on has nothing to do with its old end."""
        self._known.pop(rank, None)

    def _first(self) -> _Loss | None:
        return next(iter(list(self._known.values())), None)


def _after(first: _Loss | None, peer: int) -> str:
    if first is None or peer in (first.rank, first.root):
        return ""
    return f" (after rank {first.root} was lost: {first.reason})"


def _blaming(
    error: RankwireError, root: int, text: str, traceback: str | None = None
) -> RankwireError:
    """Return an error with another root and text, and what else it has."""
    twin = error.copy()
    twin.root = root
    twin.message = text
    if isinstance(twin, PeerLostError):
        twin.reason, twin.message = text, f"rank {twin.peer} is lost: {text}"
        twin.remote_traceback = twin.remote_traceback if traceback is None else traceback
    twin.args = (twin.message,)
    return twin
