"""Frames: how one message is delimited on a byte stream.

A frame is a 32-byte header followed by the payload. All integers are little-endian:

    ======  ====  ==================================================================
    offset  size  field
    ======  ====  ==================================================================
    0       1     channel: who the frame is for (``Channel``)
    1       1     flags: 1 if the payload is lent (``wire.loans``), not here; else zero
    2       2     reserved, zero
    4       4     sequence: counts the frames of this direction, modulo 2**32
    8       8     group: the world (0) or the subgroup it belongs to
    16      8     tag: the user's tag, a request id, or a collective's step
    24      8     payload length in bytes
    ======  ====  ==================================================================

On a connection whose frames are sealed (``wire.seals``), 16 bytes follow the payload; the parser
checks them before it returns the frame. The length does not count them.

``HEADER`` packs what ``parser.FrameParser`` unpacks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from rankwire.errors import MessageTooLargeError, ProtocolError
from rankwire.wire.loans import Parcel

Buffer = bytes | bytearray | memoryview
Payload = bytearray | Parcel  # of a received message: here, or still with the sender
Message = tuple[Sequence[Buffer], int]  # what is sent: the pieces, and their size together
# What a message is sent and received under: group, channel, tag. A plain tuple, because it is the
# key by which messages and receives meet, and there is one for every message.
Envelope = tuple[int, int, int]

DEFAULT_MAX_MESSAGE_NBYTES = 1 << 30  # the limit of the seeds, configurable here

WORLD_GROUP = 0

# Channel, flags and reserved bits as one number: a valid one is small, so one look checks all
# three.
HEADER = struct.Struct("<IIQQQ")
HEADER_NBYTES = HEADER.size
SEAL_NBYTES = 16
SEQUENCE_MASK = 0xFFFF_FFFF

# One recv() takes what fits here. A payload that does not fit is received straight into memory of
# its own, so this bounds the bytes that are copied once more, not the speed of large messages.
DEFAULT_BUFFER_NBYTES = 1 << 16

# On a sealed connection, the header of a frame that does not fit there has a seal of its own before
# the payload: for these, memory is taken before the whole of it can be checked.
LARGE_SEALED_NBYTES = DEFAULT_BUFFER_NBYTES - HEADER_NBYTES - SEAL_NBYTES


class Channel(IntEnum):
    """Who a frame is for. Traffic of different channels never meets."""

    MESSAGE = 1
    COLLECTIVE = 2
    CALL = 4
    REPLY = 5
    CANCEL = 6
    CONTROL = 7
    FAREWELL = 8
    GREETING = 9


# Together with one of these channels in the word: the payload is lent.
LOAN = 1 << 8
_LENDING = (Channel.MESSAGE, Channel.COLLECTIVE, Channel.CALL, Channel.REPLY)

# From here on a frame is not for the receiver of messages as it is: courtesies and loans.
FIRST_SPECIAL = int(Channel.FAREWELL)
CHANNELS = frozenset(
    {*(int(channel) for channel in Channel), *(channel | LOAN for channel in _LENDING)}
)


class Frame(NamedTuple):
    """One received message; whoever takes it owns the payload."""

    envelope: Envelope
    payload: Payload


def unpack_size(header: bytes) -> tuple[int, int]:
    """Return the channel of a header, without its flags, and the length of the payload."""
    word, _, _, _, nbytes = HEADER.unpack(header)
    return word & 0xFF, nbytes


def is_farewell(tail: bytes) -> bool:
    """Whether a stream that ends with these bytes ends with a farewell, which is a bare header.

    Of a stream whose frames are not sealed; for others see ``parser.FrameParser.is_farewell``.
    """
    if len(tail) < HEADER_NBYTES:
        return False
    channel, _, group, tag, nbytes = HEADER.unpack_from(tail, len(tail) - HEADER_NBYTES)
    return bool(channel == Channel.FAREWELL and group == tag == nbytes == 0)


def describe_violation(
    word: int, sequence: int, expected: int, nbytes: int, limit: int
) -> ProtocolError:
    """Return why a header is not valid.

    Args:
        word: Its channel, flags and reserved bits.
        sequence: Its number.
        expected: The one that it should have.
        nbytes: The length that it announces.
        limit: The largest that is accepted.
    """
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
    """Return why a sealed frame is not valid."""
    return ProtocolError(
        "the seal of a frame does not fit: it was altered, repeated or left out on the way"
    )


def skip_bytes(pieces: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return what is left to send after ``count`` bytes have left."""
    for index, piece in enumerate(pieces):
        size = memoryview(piece).nbytes
        if count < size:
            return [memoryview(piece).cast("B")[count:], *pieces[index + 1 :]]
        count -= size
    return []


def first_bytes(pieces: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """Return the first ``nbytes`` of what is to be sent."""
    beginning: list[Buffer] = []
    for piece in pieces:
        if not nbytes:
            break
        beginning.append(memoryview(piece).cast("B")[:nbytes])
        nbytes -= len(beginning[-1])
    return beginning
