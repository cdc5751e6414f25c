"""The protocol of a connection, row by row: what it has come to, who may lend, how it ended."""

import random
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headers import pack_header
from rankwire.errors import (
    ChannelClosedError,
    MessageTooLargeError,
    PeerLostError,
    ProtocolError,
)
from rankwire.texts import MAX_REASON
from rankwire.wire.frames import LOAN, Channel, Frame, UnreadPayload
from rankwire.wire.loans import pack_loan
from rankwire.wire.parser import FrameParser
from rankwire.wire.protocol import (
    BELL,
    FAREWELL,
    ConnectionState,
    Protocol,
    StreamEvent,
    left,
)

LIMIT = 1000
FINAL = (
    ConnectionState.LEFT,
    ConnectionState.GIVEN_UP,
    ConnectionState.LOST,
    ConnectionState.SPOILED,
)
# The table of the module, once more and by hand.
TABLE = {
    (ConnectionState.UNUSED, StreamEvent.FRAMES): ConnectionState.OPEN,
    (ConnectionState.UNUSED, StreamEvent.FAREWELL): ConnectionState.LEFT,
    (ConnectionState.UNUSED, StreamEvent.END): ConnectionState.GIVEN_UP,
    (ConnectionState.UNUSED, StreamEvent.VIOLATION): ConnectionState.SPOILED,
    (ConnectionState.OPEN, StreamEvent.FRAMES): ConnectionState.OPEN,
    (ConnectionState.OPEN, StreamEvent.FAREWELL): ConnectionState.LEFT,
    (ConnectionState.OPEN, StreamEvent.END): ConnectionState.LOST,
    (ConnectionState.OPEN, StreamEvent.VIOLATION): ConnectionState.SPOILED,
}


class Borrowing:
    """Stands for who borrows: notes the loans, and makes parcels of them."""

    class Lent(UnreadPayload):
        def __init__(self, loan):
            self.loan = loan

        def __len__(self):
            return self.loan.nbytes

        def read_into(self, start, view):
            raise NotImplementedError

        def whole(self):
            raise NotImplementedError

        def release(self):
            raise NotImplementedError

    def __init__(self):
        self.loans = []

    def __call__(self, loan):
        self.loans.append(loan)
        return self.Lent(loan)


def make(*, incoming=False, is_local=True, cannot_borrow="", max_nbytes=LIMIT):
    return Protocol(
        peer=3,
        incoming=incoming,
        is_local=is_local,
        cannot_borrow=cannot_borrow,
        max_nbytes=max_nbytes,
    )


def message(payload=b"", *, tag=0, channel=Channel.MESSAGE):
    return Frame((0, int(channel), tag), bytearray(payload))


def greeting(says=0, reason=b""):
    return Frame((0, int(Channel.GREETING), says), bytearray(reason))


def farewell(payload=b""):
    return Frame(FAREWELL, bytearray(payload))


def described(nbytes=100):
    return pack_loan(1, 0x1000, 0x1008, [(0x2000, nbytes)], nbytes)


def loan(nbytes=100, *, tag=0, description=None):
    description = described(nbytes) if description is None else description
    return Frame((0, int(Channel.MESSAGE) | LOAN, tag), bytearray(description))


def parsed(*frames):
    """Return the frames after a trip as bytes."""
    stream = b"".join(
        pack_header(frame.envelope, len(frame.payload), sequence) + frame.payload
        for sequence, frame in enumerate(frames)
    )
    parser = FrameParser(max_nbytes=1 << 20)

    def read(room, counts):
        nonlocal stream
        if not stream:
            raise BlockingIOError
        piece, stream = stream[: len(room)], stream[len(room) :]
        room[: len(piece)] = piece
        counts.append(len(piece))

    try:
        while True:
            parser.read_by(read)
            parser.commit(parser.parse()[0])
    except BlockingIOError:
        return list(parser.frames)


def take(protocol, *frames):
    """Have a protocol hear frames that came as bytes; nothing may be wrong with them."""
    messages, violation = protocol.take(parsed(*frames), Borrowing())
    assert violation is None
    return messages


# -- the state: one row of the table each


def state_after(state, event):
    protocol = make()
    protocol.state = state
    protocol.on_event(event)
    return protocol.state


def test_a_connection_that_the_peer_dialled_is_unused_and_one_of_our_own_is_open():
    assert make(incoming=True).state is ConnectionState.UNUSED
    assert make(incoming=False).state is ConnectionState.OPEN


@pytest.mark.parametrize(("state", "event"), [*product(ConnectionState, StreamEvent)])
def test_every_row_of_the_table(state, event):
    assert state_after(state, event) is TABLE.get((state, event), state)


def test_the_table_is_as_long_as_the_states_that_are_not_final():
    assert set(TABLE) == set(product((ConnectionState.UNUSED, ConnectionState.OPEN), StreamEvent))
    assert {*FINAL, ConnectionState.UNUSED, ConnectionState.OPEN} == set(ConnectionState)


