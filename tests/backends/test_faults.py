import itertools
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep

import numpy as np
import pytest

import rankwire
from rankwire import RpcAgent
from rankwire.backends.faults import FaultPlan, Timetable, link_between
from rankwire.backends.simulated import SimulatedBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    PeerLostError,
    RankwireError,
)
from rankwire.testing import in_parallel
from real_time import Deadline

SOON = 10.0  # what must happen "at once" happens within it on the slowest machine
LATER = 40.0  # a time limit that no operation here may need


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rankwire-")]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def make_world():
    assert threads() == []
    worlds = []

    def make(world_size, faults, **options):
        options = {"timeout": LATER, "faults": faults, **options}
        worlds.append(SimulatedBackend.create_group(world_size, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        for backend in world:
            backend.close()
    assert threads() == []


def first(count, delays):
    return list(itertools.islice(delays, count))


# -- decisions -------------------------------------------------------------------------------------


def test_the_same_seed_decides_the_same():
    def draws(seed):
        plan = FaultPlan(seed).delay(0.001, jitter=0.01)
        return {way: first(50, plan.delays(*way)) for way in itertools.permutations(range(3), 2)}

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


def test_every_link_and_every_kind_of_traffic_has_delays_of_its_own():
    plan = FaultPlan(seed=1).delay(0.0, jitter=1.0)
    ways = [(0, 1), (1, 0), (0, 2), (0, 1, "replies 4")]
    assert len({tuple(first(5, plan.delays(*way))) for way in ways}) == len(ways)


def test_delays_stay_within_their_jitter_and_add_up():
    plan = FaultPlan().delay(1.0, jitter=0.5).delay(10.0, src=0)
    assert all(11.0 <= seconds <= 11.5 for seconds in first(100, plan.delays(0, 1)))
    assert all(1.0 <= seconds <= 1.5 for seconds in first(100, plan.delays(1, 0)))


def test_a_delay_concerns_only_the_ranks_it_names():
    plan = FaultPlan().delay(1.0, src=0, dst=1)
    assert first(2, plan.delays(0, 1)) == [1.0, 1.0]
    assert [plan.delays(*way) for way in ((1, 0), (0, 2), (2, 1))] == [None] * 3


@pytest.mark.parametrize(
    "add",
    [
        lambda plan: plan.delay(-1.0),
        lambda plan: plan.delay(0.0, jitter=math.inf),
        lambda plan: plan.delay(math.nan),
        lambda plan: plan.drop_link(1, 1),
        lambda plan: plan.drop_link(0, 1, after=-1),
        lambda plan: plan.drop_link(0, 1, after=0.5),
        lambda plan: plan.kill(0, after=1.5),
        lambda plan: plan.kill(0, after_seconds=-1),
        lambda plan: plan.partition([[0, 1], [1, 2]]),
        lambda plan: plan.slow_reader(0, -0.1),
        lambda plan: plan.fail(0),
        lambda plan: plan.fail(0, call=0),
        lambda plan: plan.fail(0, message=1.0),
    ],
)
def test_a_fault_that_cannot_be_is_refused(add):
    with pytest.raises(ConfigurationError):
        add(FaultPlan())


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill(2),
        FaultPlan().delay(0.1, dst=2),
        FaultPlan().drop_link(0, 2),
        FaultPlan().partition([[0], [2]]),
        FaultPlan().slow_reader(2, 0.1),
    ],
)
def test_a_fault_of_a_rank_that_is_not_there_is_refused(plan):
    with pytest.raises(InvalidRankError):
        SimulatedBackend.create_group(2, faults=plan)
    assert threads() == []


def test_a_link_is_the_same_from_both_ends():
    assert link_between(3, 1) == link_between(1, 3) == (1, 3)


def test_a_plan_tells_what_it_is():
    assert repr(FaultPlan(seed=3).kill(0).delay(1)) == "FaultPlan(seed=3, 2 faults)"


def test_a_plan_serves_several_worlds_and_may_grow_afterwards(make_world):
    plan = FaultPlan().kill(0, after=1)
    worlds = [make_world(3, plan), make_world(3, plan)]
    plan.kill(1, after=1)
    for world in worlds:
        world[0].send(b"x", 1)
        world[1].send(b"x", 2)
        world[1].send(b"y", 2)  # alive: what the plan got later is not for this world
        assert [world[2].recv(1), world[2].recv(1), world[1].recv(0)] == [b"x", b"y", b"x"]
        with pytest.raises(PeerLostError):
            world[1].recv(0)


# -- the timetable ---------------------------------------------------------------------------------


