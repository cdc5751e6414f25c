"""The state of a queue: against a simple model, and its accounts with all settings."""

import math
from collections import Counter, deque
from dataclasses import astuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faults.sizes import examples
from rankwire import ConfigurationError, OverloadedError
from rankwire.services.queue_description import describe_wait
from rankwire.services.queue_settings import QueueSettings
from rankwire.services.queue_state import Get, QueueState
from rankwire.services.queue_supply import Item
from rankwire.services.queue_users import QueueOutcome, Ticket

DONE, FULL, ENDED = QueueOutcome.DONE, QueueOutcome.FULL, QueueOutcome.ENDED


class Driver:
    """Makes requests of a queue's state, and notes their outcomes by the number of the request."""

    def __init__(self, **options):
        self.now = 0.0
        self.state = QueueState(QueueSettings(**options), lambda: self.now)
        self.count = 0
        self.outcomes = {}

    def ticket(self, rank=1):
        self.count += 1
        return Ticket((rank, 0, 7), self.count)

    def settle(self):
        for ticket, settled in self.state.settled:
            assert ticket not in self.outcomes, "settled twice"
            self.outcomes[ticket] = settled
        self.state.settled.clear()

    def put(self, *values, rank=1, nbytes=1, version=None, key=0.0):
        ticket = self.ticket(rank)
        self.state.put(ticket, [Item(value, nbytes, version, key) for value in values])
        self.settle()
        return ticket

    def get(self, count=1, least=None, rank=2, min_version=None, is_lease=False, received=()):
        ticket = self.ticket(rank)
        least = count if least is None else least
        self.state.get(ticket, Get(count, least, min_version, is_lease), received)
        self.settle()
        return ticket

    def slot(self, rank=1):
        ticket = self.ticket(rank)
        self.state.take_slot(ticket)
        self.settle()
        return ticket

    def fill(self, slot, value):
        """Fill a slot; its ticket is settled a second time."""
        self.outcomes.pop(slot)
        self.do("fill", slot, Item(value, 1))

    def do(self, method, *args):
        result = getattr(self.state, method)(*args)
        self.settle()
        return result

    def lose(self, rank):
        self.do("forget", rank, lambda user: True)

    def outcome(self, ticket):
        return self.outcomes[ticket].outcome if ticket in self.outcomes else None

    def values(self, ticket):
        """Return what a get has got; None while it waits."""
        settled = self.outcomes.get(ticket)
        if settled is None:
            return None
        assert settled.outcome is DONE, settled
        return [item.payload for item in settled.value]

    def check(self):
        stats = self.state.stats()
        found = stats.consumed + stats.dropped + stats.stale + stats.queued + stats.leased
        assert stats.produced == found, stats
        assert min(astuple(stats)) >= 0, stats


# -- one behaviour at a time -----------------------------------------------------------------------


def test_a_put_waits_for_a_place_and_a_get_for_an_item():
    queue = Driver(capacity=2)
    puts = [queue.put("a", "b"), queue.put("c"), queue.put("d")]
    assert [queue.outcome(put) for put in puts] == [DONE, None, None]
    assert queue.values(queue.get()) == ["a"]
    assert [queue.outcome(put) for put in puts] == [DONE, DONE, None]
    assert queue.values(queue.get(3)) == ["b", "c", "d"]
    waits = queue.get(2)
    queue.put("e")
    assert queue.values(waits) is None
    queue.put("f")
    assert queue.values(waits) == ["e", "f"]


def test_a_get_may_be_content_with_less():
    queue = Driver(capacity=8)
    queue.put("a", "b")
    assert queue.values(queue.get(5, least=1)) == ["a", "b"]


def test_a_get_of_more_than_the_capacity_lets_more_in():
    queue = Driver(capacity=2, capacity_nbytes=10)
    queue.put("a", "b")
    put, get = queue.put("c", "d", "e", nbytes=100), queue.get(4)
    assert queue.values(get) == ["a", "b", "c", "d"]
    assert queue.outcome(put) is DONE


def test_a_slot_before_a_put_lets_a_get_of_more_than_the_capacity_go_on():
    queue = Driver(capacity=2)
    queue.put("a", "b")
    slot, put = queue.slot(), queue.put("c")
    get = queue.get(3)
    assert queue.outcome(slot) is DONE
    assert queue.outcome(put) is DONE
    assert queue.values(get) == ["a", "b", "c"]
    queue.fill(slot, "s")
    assert queue.values(queue.get()) == ["s"]


