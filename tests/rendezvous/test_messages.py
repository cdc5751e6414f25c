"""Control messages: what is packed is what is unpacked, and nothing else is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError
from rankwire.rendezvous.messages import Failed, Gone, Join, Member, Waiting, World, pack, unpack

MEMBERS = [
    Member(0, 11, "10.0.0.1", 29500, "", "a/1"),
    Member(1, 12, "::1", 40001, "/run/user/1/rankwire/1-12-ab.sock", "b/2"),
]

MESSAGES = [
    Join(MEMBERS[1]),
    Waiting([]),
    Waiting([2, 3, 5]),
    World(4_294_967_295, MEMBERS),
    Failed("the world did not form within 3 s", [1, 7]),
    Gone(1, "its connection ended", orderly=False),
    Gone(2, "", orderly=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_what_is_packed_is_unpacked(message):
    assert unpack(bytearray(pack(message))) == message


def test_the_kinds_are_told_apart():
    """Failed and Waiting have fields of the same kinds; the tag decides, not the shape."""
    kinds = [type(unpack(bytearray(pack(message)))) for message in MESSAGES]
    assert kinds == [type(message) for message in MESSAGES]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_message_cut_anywhere_is_refused(message):
    whole = pack(message)
    for end in range(len(whole)):
        with pytest.raises(InvalidMessageError):
            unpack(bytearray(whole[:end]))


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_message_with_bytes_after_it_is_refused(message):
    with pytest.raises(InvalidMessageError):
        unpack(bytearray(pack(message) + b"\0"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        {},
        "join",
        {"type": "unheard of"},
        {"type": "join"},
        {"type": "join", "member": {"rank": 1}},
        {"type": "waiting", "missing": "1"},
        {"type": "waiting", "missing": [1.5]},
        {"type": "gone", "rank": "1", "reason": "", "orderly": True},
        {"type": "gone", "rank": 1, "reason": "", "orderly": 1},
        {"type": "failed", "reason": b"bytes", "missing": []},
        {"type": "world", "epoch": 1, "members": [None]},
    ],
    ids=repr,
)
def test_a_value_that_is_no_message_is_refused(value):
    with pytest.raises(InvalidMessageError):
        unpack(bytearray(msgspec.msgpack.encode(value)))


def test_text_that_is_not_utf8_is_refused():
    payload = pack(Failed("reason", [])).replace(b"reason", b"\xff\xfe\xfd\xfc\xfb\xfa")
    with pytest.raises(InvalidMessageError):
        unpack(bytearray(payload))


def test_nesting_without_end_is_refused():
    with pytest.raises(InvalidMessageError):
        unpack(bytearray(b"\x81\xa4type" + b"\x91" * 100_000))


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_give_no_other_error(payload):
    try:
        unpack(bytearray(payload))
    except InvalidMessageError:
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_gives_no_other_error(message, data):
    payload = bytearray(pack(message))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        unpack(payload)
    except InvalidMessageError:
        pass
