"""Deadlines for tests of single parts, which are in no world that would have a clock."""

from rankwire import deadline
from rankwire.clock import REAL_TIME


class Deadline(deadline.Deadline):
    """One by the real clock, unless another is given."""

    def __init__(self, limit, clock=REAL_TIME):
        super().__init__(limit, clock)