def test_drop_oldest_keeps_the_newest_items():
    queue = Driver(capacity=2, when_full="drop_oldest")
    assert queue.outcome(queue.put(*"abcd")) is DONE
    assert queue.state.stats().dropped == 2
    assert queue.values(queue.get(2)) == ["c", "d"]


def test_drop_newest_keeps_the_oldest_items():
    queue = Driver(capacity=2, when_full="drop_newest")
    assert queue.outcome(queue.put(*"abcd")) is DONE
    assert queue.state.stats().dropped == 2
    assert queue.values(queue.get(2)) == ["a", "b"]


def test_refuse_says_how_many_were_accepted():
    queue = Driver(capacity=2, when_full="refuse")
    refused = queue.put(*"abc")
    assert queue.outcomes[refused] == (FULL, 2)
    assert queue.outcome(queue.slot()) is FULL


@pytest.mark.parametrize("when_full", ["drop_oldest", "drop_newest"])
def test_a_put_that_drops_does_not_wait_behind_a_slot(when_full):
    queue = Driver(capacity=1, when_full=when_full)
    first, second = queue.slot(), queue.slot()
    assert queue.outcome(queue.put("a")) is DONE
    assert [queue.outcome(first), queue.outcome(second)] == [DONE, None]
    queue.fill(first, "b")
    assert queue.values(queue.get()) == ["b"]


def test_bytes_are_limited_but_one_item_always_fits():
    queue = Driver(capacity=9, capacity_nbytes=100)
    assert queue.outcome(queue.put("a", nbytes=1000)) is DONE
    waits = queue.put("b", nbytes=60)
    queue.get()
    assert queue.outcome(waits) is DONE
    assert queue.outcome(queue.put("c", nbytes=60)) is None
    assert queue.outcome(queue.put("d", nbytes=1)) is None, "no put overtakes another"


def test_a_slot_takes_a_place_and_comes_back_if_it_is_not_filled():
    queue = Driver(capacity=2)
    first, second, third = queue.slot(), queue.slot(), queue.slot()
    assert [queue.outcome(slot) for slot in (first, second, third)] == [DONE, DONE, None]
    queue.do("withdraw", first)
    assert queue.outcome(third) is DONE
    queue.fill(second, "a")
    assert queue.values(queue.get()) == ["a"]
    queue.lose(1)
    assert queue.state.stats().slots == 0


def test_a_slot_is_filled_once():
    queue = Driver(capacity=2)
    slot = queue.slot()
    queue.fill(slot, "a")
    queue.fill(slot, "b")
    assert queue.outcome(slot) is QueueOutcome.NO_SLOT


def test_items_that_are_not_acknowledged_go_back_to_the_front():
    queue = Driver(capacity=9)
    queue.put(*"abcde")
    first, second = queue.get(2, is_lease=True), queue.get(1, is_lease=True, rank=3)
    assert queue.state.stats().leased == 3
    assert queue.do("acknowledge", second)
    assert not queue.do("acknowledge", second)
    queue.lose(2)
    assert not queue.do("acknowledge", first)
    assert queue.values(queue.get(4)) == ["a", "b", "d", "e"]
    queue.check()


def test_a_plain_get_of_a_lost_rank_has_consumed_its_items():
    queue = Driver(capacity=9)
    queue.put(*"ab")
    queue.get()
    queue.lose(2)
    assert queue.values(queue.get()) == ["b"]


def test_a_get_that_was_given_up_loses_nothing():
    queue = Driver(capacity=9)
    queue.put(*"abc")
    given_up = queue.get(2)
    queue.do("withdraw", given_up)
    assert queue.state.stats().consumed == 0
    get = queue.get()
    assert queue.values(get) == ["a"]
    queue.do("withdraw", get, 1)
    queue.get(1, received=[get.number])
    queue.do("withdraw", get)
    assert queue.values(queue.get()) == ["c"], "the first two are consumed for good"


def test_a_request_that_comes_after_it_was_given_up_is_refused():
    queue = Driver(capacity=9)
    late = queue.ticket()
    queue.do("withdraw", late)
    queue.do("put", late, [Item("a", 1)])
    assert queue.outcome(late) is QueueOutcome.UNWANTED
    assert queue.state.stats().produced == 0


