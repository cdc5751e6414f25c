"""The base class of all errors."""

from __future__ import annotations

from typing import Any, Self


class RankwireError(Exception):
    """Base of all errors.

    Attributes:
        op: The operation, such as ``"recv"`` or ``"rpc_sync add"``.
        rank: The rank that raised this.
        peer: The rank at the other end.
        peer_name: Its name, such as ``"rollout/0"``, if ranks have roles; else empty.
        tag: The message tag.
        waited: Seconds spent in the operation.
        root: The world rank whose failure caused this error, if known.
        is_reported: Whether the other ranks of a collective were notified of it.
        is_local: Whether its ranks are those of the group, and need no translation.
        accepted: For a put to a queue: how many of the items the owner has accepted.
        unconfirmed: For a put to a queue: how many of the next items it may have accepted.
    """

    __module__ = "rankwire.errors"  # as users import it; also shown in tracebacks and pickles
    is_reported: bool = False
    is_local: bool = False
    accepted: int = 0
    unconfirmed: int = 0
    root: int | None = None
    op: str | None = None
    rank: int | None = None
    peer: int | None = None
    peer_name: str = ""
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
        """Set the context that is not set yet; return the error itself, ready to be raised."""
        self.op = op if self.op is None else self.op
        self.rank = rank if self.rank is None else self.rank
        self.peer = peer if self.peer is None else self.peer
        self.tag = tag if self.tag is None else self.tag
        self.waited = waited if self.waited is None else self.waited
        return self

    def copy(self) -> Self:
        """Return a copy, because threads that raise the same error must not share a traceback."""
        state = {k: list(v) if type(v) is list else v for k, v in self.__dict__.items()}
        twin = _restore(type(self), self.args, state)
        twin.__cause__ = self.__cause__
        return twin  # type: ignore[return-value]

    def kept(self) -> Self:
        """Return a copy without tracebacks, which would keep the frames of threads alive."""
        twin = self.copy()
        if twin.__cause__ is not None:
            twin.__cause__.__traceback__ = None
            twin.__cause__.__context__ = None
        return twin

    def __str__(self) -> str:
        peer = f"{self.peer} ({self.peer_name})" if self.peer_name else self.peer
        shown = {"op": self.op, "rank": self.rank, "peer": peer, "tag": self.tag}
        context = [f"{name} {value}" for name, value in shown.items() if value is not None]
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
