"""The header of a frame, as a peer would write it."""

from rankwire.wire.frames import HEADER, SEQUENCE_MASK, Envelope


def pack_header(envelope: Envelope, nbytes: int, sequence: int) -> bytes:
    group, channel, tag = envelope
    return HEADER.pack(channel, sequence & SEQUENCE_MASK, group, tag, nbytes)
