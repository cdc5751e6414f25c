"""Waits for ranks that a launcher restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError
from rankwire.wire.frames import WORLD_GROUP

if TYPE_CHECKING:
    from rankwire.backends.base import Backend

_CHECK_EVERY = 0.02  # seconds; a restart takes 0.25 s and the start of a process


def await_return(backend: Backend, rank: int, deadline: Deadline) -> None:
    """Wait until a rank is up; raise its failure if it cannot come back."""
    while (failure := backend.failure_of(rank)) is not None:
        if backend.closed:
            raise ChannelClosedError("this backend is closed")
        can_return = backend.group == WORLD_GROUP and backend.mesh.ranks_return
        if not can_return or isinstance(failure, ChannelClosedError):
            raise failure.copy()
        if deadline.expired:
            detail = f"it was lost and has not come back ({failure.message})"
            raise DeadlineExceededError(deadline.limit, waiting_for=[rank], detail=detail)
        deadline.clock.sleep(min(_CHECK_EVERY, deadline.sleep_limit()))
