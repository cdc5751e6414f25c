"""Messages without waiting: their methods of ``Backend``, and the checks of all messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from rankwire.backends.arguments import Sendable, as_buffers, check_rank, check_tag, writable_view
from rankwire.backends.handles import MessageHandle, Receiving, Sending
from rankwire.backends.payloads import check_out, destination_of, read_array
from rankwire.backends.roles import Roles
from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MessageTooLargeError,
    RankwireError,
    SelfSendError,
)
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.mesh.mesh import Mesh
from rankwire.mesh.message_port import MessagePort
from rankwire.observe.inquiry import explain_delay, explain_silence, explain_unreceived
from rankwire.public_dir import PublicDir
from rankwire.wire.array_messages import pack_array
from rankwire.wire.frames import Buffer, Channel, Message, Payload, whole_of
from rankwire.wire.receive import PLACED_FROM, Destination, copy_payload

E = TypeVar("E", bound=RankwireError)


class AnyRank(Enum):
    """The type of ``ANY_RANK``."""

    ANY_RANK = "any rank"

    def __repr__(self) -> str:
        return "ANY_RANK"


ANY_RANK: Final = AnyRank.ANY_RANK
"""In place of a rank to receive from: whichever sends."""

Source = int | AnyRank


class MessagePosting(PublicDir):
    """Sends and receives messages while their thread does something else.

    Attributes:
        world: The world ranks of the group, by rank.
        dropped: Receives whose handles are gone; the next operation gives them up.
        last_source: The last source of a receive from any rank; the next one starts after it.
    """

    mesh: Mesh
    messages: MessagePort
    world: Sequence[int]
    group: int
    rank: int
    world_size: int
    clock: Clock
    timeout: float
    max_message_nbytes: int
    roles: Roles

    def __init__(self) -> None:
        self.dropped: list[ReceiveHandle] = []
        self.last_source = -1

    def isend(
        self, data: Sendable, dst: int, tag: int = 0, timeout: float | None = None
    ) -> MessageHandle:
        """Send one message without waiting for the peer to take it.

        What the peer does not accept now is sent as soon as it does. Messages to one rank are sent
        in the order of the calls of ``isend`` and ``send``; a ``send`` waits for earlier ones. The
        first message to a rank connects to it.

        Args:
            data: As for ``send``. Not copied: it must not change before the handle's ``wait`` has
                returned.
            dst: The rank to send to.
            tag: Only a receive with the same tag takes the message.
            timeout: Seconds from now in which ``wait`` must return; None is the backend's default.

        Returns:
            A handle, whose ``wait`` returns None once the data may change again: a small message is
            sent, the peer has taken a large one.

        Raises:
            MessageTooLargeError: Nothing was sent.
            ConfigurationError: The buffer, rank or tag is invalid; nothing was sent. The handle's
                ``wait`` raises all other errors.
        """
        return self._post("isend", data, dst, tag, timeout)

    def isend_array(
        self, array: Any, dst: int, tag: int = 0, timeout: float | None = None
    ) -> MessageHandle:
        """Send an array or tensor as ``send_array`` does, without waiting as ``isend`` does.

        Raises:
            UnsupportedTypeError: It is not an array or tensor, or its dtype cannot be sent.
        """
        return self._post("isend_array", array, dst, tag, timeout)

    def _post(self, op: str, data: Any, dst: int, tag: int, timeout: float | None) -> MessageHandle:
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        try:
            dst, tag = self._check_arguments(dst, tag)
            message = self._as_message(data if op == "isend" else pack_array(data)[0])
        except RankwireError as error:
            raise self.failed(error, op, deadline, dst, tag) from error.__cause__
        try:
            self.check_member(dst)
            envelope = (self.group, Channel.MESSAGE, tag)
            sent = self.messages.begin(self.world[dst], envelope, message, deadline)
        except Exception as error:
            handle = Sending(self, op, dst, tag, deadline)
            handle.fail(error)
            return handle
        if sent is None:
            return Sending(self, op, dst, tag)
        try:
            return Sending(self, op, dst, tag, deadline, sent)
        except BaseException:
            sent.revoke()  # interrupted: no other object knows of it
            raise

    def irecv(self, src: Source, tag: int = 0, timeout: float | None = None) -> MessageHandle:
        """Post a receive for the next message from ``src`` with this tag; do not wait for it.

        Receives are served in the order in which they were posted. With ``ANY_RANK`` it takes the
        next message from any rank: messages of one rank in their order, and from all ranks in
        turn. It fails only when all other ranks are lost or have left.

        Args:
            src: The rank to receive from, or ``ANY_RANK``.
            tag: The tag it was sent with.
            timeout: Seconds from now in which ``wait`` must return; None is the backend's default.

        Returns:
            A handle, whose ``wait`` returns the message, a ``bytearray`` that the caller owns.

        Raises:
            ConfigurationError: The rank or tag is invalid. The handle's ``wait`` raises all other
                errors.
        """
        return self._ask("irecv", src, tag, timeout, None, whole_of)

    def irecv_into(
        self, buffer: Buffer, src: Source, tag: int = 0, timeout: float | None = None
    ) -> MessageHandle:
        """Post a receive into ``buffer``, which must have the size of the message.

        The content of the buffer is undefined until ``wait`` has returned. A large message from a
        given rank arrives directly in the buffer while the thread reads anything from that rank.

        Raises:
            ConfigurationError: The buffer is read-only, has gaps, or holds references.
        """
        return self._ask_into("irecv_into", buffer, src, tag, timeout)

    def irecv_array(
        self, src: Source, tag: int = 0, timeout: float | None = None, *, out: Any = None
    ) -> MessageHandle:
        """Post a receive for the next array; ``wait`` returns it, as ``recv_array`` does.

        Args:
            src: The rank to receive from, or ``ANY_RANK``.
            tag: The tag it was sent with.
            timeout: As for ``irecv``.
            out: As for ``recv_array``; its content is undefined until ``wait`` has returned.
        """
        return self._ask_array("irecv_array", src, tag, timeout, out)

    def recv_any(self, tag: int = 0, timeout: float | None = None) -> tuple[int, bytearray]:
        """Return the source and the content of the next message with this tag from any rank.

        Args:
            tag: The tag it was sent with.
            timeout: Seconds; 0 takes only what has arrived; None is the backend's default.

        Raises:
            DeadlineExceededError: No message arrived in time; a later receive can still get it.
            PeerLostError: All other ranks are lost, and none of their messages is left.
        """
        handle = self._ask("recv_any", ANY_RANK, tag, timeout, None, whole_of)
        message = handle.wait()
        assert handle.source is not None
        return handle.source, message

    # -- how they are asked for --------------------------------------------------------------------

    def _ask_into(
        self, op: str, buffer: Buffer, src: Source, tag: int, timeout: float | None
    ) -> MessageHandle:
        try:
            view = writable_view(buffer)
        except RankwireError as error:
            raise error.during(op=op, rank=self.rank, tag=tag) from error.__cause__

        def read(payload: Payload) -> int:
            copy_payload(payload, view)
            return view.nbytes

        into = Destination(view) if view.nbytes >= PLACED_FROM else None
        return self._ask(op, src, tag, timeout, into, read, nbytes=view.nbytes)

    def _ask_array(
        self, op: str, src: Source, tag: int, timeout: float | None, out: Any
    ) -> MessageHandle:
        try:
            check_out(out)
            into = destination_of(out)
        except RankwireError as error:
            raise error.during(op=op, rank=self.rank, tag=tag) from error.__cause__
        return self._ask(op, src, tag, timeout, into, partial(read_array, out=out))

    def _ask(
        self,
        op: str,
        src: Source,
        tag: int,
        timeout: float | None,
        into: Destination | None,
        read: Any,
        *,
        nbytes: int | None = None,
    ) -> MessageHandle:
        deadline = Deadline.of(timeout, self.timeout, self.clock)
        rank: int | None = None
        try:
            if isinstance(src, AnyRank):
                if self.dropped:
                    self.give_up_dropped()
                tag = check_tag(tag)
                if self.world_size == 1:
                    raise ConfigurationError("this group has no other rank to receive from")
            else:
                rank, tag = self._check_arguments(src, tag)
        except RankwireError as error:
            raise self.failed(error, op, deadline, rank, tag) from error.__cause__
        return Receiving(self, op, rank, tag, deadline, nbytes, into, read)

    def others(self) -> list[int]:
        """Return all other ranks, starting after the last source."""
        first = self.last_source + 1
        ranks = [*range(first, self.world_size), *range(first)]
        return [rank for rank in ranks if rank != self.rank]

    def give_up_dropped(self) -> None:
        """Give up the receives whose handles are gone: other receives get their messages."""
        while self.dropped:
            with suppress(IndexError, ValueError):  # another thread removed it first
                first = self.dropped[0]
                first.give_up()  # after an interrupt, the next operation repeats it
                self.dropped.remove(first)

    # -- checks ------------------------------------------------------------------------------------

    def _as_message(self, data: Sendable) -> Message:
        buffers, nbytes = as_buffers(data)
        if nbytes > self.max_message_nbytes:
            raise MessageTooLargeError(nbytes, self.max_message_nbytes)
        return buffers, nbytes

    def _check(self, peer: int, tag: int) -> tuple[int, int]:
        if self.dropped:
            self.give_up_dropped()
        return self._check_peer(peer), check_tag(tag)

    def _check_arguments(self, peer: int, tag: int) -> tuple[int, int]:
        """Check what a handle cannot report; it does report that the group is closed."""
        if self.dropped:
            self.give_up_dropped()
        return MessagePosting._check_peer(self, peer), check_tag(tag)

    def _check_peer(self, peer: int) -> int:
        peer = check_rank(peer, self.world_size)
        if peer == self.rank:
            raise SelfSendError(self.rank)
        return peer

    def check_member(self, rank: int | None) -> None:
        """Raise if this group is closed, or if the given rank was restarted since it was made."""

    def world_rank_of(self, rank: int) -> int:
        """Return the world rank of a rank of this group."""
        return self.world[check_rank(rank, self.world_size)]

    def adopted(self, peer: int | None, error: E) -> E:
        """Replace the world ranks in an error of the mesh by ranks of this group."""
        return error

    def failed(
        self,
        error: RankwireError,
        op: str,
        deadline: Deadline,
        peer: int | None = None,
        tag: int | None = None,
    ) -> RankwireError:
        """Return an error of the mesh with ranks of this group, and the operation's context."""
        return self.explained(self.adopted(peer, error), op, deadline, peer, tag)

    def explained(
        self,
        error: RankwireError,
        op: str,
        deadline: Deadline,
        peer: int | None = None,
        tag: int | None = None,
    ) -> RankwireError:
        """Add the operation's context to an error; to a timeout, also the cause of the delay."""
        is_new = error.op is None and not getattr(error, "is_explained", False)
        if isinstance(error, DeadlineExceededError):
            error.culprits = [self.world_rank_of(each) for each in error.waiting_for]
        error = error.during(op=op, rank=self.rank, peer=peer, tag=tag, waited=deadline.waited)
        if self.roles and type(error.peer) is int:
            error.peer_name = self.roles.name_of(error.peer)
        if is_new and isinstance(error, DeadlineExceededError) and error.limit > 0.0:
            if op.removeprefix("i").startswith("recv"):
                explain_unreceived(self._count_unreceived, error)
            explain_silence(self._silences(), error)
            explain_delay(self._ask_what_it_does, error, self.clock)
        return error

    def _count_unreceived(self, rank: int) -> dict[int, int]:
        return self.mesh.inquiries.unreceived(self.world[rank], self.group)

    def _silences(self) -> dict[int, float]:
        found = self.mesh.inquiries.silences()
        return {rank: found[each] for rank, each in enumerate(self.world) if each in found}

    def _ask_what_it_does(self, rank: int, deadline: Deadline) -> str | None:
        return self.mesh.inquiries.doing_of(self.world[rank], deadline)