def test_it_is_known_what_became_of_a_put():
    queue = Driver(capacity=2)
    accepted, partly, waits = queue.put("a"), queue.put("b", "c"), queue.put("d")
    assert queue.do("withdraw", accepted) == 1
    assert queue.do("withdraw", partly) == 1
    assert queue.do("withdraw", waits) == 0
    for _ in range(300):
        queue.get()
        queue.put("x")
    assert queue.do("withdraw", accepted) == -1, "forgotten"


def test_the_end_comes_after_the_last_item():
    queue = Driver(capacity=2)
    queue.put("a", "b")
    blocked = queue.put("c")
    queue.do("end", 1)
    assert queue.outcome(blocked) is ENDED
    assert queue.outcome(queue.put("d")) is ENDED
    assert queue.values(queue.get(5)) == ["a", "b"], "what is left"
    assert queue.outcome(queue.get()) is ENDED


def test_the_end_waits_for_leased_items():
    queue = Driver(capacity=2)
    queue.put("a", "b")
    leased = queue.get(2, is_lease=True)
    queue.do("end", 1)
    first, second = queue.get(), queue.get()
    queue.do("withdraw", leased, 1)
    assert queue.values(first) == ["b"]
    assert queue.outcome(second) is ENDED


def test_declared_producers_end_the_queue_together():
    queue = Driver(capacity=2, producers=(1, 3))
    queue.put("a")
    queue.do("end", 1)
    assert queue.outcome(queue.put("b", rank=3)) is DONE
    queue.get(2)
    waits = queue.get()
    queue.do("end", 3)
    assert queue.outcome(waits) is ENDED


def test_another_rank_ends_the_queue_for_all_producers():
    queue = Driver(capacity=2, producers=(1, 3))
    queue.do("end", 0)
    assert queue.outcome(queue.put("b", rank=3)) is ENDED


def test_a_producer_that_is_lost_before_its_end_is_named():
    queue = Driver(capacity=2, producers=(1, 3))
    queue.put("a", rank=3)
    queue.lose(3)
    assert queue.values(queue.get()) == ["a"]
    waits = queue.get()
    assert queue.outcome(waits) is None, "rank 1 may still put"
    queue.do("end", 1)
    assert queue.outcomes[waits] == (QueueOutcome.PRODUCER_GONE, 3)
    queue.put("b", rank=3)  # it was started again
    assert queue.values(queue.get()) == ["b"]
    queue.do("end", 3)
    assert queue.outcome(queue.get()) is ENDED


def test_a_producer_that_was_restarted_and_puts_is_not_gone():
    """Also if the queue learns of its loss only then."""
    state = QueueState(QueueSettings(capacity=2, producers=(1,)), lambda: 0.0)
    state.put(Ticket((1, 1, 7), 1), [Item(b"a", 1)])
    state.forget(1, lambda user: user[1] < 1)
    assert state.producers.missing is None
    state.forget(1, lambda user: True)
    assert state.producers.missing == 1


def test_versions_below_the_bound_are_dropped_and_counted():
    queue = Driver(capacity=9)
    for version in (1, 5, 2, None, 7):
        queue.put(version, version=version)
    assert queue.values(queue.get(3, min_version=5)) == [5, None, 7]
    assert queue.state.stats().stale == 2
    waits = queue.get(min_version=8)
    queue.put(7, version=7)
    queue.put(8, version=8)
    assert queue.values(waits) == [8]
    queue.check()


def test_uniform_takes_every_item_once_and_repeats_itself():
    orders = []
    for seed in (3, 3, 4):
        queue = Driver(capacity=99, order="uniform", seed=seed)
        queue.put(*range(50))
        orders.append(queue.values(queue.get(50)))
        assert sorted(orders[-1]) == list(range(50))
    assert orders[0] == orders[1] != orders[2]


def test_key_takes_the_lowest_first_and_of_equal_ones_the_oldest():
    queue = Driver(capacity=9, order="key")
    for value, key in (("a", 2.0), ("b", 1.0), ("c", 2.0), ("d", -1.0)):
        queue.put(value, key=key)
    leased = queue.get(2, is_lease=True)
    assert queue.values(leased) == ["d", "b"]
    queue.do("withdraw", leased)
    assert queue.values(queue.get(4)) == ["d", "b", "a", "c"]


