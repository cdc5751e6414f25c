import signal
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from faults.sizes import examples
from interrupts import interrupt_main_thread_in
from rankwire.backends.simulated import SimulatedBackend
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MessageTooLargeError,
    PeerLostError,
    RankwireError,
    SizeMismatchError,
)
from rankwire.testing import in_parallel
from rankwire.wire.frames import Channel
from real_time import Deadline
from worlds import Running

SOON = 10.0  # what must happen "at once" happens within it on the slowest machine
LATER = 40.0  # a time limit that no operation here may need


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def make_world():
    before = set(threading.enumerate())
    worlds = []

    def make(world_size, **options):
        worlds.append(SimulatedBackend.create_group(world_size, **{"timeout": LATER, **options}))
        return worlds[-1]

    yield make
    for world in worlds:
        for backend in world:
            backend.close()
    left = [t for t in threading.enumerate() if t not in before and "rankwire" in t.name]
    assert left == []


def until(condition):
    limit = monotonic() + SOON
    while not condition():
        assert monotonic() < limit
        sleep(0.001)


def let_it_wait(future):
    """Give a thread the time to get into its wait; what follows must hold also if it did not."""
    until(lambda: future.running() or future.done())
    sleep(0.02)
    return future


# -- worlds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2"])
def test_a_world_needs_ranks(world_size):
    with pytest.raises(InvalidWorldSizeError) as caught:
        SimulatedBackend.create_group(world_size)
    assert caught.value.world_size == world_size


@pytest.mark.parametrize("options", [{"queue_nbytes": 0}, {"timeout": -1.0}])
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigurationError):
        SimulatedBackend.create_group(2, **options)


def test_a_thousand_ranks_cost_what_they_use(make_world):
    world = make_world(1000)
    world[0].send(b"far", 999)
    assert world[999].recv(0) == b"far"


def test_two_worlds_never_meet(make_world):
    one, other = make_world(2), make_world(2)
    one[0].send(b"one", 1)
    with pytest.raises(DeadlineExceededError):
        other[1].recv(0, timeout=0)


# -- messages --------------------------------------------------------------------------------------


def test_tags_channels_and_groups_are_isolated(make_world):
    first, second = make_world(2)
    first.send(b"user", 1, tag=3)
    first.messages.transmit(1, (0, Channel.COLLECTIVE, 3), ([b"step"], 4), Deadline(0))
    first.messages.transmit(1, (9, Channel.MESSAGE, 3), ([b"group"], 5), Deadline(0))
    with pytest.raises(DeadlineExceededError):
        second.recv(0, tag=4, timeout=0)
    assert second.messages.receive(0, (9, Channel.MESSAGE, 3), Deadline(0)) == b"group"
    assert second.messages.receive(0, (0, Channel.COLLECTIVE, 3), Deadline(0)) == b"step"
    assert second.recv(0, tag=3, timeout=0) == b"user"


def test_receivers_of_one_tag_each_get_one_message(make_world, pool):
    first, second = make_world(2)
    received = [let_it_wait(pool.submit(second.recv, 0)) for _ in range(4)]
    for number in range(4):
        first.send(bytes([number]), 1)
    assert [future.result(SOON)[0] for future in received] == [0, 1, 2, 3]


def test_too_large_a_message_is_refused_on_every_way(make_world):
    first, second = make_world(2, max_message_nbytes=10)
    with pytest.raises(MessageTooLargeError):
        first.send(bytes(11), 1)
    with pytest.raises(MessageTooLargeError):
        first.messages.transmit(1, (0, Channel.COLLECTIVE, 0), ([bytes(11)], 11), Deadline(0))
    first.send(bytes(10), 1)
    assert second.recv(0) == bytes(10)


# -- time limits -----------------------------------------------------------------------------------


class InterruptedHereError(BaseException):
    pass


def test_an_interrupted_receive_leaves_nothing_behind(make_world):
    first, second = make_world(2)

    def interrupt(number, frame):
        raise InterruptedHereError

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        interrupting = Running(interrupt_main_thread_in, "recv", signal.SIGUSR1)
        with pytest.raises(InterruptedHereError):
            second.recv(0)
        interrupting.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    first.send(b"for the next", 1)
    assert second.recv(0) == b"for the next"


