"""Uneven all-to-all: parts of different sizes.

All ranks first learn all counts, N integers from each, so that a disagreement is found by all of
them, before an element has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from rankwire.collectives import algorithms
from rankwire.collectives.exchange import Exchange
from rankwire.collectives.fingerprints import describe
from rankwire.collectives.operands import Operand, new_like, operand
from rankwire.collectives.targets import apart, stored
from rankwire.errors import CollectiveMismatchError, ConfigurationError

_NOT_SAID = -1


class Uneven:
    """One call of ``all_to_all`` with counts.

    Attributes:
        description: What it is; the same words on all ranks.
    """

    def __init__(
        self,
        source: Operand,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
        out: Any,
        size: int,
    ) -> None:
        if send_counts is None:
            raise ConfigurationError("recv_counts without send_counts; give both, or send_counts")
        if not source.shape:
            raise ConfigurationError("an array without dim 0 has no parts to send")
        self._source = source
        self._out = None if out is None else operand(out, "out")
        self._sent = _checked_counts("send_counts", send_counts, size)
        self._expected = (
            None if recv_counts is None else _checked_counts("recv_counts", recv_counts, size)
        )
        if sum(self._sent) != source.shape[0]:
            raise ConfigurationError(
                f"send_counts {self._sent} sum up to {sum(self._sent)}, "
                f"dim 0 of the array is {source.shape[0]}"
            )
        self.description = describe("all_to_all uneven", source.dtype_name, source.shape[1:])

    def run(self, x: Exchange) -> Any:
        """Do the steps."""
        received = self._agree(x)
        row = int(np.prod(self._source.shape[1:], dtype=np.int64))
        shape = (sum(received), *self._source.shape[1:])
        target = new_like(self._source, shape) if self._out is None else self._out
        target.check_like(self._source, shape, "out")
        own, result = apart(self._source.flat(), target), target.flat()
        algorithms.all_to_all_directly(x, _cut(own, self._sent, row), _cut(result, received, row))
        return stored(target, result)

    def _agree(self, x: Exchange) -> list[int]:
        """Return the rows that each rank sends to this one, if all ranks agree on all of them."""
        expected = [_NOT_SAID] * x.size if self._expected is None else self._expected
        ours = np.array([*self._sent, *expected], np.int64)
        said = [row.tolist() for row in algorithms.all_gather_by_doubling(x, ours)]
        for src in range(x.size):
            for dst in range(x.size):
                sends, expects = said[src][dst], said[dst][x.size + src]
                if expects not in (_NOT_SAID, sends):
                    raise CollectiveMismatchError(
                        f"rank {src} sends {sends} rows to rank {dst}, which expects {expects}"
                    ).during(peer=src if dst == x.rank else dst)
        return [said[src][x.rank] for src in range(x.size)]


def _checked_counts(name: str, counts: Sequence[int], size: int) -> list[int]:
    try:
        checked = [index(count) for count in counts]
    except TypeError as error:
        raise ConfigurationError(f"{name} are whole numbers of rows: {error}") from error
    if len(checked) != size:
        raise ConfigurationError(f"{name} must have length {size}, not {len(checked)}")
    if min(checked) < 0:
        raise ConfigurationError(f"{name} {checked} has a negative count")
    return checked


def _cut(flat: np.ndarray[Any, Any], counts: Sequence[int], row: int) -> list[np.ndarray[Any, Any]]:
    parts, start = [], 0
    for count in counts:
        parts.append(flat[start * row : (start + count) * row])
        start += count
    return parts