def test_things_happen_in_the_order_of_their_times():
    table = Timetable(REAL_TIME)
    done = []
    ended = threading.Event()
    now = monotonic()
    times = {"c": now + 0.03, "a": now, "b": now + 0.01, "b2": now + 0.01, "never": now + LATER}
    agenda = [(when, partial(done.append, name)) for name, when in times.items()]
    table.begin([(now + 0.04, ended.set), *agenda])
    assert ended.wait(SOON)
    table.end()
    assert done == ["a", "b", "b2", "c"]
    assert threads() == []


def test_a_timetable_ends_from_within_and_before_its_beginning():
    table = Timetable(REAL_TIME)
    table.begin([(monotonic(), table.end), (monotonic(), pytest.fail)])
    table._thread.join(SOON)
    assert not table._thread.is_alive()
    ended = Timetable(REAL_TIME)
    ended.end()
    ended.begin([(monotonic(), pytest.fail)])
    assert threads() == []


# -- delays ----------------------------------------------------------------------------------------


def test_a_delayed_message_is_not_there_at_once(make_world):
    one, other = make_world(2, FaultPlan().delay(0.8))
    begin = monotonic()
    one.send(b"slow", 1)
    with pytest.raises(DeadlineExceededError):
        other.recv(0, timeout=0)
    assert other.recv(0) == b"slow"
    assert monotonic() - begin >= 0.8


def test_delays_keep_the_order_of_each_pair(make_world):
    world = make_world(3, FaultPlan(seed=4).delay(0.0, jitter=0.02))
    for number in range(40):
        for src in (0, 1):
            world[src].send(bytes([number]), 2, tag=src)
    for src in (0, 1):
        assert [world[2].recv(src, tag=src)[0] for _ in range(40)] == list(range(40))


def test_a_slow_link_does_not_slow_another(make_world):
    world = make_world(3, FaultPlan().delay(60.0, src=0))
    world[0].send(b"slow", 2)
    world[1].send(b"fast", 2)
    assert world[2].recv(1, timeout=0) == b"fast"


def test_barriers_work_on_a_slow_network(make_world):
    world = make_world(4, FaultPlan(seed=1).delay(0.001, jitter=0.01))
    in_parallel(
        [lambda backend=backend: [backend.barrier() for _ in range(5)] for backend in world]
    )


def test_messages_under_way_fill_the_queue(make_world):
    one, other = make_world(2, FaultPlan().delay(0.1), queue_nbytes=10)
    one.send(bytes(10), 1)
    with pytest.raises(DeadlineExceededError):
        one.send(b"x", 1, timeout=0)
    assert other.recv(0) == bytes(10)
    one.send(b"x", 1, timeout=0)


def test_a_delayed_message_that_is_received_on_arrival_makes_room(make_world, pool):
    one, other = make_world(2, FaultPlan().delay(0.1), queue_nbytes=10)
    received = pool.submit(other.recv, 0)
    one.send(bytes(10), 1)
    blocked = pool.submit(one.send, b"x", 1)
    assert received.result(SOON) == bytes(10)
    blocked.result(SOON)
    assert other.recv(0) == b"x"


def test_what_is_under_way_arrives_before_the_news_that_its_sender_left(make_world):
    one, other = make_world(2, FaultPlan().delay(0.05))
    one.send(b"first", 1)
    one.send(b"second", 1)
    one.close()
    assert [other.recv(0), other.recv(0)] == [b"first", b"second"]
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        other.recv(0)


def test_what_is_under_way_when_its_sender_dies_is_lost(make_world):
    one, other = make_world(2, FaultPlan().delay(0.05))
    one.send(b"too late", 1)
    one.network.kill(0)
    sleep(0.1)
    with pytest.raises(PeerLostError):
        other.recv(0)


# -- broken links ----------------------------------------------------------------------------------


def test_a_link_breaks_after_its_last_message_both_ways(make_world, pool):
    world = make_world(3, FaultPlan().drop_link(0, 1, after=3))
    waiting = pool.submit(world[0].recv, 1, 9)
    world[0].send(b"a", 1)
    world[1].send(b"b", 0)
    world[0].send(b"c", 1)
    assert waiting.exception(SOON).peer == 1
    assert [world[1].recv(0), world[1].recv(0), world[0].recv(1)] == [b"a", b"c", b"b"]
    for rank in (0, 1):
        for action in (world[rank].recv, lambda peer: world[rank].send(b"x", peer)):  # noqa: B023
            with pytest.raises(PeerLostError) as caught:
                action(1 - rank)
            assert caught.value.peer == 1 - rank
    world[0].send(b"by the way", 2)
    assert world[2].recv(0) == b"by the way"


