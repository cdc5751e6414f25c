"""Receive messages of a group, and skip those that their sender has withdrawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rankwire.backends.payloads import read_array
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.links.receive_handle import drop
from rankwire.links.send_handle import SendHandle
from rankwire.wire.frames import WORLD_GROUP, Channel, Envelope, Payload
from rankwire.wire.receive import Destination, MessageWithdrawnError

if TYPE_CHECKING:
    from rankwire.backends.posting import MessagePosting

_LOOK_EVERY = 0.05  # seconds between two looks at a rank that is not the one waited for

T = TypeVar("T")


def take(
    ranks: MessagePosting,
    src: int,
    tag: int,
    deadline: Deadline,
    nbytes: int | None,
    read: Callable[[Payload], T],
    *,
    into: Destination | None = None,
) -> T:
    """Receive the next message that its sender has not withdrawn, and return ``read(message)``.

    Args:
        ranks: The group.
        src: The rank that sends it.
        tag: Its tag.
        deadline: For all of it.
        nbytes: Its size, if that is fixed.
        read: Makes the result of the message.
        into: The memory for it, if it can arrive there.
    """
    envelope = (ranks.group, Channel.MESSAGE, tag)
    while True:
        try:
            if into is None and ranks.group == WORLD_GROUP:
                payload = ranks.mesh.receive(ranks.world[src], envelope, deadline, nbytes=nbytes)
                try:
                    result = read(payload)
                    if not isinstance(payload, bytearray):
                        payload.release()
                    return result
                except BaseException:
                    drop(payload)
                    raise
            return take_posted(ranks, src, envelope, deadline, read, nbytes, into)
        except MessageWithdrawnError:
            continue  # the sender's time was up: this message was never sent


def take_posted(
    ranks: MessagePosting,
    src: int,
    envelope: Envelope,
    deadline: Deadline,
    read: Callable[[Payload], T],
    nbytes: int | None = None,
    into: Destination | None = None,
) -> T:
    """Post a receive and read its message; after an error, another receive gets the message."""
    expected = ranks.mesh.expect(ranks.world[src], envelope, nbytes=nbytes, into=into)
    try:
        expected.post()
        ranks.check_member(src)  # after it was posted: closing the group ends what is posted
    except BaseException:
        expected.give_up()
        raise
    return expected.take_now(deadline, read)


def take_array_meanwhile(
    ranks: MessagePosting, src: int, tag: int, deadline: Deadline, out: Any, sent: SendHandle | None
) -> Any:
    """Return an array; look up now and then whether the receiver of a sent message still lives."""
    while True:
        patience = deadline if sent is None else deadline.sooner(_LOOK_EVERY)
        try:
            return take(ranks, src, tag, patience, None, partial(read_array, out=out))
        except DeadlineExceededError:
            if patience is deadline:
                raise
            assert sent is not None
            if sent.wait(AT_ONCE):
                sent = None  # it was taken: its taker may end now


def raise_if_lost(ranks: MessagePosting, src: int, tag: int) -> None:
    """Raise if a rank is gone and left no message."""
    failure = ranks.mesh.failure_of(ranks.world[src])
    if failure is not None and not ranks.mesh.has_arrived(
        ranks.world[src], (ranks.group, Channel.MESSAGE, tag)
    ):
        raise failure.copy()
