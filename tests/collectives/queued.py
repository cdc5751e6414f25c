"""Work of a background that belongs to no group."""

import itertools
from collections.abc import Callable
from typing import Any

from rankwire.clock import REAL_TIME
from rankwire.collectives.background import Background, Task
from rankwire.collectives.work import Work
from rankwire.deadline import Deadline

NAME = "test-worker"
LIMIT = 600.0

_numbers = itertools.count()


def new_background() -> Background:
    return Background(NAME, REAL_TIME)


def new_task(
    background: Background,
    run: Callable[[], Any],
    description: str = "test()",
    limit: float = LIMIT,
    give_up: Callable[[BaseException], BaseException] = lambda error: error,
) -> Task:
    number = next(_numbers)
    work: Work[Any] = Work(description, background, number)
    return Task(number, run, give_up, Deadline(limit, REAL_TIME), work)


def submit(background: Background, *args: Any, **options: Any) -> Work[Any]:
    task = new_task(background, *args, **options)
    background.submit(task)
    return task.work


def keep_workers_away(monkeypatch: Any) -> None:
    """Have no worker woken but for what an interrupted thread has left."""
    rouse = Background._rouse

    def rouse_for_what_is_left(background: Background) -> None:
        if background._queue and background._queue[0].has_begun:
            rouse(background)

    monkeypatch.setattr(Background, "_rouse", rouse_for_what_is_left)
