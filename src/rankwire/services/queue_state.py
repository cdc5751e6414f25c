"""The state of one queue at its owner: items, slots, deliveries, waiting puts and gets. Pure.

Every request has a *ticket*: its user and a number. It is settled at once or later; ``settled``
collects the outcomes, and the caller passes them on. What a get has delivered stays under its
ticket: with ``ack`` until the user acknowledges it, otherwise until the user's next get confirms
that it came. So a get that was given up loses nothing.

Puts are served in the order in which they came, and so are gets. A put that a waiting get needs is
always accepted, so that the two never wait for each other. Not safe from several threads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rankwire.errors import OverloadedError
from rankwire.services.queue_settings import QueueSettings, QueueStats
from rankwire.services.queue_supply import Item, Supply
from rankwire.services.queue_users import (
    MOST_USERS,
    Producers,
    QueueActivity,
    QueueOutcome,
    QueueUser,
    RankLoad,
    Ticket,
    User,
)

MOST_ITEMS = 1 << 16  # of one get


class Settled(NamedTuple):
    """The outcome of a request, and what belongs to it: a count, a rank, or the items."""

    outcome: QueueOutcome
    value: Any = None


@dataclass(slots=True, eq=False)
class Put:
    """A put that may wait, or a request for a slot."""

    items: deque[Item]
    is_slot: bool = False
    accepted: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the items that are not accepted yet."""
        return sum(item.nbytes for item in self.items)


@dataclass(slots=True, eq=False)
class Get:
    """A get that may wait."""

    count: int
    least: int
    min_version: float | None = None
    is_lease: bool = False


class Delivery(NamedTuple):
    """What a get has taken."""

    items: list[Item]
    is_lease: bool


