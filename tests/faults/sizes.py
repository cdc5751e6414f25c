"""How much the tests of faults do: little in the run of every day, much in the nightly one."""

import os

NIGHTLY = float(os.environ.get("RANKWIRE_NIGHTLY", "0") or "0")


def trials(every_day: int, nightly: int) -> int:
    """Return how often to try. ``RANKWIRE_NIGHTLY=1`` is the nightly size, 2 twice that."""
    return max(every_day, int(nightly * NIGHTLY))


def time_limit(every_day: float, nightly: float) -> float:
    """Return the seconds that a test may take."""
    return max(every_day, nightly * NIGHTLY)
