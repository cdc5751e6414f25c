"""Queues as ranks use them: what is put is got, what waits says why, and nothing is lost."""

import re
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from interrupts import Interrupt, every_interrupt
from rankwire import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    MessageTooLargeError,
    OverloadedError,
    PeerLostError,
    QueueEndedError,
    RemoteError,
    SubBackend,
    UnsupportedTypeError,
)
from rankwire.services.queue_items import pack, unpack
from rankwire.services.queue_users import QueueOutcome
from rankwire.testing import in_parallel, simulated_world, tcp_world
from rpc.agents import agents_of
from worlds import PATIENCE, Running, eventually


@pytest.fixture(params=[simulated_world, tcp_world], ids=["simulated", "tcp"])
def agents(request):
    with request.param(3) as world, agents_of(world, 0.5, workers=2) as agents:
        yield agents


def make(agents, **options):
    """Make a queue at rank 0; return it as each rank sees it."""
    options.setdefault("capacity", 4)
    return [agents[1].queue("q", **options), *(a.queue("q") for a in (agents[0], agents[2]))]


@pytest.fixture
def queues(agents):
    """The queue at ranks 0 (its owner), 1 and 2."""
    one, zero, two = make(agents)
    return [zero, one, two]


def waiting(queue, producers=0, consumers=0):
    """Wait until so many requests wait."""

    def is_so():
        stats = queue.stats()
        return (stats.waiting_producers, stats.waiting_consumers) == (producers, consumers)

    eventually(is_so)


ITEMS = [
    None, 1, "text", b"bytes", {"a": (1, [2.5])}, np.arange(5), np.zeros((300, 300)), b"x" * 70_000,
    "x" * 70_000, list(range(20_000))
]  # fmt: skip


@pytest.mark.parametrize(("src", "dst"), [(0, 0), (0, 1), (1, 0), (1, 2), (1, 1)])
def test_items_of_all_types_arrive_as_they_were_put(queues, src, dst):
    putting = Running(lambda: [queues[src].put(item) for item in ITEMS])
    for item in ITEMS:
        np.testing.assert_equal(queues[dst].get(), item)
    putting.result()
    putting = Running(queues[src].put_many, ITEMS)
    got = queues[dst].get(len(ITEMS))
    np.testing.assert_equal(got, ITEMS)
    putting.result()
    got[6][:] = 1  # an array is the consumer's own
    assert queues[0].stats().consumed == 2 * len(ITEMS)


def test_many_items_keep_their_order(queues):
    putting = Running(queues[1].put_many, range(3000))
    assert list(queues[2].get(1000)) == list(range(1000))
    assert [queues[0].get() for _ in range(500)] == list(range(1000, 1500))
    assert queues[2].get(1500) == list(range(1500, 3000))
    putting.result()


def test_requests_that_wait_occupy_no_worker(queues):
    gets = [Running(queues[1 + n % 2].get) for n in range(20)]
    waiting(queues[0], consumers=20)
    queues[1].put_many(range(20))
    assert sorted(get.result() for get in gets) == list(range(20))


def test_requests_need_no_worker_of_the_owner():
    with simulated_world(2) as world, agents_of(world, 0.5, workers=1) as (owner, other):
        queue = owner.queue("q", capacity=2)
        owner.register("take", lambda: [queue.get(), queue.get()])
        taking = other.rpc_async(0, "take", timeout=PATIENCE)
        waiting(queue, consumers=1)
        there = other.queue("q")
        there.put("a", timeout=PATIENCE)
        there.put("b", timeout=PATIENCE)
        assert taking.result() == ["a", "b"]


def test_each_get_may_open_the_queue_again(agents, queues):
    putting = Running(queues[0].put_many, range(1030))
    for number in range(1030):
        assert agents[2].queue("q").get() == number
    putting.result()


