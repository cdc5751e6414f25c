"""Loans: these bytes and no others say where a payload lies."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import MessageTooLargeError, ProtocolError
from rankwire.links.memory import allocate
from rankwire.wire.frames import UnreadPayload, whole_of
from rankwire.wire.loans import MAX_NUMBER, MAX_PIECES, Loan, pack_loan, unpack_loan
from rankwire.wire.receive import MessageWithdrawnError

LIMIT = 1 << 30
U64 = 2**64 - 1
HEAD = 32  # number, guard, receipt, payload length
PIECE = 16  # address, length


def described(number=1, guard=0x1000, receipt=0x1008, pieces=((0x2000, 100),), nbytes=None):
    """Return the description of a loan, valid unless it is told otherwise."""
    nbytes = sum(length for _, length in pieces) if nbytes is None else nbytes
    return bytearray(pack_loan(number, guard, receipt, pieces, nbytes))


def unpack(description, *, max_nbytes=LIMIT):
    return unpack_loan(bytearray(description), max_nbytes=max_nbytes)


# -- the bytes


def test_a_description_is_these_bytes():
    packed = pack_loan(
        0x0102030405060708, 0x1000, 0x1008, [(0x7F0000000010, 0x40000), (0x20, 1)], 0x40001
    )
    assert packed == bytes.fromhex(
        "0807060504030201"  # number
        "0010000000000000"  # guard
        "0810000000000000"  # receipt
        "0100040000000000"  # payload length
        "1000 0000 007f 0000  0000 0400 0000 0000"
        "2000 0000 0000 0000  0100 0000 0000 0000"
    )
    assert unpack(packed) == Loan(
        0x0102030405060708,
        0x1000,
        0x1008,
        0x40001,
        [(0x7F0000000010, 0x40000), (0x20, 1)],
    )


words = st.integers(1, 2**60 - 3).map(lambda word: 8 * word)
addresses = st.integers(1, 2**62)
lengths = st.integers(1, 1 << 20)
loans = st.builds(
    lambda number, guard, receipt, pieces: Loan(
        number, guard, receipt, sum(length for _, length in pieces), pieces
    ),
    st.integers(1, MAX_NUMBER),
    words,
    words,
    st.lists(st.tuples(addresses, lengths), min_size=1, max_size=20),
)


@given(loan=loans)
def test_a_loan_comes_out_as_it_went_in(loan):
    packed = pack_loan(loan.number, loan.guard, loan.receipt, loan.pieces, loan.nbytes)
    assert len(packed) == HEAD + PIECE * len(loan.pieces)
    assert unpack(packed) == loan


@pytest.mark.parametrize("count", [1, 2, MAX_PIECES])
def test_a_loan_has_one_to_512_pieces(count):
    assert MAX_PIECES == 512
    pieces = [(0x10000 + 64 * index, 1 + index % 7) for index in range(count)]
    assert unpack(described(pieces=pieces)).pieces == pieces


@pytest.mark.parametrize("count", [0, MAX_PIECES + 1, 1024, 4000])
def test_another_number_of_pieces_is_refused(count):
    with pytest.raises(ProtocolError, match=f"in {HEAD + PIECE * count} bytes"):
        unpack(described(pieces=[(0x2000, 1)] * count))


# -- what is refused


@pytest.mark.parametrize(
    "description",
    [
        described(number=0),
        described(guard=0),
        described(receipt=0),
        *(described(guard=0x1000 + step) for step in (1, 4, 7)),
        *(described(receipt=0x1008 + step) for step in (1, 4, 7)),
        described(guard=2**63),
        described(guard=2**63 - 8),
        described(receipt=U64 - 7),
        described(pieces=[(0, 100)]),
        described(pieces=[(0x2000, 0)]),
        described(pieces=[(0x2000, 100), (0x3000, 0)]),
        described(pieces=[(2**63 - 100, 100)]),
        described(pieces=[(U64, 1)]),
        described(pieces=[(U64 - 10, 100)]),
        described(nbytes=0),
        described(nbytes=99),
        described(nbytes=101),
        described(pieces=[(0x2000, 2**63), (0x3000, 2**63)], nbytes=0),
        described(pieces=[(0x2000, U64), (0x3000, 101)], nbytes=100),
    ],
    ids=lambda description: bytes(description).hex("-", 8)[:71],
)
def test_what_no_lender_writes_is_refused(description):
    with pytest.raises(ProtocolError):
        unpack(description)


@pytest.mark.parametrize(
    "address",
    [1, 0xFFF, 2**47, 2**63 - 102],
)
def test_a_piece_may_be_anywhere_below_the_highest_address(address):
    assert unpack(described(pieces=[(address, 100)])).pieces == [(address, 100)]


@pytest.mark.parametrize(("limit", "nbytes"), [(99, 100), (0, 1), (LIMIT, LIMIT + 1), (100, U64)])
def test_a_payload_above_the_limit_is_refused_with_size_and_limit(limit, nbytes):
    with pytest.raises(ProtocolError, match=f"{nbytes} bytes, the limit is {limit}") as caught:
        unpack(described(pieces=[(0x2000, 100)], nbytes=nbytes), max_nbytes=limit)
    assert isinstance(caught.value.__cause__, MessageTooLargeError)
    assert (caught.value.__cause__.nbytes, caught.value.__cause__.limit) == (nbytes, limit)


def test_the_limit_itself_is_accepted():
    assert unpack(described(), max_nbytes=100).nbytes == 100
    assert unpack(described(pieces=[(8, LIMIT)])).nbytes == LIMIT


@given(loan=loans, cut=st.integers(0, HEAD + PIECE))
def test_a_description_that_is_cut_short_is_refused(loan, cut):
    packed = pack_loan(loan.number, loan.guard, loan.receipt, loan.pieces, loan.nbytes)
    keep = max(0, len(packed) - 1 - cut)
    with pytest.raises(ProtocolError):
        unpack(packed[:keep])


@given(loan=loans, more=st.binary(min_size=1, max_size=2 * PIECE))
def test_a_description_with_something_behind_it_is_refused(loan, more):
    packed = pack_loan(loan.number, loan.guard, loan.receipt, loan.pieces, loan.nbytes)
    with pytest.raises(ProtocolError):
        unpack(packed + more)  # one more piece does not fit the sum


def check(description):
    """Unpack; return whether that gave a loan, which is then one that a lender may write."""
    try:
        loan = unpack(description)
    except ProtocolError:
        return False
    assert loan.number
    assert sum(length for _, length in loan.pieces) == loan.nbytes <= LIMIT
    assert 1 <= len(loan.pieces) <= MAX_PIECES
    for address, length in [(loan.guard, 8), (loan.receipt, 8), *loan.pieces]:
        assert 0 < address < address + length < 2**63
    assert loan.guard % 8 == loan.receipt % 8 == 0
    assert pack_loan(loan.number, loan.guard, loan.receipt, loan.pieces, loan.nbytes) == description
    return True


def test_20000_random_descriptions_give_a_sound_loan_or_a_protocol_error():
    chance = random.Random("rankwire loans")
    accepted = 0
    for _ in range(20_000):
        match chance.randrange(4):
            case 0:
                description = chance.randbytes(chance.randrange(200))
            case 1:  # the right length
                description = chance.randbytes(HEAD + PIECE * chance.randrange(5))
            case 2:  # plausible words
                count = chance.randrange(1, 5)
                numbers = chance.choices((0, 1, 7, 8, 4096, 2**47, 2**63, U64), k=4 + 2 * count)
                description = struct.pack(f"<{len(numbers)}Q", *numbers)
            case _:  # a valid one with a few bits changed
                pieces = [(chance.randrange(1, 2**47), 64) for _ in range(chance.randrange(1, 5))]
                changed = described(pieces=pieces)
                for _ in range(chance.randrange(3)):
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
                description = bytes(changed)
        accepted += check(description)
    assert 1_000 < accepted < 19_000, "the fuzzer must reach both ends"


# -- parcels


class Held(UnreadPayload):
    """A parcel whose bytes are here."""

    def __init__(self, data):
        self.data = data
        self.is_back = False

    def __len__(self):
        return len(self.data)

    def read_into(self, start, view):
        if self.is_back:
            raise MessageWithdrawnError("too late")
        view[:] = self.data[start : start + len(view)]

    def whole(self):
        memory = allocate(len(self))
        self.read_into(0, memoryview(memory))
        self.release()
        return memory

    def release(self):
        self.is_back = True
        return True


def test_the_whole_of_a_payload_is_a_bytearray_wherever_it_was():
    here = bytearray(b"here")
    assert whole_of(here) is here
    parcel = Held(b"elsewhere")
    whole = whole_of(parcel)
    assert type(whole) is bytearray
    assert whole == b"elsewhere"
    assert parcel.is_back
