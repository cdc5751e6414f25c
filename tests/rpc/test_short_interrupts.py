"""Ctrl-C in a short call or receive: nothing that was read is lost, and the callee is told.

The peer is a process, so that what it sends comes at any moment, and together: whoever is
interrupted has read more than its own. Nothing of that may be lost or come twice.
"""

import os
import signal
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from itertools import count

import pytest

from faults.sizes import QUICK
from interrupts import (
    Interrupt,
    Interrupting,
    every_interrupt,
    interrupt_main_thread_in,
    no_collection,
)
from rankwire.rpc.messages import encode_request
from real_time import Deadline
from rpc.callee import SOON, WORLDS, in_flight, pair, world_of_two
from worlds import PATIENCE, Running, eventually, nursery, runtime_folder_of_its_own

# A socket that was just opened is closed by the interpreter, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SIZES = (8, 30_000, 200_000, 8)  # the largest comes in several pieces, and is not lent


@pytest.fixture(scope="module", autouse=True)
def shared_nursery():
    with nursery():
        yield


@pytest.fixture(autouse=True)
def folder(shared_nursery):
    """Who is killed leaves the file of its socket here."""
    with runtime_folder_of_its_own():
        yield


@pytest.fixture(params=["unix", "tcp"])
def transport(request):
    return request.param


def values(turn):
    """Return arguments that tell turn, place and size."""
    return [f"{turn}.{place}".encode().ljust(size, b".") for place, size in enumerate(SIZES)]


# -- between reading and parsing -------------------------------------------------------------------


def test_replies_that_an_interrupted_call_has_read_reach_their_futures(transport):
    turns = count()

    def run(interrupting):
        turn = next(turns)
        sent = values(turn)
        futures = [caller.rpc_async(1, "note", value, timeout=PATIENCE) for value in sent]
        with suppress(Interrupt), interrupting:
            caller.rpc_sync(1, "note", f"{turn}".encode())
        assert [future.result(SOON) for future in futures] == sent
        assert in_flight(caller) == 0
        asked.extend(sent)

    asked = []
    with pair(transport) as (caller, callee):
        caller.rpc_sync(1, "echo", 1)
        assert every_interrupt(run) >= 10
        noted = callee.notes()
        assert len(noted) == len(set(noted))  # no request came twice
        assert set(asked) <= set(noted)
        own = sorted(int(value) for value in set(noted) - set(asked))
        assert own[-1:] == [next(turns) - 1]  # the last one was not interrupted


def test_an_interrupted_wait_for_a_future_loses_no_reply(transport):
    turns = count()

    def run(interrupting):
        sent = values(next(turns))
        futures = [caller.rpc_async(1, "echo", value, timeout=PATIENCE) for value in sent]
        with suppress(Interrupt), interrupting:
            assert futures[-1].result() == sent[-1]
        assert [future.result(SOON) for future in futures] == sent

    with pair(transport) as (caller, _):
        caller.rpc_sync(1, "echo", 1)
        assert every_interrupt(run) >= 5
        assert in_flight(caller) == 0


@pytest.mark.parametrize("second_after", [None, 1, 3, 7])
def test_replies_without_a_waiting_thread_after_an_interrupt_end_their_futures(
    transport, second_after
):
    """What the interrupted thread has read is looked after, although nothing more comes."""
    turns = count()

    def run(interrupting):
        sent = values(next(turns))
        futures = [caller.rpc_async(1, "echo", value, timeout=PATIENCE) for value in sent]
        with suppress(Interrupt), interrupting:
            assert futures[-1].result() == sent[-1]
        assert not wait(futures, SOON).not_done
        assert [future.result() for future in futures] == sent
        assert in_flight(caller) == 0

    with pair(transport) as (caller, _):
        caller.rpc_sync(1, "echo", 1)
        step = 1 if second_after is None else 2
        assert every_interrupt(run, second_after=second_after, step=step) >= 3


