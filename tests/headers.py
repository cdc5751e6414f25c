"""Headers of frames, as a peer would write them, and frames out of the bytes of a stream."""

from rankwire.wire.frames import HEADER, SEQUENCE_MASK, Envelope, Frame
from rankwire.wire.parser import FrameParser


def pack_header(envelope: Envelope, nbytes: int, sequence: int) -> bytes:
    group, channel, tag = envelope
    return HEADER.pack(channel, sequence & SEQUENCE_MASK, group, tag, nbytes)


def bytes_received(parser: FrameParser, count: int) -> list[Frame]:
    """Take ``count`` bytes written to ``receive_buffer()``; return the frames they complete."""
    note_received(parser, count)
    parser.commit(parser.parse()[0])
    frames = list(parser.frames)
    parser.frames.clear()
    return frames


def note_received(parser: FrameParser, count: int) -> None:
    """Note that ``count`` bytes were written to ``receive_buffer()``."""
    parser.state[1].append(count)
