"""Backend: what every way of joining ranks offers.

Implementations provide five things: ``transmit``, ``receive``, ``open_calls``, ``close`` and who
they are. Everything users call is written once, here, on top of them: argument checks, deadlines,
the barrier, and the context in errors. So all backends behave alike.

``transmit`` and ``receive`` take a whole envelope (group, channel, tag); they are for the layers
above (``rpc``, ``collectives``) and for ``SubBackend``. Users see ``send`` and ``recv`` with a tag.
"""

from __future__ import annotations

import itertools
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rankwire.backends.calls import CallPort
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MessageTooLargeError,
    RankwireError,
    SelfSendError,
)
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES, WORLD_GROUP, Buffer, Channel

__all__ = ["DEFAULT_TIMEOUT", "Backend", "Sendable"]

DEFAULT_TIMEOUT = 60.0
_MAX_TAG = (1 << 64) - 1
_BARRIER_LOOK = 0.05  # seconds between two looks at all ranks
_NOW = Deadline(0.0)

Sendable = Buffer | Sequence[Buffer]


class Backend(ABC):
    """Messages between the ranks of a world or of a group.

    Every method is safe from any thread. Messages from one rank to another with one tag arrive in
    the order in which they were sent; messages of different tags, and barriers, never take each
    other's place.

    Args:
        rank: This process's index, from 0.
        world_size: The number of ranks.
        timeout: Seconds for every operation that is not given its own limit.
        max_message_nbytes: Largest message sent or accepted.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_nbytes: int = DEFAULT_MAX_MESSAGE_NBYTES,
    ) -> None:
        check_world(rank, world_size)
        Deadline(timeout)  # refuses a negative one
        self.rank = operator.index(rank)  # numpy's integers would not travel
        self.world_size = operator.index(world_size)
        self.timeout = timeout
        self.max_message_nbytes = max_message_nbytes
        self._barriers = itertools.count()
        self._barrier_lock = threading.Lock()

    # -- what implementations provide --------------------------------------------------------------

    @property
    def group(self) -> int:
        """The id by which this group's traffic is told from others'."""
        return WORLD_GROUP

    @abstractmethod
    def transmit(
        self,
        dst: int,
        channel: Channel,
        group: int,
        tag: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
    ) -> None:
        """Send one message under an envelope. The buffers are free again on return."""

    @abstractmethod
    def receive(
        self,
        src: int,
        channel: Channel,
        group: int,
        tag: int,
        deadline: Deadline,
        *,
        nbytes: int | None = None,
    ) -> bytearray:
        """Return the next message under an envelope; the caller owns it.

        Raises:
            SizeMismatchError: ``nbytes`` is given and the message has another size; it stays
                receivable.
        """

    @abstractmethod
    def abandon(self, group: int, cause: RankwireError) -> None:
        """End all receives of one group on this rank, because it has left the group."""

    @abstractmethod
    def open_calls(self, service: int) -> CallPort:
        """Return the port by which an agent calls and is called.

        There is one port a service number and rank at a time.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave: peers see an orderly end, waiting threads get ``ChannelClosedError``.

        Idempotent.
        """

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    # -- what users call ---------------------------------------------------------------------------

    def send(self, data: Sendable, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send one message. Returns when the data may be changed again, not when it is received.

        Args:
            data: Any contiguous buffer (``bytes``, ``bytearray``, ``memoryview``, a numpy array),
                or a sequence of them that arrives as one message.
            dst: The rank to send to.
            tag: Only a receive with the same tag takes it.
            timeout: Seconds; None is the backend's default.

        Raises:
            DeadlineExceededError: The peer did not take it in time.
            PeerLostError: The peer is gone.
            MessageTooLargeError: Nothing was sent.
        """
        deadline = Deadline.of(timeout, self.timeout)
        try:
            self._check_peer(dst)
            _check_tag(tag)
            buffers, nbytes = _as_buffers(data)
            if nbytes > self.max_message_nbytes:
                raise MessageTooLargeError(nbytes, self.max_message_nbytes)
            self.transmit(dst, Channel.MESSAGE, self.group, tag, buffers, nbytes, deadline)
        except RankwireError as error:
            raise self._explained(error, "send", dst, tag, deadline) from error.__cause__

    def recv(self, src: int, tag: int = 0, timeout: float | None = None) -> bytearray:
        """Return the next message from ``src`` with this tag, whatever its length.

        The caller owns it.

        Args:
            src: The rank to receive from.
            tag: The tag it was sent with.
            timeout: Seconds; 0 takes only what has arrived; None is the backend's default.

        Raises:
            DeadlineExceededError: None came in time; a later receive still gets it.
            PeerLostError: The peer is gone and left nothing.
        """
        deadline = Deadline.of(timeout, self.timeout)
        try:
            self._check_peer(src)
            _check_tag(tag)
            return self.receive(src, Channel.MESSAGE, self.group, tag, deadline)
        except RankwireError as error:
            raise self._explained(error, "recv", src, tag, deadline) from error.__cause__

    def recv_into(
        self, buffer: Buffer, src: int, tag: int = 0, timeout: float | None = None
    ) -> int:
        """Receive the next message into ``buffer`` and return its size.

        The buffer's size must be the message's.

        Raises:
            SizeMismatchError: The sizes differ; the message stays receivable and the buffer is
                untouched.
        """
        deadline = Deadline.of(timeout, self.timeout)
        try:
            self._check_peer(src)
            _check_tag(tag)
            view = flat_view(buffer)
            if view.readonly:
                raise ConfigurationError("recv_into needs a writable buffer")
            view[:] = self.receive(
                src, Channel.MESSAGE, self.group, tag, deadline, nbytes=view.nbytes
            )
            return view.nbytes
        except RankwireError as error:
            raise self._explained(error, "recv_into", src, tag, deadline) from error.__cause__

    def barrier(self, timeout: float | None = None) -> None:
        """Return once every rank has entered.

        All ranks enter their barriers in the same order, one thread at a time. Every rank tells
        every other that it is here, so a rank that waits in vain knows exactly who is missing.

        Raises:
            DeadlineExceededError: ``waiting_for`` lists the ranks that did not enter. The next
                barrier is not affected.
            PeerLostError: A rank is gone.
        """
        deadline = Deadline.of(timeout, self.timeout)
        try:
            if not self._barrier_lock.acquire(timeout=deadline.sleep_limit()):
                raise DeadlineExceededError(deadline.limit, detail="another thread is in a barrier")
            try:
                if self.closed:
                    raise ChannelClosedError("this backend is closed")
                self._meet(next(self._barriers), deadline)
            finally:
                self._barrier_lock.release()
        except RankwireError as error:
            raise self._explained(error, "barrier", None, None, deadline) from error.__cause__

    def _meet(self, epoch: int, deadline: Deadline) -> None:
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        untold, missing = others, others
        while True:
            untold = self._tell_entered(untold, epoch, deadline)
            if missing and self._has_entered(missing[0], epoch, deadline.sooner(_BARRIER_LOOK)):
                missing = missing[1:]
            elif missing:
                # While one is late another one may die: that ends the barrier too.
                missing = [src for src in missing if not self._has_entered(src, epoch, _NOW)]
            if not missing and not untold:
                return
            if deadline.expired:
                missing = [src for src in missing if not self._has_entered(src, epoch, _NOW)]
                if missing or untold:
                    raise DeadlineExceededError(
                        deadline.limit, waiting_for=sorted(missing or untold)
                    )

    def _tell_entered(self, ranks: list[int], epoch: int, deadline: Deadline) -> list[int]:
        """Tell ranks that this one has entered; return those that are slow to take it."""
        untold, failure = [], None
        for dst in ranks:  # all of them, also when one is lost: nobody must wait for us in vain
            patience = deadline.sooner(_BARRIER_LOOK)
            try:
                self.transmit(dst, Channel.BARRIER, self.group, epoch, (), 0, patience)
            except DeadlineExceededError:
                untold.append(dst)
            except RankwireError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return untold

    def _has_entered(self, src: int, epoch: int, deadline: Deadline) -> bool:
        try:
            self.receive(src, Channel.BARRIER, self.group, epoch, deadline, nbytes=0)
        except DeadlineExceededError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}{state}>"

    # -- checks ------------------------------------------------------------------------------------

    def _check_peer(self, peer: int) -> None:
        check_rank(peer, self.world_size)
        if peer == self.rank:
            raise SelfSendError(self.rank)

    def _explained(
        self,
        error: RankwireError,
        op: str,
        peer: int | None,
        tag: int | None,
        deadline: Deadline,
    ) -> RankwireError:
        """Add what this operation knows to an error that passes."""
        return error.during(op=op, rank=self.rank, peer=peer, tag=tag, waited=deadline.waited)