@pytest.mark.parametrize("second_after", [1, 4])
def test_two_interrupts_in_a_call_lose_no_other_reply_and_keep_nothing_of_it(
    transport, second_after
):
    turns = count()

    def run(interrupting):
        sent = values(next(turns))
        futures = [caller.rpc_async(1, "echo", value, timeout=PATIENCE) for value in sent]
        with suppress(Interrupt), interrupting:
            caller.rpc_sync(1, "echo", 1)
        assert not wait(futures, SOON).not_done
        assert [future.result() for future in futures] == sent
        assert in_flight(caller) == 0

    with pair(transport) as (caller, _):
        caller.rpc_sync(1, "echo", 1)
        assert every_interrupt(run, second_after=second_after) >= 10


@pytest.mark.parametrize("second_after", [None, 1, 3, 7])
def test_a_call_whose_sending_was_interrupted_is_cancelled(transport, second_after):
    turns = count()

    def run(interrupting):
        number = next(turns)
        results = []
        with suppress(Interrupt), interrupting:
            results.append(caller._port.call(1, number, request(caller, number), Deadline(SOON)))
        for reply in results:
            reply.withdraw()
            caller._port.cancel(1, number)
        assert caller.rpc_sync(1, "echo", 1, timeout=SOON) == 1
        assert in_flight(caller) == 0

    with pair(transport) as (caller, callee):
        caller.rpc_sync(1, "echo", 1)
        step = 1 if second_after is None else 2
        assert every_interrupt(run, second_after=second_after, step=step) >= 3
        # Those that ran at all: a cancel that comes with its request is as good.
        eventually(lambda: sorted(callee.cancelled()) == sorted(callee.notes()), SOON)
        assert len(set(callee.notes())) == len(callee.notes())


def request(caller, number):
    return encode_request(caller.codec, "watch", SOON, [], (number, SOON), {})


def test_an_interrupted_wait_for_max_in_flight_loses_no_reply(transport):
    """Whoever may not send yet reads what others wait for."""
    turns = count()

    def run(interrupting):
        sent = values(next(turns))
        futures = [caller.rpc_async(1, "echo", value, timeout=PATIENCE) for value in sent]
        with suppress(Interrupt), interrupting:
            caller.rpc_async(1, "echo", 1, timeout=PATIENCE).result()
        assert [future.result(SOON) for future in futures] == sent
        # What was read and is nobody's is found by whoever reads next.
        assert caller.rpc_sync(1, "echo", 2, timeout=SOON) == 2
        eventually(lambda: in_flight(caller) == 0, SOON)

    with pair(transport, max_in_flight=len(SIZES)) as (caller, _):
        caller.rpc_sync(1, "echo", 1)
        assert every_interrupt(run, step=2) >= 10


@pytest.mark.parametrize("second_after", [None, 2])
@pytest.mark.parametrize("wanted", [0, 2], ids=["small", "in pieces"])
def test_messages_that_an_interrupted_receive_has_read_are_received(
    transport, wanted, second_after
):
    """One message that was about to be returned may be gone with the interrupted ``recv``."""
    turns = count()

    def run(interrupting):
        turn = next(turns)
        sent = values(turn)
        sending = far.start(
            "eval",
            "[backend.send(value, 0, tag=tag, timeout=10) for tag, value in messages]",
            messages=[(turn * 10 + place, value) for place, value in enumerate(sent)]
            + [(turn * 10 + wanted, b"next")],
        )
        got = []
        with suppress(Interrupt), interrupting:
            got.append(bytes(near.recv(1, tag=turn * 10 + wanted)))
        for place, value in enumerate(sent):
            if place != wanted:
                assert near.recv(1, tag=turn * 10 + place, timeout=SOON) == value
        while got[-1:] != [b"next"]:
            got.append(bytes(near.recv(1, tag=turn * 10 + wanted, timeout=SOON)))
        assert got in ([sent[wanted], b"next"], [b"next"])
        assert interrupting.happened or len(got) == 2
        sending.result()

    with world_of_two(transport) as (near, far):
        far.call("send", b"first", 0, tag=1 << 40)
        assert near.recv(1, tag=1 << 40) == b"first"
        assert every_interrupt(run, second_after=second_after, step=1 if not second_after else 3)


# -- while waiting ---------------------------------------------------------------------------------


