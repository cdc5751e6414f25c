"""Control messages: what is packed is what is unpacked, and nothing else is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError
from rankwire.wire.control_messages import (
    MAX_MEMBER_NBYTES,
    Beat,
    Failed,
    Fallen,
    Gone,
    Join,
    Member,
    Notice,
    Waiting,
    World,
    max_coordinator_nbytes,
    pack,
    unpack,
)

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
    Gone(3, "it raised ValueError: no", traceback="Traceback ...\n  File x\nValueError: no"),
    Fallen("it raised ValueError: no", "Traceback ...\n"),
    Beat(),
    Beat([(1, 2.5), (4000, 0.5)]),
    Notice(0, 3, "barrier()"),
    Notice(2**64 - 1, 3, "", "missing", missing=(1, 4), members=(0, 1, 4), src=4),
]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_what_is_packed_is_unpacked(message):
    assert unpack(bytearray(pack(message))) == message


def test_messages_of_all_kinds_are_unpacked_as_their_kind():
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
        {"type": "beat", "silent": {1: 2.0}},
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
def test_random_bytes_give_no_other_error(payload):
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


RAW = msgspec.msgpack.Encoder().encode  # as a peer that keeps to nothing


@pytest.mark.parametrize(
    "message", [Fallen("r" * 10**6, "t" * 10**7), Gone(1, "r" * 10**6, traceback="t" * 10**7)]
)
def test_a_long_traceback_is_cut_in_the_middle_by_both_ends(message):
    message = msgspec.structs.replace(message, traceback="BEGIN" + message.traceback + "END")
    for payload in (pack(message), RAW(message)):
        found = unpack(bytearray(payload))
        assert len(found.reason) <= 500
        assert len(found.traceback) <= 32_768
        assert found.traceback.startswith("BEGIN")
        assert "characters left out" in found.traceback
        assert found.traceback.endswith("END")
    assert len(pack(message)) <= MAX_MEMBER_NBYTES


def test_texts_of_a_peer_cannot_control_a_terminal():
    escape = "\x1b]0;owned\x07\x1b[2J\r\x9b31m"
    for message in (
        Fallen(f"a{escape}\nb", f"first\n\tsecond{escape}"),
        Gone(1, f"a{escape}\nb", traceback=f"first\n\tsecond{escape}"),
        Failed(f"a{escape}\nb", []),
    ):
        found = unpack(bytearray(RAW(message)))
        assert found.reason.startswith("a\\x1b]0;owned\\x07")
        assert found.reason.isprintable()
        trace = getattr(found, "traceback", "")
        assert all(line.replace("\t", "").isprintable() for line in trace.split("\n"))


def test_what_4096_ranks_need_fits():
    longest = Member(2**31, 2**22, "h" * 255, 65_535, "/" * 107, "i" * 120)
    world = World(2**32 - 1, [longest] * 4096)
    assert len(pack(world)) <= max_coordinator_nbytes(4096)
    assert max_coordinator_nbytes(4096) <= 5 << 20
    assert len(pack(Beat([(rank, 1e9) for rank in range(4096)]))) < MAX_MEMBER_NBYTES
    assert len(pack(Waiting(list(range(4096))))) < MAX_MEMBER_NBYTES
    longest_text, ranks = "\U0001f600" * 10**6, tuple(range(49152, 65536))
    notice = Notice(2**64 - 1, 2**60, longest_text, "failed", longest_text, 1, 2**60, ranks)
    many = {"before": ((2**60, longest_text),) * 8, "descriptions": (longest_text,) * 8}
    notice = msgspec.structs.replace(notice, where=longest_text, members=ranks, **many)
    assert len(pack(notice)) < MAX_MEMBER_NBYTES
    assert len(pack(Fallen("\U0001f600" * 10**6, "\U0001f600" * 10**6))) < MAX_MEMBER_NBYTES


@pytest.mark.parametrize("field", ["host", "unix_path", "host_id"])
@pytest.mark.parametrize("text", ["x" * 256, "escape\x1b[2J", "\x9b", "line\n", "\u202eback"])
def test_a_member_whose_names_are_too_long_or_unprintable_is_refused(field, text):
    """It is told to all, and one member must not make that longer than they read."""
    member = msgspec.structs.replace(MEMBERS[1], **{field: text})
    with pytest.raises(InvalidMessageError, match=field):
        unpack(bytearray(RAW(Join(member))))


@pytest.mark.parametrize("port", [-1, 65_536, 2**40])
def test_a_member_at_a_port_that_cannot_be_is_refused(port):
    """Where it is used it would be another one: 70000 is 4464 to the system."""
    member = msgspec.structs.replace(MEMBERS[1], port=port)
    with pytest.raises(InvalidMessageError, match="port"):
        unpack(bytearray(RAW(Join(member))))


def test_a_beat_lists_no_more_silent_ranks_than_anyone_reads():
    silent = [(rank, 1.0) for rank in range(10_000)]
    assert unpack(bytearray(pack(Beat(silent)))) == Beat(silent[:4096])
    assert unpack(bytearray(RAW(Beat(silent)))) == Beat(silent[:4096])
