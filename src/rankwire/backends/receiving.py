"""Receiving: the steps by which a message is taken, used, and taken again if it was taken back.

Knows of a backend only its ``Transport``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rankwire.backends.payloads import to_array
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.mesh.transport import Expected, Offer, Transport
from rankwire.wire.frames import Channel, Payload
from rankwire.wire.loans import LoanRevokedError
from rankwire.wire.receive import Destination

_LOOK_EVERY = 0.05  # seconds between two looks at a rank that is not the one waited for

T = TypeVar("T")


def take(
    ranks: Transport,
    src: int,
    tag: int,
    deadline: Deadline,
    nbytes: int | None,
    use: Callable[[Payload], T],
    *,
    into: Destination | None = None,
) -> T:
    """Receive the next message that its sender has not taken back, and use it.

    Args:
        ranks: The group.
        src: Who sends it.
        tag: Its tag.
        deadline: For all of it.
        nbytes: Its size, if that is fixed.
        use: Gets it, and returns what to return.
        into: Where it is to come, if it can.
    """
    envelope = (ranks.group, Channel.MESSAGE, tag)
    while True:
        if into is None:
            payload = ranks.receive(src, envelope, deadline, nbytes=nbytes)
        else:
            payload = _expected(ranks.expect(src, envelope, nbytes=nbytes, into=into), deadline)
        try:
            return use(payload)
        except LoanRevokedError:
            continue  # the sender's time was up: this message was never sent
        except BaseException:
            if not isinstance(payload, bytearray):  # the sender must not wait for a thread
                with suppress(LoanRevokedError):  # that was interrupted
                    payload.give_back()
            raise


def _expected(message: Expected, deadline: Deadline) -> Payload:
    """Wait for a message; if it does not come, it is for others."""
    try:
        return message.take(deadline)
    except BaseException:
        try:
            message.give_up()
        finally:
            message.give_up()  # an interrupt may have fallen into the first
        raise


def take_array_meanwhile(
    ranks: Transport, src: int, tag: int, deadline: Deadline, out: Any, offer: Offer | None
) -> Any:
    """Return an array; look up now and then whether the taker of an offer still lives."""
    while True:
        patience = deadline if offer is None else deadline.sooner(_LOOK_EVERY)
        try:
            return take(ranks, src, tag, patience, None, lambda payload: to_array(payload, out))
        except DeadlineExceededError:
            if patience is deadline:
                raise
            assert offer is not None
            if offer.wait(AT_ONCE):
                offer = None  # it has been taken: whatever becomes of its taker now


def raise_if_lost(ranks: Transport, src: int, tag: int) -> None:
    """Raise if a rank is gone and left no message."""
    failure = ranks.failure_of(src)
    if failure is not None and not ranks.has_arrived(src, (ranks.group, Channel.MESSAGE, tag)):
        raise failure.copy()