# -- sizes -----------------------------------------------------------------------------------------


def test_a_message_that_does_not_fit_goes_to_the_next_who_waits(make_world, pool):
    first, second = make_world(2)
    fussy = let_it_wait(pool.submit(second.recv_into, bytearray(4), 0))
    easy = let_it_wait(pool.submit(second.recv, 0))
    first.send(bytes(16), 1)
    assert easy.result(SOON) == bytes(16)
    assert isinstance(fussy.exception(SOON), SizeMismatchError)


# -- bounded queues --------------------------------------------------------------------------------


def test_a_full_queue_blocks_the_sender_until_there_is_room(make_world, pool):
    first, second = make_world(2, queue_nbytes=100)
    first.send(bytes(60), 1)
    blocked = let_it_wait(pool.submit(first.send, b"x" * 60, 1))
    assert not blocked.done()
    assert second.recv(0) == bytes(60)
    blocked.result(SOON)
    assert second.recv(0) == b"x" * 60


def test_a_send_without_room_ends_in_time_and_names_the_reader(make_world):
    first, second, third = make_world(3, queue_nbytes=100)
    first.send(bytes(100), 1)
    with pytest.raises(DeadlineExceededError) as caught:
        first.send(b"x", 1, timeout=0.05)
    assert (caught.value.waiting_for, caught.value.op, caught.value.peer) == ([1], "send", 1)
    first.send(bytes(100), 2, timeout=0)  # other pairs are not affected
    second.send(bytes(100), 0, timeout=0)
    third.send(bytes(100), 1, timeout=0)
    assert second.recv(0, timeout=0) == bytes(100)
    with pytest.raises(DeadlineExceededError):
        second.recv(0, timeout=0)  # what was not sent does not arrive


def test_one_message_may_be_larger_than_the_queue(make_world):
    first, second = make_world(2, queue_nbytes=10)
    first.send(bytes(1000), 1, timeout=0)
    with pytest.raises(DeadlineExceededError):
        first.send(b"x", 1, timeout=0)
    second.recv(0)
    first.send(b"x", 1, timeout=0)


def test_empty_messages_pass_a_full_queue(make_world):
    world = make_world(2, queue_nbytes=10)
    for backend in world:
        backend.send(bytes(1000), 1 - backend.rank)
    in_parallel([backend.barrier for backend in world])


def test_blocked_senders_take_their_turn(make_world, pool):
    first, second = make_world(2, queue_nbytes=100)
    first.send(bytes(60), 1)
    large = let_it_wait(pool.submit(first.send, b"L" * 100, 1))
    small = let_it_wait(pool.submit(first.send, b"s", 1))
    assert not small.done()  # there is room for it, but the large one came first
    second.recv(0)
    large.result(SOON)
    assert second.recv(0) == b"L" * 100
    small.result(SOON)
    assert second.recv(0) == b"s"


def test_room_for_several_senders_wakes_them_all(make_world, pool):
    first, second = make_world(2, queue_nbytes=100)
    first.send(bytes(100), 1)
    blocked = [let_it_wait(pool.submit(first.send, bytes(40), 1)) for _ in range(2)]
    second.recv(0)
    for future in blocked:
        future.result(SOON)


# -- leaving ---------------------------------------------------------------------------------------


def test_close_wakes_whoever_waits(make_world, pool):
    first, _ = make_world(2, queue_nbytes=10)
    first.send(bytes(10), 1)
    actions = [
        lambda: first.recv(1),
        lambda: first.recv(1, tag=1),
        lambda: first.send(b"x", 1),
        first.barrier,
    ]
    waiting = [let_it_wait(pool.submit(action)) for action in actions]
    first.close()
    first.close()
    assert [type(future.exception(SOON)) for future in waiting] == [ChannelClosedError] * 4
    assert first.closed
    for action in (*actions, lambda: first.open_calls(1)):
        with pytest.raises(ChannelClosedError):
            action()