def test_an_order_does_not_grow_while_its_items_are_dropped():
    queue = Driver(capacity=4, order="key", when_full="drop_oldest")
    for number in range(2000):
        queue.put(number, key=-number, version=number)
    heaps = (queue.state.supply._order._heap, queue.state.supply._versions._heap)
    assert max(map(len, heaps)) < 100


def test_items_are_taken_several_times():
    queue = Driver(capacity=2, uses=2)
    queue.put("a", "b")
    assert queue.values(queue.get(3)) == ["a", "a", "b"]
    assert queue.state.stats().consumed == 1
    leased = queue.get(is_lease=True)
    assert queue.state.stats().leased == 1
    queue.do("withdraw", leased)
    assert queue.values(queue.get()) == ["b"]
    queue.check()


def test_without_a_limit_of_uses_items_stay_until_they_are_dropped():
    queue = Driver(capacity=2, uses=None, order="uniform", when_full="drop_oldest")
    queue.put("a", "b", "c")
    assert set(queue.values(queue.get(100))) == {"b", "c"}
    assert queue.state.stats().consumed == 0
    queue.do("end", 1)
    assert queue.outcome(queue.get()) is ENDED


def test_a_ratio_holds_gets_back_and_the_tolerance_puts():
    queue = Driver(capacity=9, uses=None, ratio=2.0, tolerance=4.0)
    queue.put("a", "b")
    held = queue.put("c")
    assert queue.outcome(held) is None
    assert len(queue.values(queue.get(3))) == 3
    assert queue.outcome(held) is DONE
    waits = queue.get(6)
    assert queue.outcome(waits) is None
    queue.put("d", "e")
    assert len(queue.values(waits)) == 6
    text = describe_wait(queue.state, queue.get(9))
    assert text.startswith("ratio 2: 5 inserted, 9 sampled"), text


def test_a_low_ratio_lets_in_what_a_get_needs():
    queue = Driver(capacity=4, ratio=0.5, tolerance=1.0)
    get = queue.get(3)
    for number in range(6):
        assert queue.outcome(queue.put(number)) is DONE
    assert queue.values(get) == [0, 1, 2]


def test_a_rank_with_too_many_requests_is_refused():
    queue = Driver(capacity=1)
    gets = [queue.get() for _ in range(1025)]
    assert queue.outcome(gets[-1]) is QueueOutcome.TOO_MANY
    assert queue.outcome(queue.get(rank=3)) is None
    queue = Driver(capacity=1)
    queue.put("a")
    puts = [queue.put("b", nbytes=200 << 20) for _ in range(2)]
    assert [queue.outcome(put) for put in puts] == [None, QueueOutcome.TOO_MANY]
    queue = Driver(capacity=2000)
    queue.put(*range(1500))
    leases = [queue.get(is_lease=True) for _ in range(1025)]
    assert queue.outcome(leases[-1]) is QueueOutcome.TOO_MANY


def test_the_limits_are_those_of_a_rank_and_not_of_its_agents():
    state = QueueState(QueueSettings(capacity=1), lambda: 0.0)
    for number in range(1025):
        state.get(Ticket((1, 0, number % 200), number), Get(1, 1))
    ((_, settled),) = state.settled
    assert settled.outcome is QueueOutcome.TOO_MANY
    for agent in range(200, 256):
        state.withdraw(Ticket((1, 0, agent), 1))
    with pytest.raises(OverloadedError, match="256 agents of rank 1 use this queue"):
        state.withdraw(Ticket((1, 0, 256), 1))
    state.forget(1, lambda user: True)
    state.settled.clear()
    state.get(Ticket((1, 0, 256), 1), Get(1, 1))
    assert not state.settled


def test_what_a_request_waits_for_is_said():
    queue = Driver(capacity=2)
    queue.put("a", rank=3)
    queue.get()
    queue.now = 9.0
    text = describe_wait(queue.state, queue.get())
    assert text == "it is empty: 1 inserted, 1 consumed; producers: rank 3 silent for 9 s"
    queue.put("b", "c", "d")
    slot = queue.slot()
    text = describe_wait(queue.state, slot)
    assert text == "it is full: 2 of 2 items, 2 bytes; consumers: rank 2 silent for 0 s"
    assert describe_wait(Driver(capacity=1).state, slot).endswith("no consumers yet")


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 0},
        {"capacity": 1.5},
        {"capacity": 1, "when_full": "wait"},
        {"capacity": 1, "order": "lifo"},
        {"capacity": 1, "uses": 0},
        {"capacity": 1, "ratio": 0},
        {"capacity": 1, "ratio": math.nan},
        {"capacity": 1, "tolerance": -1.0},
        {"capacity": 1, "seed": "x"},
    ],
)
def test_invalid_settings_are_refused(options):
    with pytest.raises(ConfigurationError, match="of a queue is"):
        QueueSettings(**options)