def test_a_get_that_is_late_says_what_it_waited_for(queues):
    queues[1].put("a")
    queues[2].get()
    for queue in queues:
        with pytest.raises(DeadlineExceededError) as info:
            queue.get(timeout=0.05)
        text = str(info.value)
        expected = r"waits in queue 'q': it is empty: 1 inserted, 1 consumed; producers: rank 1 sil"
        assert re.search(expected, text), text
        assert "queue.get 'q'" in text
    assert queues[0].stats().waiting_consumers == 0


def test_a_put_that_is_late_says_what_it_waited_for_and_is_not_in_the_queue(queues):
    queues[1].put_many("abc")
    with pytest.raises(DeadlineExceededError, match="it is full: 4 of 4 items, 24 bytes") as info:
        queues[2].put_many("def", timeout=0.05)
    assert (info.value.accepted, info.value.unconfirmed) == (1, 0)
    with pytest.raises(DeadlineExceededError, match="it is full") as info:
        queues[0].put("g", timeout=0.05)
    assert (info.value.accepted, info.value.unconfirmed) == (0, 0)
    assert queues[1].get(4) == list("abcd")
    assert queues[1].stats().queued == 0


def test_short_time_limits_lose_no_item(queues):
    """The owner settles a request in the moment in which its caller gives it up."""
    count, got, unconfirmed = 400, [], []

    def put(first):
        for number in range(first, first + count):
            while True:
                try:
                    queues[2].put(number, timeout=0.002)
                    break
                except DeadlineExceededError as error:
                    unconfirmed.append(error.unconfirmed)

    def get():
        while len(got) < 2 * count:
            with suppress(DeadlineExceededError):
                got.append(queues[1].get(timeout=0.002))

    in_parallel([partial(put, 0), partial(put, count), get])
    assert not any(unconfirmed)
    assert sorted(got) == list(range(2 * count))
    assert [n for n in got if n < count] == list(range(count)), "in the order of one producer"


def test_a_full_queue_can_refuse(agents):
    queue, _, other = make(agents, when_full="refuse", capacity=2)
    with pytest.raises(OverloadedError, match="queue 'q' on rank 0 is full") as info:
        queue.put_many("abc")
    assert info.value.accepted == 2
    with pytest.raises(OverloadedError), other.slot():
        pass
    with pytest.raises(OverloadedError) as info:
        other.put("d")
    assert info.value.accepted == 0


def test_a_slot_is_taken_before_the_work_is_done(queues):
    with queues[1].slot() as slot:
        assert queues[2].stats().slots == 1
        slot.put("work")
        with pytest.raises(ConfigurationError):
            slot.put("more")
    with pytest.raises(KeyError), queues[1].slot() as slot:
        raise KeyError
    with pytest.raises(ConfigurationError):
        slot.put("late")
    assert queues[2].get() == "work"
    eventually(lambda: queues[2].stats().slots == 0)
    with queues[0].slot(), queues[1].slot(), queues[2].slot(), queues[2].slot():
        with pytest.raises(DeadlineExceededError, match="4 slots taken by ranks 0, 1, 2"):
            queues[2].slot(timeout=0.05).__enter__()


def test_items_are_consumed_when_they_are_acknowledged(queues):
    queues[1].put_many("abcd")
    with queues[2].get(2, ack=True) as batch:
        assert list(batch) == ["a", "b"]
        assert queues[0].stats().leased == 2
    assert queues[0].stats().consumed == 2
    with pytest.raises(KeyError), queues[2].get(ack=True) as batch:
        raise KeyError
    assert queues[2].get() == "c"
    batch = queues[0].get(ack=True)
    batch.give_back()
    batch.give_back()
    batch = queues[0].get(ack=True)
    batch.ack()
    with pytest.raises(ConfigurationError, match="or they are acknowledged"):
        batch.ack()
    assert (batch[0], len(batch)) == ("d", 1)
    assert queues[0].stats().queued == queues[0].stats().leased == 0