def test_a_link_can_be_broken_from_the_start(make_world):
    world = make_world(2, FaultPlan().drop_link(1, 0))
    assert threads() == []
    for rank in (0, 1):
        with pytest.raises(PeerLostError):
            world[rank].recv(1 - rank)


def test_a_partition_cuts_the_links_across_and_no_others(make_world, pool):
    world = make_world(5, FaultPlan().partition([[0, 1], [2, 3]], after=0.05))
    waiting = [pool.submit(world[0].recv, 2), pool.submit(world[3].recv, 1)]
    assert [future.exception(SOON).peer for future in waiting] == [2, 1]
    for src, dst in ((0, 1), (3, 2), (4, 0), (4, 3)):
        world[src].send(b"ok", dst)
        assert world[dst].recv(src) == b"ok"
    for a, b in itertools.product((0, 1), (2, 3)):
        with pytest.raises(PeerLostError):
            world[a].send(b"x", b)
        with pytest.raises(PeerLostError):
            world[b].recv(a)


# -- deaths ----------------------------------------------------------------------------------------


def test_a_rank_dies_after_its_last_message(make_world):
    world = make_world(3, FaultPlan().kill(0, after=2))
    world[1].send(b"not its own", 0)
    world[0].send(b"one", 1)
    world[0].send(b"two", 2)
    with pytest.raises(PeerLostError) as caught:
        world[0].send(b"three", 1)
    assert caught.value.peer == 0
    assert (world[1].recv(0), world[2].recv(0)) == (b"one", b"two")
    for survivor in world[1:]:
        with pytest.raises(PeerLostError):
            survivor.barrier()


def test_a_rank_dies_in_the_middle_of_a_barrier(make_world):
    world = make_world(4, FaultPlan().kill(2, after=1))

    def meet(rank):
        with pytest.raises(PeerLostError) as caught:
            world[rank].barrier()
        return caught.value.peer

    assert meet(2) == 2
    assert in_parallel([lambda rank=rank: meet(rank) for rank in (0, 1, 3)]) == [2, 2, 2]


def test_a_rank_dies_in_time(make_world, pool):
    world = make_world(3, FaultPlan().kill(1, after_seconds=0.05))
    waiting = [pool.submit(world[0].recv, 1), pool.submit(world[1].recv, 0)]
    assert [future.exception(SOON).peer for future in waiting] == [1, 1]
    world[0].send(b"x", 2)
    assert world[2].recv(0) == b"x"


def test_a_rank_can_be_dead_from_the_start(make_world):
    one, other = make_world(2, FaultPlan().kill(1))
    for backend in (one, other):
        with pytest.raises(PeerLostError) as caught:
            backend.barrier()
        assert caught.value.peer == 1


def test_calls_count_as_messages(make_world):
    one, other = make_world(2, FaultPlan().kill(0, after=1))
    ports = [backend.open_calls(7) for backend in (one, other)]
    receive = ports[0].call(1, 1, ([b"x"], 1), Deadline(LATER))
    with pytest.raises(PeerLostError) as caught:
        receive.wait(Deadline(LATER))
    assert caught.value.peer == 0
    events = [*ports[1].poll(Deadline(LATER)), *ports[1].poll(Deadline(LATER))]
    assert [type(event).__name__ for event in events] == ["IncomingCall", "CallerGone"]


# -- slow readers ----------------------------------------------------------------------------------


def test_a_slow_reader_takes_one_message_at_a_time(make_world):
    world = make_world(3, FaultPlan().slow_reader(2, 0.02))
    begin = monotonic()
    for src in (0, 1):
        for _ in range(3):
            world[src].send(b"x", 2)
        world[src].send(b"fast", 1 - src)
        assert world[1 - src].recv(src, timeout=0) == b"fast"
    for src in (0, 1):
        for _ in range(3):
            world[2].recv(src)
    assert monotonic() - begin >= 0.02 * 5