@given(st.sampled_from(ConnectionState), st.lists(st.sampled_from(StreamEvent)))
def test_no_event_leaves_a_final_state_or_goes_back_a_state(state, happenings):
    seen = [state]
    for event in happenings:
        seen.append(state_after(seen[-1], event))
    rank = [ConnectionState.UNUSED, ConnectionState.OPEN]
    for before, after in pairwise(seen):
        if before in FINAL:
            assert after is before
        elif after not in FINAL:
            assert rank.index(after) >= rank.index(before)


@given(st.sampled_from(ConnectionState), st.sampled_from(StreamEvent))
def test_what_happens_twice_in_a_row_has_happened_once(state, event):
    once = state_after(state, event)
    if (state, event) == (ConnectionState.UNUSED, StreamEvent.FRAMES):
        assert once is ConnectionState.OPEN
    assert state_after(once, event) is once


# -- the frames that make it move


@pytest.mark.parametrize("incoming", [True, False])
def test_a_farewell_is_the_end_whatever_comes_with_it_or_after_it(incoming):
    protocol = make(incoming=incoming)
    frames = (message(b"before"), farewell(b"ignored"), message(b"after"), greeting(1))
    assert take(protocol, *frames) == [message(b"before")]
    assert protocol.state is ConnectionState.LEFT
    assert protocol.can_lend is None  # the greeting came too late


def test_messages_of_every_channel_pass_as_they_came():
    protocol = make(incoming=True)
    courtesies = (Channel.FAREWELL, Channel.GREETING)
    frames = [
        message(bytes([channel]), tag=channel, channel=channel)
        for channel in Channel
        if channel not in courtesies
    ]
    assert take(protocol, *frames) == frames
    # That frames came is the reader's to say: it knows before it has a whole one.
    assert protocol.state is ConnectionState.UNUSED


def test_greetings_are_no_messages():
    protocol = make()
    assert take(protocol, greeting(), message(b"a"), greeting(1), message(b"b")) == [
        message(b"a"),
        message(b"b"),
    ]
    assert protocol.state is ConnectionState.OPEN


# -- lending


def test_whether_the_peer_can_borrow_is_not_known_before_it_says_so():
    protocol = make(is_local=True)
    assert (protocol.can_lend, protocol.why_not_lend) == (None, "")


def test_between_hosts_no_rank_lends_whatever_a_greeting_says():
    protocol = make(is_local=False, cannot_borrow="it is another host")
    assert (protocol.can_lend, protocol.why_not_lend) == (False, "it is another host")
    take(protocol, greeting(1))
    assert (protocol.can_lend, protocol.why_not_lend) == (False, "it is another host")


@pytest.mark.parametrize(
    ("says", "reason", "can_lend", "why_not"),
    [
        (0, b"", None, ""),
        (1, b"", True, ""),
        (1, b"ignored", True, ""),
        (2, b"", False, ""),
        (2, b"no right", False, "no right"),
        (3, b"from the future", None, ""),
        (2**64 - 1, b"", None, ""),
    ],
)
def test_what_a_greeting_says(says, reason, can_lend, why_not):
    protocol = make()
    assert take(protocol, greeting(says, reason)) == []
    assert (protocol.can_lend, protocol.why_not_lend) == (can_lend, why_not)


@pytest.mark.parametrize("cannot_borrow", ["", "the kernel forbids it: \u00e9"])
def test_one_end_learns_from_the_greeting_whether_the_other_can_borrow(cannot_borrow):
    speaking, hearing = make(cannot_borrow=cannot_borrow), make()
    envelope, (pieces, nbytes) = speaking.introduction()
    payload = b"".join(pieces)
    assert len(payload) == nbytes
    take(hearing, Frame(envelope, bytearray(payload)))
    assert hearing.can_lend is (cannot_borrow == "")
    assert hearing.why_not_lend == cannot_borrow


def test_a_greeting_that_only_says_that_this_end_is_there():
    hearing = make()
    envelope, (pieces, nbytes) = BELL
    assert (list(pieces), nbytes) == ([], 0)
    take(hearing, Frame(envelope, bytearray()))
    assert hearing.can_lend is None


@pytest.mark.parametrize("reason", [b"\x1b[2J\nred", bytes(range(256)), b"x" * 100_000])
def test_a_reason_is_one_short_printable_line(reason):
    protocol = make()
    take(protocol, greeting(2, reason))
    assert len(protocol.why_not_lend) <= MAX_REASON
    assert protocol.why_not_lend.replace("\t", " ").isprintable()


# -- loans


def test_a_loan_becomes_a_message_whose_payload_is_a_parcel():
    protocol, borrowing = make(), Borrowing()
    frames = parsed(message(b"before"), loan(77, tag=9), message(b"after"))
    messages, violation = protocol.take(frames, borrowing)
    assert violation is None
    assert [frame.envelope[2] for frame in messages] == [0, 9, 0]
    assert messages[1].envelope == (0, Channel.MESSAGE, 9)  # without the flag
    assert messages[1].payload.loan is borrowing.loans[0]
    assert [borrowed.nbytes for borrowed in borrowing.loans] == [77]


