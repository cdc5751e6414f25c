"""A condition that an interrupt (Ctrl-C) cannot leave taken."""

from __future__ import annotations

import threading
from operator import attrgetter


class SafeCondition(threading.Condition):
    """One that is entered and left as its lock is, by one call of a C function.

    The methods of ``Condition`` are in Python: an interrupt (Ctrl-C) that falls behind the lock's
    own ``__enter__`` leaves it taken, and whoever looks at it then waits for ever.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))
