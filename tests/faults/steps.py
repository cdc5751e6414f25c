"""Faults at an exact step of a collective: at its n-th passage a rank is killed or stopped.

Nothing of this is in the package. A rank process of the tests calls ``watching`` around a
collective; it puts points around everything that other ranks can see of this one: what it writes
to a segment, and the messages that it sends. Passages are counted, so a run in which nothing
happens says how many there are, and which.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rankwire.collectives.exchange import Exchange
from rankwire.collectives.operation import Operation
from rankwire.collectives.slots import SharedSlots
from rankwire.mesh.segments import Segments
from rankwire.transports.shared_segment import SharedSegment

STEP_WRITTEN = "the step is written"
SENT = "after send_buffers"
_WORDS = ("the tag is written", "the size is written", STEP_WRITTEN)


class Passages:
    """What a rank has passed.

    Args:
        at: The passage at which something happens, counted from 0; None if nothing does.
        number: The signal that this process then sends to itself.
    """

    def __init__(self, at: int | None, number: int) -> None:
        self.names: list[str] = []
        self._at = at
        self._number = number

    def note(self, name: str) -> None:
        self.names.append(name)
        if self._at == len(self.names) - 1:
            # To this thread: another one that is to stop the process would let this one go on.
            signal.pthread_kill(threading.get_ident(), self._number)


class _NotedWords:
    """The words of a segment, each store a passage."""

    def __init__(self, words: Any, passages: Passages) -> None:
        self._words = words
        self._passages = passages
        self._names = iter(_WORDS)

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        self._passages.note(next(self._names))


def _publish(passages: Passages, publish: Callable[..., None]) -> Callable[..., None]:
    def noted(segment: Any, *args: Any) -> None:
        words = segment.words
        segment.words = _NotedWords(words, passages)
        try:
            publish(segment, *args)
        finally:
            segment.words = words

    return noted


def _before(passages: Passages, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        passages.note(f"before {method.__name__}")
        return method(*args, **kwargs)

    return noted


def _after(passages: Passages, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        passages.note(f"after {method.__name__}")
        return result

    noted.__name__ = method.__name__
    return noted


def _around(passages: Passages, method: Callable[..., Any]) -> Callable[..., Any]:
    return _before(passages, _after(passages, method))


# Between two of them a rank does nothing that another one could see, but write its slot.
_POINTS = [
    (Operation, "run_and_end", _around),
    (Segments, "make", _after),
    (Segments, "open", _after),
    (SharedSegment, "keep_private", _after),
    (Exchange, "send_buffers", _around),
    (Exchange, "receive", _after),
    (SharedSlots, "begin", _after),
    (SharedSlots, "publish", _around),
    (SharedSegment, "publish", _publish),
    (SharedSlots, "meet", _after),
]


@contextmanager
def watching(at: int | None = None, number: int = 0) -> Iterator[Passages]:
    """Count what this process passes, and have something happen to it at one of the passages."""
    passages = Passages(at, number)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _POINTS]
    for (owner, name, wrap), (_, _, method) in zip(_POINTS, before, strict=True):
        setattr(owner, name, wrap(passages, method))
    try:
        yield passages
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)
