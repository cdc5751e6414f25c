"""Ways to write many host names in few letters. Pure.

Slurm's: ``gpu[01-03,7],login``. Open MPI's: ``gpu[2:1-3,7],login@0(5)``, where the first number in
the brackets says how many digits all others have, and what follows ``@`` numbers the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankwire.errors import ConfigurationError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(rf"(?:[^\[\],]|{_BRACKETS.pattern})+")
_DIGITS = re.compile(r"\[(\d+):([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(text: str) -> Iterator[str]:
    """Yield the host names that ``text`` stands for, in its order, one by one.

    Several brackets in one name count like the wheels of an odometer, the last one fastest.

    Raises:
        ConfigurationError: It is not such a list.
    """
    names = [found[0] for found in _NAME.finditer(text)]
    if not names or ",".join(names) != text:
        raise _not_a_list(text)
    for name in names:
        yield from _expand(name, text)


def expand_nodes_of_open_mpi(text: str) -> list[str]:
    """Return the host names that ``text`` stands for, in its order.

    Raises:
        ConfigurationError: It is not such a list.
    """
    names = text.partition("@")[0]
    as_slurm = _DIGITS.sub(lambda found: f"[{_widen(found[2], int(found[1]))}]", names)
    return list(expand_nodes(as_slurm))


def _widen(ranges: str, digits: int) -> str:
    return re.sub(r"\d+", lambda number: number[0].zfill(digits), ranges)


def _expand(name: str, text: str) -> Iterator[str]:
    found = _BRACKETS.search(name)
    if found is None:
        yield name
        return
    before, after = name[: found.start()], name[found.end() :]
    for number in _numbers(found[1], text):
        for rest in _expand(after, text) if after else ("",):
            yield before + number + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise _not_a_list(text)
        # As wide as it is written: gpu[08-10] begins with gpu08.
        width = len(match[1])
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{width}d}"


def _not_a_list(text: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not a list of nodes such as gpu[01-03,7],login")
