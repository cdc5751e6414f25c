"""Pollers and waiters: one thread waits for several streams.

A ``Poller`` watches a stream all the time, or once after ``arm``, so that another thread may read
it meanwhile without waking the poller. A ``Waiter`` waits once, and other threads release it like a
lock. ``memory_stream`` has both for worlds in one process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from rankwire import runtime
from rankwire.transports.byte_stream import ByteStream, Look
from rankwire.transports.spin import Spin
from rankwire.transports.wakeup import EventDescriptor, Sleeper

_POLLS_OF_ALL = 8  # one poll in so many begins with all streams
_ONE_SHOT = runtime.EPOLLIN | runtime.EPOLLONESHOT


class Poller(Protocol):
    """Waits for several streams. ``poll`` is for one thread at a time, the rest safe from any.

    The owner calls everything but ``poll`` under a lock of its own.
    """

    def register(self, stream: ByteStream, key: object) -> None:
        """Watch a stream until it is unregistered, which must happen before it is closed."""

    def arm(self, stream: ByteStream, key: object) -> None:
        """Make ``poll`` return the key once."""

    def unregister(self, stream: ByteStream) -> None:
        """Stop watching a stream, if it is watched."""

    def poll(self, seconds: float, spin: Spin | None = None) -> object | None:
        """Return the key of a stream that can be read; None after the time, or when woken.

        Polls by ``spin`` before it sleeps. Raises ``ValueError`` if the poller was closed.
        """

    def wake(self) -> None:
        """Make ``poll`` return, now or the next time."""

    def close(self) -> None:
        """Close the descriptors. Also in a forked child, which shares them."""


class EpollPoller:
    """Polls streams with descriptors, in one epoll."""

    def __init__(self) -> None:
        self._keys: dict[int, object] = {}  # by descriptor
        self._hiding: dict[int, ByteStream] = {}  # streams that hide input
        self._watched: dict[int, ByteStream] = {}  # all the time, not once
        self._last = -1  # of these, the last with input
        self._polls = 0
        self._epoll = runtime.epoll()
        self._wakeup = runtime.eventfd(0, runtime.EFD_NONBLOCK | runtime.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, runtime.EPOLLIN)
        self._ask_all = partial(self._epoll.poll, 0, 1)
        self._look: Look = (self._ask_all, [], bool, None, None)

    def register(self, stream: ByteStream, key: object) -> None:
        """Watch a stream until it is unregistered."""
        number = stream.fileno()
        self._keys[number] = key
        if stream.hides_input:
            self._hiding[number] = stream
        self._watched[number] = stream
        self._epoll.register(number, runtime.EPOLLIN)

    def arm(self, stream: ByteStream, key: object) -> None:
        """Make ``poll`` return the key once. Ignores a stream that was closed meanwhile."""
        number = stream.fileno()
        if number in self._keys:
            self._epoll.modify(number, _ONE_SHOT)
        elif number >= 0:
            self._keys[number] = key
            self._epoll.register(number, _ONE_SHOT)

    def unregister(self, stream: ByteStream) -> None:
        """Stop watching a stream."""
        number = stream.fileno()
        self._watched.pop(number, None)
        self._hiding.pop(number, None)
        if number == self._last:
            self._expect(-1)
        if self._keys.pop(number, None) is not None:
            self._epoll.unregister(number)

    def poll(self, seconds: float, spin: Spin | None = None) -> object | None:
        """Return the key of a readable stream; poll the last one more often than the epoll."""
        self._polls += 1
        number = self._last
        # A stream that always has more must not starve the others.
        if not self._polls % _POLLS_OF_ALL and (ready := self._ask_all()):
            if spin is not None:
                spin.budget = spin.most
            return self._key_of(ready[0][0])
        found = None if spin is None else spin.finds(*self._look)
        if isinstance(found, list):
            return self._key_of(found[0][0])
        if isinstance(found, Exception):  # closed meanwhile
            self._expect(-1)
        elif found is not None:
            return self._keys.get(number)
        for number, stream in list(self._hiding.items()):
            if stream.before_sleep():
                return self._keys.get(number)
        ready = self._epoll.poll(seconds, 1)
        return self._key_of(ready[0][0]) if ready else None

    def _key_of(self, number: int) -> object | None:
        if number == self._wakeup:
            runtime.eventfd_read(self._wakeup)
            return None
        if number != self._last and number in self._watched:
            last = self._hiding.get(self._last)
            # With hidden input it stays the last one, which the next poll asks; not this one, or a
            # stream that always has some would starve the others.
            if last is None or not last.before_sleep():
                self._expect(number)
        return self._keys.get(number)

    def _expect(self, number: int) -> None:
        """Poll a stream more often than the others; -1 for none."""
        stream = self._watched.get(number)
        if stream is None:
            self._last, self._look = -1, (self._ask_all, [], bool, None, None)
        else:
            ask, idle, begin, _, _ = stream.look
            self._last, self._look = number, (ask, idle, begin, self._ask_all, [])

    def wake(self) -> None:
        """Make ``poll`` return, now or the next time."""
        runtime.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close the epoll, without unregistering: a parent may share it."""
        self._epoll.close()
        os.close(self._wakeup)
        self._hiding.clear()
        self._watched.clear()


class Waiter(Sleeper, Protocol):
    """Makes one thread wait for streams, and for other threads, which call ``release``."""

    def wait(self, streams: Sequence[ByteStream], seconds: float) -> None:
        """Sleep until there is input, ``release`` was called, or the time has passed."""

    def close(self) -> None:
        """Close the descriptors. A later ``release`` does nothing."""


class PollWaiter(EventDescriptor):
    """Waits with a descriptor beside those of the streams; polls by ``spin`` first."""

    def __init__(self, spin: Spin) -> None:
        super().__init__()
        self._spin = spin

    def wait(self, streams: Sequence[ByteStream], seconds: float) -> None:
        """Sleep until there is input, ``release`` was called, or the time has passed."""
        wait_readable(streams, seconds, self._number, spin=self._spin)


def wait_readable(
    streams: Sequence[ByteStream], seconds: float, also: int = -1, spin: Spin | None = None
) -> None:
    """Sleep until a stream or one more descriptor has input, or the time has passed."""
    if any(stream.before_sleep() for stream in streams):
        return
    poller = runtime.poll()
    for number in (also, *(stream.fileno() for stream in streams)):
        if number >= 0:
            poller.register(number, runtime.POLLIN)
    if spin is None or spin.finds(partial(poller.poll, 0), []) is None:
        poller.poll(math.ceil(seconds * 1000.0))