def test_iteration_ends_with_the_queue(queues):
    queues[1].put_many("abc")
    queues[2].end()
    assert list(queues[1]) == ["a", "b", "c"]
    for queue in queues:
        assert list(queue) == []
        with pytest.raises(QueueEndedError, match="queue 'q' on rank 0 has ended"):
            queue.get()
        with pytest.raises(EOFError):
            queue.put("d")
        assert queue.stats().ended


def test_items_that_a_loop_does_not_reach_go_back(queues):
    queues[1].put_many("abcd")
    for item in queues[2].items(fetch=3):
        assert item == "a"
        break
    eventually(lambda: queues[0].stats().queued == 3)
    queues[0].end()
    assert list(queues[1].items(fetch=2)) == ["b", "c", "d"]


def test_a_rank_waits_until_another_makes_the_queue(agents):
    opening = Running(agents[2].queue, "later")
    with pytest.raises(DeadlineExceededError, match="until a rank makes queue 'later'"):
        agents[1].queue("later", timeout=0.3)
    made = agents[1].queue("later", capacity=7, order="uniform", producers=[1, 2])
    assert opening.result().settings == made.settings
    assert made.settings["producers"] == (1, 2)
    assert repr(made) == "<Queue 'later' on rank 0>"


def test_settings_must_be_equal(agents):
    agents[1].queue("q", capacity=4)
    agents[2].queue("q", capacity=4)
    difference = r"capacity is 5 here and 4 there, uses is None here and 1 there"
    with pytest.raises(ConfigurationError, match=difference):
        agents[2].queue("q", capacity=5, uses=None)
    with pytest.raises(ConfigurationError, match="capacity of a queue is 1 or more, not 0"):
        agents[2].queue("new", capacity=0)
    for wrong in ({"owner": 3}, {"capacity": 1, "producers": [7]}):
        with pytest.raises(ConfigurationError):
            agents[2].queue("new", **wrong)


def test_queues_are_known_to_their_owner_only(agents):
    at_zero, at_two = agents[1].queue("q", capacity=1), agents[1].queue("q", owner=2, capacity=1)
    at_zero.put("zero")
    at_two.put("two")
    assert agents[2].queue("q", owner=2).get() == "two"
    assert not agents[0].functions()


def test_no_function_of_a_user_stands_in_for_the_owner(agents, queues):
    agents[0].register("rankwire.queue.put", lambda *args: [0, 1])
    queues[1].put("a")
    assert queues[2].get(timeout=1.0) == "a"
    with pytest.raises(DeadlineExceededError, match=r"had 'rankwire[.]queue[.]get'") as info:
        queues[2].get(timeout=0.2)
    assert "\\x00" not in str(info.value)


def test_producers_may_be_named():
    roles = ["learner", "rollout", "rollout"]
    with simulated_world(3, roles=roles) as world, agents_of(world, 0.5) as agents:
        queue = agents[0].queue("q", capacity=1, producers=["rollout/0", 2])
        assert queue.settings["producers"] == (1, 2)
        assert agents[1].queue("q", capacity=1, producers="rollout").settings == queue.settings


def test_an_item_that_cannot_be_sent_is_refused_before_anything_is(queues):
    with pytest.raises(UnsupportedTypeError, match="item"):
        queues[1].put(object())
    with pytest.raises(UnsupportedTypeError) as info:
        queues[1].put_many([1, object()])
    assert info.value.accepted == 0
    with pytest.raises(ConfigurationError, match="a get takes 1 item or more"):
        queues[1].get(0)
    assert queues[0].stats().produced == 0


def test_a_version_that_is_no_number_harms_no_other_rank(agents, queues):
    for refused in (
        lambda: queues[1].put("a", version="new"),
        lambda: queues[1].put("a", key=[1]),
        lambda: queues[1].get(min_version="new"),
    ):
        with pytest.raises(RemoteError, match="a version or key is a number"):
            refused()
    queues[1].put("b", version=np.int64(3))
    assert queues[2].get(min_version=np.float32(2.5)) == "b"


