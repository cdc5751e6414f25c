"""Many tasks in one call: the variant of a served function that takes a list of tasks.

Each task of a chunk has its own result or error. Tasks of a chunk run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rankwire import runtime
from rankwire.codec.codec import Codec
from rankwire.codec.values import PLAIN
from rankwire.errors import InvalidMessageError, RankwireError
from rankwire.rpc.call import Call, current_call
from rankwire.rpc.future import RpcFuture
from rankwire.rpc.messages import encode_result, failure_details, failure_of
from rankwire.rpc.registry import VARIANT, is_coroutine_function

EACH = "each"  # the variant

_LOOK_EVERY = 0.05  # seconds, to notice that a call was cancelled


def name_of_each(name: str) -> str:
    """Return the name under which a served function takes a list of tasks."""
    return name + VARIANT + EACH


def make_each(function: Callable[..., Any], codec: Codec, copies: bool) -> Callable[..., Any]:
    """Return the function of a list of tasks, which returns the outcome of each."""
    return partial(
        _each_async if is_coroutine_function(function) else _each, function, codec, copies
    )


def _each(
    function: Callable[..., Any], codec: Codec, copies: bool, tasks: Sequence[Any]
) -> list[Any]:
    values, failures, call = [], [], current_call()
    for place, task in enumerate(tasks):
        if call is not None and call.cancelled:
            raise call.cancellation()
        value: Any = None
        try:
            value = function(task)
            if type(value) not in PLAIN:
                if isinstance(value, Future):
                    value = _result_of(value, call)
                value = _checked(value, codec, copies)
        except BaseException as error:  # as for a call: it must not end the serving thread
            value = None
            failures.append([place, failure_details(error)])
        values.append(value)
    return [values, failures]


async def _each_async(
    function: Callable[..., Any], codec: Codec, copies: bool, tasks: Sequence[Any]
) -> list[Any]:
    import asyncio  # the event loop has imported it

    values, failures = [], []
    for place, task in enumerate(tasks):
        value: Any = None
        try:
            value = await function(task)
            if isinstance(value, Future):
                # ``await`` would not tell a cancelled future from the end of this call.
                await asyncio.gather(asyncio.wrap_future(value), return_exceptions=True)
                value = value.result()
            value = _checked(value, codec, copies)
        except Exception as error:
            value = None
            failures.append([place, failure_details(error)])
        values.append(value)
    return [values, failures]


def _result_of(future: Future[Any], call: Call | None) -> Any:
    """Return a future's result; cancel it once its call is cancelled or late."""
    if call is None or isinstance(future, RpcFuture):  # which ends with the call
        return future.result()
    ended = runtime.Event()
    future.add_done_callback(lambda _: ended.set())
    while not ended.is_set():
        if call.cancelled or call.deadline.expired:
            future.cancel()
            raise call.cancellation()
        call.deadline.clock.wait(ended, min(_LOOK_EVERY, call.deadline.sleep_limit()))
    return future.result()


def _checked(value: Any, codec: Codec, copies: bool) -> Any:
    """Return a value, or a copy; raise if it cannot be sent, which must fail only its own task."""
    message = encode_result(codec, value)
    if not copies:
        codec.undo(message)
        return value
    try:
        return codec.decode(message)[1]
    except BaseException:
        codec.undo(message)
        raise


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
