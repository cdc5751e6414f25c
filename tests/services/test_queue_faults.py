"""Producers, consumers and owners of queues are killed: accounts stay exact, errors name them."""

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from faults.sizes import QUICK, trials
from rankwire import (
    DeadlineExceededError,
    FaultPlan,
    PeerLostError,
    QueueEndedError,
    RankwireError,
    RpcAgent,
)
from rankwire.testing import simulated_world
from worlds import PATIENCE, Running, eventually, nursery, process_world, runtime_folder_of_its_own

ITEMS = 9
SOON = 10.0


class Record:
    """What the ranks of a run have done."""

    def __init__(self):
        self.accepted = 0  # that the producer knows of
        self.unconfirmed = 0
        self.got = []
        self.acknowledged = []
        self.errors = {}


def produce(agent, record):
    """Put some items, each in another way."""
    number = 0
    try:
        queue = agent.queue("q", capacity=3, producers=[1])
        while number < ITEMS:
            queue.put(number)
            record.accepted += 1
            queue.put_many([number + 1])
            record.accepted += 1
            with queue.slot() as slot:
                slot.put(number + 2)
            record.accepted += 1
            number += 3
        queue.end()
    except RankwireError as error:
        record.accepted += error.accepted
        record.unconfirmed = error.unconfirmed
        record.errors[1] = error


def consume(agent, record, *, ack):
    try:
        queue = agent.queue("q", capacity=3, producers=[1])
        if not ack:
            for item in queue.items(fetch=2):
                record.got.append(item)
            return
        while True:
            with queue.get(2, least=1, ack=True) as batch:
                record.got += batch
            record.acknowledged += batch
    except QueueEndedError:
        pass
    except RankwireError as error:
        record.errors[2] = error


def run(victim, after, *, ack):
    """Kill a rank after so many messages.

    Returns the record, the owner's counts, what the owner got after the consumer had ended, and how
    many messages the rank has sent.
    """
    plan = FaultPlan().kill(victim, after=after)
    record = Record()
    stats, rest = None, []
    with simulated_world(3, timeout=SOON, faults=plan) as world:
        agents = [RpcAgent(backend) for backend in world]
        producer = Running(produce, agents[1], record)
        consumer = Running(consume, agents[2], record, ack=ack)
        consumer.result(2 * SOON)
        if victim != 0:
            queue = agents[0].queue("q", capacity=3, producers=[1])
            with suppress(PeerLostError):
                rest += queue
            producer.result(2 * SOON)
            eventually(lambda: queue.stats().leased + queue.stats().slots == 0)
            stats = queue.stats()
        producer.result(2 * SOON)
        sent = world[0].network.traffic.sent[victim]
        for agent in agents:
            agent.close(0.0)
    return record, stats, rest, sent


def messages(victim, *, ack):
    record, stats, rest, sent = run(victim, 1_000_000, ack=ack)
    assert not record.errors
    assert record.got == list(range(ITEMS))
    assert record.accepted == ITEMS
    if stats is not None:
        assert stats.consumed == ITEMS
        assert not rest
    return sent


def check(victim, after, *, ack):
    try:
        check_run(victim, *run(victim, after, ack=ack)[:3], ack=ack)
    except BaseException as error:
        error.add_note(f"rank {victim} was killed after {after} messages, ack={ack}")
        raise


def check_run(victim, record, stats, rest, *, ack):
    for rank, error in record.errors.items():
        if rank != victim:
            assert isinstance(error, PeerLostError), error
            assert error.peer == victim
    numbers = [*record.got, *rest]
    if stats is not None:
        found = stats.consumed + stats.dropped + stats.stale + stats.queued + stats.leased
        assert stats.produced == found, stats
        if victim == 1:
            assert record.accepted <= stats.produced <= record.accepted + 1
            assert numbers == list(range(stats.produced)), "each once"
        elif not ack:
            assert len(set(numbers)) == len(numbers), "at most once"
            assert stats.produced == record.accepted
            lost = set(range(stats.produced)) - set(numbers)
            assert len(lost) <= 2, "those on their way to the consumer"
        else:
            twice = {number for number in numbers if numbers.count(number) > 1}
            assert set(numbers) == set(range(stats.produced)), "at least once"
            assert not twice & set(record.acknowledged)
    elif victim == 0:
        assert record.got == list(range(len(record.got))), "in order, each once"
        assert len(record.got) <= record.accepted + record.unconfirmed + 1
        if 1 in record.errors:
            assert record.unconfirmed <= 1


