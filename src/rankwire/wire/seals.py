"""Seals: proof that a frame is the next one of its connection, and unchanged.

Where attackers can reach the network, each frame is followed by a seal of 16 bytes: the beginning
of HMAC-SHA256 over a frame counter, the header and the payload. The header of a large frame has its
own seal before the payload, so that a forged length makes no receiver wait or allocate memory. Each
direction of each connection has a key of its own, derived in the handshake.

For messages and collectives above ``BULK_NBYTES`` the seal covers the CRC-32 of the payload
instead, unless ``FULL_MAC`` was agreed on: this detects damage, but not deliberate changes.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple
from zlib import crc32

from rankwire.wire.frames import (
    HEADER_NBYTES,
    LARGE_SEALED_NBYTES,
    SEAL_NBYTES,
    Buffer,
    Channel,
    Message,
)

# Above this, the seal of a message or collective covers the CRC-32.
BULK_NBYTES = 1 << 16
# A larger frame is sealed slice by slice while it is sent.
SLICE_NBYTES = 1 << 20
_BULK_CHANNELS = frozenset({int(Channel.MESSAGE), int(Channel.COLLECTIVE)})
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")


class Protection(IntFlag):
    """How the frames of a connection are protected, as the dialling end says in its HELLO."""

    NONE = 0
    SEALED = 1
    FULL_MAC = 2  # only together with SEALED


@dataclass(slots=True, eq=False)
class FrameMac:
    """Computes the seal of one frame from its payload, piece by piece."""

    _mac: hmac.HMAC
    _by_crc: bool
    _crc: int = 0

    def add(self, piece: Buffer) -> None:
        """Add the next piece of the payload."""
        if self._by_crc:
            self._crc = crc32(piece, self._crc)
        else:
            self._mac.update(piece)

    def plus(self, piece: Buffer) -> FrameMac:
        """Return a copy with the next piece added."""
        mac = self._mac if self._by_crc else self._mac.copy()
        further = FrameMac(mac, self._by_crc, self._crc)
        further.add(piece)
        return further

    def finish(self) -> bytes:
        """Return the seal."""
        mac = self._mac
        if self._by_crc:
            mac = mac.copy()
            mac.update(_CRC.pack(self._crc))
        return mac.digest()[:SEAL_NBYTES]

    def matches(self, seal: Buffer) -> bool:
        """Return whether this is the seal of the added pieces."""
        return hmac.compare_digest(self.finish(), bytes(seal))


class SealInProgress:
    """Computes a large frame's seal while it is sent. An interrupted thread may continue."""

    __slots__ = ("_rest", "is_made", "seal")

    def __init__(self, mac: FrameMac, payload: Sequence[Buffer]) -> None:
        views = [memoryview(piece).cast("B") for piece in payload]
        slices = [
            view[start : start + SLICE_NBYTES]
            for view in views
            for start in range(0, len(view), SLICE_NBYTES)
        ]
        self._rest = (mac, slices[::-1])
        self.seal = bytearray(SEAL_NBYTES)
        self.is_made = False

    def go_on(self) -> bool:
        """Add the next slice, or finish; return whether there is more to do."""
        mac, slices = self._rest
        if slices:
            self._rest = (mac.plus(slices[-1]), slices[:-1])
        elif not self.is_made:
            self.seal[:] = mac.finish()
            self.is_made = True
            return False
        return not self.is_made

    def finish(self) -> None:
        """Compute the rest of the seal."""
        while self.go_on():
            pass


class Seal:
    """Makes and checks one direction's seals. Stateless; the caller uses each number once."""

    __slots__ = ("_full_mac", "_keyed", "_keyed_for_heads")

    def __init__(self, key: bytes, *, full_mac: bool = False) -> None:
        # Copying a keyed MAC takes 1.7 us per small frame, creating one 2.5 us.
        self._keyed = hmac.new(key, digestmod="sha256")
        self._keyed_for_heads = hmac.new(hmac.digest(key, b"head", "sha256"), digestmod="sha256")
        self._full_mac = full_mac

    def begin(self, sequence: int, header: Buffer, channel: int, nbytes: int) -> FrameMac:
        """Begin the seal of a frame whose payload comes in pieces."""
        mac = self._keyed.copy()
        mac.update(_SEQUENCE.pack(sequence) + header)
        by_crc = nbytes > BULK_NBYTES and channel in _BULK_CHANNELS and not self._full_mac
        return FrameMac(mac, by_crc)

    def begin_head(self, sequence: int, header: Buffer) -> FrameMac:
        """Begin the seal of the header of a large frame."""
        mac = self._keyed_for_heads.copy()
        mac.update(_SEQUENCE.pack(sequence) + header)
        return FrameMac(mac, False)

    def of(
        self, sequence: int, header: Buffer, channel: int, payload: Sequence[Buffer], nbytes: int
    ) -> bytes:
        """Return the seal of a whole frame."""
        mac = self.begin(sequence, header, channel, nbytes)
        for piece in payload:
            mac.add(piece)
        return mac.finish()

    def matches(self, sequence: int, channel: int, frame: memoryview) -> bool:
        """Return whether a whole frame ends with its seal."""
        payload = frame[HEADER_NBYTES:-SEAL_NBYTES]
        mac = self.begin(sequence, frame[:HEADER_NBYTES], channel, len(payload))
        mac.add(payload)
        return mac.matches(frame[-SEAL_NBYTES:])

    def around(
        self, sequence: int, header: Buffer, channel: int, message: Message
    ) -> tuple[list[Buffer], SealInProgress | None]:
        """Return the pieces after a header, and the last seal if it is computed during sending."""
        payload, nbytes = message
        if nbytes <= LARGE_SEALED_NBYTES:
            return [*payload, self.of(sequence, header, channel, payload, nbytes)], None
        head = self.begin_head(sequence, header).finish()
        if nbytes <= SLICE_NBYTES:
            return [head, *payload, self.of(sequence, header, channel, payload, nbytes)], None
        coming = SealInProgress(self.begin(sequence, header, channel, nbytes), payload)
        return [head, *payload, coming.seal], coming


class Seals(NamedTuple):
    """The seals of both directions of one connection."""

    outgoing: Seal
    incoming: Seal


def make_seals(
    key: bytes, transcript: bytes, protection: Protection, *, dialled: bool
) -> Seals | None:
    """Derive a connection's seals, None if it is not sealed; ``dialled`` says which end this is."""
    if not protection & Protection.SEALED:
        return None
    session = hmac.digest(key, b"S" + transcript, "sha256")
    full_mac = bool(protection & Protection.FULL_MAC)
    there, back = (
        Seal(hmac.digest(session, direction, "sha256"), full_mac=full_mac)
        for direction in (b"rankwire I->R", b"rankwire R->I")
    )
    return Seals(there, back) if dialled else Seals(back, there)
