"""How much the tests of faults do: much in the nightly run, less in others.

``make test`` sets ``TESTS_QUICK``: some tests then try less often what they still show.
"""

import os

NIGHTLY = float(os.environ.get("TESTS_NIGHTLY", "0") or "0")
QUICK = bool(os.environ.get("TESTS_QUICK"))


def trials(every_day: int, nightly: int, *, quick: int | None = None) -> int:
    """Return how often to try. ``TESTS_NIGHTLY=1`` is the nightly size, 2 twice that."""
    if QUICK and quick is not None:
        return quick
    return max(every_day, int(nightly * NIGHTLY))


def examples(every_day: int) -> int:
    """Return how many examples of a property to try: a quarter of them in ``make test``."""
    return max(10, every_day // 4) if QUICK else every_day


def time_limit(every_day: float, nightly: float) -> float:
    """Return the seconds that a test may take."""
    return max(every_day, nightly * NIGHTLY)