class QueueState:
    """Described in the module's docstring; ``now`` returns seconds."""

    def __init__(self, settings: QueueSettings, now: Callable[[], float]) -> None:
        self.settings = settings
        self.settled: list[tuple[Ticket, Settled]] = []
        self._stats = QueueStats()
        self.supply = Supply(settings, self._stats)
        self.puts: OrderedDict[Ticket, Put] = OrderedDict()
        self.gets: OrderedDict[Ticket, Get] = OrderedDict()
        self.slots: dict[Ticket, None] = {}
        self.deliveries: dict[Ticket, Delivery] = {}
        self.producers = Producers(settings.producers)
        self.activity = QueueActivity(now)
        self._users: dict[User, QueueUser] = {}
        self._loads: dict[int, RankLoad] = {}  # by rank

    # -- requests ----------------------------------------------------------------------------------

    def put(self, ticket: Ticket, items: Iterable[Item]) -> None:
        """Put one or more items, in order."""
        self._note_put(ticket)
        self._request(ticket, Put(deque(items)))

    def take_slot(self, ticket: Ticket) -> None:
        """Take a place for an item that ``fill`` brings."""
        self._request(ticket, Put(deque(), is_slot=True))

    def fill(self, ticket: Ticket, item: Item) -> None:
        """Put an item into a slot."""
        self._note_put(ticket)
        if self.slots.pop(ticket, ticket) is ticket:
            self._settle(ticket, QueueOutcome.NO_SLOT, 0)
        elif self.producers.has_ended:
            self._settle(ticket, QueueOutcome.ENDED, 0)
        else:
            self.supply.insert(item)
            self._user(ticket).remember(ticket.number, 1)
            self._settle(ticket, QueueOutcome.DONE, 1)
        self._advance()

    def get(self, ticket: Ticket, get: Get, received: Sequence[int] = ()) -> None:
        """Take items; ``received`` are the numbers of this user's gets whose items came."""
        self.activity.note_get(ticket.user[0])
        for number in received:
            self._take_delivery(Ticket(ticket.user, number))
        user = self._user(ticket)
        refusal = user.refusal(ticket.number, 0)
        if refusal is not None:
            self._settle(ticket, refusal)
            return
        user.load.waiting += 1
        self.gets[ticket] = get
        self._advance()

    def acknowledge(self, ticket: Ticket) -> bool:
        """Consume what a get with ``ack`` has delivered; return False if it was returned."""
        delivery = self._take_delivery(ticket)
        if delivery is None:
            return False
        self.supply.consume(delivery.items)
        self._advance()
        return True

    def withdraw(self, ticket: Ticket, keep: int = 0) -> int:
        """Undo a request, but ``keep`` the first items of a delivery.

        Returns how many items of a put were accepted, or -1 if that is not known.
        """
        user = self._user(ticket)
        accepted = user.accepted(ticket.number)
        if ticket in self.gets:
            self._end_get(ticket)
        elif (put := self.puts.get(ticket)) is not None:
            accepted = put.accepted
            self._end_put(ticket)
        elif ticket in self.slots:
            del self.slots[ticket]
        elif (delivery := self._take_delivery(ticket)) is not None:
            if delivery.is_lease:
                self.supply.consume(delivery.items[:keep])
            self.supply.put_back(delivery.items[keep:], delivery.is_lease)
        user.remember(ticket.number, max(accepted, 0))
        self._advance()
        return accepted

    def end(self, rank: int) -> None:
        """End the part of a declared producer, or the whole queue."""
        self.producers.end(rank)
        self._advance()

    def forget(self, rank: int, is_gone: Callable[[User], bool]) -> None:
        """Drop the requests of users of a rank who are gone, and return what they hold."""
        users = self._users.items()
        if not any(u[0] == rank and known.has_put and not is_gone(u) for u, known in users):
            self.producers.gone(rank)
        gone = [user for user in self._users if user[0] == rank and is_gone(user)]
        for ticket in [ticket for ticket in self.gets if ticket.user in gone]:
            self._end_get(ticket)
        for ticket in [ticket for ticket in self.puts if ticket.user in gone]:
            self._end_put(ticket)
        for ticket in [ticket for ticket in self.slots if ticket.user in gone]:
            del self.slots[ticket]
        held = [ticket for ticket in self.deliveries if ticket.user in gone]
        for ticket in reversed(held):  # so that the first ones are at the front
            delivery = self._take_delivery(ticket)
            if delivery is not None and delivery.is_lease:
                self.supply.put_back(delivery.items, is_lease=True)
        for user in gone:
            del self._users[user]
        self._advance()

    def stats(self) -> QueueStats:
        """Return the counts of this moment."""
        return replace(
            self._stats,
            queued=len(self.supply.items),
            slots=len(self.slots),
            waiting_producers=len(self.puts),
            waiting_consumers=len(self.gets),
            ended=self.producers.has_ended,
        )

    # -- the state machine -------------------------------------------------------------------------

    def _user(self, ticket: Ticket) -> QueueUser:
        user = self._users.get(ticket.user)
        if user is None:
            rank = ticket.user[0]
            if sum(each[0] == rank for each in self._users) >= MOST_USERS:
                raise OverloadedError(f"{MOST_USERS} agents of rank {rank} use this queue")
            load = self._loads.setdefault(rank, RankLoad())
            user = self._users[ticket.user] = QueueUser(load)
        return user

    def _note_put(self, ticket: Ticket) -> None:
        self.activity.note_put(ticket.user[0])
        self.producers.returned(ticket.user[0])
        self._user(ticket).has_put = True

    def _settle(self, ticket: Ticket, outcome: QueueOutcome, value: Any = None) -> None:
        self.settled.append((ticket, Settled(outcome, value)))

    def _request(self, ticket: Ticket, put: Put) -> None:
        user, nbytes = self._user(ticket), put.nbytes
        refusal = user.refusal(ticket.number, nbytes)
        if refusal is not None:
            self._settle(ticket, refusal, 0)
            return
        user.load.waiting += 1
        user.load.waiting_nbytes += nbytes
        self.puts[ticket] = put
        if self.settings.drops and not (put.is_slot or self.supply.runs_ahead):
            self.puts.move_to_end(ticket, last=False)  # it must not wait behind slots
        self._advance()

    def _advance(self) -> None:
        # First what has a place, so that a get that takes many has many to take.
        while self._admit_put() or self._serve_get():
            pass  # each may be what the other waits for

    def _serve_get(self) -> bool:
        """Settle the first get that waits, if that is possible."""
        if not self.gets:
            return False
        ticket, get = next(iter(self.gets.items()))
        if get.min_version is not None:
            self.supply.drop_stale(get.min_version)
        has_ended = self.producers.has_ended
        count = min(get.count, self.supply.available(has_ended))
        if count >= get.least or (count and has_ended):
            items = self.supply.take(count, get.is_lease)
            self._user(ticket).load.deliveries += 1
            self.deliveries[ticket] = Delivery(items, get.is_lease)
            self._settle(ticket, QueueOutcome.DONE, items)
        elif not has_ended or self._stats.leased:  # what is leased may come back
            return False
        elif (missing := self.producers.missing) is not None:
            self._settle(ticket, QueueOutcome.PRODUCER_GONE, missing)
        else:
            self._settle(ticket, QueueOutcome.ENDED)
        self._end_get(ticket)
        return True

    def _admit_put(self) -> bool:
        """Accept an item of the first put that waits, or settle it, if that is possible."""
        if not self.puts:
            return False
        ticket, put = next(iter(self.puts.items()))
        if self.producers.has_ended:
            outcome: QueueOutcome | None = QueueOutcome.ENDED
        elif put.is_slot:
            outcome = self._admit_slot(ticket)
        else:
            outcome = self._admit_item(put)
            if outcome is QueueOutcome.DONE:
                item = put.items.popleft()
                put.accepted += 1
                self._user(ticket).load.waiting_nbytes -= item.nbytes
                if put.items:
                    return True
        if outcome is None:
            return False
        self._user(ticket).remember(ticket.number, put.accepted)
        self._end_put(ticket)
        self._settle(ticket, outcome, put.accepted)
        return True

    def _admit_slot(self, ticket: Ticket) -> QueueOutcome | None:
        if self.supply.has_place(len(self.slots), 0) or self._needs_slot():
            self.slots[ticket] = None
            return QueueOutcome.DONE
        return QueueOutcome.FULL if self.settings.when_full == "refuse" else None

    def _needs_slot(self) -> bool:
        return self._first_least() > self.supply.available(has_ended=False) + len(self.slots)

    def _admit_item(self, put: Put) -> QueueOutcome | None:
        item = put.items[0]
        if not self._is_needed():  # what a get waits for is always accepted
            if self.supply.runs_ahead:
                return None
            if not self.supply.has_place(len(self.slots), item.nbytes):
                if not self.settings.drops:
                    return QueueOutcome.FULL if self.settings.when_full == "refuse" else None
                self.supply.drop_for(item, len(self.slots))
        if not item.is_dropped:
            self.supply.insert(item)
        return QueueOutcome.DONE

    def _is_needed(self) -> bool:
        return self._first_least() > self.supply.available(has_ended=False)

    def _first_least(self) -> int:
        """Return how many items are enough for the first get; 0 if none waits."""
        return next((get.least for get in self.gets.values()), 0)

    def _end_get(self, ticket: Ticket) -> None:
        del self.gets[ticket]
        self._user(ticket).load.waiting -= 1

    def _end_put(self, ticket: Ticket) -> None:
        user, put = self._user(ticket), self.puts.pop(ticket)
        user.load.waiting -= 1
        user.load.waiting_nbytes -= put.nbytes

    def _take_delivery(self, ticket: Ticket) -> Delivery | None:
        delivery = self.deliveries.pop(ticket, None)
        if delivery is not None:
            self._user(ticket).load.deliveries -= 1
        return delivery
