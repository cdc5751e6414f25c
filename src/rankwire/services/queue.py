"""``Queue``: a queue that one rank owns and all ranks use.

Each request has a number. If it fails here, by its deadline, an interrupt or the end of the call
that is being served, the owner is told to undo it, so that no item and no place is lost. Only the
loss of the owner leaves open what became of a put.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import Context
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Self, TypeVar, overload

from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidMessageError,
    OverloadedError,
    PeerLostError,
    QueueEndedError,
    RankwireError,
)
from rankwire.finalizers import hand_over
from rankwire.public_dir import PublicDir
from rankwire.services.queue_client import QueueClient
from rankwire.services.queue_items import decode_item, encode_item, pack, unpack
from rankwire.services.queue_settings import QueueStats
from rankwire.services.queue_users import QueueOutcome

_PART_ITEMS, _PART_NBYTES = 256, 1 << 20  # of one call of ``put_many``
_ANSWER_LIMIT = 1.0  # seconds to learn what became of a request whose deadline has passed

T = TypeVar("T")


class _Part(NamedTuple):
    """Encoded items that one call puts."""

    payloads: list[bytes]
    versions: Any
    key: float


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

    def __init__(
        self, client: QueueClient, name: str, owner: int, number: int, settings: dict[str, Any]
    ) -> None:
        self.name = name
        self.owner = owner
        self.settings = settings
        self._client = client
        self._number = number
        self._received: deque[int] = deque()  # gets whose items came; the owner is not told yet

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
        part = _Part([encode_item(self._client.codec, item)], version, key)
        self._put(part, self._client.deadline_of(timeout), 0)

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
        deadline = self._client.deadline_of(timeout)
        accepted, nbytes, payloads = 0, 0, list[bytes]()
        for item in items:
            try:
                payloads.append(encode_item(self._client.codec, item))
            except RankwireError as error:
                error.accepted = accepted
                raise
            nbytes += len(payloads[-1])
            if len(payloads) == _PART_ITEMS or nbytes >= _PART_NBYTES:
                self._put(_Part(payloads, version, key), deadline, accepted)
                accepted += len(payloads)
                nbytes, payloads = 0, []
        if payloads:
            self._put(_Part(payloads, version, key), deadline, accepted)

    def _put(self, part: _Part, deadline: Deadline, before: int) -> None:
        request = self._client.new_request(self._number)
        packed = pack(part.payloads)
        try:
            accepted = self._ask("put", deadline, request, packed, part.versions, part.key)
        except BaseException as error:
            if not self._put_failed(error, request, len(part.payloads), before):
                raise
        else:
            assert accepted == len(part.payloads)

    def _put_failed(
        self, error: BaseException, request: list[int], count: int, before: int
    ) -> bool:
        """Note in an error which items were accepted; return whether all were after all."""
        answer = self._undo(request, error)
        if not isinstance(error, RankwireError):
            return False
        if answer is not None and answer[0] >= 0:
            accepted, unconfirmed = answer[0], 0
        elif getattr(error, "may_have_run", False):
            accepted, unconfirmed = 0, count
        else:
            accepted, unconfirmed = error.accepted, 0
        error.accepted, error.unconfirmed = before + accepted, unconfirmed
        return bool(accepted == count)

    def slot(
        self,
        *,
        timeout: float | None = None,
        version: float | None = None,
        key: float = 0.0,
    ) -> Slot[T]:
        """Return a ``with`` block that takes a place before the work is done.

        ``with queue.slot() as slot: slot.put(play())``: entering the block waits for a place. A
        block that is left without a put gives the place back, and so does the loss of this rank.
        The arguments are as for ``put``.
        """
        return Slot(self, timeout, version, key)

    def _take_slot(self, timeout: float | None) -> list[int]:
        request = self._client.new_request(self._number)
        try:
            self._ask("slot", self._client.deadline_of(timeout), request)
        except BaseException as error:
            self._undo(request, error)
            raise
        return request

    def _fill_slot(self, request: list[int], payload: bytes, slot: Slot[T]) -> None:
        deadline = self._client.deadline_of(None)
        try:
            self._ask("fill", deadline, request, pack([payload]), slot.version, slot.key)
        except BaseException as error:
            if not self._put_failed(error, request, 1, 0):
                raise

    def end(self, *, timeout: float | None = None) -> None:
        """End the queue: nothing more can be put, and gets raise once they have emptied it.

        If the queue was made with ``producers``, a rank of these ends only its own part.
        """
        self._change("end", timeout)

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
    ) -> Batch[T]: ...
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
            n: The number of items. If the queue ends, the last list is shorter.
            least: How many items are enough; None is ``n``.
            timeout: Seconds to wait; None is the agent's timeout.
            min_version: Drop items of lower versions, and count them as stale.
            ack: Return a ``Batch``. Its items go back to the front of the queue unless it is
                acknowledged: if its ``with`` block raises, or this rank is lost.

        Raises:
            QueueEndedError: The queue has ended and is empty.
            DeadlineExceededError: There were not enough items in time; the error says what the
                queue had, and since when its producers are silent. They stay in the queue.
            PeerLostError: The owner is lost; or the queue is empty, and a rank of its ``producers``
                was lost or left before it ended its part: ``peer`` says which.
        """
        request = self._client.new_request(self._number)
        items: list[T] = []
        try:
            items = self._take(request, 1 if n is None else n, least, timeout, min_version, ack)
            if ack:
                return Batch(self, request, items)
            self._received.append(request[-1])
            return items[0] if n is None else items
        except BaseException:
            if items:  # interrupted just now
                self.give_back(request)
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
            request = self._client.new_request(self._number)
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
                    hand_over(self.give_back, request, reached)
            self._received.append(request[-1])

    def __iter__(self) -> Iterator[T]:
        return self.items()

    def _take(
        self,
        request: list[int],
        count: int,
        least: int | None,
        timeout: float | None,
        min_version: float | None,
        is_lease: bool,
    ) -> list[T]:
        least = count if least is None else least
        if type(count) is not int or type(least) is not int or not 1 <= least <= count:
            raise ConfigurationError(f"a get takes 1 item or more, not {least!r} to {count!r}")
        deadline = self._client.deadline_of(timeout)
        received: list[int] = []
        try:
            while self._received:
                received.append(self._received.popleft())
            packed = self._ask(
                "get", deadline, request, count, least, min_version, is_lease, received
            )
            codec = self._client.codec
            return [decode_item(codec, payload) for payload in unpack(packed)]
        except InvalidMessageError:  # taken again, the items would be no better
            self._received.append(request[-1])
            raise
        except BaseException as error:
            self._received.extend(received)  # the owner may not know; twice is no harm
            self._undo(request, error)
            raise

    def acknowledge(self, request: list[int]) -> None:
        """Acknowledge the items of a batch. For ``Batch``."""
        if not self._change("acknowledge", None, request):
            raise ConfigurationError(
                f"queue {self.name!r} has taken these items back, or they are acknowledged already"
            )

    def stats(self, *, timeout: float | None = None) -> QueueStats:
        """Return the counts of the queue at one moment."""
        return QueueStats(*self._change("stats", timeout))

    # -- the owner ---------------------------------------------------------------------------------

    def _change(
        self, function: str, timeout: float | None, request: list[int] | None = None
    ) -> Any:
        request = self._client.new_request(self._number) if request is None else request
        return self._ask(function, self._client.deadline_of(timeout), request)

    def _ask(self, function: str, deadline: Deadline, request: list[int], *args: Any) -> Any:
        try:
            reply = self._client.call(self.owner, function, deadline, request, *args)
            if type(reply) is not list or len(reply) != 2:
                raise InvalidMessageError("the reply of a queue's owner is not a pair")
            outcome, value = reply
            if outcome != QueueOutcome.DONE:
                self._raise(outcome, value)
        except RankwireError as error:
            error.op = f"queue.{function} {self.name!r}"
            error.during(rank=self._client.rank, peer=self.owner, waited=deadline.waited)
            raise
        return value

    def _raise(self, outcome: int, value: Any) -> NoReturn:
        queue = f"queue {self.name!r} on rank {self.owner}"
        error: RankwireError
        if outcome == QueueOutcome.ENDED:
            error = QueueEndedError(f"{queue} has ended")
        elif outcome == QueueOutcome.FULL:
            error = OverloadedError(f"{queue} is full, with {self.settings['capacity']} items")
        elif outcome == QueueOutcome.TOO_MANY:
            error = OverloadedError(f"{queue}: too many requests or items of this rank wait there")
        elif outcome == QueueOutcome.PRODUCER_GONE:
            error = PeerLostError(value, f"before it had ended its part of {queue}")
        elif outcome == QueueOutcome.UNKNOWN:
            error = PeerLostError(self.owner, f"it was restarted, and had queue {self.name!r}")
        elif outcome == QueueOutcome.NO_SLOT:
            error = ConfigurationError(f"this slot of {queue} was filled or given back")
        else:
            error = ChannelClosedError(f"{queue} is closing, or has taken this rank for lost")
        if outcome in (QueueOutcome.ENDED, QueueOutcome.FULL):
            error.accepted = value or 0
        raise error

    def give_back(self, request: list[int], keep: int = 0) -> None:
        """Undo a request, without waiting. For ``Slot`` and ``Batch``."""
        try:
            self._client.call_soon(self.owner, "withdraw", request, keep).disregard()
        except BaseException:  # interrupted; twice is no harm
            self._client.call_soon(self.owner, "withdraw", request, keep).disregard()
            raise

    def _undo(self, request: list[int], error: BaseException) -> list[Any] | None:
        """Undo a request that failed; return what the owner knows of it, if it was asked.

        After an interrupt, this does not wait.
        """
        if isinstance(error, RankwireError) and not getattr(error, "may_have_run", False):
            return None
        if isinstance(error, (PeerLostError, ChannelClosedError)):
            return None
        try:
            answer = self._withdrawn(request, error)
        except BaseException:  # interrupted again
            self._withdrawn(request, None)
            raise
        if answer is not None and isinstance(error, DeadlineExceededError):
            if f"waits in queue {self.name!r}" not in error.detail:  # the owner ended it first
                error.explain(answer[1])
        return answer

    def _withdrawn(self, request: list[int], error: BaseException | None) -> list[Any] | None:
        future = self._client.call_soon(self.owner, "withdraw", request, 0)
        future.disregard()
        if not isinstance(error, DeadlineExceededError):
            return None
        try:
            # A call that is being served may have no time left.
            outcome, value = Context().run(future.result, _ANSWER_LIMIT)
        except (RankwireError, TimeoutError):
            return None
        return value if outcome == QueueOutcome.DONE else None

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} on rank {self.owner}>"


