"""Shorten texts from other ranks, and make them safe to print on a terminal.

The sender shortens a text, and the receiver again, since a peer may send anything. Both keep the
beginning and the end, for a traceback's origin and error. Functions are linear and idempotent.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence

# Characters. A traceback at the recursion limit (1,000 frames) is longer.
MAX_REASON = 500
MAX_TRACEBACK = 32_768

# All control characters but tab and newline; characters that change the text direction or break a
# line; and lone surrogates, which cannot be encoded.
_TURNING = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[\x00-\x08\x0b-\x1f{_TURNING}]")
# Matches a text that can be printed as one line. ("$" would accept a final newline.)
NAME = rf"^[^\x00-\x1f{_TURNING}]*\Z"
_NOTE_LENGTH = 60
# The most ranks to list singly; the characters after which a list of ranges is cut.
_MOST_LISTED = 8
_RANGES_LENGTH = 100


def shortened(text: str, longest: int) -> str:
    """Return a text with at most ``longest`` characters (100 or more), without its middle."""
    if len(text) <= longest:
        return text
    half = (longest - _NOTE_LENGTH) // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def printable(text: str, longest: int = MAX_TRACEBACK) -> str:
    """Return a text from another process, shortened and without control characters."""
    return shortened(_UNPRINTABLE.sub(_escaped, shortened(text, longest)), longest)


def one_line(text: str, longest: int = MAX_REASON) -> str:
    """Return a text as one printable line, cut at its end."""
    line = " ".join(printable(text[: longest + 1], longest + 100).splitlines())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0, 3" or "300 ranks: 0-298, 301", in at most 150 characters."""
    if len(ranks) <= _MOST_LISTED:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    pieces = ""
    for first, last in _ranges(sorted(ranks)):
        if len(pieces) > _RANGES_LENGTH:
            return f"{len(ranks)} ranks: {pieces}..."
        pieces += f"{first}, " if first == last else f"{first}-{last}, "
    return f"{len(ranks)} ranks: {pieces[:-2]}"


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def type_name(value: object) -> str:
    """Return the name of a value's class, with its module unless that is ``builtins``."""
    return class_name(type(value))


def class_name(kind: type) -> str:
    """Return the name of a class, with its module unless that is ``builtins``."""
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return the text of an error, even if its ``__str__`` raises."""
    try:
        return str(error)
    except BaseException as second:
        return f"<its text could not be made: {type(second).__name__}>"


def traceback_of(error: BaseException, *, without_first: bool = False) -> str:
    """Return the traceback of an error, optionally without its first frame."""
    frames = error.__traceback__
    if without_first and frames is not None:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except BaseException as second:
        return f"<the traceback could not be made: {type(second).__name__}>"


def _escaped(character: re.Match[str]) -> str:
    return character[0].encode("unicode_escape").decode()


def one_of(count: int, noun: str) -> str:
    """Return ``one of 2 workers``, or ``the one worker``."""
    return f"one of {count} {noun}s" if count > 1 else f"the one {noun}"
