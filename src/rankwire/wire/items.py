"""Keeps a sender from turning few bytes into much memory: the number of items is limited.

A msgpack item has at least one byte, and most Python objects have 50 and more: a megabyte of empty
dicts decodes to 72 megabytes. So the items of a head are counted before it is decoded, but only
where there can be more than the limit, that is, in heads of more bytes than that. All others,
which is nearly all, are not looked at.

Contract: linear time, ``InvalidMessageError`` or nothing. Knows msgpack's tokens and nothing of
what they mean to the codec; malformed ones are left to the decoder.
"""

from __future__ import annotations

import re

from rankwire.errors import InvalidMessageError

__all__ = ["DEFAULT_MAX_ITEMS", "ItemCount"]

DEFAULT_MAX_ITEMS = 1_000_000

# One token of a fixed length, frequent ones first.
_SHORT_TOKEN = (
    rb"(?:[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]|\xcb.{8}|[\xca\xce\xd2\xdd\xdf].{4}"
    rb"|[\xcd\xd1\xd4\xdc\xde]..|[\xcc\xd0].|[\xcf\xd3].{8}|\xd5.{3}|\xd6.{5}|\xd7.{9}|\xd8.{17}|"
    + b"|".join(b"%c.{%d}" % (0xA0 + nbytes, nbytes) for nbytes in range(1, 32))
    + rb")"
)
# So many at once cost 30 ns each, as decoding does; the rest of a run is counted one by one.
_BLOCK = 4096
_block = re.compile(_SHORT_TOKEN + b"{%d}" % _BLOCK, re.DOTALL)
_rest_of_block = re.compile(_SHORT_TOKEN + b"{0,%d}+" % _BLOCK, re.DOTALL)
_each_token = re.compile(_SHORT_TOKEN, re.DOTALL)
# Tokens that say their length (bin, str, ext): the width of the length, and what else follows it.
_LONG_TOKENS = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0)},
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},
    **{0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
}


class ItemCount:
    """Counts the items of one payload, whose head may come in several bodies."""

    __slots__ = ("_count", "_limit")

    def __init__(self, limit: int) -> None:
        self._count = 0
        self._limit = limit

    def add(self, body: memoryview) -> None:
        """Count what is in a body of msgpack; those of extensions in it count as one item here.

        Raises:
            InvalidMessageError: There are more than the limit, with those counted before.
        """
        position = 0
        while position < len(body):
            if match := _block.match(body, position):
                position = match.end()
                self._count += _BLOCK
            elif (match := _rest_of_block.match(body, position)) and match.end() > position:
                self._count += len(_each_token.findall(body, position, match.end()))
                position = match.end()
            elif body[position] in _LONG_TOKENS:
                width, besides = _LONG_TOKENS[body[position]]
                nbytes = int.from_bytes(body[position + 1 : position + 1 + width], "big")
                position += 1 + width + besides + nbytes
                self._count += 1
            else:
                return  # cut off, or no token of msgpack: the decoder says so
            if self._count > self._limit:
                raise InvalidMessageError(
                    f"the payload holds more than {self._limit} items; arrays count as one, and "
                    "Codec(max_items=) allows more"
                )
