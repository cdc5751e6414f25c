"""What ``breakpoint()`` does in a rank that has no terminal: it says how to debug that rank.

The launcher names ``pass_by`` in ``PYTHONBREAKPOINT``, so this works from the first line of the
program on, and nothing is loaded before it is needed. The program goes on: where all ranks run one
program, all of them come to the same breakpoint, and one of them is debugged.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rankwire.environment import DEBUG_RANK, RANK

HOOK = f"{__name__}.pass_by"

_seen: set[tuple[str, int]] = set()


def pass_by(*args: Any, **kwargs: Any) -> None:
    """Say once for each place how to debug this rank, and go on.

    Args:
        *args: As ``breakpoint`` was given them; not used.
        **kwargs: The same.
    """
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    if place in _seen or os.environ.get(DEBUG_RANK):
        return
    _seen.add(place)
    rank = os.environ.get(RANK, "N")
    sys.stderr.write(
        f"breakpoint() at {place[0]}:{place[1]} is passed by: ranks have no terminal. To debug"
        f" this one: rankwire run --debug-rank {rank} ...\n"
    )
    sys.stderr.flush()
