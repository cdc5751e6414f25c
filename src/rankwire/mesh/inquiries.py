"""Inquiries: a rank whose time is up asks those that it has waited for what they are doing.

Whoever asks dials a connection of its own for it, and gets one text (``Mesh.enter`` answers). In a
world of processes the acceptor's thread does that, so the answer comes at once whatever the user's
threads do: unless the process stands still, or holds the interpreter lock in native code. The text
says where the program is (``stacks``) and which calls are being served.

What comes is only ever a text to be added to an error: short and harmless to a terminal, whatever
the other rank says. Asking takes a bounded time beyond the limit that has passed, and none at all
where the limit was short: that is somebody who looks whether something has come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.mesh.calls import Serving
from rankwire.texts import one_line, one_of
from rankwire.wire.frames import WORLD_GROUP, Channel, whole_of
from rankwire.wire.handshake import Purpose

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh
    from rankwire.transports.byte_stream import ByteStream
    from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_WORTH_ASKING = 0.2  # seconds that were waited for in vain
_PATIENCE = 0.5  # seconds for all answers; a busy program lets other threads in every 5 ms only
_MOST_ASKED = 3  # ranks
_MOST_TOLD = 4  # threads, and calls
_MOST_TAGS = 8
_SILENT = "does not say what it is doing"
_CIRCLE = "it waits for the rank that asks, so the two wait for each other"
_MAX_NBYTES = 16 << 10
_MAX_TEXT = 1000  # characters
_ANSWER = (WORLD_GROUP, int(Channel.CONTROL), 0)


def explain_delay(
    ask: Callable[[int, Deadline], str | None], error: DeadlineExceededError, clock: Clock
) -> None:
    """Add to an error what the ranks are doing that were waited for, if they answer soon."""
    if error.limit < _WORTH_ASKING:
        return
    deadline = Deadline(_PATIENCE, clock)
    for rank in error.waiting_for[:_MOST_ASKED]:
        said = ask(rank, deadline)
        if said is not None:
            error.explain(f"rank {rank} {f'says: {said}' if said else _SILENT}")


def explain_silence(silent: Mapping[int, float], error: DeadlineExceededError) -> None:
    """Add to an error which ranks were not heard lately, also if others were waited for.

    A rank that waits for one that stands still is itself waited for, and would be the only one that
    is named.

    Args:
        silent: The ranks that were not heard, with the seconds since.
        error: What to add it to.
    """
    for rank in sorted(silent)[:_MOST_ASKED]:
        error.explain(f"rank {rank} has not been heard for {silent[rank]:.1f} s")


def explain_unreceived(
    count_unreceived: Callable[[int], dict[int, int]], error: DeadlineExceededError
) -> None:
    """Add to the error of a receive which other messages have arrived."""
    for rank in error.waiting_for[:_MOST_ASKED]:
        tags = count_unreceived(rank)
        if tags:
            listed = ", ".join(f"{tags[tag]} with tag {tag}" for tag in sorted(tags)[:_MOST_TAGS])
            more = ", ..." if len(tags) > _MOST_TAGS else ""
            error.explain(f"messages of rank {rank} lie here unreceived: {listed}{more}")


def describe(
    places: Iterable[str], serving: Iterable[Serving], waits_for_asker: bool = False
) -> str:
    """Return what a rank says of itself; empty if it has nothing to say.

    Args:
        places: Where its threads are.
        serving: The calls that it serves.
        waits_for_asker: Whether it waits for a message of the rank that asks, which waits for it.
    """
    threads, calls = list(places), list(serving)
    served = [
        f"it has served {call.name!r} of rank {call.src} for {call.seconds:.3g} s"
        for call in calls
        if not call.workers
    ]
    parts = [*threads[:_MOST_TOLD], *served[:_MOST_TOLD]]
    more = len(threads) + len(served) - len(parts)
    if waits_for_asker:
        parts.insert(0, _CIRCLE)
    parts += [f"and {more} more"] if more else []
    parts += _describe_waiting([call for call in calls if call.workers])
    return one_line("; ".join(parts), _MAX_TEXT)


def _describe_waiting(calls: list[Serving]) -> list[str]:
    if not calls:
        return []
    noun = "call waits" if len(calls) == 1 else "calls wait"
    longest = max(call.seconds for call in calls)
    worker = one_of(calls[0].workers, "worker")
    return [f"{len(calls)} {noun} for {worker}, up to {longest:.3g} s now"]


def inquire(mesh: Mesh, rank: int, deadline: Deadline) -> str | None:
    """Ask a rank what it is doing.

    Returns:
        What it says; empty if it does not answer in time. None if there is nobody to ask, or
        nothing to say.
    """
    peer = mesh.peers[rank]
    if peer.failure is not None:
        return None
    try:
        stream, seals = mesh.connections.open_stream(peer, Purpose.INQUIRY, 0, deadline)
        connection = _connection(mesh, rank, stream, seals)
        try:
            while not (frames := connection.read(deadline)):
                if deadline.expired:
                    raise DeadlineExceededError(deadline.limit, waiting_for=[rank])
            text = whole_of(frames[0].payload).decode(errors="replace")
            return one_line(text, _MAX_TEXT) or None
        finally:
            connection.close()
    except RankwireError as error:
        _log.debug("rank %d did not say what it is doing: %s", rank, error)
        return None if isinstance(error, ChannelClosedError) else ""


def answer(
    mesh: Mesh, rank: int, stream: runtime.Socket | ByteStream, seals: Seals | None, text: str
) -> None:
    """Tell a rank that has dialled for it what this one is doing. Does not wait."""
    connection = _connection(mesh, rank, stream, seals)
    try:
        payload = text.encode()
        connection.send(_ANSWER, ([payload], len(payload)), AT_ONCE)
    except RankwireError as error:
        _log.debug("rank %d was not told what this one is doing: %s", rank, error)
    finally:
        connection.close()


def _connection(
    mesh: Mesh, rank: int, stream: runtime.Socket | ByteStream, seals: Seals | None
) -> Connection:
    """Return a connection that nobody else knows: its end says nothing of its peer."""
    return Connection(
        stream,
        peer=rank,
        max_nbytes=_MAX_NBYTES,
        clock=mesh.clock,
        single_copy=False,
        seals=seals,
    )