def test_a_slow_reader_blocks_its_senders(make_world):
    one, other = make_world(2, FaultPlan().slow_reader(1, 0.02), queue_nbytes=10)
    for _ in range(2):
        one.send(bytes(5), 1)
    with pytest.raises(DeadlineExceededError):
        one.send(bytes(5), 1, timeout=0)
    other.recv(0)
    one.send(bytes(5), 1)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        None,
        FaultPlan(),
        FaultPlan().drop_link(0, 1).kill(2, after=9),
        FaultPlan().delay(60.0).slow_reader(1, 60.0),
    ],
)
def test_no_thread_without_a_need(make_world, plan):
    make_world(3, plan)
    assert threads() == []


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill(1, after_seconds=1e12),
        FaultPlan().partition([[0], [1, 2]], after=60.0),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_thread_ends_with_the_last_rank(plan, order):
    world = SimulatedBackend.create_group(3, faults=plan)
    assert len(threads()) == 1
    for _ in range(3):
        world[0].send(b"never seen", 1)
    for rank in order[:-1]:
        world[rank].close()
    assert len(threads()) == 1
    world[order[-1]].close()
    assert threads() == []


def test_the_thread_ends_when_the_rest_was_killed():
    plan = FaultPlan().kill(1, after_seconds=1e12)
    world = SimulatedBackend.create_group(3, faults=plan)
    assert len(threads()) == 1
    world[0].network.kill(0)
    world[0].network.kill(2)
    world[1].close()
    assert threads() == []


def test_no_thread_when_all_are_dead_from_the_start():
    world = SimulatedBackend.create_group(
        2, faults=FaultPlan().kill(0).kill(1).kill(0, after_seconds=60.0)
    )
    assert threads() == []
    world[0].close()


def test_a_lost_message_does_not_hold_up_the_others(make_world):
    world = make_world(3, FaultPlan().delay(0.02))
    world[0].send(b"lost", 1)
    world[0].network.kill(0)
    sleep(0.03)
    world[1].send(b"not lost", 2)
    assert world[2].recv(1) == b"not lost"


def test_a_callback_that_a_close_causes_runs_in_the_closing_thread(make_world):
    one, other = make_world(2, FaultPlan().delay(60.0))
    ports = [backend.open_calls(1) for backend in (one, other)]
    seen = []
    ports[0].call(
        1, 1, ([b"x"], 1), Deadline(LATER), lambda receive: seen.append(threading.current_thread())
    )
    ports[0].close()
    assert seen == [threading.current_thread()]


def test_a_callback_that_a_timed_fault_causes_may_wait_for_the_network(make_world):
    plan = FaultPlan().kill(1, after_seconds=0.3).kill(2, after_seconds=0.4)
    world = make_world(4, plan)
    ports = [backend.open_calls(1) for backend in world]
    received = []
    heard = threading.Event()

    def on_reply(receive):
        received.append(world[0].recv(3))
        heard.set()

    ports[1].call(0, 1, ([b"x"], 1), Deadline(LATER), on_reply)
    with pytest.raises(PeerLostError):  # the next fault is not late because of that
        world[3].recv(2, timeout=SOON)
    world[3].send(b"comes later", 0)
    assert heard.wait(SOON)
    assert received == [b"comes later"]


def test_closing_from_a_callback_does_not_wait_for_itself():
    world = SimulatedBackend.create_group(2, faults=FaultPlan().kill(1, after_seconds=0.3))
    ports = [backend.open_calls(1) for backend in world]
    closed = threading.Event()

    def close_all(receive):
        for backend in world:
            backend.close()
        closed.set()

    ports[1].call(0, 1, ([b"x"], 1), Deadline(LATER), close_all)
    assert closed.wait(SOON)
    limit = monotonic() + SOON
    while threads() and monotonic() < limit:
        sleep(0.001)
    assert threads() == []


# -- everything at once ----------------------------------------------------------------------------


def random_plan(seed, size):
    chance = random.Random(seed)
    plan = FaultPlan(seed)
    if chance.random() < 0.6:
        plan.delay(0.0, jitter=chance.choice([0.0005, 0.003]))
    if chance.random() < 0.5:
        plan.kill(chance.randrange(size), after=chance.randint(1, 60))
    if chance.random() < 0.3:
        plan.kill(chance.randrange(size), after_seconds=chance.random() * 0.1)
    if chance.random() < 0.4:
        plan.drop_link(*chance.sample(range(size), 2), after=chance.randint(1, 40))
    if chance.random() < 0.2:
        plan.slow_reader(chance.randrange(size), 0.0005)
    return plan


