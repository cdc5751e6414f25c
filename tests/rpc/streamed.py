"""A world of two in which a rank is killed while one reads a stream of the other.

Run in rank processes, which import this module by name.
"""

import threading
import time
from typing import Any

from rankwire import RankwireError, RpcAgent
from worlds import PATIENCE

_begun = threading.Event()


def has_begun(backend: Any) -> bool:
    """Return whether items have come or were sent."""
    return _begun.is_set()


def produce(backend: Any) -> float:
    """Serve a stream without an end; return when its generator has ended."""
    ended = threading.Event()

    def count() -> Any:
        try:
            for number in range(10**9):
                if number > 100:
                    _begun.set()
                yield number
        finally:
            ended.set()

    agent = RpcAgent(backend)
    agent.register("count", count)
    backend.barrier()
    assert ended.wait(PATIENCE)
    return time.monotonic()


def read(backend: Any) -> tuple[str, str, int | None, int, float]:
    """Read until the stream fails; return how, and when."""
    agent = RpcAgent(backend)
    backend.barrier()
    stream = agent.stream(1, "count")
    try:
        for number in stream:
            if number > 100:
                _begun.set()
    except RankwireError as error:
        return type(error).__name__, str(error), error.peer, stream.count, time.monotonic()
    raise AssertionError("the stream ended")
