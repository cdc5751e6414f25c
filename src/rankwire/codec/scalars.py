"""Single values that msgpack lacks, as bytes: numbers, dates and times, ranges, paths, UUIDs.

A packer raises ``ValueError`` with advice for a value that cannot be sent. An unpacker raises any
exception on bytes that no packer wrote, and the codec translates it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID

# Arithmetic takes more than linear time: multiplying two of these, with 157,000 decimal digits,
# takes 20 ms.
_MAX_INT_NBYTES = 65_536
# A fraction is reduced when it is made: at this width that takes a millisecond.
_MAX_FRACTION_NBYTES = 1024
# A decimal that is converted to an int has as many digits as its exponent says.
_MAX_DECIMAL_DIGITS = 4096
_MAX_DECIMAL_EXPONENT = 99_999

_COMPLEX = struct.Struct("<dd")
_DATE = struct.Struct("<HBB")
_TIME = struct.Struct("<BBBIB")  # hour, minute, second, microsecond, fold
_TIMEDELTA = struct.Struct("<iii")  # days, seconds, microseconds
_UTC_OFFSET = struct.Struct("<q")  # microseconds; absent if naive
_NBYTES = struct.Struct("<H")
_RANGE = struct.Struct("<qqq")

# By number on the wire. A path of another system fails to decode.
_PATHS: list[type[PurePath]] = [PurePosixPath, PureWindowsPath, PosixPath, WindowsPath]


def _pack_int(value: int, longest: int = _MAX_INT_NBYTES) -> bytes:
    nbytes = value.bit_length() // 8 + 1
    if nbytes > longest:
        raise ValueError(f"It has more than {longest} bytes: send its bytes instead.")
    return value.to_bytes(nbytes, "little", signed=True)


def _unpack_int(body: memoryview, longest: int = _MAX_INT_NBYTES) -> int:
    if not 0 < len(body) <= longest:
        raise ValueError(f"an int of {len(body)} bytes")
    return int.from_bytes(body, "little", signed=True)


def _pack_decimal(value: Decimal) -> bytes:
    """Return the text of a decimal, which is exact in any context, with a capital E."""
    _, digits, exponent = value.as_tuple()
    is_wide = isinstance(exponent, int) and abs(value.adjusted()) > _MAX_DECIMAL_EXPONENT
    if is_wide or len(digits) > _MAX_DECIMAL_DIGITS:
        most = f"{_MAX_DECIMAL_DIGITS} digits or exponents up to {_MAX_DECIMAL_EXPONENT}"
        raise ValueError(f"Decimals have at most {most}: send str(value) instead.")
    return str(value).replace("e", "E").encode()


def _unpack_decimal(body: memoryview) -> Decimal:
    if len(body) > 2 * _MAX_DECIMAL_DIGITS:
        raise ValueError(f"a decimal of {len(body)} characters")
    # An invalid text raises, whatever the context of the thread.
    value = Decimal(str(body, "ascii"), Context(traps=[InvalidOperation]))
    if _pack_decimal(value) != body:
        raise ValueError("not as a decimal is written")
    return value


def _pack_fraction(value: Fraction) -> bytes:
    parts = value.as_integer_ratio()
    numerator, denominator = (_pack_int(part, _MAX_FRACTION_NBYTES) for part in parts)
    return _NBYTES.pack(len(numerator)) + numerator + denominator


def _unpack_fraction(body: memoryview) -> Fraction:
    middle = _NBYTES.size + _NBYTES.unpack_from(body)[0]
    parts = body[_NBYTES.size : middle], body[middle:]
    value = Fraction(*(_unpack_int(part, _MAX_FRACTION_NBYTES) for part in parts))
    if _pack_fraction(value) != body:
        raise ValueError("not as a fraction is written")
    return value


def _pack_range(value: range) -> bytes:
    try:
        return _RANGE.pack(value.start, value.stop, value.step)
    except struct.error as error:
        raise ValueError(
            "Its bounds have more than 64 bits: send start, stop and step instead."
        ) from error


def _pack_path(value: PurePath) -> bytes:
    """Return a path with lone surrogates, which stand for bytes of a name that are not text."""
    return bytes([_PATHS.index(type(value))]) + str(value).encode(errors="surrogatepass")


def _unpack_path(body: memoryview) -> PurePath:
    value = _PATHS[body[0]](str(body[1:], "utf-8", "surrogatepass"))
    if _pack_path(value) != body:
        raise ValueError("not as a path is written")
    return value


def _pack_date(value: date) -> bytes:
    return _DATE.pack(value.year, value.month, value.day)


def _pack_time(value: time) -> bytes:
    return _pack_clock(value) + _pack_utc_offset(value)


def _unpack_time(body: memoryview) -> time:
    hour, minute, second, microsecond, fold = _TIME.unpack_from(body)
    zone = _unpack_utc_offset(body[_TIME.size :])
    return time(hour, minute, second, microsecond, zone, fold=fold)


def _pack_datetime(value: datetime) -> bytes:
    return _pack_date(value) + _pack_clock(value) + _pack_utc_offset(value)


def _unpack_datetime(body: memoryview) -> datetime:
    clock = _unpack_time(body[_DATE.size :])
    return datetime.combine(date(*_DATE.unpack_from(body)), clock)


def _pack_clock(value: time | datetime) -> bytes:
    return _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)


def _pack_utc_offset(value: time | datetime) -> bytes:
    """Return the offset without the zone's name and rules, which differ between hosts."""
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


# The numbers are part of the wire format; those of containers and arrays are in ``values.Code``.
_CARRIED: dict[int, tuple[type, Callable[[Any], bytes], Callable[[memoryview], Any]]] = {
    1: (int, _pack_int, _unpack_int),
    2: (complex, lambda v: _COMPLEX.pack(v.real, v.imag), lambda b: complex(*_COMPLEX.unpack(b))),
    3: (date, _pack_date, lambda body: date(*_DATE.unpack(body))),
    4: (time, _pack_time, _unpack_time),
    5: (datetime, _pack_datetime, _unpack_datetime),
    6: (
        timedelta,
        lambda value: _TIMEDELTA.pack(value.days, value.seconds, value.microseconds),
        lambda body: timedelta(*_TIMEDELTA.unpack(body)),
    ),
    7: (Decimal, _pack_decimal, _unpack_decimal),
    8: (Fraction, _pack_fraction, _unpack_fraction),
    9: (UUID, lambda value: value.bytes, lambda body: UUID(bytes=bytes(body))),
    50: (range, _pack_range, lambda body: range(*_RANGE.unpack(body))),
    51: (PurePath, _pack_path, _unpack_path),
}
PACKERS = {kind: (code, pack) for code, (kind, pack, _) in _CARRIED.items()}
PACKERS.update(dict.fromkeys(_PATHS, PACKERS.pop(PurePath)))
UNPACKERS = {code: unpack for code, (_, _, unpack) in _CARRIED.items()}
# The codes of values that may take long to compare with a number of another type (``limits``).
COSTLY_KEYS = frozenset(PACKERS[kind][0] for kind in (int, Decimal, Fraction))
