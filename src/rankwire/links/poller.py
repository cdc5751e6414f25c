"""Pollers: one thread waits for what comes on any of several streams.

Who registers a stream gives a *key*, which ``poll`` returns when there is something to read. A
stream is watched all the time, or armed for one shot, so that another thread may read it meanwhile
without disturbing the poller again and again. The in-memory twin is ``memory_stream.MemoryPoller``.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

from rankwire.links.stream import Stream

__all__ = ["EpollPoller", "Poller"]

_ONE_SHOT = select.EPOLLIN | select.EPOLLONESHOT


class Poller(Protocol):
    """See the module. ``poll`` is for one thread at a time, the rest is safe from any.

    Everything but ``poll`` needs a lock of the owner's, under which it is also closed.
    """

    def register(self, stream: Stream, key: object) -> None:
        """Watch a stream until it is unregistered. To be done before it is closed."""

    def arm(self, stream: Stream, key: object) -> None:
        """Have ``poll`` return the key once; to be armed again after that."""

    def unregister(self, stream: Stream) -> None:
        """Watch a stream no more; nothing happens if it was not watched."""

    def poll(self, seconds: float) -> object | None:
        """Return the key of a stream that can be read; None after the time, or when woken.

        Without any time it is a mere look, which does not use up a wake: that is for who waits.

        Raises:
            ValueError: It was closed.
        """

    def wake(self) -> None:
        """Make ``poll`` return, now or the next time."""

    def close(self) -> None:
        """Give back what the system has lent. Also in the child of a fork, where it is shared."""


class EpollPoller:
    """Streams with descriptors, in one epoll."""

    def __init__(self) -> None:
        self._keys: dict[int, object] = {}  # by descriptor
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll.register(self._wakeup, select.EPOLLIN)

    def register(self, stream: Stream, key: object) -> None:
        """See ``Poller``."""
        number = stream.fileno()
        self._keys[number] = key
        self._epoll.register(number, select.EPOLLIN)

    def arm(self, stream: Stream, key: object) -> None:
        """See ``Poller``. One that was closed meanwhile is left alone."""
        number = stream.fileno()
        if number in self._keys:
            self._epoll.modify(number, _ONE_SHOT)
        elif number >= 0:
            self._keys[number] = key
            self._epoll.register(number, _ONE_SHOT)

    def unregister(self, stream: Stream) -> None:
        """See ``Poller``."""
        number = stream.fileno()
        if self._keys.pop(number, None) is not None:
            self._epoll.unregister(number)

    def poll(self, seconds: float) -> object | None:
        """See ``Poller``."""
        ready = self._epoll.poll(seconds, 1)
        if not ready:
            return None
        number = ready[0][0]
        if number == self._wakeup:
            if seconds:
                os.eventfd_read(self._wakeup)
            return None
        return self._keys.get(number)

    def wake(self) -> None:
        """See ``Poller``."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """See ``Poller``. Nothing is unregistered: a parent may have the same epoll."""
        self._epoll.close()
        os.close(self._wakeup)
