"""Find the rank whose failure caused the others.

An error that another rank caused has its world rank as ``root``, which a failing rank reports.
Without a coordinator, a loss without a reason counts as a consequence of the first loss.
"""

from __future__ import annotations

from typing import NamedTuple

from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
    RemoteError,
)
from rankwire.texts import one_line, printable, text_of, traceback_of
from rankwire.wire.control_messages import Fallen

_INTERRUPTED = 130  # the exit code of a process that SIGINT ended
CONSEQUENCES = (PeerLostError, CollectiveAbortedError)
_NAMES_OF_CONSEQUENCES = ("PeerLostError", "PeerUnresponsiveError", "CollectiveAbortedError")


def root_of(error: BaseException | None) -> int | None:
    """Return the root of an error or its chain; a group has one if all its exceptions have."""
    for link in chain(error):
        if isinstance(link, RankwireError) and link.root is not None:
            return link.root
        if isinstance(link, BaseExceptionGroup):
            roots = [root_of(each) for each in link.exceptions]
            if None not in roots:
                return roots[0]
    return None


def is_consequence(error: BaseException | None) -> bool:
    """Return whether another rank's failure caused an error."""
    for link in chain(error):
        if isinstance(link, CONSEQUENCES):
            return True
        if isinstance(link, RemoteError) and link.remote_type in _NAMES_OF_CONSEQUENCES:
            return True
        if isinstance(link, BaseExceptionGroup) and all(map(is_consequence, link.exceptions)):
            return True
    return False


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an error followed by its chain of causes or contexts."""
    found: list[BaseException] = []
    while error is not None and not any(error is link for link in found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


class _Loss(NamedTuple):
    rank: int
    root: int
    reason: str
    traceback: str


class Losses:
    """Keeps lost ranks in the order of their loss. Safe from any thread: changes are atomic."""

    def __init__(self) -> None:
        self._known: dict[int, _Loss] = {}

    @property
    def first(self) -> int | None:
        """The rank whose failure caused the first loss."""
        loss = self._first()
        return None if loss is None else loss.root

    def explain(
        self, error: RankwireError, *, cause: int | None = None, is_told: bool = True
    ) -> RankwireError:
        """Record a lost peer, and return its error with the root cause added.

        ``cause`` is the rank that the peer blamed; ``is_told``, whether a coordinator reports
        losses.
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
        return self._consequence(error, peer, root, is_told=is_told)

    def _consequence(
        self, error: PeerLostError, peer: int, root: int, *, is_told: bool
    ) -> RankwireError:
        begin = self._known.get(root)
        if begin is None:  # only the peer reports it: that rank is alive, or left without an error
            blaming = _blaming(error, root, error.reason)
            if isinstance(blaming, PeerLostError):
                blaming.told_by = peer
            return blaming
        reason = f"it failed because rank {root} is lost: {begin.reason}"
        if not is_told:
            reason = error.reason + _after(begin, peer)
        return _blaming(error, root, reason, begin.traceback)

    def forget(self, rank: int) -> None:
        """Drop the loss of a rank that was restarted."""
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
    twin = error.copy()
    twin.root = root
    twin.message = text
    if isinstance(twin, PeerLostError):
        twin.reason, twin.message = text, f"rank {twin.peer} is lost: {text}"
        twin.remote_traceback = twin.remote_traceback if traceback is None else traceback
    twin.args = (twin.message,)
    return twin


def describe_failure(
    error: BaseException | None, *, rank: int | None = None, first_lost: int | None = None
) -> Fallen | None:
    """Return the failure report of a rank; None if it leaves without an error.

    ``error`` left the backend's ``with`` block. ``rank`` is the reporting rank, which cannot be its
    own cause. ``first_lost`` is the cause to report for a consequence without a root.
    """
    if error is None or isinstance(error, GeneratorExit):
        return None
    cause = root_of(error)
    if cause is None and is_consequence(error):
        cause = first_lost
    if cause == rank:
        cause = None
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None
        code = error.code & 0xFF if isinstance(error.code, int) else 1
        return Fallen(one_line(f"it exited with {error.code!r}"), "", cause, code)
    return Fallen(
        one_line(f"it raised {describe(error)}"),
        printable(traceback_of(error)),
        cause,
        _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1,
        _waited_for(error),
    )


def _waited_for(error: BaseException) -> list[int]:
    late = (link for link in chain(error) if isinstance(link, DeadlineExceededError))
    return next((link.culprits for link in late), [])


def describe(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    name = type(error).__name__
    first_line = text_of(error).split("\n", 1)[0]
    return f"{name}: {first_line}" if first_line else name
