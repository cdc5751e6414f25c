"""What is wrong with a stream of frames, in words.

The parser finds it; here is only what it says. Everything in it came from the other end, so it is
numbers, never texts.
"""

from __future__ import annotations

from rankwire.errors import MessageTooLargeError, ProtocolError
from rankwire.wire.frames import CHANNELS, LOAN


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
