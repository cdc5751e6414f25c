"""Every error that rankwire raises.

Tree::

    RankwireError
      ConfigurationError(ValueError)          a setting that cannot work, found before a byte moved
        InvalidWorldSizeError                 .world_size
        InvalidRankError                      .invalid_rank .world_size
        SelfSendError                         a message addressed to oneself
      UnsupportedTypeError(TypeError)         .path .type_name: the codec does not carry this value
      MessageTooLargeError(ValueError)        .nbytes .limit
      SizeMismatchError(ValueError)           .expected .got: does not fit recv_into's buffer
      ProtocolError(ConnectionError)          the peer sent what the protocol forbids
        InvalidMessageError(ValueError)       a payload that does not decode
        VersionMismatchError                  .ours .theirs
      AuthenticationError(ConnectionError)    the secrets differ, or a stranger answered
      RendezvousError(ConnectionError)        .missing .reason: the world did not form
      NoConnectionError(ConnectionError)      a peer that cannot be reached
      PeerLostError(ConnectionError)          .reason .root .remote_traceback .may_have_run: it died
        PeerUnresponsiveError                 alive for the kernel, silent for too long
      ChannelClosedError(ConnectionError)     this side, or the peer in good order, has closed
      DeadlineExceededError(TimeoutError)     .limit .waiting_for .culprits .may_have_run
                                              .may_have_arrived
      OverloadedError(RuntimeError)           a stated limit was reached; the call did not run
      ResourceError(RuntimeError)              out of file descriptors
      CircularCallError(RuntimeError)         .circle .may_have_run: calls wait for each other
      CallCancelledError(RuntimeError)        the call that this one served is not wanted any more
      ForkedProcessError(RuntimeError)        used in a child of the process that made it
      FunctionNotFoundError(LookupError)      .name .known .reason
      RemoteError(RuntimeError)               .remote_type .remote_message .remote_traceback
                                              .remote_bases; also of the class that was raised
      CollectiveMismatchError(RuntimeError)   ranks disagree on what they are doing
      CollectiveAbortedError(RuntimeError)    .reason: another rank failed in the operation
      MembershipError(RuntimeError)           the members of a group disagree on its members
      RankFailedError(RuntimeError)           .rank .reason .remote_traceback .killed .outcomes
      RanksStuckError(TimeoutError)           .limit .ranks .stacks .outcomes

Contract: an error carries its data as attributes and survives pickling. The context that every
operation knows (``op``, ``rank``, ``peer``, ``tag``, ``waited``) is in the base class and printed
after the message. Nothing here imports the rest of the package but ``texts``, and no error is
classified by its text.

Size: users look for all errors in one place, and the tree above is of no use without its leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from rankwire.texts import name_ranks

__all__ = [
    "AuthenticationError",
    "CallCancelledError",
    "ChannelClosedError",
    "CircularCallError",
    "CollectiveAbortedError",
    "CollectiveMismatchError",
    "ConfigurationError",
    "DeadlineExceededError",
    "ForkedProcessError",
    "FunctionNotFoundError",
    "InvalidMessageError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "MembershipError",
    "MessageTooLargeError",
    "NoConnectionError",
    "OverloadedError",
    "PeerLostError",
    "PeerUnresponsiveError",
    "ProtocolError",
    "RankFailedError",
    "RanksStuckError",
    "RankwireError",
    "RemoteError",
    "RendezvousError",
    "ResourceError",
    "SelfSendError",
    "SizeMismatchError",
    "UnsupportedTypeError",
    "VersionMismatchError",
]


class RankwireError(Exception):
    """Base of all errors.

    Attributes:
        op: What was being done, such as ``"recv"`` or ``"rpc_sync add"``.
        rank: The rank that raised this.
        peer: The rank at the other end.
        tag: The message tag.
        waited: Seconds spent in the operation.
        root: The rank of the world, also in a group, whose failure this is a consequence of, where
            that is known.
        is_reported: Whether the other ranks of a collective know of it.
    """

    is_reported: bool = False
    root: int | None = None
    op: str | None = None
    rank: int | None = None
    peer: int | None = None
    tag: int | None = None
    waited: float | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def during(
        self,
        *,
        op: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        tag: int | None = None,
        waited: float | None = None,
    ) -> Self:
        """Add context that is not known yet, and return the error itself, ready to be raised."""
        self.op = op if self.op is None else self.op
        self.rank = rank if self.rank is None else self.rank
        self.peer = peer if self.peer is None else self.peer
        self.tag = tag if self.tag is None else self.tag
        self.waited = waited if self.waited is None else self.waited
        return self

    def copy(self) -> Self:
        """Return an equal error.

        For an error that is raised in several threads, which must not share a traceback.
        """
        state = {k: list(v) if type(v) is list else v for k, v in self.__dict__.items()}
        twin = _restore(type(self), self.args, state)
        twin.__cause__ = self.__cause__
        return twin  # type: ignore[return-value]

    def kept(self) -> Self:
        """Return an equal error for as long as a failure lasts.

        A traceback holds the frames of all who were waiting, with whatever they work on; so it has
        none, and its cause has none any more.
        """
        twin = self.copy()
        if twin.__cause__ is not None:
            twin.__cause__.__traceback__ = None
            twin.__cause__.__context__ = None
        return twin

    def __str__(self) -> str:
        context = [
            f"{name} {value}"
            for name in ("op", "rank", "peer", "tag")
            if (value := getattr(self, name)) is not None
        ]
        if self.waited is not None:
            context.append(f"waited {self.waited:.3g} s")
        return f"{self.message} [{', '.join(context)}]" if context else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[RankwireError], args: tuple[Any, ...], state: dict[str, Any]
) -> RankwireError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(RankwireError, ValueError):
    """A setting that cannot work."""


class InvalidWorldSizeError(ConfigurationError):
    """The number of ranks is not a positive integer."""

    def __init__(self, world_size: int) -> None:
        super().__init__(f"a world needs at least 1 rank, not {world_size!r}")
        self.world_size = world_size


class InvalidRankError(ConfigurationError):
    """A rank that is outside the world or group."""

    def __init__(self, invalid_rank: int, world_size: int, *, what: str = "rank") -> None:
        super().__init__(
            f"{what} {invalid_rank!r} is not one of the {world_size} ranks 0..{world_size - 1}"
        )
        self.invalid_rank = invalid_rank
        self.world_size = world_size


class SelfSendError(ConfigurationError):
    """A message addressed to oneself."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} cannot exchange messages with itself; keep the value instead"
        )
        self.rank = rank


