"""The walk of one call: which functions of the package it passes, in order, at both ends.

Counted are calls of functions in Python, properties included; functions in C are not.
"""

import sys
import threading
from collections import defaultdict
from itertools import pairwise
from types import FrameType
from typing import Any

PACKAGE = "rankwire."
FUNCTION = "your function"
# Where a serving thread begins anew after each call.
BEGIN = "rpc.pool.JobQueue.next"

Step = tuple[int, str]  # how deep, and which function


class Recorder:
    """Notes the steps of every thread that was told to: a profiler as ``sys.setprofile`` wants."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Step]] = defaultdict(list)
        self._depth: dict[int, int] = defaultdict(int)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = _name_of(frame)
        if name and event in ("call", "return"):
            thread = threading.get_ident()
            if event == "call":
                self.steps[thread].append((self._depth[thread], name))
            self._depth[thread] += 1 if event == "call" else -1


def _name_of(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "")
    if module.startswith(PACKAGE):
        return f"{module.removeprefix(PACKAGE)}.{frame.f_code.co_qualname}"
    return FUNCTION if frame.f_code is add.__code__ else ""


def add(a: float, b: float) -> float:
    """Stand for the user's function."""
    return a + b


class Server:
    """Rank 1: an agent whose threads are recorded."""

    def __init__(self, backend: Any) -> None:
        from rankwire import RpcAgent

        self._recorder = Recorder()
        threading.setprofile(self._recorder)
        self._agent = RpcAgent(backend)
        threading.setprofile(None)  # type: ignore[arg-type]
        self._agent.register("add", add)

    def walks(self) -> list[list[Step]]:
        """Return how calls were served since the last time."""
        walks = []
        for steps in list(self._recorder.steps.values()):
            begins = [number for number, (_, name) in enumerate(steps) if name == BEGIN]
            for begin, end in pairwise(begins):
                if any(name == FUNCTION for _, name in steps[begin:end]):
                    walks.append(_from_the_left(steps[begin:end]))
            del steps[: begins[-1] if begins else 0]
        return walks


def walk_of_a_caller(agent: Any) -> list[Step]:
    """Make a call and return its steps."""
    recorder = Recorder()
    sys.setprofile(recorder)
    try:
        result = agent.rpc_sync(1, "add", 2, 3)
    finally:
        sys.setprofile(None)
    assert result == 5
    return recorder.steps[threading.get_ident()]


def _from_the_left(steps: list[Step]) -> list[Step]:
    least = min(depth for depth, _ in steps)
    return [(depth - least, name) for depth, name in steps]
