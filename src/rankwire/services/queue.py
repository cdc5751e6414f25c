"""``Queue``: a queue that one rank owns and all ranks use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar, overload

from rankwire.errors import (
    ConfigurationError,
    InvalidMessageError,
    QueueEndedError,
    RankwireError,
)
from rankwire.finalizers import hand_over
from rankwire.public_dir import PublicDir
from rankwire.services.queue_holds import QueueBatch, QueueSlot
from rankwire.services.queue_items import decode_item, encode_item, unpack
from rankwire.services.queue_requests import QueueRequests, Request
from rankwire.services.queue_settings import QueueStats
from rankwire.services.queue_state import MOST_ITEMS

_PART_ITEMS, _PART_NBYTES = 256, 1 << 20  # of one call of ``put_many``

T = TypeVar("T")


class Queue(PublicDir, Generic[T]):
    """A queue that one rank owns; every rank can put and get. Safe from any thread.

    Made by ``RpcAgent.queue``. ``for item in queue`` takes items until the queue ends.

    Attributes:
        name: Its name.
        owner: The rank that has the items.
        settings: What it was made with, by name.
    """

    _SHOWN = ("end", "get", "items", "name", "owner", "put", "put_many", "settings", "slot",
              "stats")  # fmt: skip

    def __init__(self, requests: QueueRequests, settings: dict[str, Any]) -> None:
        self.name = requests.name
        self.owner = requests.owner
        self.settings = settings
        self._requests = requests
        self._received = requests.received

    # -- putting -----------------------------------------------------------------------------------

    def put(
        self,
        item: T,
        *,
        timeout: float | None = None,
        version: float | None = None,
        key: float = 0.0,
    ) -> None:
        """Put an item; return when the owner has accepted it.

        Args:
            item: Anything that the agent's codec can send.
            timeout: Seconds to wait for a place; None is the agent's timeout.
            version: For gets with ``min_version``.
            key: For a queue with ``order="key"``: items with the lowest key are taken first.

        Raises:
            QueueEndedError: The queue has ended.
            OverloadedError: The queue is full, and was made with ``when_full="refuse"``.
            DeadlineExceededError: There was no place in time; the error says what is in the way.
                The item is not in the queue, unless ``unconfirmed`` is 1: the owner did not answer.
            PeerLostError: The owner is lost. ``unconfirmed`` is 1 if it may have had the item.
        """
        payload = encode_item(self._requests.codec, item)
        self._requests.put([payload], version, key, self._requests.deadline(timeout))

    def put_many(
        self,
        items: Iterable[T],
        *,
        timeout: float | None = None,
        version: float | None = None,
        key: float = 0.0,
    ) -> None:
        """Put items in order, up to 256 or 1 MiB in one call: 1 KiB takes a tenth of the time.

        Raises:
            RankwireError: As ``put``. ``accepted`` says how many items the owner has accepted, and
                ``unconfirmed`` how many of the next ones it may have accepted; none after these.
        """
        requests, deadline = self._requests, self._requests.deadline(timeout)
        accepted, nbytes, payloads = 0, 0, list[bytes]()
        for item in items:
            try:
                payloads.append(encode_item(requests.codec, item))
            except RankwireError as error:
                error.accepted = accepted
                raise
            nbytes += len(payloads[-1])
            if len(payloads) == _PART_ITEMS or nbytes >= _PART_NBYTES:
                requests.put(payloads, version, key, deadline, accepted)
                accepted += len(payloads)
                nbytes, payloads = 0, []
        if payloads:
            requests.put(payloads, version, key, deadline, accepted)

    def slot(self, *, timeout: float | None = None, version: float | None = None) -> QueueSlot[T]:
        """Return a ``with`` block that takes a place before the work is done.

        ``with queue.slot() as slot: slot.put(play())``: entering the block waits for a place. A
        block that is left without a put gives the place back, and so does the loss of this rank.

        Args:
            timeout: Seconds to wait for a place; None is the agent's timeout.
            version: Of the item; ``slot.put`` can set another one, and a key.
        """
        return QueueSlot(self._requests, timeout, version)

    def end(self, *, timeout: float | None = None) -> None:
        """End the queue: nothing more can be put, and gets raise once they have emptied it.

        If the queue was made with ``producers``, a rank of these ends only its own part.
        """
        self._requests.ask_once("end", timeout)

    # -- getting -----------------------------------------------------------------------------------

    @overload
    def get(
        self,
        n: None = None,
        *,
        timeout: float | None = None,
        min_version: float | None = None,
        ack: Literal[False] = False,
    ) -> T: ...
    @overload
    def get(
        self,
        n: int,
        *,
        least: int | None = None,
        timeout: float | None = None,
        min_version: float | None = None,
        ack: Literal[False] = False,
    ) -> list[T]: ...
    @overload
    def get(
        self,
        n: int | None = None,
        *,
        least: int | None = None,
        timeout: float | None = None,
        min_version: float | None = None,
        ack: Literal[True],
    ) -> QueueBatch[T]: ...
    def get(
        self,
        n: int | None = None,
        *,
        least: int | None = None,
        timeout: float | None = None,
        min_version: float | None = None,
        ack: bool = False,
    ) -> Any:
        """Take an item, or ``n`` items as a list.

        An item is taken once. If this rank is lost after that, the item is lost with it, unless you
        ask for acknowledgements. A get that fails loses nothing.

        Args:
            n: The number of items, 65536 at most. If the queue ends, the last list is shorter.
            least: How many items are enough; None is ``n``.
            timeout: Seconds to wait; None is the agent's timeout.
            min_version: Drop items of lower versions, and count them as stale.
            ack: Return a ``QueueBatch``. Its items go back to the front of the queue unless it is
                acknowledged: if its ``with`` block raises, or this rank is lost.

        Raises:
            QueueEndedError: The queue has ended and is empty.
            DeadlineExceededError: There were not enough items in time; the error says what the
                queue had, and since when its producers are silent. They stay in the queue.
            PeerLostError: The owner is lost; or the queue is empty, and a rank of its ``producers``
                was lost or left before it ended its part: ``peer`` says which.
        """
        request = self._requests.new()
        items: list[T] = []
        try:
            items = self._take(request, 1 if n is None else n, least, timeout, min_version, ack)
            if ack:
                return QueueBatch(self._requests, request, items)
            self._received.append(request[-1])
            return items[0] if n is None else items
        except BaseException:
            if items:  # interrupted just now
                self._requests.give_back(request)
            raise

    def items(
        self, *, fetch: int = 1, timeout: float | None = None, min_version: float | None = None
    ) -> Iterator[T]:
        """Iterate over items until the queue ends.

        Args:
            fetch: Take up to so many items in one call. If the loop is left, those that it has not
                reached go back; if this rank is lost, they are lost.
            timeout: Seconds to wait for each call; None is the agent's timeout.
            min_version: As for ``get``.
        """
        while True:
            request = self._requests.new()
            items: list[T] = []
            reached = 0
            try:
                try:
                    items = self._take(request, fetch, 1, timeout, min_version, False)
                except QueueEndedError:
                    return
                for item in items:
                    reached += 1
                    yield item
            finally:
                if reached < len(items):
                    # This may be the garbage collector. It has not reached the rest.
                    hand_over(self._requests.give_back, request, reached)
            self._received.append(request[-1])

    def __iter__(self) -> Iterator[T]:
        return self.items()

    def _take(
        self,
        request: Request,
        count: int,
        least: int | None,
        timeout: float | None,
        min_version: float | None,
        is_lease: bool,
    ) -> list[T]:
        least = count if least is None else least
        are_counts = type(count) is int and type(least) is int
        if not (are_counts and 1 <= least <= count <= MOST_ITEMS):
            raise ConfigurationError(
                f"a get takes 1 item or more, and {MOST_ITEMS} at most, not {least!r} to {count!r}"
            )
        deadline = self._requests.deadline(timeout)
        received: list[int] = []
        try:
            while self._received:
                received.append(self._received.popleft())
            packed = self._requests.ask(
                "get", deadline, request, count, least, min_version, is_lease, received
            )
            codec = self._requests.codec
            return [decode_item(codec, payload) for payload in unpack(packed)]
        except InvalidMessageError:  # taken again, the items would be no better
            self._received.append(request[-1])
            raise
        except BaseException as error:
            self._received.extend(received)  # the owner may not know; twice is no harm
            self._requests.undo(request, error)
            raise

    def stats(self, *, timeout: float | None = None) -> QueueStats:
        """Return the counts of the queue at one moment."""
        return QueueStats(*self._requests.ask_once("stats", timeout))

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} on rank {self.owner}>"
