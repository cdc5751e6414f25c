"""Notices about collectives: there and back, and nothing else is taken for one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError
from rankwire.wire.control_messages import Notice, pack, unpack

# What is not printable is escaped, see below.
TEXTS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], include_characters="\n\t"))
NUMBERS = st.integers(-(2**62), 2**62)
RANKS = st.lists(st.integers(0, 9999), max_size=50).map(tuple)
NOTICES = st.builds(
    Notice,
    group=st.integers(0, 2**64 - 1),
    sequence=NUMBERS,
    description=TEXTS,
    state=st.sampled_from(
        ["waiting", "asking", "missing", "mismatch", "lost", "left", "failed", "refused"]
    ),
    text=TEXTS,
    culprit=st.integers(-1, 10_000),
    epoch=NUMBERS,
    missing=RANKS,
    where=TEXTS,
    before=st.lists(st.tuples(NUMBERS, TEXTS), max_size=8).map(tuple),
    descriptions=st.lists(TEXTS, max_size=2).map(tuple),
    members=RANKS,
    src=st.integers(-1, 10_000),
)


@given(NOTICES)
def test_a_notice_arrives_as_it_was_sent(notice):
    assert unpack(bytearray(pack(notice))) == notice


def test_a_waiting_rank_is_no_failure():
    assert not Notice(0, 3, "barrier()").is_failure
    assert not Notice(0, 3, "barrier()", "asking").is_failure
    assert Notice(0, 3, "barrier()", "failed").is_failure


@pytest.mark.parametrize(
    "change",
    [
        {"group": -1},
        {"group": 2**64},
        {"sequence": "1"},
        {"sequence": 2**63},
        {"state": "sleeping"},
        {"missing": ["one"]},
        {"missing": [1] * 16_385},
        {"members": [1] * 16_385},
        {"before": [[1, "barrier()"]] * 9},
        {"before": [[1]]},
        {"descriptions": ["barrier()"] * 3},
    ],
)
def test_what_is_nearly_a_notice_is_refused(change):
    value = {"type": "notice", "group": 0, "sequence": 1, "description": "barrier()"}
    assert unpack(bytearray(msgspec.msgpack.encode(value))) == Notice(0, 1, "barrier()")
    with pytest.raises((InvalidMessageError, OverflowError)):
        unpack(bytearray(msgspec.msgpack.encode(value | change)))


def test_texts_of_a_peer_are_short_and_harmless_to_a_terminal():
    long = "begin" + "x" * 10**6 + "\x07 end"
    notice = Notice(
        0, 1, "all_reduce\x1b[2J", "failed", long, where=long, before=((1, long),),
        descriptions=(long,),
    )  # fmt: skip
    for payload in (pack(notice), msgspec.msgpack.encode(notice)):
        found = unpack(bytearray(payload))
        assert found.description == "all_reduce\\x1b[2J"
        for text in (found.text, found.where, found.before[0][1], found.descriptions[0]):
            assert len(text) <= 4000
            assert text.startswith("begin")
            assert text.endswith("\\x07 end")


def test_a_text_that_is_not_unicode_is_sent_too():
    """As in the name of a file, say. If this failed, the others would not hear of the failure."""
    found = unpack(bytearray(pack(Notice(0, 1, "barrier()", "failed", "no file 'a\udc80'"))))
    assert found.text.startswith("no file 'a")
