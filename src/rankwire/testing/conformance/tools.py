"""Helpers of the conformance checks: ``pytest.raises`` without pytest, and worlds to run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.clock import REAL_TIME
from rankwire.rpc.call import current_call
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.ranks import MakeWorld, in_parallel

SIZES = (1, 2, 3, 4, 7)
PATIENCE = 10.0

Check = Callable[[MakeWorld], None]
Each = Callable[[Backend], Any]

E = TypeVar("E", bound=BaseException)


def expect(kind: type[E], action: Callable[[], object]) -> E:
    """Return the exception of that kind that ``action`` raises, or raise ``AssertionError``."""
    try:
        result = action()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got {result!r}")


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or raise ``AssertionError``."""
    end = REAL_TIME.now() + PATIENCE
    while not condition():
        assert REAL_TIME.now() < end, "the condition did not become true in time"
        REAL_TIME.sleep(0.001)


def work_until_cancelled(started: runtime.Event, cancelled: runtime.Event) -> None:
    """Run until the current call is cancelled; set an event at the start and at the end."""
    call = current_call()
    assert call is not None
    started.set()
    until(lambda: call.cancelled)
    cancelled.set()


def leave(backend: Backend, error: BaseException | None = None) -> None:
    """Close a rank's world; closing a group would not notify the other ranks."""
    while (parent := getattr(backend, "parent", None)) is not None:
        backend = parent
    backend.close(error=error)


def run_all(world: Sequence[Backend], each: Each) -> list[Any]:
    """Run a function on all ranks; return the results."""
    return in_parallel([partial(each, backend) for backend in world])


def run_in_worlds(make_world: MakeWorld, each: Each, sizes: Sequence[int] = SIZES) -> None:
    """Run a function on all ranks of worlds of several sizes."""
    for size in sizes:
        with make_world(size) as world:
            run_all(world, each)


def on_every_rank(*sizes: int) -> Callable[[Each], Check]:
    """Make a check of a function: run it on all ranks of worlds of these sizes, or of ``SIZES``."""

    def make_check(each: Each) -> Check:
        def check(make_world: MakeWorld) -> None:
            run_in_worlds(make_world, each, sizes or SIZES)

        check.__name__, check.__doc__ = each.__name__, each.__doc__
        check.__module__ = each.__module__
        return check

    return make_check


def has_values(array: Any, expected: Any) -> bool:
    """Return whether an array has these values, shape and, if ``expected`` is one, its dtype."""
    wanted = np.asarray(expected)
    same_kind = not isinstance(expected, np.ndarray) or array.dtype == wanted.dtype
    return same_kind and np.array_equal(array, wanted)


@contextmanager
def agents_of(make_world: MakeWorld, world_size: int, **options: Any) -> Iterator[list[RpcAgent]]:
    """Give an agent on each rank of a new world, and close them at the end."""
    world_options = {name: options.pop(name) for name in ("max_message_nbytes",) if name in options}
    with make_world(world_size, **world_options) as world:
        agents = [RpcAgent(backend, **options) for backend in world]
        try:
            yield agents
        finally:
            for agent in agents:
                agent.close(grace=2.0)
