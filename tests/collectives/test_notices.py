"""What ranks tell each other, there and back."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.collectives.notices import Notice, failure_notice, pack, unpack
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
)

# What is not printable is escaped, see below.
TEXTS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], include_characters="\n\t"))
NOTICES = st.builds(
    Notice,
    sequence=st.integers(0, 2**60),
    description=TEXTS,
    state=st.sampled_from(
        ["waiting", "convening", "asking", "roll", "done", "mismatch", "lost", "failed", "refused"]
    ),
    text=TEXTS,
    culprit=st.integers(-1, 10_000),
    epoch=st.integers(0, 2**60),
    here=st.lists(st.integers(0, 999)).map(tuple),
    ahead=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 2**60), TEXTS)).map(tuple),
    to_relay=st.booleans(),
    said_by=st.integers(-1, 10_000),
)


@given(NOTICES)
def test_a_notice_arrives_as_it_was_sent(notice):
    assert unpack(bytearray(pack(notice))) == notice


def test_a_waiting_rank_is_no_failure():
    assert not Notice(3, "barrier()").is_failure
    assert Notice(3, "barrier()", "failed").is_failure


@given(st.binary(max_size=40))
def test_foreign_bytes_are_refused_or_a_notice(payload):
    try:
        notice = unpack(bytearray(payload))
    except InvalidMessageError:
        return
    assert isinstance(notice, Notice)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1],
        ["1", "barrier()"],
        [1, "barrier()", "sleeping"],
        [1, "barrier()", "failed", "", 0, 0, [], [], False, -1, "more"],
        [1, "barrier()", "roll", "", 0, 0, ["one"]],
        [1, "barrier()", "roll", "", 0, 0, [1] * 65_537],
        [1, "barrier()", "roll", "", 0, 0, [], [[1, 1, ""]] * 65_537],
        {"sequence": 1, "description": "barrier()"},
    ],
)
def test_what_is_nearly_a_notice_is_refused(value):
    with pytest.raises(InvalidMessageError):
        unpack(bytearray(msgspec.msgpack.encode(value)))


@given(NOTICES, st.data())
def test_a_notice_cut_short_is_refused(notice, data):
    payload = pack(notice)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(InvalidMessageError):
        unpack(bytearray(payload[:cut]))


# -- failures, from one rank's error to another's --------------------------------------------------


def told(error, *, rank=2, sender=2):
    notice = failure_notice(Notice(7, "barrier()", epoch=5), rank, error)
    assert (notice.sequence, notice.description, notice.epoch) == (7, "barrier()", 5)
    assert notice.is_failure
    return unpack(bytearray(pack(notice))).error(sender)


def test_a_disagreement_is_one_for_everybody():
    error = told(CollectiveMismatchError("rank 0 is elsewhere").during(peer=0))
    assert type(error) is CollectiveMismatchError
    assert (error.message, error.peer) == ("rank 0 is elsewhere", 0)
    assert told(CollectiveMismatchError("somebody is elsewhere")).peer == 2


def test_a_lost_rank_is_named_by_everybody():
    error = told(PeerLostError(1, "it was killed"))
    assert type(error) is PeerLostError
    assert error.peer == 1
    assert "it was killed" in error.reason
    assert "rank 2 says" in error.reason


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ValueError("no such thing"), "ValueError('no such thing')"),
        (KeyboardInterrupt(), "KeyboardInterrupt()"),
        (ChannelClosedError("this backend is closed"), "this backend is closed"),
    ],
)
def test_any_other_failure_ends_the_operation(cause, text):
    error = told(cause)
    assert type(error) is CollectiveAbortedError
    assert error.peer == 2
    assert text in error.reason
    assert "barrier()" in error.reason


def test_who_was_late_is_in_what_the_others_hear():
    error = told(DeadlineExceededError(1.5, waiting_for=[3]))
    assert "waiting for rank 3" in error.message


def test_a_text_that_is_not_unicode_is_told_too():
    # As in the name of a file, say. If this failed, the others would not hear of the failure.
    error = told(InvalidMessageError("no file 'a\udc80'"))
    assert "no file 'a" in error.reason


def test_a_text_of_a_peer_is_short_and_harmless_to_a_terminal():
    notice = Notice(1, "all_reduce\x1b[2J", "failed", "begin" + "x" * 10**6 + "\x07 end")
    found = unpack(bytearray(pack(notice)))
    assert found.description == "all_reduce\\x1b[2J"
    assert len(found.text) <= 4000
    assert found.text.startswith("begin")
    assert found.text.endswith("\\x07 end")
    error = ValueError("y" * 10**6)
    assert len(failure_notice(Notice(1, "all_reduce"), 1, error).text) <= 4000


def test_a_rank_that_could_not_begin_says_so():
    notice = failure_notice(Notice(7, "reduce"), 2, ValueError("no such thing"), refused=True)
    assert notice.state == "refused"
    error = notice.error(2)
    assert type(error) is CollectiveAbortedError
    assert "rank 2 failed in reduce: ValueError('no such thing')" in str(error)


@pytest.mark.parametrize(
    "cause",
    [ValueError("none"), CollectiveMismatchError("elsewhere"), PeerLostError(1, "it was killed")],
)
def test_who_had_done_its_part_is_told_which_one_it_was(cause):
    error = failure_notice(Notice(7, "barrier()"), 2, cause).error(2, 3, is_news=True)
    assert "number 7 of this group, which had gone well on rank 3" in str(error)