def check_world(rank: int, world_size: int) -> None:
    """Raise unless ``rank`` is one of ``world_size`` ranks."""
    try:
        valid = operator.index(world_size) >= 1
    except TypeError:
        valid = False
    if not valid:
        raise InvalidWorldSizeError(world_size)
    check_rank(rank, world_size)


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless ``rank`` is one of ``world_size`` ranks."""
    try:
        valid = 0 <= operator.index(rank) < world_size
    except TypeError:
        valid = False
    if not valid:
        raise InvalidRankError(rank, world_size)


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not 0 <= tag <= _MAX_TAG:
        raise ConfigurationError(f"a tag is an integer from 0 to 2**64 - 1, not {tag!r}")


def flat_view(buffer: Any) -> memoryview:
    """Return a contiguous buffer as bytes, uncopied.

    Raises:
        ConfigurationError: It is no buffer, or has gaps.
    """
    try:
        view = memoryview(buffer)
        # cast() refuses shapes with a zero in them; without elements there is nothing to share.
        return view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a message is one or more contiguous buffers, not {type(buffer).__name__}: {error}"
        ) from error


def _as_buffers(data: Sendable) -> tuple[list[Buffer], int]:
    """Return the pieces as flat bytes, uncopied, and their total size."""
    pieces: Sequence[Any] = data if isinstance(data, (list, tuple)) else [data]
    views: list[Buffer] = [flat_view(piece) for piece in pieces]
    return views, sum(map(len, views))