# -- against a model -------------------------------------------------------------------------------


class FifoModel(RuleBasedStateMachine):
    """A blocking queue: what each get returns is what a simple queue would return."""

    @initialize(capacity=st.integers(1, 4))
    def make(self, capacity):
        self.capacity = capacity
        self.queue = Driver(capacity=capacity)
        self.items = deque()  # of the model
        self.puts = {}  # the items of waiting puts
        self.gets = {}  # counts of waiting gets
        self.leases = {}
        self.results = {}
        self.number = 0

    def advance(self):
        """Let the model do what it can."""
        is_going_on = True
        while is_going_on:
            is_going_on = False
            if self.gets:
                ticket, (count, is_lease) = next(iter(self.gets.items()))
                if len(self.items) >= count:
                    del self.gets[ticket]
                    taken = [self.items.popleft() for _ in range(count)]
                    self.results[ticket] = taken
                    if is_lease:
                        self.leases[ticket] = taken
                    is_going_on = True
                    continue
            if self.puts:
                ticket, items = next(iter(self.puts.items()))
                if self.gets or len(self.items) < self.capacity:
                    self.items.append(items.popleft())
                    is_going_on = True
                    if not items:
                        del self.puts[ticket]

    @rule(count=st.integers(1, 3), rank=st.sampled_from([1, 2]))
    def put(self, count, rank):
        values = range(self.number, self.number + count)
        self.number += count
        ticket = self.queue.put(*values, rank=rank)
        self.puts[ticket] = deque(values)
        self.advance()

    @rule(count=st.integers(1, 6), is_lease=st.booleans(), rank=st.sampled_from([1, 2, 3]))
    def get(self, count, is_lease, rank):
        ticket = self.queue.get(count, is_lease=is_lease, rank=rank)
        self.gets[ticket] = (count, is_lease)
        self.advance()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.booleans())
    def end_a_lease(self, data, keep):
        ticket = data.draw(st.sampled_from(list(self.leases)))
        items = self.leases.pop(ticket)
        if keep:
            assert self.queue.do("acknowledge", ticket)
        else:
            self.queue.do("withdraw", ticket)
            self.items.extendleft(reversed(items))
        self.advance()

    @precondition(lambda self: self.gets or self.puts)
    @rule(data=st.data())
    def give_up(self, data):
        ticket = data.draw(st.sampled_from([*self.gets, *self.puts]))
        self.queue.do("withdraw", ticket)
        self.gets.pop(ticket, None)
        self.puts.pop(ticket, None)
        self.advance()

    @rule(rank=st.sampled_from([1, 2, 3]))
    def lose(self, rank):
        self.queue.lose(rank)
        for waiting in (self.gets, self.puts):
            for ticket in [ticket for ticket in waiting if ticket.user[0] == rank]:
                del waiting[ticket]
        for ticket in [ticket for ticket in reversed(self.leases) if ticket.user[0] == rank]:
            self.items.extendleft(reversed(self.leases.pop(ticket)))
        self.advance()

    @invariant()
    def is_like_the_model(self):
        if not hasattr(self, "queue"):
            return
        self.queue.check()
        state = self.queue.state
        assert [item.payload for item in state.supply.items.values()] == list(self.items)
        assert list(state.gets) == list(self.gets)
        assert list(state.puts) == list(self.puts)
        for ticket, values in self.results.items():
            assert self.queue.values(ticket) == values
        assert state.stats().leased == sum(map(len, self.leases.values()))