def test_peers_take_what_a_rank_left_behind(make_world, pool):
    first, second = make_world(2)
    waiting = let_it_wait(pool.submit(second.recv, 0, 5))
    first.send(b"one", 1)
    first.send(b"two", 1)
    first.close()
    assert "rank 0 has left" in str(waiting.exception(SOON))
    assert [second.recv(0), second.recv(0)] == [b"one", b"two"]
    for action in (lambda: second.recv(0), lambda: second.send(b"x", 0), second.barrier):
        with pytest.raises(ChannelClosedError, match="rank 0 has left") as caught:
            action()
        assert (caught.value.rank, caught.value.peer) == (1, 0)


def test_a_message_that_fitted_in_part_arrives_although_its_sender_left(make_world):
    first, second = make_world(2, queue_nbytes=40)
    first.send(b"a" * 30, 1)
    first.send(b"b" * 30, 1, timeout=0)  # a part of it is taken
    first.close()
    assert [second.recv(0), second.recv(0)] == [b"a" * 30, b"b" * 30]
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        second.recv(0)


def test_a_sender_that_waits_for_room_hears_that_the_reader_left(make_world, pool):
    first, second = make_world(2, queue_nbytes=10)
    first.send(bytes(10), 1)
    blocked = let_it_wait(pool.submit(first.send, b"x", 1))
    second.close()
    assert "rank 1 has left" in str(blocked.exception(SOON))


def test_the_others_go_on_when_a_rank_leaves(make_world):
    first, second, third = make_world(3)
    first.close()
    second.send(b"still here", 2)
    assert third.recv(1) == b"still here"


# -- dying -----------------------------------------------------------------------------------------


def test_a_kill_fails_all_that_is_pending_and_names_the_rank(make_world, pool):
    first, second, third = make_world(3, queue_nbytes=10)
    first.send(bytes(10), 2)
    waiting = [
        let_it_wait(pool.submit(action))
        for action in (
            lambda: first.recv(2),
            lambda: first.recv(2, tag=1),
            lambda: first.send(b"x", 2),
            first.barrier,
            second.barrier,
        )
    ]
    until(lambda: first.mesh.peers[2].inbox.in_flight >= 2)
    until(lambda: all(one.status().operation == "barrier()" for one in (first, second)))
    third.network.kill(2)
    errors = [future.exception(SOON) for future in waiting]
    assert [(type(error), error.peer) for error in errors] == [(PeerLostError, 2)] * 5
    for action in (lambda: first.recv(2), lambda: first.send(b"x", 2)):
        with pytest.raises(PeerLostError):
            action()
    received = pool.submit(second.recv, 0)  # it may have to read what ranks say of the barrier
    first.send(b"we go on", 1)
    assert received.result(SOON) == b"we go on"


def test_the_killed_rank_itself_sees_its_death(make_world, pool):
    first, second = make_world(2)
    waiting = let_it_wait(pool.submit(first.recv, 1))
    first.network.kill(0)
    errors = [waiting.exception(SOON)]
    for action in (lambda: first.recv(1), lambda: first.send(b"x", 1), first.barrier):
        with pytest.raises(PeerLostError) as caught:
            action()
        errors.append(caught.value)
    assert [error.peer for error in errors] == [0] * 4
    first.close()
    with pytest.raises(ChannelClosedError):
        first.recv(1)
    with pytest.raises(PeerLostError):  # to the others it stays dead
        second.recv(0)


def test_what_arrived_before_a_death_stays_receivable(make_world):
    first, second = make_world(2)
    first.send(b"last words", 1)
    first.network.kill(0)
    first.network.kill(0)
    assert second.recv(0) == b"last words"
    with pytest.raises(PeerLostError, match="rank 0 is lost"):
        second.recv(0)


def test_a_rank_that_left_cannot_die(make_world):
    first, second = make_world(2)
    first.close()
    first.network.kill(0)
    with pytest.raises(ChannelClosedError):
        second.recv(0)


def test_a_broken_link_parts_two_ranks_and_no_others(make_world, pool):
    first, second, third = make_world(3)
    waiting = [let_it_wait(pool.submit(first.recv, 1)), let_it_wait(pool.submit(second.recv, 0))]
    first.network.break_link(1, 0)
    errors = [future.exception(SOON) for future in waiting]
    assert [(type(error), error.peer) for error in errors] == [
        (PeerLostError, 1),
        (PeerLostError, 0),
    ]
    third.send(b"a", 0)
    third.send(b"b", 1)
    assert (first.recv(2), second.recv(2)) == (b"a", b"b")


