"""Measure one candidate once: a fresh server process, a fresh client process, then both gone.

Fresh processes, because a library's threads, allocator and imports would disturb the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from benchmarks.candidates import Candidate
from benchmarks.processes import Child, free_address
from benchmarks.results import Metrics

# torch alone takes seconds to import on a busy machine.
READY_TIMEOUT = 60.0
# Beyond the time-bounded parts: the 64 MiB echoes, at up to a second each, and the imports.
CLIENT_SLACK = 90.0
CLOSE_TIMEOUT = 5.0


@dataclass(frozen=True)
class Settings:
    """How long one candidate is measured in one round."""

    seconds: float = 2.0
    large_repeats: int = 5
    in_flight: int = 64


def measure(candidate: Candidate, settings: Settings) -> Metrics:
    """Run a server and a client of this candidate and return the client's figures.

    Raises:
        ChildError: either process died or did not answer in time.
    """
    program = ("-m", "benchmarks.child")
    address = free_address()
    with Child((*program, "serve", candidate.name, address)) as server:
        server.read_line(READY_TIMEOUT)
        options = (
            f"--seconds={settings.seconds}",
            f"--large-repeats={settings.large_repeats}",
            f"--in-flight={settings.in_flight}",
        )
        with Child((*program, "call", candidate.name, address, *options)) as client:
            report = client.read_line(CLIENT_SLACK + 10 * settings.seconds)
            client.wait(CLOSE_TIMEOUT)
    return msgspec.json.decode(report, type=Metrics)
