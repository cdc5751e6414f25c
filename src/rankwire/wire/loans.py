"""Loans: frames that say where their payload is in the sender's memory instead of carrying it.

Within a host, a frame with the flag ``LOAN`` has this description as payload, little-endian:

    ======  ====  ==================================================================
    offset  size  field
    ======  ====  ==================================================================
    0       8     number: unique in the lending process, not zero
    8       8     address of the guard: it holds the number while the memory may be read
    16      8     address of the receipt: the borrower writes the number there
    24      8     payload length in bytes
    32      16    a piece of the payload: its address and length; 1 to 512 of them
    ======  ====  ==================================================================

The borrower reads the pieces and then the guard. If the guard still holds the number, the pieces
are the payload, because the lender changes the guard before its memory changes; the borrower writes
the receipt and the lender continues. Otherwise the loan was revoked and the message was never sent.

If the lender gives up while the borrower writes its receipt, both must agree. The lender marks the
guard ``DECIDING``, looks for the receipt, and then writes the number again (sent) or ``REVOKED``.
After its receipt, the borrower reads the guard again and waits while the lender is deciding. A
borrower that cannot read the memory writes a ``REFUSED`` receipt; the payload then follows in the
stream.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from rankwire.errors import MessageTooLargeError, ProtocolError, RankwireError

# The kernel takes 1024 vectors per call, and the guard needs one.
MAX_PIECES = 512

_HEAD = struct.Struct("<QQQQ")
_PIECE = struct.Struct("<QQ")
_HIGHEST_ADDRESS = (1 << 63) - 1


# Flags in the upper bits of a word, beside the number.
DECIDING = 1 << 63
REVOKED = 1 << 62
REFUSED = 1 << 61
MAX_NUMBER = REFUSED - 1


class LoanRefusedError(RankwireError):
    """The borrower cannot read this memory; the payload must be sent another way."""


class Loan(NamedTuple):
    """Where a payload is."""

    number: int
    guard: int
    receipt: int
    nbytes: int
    pieces: list[tuple[int, int]]  # address and length


def pack_loan(
    number: int, guard: int, receipt: int, pieces: Iterable[tuple[int, int]], nbytes: int
) -> bytes:
    """Return the description of a loan, which ``unpack_loan`` reads."""
    head = _HEAD.pack(number, guard, receipt, nbytes)
    return head + b"".join(_PIECE.pack(address, length) for address, length in pieces)


def unpack_loan(description: bytearray, *, max_nbytes: int) -> Loan:
    """Return the loan that a frame describes, or raise ``ProtocolError``."""
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
    _check_addresses([(guard, 8), (receipt, 8), *pieces])
    if sum(length for _, length in pieces) != nbytes:
        raise ProtocolError(f"a loan of {nbytes} bytes has pieces of another sum")
    return Loan(number, guard, receipt, nbytes, pieces)


def _check_addresses(pieces: Iterable[tuple[int, int]]) -> None:
    for address, length in pieces:
        if not address or not length or address + length > _HIGHEST_ADDRESS:
            raise ProtocolError(f"a loan has {length} bytes at {address:#x}")
