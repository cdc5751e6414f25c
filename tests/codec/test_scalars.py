"""Scalars as bytes: exact both ways, and bytes that no packer wrote raise an ordinary exception."""

from __future__ import annotations

import decimal
import math
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.codec.scalars import PACKERS, UNPACKERS

ZONES = st.none() | st.timedeltas(
    timedelta(hours=-24, microseconds=1), timedelta(hours=24, microseconds=-1)
).map(timezone)


_INT64 = st.integers(-(2**63), 2**63 - 1)
RANGES = st.builds(range, _INT64, _INT64, _INT64.filter(bool))
PATHS = st.builds(
    lambda kind, text: kind(text),
    st.sampled_from([PurePosixPath, PureWindowsPath, type(Path())]),
    st.text(st.characters(codec=None)),
)


class Undecided(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return None


def roundtrip(value: Any) -> Any:
    code, pack = PACKERS[type(value)]
    return UNPACKERS[code](memoryview(pack(value)))


@given(
    st.integers(-(2**2000), 2**2000)
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.timedeltas()
    | st.times(timezones=ZONES)
    | st.datetimes(timezones=ZONES)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | RANGES
    | PATHS
)
def test_scalars_arrive_equal(value):
    arrived = roundtrip(value)
    assert type(arrived) is type(value)
    assert arrived == value
    assert repr(arrived) == repr(value)


@pytest.mark.parametrize("value", [time(2, 30, fold=1), datetime(2024, 10, 27, 2, 30, fold=1)])
def test_fold_is_kept(value):
    assert roundtrip(value).fold == 1


def test_utc_arrives_as_utc():
    assert roundtrip(datetime(2024, 1, 1, tzinfo=UTC)).tzinfo is UTC


def test_ints_have_a_limit():
    widest = 2 ** (65_536 * 8 - 1) - 1
    assert roundtrip(widest) == widest
    assert roundtrip(math.factorial(9000)) == math.factorial(9000)
    with pytest.raises(ValueError, match="65536"):
        PACKERS[int][1](widest + 1)


@pytest.mark.parametrize(
    "value", [time(1, tzinfo=Undecided()), datetime(2024, 1, 1, tzinfo=Undecided())]
)
def test_a_zone_without_an_offset_is_refused(value):
    with pytest.raises(ValueError, match="offset"):
        PACKERS[type(value)][1](value)


@pytest.mark.parametrize("code", UNPACKERS)
@given(body=st.binary(max_size=40))
def test_whatever_arrives_is_what_its_packer_writes(code, body):
    try:
        value = UNPACKERS[code](memoryview(body))
    except Exception:
        return
    if code > 6:
        assert PACKERS[type(value)][1](value) == body


def test_dates_out_of_range_are_refused():
    for code, body in [(3, b"\0" * 4), (5, b"\0" * 12), (4, b"\x19" + b"\0" * 7)]:
        with pytest.raises(ValueError):
            UNPACKERS[code](memoryview(body))
    assert roundtrip(date.min) == date.min
    assert roundtrip(date.max) == date.max


# -- bytes on the wire -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "code", "body"),
    [
        (Decimal("-1.50"), 7, b"-1.50"),
        (Decimal("1E+5"), 7, b"1E+5"),
        (Decimal("-sNaN12"), 7, b"-sNaN12"),
        (Decimal("Infinity"), 7, b"Infinity"),
        (Fraction(-3, 256), 8, b"\x01\x00\xfd\x00\x01"),
        (UUID(int=1), 9, bytes(15) + b"\x01"),
        (range(1, -2, -3), 50, b"\1" + bytes(7) + b"\xfe" + b"\xff" * 7 + b"\xfd" + b"\xff" * 7),
        (PurePosixPath("/a/b"), 51, b"\x00/a/b"),
        (PureWindowsPath("c:/a"), 51, b"\x01c:\\a"),
        (PurePosixPath("\udc80"), 51, b"\x00\xed\xb2\x80"),
    ],
    ids=repr,
)
def test_the_encoding_is_these_bytes(value, code, body):
    assert PACKERS[type(value)][0] == code
    assert PACKERS[type(value)][1](value) == body
    arrived = UNPACKERS[code](memoryview(body))
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


# -- numbers ---------------------------------------------------------------------------------------


def test_decimals_are_exact_whatever_the_context():
    value = Decimal("1." + "1234567890" * 9 + "E-50")
    with decimal.localcontext(prec=3, capitals=0, traps=[]) as context:
        context.traps[decimal.Inexact] = True
        arrived = roundtrip(value)
        assert arrived.as_tuple() == value.as_tuple()
        with pytest.raises(decimal.InvalidOperation):
            UNPACKERS[7](memoryview(b"no number"))
    assert PACKERS[Decimal][1](value).count(b"E") == 1


@pytest.mark.parametrize("text", ["NaN", "-NaN", "sNaN7", "-0", "0E+9", "-0.000", "Infinity"])
def test_special_decimals_keep_what_they_say(text):
    assert str(roundtrip(Decimal(text))) == text


@pytest.mark.parametrize("value", [Decimal("1E+100000"), Decimal("1E-100000"), Decimal("1" * 4097)])
def test_decimals_have_limits(value):
    with pytest.raises(ValueError, match="send str"):
        PACKERS[Decimal][1](value)
    with pytest.raises(ValueError, match=r"send str|characters"):
        UNPACKERS[7](memoryview(str(value).encode()))
    roundtrip(Decimal("1E+99999"))
    roundtrip(Decimal("1" * 4096))


@pytest.mark.parametrize(
    "body", [b" 1", b"1e5", b"1_000", b"+1", b"inf", b"\xd9\xa1", b"1.5 ", b"1E5", b"nan", b""]
)
def test_other_ways_to_write_a_decimal_are_refused(body):
    with pytest.raises((ValueError, decimal.InvalidOperation)):
        UNPACKERS[7](memoryview(body))


def test_fractions_have_a_limit():
    widest = Fraction(2 ** (1024 * 8 - 1) - 1, 2 ** (1024 * 8 - 2))
    assert roundtrip(widest) == widest
    with pytest.raises(ValueError, match="1024"):
        PACKERS[Fraction][1](Fraction(2**9000))
    with pytest.raises(ValueError, match="1024"):
        PACKERS[Fraction][1](Fraction(1, 3**9000))


@pytest.mark.parametrize(
    "body",
    [b"\1\0\2\4", b"\1\0\1\0", b"\1\0\1\xff", b"\2\0\1\0\3", b"\1\0\1", b"\1\0", b"\xff\xff" * 9],
)
def test_fractions_that_are_not_reduced_are_refused(body):
    with pytest.raises((ValueError, ZeroDivisionError)):
        UNPACKERS[8](memoryview(body))


def test_ranges_are_kept_as_they_were_written():
    assert repr(roundtrip(range(5, 3))) == "range(5, 3)"
    with pytest.raises(ValueError, match="start, stop and step"):
        PACKERS[range][1](range(2**64))
    with pytest.raises(ValueError, match="zero"):
        UNPACKERS[50](memoryview(bytes(24)))


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"\x04/a", b"\x00a//b", b"\x00", b"\x00a/", b"\x00\xff"])
def test_other_ways_to_write_a_path_are_refused(body):
    with pytest.raises((ValueError, IndexError)):
        UNPACKERS[51](memoryview(body))


def test_a_path_of_another_system_is_an_error_there():
    foreign = 3 if type(Path()).__name__ == "PosixPath" else 2
    with pytest.raises(Exception, match=r"(?i)cannot instantiate"):
        UNPACKERS[51](memoryview(bytes([foreign]) + b"a"))
