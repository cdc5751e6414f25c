"""Raise the limit of open files.

Most systems have a soft limit of 1024, for programs that use ``select``, and a much higher hard
limit. Child processes inherit the new limit.
"""

from __future__ import annotations

import os
import resource


def allow(more: int) -> int:
    """Raise the soft limit if necessary, so that ``more`` files can be opened.

    Returns:
        How many files the limit is still too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open_now() + more
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return 0
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return needed - limit


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # a container without /proc: assume an ordinary program
        return 64
