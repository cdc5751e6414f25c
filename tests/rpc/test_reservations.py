"""Room for large calls that wait for a worker: the tables alone, then agents that fill them."""

import signal
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from interrupts import no_collection
from rankwire import (
    ChannelClosedError,
    DeadlineExceededError,
    FunctionNotFoundError,
    OverloadedError,
    RpcAgent,
)
from rankwire.rpc.messages import decode_reply, encode_request
from rankwire.rpc.reservations import (
    RESERVE,
    SMALL_NBYTES,
    UNRESERVED_NBYTES,
    Allowance,
    Reservations,
    unpack_reservation,
)
from rankwire.testing import simulated_world, sub_world, tcp_world
from real_time import Deadline
from worlds import Running, eventually

MIB = 1 << 20


class Requests:
    """Requests reservations, and notes which were granted."""

    def __init__(self, reservations):
        self.reservations = reservations
        self.granted = []
        self.refused = []

    def make(self, src, request_id, nbytes, link=None):
        def answer(is_granted):
            (self.granted if is_granted else self.refused).append((src, request_id))

        return self.reservations.request(src, request_id, nbytes, link, answer)


@pytest.fixture
def requests():
    return Requests(Reservations(100, max_requests=3))


def kept_nbytes(reservations):
    """Return the bytes of large calls that wait there, or are granted and on their way."""
    return reservations._granted_nbytes + reservations._unreserved._nbytes.total()


# -- the callee's tables ---------------------------------------------------------------------------


def test_reservations_are_granted_up_to_the_limit_and_in_order(requests):
    for number, nbytes in enumerate((60, 40, 1, 30)):
        requests.make(1, number, nbytes)
    assert requests.granted == [(1, 0), (1, 1)]
    requests.reservations.release(1, 1)
    assert requests.granted == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert kept_nbytes(requests.reservations) == 91


def test_one_call_of_any_size_is_granted(requests):
    requests.make(1, 0, 1000)
    requests.make(2, 0, 1)
    assert requests.granted == [(1, 0)]
    requests.reservations.release(1, 0)
    assert requests.granted == [(1, 0), (2, 0)]


def test_a_smaller_call_does_not_pass_a_larger_one(requests):
    requests.make(1, 0, 90)
    requests.make(2, 0, 50)
    requests.make(3, 0, 5)
    assert requests.granted == [(1, 0)]
    requests.reservations.release(2, 0)  # it gave up
    assert requests.granted == [(1, 0), (3, 0)]


def test_a_caller_that_is_gone_frees_its_space(requests):
    requests.make(1, 0, 90, link="old")
    requests.make(1, 1, 90, link="new")
    requests.make(2, 0, 90)
    requests.reservations.caller_gone(1, "old")
    assert requests.granted == [(1, 0), (1, 1)]
    requests.reservations.caller_gone(1, None)
    assert requests.granted == [(1, 0), (1, 1), (2, 0)]
    requests.reservations.release(2, 0)
    assert kept_nbytes(requests.reservations) == 0


def test_closing_refuses_waiting_and_later_requests(requests):
    requests.make(1, 0, 90)
    requests.make(1, 1, 90)
    requests.reservations.close()
    requests.make(1, 2, 1)
    assert (requests.granted, requests.refused) == ([(1, 0)], [(1, 1), (1, 2)])
    assert requests.reservations.admit(1, 0, 90)


def test_too_many_requests_are_refused(requests):
    requests.make(1, 0, 100)
    assert all(requests.make(1, number, 100) for number in (1, 2, 3))
    assert not requests.make(1, 4, 100)


def test_an_interrupt_while_callers_are_notified_loses_none(requests):
    def interrupt(is_granted):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        requests.reservations.request(1, 0, 60, None, interrupt)
    ((ask, is_granted),) = requests.reservations._unnotified
    requests.reservations._unnotified[0] = (
        ask._replace(answer=requests.granted.append),
        is_granted,
    )
    requests.reservations.release(7, 7)
    assert requests.granted == [True]


def test_a_granted_call_is_admitted(requests):
    requests.make(1, 0, 100 * UNRESERVED_NBYTES)
    assert requests.reservations.admit(1, 0, 100 * UNRESERVED_NBYTES)


def test_a_second_request_for_a_call_is_refused(requests):
    assert requests.make(1, 0, 90)
    assert not requests.make(1, 0, 90)
    assert requests.make(1, 1, 90)
    assert not requests.make(1, 1, 90)
    requests.reservations.caller_gone(1, None)
    assert kept_nbytes(requests.reservations) == 0


def test_a_call_is_admitted_once(requests):
    requests.make(1, 0, 100)
    assert [requests.reservations.admit(1, 0, 100) for _ in range(2)] == [True, False]
    assert [requests.reservations.admit(1, 1, 100) for _ in range(2)] == [True, False]
    requests.reservations.release(1, 0)
    requests.reservations.release(1, 1)
    assert kept_nbytes(requests.reservations) == 0
    assert requests.reservations.admit(1, 0, 100)


