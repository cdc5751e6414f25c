"""Receives messages of a group, and reads them, here or in the sender's memory.

A message that its sender has withdrawn is skipped. One in the sender's memory is read directly into
its destination, once, and released.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rankwire.codec.arrays import dtype_code, is_masked
from rankwire.codec.tensors import advice_for, carrier_of, is_tensor, map_tensor
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import ConfigurationError, DeadlineExceededError, RankwireError
from rankwire.links.receive_handle import drop
from rankwire.links.send_handle import SendHandle
from rankwire.wire.array_messages import HEAD_NBYTES, ArrayMessage, unpack_head
from rankwire.wire.frames import WORLD_GROUP, Channel, Envelope, Payload, whole_of
from rankwire.wire.receive import (
    PLACED_FROM,
    Destination,
    MessageWithdrawnError,
    copy_payload,
    is_placed,
)

if TYPE_CHECKING:
    from rankwire.backends.posting import MessagePosting

_LOOK_EVERY = 0.05  # seconds between two checks of a rank other than the awaited one
# Not every byte is a valid bool or character: these are checked before the user gets them.
_CHECKED_KINDS = "bU"

T = TypeVar("T")


def read_array(payload: Payload, out: Any) -> Any:
    """Return the array of an array message, in ``out`` if that is given. May be repeated."""
    if is_placed(payload):
        return out
    message = unpack_head(_beginning(payload), len(payload))
    if out is None:
        return message.view(whole_of(payload))
    target = _target(message, out)
    if _is_in_order(message, target):
        copy_payload(payload, _bytes_of(target), message.start)
    else:
        target[...] = _as_array(message.view(whole_of(payload)))
    return out


def _is_in_order(message: ArrayMessage, target: np.ndarray[Any, Any]) -> bool:
    if not target.nbytes or message.head.dtype.kind in _CHECKED_KINDS:
        return False
    flags = target.flags
    return flags.f_contiguous if message.head.is_fortran else flags.c_contiguous


def _bytes_of(target: np.ndarray[Any, Any]) -> memoryview:
    return target.ravel("A").view(np.uint8).data


class ArrayDestination(Destination):
    """The memory of an array, for the elements of a message of its dtype and shape."""

    __slots__ = ("_out",)

    def __init__(self, out: Any, view: memoryview) -> None:
        super().__init__(view)
        self._out = out

    def head_nbytes(self, nbytes: int, beginning: memoryview) -> int | None:
        """Return where the elements begin, if the message has the array's dtype and shape."""
        try:
            message = unpack_head(beginning, nbytes)
            is_in_order = _is_in_order(message, _target(message, self._out))
        except RankwireError:
            return None  # the receiver raises it
        return message.start if is_in_order else None


def destination_of(out: Any) -> Destination | None:
    """Return the destination of an array message, if it can arrive in the memory of ``out``."""
    if isinstance(out, np.ndarray):
        target = out
    elif is_tensor(out) and advice_for(out) is None and not out.is_conj() and not out.is_neg():
        target = _as_array(out)
    else:
        return None
    flags = target.flags
    is_whole = flags.c_contiguous or flags.f_contiguous
    if target.nbytes < PLACED_FROM or not is_whole or not flags.writeable:
        return None
    return ArrayDestination(out, _bytes_of(target))


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays or tensors may have memory in common."""
    _check_kind(b)
    return np.may_share_memory(_as_array(a), _as_array(b))


def _beginning(payload: Payload) -> bytearray:
    if isinstance(payload, bytearray):
        return payload
    beginning = bytearray(min(HEAD_NBYTES, len(payload)))
    payload.read_into(0, memoryview(beginning))
    return beginning


def _target(message: ArrayMessage, out: Any) -> np.ndarray[Any, Any]:
    _check_kind(out)
    theirs = message.describe()
    if is_tensor(out):
        name = str(out.dtype).removeprefix("torch.")
        same = name == message.tensor_dtype and tuple(out.shape) == message.head.shape
        ours = f"{name} {tuple(out.shape)}"
    else:
        same = not message.tensor_dtype
        same = same and (out.dtype, out.shape) == (message.head.dtype, message.head.shape)
        ours = f"{out.dtype.name} {out.shape}"
    if not same:
        what = "a tensor" if message.tensor_dtype else "an array"
        raise ConfigurationError(f"out is {ours}, the message holds {what} {theirs}")
    target = _as_array(out)
    if not target.flags.writeable:
        raise ConfigurationError("out is read-only")
    return target


def check_out(out: Any) -> None:
    """Raise ``ConfigurationError`` if ``out`` is an array with a mask or a dtype not carried."""
    if is_masked(out):
        raise ConfigurationError("out has a mask: pass out.data, and set the mask afterwards")
    if isinstance(out, np.ndarray) and dtype_code(out.dtype) is None:
        raise ConfigurationError(f"out is of dtype {out.dtype}, which is not carried")


def _check_kind(out: Any) -> None:
    if not isinstance(out, np.ndarray) and not is_tensor(out):
        raise ConfigurationError(f"out is an array or a tensor, not {type(out).__name__}")


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    array = map_tensor(value, carrier_of(value.dtype)[0])  # a lazy view has the same memory
    if array is None:
        raise ConfigurationError("out has less memory than it has elements: it was resized")
    return array


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

    ``nbytes`` is its size, if that is fixed; ``into`` the memory for it, if it can arrive there.
    """
    envelope = (ranks.group, Channel.MESSAGE, tag)
    while True:
        try:
            if into is None and ranks.group == WORLD_GROUP:
                payload = ranks.messages.receive(
                    ranks.world[src], envelope, deadline, nbytes=nbytes
                )
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
            continue  # the sender's timeout passed: this message was never sent


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
    expected = ranks.messages.expect(ranks.world[src], envelope, nbytes=nbytes, into=into)
    try:
        expected.post()
        ranks.check_member(src)  # after the post: closing the group ends posted receives
    except BaseException:
        expected.give_up()
        raise
    return expected.take_now(deadline, read)


def take_array_meanwhile(
    ranks: MessagePosting, src: int, tag: int, deadline: Deadline, out: Any, sent: SendHandle | None
) -> Any:
    """Receive an array; check now and then whether the receiver of ``sent`` is lost."""
    while True:
        patience = deadline if sent is None else deadline.sooner(_LOOK_EVERY)
        try:
            return take(ranks, src, tag, patience, None, partial(read_array, out=out))
        except DeadlineExceededError:
            if patience is deadline:
                raise
            assert sent is not None
            if sent.wait(AT_ONCE):
                sent = None  # the receiver has taken it, and may end now


def raise_if_lost(ranks: MessagePosting, src: int, tag: int) -> None:
    """Raise if a rank is gone and left no message."""
    failure = ranks.mesh.failure_of(ranks.world[src])
    if failure is not None and not ranks.messages.has_arrived(
        ranks.world[src], (ranks.group, Channel.MESSAGE, tag)
    ):
        raise failure.copy()