def talk(backend):
    """Reduce, send to all, call the next one, meet; three times."""
    others = [rank for rank in range(backend.world_size) if rank != backend.rank]
    with backend, RpcAgent(backend) as agent:
        agent.register("echo", lambda value: value)
        for tag in range(3):
            assert rankwire.all_reduce(backend, np.ones(40)).tolist() == [len(others) + 1.0] * 40
            for dst in others:
                backend.send(bytes([backend.rank]) * 37 * tag, dst, tag=tag)
            for src in others:
                assert backend.recv(src, tag=tag) == bytes([src]) * 37 * tag
            futures = [agent.rpc_async(others[0], "echo", number) for number in range(5)]
            assert [future.result() for future in futures] == list(range(5))
            backend.barrier()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_goes_wrong_everybody_ends_and_is_told_why(make_world, pool, seed):
    size = random.Random(seed).randint(2, 6)
    queue_nbytes = random.Random(seed).choice([50, 5000, 1 << 20])
    world = make_world(size, random_plan(seed, size), queue_nbytes=queue_nbytes)
    for running in [pool.submit(talk, backend) for backend in world]:
        error = running.exception(LATER)
        assert error is None or isinstance(error, RankwireError)
        assert not isinstance(error, DeadlineExceededError)


# -- operations that fail --------------------------------------------------------------------------


def test_the_nth_message_of_a_rank_fails_and_nothing_of_it_arrives(make_world):
    first, second = make_world(2, FaultPlan().fail(0, message=2))
    first.send(b"one", 1)
    with pytest.raises(rankwire.NoConnectionError, match="message 2 of rank 0"):
        first.send(b"two", 1)
    first.isend(b"three", 1).wait()
    assert [bytes(second.recv(0)) for _ in range(2)] == [b"one", b"three"]
    second.send(b"of another rank", 0)


def test_the_nth_call_of_a_rank_fails_with_the_error_of_ones_choice(make_world):
    plan = FaultPlan().fail(0, call=2, error=PeerLostError(1, "on purpose")).fail(0, call=4)
    agents = [RpcAgent(backend) for backend in make_world(2, plan)]
    with agents[0], agents[1]:
        agents[1].register("double", lambda value: 2 * value)
        assert agents[0].rpc_sync(1, "double", 1) == 2
        with pytest.raises(PeerLostError, match="on purpose"):
            agents[0].rpc_sync(1, "double", 2)
        assert agents[0].rpc_async(1, "double", 3).result() == 6
        with pytest.raises(rankwire.NoConnectionError, match="call 4 of rank 0"):
            agents[0].rpc_async(1, "double", 4).result()
        assert agents[0].rpc_sync(1, "double", 5) == 10


def test_a_call_that_waits_for_its_turn_counts_once(make_world):
    agents = [
        RpcAgent(backend, max_in_flight=1) for backend in make_world(2, FaultPlan().fail(0, call=3))
    ]
    go_on = threading.Event()
    with agents[0], agents[1]:
        agents[1].register("wait", lambda: go_on.wait(LATER))
        waiting = agents[0].rpc_async(1, "wait")
        threading.Timer(0.05, go_on.set).start()
        assert agents[0].rpc_sync(1, "wait")
        assert waiting.result()
        with pytest.raises(rankwire.NoConnectionError, match="call 3"):
            agents[0].rpc_sync(1, "wait")


def test_the_nth_collective_of_a_rank_fails_on_all_and_the_group_stays_in_step(make_world):
    world = make_world(3, FaultPlan().fail(1, collective=2))

    def sum_three_times(backend):
        found = []
        for number in range(3):
            array = np.full(4, float(number))
            try:
                rankwire.all_reduce(backend, array)
                found.append(array[0])
            except RankwireError as error:
                found.append(type(error).__name__)
        return found

    assert in_parallel([partial(sum_three_times, backend) for backend in world]) == [
        [0.0, "CollectiveAbortedError", 6.0],
        [0.0, "NoConnectionError", 6.0],
        [0.0, "CollectiveAbortedError", 6.0],
    ]


def test_a_collective_of_a_group_counts_as_one_of_the_rank(make_world):
    world = make_world(3, FaultPlan().fail(2, collective=1))

    def meet(backend):
        with rankwire.SubBackend(backend, [1, 2]) as group:
            try:
                rankwire.all_reduce(group, np.ones(1))
            except RankwireError as error:
                return type(error).__name__

    assert in_parallel([partial(meet, backend) for backend in world[1:]]) == [
        "CollectiveAbortedError",
        "NoConnectionError",
    ]


def test_those_who_ask_hear_of_every_kill(make_world):
    killed = []
    world = make_world(4, FaultPlan().kill(1).kill(2, after=1))
    world[0].network.on_kill(killed.append)
    assert killed == [1]
    world[2].send(b"last words", 0)
    world[0].network.kill(3)
    assert in_time(lambda: sorted(killed) == [1, 2, 3])


def in_time(condition):
    end = monotonic() + SOON
    while not condition() and monotonic() < end:
        sleep(0.001)
    return condition()
