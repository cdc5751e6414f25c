"""What a rank tells of the calls that it serves."""

import re
import threading
from concurrent.futures import Future
from typing import NamedTuple

import pytest

from rankwire.clock import REAL_TIME
from rankwire.links.inbox import Inbox, Reply
from rankwire.rpc.call import Call, MadeCall, Wait
from rankwire.rpc.call_inquiries import ActiveCalls
from rankwire.wire.control_messages import Key
from rankwire.wire.mailbox import Mailbox
from real_time import Deadline

RANK = 1


class Deferred(NamedTuple):
    future: Future


class Worker:
    ident = 0  # of no thread


class Job(Call):
    deferred = task = awaited = None
    is_suspended = False

    def __init__(self, name="f", *, depth=0, is_async=False, worker=None, waiting=None):
        self.src, self.name, self.deadline = 0, name, Deadline(5.0)
        self.depth = depth
        self.outgoing = {}
        self.worker = worker
        self.waiting = waiting
        self.needs_event_loop = is_async
        self.seconds = self.deadline.waited


def made_call(request_id):
    """Return a call of "g" on rank 2 that is in flight."""
    inbox = Inbox(2, Mailbox(keep_unmatched=False), REAL_TIME)
    return MadeCall(None, 2, "g", Reply((0, 0, request_id), None, inbox))


def account(jobs, *asked, queued=(), workers=2):
    named = {Key(RANK, 0, number): job for number, job in jobs.items()}
    told = ActiveCalls(range(3), RANK, workers, named, queued).describe(
        [Key(RANK, 0, number) for number in asked]
    )
    return {key.request_id: call for key, call in told.items()}


def needs(call):
    return [tuple(need) for need in call.needs]


def test_a_call_that_runs_needs_nothing():
    told = account({1: Job(worker=Worker())}, 1)
    assert (told[1].name, told[1].doing, told[1].needs) == ("f", "is running", ())


def test_a_call_that_runs_says_where_its_thread_is_in_the_program():
    worker = Worker()
    worker.ident = threading.get_ident()
    place = r"is running: it is in describe\(\), called in account \(.*test_call_inquiries.py:\d+\)"
    assert re.fullmatch(place, account({1: Job(worker=worker)}, 1)[1].doing)


def test_a_call_that_waited_for_a_worker_says_how_long_before_it_began():
    job = Job(worker=Worker())
    job.deadline._start -= 3.0  # so long ago it came
    told = account({1: job}, 1)[1]
    assert told.doing == "waited 3 s for one of 2 workers, and is running"
    assert told.age == pytest.approx(3.0, abs=1.0)


def test_calls_that_are_not_served_are_not_reported():
    assert account({1: Job()}, 2) == {}


def test_calls_in_flight_are_mentioned():
    job = Job(worker=Worker())
    job.began(made_call(77))
    assert account({1: job}, 1)[1].doing == "is running and has calls in flight: rank 2 'g'"
    assert account({1: job}, 1)[1].needs == ()


def test_a_call_that_returned_a_future_waits_for_it_and_needs_nothing_that_is_known():
    job = Job()
    job.deferred = Deferred(Future())
    told = account({1: job}, 1)[1]
    assert (told.doing, told.needs) == ("waits for the future that it returned", ())


def test_a_call_that_returned_the_future_of_a_call_needs_that_one():
    job = Job()
    job.began(made_call(77))
    job.deferred = Deferred(Future())
    job.deferred.future.request_id = 77
    told = account({1: job}, 1)[1]
    assert told.doing == "waits for the future that it returned, of rank 2 'g'"
    assert needs(told) == [(2, RANK, 77)]


def test_a_call_that_waited_until_its_deadline_says_for_whom():
    job = Job(worker=Worker())
    job.began(made_call(77))
    job.deadline = Deadline(0.0)
    job.ended(77)
    doing = "is running after it waited for rank 2 'g' until its deadline"
    assert account({1: job}, 1)[1].doing == doing


def test_a_call_that_was_answered_in_time_is_not_mentioned():
    job = Job(worker=Worker())
    job.began(made_call(77))
    job.ended(77)
    assert account({1: job}, 1)[1].doing == "is running"


def test_a_call_that_waits_needs_the_call_it_made():
    told = account({1: Job(worker=Worker(), waiting=Wait(5, 2, "g", [77]))}, 1)
    assert needs(told[1]) == [(2, RANK, 77)]
    assert (told[1].wait, told[1].doing) == (5, "waits for rank 2 'g'")


def test_a_call_that_waits_for_its_turn_needs_one_of_those_in_flight():
    wait = Wait(5, 2, "g", [7, 8], is_for_room=True)
    told = account({1: Job(worker=Worker(), waiting=wait)}, 1)
    assert needs(told[1]) == [(2, RANK, 7), (2, RANK, 8)]


def test_a_queued_call_needs_one_of_those_that_have_all_the_places():
    queued = Job()
    jobs = {
        1: queued,
        2: Job(worker=Worker()),
        3: Job(worker=Worker()),
        4: Job(worker=Worker(), depth=1),
    }
    told = account(jobs, 1, queued=[queued])
    assert needs(told[1]) == [(RANK, 0, 2), (RANK, 0, 3)]
    assert set(told) == {1, 2, 3}
    assert account(jobs, 1, queued=[queued], workers=3)[1].needs == ()


def test_a_coroutine_needs_the_one_that_blocks_the_event_loop():
    jobs = {1: Job(is_async=True), 2: Job("holder", is_async=True, waiting=Wait(1, 2, "g", [7]))}
    told = account(jobs, 1)
    assert needs(told[1]) == [(RANK, 0, 2)]
    assert told[1].doing == "waits for the event loop, which 'holder' blocks"
    assert needs(told[2]) == [(2, RANK, 7)]


def test_a_coroutine_goes_on_if_no_call_blocks_the_event_loop():
    assert account({1: Job(is_async=True)}, 1)[1].needs == ()
