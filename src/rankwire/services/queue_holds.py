"""What a rank holds of a queue: a place for an item to come, and items to be acknowledged.

One that is dropped is given back by a thread (``finalizers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar, overload

from rankwire.errors import ConfigurationError
from rankwire.finalizers import hand_over
from rankwire.services.queue_items import encode_item
from rankwire.services.queue_requests import QueueRequests, Request

T = TypeVar("T")


class QueueSlot(Generic[T]):
    """A place in a queue, for one item; made by ``Queue.slot``. For one thread."""

    _request: Request | None = None  # also if an interrupt has ended ``__init__``
    _is_filled = False

    def __init__(
        self, requests: QueueRequests, timeout: float | None, version: float | None
    ) -> None:
        self._requests = requests
        self._timeout = timeout
        self._version = version

    def put(self, item: T, *, version: float | None = None, key: float = 0.0) -> None:
        """Put the item; it is accepted at once. Arguments and errors are as for ``Queue.put``."""
        if self._request is None or self._is_filled:
            raise ConfigurationError("a slot takes one item, inside of its 'with' block")
        payload = encode_item(self._requests.codec, item)
        version = self._version if version is None else version
        self._requests.fill(self._request, payload, version, key)
        self._is_filled = True

    def __enter__(self) -> Self:
        self._request = self._requests.take_slot(self._timeout)
        return self

    def __exit__(self, *_: object) -> None:
        if self._request is not None and not self._is_filled:
            self._requests.give_back(self._request)
        self._request = None

    def __del__(self) -> None:
        if self._request is not None and not self._is_filled:  # interrupted
            hand_over(self._requests.give_back, self._request)


class QueueBatch(Sequence[T]):
    """Items that wait for an acknowledgement; made by ``Queue.get``. For one thread.

    As a context manager, it acknowledges them at the end, or gives them back after an error. One
    that is dropped gives them back too.
    """

    _is_settled = True  # also if an interrupt has ended ``__init__``

    def __init__(self, requests: QueueRequests, request: Request, items: list[T]) -> None:
        self._requests = requests
        self._request = request
        self._items = items
        self._is_settled = False

    def ack(self) -> None:
        """Acknowledge the items: they are consumed.

        Raises:
            ConfigurationError: They were acknowledged or given back before.
        """
        requests = self._requests
        if not requests.ask("acknowledge", requests.deadline(None), self._request):
            raise ConfigurationError(
                f"queue {requests.name!r} has taken these items back, or they are acknowledged"
            )
        self._is_settled = True

    def give_back(self) -> None:
        """Put the items back to the front of the queue, unless they were acknowledged."""
        if not self._is_settled:
            self._requests.give_back(self._request)
            self._is_settled = True

    def __del__(self) -> None:
        if not self._is_settled:
            hand_over(self._requests.give_back, self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._is_settled:
            return
        if error is None:
            self.ack()
        else:
            self.give_back()

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        state = "settled" if self._is_settled else "not acknowledged"
        return f"<QueueBatch of {len(self)} items of queue {self._requests.name!r}, {state}>"
