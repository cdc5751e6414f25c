"""Every error that rankwire raises. A class in parentheses derives from the one before it.

- Arguments: ConfigurationError (InvalidWorldSizeError, InvalidRankError, SelfSendError),
  UnsupportedTypeError, MessageTooLargeError, SizeMismatchError
- Connections: ProtocolError (InvalidMessageError, VersionMismatchError), AuthenticationError,
  RendezvousError, NoConnectionError, PeerLostError (PeerUnresponsiveError), ChannelClosedError,
  ResourceError
- Calls: RemoteError, FunctionNotFoundError, OverloadedError, CircularCallError, CallCancelledError,
  DeadlineExceededError, GroupCallError, QueueEndedError
- Collectives: CollectiveMismatchError, CollectiveAbortedError, MembershipError
- Processes: ForkedProcessError, RankFailedError, RanksStuckError

All derive from ``RankwireError`` and from a matching builtin exception. Every error can be pickled,
has its data as attributes, and ends its text with the context of the operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from rankwire.error_base import RankwireError
from rankwire.texts import name_ranks, one_line, type_name

__all__ = [
    "AuthenticationError", "CallCancelledError", "ChannelClosedError", "CircularCallError",
    "CollectiveAbortedError", "CollectiveMismatchError", "ConfigurationError",
    "DeadlineExceededError", "ForkedProcessError", "FunctionNotFoundError",
    "GroupCallError", "InvalidMessageError", "InvalidRankError", "InvalidWorldSizeError",
    "MembershipError",
    "MessageTooLargeError", "NoConnectionError", "OverloadedError", "PeerLostError",
    "PeerUnresponsiveError", "ProtocolError", "QueueEndedError", "RankFailedError",
    "RanksStuckError", "RankwireError", "RemoteError", "RendezvousError", "ResourceError",
    "SelfSendError", "SizeMismatchError", "UnsupportedTypeError", "VersionMismatchError",
]  # fmt: skip

_MOST_CAUSES, _LONGEST_CAUSE = 3, 200  # shown in the text of a ``GroupCallError``


class ConfigurationError(RankwireError, ValueError):
    """A setting or argument is invalid; nothing was sent."""


class InvalidWorldSizeError(ConfigurationError):
    """The number of ranks is not a positive integer."""

    def __init__(self, world_size: int) -> None:
        super().__init__(f"a world needs at least 1 rank, not {world_size!r}")
        self.world_size = world_size


class InvalidRankError(ConfigurationError):
    """A rank is outside the world or group."""

    def __init__(
        self, invalid_rank: int | str, world_size: int, *, what: str = "rank", why: str = ""
    ) -> None:
        super().__init__(
            why
            or f"{what} {invalid_rank!r} is not one of the {world_size} ranks 0..{world_size - 1}"
        )
        self.invalid_rank = invalid_rank
        self.world_size = world_size


class SelfSendError(ConfigurationError):
    """The destination of a message is its sender."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} cannot exchange messages with itself; keep the value instead"
        )
        self.rank = rank


class UnsupportedTypeError(RankwireError, TypeError):
    """The codec cannot send a value; ``path`` is its place, such as ``args[1]["opt"]``."""

    def __init__(self, path: str, type_name: str, advice: str) -> None:
        super().__init__(f"{path}: type {type_name} cannot be sent. {advice}")
        self.path = path
        self.type_name = type_name


class MessageTooLargeError(RankwireError, ValueError):
    """The message is larger than the limit; nothing was sent."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(
            f"a message of {nbytes} bytes is above the limit of {limit} bytes (max_message_nbytes)"
        )
        self.nbytes = nbytes
        self.limit = limit


class SizeMismatchError(RankwireError, ValueError):
    """The next message does not fit the buffer exactly. It can still be received."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(
            f"the buffer holds {expected} bytes, the message {got}; it is kept for the next receive"
        )
        self.expected = expected
        self.got = got


class ProtocolError(RankwireError, ConnectionError):
    """The peer violated the protocol; its connection is not used again."""


class InvalidMessageError(ProtocolError, ValueError):
    """A payload cannot be decoded."""


class VersionMismatchError(ProtocolError):
    """The two peers use different versions of the protocol."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"protocol versions differ: {ours} here, {theirs} at the other end; "
            "install the same rankwire on all ranks"
        )
        self.ours = ours
        self.theirs = theirs


class AuthenticationError(RankwireError, ConnectionError):
    """The peer did not prove that it knows the job's secret."""


class RendezvousError(RankwireError, ConnectionError):
    """The world did not form; ``missing`` has the ranks that did not join, if known."""

    def __init__(self, reason: str, *, missing: Iterable[int] = ()) -> None:
        self.missing = sorted(missing)
        self.reason = reason
        missing_ranks = f"; missing {name_ranks(self.missing)}" if self.missing else ""
        super().__init__(reason + missing_ranks)


class NoConnectionError(RankwireError, ConnectionError):
    """The peer cannot be reached."""


