"""Pieces: what is left to send of a message that lies in several places. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankwire.wire.frames import Buffer


def after(pieces: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return what is left to send after ``count`` bytes have left."""
    for index, piece in enumerate(pieces):
        size = memoryview(piece).nbytes
        if count < size:
            return [memoryview(piece).cast("B")[count:], *pieces[index + 1 :]]
        count -= size
    return []


def until(pieces: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """Return the first ``nbytes`` of what is to be sent."""
    beginning: list[Buffer] = []
    for piece in pieces:
        if not nbytes:
            break
        beginning.append(memoryview(piece).cast("B")[:nbytes])
        nbytes -= len(beginning[-1])
    return beginning
