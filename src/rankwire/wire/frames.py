"""Frames: how one message is delimited on a byte stream.

A frame is a 32-byte header followed by the payload. All integers are little-endian:

    ======  ====  ==================================================================
    offset  size  field
    ======  ====  ==================================================================
    0       1     channel: what the frame is for (``Channel``)
    1       1     flags: 1 if the payload is lent (``wire.loans``), else zero
    2       2     reserved, zero
    4       4     sequence: counts the frames of this direction, modulo 2**32
    8       8     group: the world (0) or the subgroup it belongs to
    16      8     tag: the user's tag, a request id, or a collective's step
    24      8     payload length in bytes
    ======  ====  ==================================================================

If frames are sealed (``wire.seals``), 16 more bytes follow the payload, not counted in the length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from rankwire.errors import MessageTooLargeError, ProtocolError, RankwireError

Buffer = bytes | bytearray | memoryview


class UnreadPayload(Protocol):
    """A received payload that is not in the receiver's memory yet. Safe from any thread."""

    # Translates the ranks in an error to the numbers of a group; set by the receiver.
    translate: Callable[[RankwireError], None] | None

    def __len__(self) -> int:
        """Return the length in bytes."""

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on.

        Raise ``MessageWithdrawnError`` if the sender withdrew it; ``view`` is undefined then.
        """

    def whole(self) -> bytearray:
        """Return all bytes in memory of the caller's own, and release it; raise likewise."""

    def release(self) -> None:
        """Release the sender's memory. Idempotent; raise ``MessageWithdrawnError`` likewise."""


Payload = bytearray | UnreadPayload  # of a received message


def whole_of(payload: Payload) -> bytearray:
    """Return the bytes of a received payload, in memory of the caller's own."""
    return payload if isinstance(payload, bytearray) else payload.whole()


Message = tuple[Sequence[Buffer], int]  # a message to send: its pieces and total size
# Group, channel and tag, by which messages and receives are matched. A plain tuple, because one is
# made for every message.
Envelope = tuple[int, int, int]

DEFAULT_MAX_MESSAGE_NBYTES = 1 << 30
WORLD_GROUP = 0

# Channel, flags and reserved bits are one number, so that one lookup checks all three.
HEADER = struct.Struct("<IIQQQ")
HEADER_NBYTES = HEADER.size
SEAL_NBYTES = 16
SEQUENCE_MASK = 0xFFFF_FFFF

# The most that one recv() takes. A payload that does not fit gets memory of its own.
DEFAULT_BUFFER_NBYTES = 1 << 16

# A larger sealed frame has a seal for its header too, since the receiver allocates memory first.
LARGE_SEALED_NBYTES = DEFAULT_BUFFER_NBYTES - HEADER_NBYTES - SEAL_NBYTES


class Channel(IntEnum):
    """The purpose of a frame. Messages of different channels are never matched."""

    MESSAGE = 1
    COLLECTIVE = 2
    STREAM = 3  # a request for the items of a stream
    CALL = 4
    REPLY = 5
    CANCEL = 6
    CONTROL = 7
    ITEM = 8  # of a stream
    CREDIT = 9  # how much of a stream may be sent
    FAREWELL = 10
    GREETING = 11


# Set beside one of the lending channels if the payload is lent.
LOAN = 1 << 8
_LENDING = (
    *(Channel.MESSAGE, Channel.COLLECTIVE, Channel.STREAM, Channel.CALL, Channel.REPLY),
    Channel.ITEM,
)

# From here on, ``wire.protocol`` handles the frame: farewells, greetings and loans.
FIRST_SPECIAL = int(Channel.FAREWELL)
CHANNELS = frozenset(
    {*(int(channel) for channel in Channel), *(channel | LOAN for channel in _LENDING)}
)


class Frame(NamedTuple):
    """One received message. The thread that takes it owns the payload."""

    envelope: Envelope
    payload: Payload


def unpack_size(header: bytes) -> tuple[int, int]:
    """Return the channel of a header, without flags, and the payload length."""
    word, _, _, _, nbytes = HEADER.unpack(header)
    return word & 0xFF, nbytes


def is_farewell(tail: bytes) -> bool:
    """Return whether a stream without seals that ends with these bytes ends with a farewell."""
    if len(tail) < HEADER_NBYTES:
        return False
    channel, _, group, tag, nbytes = HEADER.unpack_from(tail, len(tail) - HEADER_NBYTES)
    return bool(channel == Channel.FAREWELL and group == tag == nbytes == 0)


def describe_violation(
    word: int, sequence: int, expected: int, nbytes: int, limit: int
) -> ProtocolError:
    """Return the error for an invalid header; ``word`` holds channel, flags and reserved bits."""
    channel, flags, reserved = word & 0xFF, word >> 8 & 0xFF, word >> 16
    if channel not in CHANNELS:
        return ProtocolError(f"a frame names the unknown channel {channel}")
    if word not in CHANNELS:
        if word == channel | LOAN:
            return ProtocolError(f"a frame of channel {channel} cannot lend its payload")
        return ProtocolError(f"a frame has unknown flags {flags:#x} or reserved bits {reserved:#x}")
    if sequence != expected:
        return ProtocolError(
            f"a frame has sequence number {sequence}, expected {expected}: one is lost or repeated"
        )
    error = ProtocolError(f"the peer announced {nbytes} bytes, the limit is {limit}")
    error.__cause__ = MessageTooLargeError(nbytes, limit)
    return error


def broken_seal() -> ProtocolError:
    """Return the error for a seal that does not match its frame."""
    return ProtocolError(
        "the seal of a frame does not fit: it was altered, repeated or left out on the way"
    )


def skip_bytes(pieces: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return what is left to send after the first ``count`` bytes of the pieces."""
    for index, piece in enumerate(pieces):
        size = memoryview(piece).nbytes
        if count < size:
            return [memoryview(piece).cast("B")[count:], *pieces[index + 1 :]]
        count -= size
    return []


def first_bytes(pieces: Sequence[Buffer], nbytes: int) -> list[memoryview]:
    """Return the first ``nbytes`` of the pieces, as views; none of an empty piece."""
    beginning: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes and nbytes:
            beginning.append(view.cast("B")[:nbytes])
            nbytes -= len(beginning[-1])
    return beginning