def test_a_caller_without_reservations_is_refused_before_long(requests):
    admitted = [requests.reservations.admit(1, number, UNRESERVED_NBYTES) for number in range(10)]
    assert admitted == [True] * 4 + [False] * 6
    assert requests.reservations.admit(2, 0, UNRESERVED_NBYTES)
    requests.reservations.release(1, 0)
    assert requests.reservations.admit(1, 20, UNRESERVED_NBYTES)
    assert not requests.reservations.admit(3, 0, 100 * UNRESERVED_NBYTES)


@pytest.mark.parametrize(
    "args",
    [
        *([], [1], [1, 0], [-1, MIB], ["1", MIB], [1, MIB, 3], [1.0, 2.0]),
        *([1, SMALL_NBYTES], [1, 10 * MIB + 1], [1, 10**400], [2**64, MIB]),
    ],
)
def test_a_malformed_request_is_invalid(args):
    from rankwire.errors import InvalidMessageError

    with pytest.raises(InvalidMessageError):
        unpack_reservation(args, 10 * MIB)
    assert unpack_reservation([1, 10 * MIB], 10 * MIB) == (1, 10 * MIB)


def test_the_allowance_is_by_rank_and_given_back_once():
    allowance = Allowance(UNRESERVED_NBYTES)
    assert allowance.take(1, 10, UNRESERVED_NBYTES)
    assert not allowance.take(1, 11, 1)
    assert allowance.take(2, 12, UNRESERVED_NBYTES)
    allowance.give_back(10)
    allowance.give_back(10)
    assert allowance.take(1, 13, UNRESERVED_NBYTES)
    assert not allowance.take(1, 14, 1)


# -- agents ----------------------------------------------------------------------------------------

CALL_NBYTES = 4 * MIB
BOUND = 16 * MIB


class Office:
    """Two agents; the callee has one worker, which is busy until ``door`` opens."""

    def __init__(self, world, **options):
        self.agents = [RpcAgent(backend, workers=1, **options) for backend in world]
        self.caller, self.callee = self.agents
        self.door = threading.Event()
        self.served = []
        self.callee.register("block", lambda: self.door.wait(30))
        self.callee.register("take", self._take)
        self.caller.register("ping", lambda: "pong")
        self.callee.register("relay", lambda: self.callee.rpc_sync(0, "ping_back"))
        self.callee.register("size", lambda array: array.nbytes)
        self.caller.register("ping_back", lambda array=None: self.caller.rpc_sync(1, "size", BIG))
        self.array = np.ones(CALL_NBYTES, np.uint8)

    def _take(self, array):
        self.served.append(int(array[0]))
        return array.nbytes

    def block(self):
        future = self.caller.rpc_async(1, "block")
        eventually(lambda: self.callee.activity().in_service == 1)
        return future

    def waiting_nbytes(self):
        return sum(len(job.incoming.payload) for job in self.callee._server.pool.queue.jobs())

    def fill(self, count, dst=1, agent=None):
        """Make so many large calls in a thread of its own; return it and the list of futures."""
        agent = agent or self.caller
        futures = []
        calls = (agent.rpc_async(dst, "take", self.array) for _ in range(count))
        return Running(futures.extend, calls), futures

    def wait_until_full(self, futures):
        """Return when the caller waits for room."""
        eventually(lambda: self.callee._server.reservations._requested)
        return len(futures)


BIG = np.ones(3 * UNRESERVED_NBYTES, np.uint8)

WORLDS = {
    "tcp": tcp_world,
    "tcp forced": lambda size: tcp_world(size, transport="tcp"),
    "simulated": simulated_world,
    "sub": sub_world(simulated_world),
}


@pytest.fixture(params=WORLDS)
def office(request):
    with ExitStack() as stack:
        world = stack.enter_context(WORLDS[request.param](2))
        office = Office(world, max_queued_nbytes=BOUND)
        yield office
        office.door.set()
        for agent in office.agents:
            agent.close(grace=2)


def test_waiting_calls_are_bounded_in_bytes_and_their_sender_waits(office):
    blocked = office.block()
    sender, futures = office.fill(30)
    sent = office.wait_until_full(futures)
    assert sent < 30
    assert office.waiting_nbytes() <= BOUND + UNRESERVED_NBYTES + 30 * 1024
    assert not sender.done
    office.door.set()
    assert blocked.result(20)
    sender.result()
    assert [future.result(20) for future in futures] == [CALL_NBYTES] * 30
    eventually(lambda: kept_nbytes(office.callee._server.reservations) == 0)
    assert not office.caller._caller._allowance.taken


def test_cancels_nested_calls_and_small_calls_flow_while_large_ones_wait(office):
    office.block()
    sender, futures = office.fill(30)
    sent = office.wait_until_full(futures)
    # Nested calls, large ones too, go in both directions past those that wait.
    assert office.callee.rpc_sync(0, "ping_back", timeout=10) == BIG.nbytes
    for future in futures[:sent]:
        assert future.cancel()
    eventually(lambda: len(futures) > sent)  # what was cancelled has made room
    assert office.waiting_nbytes() <= BOUND + UNRESERVED_NBYTES + 30 * 1024
    for future in futures:
        future.cancel()
    office.door.set()
    sender.result()