class ResourceError(RankwireError, RuntimeError):
    """This process has no file descriptors left."""


class PeerLostError(RankwireError, ConnectionError):
    """The peer died or its connection broke. Every later operation with this peer fails too.

    Attributes:
        reason: How the loss was noticed, or the error that ended the peer.
        root: The rank that failed first: the peer, or the rank that caused the peer's failure.
        remote_traceback: The traceback of the error that ended the root, as text; else empty.
        told_by: The rank with that traceback, if it is not the root; the root may be alive.
        may_have_run: For a call: whether the function may have run.
    """

    peer: int
    told_by: int | None = None
    may_have_run: bool = False

    def __init__(
        self, peer: int, reason: str, *, remote_traceback: str = "", root: int | None = None
    ) -> None:
        super().__init__(f"rank {peer} is lost: {reason}")
        self.peer = peer
        self.reason = reason
        self.root = root
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = super().__str__()
        if self.remote_traceback:
            quoted = "\n".join(f"  | {line}" for line in self.remote_traceback.splitlines())
            where = self.peer if self.root is None else self.root
            where = where if self.told_by is None else self.told_by
            text += f"\n\ntraceback on rank {where}:\n{quoted}"
        return text


class PeerUnresponsiveError(PeerLostError):
    """The peer is connected, but its process has been silent for too long."""


class ChannelClosedError(RankwireError, ConnectionError):
    """This side is closed, or the peer left without an error."""

    may_have_run: bool = False


class DeadlineExceededError(RankwireError, TimeoutError):
    """The timeout expired. Connections stay usable; a message that arrives later can be received.

    Attributes:
        waiting_for: The ranks that the operation was waiting for.
        culprits: The same ranks as world ranks; they differ in a group.
        detail: More information, as text.
        may_have_arrived: For a sent message: whether a part of it was sent. The rest follows, so it
            arrives unless the peer is lost first. If False, it never arrives.
        may_have_run: For a call: whether the function may have run.
        is_explained: Whether ``detail`` already says what those ranks are doing.
    """

    may_have_arrived: bool = False
    may_have_run: bool = False
    is_explained: bool = False

    def __init__(self, limit: float, *, waiting_for: Sequence[int] = (), detail: str = "") -> None:
        self.limit = limit
        self.waiting_for = list(waiting_for)
        self.culprits = list(waiting_for)
        self.detail = detail
        super().__init__(self._text())

    def explain(self, detail: str) -> Self:
        """Add to ``detail``; return the error itself."""
        self.detail = f"{self.detail}; {detail}" if self.detail else detail
        self.message = self._text()
        self.args = (self.message,)
        return self

    def _text(self) -> str:
        text = f"no result within {self.limit:.6g} s"
        if self.waiting_for:
            text += f" waiting for {name_ranks(self.waiting_for)}"
        return f"{text}; {self.detail}" if self.detail else text


class OverloadedError(RankwireError, RuntimeError):
    """A documented limit was reached; the call did not run."""


class QueueEndedError(RankwireError, EOFError):
    """The queue has ended: nothing more can be put, or nothing is left to get."""


class CircularCallError(RankwireError, RuntimeError):
    """Calls wait for each other in a circle, so none can finish; this one was stopped.

    Attributes:
        circle: The calls as (rank, function name); each waits for the next, the last for the first.
        may_have_run: The function may have run in part.
    """

    may_have_run: bool = True

    def __init__(self, circle: Iterable[tuple[int, str]], reasons: Iterable[str] = ()) -> None:
        self.circle = [(rank, name) for rank, name in circle]
        steps = [f"rank {rank} {name!r}" for rank, name in self.circle]
        steps = [" ".join(step) for step in zip(steps, reasons, strict=True)] or steps
        super().__init__(f"calls wait for each other in a circle: {'; '.join(steps)}")


class CallCancelledError(RankwireError, RuntimeError):
    """The function that made this call serves a call that was cancelled."""

    may_have_run: bool = True