def sent(queue, function, *args, user=None):
    """Send a request as another program may; return the reply."""
    requests = queue._requests
    request = [*requests.new()]
    request[1:3] = user or request[1:3]
    return requests._client.call(queue.owner, function, requests.deadline(1.0), request, *args)


@pytest.mark.parametrize(
    ("count", "least", "is_lease"),
    [(2, 1.5, False), (1, 1 << 60, False), (1 << 40, 1, False), (1, 1, "x"), (0, 0, False)],
)
def test_a_get_that_is_malformed_harms_no_other_rank(queues, count, least, is_lease):
    with pytest.raises(RemoteError, match="a get is malformed"):
        sent(queues[1], "get", count, least, None, is_lease, [])
    queues[1].put("a")
    assert queues[2].get() == "a"
    with pytest.raises(ConfigurationError, match="65536 at most"):
        queues[1].get(1 << 40, least=1)


def test_what_names_a_request_is_checked(queues):
    queues[1].put("a")
    batch = queues[1].get(1, ack=True)
    with pytest.raises(RemoteError, match="a request has numbers only"):
        sent(queues[1], "stats", user=["0", 0])
    with pytest.raises(RemoteError, match="to keep is malformed"):
        sent(queues[1], "withdraw", "all")
    batch.ack()


def test_a_rank_cannot_pass_for_its_next_process(queues):
    reply = sent(queues[1], "get", 1, 1, None, False, [], user=[5, 1])
    assert reply == [QueueOutcome.UNWANTED, 0]
    queues[1].put("a")
    assert queues[2].get() == "a"


def test_a_rank_that_waits_for_many_queues_is_refused(agents, monkeypatch):
    monkeypatch.setattr("rankwire.services.queue_owner._MOST_OPENING", 2)
    opening = [Running(agents[1].queue, name) for name in "ab"]
    eventually(lambda: agents[0].activity().in_service == 2)
    with pytest.raises(OverloadedError, match="too many queues"):
        agents[1].queue("c")
    with pytest.raises(DeadlineExceededError):
        agents[2].queue("c", timeout=0.05)
    for name in "ab":
        agents[2].queue(name, capacity=1)
    for each in opening:
        each.result()
    with pytest.raises(DeadlineExceededError):
        agents[1].queue("c", timeout=0.05)


def test_the_queues_of_a_restarted_owner_are_gone(agents, queues):
    queues[1]._requests._number += 1  # as that of another process
    with pytest.raises(PeerLostError, match="it was restarted, and had queue 'q'") as info:
        queues[1].put("a")
    assert (info.value.peer, info.value.unconfirmed) == (0, 0)


def test_requests_of_a_process_that_was_lost_are_refused(agents, queues, monkeypatch):
    with queues[1].slot() as slot:
        owner = agents[0]._queue_owner
        owner._lost[1] = 0
        next(iter(owner._queues.values())).forget(1, owner._is_lost)
        with pytest.raises(ChannelClosedError, match="taken this rank for lost"):
            slot.put("late")
    assert queues[2].stats().slots == 0
    with pytest.raises(ChannelClosedError, match="taken this rank for lost"):
        queues[1].put("later")
    monkeypatch.setattr(agents[0].backend, "incarnation_of", lambda rank: 1)
    agents[1]._queue_client._user[0] = 1  # it was restarted
    queues[1].put("again")
    assert queues[2].get() == "again"


def test_an_agent_that_closes_gives_back_what_it_holds(agents, queues):
    queues[1].put_many("abc")
    queues[2].get(2, ack=True)
    queues[2].slot().__enter__()
    agents[2].close()
    stats = queues[1].stats()
    assert (stats.queued, stats.leased, stats.slots) == (3, 0, 0)
    with pytest.raises(ChannelClosedError):
        queues[2].get()