class UnsupportedTypeError(RankwireError, TypeError):
    """A value that the codec does not carry.

    Attributes:
        path: Where it stands, such as ``args[1]["opt"]``.
        type_name: Its type.
    """

    def __init__(self, path: str, type_name: str, advice: str) -> None:
        super().__init__(f"{path}: type {type_name} cannot be sent. {advice}")
        self.path = path
        self.type_name = type_name


class MessageTooLargeError(RankwireError, ValueError):
    """A message above the limit; nothing of it was sent."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(
            f"a message of {nbytes} bytes is above the limit of {limit} bytes (max_message_nbytes)"
        )
        self.nbytes = nbytes
        self.limit = limit


class SizeMismatchError(RankwireError, ValueError):
    """The message at the head of the queue has another size than the buffer.

    The message stays receivable.
    """

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(
            f"the buffer holds {expected} bytes, the message {got}; it is kept for the next receive"
        )
        self.expected = expected
        self.got = got


class ProtocolError(RankwireError, ConnectionError):
    """The peer sent what the protocol forbids; its connection is not used again."""


class InvalidMessageError(ProtocolError, ValueError):
    """A payload that does not decode."""


class VersionMismatchError(ProtocolError):
    """The two ends speak different versions of the protocol."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"protocol versions differ: {ours} here, {theirs} at the other end; "
            "install the same rankwire on all ranks"
        )
        self.ours = ours
        self.theirs = theirs


class AuthenticationError(RankwireError, ConnectionError):
    """The other end did not prove that it knows the job's secret."""


class RendezvousError(RankwireError, ConnectionError):
    """The world did not form.

    Attributes:
        missing: The ranks that did not join, as far as known.
        reason: What went wrong, without the ranks.
    """

    def __init__(self, reason: str, *, missing: Iterable[int] = ()) -> None:
        self.missing = sorted(missing)
        self.reason = reason
        missing_ranks = f"; missing {name_ranks(self.missing)}" if self.missing else ""
        super().__init__(reason + missing_ranks)


class NoConnectionError(RankwireError, ConnectionError):
    """A peer that cannot be reached."""


class ResourceError(RankwireError, RuntimeError):
    """This process is out of something that the operating system gives: file descriptors."""


class PeerLostError(RankwireError, ConnectionError):
    """The peer died, or its connection broke. Every operation that needs it fails from now on.

    Attributes:
        peer: The rank that is lost.
        reason: How that was noticed, or the error that the peer fell by.
        root: The rank whose failure began it: the peer, or the one because of which the peer fell.
        remote_traceback: The traceback of the error that the root fell by, as text; else empty.
        told_by: The rank whose traceback it is, if that is not the root: the root has not fallen,
            as far as is known.
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
    """The peer's connection stands, but its process has been silent for too long."""