@pytest.mark.parametrize("ack", [False, True])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_is_killed_after_each_of_its_messages(victim, ack):
    sent = messages(victim, ack=ack)
    step = 3 if QUICK else 1
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(check, victim, after, ack=ack) for after in range(1, sent + 1, step)]
        for each in done:
            each.result()


def test_a_put_to_an_owner_that_is_killed_says_what_it_may_have_accepted():
    with simulated_world(2, timeout=PATIENCE) as world:
        agents = [RpcAgent(backend) for backend in world]
        queue = agents[1].queue("q", capacity=3)
        putting = Running(queue.put_many, range(5))
        getting = Running(agents[1].queue("other", capacity=1).get)
        eventually(lambda: queue.stats().waiting_producers)
        world[0].network.kill(0)
        error = putting.error()
        assert isinstance(error, PeerLostError)
        assert (error.peer, error.accepted, error.unconfirmed) == (0, 0, 5)
        assert getting.error().peer == 0
        with pytest.raises(PeerLostError) as info:
            queue.put("later")
        assert info.value.unconfirmed == 0
        for agent in agents:
            agent.close(0.0)


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture
def ranks():
    with runtime_folder_of_its_own(), nursery(), process_world(3) as ranks:
        for rank in ranks:
            rank.call("eval", "globals().update(agent=__import__('rankwire').RpcAgent(backend))")
            open_queue = "queue=agent.queue('q', capacity=4, producers=[1])"
            rank.call("eval", f"globals().update({open_queue})")
        yield ranks


def test_a_killed_process_gives_back_its_slots_and_leases(ranks):
    owner, producer, consumer = ranks
    producer.call("eval", "queue.put_many('ab')")
    consumer.call("eval", "globals().update(batch=queue.get(2, ack=True))")
    consumer.call("eval", "globals().update(slot=queue.slot().__enter__())")
    blocked = producer.start("eval", "queue.put_many('cdef', timeout=20)")
    eventually(lambda: owner.call("eval", "queue.stats().waiting_producers") == 1)
    consumer.kill()
    assert owner.call("eval", "queue.get(6)") == list("abcdef")
    blocked.result()
    stats = owner.call("eval", "queue.stats()")
    assert (stats.leased, stats.slots, stats.consumed, stats.produced) == (0, 0, 6, 6)


def test_consumers_learn_that_a_producer_was_killed_before_its_end(ranks):
    owner, producer, consumer = ranks
    producer.call("eval", "queue.put('a')")
    waiting = consumer.start("eval", "list(queue)")
    eventually(lambda: owner.call("eval", "queue.stats().waiting_consumers") == 1)
    producer.kill()
    error = waiting.error()
    assert isinstance(error, PeerLostError)
    assert error.peer == 1
    assert "before it had ended its part" in str(error)


def test_the_users_of_a_killed_owner_get_an_error_at_once(ranks):
    owner, producer, consumer = ranks
    getting = consumer.start("eval", "queue.get()")
    eventually(lambda: owner.call("eval", "queue.stats().waiting_consumers") == 1)
    owner.kill()
    began = time.monotonic()
    assert getting.error().peer == 0
    assert isinstance(producer.start("eval", "queue.put(1)").error(), PeerLostError)
    assert time.monotonic() - began < SOON


def resident():
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def test_a_full_queue_keeps_memory_flat():
    """Also with a consumer that is stuck, and producers that wait for it."""
    count, item = trials(4000, 100_000), bytes(64 << 10)
    with simulated_world(2, timeout=300.0) as world:
        agents = [RpcAgent(backend) for backend in world]
        queue = agents[1].queue("q", capacity=16)
        putting = Running(queue.put_many, [item] * count)
        mine = agents[0].queue("q")
        mine.get(64)
        eventually(lambda: mine.stats().waiting_producers)
        before = resident()
        with pytest.raises(DeadlineExceededError):
            queue.put(item, timeout=0.2)
        for _ in range(count // 8 - 8):
            mine.get(8)
        putting.result(300.0)
        assert resident() - before < 32
        for agent in agents:
            agent.close(0.0)