def test_a_call_without_queue_space_in_time_has_not_run(office):
    office.block()
    array = np.full(BOUND, 7, np.uint8)
    kept = office.caller.rpc_async(1, "take", array)
    with pytest.raises(DeadlineExceededError, match="max_queued_nbytes") as info:
        office.caller.rpc_sync(1, "take", array, timeout=0.5)
    assert not info.value.may_have_run
    late = office.caller.rpc_async(1, "take", array, timeout=0.5)
    assert isinstance(late.exception(20), DeadlineExceededError)
    assert not late.exception().may_have_run
    eventually(lambda: not office.callee._server.reservations._requested)
    office.door.set()
    assert kept.result(20) == BOUND
    assert office.caller.rpc_sync(1, "take", array) == BOUND
    assert office.served == [7, 7]


def test_time_spent_waiting_for_a_reservation_counts(office):
    """The callee learns what is left of the deadline, not what there was before the wait."""
    from rankwire import current_call

    office.callee.register("left", lambda array: current_call().deadline.limit)
    office.block()
    array = np.ones(BOUND, np.uint8)
    office.caller.rpc_async(1, "take", array)
    asking = Running(office.caller.rpc_sync, 1, "left", array, timeout=20)
    eventually(lambda: office.callee._server.reservations._requested)
    threading.Event().wait(0.2)
    office.door.set()
    assert asking.result() <= 19.8


def test_calls_to_oneself_are_bounded_too(office):
    agent = office.callee
    office.block()
    sender, futures = office.fill(30, dst=1, agent=agent)
    office.wait_until_full(futures)
    assert office.waiting_nbytes() <= BOUND + UNRESERVED_NBYTES + 30 * 1024
    office.door.set()
    sender.result()
    assert [future.result(20) for future in futures] == [CALL_NBYTES] * 30


def test_a_caller_that_makes_no_reservation_is_refused(office):
    office.block()
    caller = office.caller
    replies = []
    for _ in range(6):
        array = np.ones(UNRESERVED_NBYTES - 1024, np.uint8)
        message = encode_request(caller.codec, "take", 20.0, [], (array,), {})
        replies.append(caller._port.call(1, next(caller._caller._ids), message, Deadline(20)))
    with pytest.raises(OverloadedError, match="without a reservation"):
        decode_reply(caller.codec, replies[-1].wait(Deadline(20)), 1, 20.0)


def test_a_call_that_is_not_served_frees_its_space(office):
    array = np.ones(BOUND, np.uint8)
    for _ in range(3):
        with pytest.raises(FunctionNotFoundError):
            office.caller.rpc_sync(1, "no such function", array, timeout=10)
    assert kept_nbytes(office.callee._server.reservations) == 0
    assert office.caller.rpc_sync(1, "take", array) == BOUND


def test_a_caller_that_waits_for_a_reservation_learns_that_the_callee_closes(office):
    office.block()
    array = np.ones(BOUND, np.uint8)
    office.caller.rpc_async(1, "take", array)
    waiting = Running(office.caller.rpc_sync, 1, "take", array)
    eventually(lambda: office.callee._server.reservations._requested)
    office.callee.close(grace=0)
    assert isinstance(waiting.error(), ChannelClosedError)
    assert not waiting.error().may_have_run


def test_an_invalid_request_is_answered(office):
    from rankwire.errors import InvalidMessageError

    caller = office.caller
    message = encode_request(caller.codec, RESERVE, 5.0, [], ("x",), {})
    reply = caller._port.call(1, next(caller._caller._ids), message, Deadline(5))
    with pytest.raises(InvalidMessageError, match="space for a large call"):
        decode_reply(caller.codec, reply.wait(Deadline(5)), 1, 5.0)


def test_small_calls_are_not_counted(office):
    office.block()
    array = np.ones(SMALL_NBYTES // 2, np.uint8)
    futures = [office.caller.rpc_async(1, "take", array) for _ in range(50)]
    assert kept_nbytes(office.callee._server.reservations) == 0
    office.door.set()
    assert [future.result(20) for future in futures] == [array.nbytes] * 50


def test_an_interrupt_cancels_the_request_for_a_reservation():
    with simulated_world(2) as world:
        office = Office(world, max_queued_nbytes=BOUND)
        office.block()
        array = np.ones(BOUND, np.uint8)
        kept = office.caller.rpc_async(1, "take", array)
        main = threading.get_ident()

        def interrupt():
            with no_collection():
                eventually(lambda: office.callee._server.reservations._requested)
                signal.pthread_kill(main, signal.SIGINT)

        interrupting = Running(interrupt)
        with pytest.raises(KeyboardInterrupt):
            office.caller.rpc_sync(1, "take", array)
        interrupting.result()
        eventually(lambda: not office.callee._server.reservations._requested)
        office.door.set()
        assert kept.result(20) == BOUND
        assert office.caller.rpc_sync(1, "take", array) == BOUND
        assert kept_nbytes(office.callee._server.reservations) == 0
        for agent in office.agents:
            agent.close(grace=2)
