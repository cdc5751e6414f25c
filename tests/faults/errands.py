"""What rank processes of these tests do inside themselves, too long for a line of ``eval``."""

import contextlib
from collections.abc import Iterable

from faults.proxy import Flow, Pieces, Toxic, between, flip_bit
from rankwire import DeadlineExceededError, RankwireError
from rankwire.wire.frames import HEADER_NBYTES
from worlds import SECRET, tcp_world

FIRST = b"first"
SECOND = bytes(range(256)) * 8


def tampered(host: str, places: Iterable[tuple[int, int]]) -> list[str]:
    """Flip one bit of a message on its way between two ranks, once for every place.

    Args:
        host: An address of this host. Off loopback, where the network is not trusted.
        places: Byte and bit in the second message, its header included.

    Returns:
        For each place: the name of the error that the receiver saw, or "delivered wrong",
        "delivered right" or "nothing came".
    """
    start = _where_the_second_begins(host)
    return [_received(host, flip_bit(start + byte, bit)) for byte, bit in places]


def forged(host: str) -> str:
    """Insert a frame that an attacker made, with the right sequence number; return as above."""
    return _received(host, _insert_a_frame(_where_the_second_begins(host)))


def _insert_a_frame(offset: int) -> Toxic:
    def toxic(pieces: Pieces, flow: Flow) -> Pieces:
        position = 0
        for piece in pieces:
            if position <= offset < position + len(piece):
                start = offset - position
                header = bytearray(piece[start : start + HEADER_NBYTES])
                forgery = bytes(header) + bytes(len(SECOND))
                yield piece[:start] + forgery + piece[start:]
            else:
                yield piece
            position += len(piece)

    return toxic


def _where_the_second_begins(host: str) -> int:
    with tcp_world(2, host=host, secret=SECRET, transport="tcp") as world:
        with between(world[0], 1) as proxy:
            world[0].send(FIRST, 1)
            assert world[1].recv(0) == FIRST
            return proxy.passed()[0]


def _received(host: str, toxic: Toxic) -> str:
    with tcp_world(2, host=host, secret=SECRET, transport="tcp") as world:
        with between(world[0], 1, up=[toxic]):
            with contextlib.suppress(RankwireError):  # it may notice before the receiver
                world[0].send(FIRST, 1)
                world[0].send(SECOND, 1)
            try:
                assert world[1].recv(0) == FIRST
                second = world[1].recv(0, timeout=0.15)
            except DeadlineExceededError:
                return "nothing came"
            except RankwireError as error:
                return type(error).__name__
            return "delivered right" if second == SECOND else "delivered wrong"