class GroupCallError(RankwireError, RuntimeError):
    """A group call did not succeed on every rank that it needed.

    Attributes:
        name: The function.
        values: The values of the ranks that succeeded, in the order of the ranks; empty with
            ``reduce``, and for values that ``as_completed`` has yielded.
        errors: The errors of the ranks that failed.
        missing: The ranks that did not answer in time.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[int, Any],
        errors: Mapping[int, RankwireError],
        missing: Sequence[int],
    ) -> None:
        self.name = name
        self.values = dict(values)
        self.errors = dict(errors)
        self.missing = list(missing)
        for error in self.errors.values():
            self.root = error.root if self.root is None else self.root
        super().__init__(self._text())

    def _text(self) -> str:
        texts = [f"it failed on {name_ranks([*self.errors])}"] if self.errors else []
        if self.missing:
            texts.append(f"{name_ranks(self.missing)} did not answer in time")
        causes = [
            one_line(f"rank {rank}: {type_name(error)}: {error.message}", _LONGEST_CAUSE)
            for rank, error in [*self.errors.items()][:_MOST_CAUSES]
        ]
        text = " and ".join(texts) or "too few ranks answered"
        return f"{text}: {'; '.join(causes)}" if causes else text


class ForkedProcessError(RankwireError, RuntimeError):
    """A forked child used an object of its parent. The child can create its own backend."""

    def __init__(self, what: str = "this") -> None:
        super().__init__(
            f"{what} belongs to the parent of this forked process; use it there or make one here"
        )


class FunctionNotFoundError(RankwireError, LookupError):
    """The called rank has no function of that name, or does not allow calling it.

    Attributes:
        name: The requested name.
        known: The names registered there, unless ``reason`` is set.
        reason: The reason that the callee's resolver gave; else empty.
    """

    reason: str = ""

    def __init__(self, name: str, known: Sequence[str] = (), *, reason: str = "") -> None:
        if reason:
            text = f"no function {name!r} can be called there: {reason}"
        elif known:
            text = f"no function {name!r} is registered there (registered: {', '.join(known)})"
        else:
            text = (
                f"no function {name!r} is registered there, nor any other: is a barrier missing"
                " between registering and the first call? (A rank that was started anew passes its"
                " functions to RpcAgent(serve=...).)"
            )
        super().__init__(text)
        self.name = name
        self.known = list(known)
        self.reason = reason


class RemoteError(RankwireError, RuntimeError):
    """The called function raised. The message includes the remote traceback.

    It is also an instance of the builtin exception that was raised, of the class that the caller
    registered for it (``RpcAgent.register_error``), or of its nearest such base class: ``except
    KeyError`` catches it. Attributes of that class, such as ``errno``, are not sent.

    Attributes:
        peer: The rank where the function raised.
        remote_type: The name of the remote exception's class.
        remote_message: Its text.
        remote_traceback: Its traceback as text.
        remote_bases: The names of its base classes, nearest first, without ``Exception``. Empty for
            an error of rankwire.
    """

    def __init__(
        self,
        remote_type: str,
        remote_message: str,
        remote_traceback: str,
        *,
        remote_bases: Iterable[str] = (),
    ) -> None:
        super().__init__(f"{remote_type}: {remote_message}")
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.remote_bases = tuple(remote_bases)

    def __str__(self) -> str:
        where = f"rank {self.peer}" if self.peer is not None else "the remote rank"
        return f"{super().__str__()}\n\ntraceback on {where}:\n{self.remote_traceback.rstrip()}"


class CollectiveMismatchError(RankwireError, RuntimeError):
    """Ranks disagree on the current collective or its arguments."""


class CollectiveAbortedError(RankwireError, RuntimeError):
    """Another rank failed in a collective; ``peer`` is that rank.

    Attributes:
        reason: What that rank reported.
        waiting_for: The ranks that it waited for if its timeout expired; else empty.
    """

    peer: int

    def __init__(self, peer: int, reason: str, *, waiting_for: Iterable[int] = ()) -> None:
        super().__init__(f"rank {peer} failed in {reason}")
        self.peer = peer
        self.reason = reason
        self.waiting_for = list(waiting_for)


class MembershipError(RankwireError, RuntimeError):
    """The members of a group disagree on its list of members."""


class RankFailedError(RankwireError, RuntimeError):
    """The program failed on a rank: it raised, was killed, or its process died.

    Attributes:
        rank: The rank that failed first, if known.
        reason: What happened, in one line.
        remote_traceback: The traceback on that rank, as text; empty if it did not raise.
        killed: Whether the rank was killed.
        outcomes: The outcome of each rank that has ended, in rank order.
    """

    rank: int

    def __init__(
        self, rank: int, reason: str, *, remote_traceback: str = "", killed: bool = False
    ) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason
        self.remote_traceback = remote_traceback
        self.killed = killed
        self.outcomes: list[Any] = []

    def __str__(self) -> str:
        text = self.message if self.op is None else super().__str__()  # its rank is in the message
        if self.remote_traceback:
            text += f"\n\ntraceback on rank {self.rank}:\n{self.remote_traceback.rstrip()}"
        return text


class RanksStuckError(RankwireError, TimeoutError):
    """Ranks did not finish within the timeout.

    Attributes:
        ranks: The ranks that did not finish.
        stacks: The stacks of all their threads at that moment, as text, by rank.
        outcomes: The outcomes of the other ranks, in rank order.
    """

    def __init__(self, limit: float, stacks: Mapping[int, str]) -> None:
        self.limit = limit
        self.ranks = sorted(stacks)
        self.stacks = {rank: stacks[rank] for rank in self.ranks}
        self.outcomes: list[Any] = []
        super().__init__(f"ranks {self.ranks} did not finish within {limit:g} s")

    def __str__(self) -> str:
        parts = [f"rank {rank}:\n{self.stacks[rank].rstrip()}" for rank in self.ranks]
        return "\n\n".join([super().__str__(), *parts])
