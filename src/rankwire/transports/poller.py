"""Pollers: one thread waits for what comes on any of several streams.

Who registers a stream gives a *key*, which ``poll`` returns when there is something to read. A
stream is watched all the time, or armed for one shot, so that another thread may read it meanwhile
without disturbing the poller again and again. The in-memory twin is ``memory_poller.MemoryPoller``.
"""

from __future__ import annotations

import os
from termios import FIONREAD
from typing import Protocol

from rankwire import runtime
from rankwire.transports.spin import NOTHING_TO_READ, Spin
from rankwire.transports.stream import Stream
from rankwire.wire.ring import AWAKE, READ, WRITTEN, RingReader

_LOOKS_AT_ALL = 8  # one look in so many is at all streams
_ONE_SHOT = runtime.EPOLLIN | runtime.EPOLLONESHOT


class Poller(Protocol):
    """Waits for several streams. ``poll`` is for one thread at a time, the rest safe from any.

    Everything but ``poll`` needs a lock of the owner's, under which it is also closed.
    """

    def register(self, stream: Stream, key: object) -> None:
        """Watch a stream until it is unregistered. To be done before it is closed."""

    def arm(self, stream: Stream, key: object) -> None:
        """Have ``poll`` return the key once; to be armed again after that."""

    def unregister(self, stream: Stream) -> None:
        """Watch a stream no more; nothing happens if it was not watched."""

    def poll(self, seconds: float, spin: Spin | None = None) -> object | None:
        """Return the key of a stream that can be read; None after the time, or when woken.

        Args:
            seconds: How long to sleep.
            spin: How long to look before that.

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
        self._beside: dict[int, Stream] = {}  # those with a ring
        self._ring: RingReader | None = None  # of the last one
        self._watched: set[int] = set()  # all the time, not for one shot
        self._last = -1  # of these, what could be read the last time
        self._looks = 0  # over all polls: who always has more must not keep others from their turn
        self._waiting = bytearray(4)
        self._epoll = runtime.epoll()
        self._wakeup = runtime.eventfd(0, runtime.EFD_NONBLOCK | runtime.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, runtime.EPOLLIN)

    def register(self, stream: Stream, key: object) -> None:
        """Watch a stream until it is unregistered."""
        number = stream.fileno()
        self._keys[number] = key
        if stream.ring is not None:
            self._beside[number] = stream
        self._watched.add(number)
        self._epoll.register(number, runtime.EPOLLIN)

    def arm(self, stream: Stream, key: object) -> None:
        """Have ``poll`` return the key once. A stream that was closed meanwhile is left alone."""
        number = stream.fileno()
        if number in self._keys:
            self._epoll.modify(number, _ONE_SHOT)
        elif number >= 0:
            self._keys[number] = key
            self._epoll.register(number, _ONE_SHOT)

    def unregister(self, stream: Stream) -> None:
        """Watch a stream no more."""
        number = stream.fileno()
        self._watched.discard(number)
        self._beside.pop(number, None)
        if number == self._last:
            self._last, self._ring = -1, None
        if self._keys.pop(number, None) is not None:
            self._epoll.unregister(number)

    def poll(self, seconds: float, spin: Spin | None = None) -> object | None:
        """Return the key of a stream that can be read; None after the time, or when woken.

        Whoever sent last sends next, most of the time: its descriptor is asked more often than the
        epoll, and for less.
        """
        if spin is not None and (spin.budget > 0.0 or spin.tries_again()):
            waiting, now, yields, ioctl = self._waiting, spin.now, spin.yields, runtime.ioctl
            limit = now() + spin.budget
            ring = self._ring  # another thread may take it away
            words = None if ring is None else ring.words
            if words is not None:
                words[AWAKE] = 1
            while True:
                self._looks += 1
                if yields:
                    runtime.sched_yield()
                number = self._last
                if number < 0 or not self._looks % _LOOKS_AT_ALL:
                    if ready := self._epoll.poll(0, 1):
                        spin.budget = spin.most
                        return self._key_of(ready[0][0])
                elif words is not None:
                    if words[WRITTEN] != words[READ]:
                        spin.budget = spin.most
                        return self._keys.get(number)
                else:
                    try:
                        ioctl(number, FIONREAD, waiting)
                    except OSError:  # closed meanwhile
                        self._last = -1
                    else:
                        if waiting != NOTHING_TO_READ:
                            spin.budget = spin.most
                            return self._keys.get(number)
                if now() >= limit:
                    break
            spin.wasted()
        for number, stream in list(self._beside.items()):
            if stream.look_away():
                return self._keys.get(number)
        ready = self._epoll.poll(seconds, 1)
        return self._key_of(ready[0][0]) if ready else None

    def _key_of(self, number: int) -> object | None:
        if number == self._wakeup:
            runtime.eventfd_read(self._wakeup)
            return None
        if number != self._last and number in self._watched:
            last = self._beside.get(self._last)
            # If that has records it stays the last one, which is looked at next time; not now, or
            # who always has some would keep the others from their turn.
            if last is None or not last.look_away():
                self._last = number
                stream = self._beside.get(number)
                self._ring = None if stream is None else stream.ring
        return self._keys.get(number)

    def wake(self) -> None:
        """Make ``poll`` return, now or the next time."""
        runtime.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close the epoll. Nothing is unregistered: a parent may have the same one."""
        self._epoll.close()
        os.close(self._wakeup)
        self._beside, self._ring = {}, None