def test_faults_on_demand_check_their_ranks(make_world):
    (first, _) = make_world(2)
    with pytest.raises(InvalidRankError):
        first.network.kill(2)
    with pytest.raises(InvalidRankError):
        first.network.break_link(0, 7)
    with pytest.raises(ConfigurationError):
        first.network.break_link(1, 1)


# -- everything at once ----------------------------------------------------------------------------


def test_many_threads_each_get_their_own(make_world):
    world = make_world(3, queue_nbytes=200)

    def send(src, dst, tag):
        for number in range(30):
            world[src].send(f"{src}/{dst}/{tag}/{number}".encode(), dst, tag=tag)

    def receive(src, dst, tag):
        for number in range(30):
            assert world[dst].recv(src, tag=tag) == f"{src}/{dst}/{tag}/{number}".encode()

    ways = [(src, dst, 0) for src in range(3) for dst in range(3) if src != dst]
    in_parallel([lambda way=way, do=do: do(*way) for way in ways for do in (send, receive)])


RANKS = st.integers(0, 2)
TAGS = st.integers(0, 2)
QUEUE_NBYTES = 20


class WorldMachine(RuleBasedStateMachine):
    """Random use of a world of three against a model: a deque for each (src, dst, tag)."""

    def __init__(self):
        super().__init__()
        self.world = SimulatedBackend.create_group(3, queue_nbytes=QUEUE_NBYTES)
        self.model = defaultdict(deque)
        self.is_unread = defaultdict(bool)  # whether something may be on the way
        self.left = set()
        self.killed = set()

    def expected_failure(self, rank, peer):
        if rank in self.left:
            return ChannelClosedError
        if rank in self.killed or peer in self.killed:
            return PeerLostError
        return ChannelClosedError if peer in self.left else None

    def outcome(self, action):
        try:
            return action()
        except RankwireError as error:
            return type(error)

    @rule(src=RANKS, dst=RANKS, tag=TAGS, data=st.binary(max_size=30))
    def send(self, src, dst, tag, data):
        if src == dst:
            return
        failure = self.expected_failure(src, dst)
        outcome = self.outcome(lambda: self.world[src].send(data, dst, tag, timeout=0))
        if failure is None and self.is_unread[src, dst] and outcome is DeadlineExceededError:
            return  # there was no room: it never arrives
        assert outcome == failure
        if outcome is None:
            self.model[src, dst, tag].append(data)
            self.is_unread[src, dst] = True

    @rule(src=RANKS, dst=RANKS, tag=TAGS)
    def recv(self, src, dst, tag):
        if src == dst:
            return
        own_failure = self.expected_failure(dst, dst)
        queue = self.model[src, dst, tag]
        if own_failure is not None:
            expected = own_failure
        elif queue:
            expected = queue.popleft()
        else:
            expected = self.expected_failure(dst, src) or DeadlineExceededError
            self.is_unread[src, dst] = False  # it has read all that was there
        assert self.outcome(lambda: self.world[dst].recv(src, tag, timeout=0)) == expected

    @rule(src=RANKS, dst=RANKS, tag=TAGS)
    def recv_into_a_buffer_of_the_wrong_size(self, src, dst, tag):
        queue = self.model[src, dst, tag]
        if src == dst or not queue or self.expected_failure(dst, dst) is not None:
            return
        buffer = bytearray(len(queue[0]) + 1)
        outcome = self.outcome(lambda: self.world[dst].recv_into(buffer, src, tag, timeout=0))
        assert outcome is SizeMismatchError

    @precondition(lambda self: len(self.left | self.killed) < 2)
    @rule(rank=RANKS)
    def close(self, rank):
        self.world[rank].close()
        self.left.add(rank)

    @precondition(lambda self: len(self.left | self.killed) < 2)
    @rule(rank=RANKS)
    def kill(self, rank):
        self.world[rank].network.kill(rank)
        if rank not in self.left:
            self.killed.add(rank)

    @invariant()
    def closed_is_what_was_closed(self):
        assert {backend.rank for backend in self.world if backend.closed} == self.left

    def teardown(self):
        for backend in self.world:
            backend.close()


TestWorldMachine = WorldMachine.TestCase
TestWorldMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
