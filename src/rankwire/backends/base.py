"""Backend: the interface that users hold.

A backend is a mesh, the members of a group and the group's id. It checks arguments, sets deadlines,
translates ranks on entry and errors on exit, so that all backends behave alike. The barrier is a
collective of the layer above (``meeting``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self

from rankwire.backends.agreement import Agreement
from rankwire.backends.arguments import Sendable, check_rank, check_world, writable_view
from rankwire.backends.payloads import (
    check_out,
    destination_of,
    raise_if_lost,
    read_array,
    share_memory,
    take,
    take_array_meanwhile,
)
from rankwire.backends.posting import AnyRank, MessagePosting, Source
from rankwire.backends.returns import await_return
from rankwire.backends.roles import Roles
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.fork import guard, invalidate
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.events import OnJoined, OnLost, OnSuspected
from rankwire.mesh.mesh import Mesh
from rankwire.observe.status import WorldStatus
from rankwire.wire.array_messages import pack_array
from rankwire.wire.control_messages import Notice
from rankwire.wire.frames import WORLD_GROUP, Buffer, Channel, whole_of
from rankwire.wire.receive import PLACED_FROM, Destination, copy_payload


class Operations(Protocol):
    """What a backend uses of its group's collectives, which are a layer above.

    Attributes:
        turn: The number of the next operation.
        epoch: The number after the last operation that failed here.
    """

    turn: int
    epoch: int

    def call(self, name: str, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the next operation, and return its result."""

    def now(self) -> str:
        """Return the description of the running operation; empty if none runs."""
        ...

    def release(self) -> None:
        """Release the memory that the ranks share, because the group is closed."""


