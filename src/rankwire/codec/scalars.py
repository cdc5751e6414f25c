"""Single values that msgpack lacks, as bytes: wide ints, complex numbers, dates and times.

Pure functions between a value and the body of its extension; what an extension is, they do not
know. A packer raises ``ValueError`` with advice for a value that it cannot carry. An unpacker
raises any ordinary exception on bytes that no packer wrote, and the codec translates it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Any

# What people do with ints costs more than linear time in their width. This holds any RSA modulus.
_MAX_INT_NBYTES = 4096

_COMPLEX = struct.Struct("<dd")
_DATE = struct.Struct("<HBB")
_TIME = struct.Struct("<BBBIB")  # hour, minute, second, microsecond, fold
_TIMEDELTA = struct.Struct("<iii")  # days, seconds, microseconds
_UTC_OFFSET = struct.Struct("<q")  # microseconds; absent if naive


def _pack_int(value: int) -> bytes:
    nbytes = value.bit_length() // 8 + 1
    if nbytes > _MAX_INT_NBYTES:
        raise ValueError(f"It has more than {_MAX_INT_NBYTES} bytes: send its bytes instead.")
    return value.to_bytes(nbytes, "little", signed=True)


def _unpack_int(body: memoryview) -> int:
    if not 0 < len(body) <= _MAX_INT_NBYTES:
        raise ValueError(f"an int of {len(body)} bytes")
    return int.from_bytes(body, "little", signed=True)


def _pack_complex(value: complex) -> bytes:
    return _COMPLEX.pack(value.real, value.imag)


def _unpack_complex(body: memoryview) -> complex:
    return complex(*_COMPLEX.unpack(body))


def _pack_date(value: date) -> bytes:
    return _DATE.pack(value.year, value.month, value.day)


def _unpack_date(body: memoryview) -> date:
    return date(*_DATE.unpack(body))


def _pack_time(value: time) -> bytes:
    return _pack_clock(value) + _pack_utc_offset(value)


def _unpack_time(body: memoryview) -> time:
    hour, minute, second, microsecond, fold = _TIME.unpack_from(body)
    zone = _unpack_utc_offset(body[_TIME.size :])
    return time(hour, minute, second, microsecond, zone, fold=fold)


def _pack_datetime(value: datetime) -> bytes:
    return _pack_date(value) + _pack_clock(value) + _pack_utc_offset(value)


def _unpack_datetime(body: memoryview) -> datetime:
    year, month, day = _DATE.unpack_from(body)
    clock = _unpack_time(body[_DATE.size :])
    return datetime.combine(date(year, month, day), clock)


def _pack_timedelta(value: timedelta) -> bytes:
    return _TIMEDELTA.pack(value.days, value.seconds, value.microseconds)


def _unpack_timedelta(body: memoryview) -> timedelta:
    return timedelta(*_TIMEDELTA.unpack(body))


def _pack_clock(value: time | datetime) -> bytes:
    return _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)


def _pack_utc_offset(value: time | datetime) -> bytes:
    """The offset is kept, the zone's name and rules are not: they differ between hosts."""
    if value.tzinfo is None:
        return b""
    offset = value.utcoffset()
    if offset is None:
        raise ValueError("Its zone has no fixed UTC offset: send a datetime, or a naive time.")
    return _UTC_OFFSET.pack(offset // timedelta(microseconds=1))


def _unpack_utc_offset(body: memoryview) -> tzinfo | None:
    if not body:
        return None
    (microseconds,) = _UTC_OFFSET.unpack(body)
    return timezone(timedelta(microseconds=microseconds))


# The numbers are part of the wire format; the codec's own begin at 10.
_CARRIED: dict[int, tuple[type, Callable[[Any], bytes], Callable[[memoryview], Any]]] = {
    1: (int, _pack_int, _unpack_int),
    2: (complex, _pack_complex, _unpack_complex),
    3: (date, _pack_date, _unpack_date),
    4: (time, _pack_time, _unpack_time),
    5: (datetime, _pack_datetime, _unpack_datetime),
    6: (timedelta, _pack_timedelta, _unpack_timedelta),
}
PACKERS = {kind: (code, pack) for code, (kind, pack, _) in _CARRIED.items()}
UNPACKERS = {code: unpack for code, (_, _, unpack) in _CARRIED.items()}
