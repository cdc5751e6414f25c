"""How many files this process may have open.

Most systems begin with a soft limit of 1024, so that programs that use ``select`` are safe, and a
hard limit that is much higher: a process that needs more raises its own soft limit. Processes
that it starts inherit the new limit.
"""

from __future__ import annotations

import os
import resource


def allow(more: int) -> int:
    """Raise the soft limit, if necessary and as far as possible, so that more files can be opened.

    Args:
        more: How many, besides those that are open now.

    Returns:
        By how many files the limit is too low nevertheless.
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
    except OSError:  # a container without /proc: as many as an ordinary program has
        return 64