def test_an_agent_that_closes_makes_no_requests_after_it_has_left(agents, queues):
    queues[1].put("a")
    agents[2]._end_services()  # as ``close`` does first
    with pytest.raises(ChannelClosedError, match="this agent is closed"):
        queues[2].get(ack=True)
    assert queues[1].stats().queued == 1


def test_an_owner_that_closes_ends_the_requests_that_wait(agents, queues):
    get, opening = Running(queues[1].get), Running(agents[2].queue, "other")
    waiting(queues[2], consumers=1)
    eventually(lambda: agents[0].activity().in_service == 2)
    agents[0].close()
    for run in (get, opening):
        assert isinstance(run.error(), ChannelClosedError)
        assert run.seconds < PATIENCE / 2
    with pytest.raises(ChannelClosedError):
        queues[0].get()


def test_a_declared_producer_that_leaves_early_is_named(agents):
    queue, _, other = make(agents, producers=[1, 2])
    queue.put("a")
    queue.end()
    other.put("b")
    agents[2].close()
    assert agents[0].queue("q").get(2) == ["a", "b"]
    with pytest.raises(PeerLostError, match="rank 2 is lost: before it had ended its part") as info:
        agents[0].queue("q").get()
    assert info.value.peer == 2


def test_a_get_whose_reply_is_too_large_loses_nothing():
    limit = 100_000
    with simulated_world(2, max_message_nbytes=limit) as world, agents_of(world, 0.5) as agents:
        queue = agents[0].queue("q", capacity=4)
        for letter in "abcd":
            queue.put(letter * (limit // 3))
        for ack in (False, True):
            with pytest.raises(MessageTooLargeError):
                agents[1].queue("q").get(4, ack=ack)
            eventually(lambda: queue.stats().queued == 4)
        assert [item[0] for item in agents[1].queue("q").get(2)] == ["a", "b"]
        assert [item[0] for item in agents[1].queue("q").get(2)] == ["c", "d"]


def test_a_get_of_a_cancelled_call_loses_nothing(agents, queues):
    """Also if the item is on its way to the function in that moment."""
    got, kept = [], []
    agents[1].register("serve", lambda: got.append(queues[1].get()))
    for number in range(60):
        call = agents[2].rpc_async(1, "serve")
        waiting(queues[2], consumers=1)
        putting = Running(queues[2].put, number)
        call.cancel()
        putting.result()
        eventually(lambda: not agents[1].activity().in_service)
        eventually(lambda number=number: len(got) + len(kept) + queues[2].stats().queued > number)
        if queues[2].stats().queued:
            kept.append(queues[2].get())
    assert sorted([*got, *kept]) == list(range(60))


def test_a_get_in_a_call_ends_with_it(agents, queues):
    for agent, queue in zip(agents[:2], queues, strict=False):
        agent.register("serve", lambda queue=queue: queue.get(timeout=PATIENCE))
        with pytest.raises(DeadlineExceededError):
            agents[2].to(agent.rank, timeout=0.1).serve()
        eventually(lambda: queues[2].stats().waiting_consumers == 0)
        call = agents[2].rpc_async(agent.rank, "serve")
        waiting(queues[2], consumers=1)
        call.cancel()
        eventually(lambda: queues[2].stats().waiting_consumers == 0)


def test_a_report_of_calls_says_in_which_queue_one_waits(agents, queues):
    get = Running(queues[2].get)
    waiting(queues[0], consumers=1)
    (call,) = agents[0]._server.active.describe([])
    (call,) = agents[0]._server.active.describe([call.key])
    assert "waits in queue 'q': it is empty" in call.doing
    queues[0].put(1)
    get.result()


def test_in_a_group_the_ranks_are_those_of_the_group():
    with simulated_world(3) as world:
        groups = in_parallel([partial(SubBackend, world[rank], [1, 2]) for rank in (1, 2)])
        with agents_of(groups) as agents:
            queue = agents[0].queue("q", owner=1, capacity=1)
            queue.put("a")
            assert agents[1].queue("q", owner=1).get() == "a"
            with pytest.raises(DeadlineExceededError, match="producers: rank 0 silent"):
                queue.get(timeout=0.05)


def test_what_is_not_the_items_of_a_queue_is_refused():
    for items in ([b"a"], [b"", b"abc", b"x" * 5000], [b"x" * 50_000, b"y" * 100_000]):
        assert [bytes(item) for item in unpack(pack(items))] == items
    array = np.zeros(4, np.uint8)
    wrong = [
        *(None, [], [None], [[], b""], [[1], b"ab"], [[3, -1], b"ab"], [[True], b"a"], [[1], "a"]),
        *([[4], array.reshape(2, 2)], [[4], np.zeros(4, np.int8)], [None, array, 1]),
    ]
    for packed in wrong:
        with pytest.raises(ValueError, match="not the items of a queue"):
            unpack(packed)


# -- interrupts ------------------------------------------------------------------------------------


def settled_stats(queue):
    """Return the counts once no request waits and what was given up is undone."""
    eventually(lambda: queue.stats().waiting_consumers + queue.stats().waiting_producers == 0)
    return queue.stats()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_in_a_get_loses_no_item(rank):
    with simulated_world(2) as world, agents_of(world) as agents:
        other = agents[1 - rank].queue("q", capacity=8)
        queue = agents[rank].queue("q")
        queue.put_many(range(4))
        numbers = []

        def run(interrupting):
            numbers.append(len(numbers))
            other.put(numbers[-1])
            got = []
            with suppress(Interrupt), interrupting:
                got.append(queue.get(2))
            stats = other.stats
            if not got:  # they come back, also if the owner had sent them
                eventually(lambda: stats().queued == 5)
                other.get()
            else:
                assert stats().queued == 3
                other.put("one more")

        step = 2 if rank else 1
        assert every_interrupt(run, step=step) >= 10


def test_an_interrupt_in_a_put_leaves_the_queue_as_it_was_or_with_the_item():
    with simulated_world(2) as world, agents_of(world) as agents:
        owner = agents[0].queue("q", capacity=8)
        queue = agents[1].queue("q")

        def run(interrupting):
            done = []
            with suppress(Interrupt), interrupting:
                queue.put("a")
                done.append(True)
            time.sleep(0.005)
            queued = settled_stats(owner).queued
            assert queued == 1 if done else queued in (0, 1)
            if queued:
                assert owner.get() == "a"

        assert every_interrupt(run, step=3) >= 5


# An interrupt that comes in ``__del__`` is not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_slot_or_batch_gives_both_back():
    with simulated_world(2) as world, agents_of(world) as agents:
        owner = agents[0].queue("q", capacity=8)
        queue = agents[1].queue("q")
        queue.put_many("ab")

        def run(interrupting):
            with suppress(Interrupt), interrupting:
                with queue.slot():
                    pass
                queue.get(2, ack=True).give_back()
            eventually(lambda: owner.stats().slots == 0)
            eventually(lambda: owner.stats().queued == 2)

        assert every_interrupt(run, step=5) >= 5


def test_threads_of_one_rank_share_a_queue(queues):
    got, lock = [], threading.Lock()

    def consume(queue):
        for item in queue.items(fetch=3):
            with lock:
                got.append(item)

    consumers = [Running(consume, queue) for queue in queues for _ in range(2)]
    in_parallel(
        [partial(queue.put_many, range(n * 100, n * 100 + 100)) for n, queue in enumerate(queues)]
    )
    queues[0].end()
    for consumer in consumers:
        consumer.result()
    assert sorted(got) == list(range(300))
    stats = queues[0].stats()
    assert (stats.produced, stats.consumed, stats.queued) == (300, 300, 0)