class Backend(MessagePosting):
    """Sends messages between the ranks of a world or of a group.

    Every method is safe from any thread. Messages from one rank to another with one tag arrive in
    the order in which they were sent. A receive never takes a message of another tag or a barrier.

    Attributes:
        rank: This process's rank, from 0.
        world_size: The number of ranks.
        incarnation: How many times a launcher has restarted this rank alone.
        timeout: Default timeout of operations, in seconds.
        max_message_nbytes: Largest message sent or accepted.
        roles: The ranks of each role, and their names, such as ``"rollout/0"``; see ``Roles``.
        clock: The clock that all waits of its world use.
        security: How its connections are protected: ``"local"``, ``"auth"``, ``"tls"`` or
            ``"insecure"``. Without connections, ``"local"``.
    """

    _SHOWN: ClassVar[tuple[str, ...]] = (
        *("rank", "world_size", "incarnation", "timeout", "max_message_nbytes", "clock"),
        *("security", "roles"),
        *("send", "recv", "recv_into", "recv_any", "send_array", "recv_array", "sendrecv"),
        *("isend", "irecv", "irecv_into", "isend_array", "irecv_array", "barrier"),
        *("alive", "status", "wait_for", "on_peer_lost", "on_peer_joined", "on_peer_suspected"),
        *("close", "closed"),
    )

    incarnation: int = 0
    roles: Roles = Roles()
    # The barrier of the collectives, which are a layer above; the package sets it.
    meeting: ClassVar[Callable[[Backend, float | None], None]]

    def __init__(
        self,
        mesh: Mesh,
        *,
        members: Sequence[int] | None = None,
        group: int = WORLD_GROUP,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.messages = mesh.messages
        self.world = range(mesh.world_size) if members is None else members
        self.rank, self.world_size = check_world(self.world.index(mesh.rank), len(self.world))
        self.group = group
        self.clock = mesh.clock
        self.timeout = mesh.timeout if timeout is None else Deadline(timeout, mesh.clock).limit
        self.max_message_nbytes = mesh.max_message_nbytes
        self.security = mesh.security
        self.incarnation = mesh.incarnation
        self.operations: Operations | None = None  # set by the first collective
        self.agreement = Agreement()  # makes groups of its ranks
        self.roll = mesh.roll
        self.roll.add(self)
        guard(self)

    @property
    def joins(self) -> int:
        """How many times another rank was restarted since this one joined the world."""
        return self.mesh.joins

    @property
    def broken(self) -> RankwireError | None:
        """Why this group has no collectives any more, if a rank was restarted since."""
        return self.mesh.broken

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.mesh.closed

    @property
    def roll_members(self) -> tuple[int, ...]:
        """The members as a report to the coordinator lists them; empty for the world."""
        return () if self.group == WORLD_GROUP else tuple(self.world)

    def leave_roll(self) -> None:
        """Report that this rank leaves the world, and so will not join the next operation."""
        begun = self.operations
        number, epoch = (0, 0) if begun is None else (begun.turn, begun.epoch)
        text = f"rank {self.world_rank_of(self.rank)} has left"
        me, members = self.rank, self.roll_members
        self.roll.report(
            Notice(self.group, number, "", "left", text, culprit=me, epoch=epoch, members=members)
        )

    # -- what users call ---------------------------------------------------------------------------

    def send(self, data: Sendable, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send one message. The data may change again on return.

        Returns once a small message is sent, or once the peer has taken a large one, which it may
        read directly from this process's memory. Ranks that all send first do not deadlock.

        Args:
            data: Any contiguous buffer (``bytes``, ``bytearray``, ``memoryview``, a numpy array),
                or a sequence of buffers that arrives as one message. Must not hold references, as
                an array of objects does.
            dst: The rank to send to.
            tag: Only a receive with the same tag takes the message.
            timeout: Seconds; None is the backend's default.

        Raises:
            DeadlineExceededError: The peer did not take it in time. If ``may_have_arrived`` is set,
                a part of it was sent: the rest follows in the background, and the message arrives
                unless the peer is lost. Otherwise it never arrives.
            PeerLostError: The peer is gone.
            MessageTooLargeError: Nothing was sent.
            ConfigurationError: The buffer is invalid; nothing was sent.
        """
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            dst, tag = self._check(dst, tag)
            message = self._as_message(data)
            envelope = (self.group, Channel.MESSAGE, tag)
            self.messages.transmit(self.world[dst], envelope, message, deadline)
        except RankwireError as error:
            raise self.failed(error, "send", deadline, dst, tag) from error.__cause__

    def recv(self, src: Source, tag: int = 0, timeout: float | None = None) -> bytearray:
        """Return the next message from ``src`` with this tag, of any length.

        The caller owns it.

        Args:
            src: The rank to receive from; or ``ANY_RANK``, as for ``irecv``. ``recv_any`` also
                returns the sender.
            tag: The tag it was sent with.
            timeout: Seconds; 0 takes only what has arrived; None is the backend's default.

        Raises:
            DeadlineExceededError: No message arrived in time; a later receive can still get it.
            PeerLostError: The peer is lost, and none of its messages is left.
        """
        if isinstance(src, AnyRank):
            return self._ask("recv", src, tag, timeout, None, whole_of).wait()  # type: ignore[no-any-return]
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            src, tag = self._check(src, tag)
            return take(self, src, tag, deadline, None, whole_of)
        except RankwireError as error:
            raise self.failed(error, "recv", deadline, src, tag) from error.__cause__

    def recv_into(
        self, buffer: Buffer, src: Source, tag: int = 0, timeout: float | None = None
    ) -> int:
        """Receive the next message into ``buffer`` and return its size.

        The buffer must have the size of the message. Its content is undefined until this returns.

        Raises:
            SizeMismatchError: The sizes differ; the message stays receivable and the buffer is
                untouched.
            ConfigurationError: The buffer is read-only, has gaps, or holds references, such as an
                array of objects. The message stays receivable.
        """
        if isinstance(src, AnyRank):
            return self._ask_into("recv_into", buffer, src, tag, timeout).wait()  # type: ignore[no-any-return]
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            src, tag = self._check(src, tag)
            view = writable_view(buffer)
            into = Destination(view) if view.nbytes >= PLACED_FROM else None
            read = partial(copy_payload, view=view)
            take(self, src, tag, deadline, view.nbytes, read, into=into)
            return view.nbytes
        except RankwireError as error:
            raise self.failed(error, "recv_into", deadline, src, tag) from error.__cause__

    # -- arrays ------------------------------------------------------------------------------------

    def send_array(self, array: Any, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        """Send a numpy array or a dense torch tensor on the CPU, with its dtype and shape.

        This copies it only if it has gaps between its elements. Otherwise as ``send``.

        Raises:
            UnsupportedTypeError: It is not an array or tensor, or its dtype cannot be sent.
        """
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            dst, tag = self._check(dst, tag)
            message = self._as_message(pack_array(array)[0])
            envelope = (self.group, Channel.MESSAGE, tag)
            self.messages.transmit(self.world[dst], envelope, message, deadline)
        except RankwireError as error:
            raise self.failed(error, "send_array", deadline, dst, tag) from error.__cause__

    def recv_array(
        self, src: Source, tag: int = 0, timeout: float | None = None, *, out: Any = None
    ) -> Any:
        """Return the next array from ``src``, as it was sent: an array, or a tensor.

        Args:
            src: The rank to receive from, or ``ANY_RANK``.
            tag: The tag it was sent with.
            timeout: Seconds; None is the backend's default.
            out: An array or tensor of the same dtype and shape to receive into, and to return.

        Raises:
            ConfigurationError: ``out`` has another dtype or shape; the message is dropped, and
                ``out`` unchanged. If messages cannot hold its dtype, such as that of objects,
                nothing is received.
            InvalidMessageError: The message was not sent by ``send_array``.
        """
        if isinstance(src, AnyRank):
            return self._ask_array("recv_array", src, tag, timeout, out).wait()
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            src, tag = self._check(src, tag)
            check_out(out)
            read, into = partial(read_array, out=out), destination_of(out)
            return take(self, src, tag, deadline, None, read, into=into)
        except RankwireError as error:
            raise self.failed(error, "recv_array", deadline, src, tag) from error.__cause__

    def sendrecv(
        self,
        array: Any,
        dst: int,
        src: int | None = None,
        tag: int = 0,
        timeout: float | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Send an array to ``dst`` and return one from ``src``, at the same time.

        Args:
            array: As for ``send_array``.
            dst: The rank to send to.
            src: The rank to receive from; ``dst`` if not given.
            tag: The tag of both messages.
            timeout: Seconds for both; None is the backend's default.
            out: As for ``recv_array``; it may be the array that is sent.

        Raises:
            PeerLostError: One of the two peers is lost before its part was done.
        """
        src = dst if src is None else src
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        offer = None
        try:
            dst, tag = self._check(dst, tag)
            src, tag = self._check(src, tag)
            check_out(out)
            packed = pack_array(array)[0]
            if out is not None and share_memory(array, out):
                packed = [bytes(piece) for piece in packed]
            message = self._as_message(packed)
            offer = self.messages.offer(
                self.world[dst],
                (self.group, Channel.MESSAGE, tag),
                message,
                deadline,
                check=lambda: raise_if_lost(self, src, tag),
            )
            received = take_array_meanwhile(self, src, tag, deadline, out, offer)
            if offer is not None and not offer.wait(deadline):
                raise DeadlineExceededError(deadline.limit, waiting_for=[self.world[dst]])
            return received
        except RankwireError as error:
            raise self.failed(error, "sendrecv", deadline, src, tag) from error.__cause__
        finally:
            if offer is not None:
                try:
                    offer.revoke()
                finally:
                    offer.revoke()  # a second interrupt may have stopped the first

    def barrier(self, timeout: float | None = None) -> None:
        """Return once every rank has entered: ``rankwire.barrier(self)``.

        This is a collective: all ranks must call the group's collectives in the same order.

        Raises:
            DeadlineExceededError: ``waiting_for`` lists the ranks that did not enter.
            CollectiveAbortedError: Another rank failed in the barrier.
            CollectiveMismatchError: Another rank is in another operation.
            PeerLostError: A rank is lost, or was restarted after this group was made.
        """
        type(self).meeting(self, timeout)

    # -- the other ranks ---------------------------------------------------------------------------

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks, this one included, that have not failed or left, as far as it knows."""
        return tuple(
            rank
            for rank in range(self.world_size)
            if rank == self.rank or self.failure_of(rank) is None
        )

    def status(self) -> WorldStatus:
        """Return this rank's view of each peer: its state, and the waits for it."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        known = self.mesh.inquiries.status_of
        peers = {rank: replace(known(self.world[rank]), rank=rank) for rank in others}
        operation = "" if self.operations is None else self.operations.now()
        return WorldStatus(self.rank, self.world_size, peers, operation)

    def failure_of(self, rank: int) -> RankwireError | None:
        """Return why a peer is gone (``ChannelClosedError`` after an orderly end), or None."""
        return self.mesh.failure_of(self.world[self._check_peer(rank)])

    def wait_for(self, rank: int | str, timeout: float | None = None) -> None:
        """Return when a rank is up: at once, or when a launcher has restarted it.

        After that, calls and messages go to the new process. A call waits there for the agent.

        Args:
            rank: A rank, or its name.
            timeout: Seconds; None is the backend's default.

        Raises:
            DeadlineExceededError: The rank was not restarted in time.
            PeerLostError: The rank is lost, and cannot come back: no launcher restarts ranks, or
                this is a group, in which a lost rank stays lost.
            ChannelClosedError: The rank has left without an error, or this backend is closed.
        """
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            rank = check_rank(rank, self.world_size, self.roles)
            if rank != self.rank:
                await_return(self, rank, deadline)
        except RankwireError as error:
            peer = rank if isinstance(rank, int) else None
            raise self.failed(error, "wait_for", deadline, peer) from error.__cause__

    def incarnation_of(self, rank: int) -> int:
        """Return how many times a rank was restarted alone."""
        return self.mesh.incarnation_of(self.world[rank])

    @property
    def hosts(self) -> Sequence[object]:
        """One item for each rank; the items of ranks on one host are equal."""
        hosts = self.mesh.hosts
        return hosts if self.group == WORLD_GROUP else [hosts[rank] for rank in self.world]

    def lost_ranks(self) -> list[int]:
        """Return the lost ranks. Ranks that have left may be among them."""
        return self.mesh.lost_ranks()

    def open_calls(self, service: int) -> CallPort:
        """Return the port by which an agent calls and is called."""
        return self.mesh.open_calls(service)

    def on_peer_lost(self, callback: OnLost) -> Callable[[], None]:
        """Call ``callback(error)`` once for each lost peer, including peers lost before now.

        It is not called for a peer that leaves without an error, nor for one that was lost before
        now and has been restarted. Callbacks run one after the other in their own thread.

        Returns:
            A function that removes the callback.
        """
        return self.mesh.events.on_lost(callback)

    def on_peer_suspected(self, callback: OnSuspected) -> Callable[[], None]:
        """Call ``callback(rank, seconds)`` when a peer has been silent for that long.

        0.0 seconds mean that the peer responds again. Otherwise as ``on_peer_lost``.
        """
        return self.mesh.events.on_suspected(callback)

    def on_peer_joined(self, callback: OnJoined) -> Callable[[], None]:
        """Call ``callback(rank, incarnation)`` when a peer was restarted and has joined.

        It is also called for peers that joined again before now, and always after the
        ``on_peer_lost`` of the old process. From now on messages and calls to the rank go to the
        new process, whose ``incarnation`` is 1, 2 and so on; those to the old one have failed.
        Barriers and collectives of this group fail from now on: all members must make a new group
        (``SubBackend``). ``rankwire run --on-failure restart`` restarts ranks. Otherwise as
        ``on_peer_lost``.
        """
        return self.mesh.events.on_joined(callback)

    def close(self, *, error: BaseException | None = None) -> None:
        """Leave the world; waiting threads get ``ChannelClosedError``. Idempotent.

        Args:
            error: The error that ends this rank, if any. The other ranks get ``PeerLostError`` with
                its text and traceback. Without it they see an orderly end.
        """
        self.mesh.close(error=error)
        if self.operations is not None:
            self.operations.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error=error)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}{state}>"

    def close_in_child(self) -> None:
        """Make every use of it in a forked child raise an error."""
        invalidate(self)
