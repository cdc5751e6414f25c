"""Many tasks in one call: the variant of a served function that takes a list of tasks.

Each task of a chunk has its own result or error. Tasks of a chunk run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rankwire.codec.codec import Codec
from rankwire.codec.values import PLAIN
from rankwire.errors import InvalidMessageError, RankwireError
from rankwire.rpc.call import current_call
from rankwire.rpc.messages import encode_result, failure_details, failure_of
from rankwire.rpc.registry import VARIANT, is_coroutine_function

EACH = "each"  # the variant


def name_of_each(name: str) -> str:
    """Return the name under which a served function takes a list of tasks."""
    return name + VARIANT + EACH


def make_each(function: Callable[..., Any], codec: Codec) -> Callable[..., Any]:
    """Return the function of a list of tasks, which returns the outcome of each."""
    return partial(_each_async if is_coroutine_function(function) else _each, function, codec)


def _each(function: Callable[..., Any], codec: Codec, tasks: Sequence[Any]) -> list[Any]:
    values, failures, call = [], [], current_call()
    for place, task in enumerate(tasks):
        if call is not None and call.cancelled:
            raise call.cancellation()
        value: Any = None
        try:
            value = function(task)
            if type(value) not in PLAIN:
                value = _checked(value, codec)
        except BaseException as error:  # as for a call: it must not end the serving thread
            value = None
            failures.append([place, failure_details(error)])
        values.append(value)
    return [values, failures]


async def _each_async(
    function: Callable[..., Any], codec: Codec, tasks: Sequence[Any]
) -> list[Any]:
    values, failures = [], []
    for place, task in enumerate(tasks):
        value: Any = None
        try:
            value = _checked(await function(task), codec)
        except Exception as error:
            failures.append([place, failure_details(error)])
        values.append(value)
    return [values, failures]


def _checked(value: Any, codec: Codec) -> Any:
    """Return a value; raise if it cannot be sent, which must fail only its own task."""
    if isinstance(value, Future):
        value = value.result()
    codec.undo(encode_result(codec, value))
    return value


def outcomes_of(reply: Any, count: int, rank: int) -> tuple[list[Any], dict[int, RankwireError]]:
    """Return the values of a chunk from the reply of a rank, and the errors by their places."""
    match reply:
        case [list(values), list(failures)] if len(values) == count:
            errors = {}
            for failure in failures:
                match failure:
                    case [int(place), details]:
                        errors[place] = failure_of(details, rank)
            return values, errors
    error = InvalidMessageError(f"rank {rank} did not send an outcome for each of {count} tasks")
    return [None] * count, dict.fromkeys(range(count), error)
