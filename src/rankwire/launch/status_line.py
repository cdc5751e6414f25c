"""The line that tells how a job is doing. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """How many ranks are in which state.

    Attributes:
        running: Their processes run.
        up: They are members of a world that has formed.
        done: They ended well.
        failed: They did not.
        suspected: They run, and have not been heard for a while.
        missing_nodes: Hosts whose launchers have not come yet.
    """

    running: int = 0
    up: int = 0
    done: int = 0
    failed: int = 0
    suspected: int = 0
    missing_nodes: int = 0


def describe(counts: Counts, seconds: float) -> str:
    """Return the line; states with no rank in them are left out."""
    if counts.missing_nodes:
        plural = "" if counts.missing_nodes == 1 else "s"
        parts = [f"waiting for {counts.missing_nodes} node{plural}"]
    else:
        parts = [
            f"{count} {name}"
            for name, count in counts._asdict().items()
            if count or name == "running"
        ]
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    elapsed = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"rankwire: {', '.join(parts)} ({elapsed})"
