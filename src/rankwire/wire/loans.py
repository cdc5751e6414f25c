"""Loans: a frame that says where its payload lies instead of carrying it.

Within a host a large payload need not pass through a socket: the frame has the flag ``LOAN`` and,
instead of the payload, this description of the sender's memory, little-endian:

    ======  ====  ==================================================================
    offset  size  field
    ======  ====  ==================================================================
    0       8     number: unique in the lending process, not zero
    8       8     address of the guard: it holds the number while the memory may be read
    16      8     address of the receipt: the borrower writes the number there
    24      8     payload length in bytes
    32      16    a piece of the payload: its address and length; 1 to 512 of them
    ======  ====  ==================================================================

The borrower reads the pieces and, after them, the guard. If the guard still holds the number, what
it read is the payload, because the lender changes the guard before its memory may change. Then it
writes the receipt, and the lender may go on. If the guard does not hold the number, the loan was
revoked and the message was never sent. Each word is written by one side only, so nothing has to be
atomic across processes but one aligned word.

A lender that gives up and a borrower that writes its receipt at the same moment must agree on
whether the message was sent. The lender first marks the guard ``DECIDING``, then looks for the
receipt, and then writes the number again (it was sent) or marks it ``REVOKED``; the borrower looks
at the guard once more after its receipt, and waits while it is being decided. A borrower that
cannot read the memory although the loan stands writes a ``REFUSED`` receipt, and the payload
follows in the stream.

This module is the bytes and the rules; who reads memory of whom is in ``links.process_memory``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from rankwire.errors import MessageTooLargeError, ProtocolError, RankwireError

# The kernel takes 1024 vectors a call, and the guard needs one.
MAX_PIECES = 512

_HEAD = struct.Struct("<QQQQ")
_PIECE = struct.Struct("<QQ")
_HIGHEST_ADDRESS = (1 << 63) - 1


# Marks in the upper bits of a word, beside the number.
DECIDING = 1 << 63
REVOKED = 1 << 62
REFUSED = 1 << 61
MAX_NUMBER = REFUSED - 1


class LoanRefusedError(RankwireError):
    """The borrower cannot read this memory; it has to be sent in another way."""


class LoanRevokedError(RankwireError):
    """The sender took its memory back before it was read: the message was never sent."""


class Loan(NamedTuple):
    """Where a payload lies."""

    number: int
    guard: int
    receipt: int
    nbytes: int
    pieces: list[tuple[int, int]]  # address and length


class Parcel(Protocol):
    """A payload that has been announced and lies in the sender's memory still.

    Its length is known. The receiver reads it, as a whole or in parts, and then gives it back.
    Every method is safe from any thread.
    """

    def __len__(self) -> int:
        """Return the length in bytes."""

    def read_into(self, start: int, view: memoryview) -> None:
        """Copy the bytes from ``start`` on into ``view``, all of it.

        Raises:
            LoanRevokedError: The sender has taken it back; what ``view`` holds now means nothing.
            RankwireError: The sender is gone.
        """

    def whole(self) -> bytearray:
        """Return all of it, in memory of the caller's own, and give it back; raises likewise."""

    def give_back(self) -> None:
        """Tell the sender that its memory is not needed any more. Idempotent.

        Raises:
            LoanRevokedError: The sender had taken it back just before; what was read is not sent.
        """


def whole_of(payload: bytearray | Parcel) -> bytearray:
    """Return the bytes of a received payload, in memory of the caller's own."""
    return payload if isinstance(payload, bytearray) else payload.whole()


def pack_loan(
    number: int, guard: int, receipt: int, pieces: Iterable[tuple[int, int]], nbytes: int
) -> bytes:
    """Return the description of a loan; the mirror of ``unpack_loan``."""
    head = _HEAD.pack(number, guard, receipt, nbytes)
    return head + b"".join(_PIECE.pack(address, length) for address, length in pieces)


def unpack_loan(description: bytearray, *, max_nbytes: int) -> Loan:
    """Return the loan that a frame describes.

    Raises:
        ProtocolError: No lender writes this, or the payload is above the limit.
    """
    count, rest = divmod(len(description) - _HEAD.size, _PIECE.size)
    if rest or not 1 <= count <= MAX_PIECES:
        raise ProtocolError(f"a loan is described in {len(description)} bytes")
    number, guard, receipt, nbytes = _HEAD.unpack_from(description)
    pieces = list(_PIECE.iter_unpack(memoryview(description)[_HEAD.size :]))
    if nbytes > max_nbytes:
        error = ProtocolError(f"the peer lends {nbytes} bytes, the limit is {max_nbytes}")
        error.__cause__ = MessageTooLargeError(nbytes, max_nbytes)
        raise error
    if not 0 < number <= MAX_NUMBER or guard % 8 or receipt % 8:
        raise ProtocolError("a loan has no number, or a word of it is not aligned")
    for address, length in [(guard, 8), (receipt, 8), *pieces]:
        if not address or not length or address + length > _HIGHEST_ADDRESS:
            raise ProtocolError(f"a loan has {length} bytes at {address:#x}")
    if sum(length for _, length in pieces) != nbytes:
        raise ProtocolError(f"a loan of {nbytes} bytes has pieces of another sum")
    return Loan(number, guard, receipt, nbytes, pieces)
