"""Receiving: the steps by which a message is taken, used, and taken again if it was taken back.

Knows of a backend only its ``Transport``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rankwire.backends.payloads import to_array
from rankwire.backends.transport import Offer, Transport
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError
from rankwire.wire.frames import Channel, Payload
from rankwire.wire.loans import LoanRevokedError

_LOOK_EVERY = 0.05  # seconds between two looks at a rank that is not the one waited for

T = TypeVar("T")


def take(
    ranks: Transport,
    src: int,
    tag: int,
    deadline: Deadline,
    nbytes: int | None,
    use: Callable[[Payload], T],
) -> T:
    """Receive the next message that its sender has not taken back, and use it."""
    envelope = (ranks.group, Channel.MESSAGE, tag)
    while True:
        payload = ranks.receive(src, envelope, deadline, nbytes=nbytes)
        try:
            return use(payload)
        except LoanRevokedError:
            continue  # the sender's time was up: this message was never sent
        except BaseException:
            if not isinstance(payload, bytearray):  # the sender must not wait for a thread
                with suppress(LoanRevokedError):  # that was interrupted
                    payload.give_back()
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