@pytest.mark.parametrize(
    ("cannot_borrow", "frame"),
    [
        ("no right", loan()),
        ("", loan(description=b"")),
        ("", loan(description=described() + b"x")),
        ("", loan(LIMIT + 1)),
    ],
    ids=["to who cannot read it", "empty", "of another length", "above the limit"],
)
def test_a_loan_that_is_not_allowed_spoils_what_follows_and_not_what_was_before(
    cannot_borrow, frame
):
    protocol, borrowing = make(cannot_borrow=cannot_borrow), Borrowing()
    frames = parsed(message(b"before"), frame, message(b"after"), farewell())
    messages, violation = protocol.take(frames, borrowing)
    assert messages == [message(b"before")]
    assert isinstance(violation, ProtocolError)
    assert not borrowing.loans
    assert protocol.state is ConnectionState.OPEN  # the owner says that it is spoiled


def test_the_error_for_a_loan_above_the_limit_has_size_and_limit():
    _, violation = make().take([loan(LIMIT + 1)], Borrowing())
    assert isinstance(violation.__cause__, MessageTooLargeError)


@given(st.binary(max_size=200))
def test_garbage_in_a_loan_is_a_loan_or_a_violation(description):
    borrowing = Borrowing()
    messages, violation = make().take([loan(description=description)], borrowing)
    assert len(messages) == len(borrowing.loans) == (violation is None)


# -- repeating


FRAMES = st.one_of(
    st.builds(message, st.binary(max_size=5), tag=st.integers(0, 3)),
    st.builds(greeting, st.integers(0, 3), st.binary(max_size=5)),
    st.builds(loan, st.integers(1, LIMIT + 2), tag=st.integers(0, 3)),
    st.builds(farewell),
)


def summary(protocol, messages, violation):
    payloads = [
        frame.payload if isinstance(frame.payload, bytearray) else frame.payload.loan
        for frame in messages
    ]
    envelopes = [frame.envelope for frame in messages]
    lending = (protocol.can_lend, protocol.why_not_lend)
    return protocol.state, lending, envelopes, payloads, repr(violation)


@given(st.lists(FRAMES, max_size=8), st.booleans(), st.sampled_from(["", "no"]))
def test_taking_the_same_frames_again_changes_nothing(frames, incoming, cannot_borrow):
    """A reader that was interrupted comes with the same frames."""
    once = make(incoming=incoming, cannot_borrow=cannot_borrow)
    again = make(incoming=incoming, cannot_borrow=cannot_borrow)
    first = summary(once, *once.take(frames, Borrowing()))
    again.take(frames[: random.Random(len(frames)).randint(0, len(frames))], Borrowing())
    again.take(frames, Borrowing())
    assert summary(again, *again.take(frames, Borrowing())) == first


@given(st.lists(FRAMES, max_size=8), st.integers(0, 8))
def test_frames_taken_one_by_one_have_the_same_effect_as_together(frames, cut):
    if any(frame.envelope == FAREWELL for frame in frames[:cut]):
        cut = len(frames)  # nothing comes after a farewell
    together, apart = make(), make()
    messages, violation = together.take(frames, Borrowing())
    first, wrong = apart.take(frames[:cut], Borrowing())
    if wrong is None:
        second, wrong = apart.take(frames[cut:], Borrowing())
        first = first + second
    assert summary(apart, first, wrong) == summary(together, messages, violation)


# -- how it ended


@pytest.mark.parametrize(
    ("state", "in_frame", "reason", "kind", "text"),
    [
        (ConnectionState.UNUSED, False, "", ChannelClosedError, "never used"),
        (ConnectionState.UNUSED, False, "reset", ChannelClosedError, "never used"),
        (ConnectionState.GIVEN_UP, False, "", ChannelClosedError, "never used"),
        (ConnectionState.LEFT, False, "", ChannelClosedError, "rank 3 has left"),
        (ConnectionState.LEFT, True, "reset", ChannelClosedError, "rank 3 has left"),
        (ConnectionState.OPEN, False, "", PeerLostError, "its connection ended"),
        (ConnectionState.OPEN, True, "", PeerLostError, "in the middle of a message"),
        (ConnectionState.OPEN, True, "reset by peer", PeerLostError, "reset by peer"),
        (ConnectionState.LOST, False, "", PeerLostError, "its connection ended"),
        (ConnectionState.SPOILED, False, "", PeerLostError, "its connection ended"),
    ],
)
def test_what_an_end_of_the_stream_means(state, in_frame, reason, kind, text):
    protocol = make()
    protocol.state = state
    error = protocol.end_of_stream(in_frame=in_frame, reason=reason)
    assert type(error) is kind
    assert text in str(error)
    assert error.peer == 3
    assert protocol.state is state  # to ask changes nothing


def test_an_end_says_that_it_was_in_the_middle_only_if_it_was():
    protocol = make()
    assert "middle" not in str(protocol.end_of_stream(in_frame=False))


def test_a_rank_that_has_left_is_named():
    assert "rank 7 has left" in str(left(7))
    assert left(7).peer == 7