def interrupt_after(seconds, flag):
    """Send this thread an interrupt from the keyboard in a while; return what waits for that.

    Args:
        seconds: When, counted from when
        flag: this file is there: the callee has begun.
    """
    ident = threading.main_thread().ident

    def interrupt():
        with no_collection():
            eventually(lambda: os.path.exists(flag))
            time.sleep(seconds)
            signal.pthread_kill(ident, signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    return waiting


@pytest.mark.parametrize("spin", [0.0, 5.0], ids=["sleeping", "spinning"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_caller_that_is_interrupted_while_it_waits_tells_its_callee(world, spin, tmp_path):
    with pair(world, backend={"spin": spin}) as (caller, callee):
        for number in range(5):
            others = [caller.rpc_async(1, "wait_for", 10 * number + k) for k in range(3)]
            flag = str(tmp_path / str(number))
            timer = interrupt_after(0.02, flag)
            with pytest.raises(KeyboardInterrupt):
                caller.rpc_sync(1, "watch", number, SOON, flag)
            timer.join()
            # On a busy machine the callee may hear of both at once, and does not begin.
            eventually(lambda: callee.cancelled() == callee.notes(), SOON)
            assert in_flight(caller) == 3
            assert caller.rpc_sync(1, "echo", number, timeout=SOON) == number
            for k in range(3):
                callee.open(10 * number + k)
            assert [other.result(SOON) for other in others] == [10 * number + k for k in range(3)]
            assert in_flight(caller) == 0
        assert callee.cancelled() == callee.notes()
        assert set(callee.notes()) <= set(range(5))


@pytest.mark.parametrize("world", WORLDS)
def test_a_future_whose_waiting_was_interrupted_goes_on_until_it_is_cancelled(world):
    with pair(world) as (caller, callee):
        future = caller.rpc_async(1, "watch", "this", PATIENCE)
        for _ in range(3):
            interrupting = Running(interrupt_main_thread_in, "result")
            with pytest.raises(KeyboardInterrupt):
                future.result()
            interrupting.result()
            assert not future.done()
            assert caller.rpc_sync(1, "echo", 1, timeout=SOON) == 1
        assert callee.cancelled() == []
        assert future.cancel()
        eventually(lambda: callee.cancelled() == ["this"], SOON)
        assert in_flight(caller) == 0


def test_an_interrupt_at_every_place_of_spinning_is_told_to_the_callee(transport, tmp_path):
    """So many places after the callee has begun, its caller is doing nothing but looking."""
    with pair(transport, backend={"spin": PATIENCE}) as (caller, callee):
        caller.rpc_sync(1, "echo", 1)
        places = range(0, 40, 4 if QUICK else 1)
        for number in places:
            flag = str(tmp_path / str(number))
            interrupting = Interrupting(200 + number, since=lambda flag=flag: os.path.exists(flag))
            with suppress(Interrupt), interrupting:
                caller.rpc_sync(1, "watch", number, SOON, flag)
            assert interrupting.happened
            eventually(lambda n=number: n in callee.cancelled(), SOON)
            assert in_flight(caller) == 0
            assert caller.rpc_sync(1, "echo", number, timeout=SOON) == number
        assert callee.cancelled() == callee.notes() == list(places)


def test_a_callee_that_is_told_too_late_has_answered_and_nothing_is_kept(transport, tmp_path):
    """The interrupt and the reply come at the same moment."""
    with pair(transport) as (caller, callee):
        caller.rpc_sync(1, "echo", 1)
        begin = time.monotonic()
        for number in range(20):
            flag = str(tmp_path / str(number))
            timer = interrupt_after(0.004 + number / 10_000, flag)
            with suppress(KeyboardInterrupt):
                caller.rpc_sync(1, "watch", number, 0.005, flag)
                timer.join()
                time.sleep(0.01)
            timer.join()
            assert caller.rpc_sync(1, "echo", number, timeout=SOON) == number
            assert in_flight(caller) == 0
        assert time.monotonic() - begin < 20 * SOON
        # One that is told before it begins does not begin.
        assert callee.notes() == sorted({*callee.notes()} & {*range(20)})
