"""Measure one candidate with one number of ranks once: fresh processes, then all of them gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from benchmarks.collectives.candidates import Candidate
from benchmarks.collectives.figures import Figure, figures_of
from benchmarks.processes import Child, free_address

# torch alone takes seconds to import on a busy machine, and 16 ranks take seconds to meet.
READY_TIMEOUT = 60.0
# Beyond the time-bounded part: preparing 64 MiB arrays, and the fewest repeats of slow operations.
FIGURE_SLACK = 60.0
CLOSE_TIMEOUT = 5.0


@dataclass(frozen=True)
class Settings:
    """How long each figure is measured in one round."""

    seconds: float = 0.4
    fewest_repeats: int = 5


def measure(
    candidate: Candidate,
    world_size: int,
    settings: Settings,
    record: Callable[[Figure, float], None],
) -> None:
    """Run a world of this candidate; ``record`` gets each figure, in seconds, as soon as it is in.

    Raises:
        ChildError: a process died or did not answer in time; what was recorded holds.
    """
    options = (f"--seconds={settings.seconds}", f"--fewest-repeats={settings.fewest_repeats}")
    program = ("-m", "benchmarks.collectives.child", candidate.name, str(world_size))
    timeout = READY_TIMEOUT + FIGURE_SLACK + 10 * settings.seconds
    with Child((*program, free_address(), *options)) as world:
        for figure in figures_of(world_size):
            line = world.read_line(timeout)
            key, seconds = msgspec.json.decode(line, type=tuple[str, float])
            assert key == figure.key
            record(figure, seconds)
        world.wait(CLOSE_TIMEOUT)
