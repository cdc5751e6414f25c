"""Scalars as bytes: exact both ways, and bytes that no packer wrote raise an ordinary exception."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.codec.scalars import PACKERS, UNPACKERS

ZONES = st.none() | st.timedeltas(
    timedelta(hours=-24, microseconds=1), timedelta(hours=24, microseconds=-1)
).map(timezone)


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
    widest = 2 ** (4096 * 8 - 1) - 1
    assert roundtrip(widest) == widest
    with pytest.raises(ValueError, match="4096"):
        PACKERS[int][1](widest + 1)


@pytest.mark.parametrize(
    "value", [time(1, tzinfo=Undecided()), datetime(2024, 1, 1, tzinfo=Undecided())]
)
def test_a_zone_without_an_offset_is_refused(value):
    with pytest.raises(ValueError, match="offset"):
        PACKERS[type(value)][1](value)


@pytest.mark.parametrize("code", UNPACKERS)
@pytest.mark.parametrize("body", [b"", b"\0", b"\xff" * 4, b"\xff" * 20, b"\0" * 16, b"x" * 5000])
def test_other_bytes_raise_or_give_a_value(code, body):
    kinds = {code: kind for kind, (code, _) in PACKERS.items()}
    try:
        value = UNPACKERS[code](memoryview(body))
    except Exception:
        return
    assert type(value) is kinds[code]


def test_dates_out_of_range_are_refused():
    for code, body in [(3, b"\0" * 4), (5, b"\0" * 12), (4, b"\x19" + b"\0" * 7)]:
        with pytest.raises(ValueError):
            UNPACKERS[code](memoryview(body))
    assert roundtrip(date.min) == date.min
    assert roundtrip(date.max) == date.max