class Slot(Generic[T]):
    """A place in a queue, for one item; see ``Queue.slot``. For one thread."""

    def __init__(
        self, queue: Queue[T], timeout: float | None, version: float | None, key: float
    ) -> None:
        self._queue = queue
        self._timeout = timeout
        self.version = version
        self.key = key
        self._request: list[int] | None = None
        self._is_filled = False

    def put(self, item: T) -> None:
        """Put the item; it is accepted at once."""
        if self._request is None or self._is_filled:
            raise ConfigurationError("a slot takes one item, inside of its 'with' block")
        payload = encode_item(self._queue._client.codec, item)
        self._queue._fill_slot(self._request, payload, self)
        self._is_filled = True

    def __enter__(self) -> Self:
        self._request = self._queue._take_slot(self._timeout)
        return self

    def __exit__(self, *_: object) -> None:
        if self._request is not None and not self._is_filled:
            self._queue.give_back(self._request)
        self._request = None

    def __del__(self) -> None:
        if self._request is not None and not self._is_filled:  # interrupted
            hand_over(self._queue.give_back, self._request)


class Batch(Sequence[T]):
    """Items that wait for an acknowledgement; see ``Queue.get``. For one thread.

    As a context manager, it acknowledges them at the end, or gives them back after an error. One
    that is dropped gives them back too.
    """

    def __init__(self, queue: Queue[T], request: list[int], items: list[T]) -> None:
        self._queue = queue
        self._request = request
        self._items = items
        self._is_settled = False

    def ack(self) -> None:
        """Acknowledge the items: they are consumed.

        Raises:
            ConfigurationError: They were acknowledged or given back before.
        """
        self._queue.acknowledge(self._request)
        self._is_settled = True

    def give_back(self) -> None:
        """Put the items back to the front of the queue, unless they were acknowledged."""
        if not self._is_settled:
            self._queue.give_back(self._request)
            self._is_settled = True

    def __del__(self) -> None:
        if not self._is_settled:
            hand_over(self._queue.give_back, self._request)

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
        return f"<Batch of {len(self)} items of queue {self._queue.name!r}, {state}>"
