"""Requests and replies as bytes: the codec tests of the seeds, and strictness."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.codec.codec import Codec
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    FunctionNotFoundError,
    InvalidMessageError,
    MessageTooLargeError,
    OverloadedError,
    RankwireError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.rpc.messages import (
    Outcome,
    Request,
    decode_reply,
    decode_request,
    encode_failure,
    encode_reply,
    encode_request,
    encode_result,
)

CODEC = Codec()
CHAIN = [0, "f", 1, "g"]


def joined(encoded):
    buffers, nbytes = encoded
    payload = bytearray().join(buffers)
    assert len(payload) == nbytes
    return payload


def raised(encoded):
    with pytest.raises(RankwireError) as info:
        decode_reply(CODEC, joined(encoded), 1, 5.0)
    return info.value


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("add", (1, 2, 3), {}),
        ("empty", (), {}),
        ("n" * 1000, (b"x" * 10_000,), {"key": [None]}),
    ],
)
def test_a_request_round_trips(name, args, kwargs):
    request = decode_request(CODEC, joined(encode_request(CODEC, name, 1.5, CHAIN, args, kwargs)))
    assert request == Request(name, 1.5, CHAIN, list(args), kwargs)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_arguments_and_results_nest_32_deep_and_no_deeper(wrap):
    deep = 1
    for _ in range(32):
        deep = wrap(deep)
    request = decode_request(
        CODEC, joined(encode_request(CODEC, "f", 1.0, [], (deep,), {"key": deep}))
    )
    assert (request.args, request.kwargs) == ([deep], {"key": deep})
    assert decode_reply(CODEC, joined(encode_result(CODEC, deep)), 1, 5.0) == deep
    for args, kwargs in (((wrap(deep),), {}), ((), {"key": wrap(deep)})):
        with pytest.raises(UnsupportedTypeError, match="32"):
            encode_request(CODEC, "f", 1.0, [], args, kwargs)
    with pytest.raises(UnsupportedTypeError, match="32"):
        encode_result(CODEC, wrap(deep))


def test_a_result_round_trips():
    assert decode_reply(CODEC, joined(encode_result(CODEC, (4, 5, 6))), 1, 5.0) == (4, 5, 6)
    assert decode_reply(CODEC, joined(encode_result(CODEC, None)), 1, 5.0) is None


def failure(error):
    try:
        raise error
    except BaseException as caught:
        return encode_failure(CODEC, caught)


def test_a_failure_round_trips_with_type_text_and_traceback():
    error = raised(failure(ZeroDivisionError("something went wrong")))
    assert isinstance(error, RemoteError)
    assert (error.remote_type, error.remote_message) == (
        "ZeroDivisionError",
        "something went wrong",
    )
    assert "something went wrong" in error.remote_traceback


def test_the_reply_names_the_classes_by_which_an_error_may_be_caught():
    assert raised(failure(KeyError("x"))).remote_bases == ("LookupError",)
    assert raised(failure(Nasty())).remote_bases == ()
    assert raised(failure(SystemExit(3))).remote_bases == ()
    assert raised(failure(OverloadedError("full"))).remote_bases == ()  # of rankwire: text alone


def test_a_failure_that_was_remote_already_keeps_its_type():
    error = raised(failure(RemoteError("KeyError", "'x'", "far away", remote_bases=["A", "B"])))
    assert error.remote_bases == ("A", "B")
    assert (error.remote_type, error.remote_message) == ("KeyError", "'x'")
    assert "far away" in error.remote_traceback


class Nasty(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.fault(25, "an exception whose own text cannot be made is still reported")
def test_an_exception_whose_text_fails_is_still_reported():
    error = raised(failure(Nasty()))
    assert error.remote_type.endswith("Nasty")


@pytest.mark.fault(25, "the text and traceback of an error are bounded")
def test_huge_and_unprintable_texts_are_bounded():
    error = raised(failure(ValueError("x" * 1_000_000 + "\udc80")))
    assert len(error.remote_message) <= 70_000
    assert len(error.remote_traceback) <= 70_000


def test_a_chain_of_numbers_that_are_no_ranks_is_refused():
    """They could not even be printed."""
    for rank in (10**5000, -1):
        payload = joined(CODEC.encode(["f", 1.0, [rank, "g"], [], {}]))
        with pytest.raises(InvalidMessageError):
            decode_request(CODEC, payload)


def test_a_chain_of_names_longer_than_names_are_is_refused():
    """They are printed in errors, and travel on with every nested call."""
    for name, is_one in (("g" * 60_000, True), ("g" * 70_000, False)):
        payload = joined(CODEC.encode(["f", 1.0, [1, name], [], {}]))
        if is_one:
            assert decode_request(CODEC, payload).chain == [1, name]
        else:
            with pytest.raises(InvalidMessageError):
                decode_request(CODEC, payload)


def test_a_reason_that_repeats_what_the_caller_said_is_bounded():
    _, nbytes = encode_reply(CODEC, Outcome.BAD_REQUEST, "x" * 10**7)
    assert nbytes < 70_000


def test_texts_of_a_callee_that_keeps_to_nothing_are_bounded_and_harmless():
    escape, long = "\x1b[2J", "x" * 10**6
    error = raised(
        encode_reply(CODEC, Outcome.RAISED, [escape + long] * 2 + [long, [escape + long] * 100])
    )
    assert len(error.remote_type) <= 500
    assert len(error.remote_message) <= 65_536
    assert len(error.remote_traceback) <= 65_536
    assert "\x1b" not in str(error)
    assert max(map(len, error.remote_bases)) <= 500
    assert len(error.remote_bases) <= 32
    assert "\x1b" not in "".join(error.remote_bases)
    error = raised(
        encode_reply(CODEC, Outcome.NOT_FOUND, [long, [escape] * 10**5 + [long, 10**5000], long])
    )
    assert len(str(error)) < 20_000
    assert "\x1b" not in str(error)
    for outcome in (Outcome.BAD_REQUEST, Outcome.OVERLOADED, Outcome.CLOSED):
        error = raised(encode_reply(CODEC, outcome, escape + long))
        assert len(str(error)) < 70_000
        assert "\x1b" not in str(error)


@pytest.mark.parametrize(
    "record",
    [[10**5000, None], [np.zeros(2), None], [6, [10**5000, 1]], [6, [-(10**5000), 1]]],
    ids=["a wide outcome", "an array", "a wide size", "a negative size"],
)
def test_a_number_that_cannot_be_printed_is_a_protocol_error(record):
    assert type(raised(CODEC.encode(record))) is InvalidMessageError


@pytest.mark.parametrize(
    ("outcome", "details", "kind"),
    [
        (Outcome.NOT_FOUND, ["f", ["g"], ""], FunctionNotFoundError),
        (Outcome.BAD_REQUEST, "why", InvalidMessageError),
        (Outcome.OVERLOADED, "why", OverloadedError),
        (Outcome.TOO_LARGE, [2, 1], MessageTooLargeError),
        (Outcome.CLOSED, ["why", True], ChannelClosedError),
        (Outcome.EXPIRED, ["why", False], DeadlineExceededError),
        (Outcome.CANCELLED, None, RemoteError),
    ],
)
def test_every_outcome_has_its_error(outcome, details, kind):
    assert type(raised(encode_reply(CODEC, outcome, details))) is kind


@pytest.mark.parametrize("began", [True, False])
def test_a_call_that_was_cut_short_says_whether_it_had_begun(began):
    closed = raised(encode_reply(CODEC, Outcome.CLOSED, ["why", began]))
    late = raised(encode_reply(CODEC, Outcome.EXPIRED, ["why", began]))
    assert closed.may_have_run is late.may_have_run is began
    assert (late.limit, late.waiting_for, late.detail) == (5.0, [1], "why")


@pytest.mark.parametrize(
    "record",
    [
        [],
        ["name", 1.0, [], []],
        ["name", 1.0, [], [], {}, 1],
        [1, 1.0, [], [], {}],
        ["name", 1, [], [], {}],
        ["name", float("nan"), [], [], {}],
        ["name", -1.0, [], [], {}],
        ["name", 1.0, 0, [], {}],
        ["name", 1.0, ["f"], [], {}],
        ["name", 1.0, [0, 1], [], {}],
        ["name", 1.0, [True, "f"], [], {}],
        ["name", 1.0, [0, "f", 1], [], {}],
        ["name", 1.0, [], (), {}],
        ["name", 1.0, [], [], {1: 2}],
        "name",
        None,
    ],
)
def test_a_request_of_another_form_is_refused(record):
    with pytest.raises(InvalidMessageError):
        decode_request(CODEC, joined(CODEC.encode(record)))


@pytest.mark.parametrize("record", [[], [0], [0, 1, 2], [99, None], ["x", 1], [1, "text"], None])
def test_a_reply_of_another_form_is_refused(record):
    with pytest.raises(InvalidMessageError):
        decode_reply(CODEC, joined(CODEC.encode(record)), 1, 5.0)


@given(st.binary(max_size=200))
def test_garbage_is_only_ever_a_protocol_error(data):
    for decode, context in ((decode_request, ()), (decode_reply, (1, 5.0))):
        try:
            decode(CODEC, bytearray(data), *context)
        except RankwireError:
            pass


def test_mutated_messages_are_only_ever_protocol_errors():
    source = random.Random(4)
    good = joined(encode_request(CODEC, "add", 1.5, CHAIN, (1, (2,), b"x" * 5000), {"key": [None]}))
    for _ in range(20_000):
        bad = bytearray(good)
        for _ in range(source.randint(1, 4)):
            bad[source.randrange(len(bad))] = source.randrange(256)
        try:
            decode_request(CODEC, bad)
        except RankwireError:
            pass