class AnyQueue(RuleBasedStateMachine):
    """A queue with any settings: its accounts are right, and each item is where they say."""

    @initialize(
        options=st.fixed_dictionaries(
            {
                "capacity": st.integers(1, 4),
                "capacity_nbytes": st.sampled_from([3, 1000]),
                "when_full": st.sampled_from(["block", "drop_oldest", "drop_newest", "refuse"]),
                "order": st.sampled_from(["fifo", "uniform", "key"]),
                "uses": st.sampled_from([1, 1, 2, None]),
                "ratio": st.sampled_from([None, None, 0.5, 3.0]),
                "tolerance": st.sampled_from([2.0, math.inf]),
                "producers": st.sampled_from([(), (1, 2)]),
            }
        )
    )
    def make(self, options):
        self.options = options
        self.queue = Driver(**options)
        self.leases, self.slots = [], []
        self.number = 0

    def item(self, version):
        self.number += 1
        return Item(self.number, 1, version, float(-self.number % 3))

    @rule(
        count=st.integers(1, 5),
        rank=st.sampled_from([1, 2]),
        version=st.one_of(st.none(), st.integers(0, 4)),
    )
    def put(self, count, rank, version):
        ticket = self.queue.ticket(rank)
        self.queue.do("put", ticket, [self.item(version) for _ in range(count)])

    @rule(rank=st.sampled_from([1, 2]))
    def take_slot(self, rank):
        self.slots.append(self.queue.slot(rank))

    @precondition(lambda self: self.slots)
    @rule(fill=st.booleans())
    def end_a_slot(self, fill):
        slot = self.slots.pop()
        if fill and self.queue.outcome(slot) is DONE:
            self.queue.outcomes.pop(slot)
            self.queue.do("fill", slot, self.item(None))
        else:
            self.queue.do("withdraw", slot)

    @rule(
        count=st.integers(1, 6),
        least=st.integers(1, 6),
        rank=st.sampled_from([2, 3]),
        min_version=st.one_of(st.none(), st.integers(0, 4)),
        is_lease=st.booleans(),
        keep=st.integers(0, 2),
    )
    def get(self, count, least, rank, min_version, is_lease, keep):
        ticket = self.queue.get(count, min(count, least), rank, min_version, is_lease)
        self.leases.append((ticket, keep))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), acknowledge=st.booleans())
    def end_a_get(self, data, acknowledge):
        ticket, keep = data.draw(st.sampled_from(self.leases))
        self.leases.remove((ticket, keep))
        delivery = self.queue.state.deliveries.get(ticket)
        if acknowledge and delivery is not None and delivery.is_lease:
            assert self.queue.do("acknowledge", ticket)
        else:
            self.queue.do("withdraw", ticket, keep)

    @rule(rank=st.sampled_from([0, 1, 2]), is_rare=st.integers(0, 5))
    def end(self, rank, is_rare):
        if not is_rare:
            self.queue.do("end", rank)

    @rule(rank=st.sampled_from([1, 2, 3]))
    def lose(self, rank):
        self.queue.lose(rank)

    @invariant()
    def accounts_are_right(self):
        if not hasattr(self, "queue"):
            return
        queue, state = self.queue, self.queue.state
        queue.check()
        stats, items = state.stats(), state.supply.items
        assert stats.nbytes == sum(item.nbytes for item in items.values())
        held = Counter()
        for delivery in state.deliveries.values():
            held.update(item.number for item in delivery.items if delivery.is_lease)
        gone = {
            item.number
            for delivery in state.deliveries.values()
            for item in delivery.items
            if item.is_dropped
        }
        assert stats.leased == len(held.keys() - items.keys() - gone)
        if self.options["uses"] == 1:
            assert not held or max(held.values()) == 1, "leased twice"
        if stats.ended:
            assert not state.puts
        elif state.puts and not state.gets:
            is_full = len(items) + len(state.slots) >= self.options["capacity"]
            is_full = is_full or stats.nbytes >= self.options["capacity_nbytes"]
            assert is_full or state.supply.runs_ahead, "a put waits though there is a place"
        for waiting in state.gets.values():
            assert state.supply.available(stats.ended) < waiting.least or len(state.gets) > 1
            break
        loads = state._loads.values()
        assert sum(load.waiting for load in loads) == len(state.gets) + len(state.puts)
        waiting_nbytes = sum(put.nbytes for put in state.puts.values())
        assert sum(load.waiting_nbytes for load in loads) == waiting_nbytes
        assert sum(load.deliveries for load in loads) == len(state.deliveries)


MANY = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestFifoModel = FifoModel.TestCase
TestFifoModel.settings = MANY
TestAnyQueue = AnyQueue.TestCase
TestAnyQueue.settings = MANY