class ChannelClosedError(RankwireError, ConnectionError):
    """This side has closed, or the peer has left in good order."""

    may_have_run: bool = False


class DeadlineExceededError(RankwireError, TimeoutError):
    """The time limit passed.

    Connections stay usable; a message that arrives later can still be received.

    Attributes:
        limit: The limit in seconds.
        waiting_for: The ranks that were waited for.
        culprits: The same as ranks of the whole world, also in a group.
        detail: What else is known, as text.
        may_have_arrived: For a message that was sent: whether a part of it had left by then. The
            rest follows, so it arrives unless the peer is lost first. If not, it never arrives.
        may_have_run: For a call: whether the function may have run.
        is_explained: Whether ``detail`` has what those ranks said, so that they are not asked.
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
        """Add to what is known, and return the error itself."""
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
    """A stated limit was reached; the call did not run."""


class CircularCallError(RankwireError, RuntimeError):
    """Calls wait for each other in a circle, so none of them can end; this one was given up.

    Attributes:
        circle: The calls, as (rank, function name), each waiting for the next and the last one for
            the first.
        may_have_run: The function may have run in part.
    """

    may_have_run: bool = True

    def __init__(self, circle: Iterable[tuple[int, str]], reasons: Iterable[str] = ()) -> None:
        self.circle = [(rank, name) for rank, name in circle]
        steps = [f"rank {rank} {name!r}" for rank, name in self.circle]
        steps = [" ".join(step) for step in zip(steps, reasons, strict=True)] or steps
        super().__init__(f"calls wait for each other in a circle: {'; '.join(steps)}")


class CallCancelledError(RankwireError, RuntimeError):
    """The function that made this call is served for a caller that does not want its result."""

    may_have_run: bool = True


class ForkedProcessError(RankwireError, RuntimeError):
    """A child made by ``fork`` has used what belongs to its parent.

    The child can make a backend of its own.
    """

    def __init__(self, what: str = "this") -> None:
        super().__init__(
            f"{what} belongs to the process that made it, and this is a child that was forked from "
            "that; use it there, or make a new one here"
        )


class FunctionNotFoundError(RankwireError, LookupError):
    """The rank that was called has no function of that name, or does not let it be called.

    Attributes:
        name: The name asked for.
        known: The names registered there, if no reason was given.
        reason: Why not, in the words of the callee's resolver; else empty.
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
                " functions to RpcAgent(resolve=...).)"
            )
        super().__init__(text)
        self.name = name
        self.known = list(known)
        self.reason = reason


class RemoteError(RankwireError, RuntimeError):
    """The called function raised. The text of the remote traceback is part of the message.

    If it raised a builtin exception, or one that the caller has registered
    (``RpcAgent.register_error``), or a class derived from such, then this error is also of that
    class: ``except KeyError`` catches it. What the class itself would have as attributes, such as
    ``errno``, has not travelled: there is the text.

    Attributes:
        peer: The rank that was called, where the function raised.
        remote_type: Name of the remote exception's class.
        remote_message: Its text.
        remote_traceback: The remote traceback as text.
        remote_bases: Names of the classes that the remote one is derived from, nearest first;
            without ``Exception``. Empty for an error of rankwire itself.
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
    """Ranks disagree on which collective they are in, or on its arguments."""


class CollectiveAbortedError(RankwireError, RuntimeError):
    """Another rank failed in an operation that needs all of them; ``peer`` is that rank.

    Attributes:
        reason: What that rank said.
        waiting_for: The ranks for which it waited until its time was up; empty if it failed
            otherwise.
    """

    peer: int

    def __init__(self, peer: int, reason: str, *, waiting_for: Iterable[int] = ()) -> None:
        super().__init__(f"rank {peer} failed in {reason}")
        self.peer = peer
        self.reason = reason
        self.waiting_for = list(waiting_for)


class MembershipError(RankwireError, RuntimeError):
    """The members of a group disagree on who its members are."""


class RankFailedError(RankwireError, RuntimeError):
    """What was run on a rank of a world failed there: it raised, was killed, or its process died.

    Attributes:
        rank: The rank because of which it failed, as far as is known.
        reason: What happened, in one line.
        remote_traceback: The traceback on that rank, as text; empty if it raised nothing.
        killed: Whether the rank was killed.
        outcomes: What became of each rank that has ended, in rank order.
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
    """Ranks did not finish what was run on them within its limit.

    Attributes:
        limit: The limit in seconds.
        ranks: Those that did not finish.
        stacks: The stacks of all their threads at that moment, as text, by rank.
        outcomes: What became of the others, in rank order.
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
