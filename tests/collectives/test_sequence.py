"""How operations are numbered and told apart, and what ranks tell each other of them."""

import contextlib
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace
from queued import keep_workers_away

import rankwire
from interrupts import Interrupt, every_interrupt
from rankwire.collectives import algorithms, exchange, operation
from rankwire.collectives.exchange import describe, tag_of
from rankwire.collectives.operation import Operation
from rankwire.collectives.sequence import OperationSequence
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
    RankwireError,
    UnsupportedTypeError,
)
from rankwire.testing import in_parallel, simulated_world, sub_world, tcp_world
from rankwire.wire.control_messages import Notice
from rankwire.wire.frames import Channel, Envelope
from several_hosts import hosts_world
from worlds import Running, deaf, eventually

SOON = 8.0  # seconds for what takes milliseconds, on a busy machine
TIMEOUT = 20.0
WAITING = 0.08  # by then a rank that waits has told the others

WORLDS = {
    "simulated": simulated_world,
    "auto": partial(tcp_world, transport="auto"),
    "tcp": partial(tcp_world, transport="tcp"),
    "hosts": hosts_world,
    "sub-auto": sub_world(partial(tcp_world, transport="auto")),
}


# That ranks of several hosts fail alike, test_mismatch and test_collective_failures show sooner.
@pytest.fixture(
    params=[pytest.param(w, marks=pytest.mark.slow) if w == "hosts" else w for w in WORLDS]
)
def make_world(request):
    return partial(WORLDS[request.param], timeout=TIMEOUT)


@pytest.fixture
def pair():
    with simulated_world(2, timeout=TIMEOUT) as world:
        yield world


def all_reduce_everywhere(world, count: int = 5) -> None:
    """Show that the group works."""
    results = in_parallel(
        [partial(rankwire.all_reduce, b, np.full(count, b.rank + 1.0)) for b in world]
    )
    for result in results:
        np.testing.assert_array_equal(result, np.full(count, sum(range(1, len(world) + 1))))


def notice(number: int, description: str, state="waiting", text="", culprit=-1, **rest) -> Notice:
    """Return a report about an operation of the world."""
    return Notice(0, number, description, state, text, culprit, **rest)


def report(backend, told: Notice) -> None:
    """Report something to the coordinator, as an operation does."""
    OperationSequence.of(backend).report(replace(told, group=backend.group))


def reports_of(backend) -> list[Notice]:
    """Return a list to which everything that a rank reports is added."""
    reports, send = [], backend.roll._send

    def recording(told, patience):
        reports.append(told)
        send(told, patience)

    backend.roll._send = recording
    return reports


def until_waiting(backend, src: int) -> None:
    """Wait until a simulated rank waits for another one; it looks up in 50 ms."""
    eventually(lambda: backend.mesh.peers[src].inbox.in_flight)


def frames_of(backend) -> list[Envelope]:
    """Return a list to which the envelope of everything that a rank sends is added."""
    frames, transmit, offer = [], backend.messages.transmit, backend.messages.offer

    def recording(dst, envelope, *rest):
        frames.append(envelope)
        transmit(dst, envelope, *rest)

    def recording_offer(dst, envelope, *rest, **options):
        frames.append(envelope)
        return offer(dst, envelope, *rest, **options)

    backend.messages.transmit, backend.messages.offer = recording, recording_offer
    return frames


# -- numbers and tags


@pytest.fixture
def no_looks(monkeypatch):
    """Who waits tells nobody: on a busy machine all wait for long now and then."""
    monkeypatch.setattr(exchange, "LOOK_EVERY", 60.0)


def test_every_frame_has_the_fingerprint_of_its_operation(no_looks):
    with simulated_world(4, timeout=TIMEOUT) as world:
        sent = [frames_of(backend) for backend in world]
        shape = (8, 3)
        descriptions = [
            describe("all_reduce", "sum", "float64", shape),
            describe("all_reduce", "sum", "float64", shape),
            describe("broadcast", "root 2", "int16", shape),
            describe("all_gather", "float64", shape),
            describe("reduce", "max", "root 1", "float64", shape),
            describe("all_to_all", "float64", shape),
            "barrier()",
        ]

        def run(backend):
            array = np.ones(shape)
            rankwire.all_reduce(backend, array)
            rankwire.all_reduce(backend, array)
            rankwire.broadcast(backend, np.ones(shape, np.int16), 2)
            rankwire.all_gather(backend, array)
            rankwire.reduce(backend, array, 1, "max")
            rankwire.all_to_all(backend, array)
            rankwire.barrier(backend)

        in_parallel([partial(run, backend) for backend in world])
    prints = [tag_of(words, number) >> 16 for number, words in enumerate(descriptions)]
    assert len(set(prints)) == len(prints)
    for frames in sent:
        assert {channel for _, channel, _ in frames} == {Channel.COLLECTIVE}
        seen = [tag >> 16 for _, _, tag in frames]
        assert sorted(set(seen), key=seen.index) == prints


def test_an_operation_that_goes_well_sends_only_its_own_messages(pair, no_looks):
    sent = [frames_of(backend) for backend in pair]
    for _ in range(20):
        in_parallel([partial(rankwire.all_reduce, backend, np.ones(4)) for backend in pair])
    assert [len(frames) for frames in sent] == [20, 20]


def test_tags_of_any_two_operations_differ():
    words = [describe("all_reduce", "sum", "float64", (count,)) for count in range(200)]
    tags = {tag_of(word, number) for word in words for number in range(200)}
    assert len(tags) == 200 * 200
    assert all(tag & 0xFFFF == 0 and tag < 1 << 64 for tag in tags)


def test_groups_of_the_same_ranks_count_for_themselves():
    with simulated_world(3, timeout=TIMEOUT) as world:

        def run(backend):
            groups = [rankwire.SubBackend(backend, range(3)) for _ in range(2)]
            for group, times in zip((*groups, backend), (3, 1, 2), strict=True):
                for _ in range(times):
                    rankwire.barrier(group)
            return [OperationSequence.of(group)._next for group in (*groups, backend)]

        assert in_parallel([partial(run, backend) for backend in world]) == [[3, 1, 2]] * 3


def test_an_interrupt_anywhere_in_an_operation_is_told_and_stops_nothing():
    """Each of them is counted here, unless it has not begun, and the others hear that it failed."""

    def run(interrupting):
        number = mine._next
        with contextlib.suppress(Interrupt), interrupting:
            mine.call("nothing", lambda: ("nothing()", lambda x: None))
        assert mine.turn == mine._next <= number + 1
        assert not mine._ended
        if mine.epoch == number + 1:
            failed.append(number)
            theirs.hear()
            assert theirs.failures[number].is_failure

    failed = []
    with simulated_world(2, timeout=TIMEOUT) as world:
        mine, theirs = map(OperationSequence.of, world)
        every_interrupt(run)
    assert len(failed) > 3


@pytest.mark.fault(37, "an interrupt in background work is told, and stops nothing")
def test_an_interrupt_anywhere_in_work_that_its_waiter_runs_is_told_too(monkeypatch):
    """It fails as a blocking one does; and its handle, if there is one, has the interrupt."""
    keep_workers_away(monkeypatch)

    def run(interrupting):
        number, work = mine._next, None
        with contextlib.suppress(Interrupt), interrupting:
            work = mine.call("nothing", lambda **_: ("nothing()", lambda x: None), async_op=True)
            work.wait()
        error = work.exception() if work is not None else None
        eventually(lambda: mine.turn == mine._next)
        assert mine._next <= number + 1
        assert not mine._ended
        if mine.epoch == number + 1:
            failed.append(number)
            theirs.hear()
            assert theirs.failures[number].is_failure
            assert work is None or isinstance(error, Interrupt)
        else:
            assert error is None or isinstance(error, Interrupt)

    failed = []
    with simulated_world(2, timeout=TIMEOUT) as world:
        mine, theirs = map(OperationSequence.of, world)
        every_interrupt(run)
    assert len(failed) > 3


@pytest.mark.fault(37, "a second interrupt while an operation begins stops nothing")
@pytest.mark.parametrize("second_after", [1, 2, 3, 5])
def test_two_interrupts_while_an_operation_begins_do_not_stop_the_group(second_after):
    """The second one falls into taking back what the first has left in the queue."""

    def run(interrupting):
        with contextlib.suppress(Interrupt), interrupting:
            mine.call("nothing", lambda **_: ("nothing()", lambda x: None), async_op=True)
        mine.call("nothing", lambda **_: ("nothing()", lambda x: None), timeout=SOON)
        eventually(lambda: mine.turn == mine._next)

    with simulated_world(2, timeout=TIMEOUT) as world:
        mine = OperationSequence.of(world[0])
        assert every_interrupt(run, second_after=second_after) >= 5


def test_a_rank_that_is_ahead_is_found_out(pair):
    """It has done with an operation of which the other waits for its messages: they disagree."""
    OperationSequence.of(pair[0]).call(
        "nothing", lambda **_: ("one that sends nothing", lambda x: None), timeout=1
    )
    runs = [Running(rankwire.all_reduce, backend, np.ones(3)) for backend in pair]
    for run in runs:
        assert isinstance(run.error(), CollectiveMismatchError)
        assert run.seconds < SOON


# -- notices


def test_a_rank_that_waits_reports_it_once_and_asks_once_who_is_missing(pair):
    reports = reports_of(pair[0])
    waiting = Running(rankwire.all_reduce, pair[0], np.ones(3), timeout=0.5)
    assert isinstance(waiting.error(), DeadlineExceededError)
    assert [each.state for each in reports] == ["waiting", "asking", "failed"]
    for each in reports:
        assert (each.group, each.sequence) == (0, 0)
        assert each.description == describe("all_reduce", "sum", "float64", (3,))
    operations = OperationSequence.of(pair[1])
    operations.hear()
    assert operations.failures[0].missing == (1,)


def test_an_operation_with_little_time_reports_and_asks_at_once(pair):
    reports = reports_of(pair[0])
    waiting = Running(rankwire.all_reduce, pair[0], np.ones(3), timeout=0.15)
    assert isinstance(waiting.error(), DeadlineExceededError)
    assert [each.state for each in reports] == ["asking", "failed"]


def test_a_report_lists_the_operations_before_it(pair):
    for count in range(1, 13):
        in_parallel([partial(rankwire.all_reduce, b, np.ones(count)) for b in pair])
    reports = reports_of(pair[0])
    with pytest.raises(DeadlineExceededError):
        rankwire.barrier(pair[0], timeout=0.15)
    words = [(n, describe("all_reduce", "sum", "float64", (n + 1,))) for n in range(4, 12)]
    assert reports[0].before == tuple(words)
    with pytest.raises(CollectiveAbortedError):
        rankwire.barrier(pair[1])
    with pytest.raises(DeadlineExceededError):
        rankwire.barrier(pair[0], timeout=0.15)
    assert reports[-1].before == (), "what came before a failure is no longer of interest"


def test_what_is_told_of_a_group_by_a_rank_outside_it_counts_for_nothing():
    with simulated_world(3, timeout=TIMEOUT) as world:
        groups = in_parallel([partial(rankwire.SubBackend, b, [0, 1]) for b in world[:2]])
        operations = OperationSequence.of(groups[0])
        told = notice(0, "words", "failed", "because", 1, members=(0, 1, 2))
        world[2].roll.report(replace(told, group=groups[0].group))
        assert groups[0].group in world[0].roll.untaken
        operations.hear()
        assert not operations.failures
        all_reduce_everywhere(groups)


def test_what_a_rank_says_of_operations_to_come_is_bounded(pair):
    """And the nearest ones are those that are remembered."""
    operations = OperationSequence.of(pair[0])
    for number in range(3000, 1000, -1):
        report(pair[1], notice(number, "words", "failed", "text", 1))
        operations.hear()
    for number in range(1, 3000):
        report(pair[1], notice(-number, "words", "failed"))
        operations.hear()
    assert sorted(operations.failures) == list(range(1001, 2025))
    assert len(operations._others_tags) <= 64


def test_what_was_told_of_an_operation_that_failed_fails_no_later_one(make_world):
    with make_world(3) as world:
        errors = [
            Running(rankwire.all_reduce, backend, np.ones(3), timeout=0.15) for backend in world[:2]
        ]
        for run in errors:
            assert isinstance(run.error(), (DeadlineExceededError, CollectiveAbortedError))
        with pytest.raises(CollectiveAbortedError):
            rankwire.all_reduce(world[2], np.ones(3))
        for state in ("waiting", "failed", "lost", "mismatch"):
            for src in (0, 1):
                report(world[src], notice(0, "an earlier one", state, "it went wrong", 2))

        def late(backend):
            if backend.rank == 2:
                time.sleep(WAITING)
            return rankwire.all_reduce(backend, np.ones(3))

        for result in in_parallel([partial(late, backend) for backend in world]):
            np.testing.assert_array_equal(result, [3, 3, 3])


@pytest.mark.parametrize("state", ["failed", "lost", "mismatch", "refused"])
def test_whoever_says_that_an_operation_failed_which_went_well_here_ends_the_next_one(
    make_world, state
):
    """And only that one: all have failed in it, and are in step."""
    with make_world(3) as world:
        all_reduce_everywhere(world)
        report(world[1], notice(0, "an earlier one", state, "it went wrong", 2))
        OperationSequence.of(world[1]).epoch = 1
        for run in [Running(rankwire.all_reduce, backend, np.ones(3)) for backend in world]:
            error = run.error()
            assert isinstance(error, RankwireError)
            assert "it went wrong (number 0 of this group, which had succeeded on" in str(error)
            assert run.seconds < SOON
        all_reduce_everywhere(world)


def test_a_disagreement_that_came_to_light_too_late_ends_the_next_operation(pair):
    all_reduce_everywhere(pair)
    report(pair[1], notice(0, "words", "mismatch", "we disagreed", 0))
    run = Running(rankwire.all_reduce, pair[0], np.ones(3))
    assert isinstance(run.error(), CollectiveMismatchError)
    assert "we disagreed" in str(run.error())
    assert run.seconds < SOON


@pytest.mark.parametrize("state", ["failed", "mismatch", "lost"])
def test_news_of_one_operation_are_not_lost_on_another_that_runs_at_once(pair, state):
    """One in the background waits; the next one takes in the news, and ends, and may not eat them.

    Both are failed by the same peer.
    """
    work = rankwire.all_reduce(pair[0], np.ones(3), async_op=True)
    operations = OperationSequence.of(pair[0])
    until_waiting(pair[0], 1)
    for number in range(2):
        report(pair[1], notice(number, "words", state, "because", 1))
    operations.hear()
    begin = time.monotonic()
    with pytest.raises(RankwireError, match="because"):
        rankwire.all_reduce(pair[0], np.ones(3))
    with pytest.raises(RankwireError, match="because"):
        work.wait()
    assert time.monotonic() - begin < SOON


def test_a_disagreement_of_an_operation_in_the_background_is_for_that_one(pair):
    work = rankwire.all_reduce(pair[0], np.ones(3), async_op=True)
    until_waiting(pair[0], 1)
    report(pair[1], notice(0, "words", "mismatch", "we disagree", 0))
    OperationSequence.of(pair[0]).hear()
    later = Running(rankwire.all_reduce, pair[0], np.ones(3), timeout=0.5)
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match="we disagree"):
        work.wait()
    assert time.monotonic() - begin < SOON
    assert isinstance(later.error(), RankwireError)  # nobody else takes part in it


def test_a_rank_may_wait_in_two_operations_and_both_are_known(pair):
    """The later one must not hide what the earlier one is."""
    work = rankwire.all_reduce(pair[0], np.ones(3), async_op=True)
    until_waiting(pair[0], 1)
    for told in (notice(0, "something else"), notice(1, "barrier()")):
        report(pair[1], told)
    later = Running(rankwire.barrier, pair[0], timeout=0.5)
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match="something else on rank 1"):
        work.wait()
    assert time.monotonic() - begin < SOON
    assert isinstance(later.error(), RankwireError)


def test_a_failure_of_a_later_operation_does_not_end_this_one(pair):
    report(pair[1], notice(1, "words", "failed", "because", 1))
    time.sleep(0.01)
    late = Running(lambda: (time.sleep(WAITING), rankwire.all_reduce(pair[1], np.ones(3)))[1])
    np.testing.assert_array_equal(rankwire.all_reduce(pair[0], np.ones(3)), [2, 2, 2])
    late.result()
    with pytest.raises(CollectiveAbortedError, match="because"):
        rankwire.all_reduce(pair[0], np.ones(3))


# -- failing


def test_a_rank_that_fails_says_why(make_world):
    with make_world(4) as world:

        def run(backend):
            def steps(x):
                if x.rank == 2:
                    raise RuntimeError("no more paper")
                algorithms.meet(x)

            begin = time.monotonic()
            with pytest.raises(RuntimeError) as caught:
                OperationSequence.of(backend).call(
                    "printing", lambda **_: ("printing()", steps), timeout=30
                )
            assert time.monotonic() - begin < SOON
            return caught.value

        errors = in_parallel([partial(run, backend) for backend in world])
        assert errors[2].args == ("no more paper",)
        for error in (errors[0], errors[1], errors[3]):
            assert isinstance(error, CollectiveAbortedError)
            assert error.peer == 2
            assert "RuntimeError('no more paper')" in error.reason
            assert error.op == "printing()"
        all_reduce_everywhere(world)


def test_a_failure_that_another_rank_reported_is_not_reported_again():
    with simulated_world(4, timeout=TIMEOUT) as world:
        reports = [reports_of(backend) for backend in world]

        def run(backend):
            timeout = 1.0 if backend.rank == 0 else 30
            if backend.rank != 3:
                with pytest.raises(RankwireError):
                    rankwire.all_reduce(backend, np.ones(3), timeout=timeout)

        in_parallel([partial(run, backend) for backend in world])
        assert [[each.state for each in reported] for reported in reports] == [
            ["waiting", "asking", "failed"], ["waiting"], ["waiting"], [],
        ]  # fmt: skip


@pytest.mark.parametrize("count", [3, 1 << 18])
def test_a_late_rank_hears_that_the_others_gave_up_and_the_next_operation_works(make_world, count):
    with make_world(3) as world:
        arrays = [np.full(count, float(backend.rank)) for backend in world]
        runs = [
            Running(rankwire.all_reduce, backend, array, timeout=0.6)
            for backend, array in zip(world[:2], arrays, strict=False)
        ]
        for run in runs:
            error = run.error()
            assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
            if isinstance(error, DeadlineExceededError):
                assert 2 in error.waiting_for
        for array in arrays[:2]:
            array[...] = -1000  # it is the user's again
        late = Running(rankwire.all_reduce, world[2], arrays[2])
        try:
            # Small messages may all have come.
            np.testing.assert_array_equal(late.result(), np.full(count, 3.0))
        except CollectiveAbortedError:
            pass
        else:
            check_told(world, world[2])
        assert late.seconds < SOON
        all_reduce_everywhere(world, count)


def test_a_late_rank_of_a_long_stream_does_not_lose_the_others():
    """Messages of 16 MiB over TCP, which nobody takes: time is up in the middle of one."""
    with tcp_world(3, transport="tcp", timeout=TIMEOUT) as world:
        arrays = [np.ones(48 << 20, np.uint8) for _ in world]
        runs = [
            Running(rankwire.all_reduce, backend, array, timeout=0.3)
            for backend, array in zip(world[:2], arrays, strict=False)
        ]
        for run in runs:
            assert isinstance(run.error(), (DeadlineExceededError, CollectiveAbortedError))
        late = Running(rankwire.all_reduce, world[2], arrays[2])
        assert isinstance(late.error(), CollectiveAbortedError)
        all_reduce_everywhere(world)


@pytest.mark.parametrize("kind", ["simulated", "auto", "tcp"])
def test_what_failed_operations_left_is_forgotten(kind):
    """Messages that nobody will ever take must not fill the queues until nothing goes any more."""
    options = {"queue_nbytes": 1 << 20} if kind == "simulated" else {}
    with WORLDS[kind](2, timeout=TIMEOUT, **options) as world:
        array = np.ones(1 << 16)  # 256 KiB to each other
        for _ in range(5):
            with pytest.raises(DeadlineExceededError):
                rankwire.all_reduce(world[0], array.copy(), timeout=0.02)
            with pytest.raises(CollectiveAbortedError):
                rankwire.all_reduce(world[1], array.copy(), timeout=TIMEOUT)
        all_reduce_everywhere(world, 1 << 16)
        for rank, backend in enumerate(world):
            assert kept_nbytes(backend, 1 - rank) < 3 * array.nbytes


def kept_nbytes(backend, src: int) -> int:
    """Return how much of a rank's messages nobody has asked for."""
    inboxes = getattr(backend, "_inboxes", None)
    inbox = backend.mesh.peers[src].inbox if inboxes is None else inboxes[src]
    return inbox._mailbox.arrived.nbytes


@pytest.mark.parametrize("kind", ["simulated", "auto", "tcp"])
def test_what_disagreements_left_is_forgotten(kind):
    """The messages of others have other tags than one's own; they must not stay either."""
    options = {"queue_nbytes": 1 << 20} if kind == "simulated" else {}
    with WORLDS[kind](2, timeout=TIMEOUT, **options) as world:
        for _ in range(8 if options else 4):
            arrays = [np.ones(20_000, np.int64), np.ones(20_000)]
            runs = [Running(rankwire.all_gather, b, a) for b, a in zip(world, arrays, strict=True)]
            for run in runs:
                assert isinstance(run.error(), CollectiveMismatchError)
        all_reduce_everywhere(world, 20_000)
        for rank, backend in enumerate(world):
            assert kept_nbytes(backend, 1 - rank) < 3 * 160_000


@pytest.mark.parametrize("waits_before", [0, 20])
def test_an_operation_whose_turn_has_not_come_ends_with_the_others(waits_before):
    """An earlier one still waits for somebody, here and there; this one has been given up there.

    Where all work was waited for at once, the worker leaves the earlier one to whoever waits.
    """
    with simulated_world(3, timeout=TIMEOUT) as world:
        for _ in range(waits_before):
            begun = [rankwire.all_reduce(b, np.ones(3), async_op=True) for b in world]
            for run in [Running(work.wait) for work in begun]:
                run.result()
        earlier = [rankwire.all_reduce(b, np.ones(3), async_op=True) for b in world[:2]]
        runs = [
            Running(rankwire.barrier, backend, timeout=timeout)
            for backend, timeout in zip(world, (TIMEOUT, 0.2), strict=False)
        ]
        assert isinstance(runs[1].error(), DeadlineExceededError)
        assert isinstance(runs[0].error(), CollectiveAbortedError)
        assert runs[0].seconds < 0.2 + SOON
        rankwire.all_reduce(world[2], np.ones(3))
        for work in earlier:
            np.testing.assert_array_equal(work.wait(), [3, 3, 3])


def test_an_interrupt_at_any_moment_leaves_the_group_usable():
    """Wherever a function of ours begins: there the interpreter looks for signals."""
    places = []
    while not places or places[-1] is not None:
        with simulated_world(1, timeout=2.0) as (alone,):
            OperationSequence.of(alone)
            places.append(interrupted(partial(rankwire.all_reduce, alone, np.ones(3)), len(places)))
            try:
                rankwire.all_reduce(alone, np.ones(3))
            except DeadlineExceededError as error:
                error.add_note(f"after an interrupt in {places[-1]}")
                raise
    assert len(places) > 20


def interrupted(function, after: int) -> str | None:
    """Call a function and interrupt it when the n-th function of ours begins; return which."""
    begun = []

    def watch(frame, event, arg):
        if "/rankwire/" in frame.f_code.co_filename:
            begun.append(frame.f_code.co_qualname)
            if len(begun) == after + 1:
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        function()
    except KeyboardInterrupt:
        return begun[after]
    finally:
        sys.settrace(before)
    return None


# -- failures of which a rank hears late

PARTS = {  # what a rank calls; arrays have a part for each rank
    "all_reduce": lambda b, **o: rankwire.all_reduce(b, own(b), **o),
    "all_reduce, ordered": lambda b, **o: rankwire.all_reduce(b, own(b), ordered=True, **o),
    "all_reduce_coalesced": lambda b, **o: rankwire.all_reduce_coalesced(b, [own(b)], **o),
    "reduce to the first": lambda b, **o: rankwire.reduce(b, own(b), 0, **o),
    "reduce to the last": lambda b, **o: rankwire.reduce(b, own(b), b.world_size - 1, **o),
    "broadcast of the first": lambda b, **o: rankwire.broadcast(b, own(b), 0, **o),
    "broadcast of the last": lambda b, **o: rankwire.broadcast(b, own(b), b.world_size - 1, **o),
    "all_gather": lambda b, **o: rankwire.all_gather(b, own(b), **o),
    "gather": lambda b, **o: rankwire.gather(b, own(b), 0, **o),
    "scatter": lambda b, **o: rankwire.scatter(b, own(b), b.world_size - 1, **o),
    "reduce_scatter": lambda b, **o: rankwire.reduce_scatter(b, own(b), **o),
    "all_to_all": lambda b, **o: rankwire.all_to_all(b, own(b), **o),
    "all_to_all, uneven": lambda b, **o: rankwire.all_to_all(
        b, own(b), send_counts=[2] * b.world_size, **o
    ),
    "all_gather into a list": lambda b, **o: rankwire.all_gather(
        b, own(b), out=[np.empty(2 * b.world_size) for _ in range(b.world_size)], **o
    ),
    "reduce_scatter of a list": lambda b, **o: rankwire.reduce_scatter(
        b, [np.ones(at + 1) for at in range(b.world_size)], **o
    ),
    "all_to_all of lists": lambda b, **o: rankwire.all_to_all(
        b, [own(b)] * b.world_size, out=[np.empty_like(own(b)) for _ in range(b.world_size)], **o
    ),
    "all_gather_coalesced": lambda b, **o: rankwire.all_gather_coalesced(b, [own(b)], **o),
    "reduce_scatter_coalesced": lambda b, **o: rankwire.reduce_scatter_coalesced(b, [own(b)], **o),
    "barrier": lambda b, **o: rankwire.barrier(b, **o),
    "all_gather_object": lambda b, **o: rankwire.all_gather_object(b, 1, **o),
    "gather_object": lambda b, **o: rankwire.gather_object(b, 1, **o),
    "broadcast_object": lambda b, **o: rankwire.broadcast_object(b, 1, b.world_size - 1, **o),
    "scatter_object": lambda b, **o: rankwire.scatter_object(b, [1] * b.world_size, **o),
    "all_to_all_object": lambda b, **o: rankwire.all_to_all_object(b, [1] * b.world_size, **o),
    "all_reduce, large": lambda b, **o: rankwire.all_reduce(b, np.ones(1 << 17), **o),
    "in the background": lambda b, **o: rankwire.all_reduce(b, own(b), async_op=True, **o).wait(),
}


def own(backend) -> np.ndarray:
    return np.full(2 * backend.world_size, backend.rank + 1.0)


def check_told_late(world, call) -> bool:
    """Let all but the last rank give up before that comes; return whether it went well there."""
    *early, late = world
    for run in [Running(call, backend, timeout=0.02) for backend in early]:
        assert isinstance(run.error(), (DeadlineExceededError, CollectiveAbortedError))
    try:
        call(late, timeout=TIMEOUT)
    except CollectiveAbortedError:
        return False
    check_told(world, late)
    return True


def check_told(world, late) -> None:
    """Show that all fail in the operation after one that went well on the late rank only."""
    begin = time.monotonic()
    for run in [Running(rankwire.all_reduce, backend, np.ones(3)) for backend in world]:
        error = run.error()
        assert isinstance(error, CollectiveAbortedError), repr(error)
        assert f"which had succeeded on rank {late.rank}" in str(error)
    assert time.monotonic() - begin < SOON


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_comes_too_late_is_told_at_its_next_operation_at_the_latest(make_world, size):
    with make_world(size) as world:
        for name, call in PARTS.items():
            try:
                check_told_late(world, call)
                all_reduce_everywhere(world)
            except BaseException as error:
                error.add_note(f"in {name}")
                raise


def see_no_news(monkeypatch) -> None:
    """Have ranks that need not wait see no news, as if these were still under way."""
    monkeypatch.setattr(OperationSequence, "has_news", property(lambda self: bool(self.failures)))


def test_a_rank_that_has_not_read_what_it_was_told_is_told_at_its_next_operation(monkeypatch):
    """As when a notice is still under way: then what it needs is all that it sees."""
    see_no_news(monkeypatch)
    went_well = []
    with simulated_world(2, timeout=TIMEOUT) as world:
        for name, call in PARTS.items():
            if check_told_late(world, call):
                went_well.append(name)
            all_reduce_everywhere(world)
    assert {"all_reduce", "broadcast of the last", "barrier", "in the background"} <= {*went_well}


def test_what_was_told_is_seen_where_all_that_is_needed_has_come(pair):
    """The late rank looks before it returns; then the next operation need not fail."""
    for call in (PARTS["all_reduce"], PARTS["barrier"], PARTS["all_gather"]):
        assert not check_told_late(pair, call)
        all_reduce_everywhere(pair)


def test_a_failure_that_could_not_be_told_ends_the_next_operation_too(pair, monkeypatch):
    """Ranks wait for each other there, and their reports show what they know of."""
    monkeypatch.setattr(OperationSequence, "report", lambda self, told: None)
    with pytest.raises(DeadlineExceededError):
        rankwire.all_reduce(pair[0], np.ones(3), timeout=0.02)
    rankwire.all_reduce(pair[1], np.ones(3))
    monkeypatch.undo()
    runs = [Running(rankwire.all_reduce, backend, np.ones(3)) for backend in pair]
    for run in runs:
        assert isinstance(run.error(), CollectiveAbortedError)
        text = "collective number 0 of this group failed on rank 0, and went well on rank 1"
        assert text in str(run.error())
        assert run.seconds < SOON
    all_reduce_everywhere(pair)


def test_a_rank_may_be_late_for_several_operations(pair, monkeypatch):
    see_no_news(monkeypatch)
    for _ in range(3):
        with pytest.raises(DeadlineExceededError):
            rankwire.all_reduce(pair[0], np.ones(3), timeout=0.02)
    rankwire.all_reduce(pair[1], np.ones(3))
    for _ in range(2):
        with pytest.raises(CollectiveAbortedError):
            rankwire.all_reduce(pair[1], np.ones(3))
    all_reduce_everywhere(pair)


def test_operations_in_the_background_are_in_step_after_one_that_some_gave_up(pair, monkeypatch):
    see_no_news(monkeypatch)
    limits = ((0.02, TIMEOUT, TIMEOUT), (TIMEOUT,) * 3)
    first = [rankwire.all_reduce(pair[0], np.ones(3), async_op=True, timeout=t) for t in limits[0]]
    assert isinstance(first[0].exception(), DeadlineExceededError)
    second = [rankwire.all_reduce(pair[1], np.ones(3), async_op=True, timeout=t) for t in limits[1]]
    np.testing.assert_array_equal(second[0].wait(), [2, 2, 2])
    for works in (first, second):
        assert isinstance(works[1].exception(), CollectiveAbortedError)
        np.testing.assert_array_equal(works[2].wait(), [2, 2, 2])


def test_what_was_sent_before_a_late_rank_was_told_is_forgotten(pair, monkeypatch):
    see_no_news(monkeypatch)
    for _ in range(5):
        assert check_told_late(pair, PARTS["all_reduce"])
        all_reduce_everywhere(pair)
    for rank, backend in enumerate(pair):
        arrived = backend.mesh.peers[1 - rank].inbox._mailbox.arrived
        assert not arrived


# -- arguments that cannot be used, on one rank


class Unknown:
    """Of no type that can be sent."""


READ_ONLY = np.ones(3)
READ_ONLY.flags.writeable = False
WRONG = {
    "a value": lambda b: rankwire.broadcast_object(b, Unknown(), b.rank),
    "a value among others": lambda b: rankwire.all_gather_object(b, [1, Unknown()]),
    "a value for one": lambda b: rankwire.scatter_object(b, [1, 2, Unknown()], b.rank),
    "a value to gather": lambda b: rankwire.gather_object(b, Unknown()),
    "too few values": lambda b: rankwire.all_to_all_object(b, [1]),
    "no array": lambda b: rankwire.all_reduce(b, [1, 2, 3]),
    "an array of objects": lambda b: rankwire.all_gather(b, np.array([Unknown()])),
    "an op": lambda b: rankwire.all_reduce(b, np.ones(3), "no such op"),
    "a root": lambda b: rankwire.broadcast(b, np.ones(3), 9),
    "a root of gather": lambda b: rankwire.gather(b, np.ones(3), "0"),
    "a shape": lambda b: rankwire.reduce_scatter(b, np.ones(2)),
    "a shape to scatter": lambda b: rankwire.scatter(b, np.ones(2), b.rank),
    "an out": lambda b: rankwire.reduce(b, np.ones(3), b.rank, out=np.ones(5)),
    "read-only": lambda b: rankwire.all_reduce_coalesced(b, [READ_ONLY]),
    "counts": lambda b: rankwire.all_to_all(b, np.ones(3), send_counts=[1, 1]),
    "a time limit": lambda b: rankwire.barrier(b, timeout=-1),
    "a time limit in the background": lambda b: rankwire.barrier(
        b, timeout=float("nan"), async_op=True
    ),
    "an argument's name": lambda b: rankwire.all_reduce(b, np.ones(3), outt=None),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_cannot_be_used_end_the_operation_on_all_ranks(name):
    with simulated_world(3, timeout=TIMEOUT) as world:
        runs = {rank: Running(rankwire.all_reduce, world[rank], np.ones(3)) for rank in (0, 2)}
        wrong = Running(WRONG[name], world[1])
        cause = wrong.error()
        assert isinstance(cause, (ConfigurationError, UnsupportedTypeError, TypeError))
        text = cause.message if isinstance(cause, RankwireError) else repr(cause)
        for run in runs.values():
            error = run.error()
            assert isinstance(error, CollectiveAbortedError)
            assert error.peer == 1
            assert text in error.reason
            assert run.seconds < SOON
        all_reduce_everywhere(world)


def test_arguments_that_cannot_be_used_end_the_operation_of_those_who_come_later(make_world):
    with make_world(3) as world:
        for call in (WRONG["a value"], WRONG["no array"]):
            with pytest.raises(UnsupportedTypeError):
                call(world[1])
            for run in [Running(rankwire.all_reduce, world[rank], np.ones(3)) for rank in (0, 2)]:
                assert isinstance(run.error(), CollectiveAbortedError)
                assert run.error().peer == 1
            all_reduce_everywhere(world)


def test_arguments_that_no_rank_can_use_leave_all_in_step(make_world):
    with make_world(3) as world:
        for call in (WRONG["an op"], WRONG["a root"]):
            for run in [Running(call, backend) for backend in world]:
                assert isinstance(run.error(), ConfigurationError)
        all_reduce_everywhere(world)


def test_what_others_sent_for_an_operation_that_was_refused_is_forgotten(pair):
    """The rank that refused it never knew under which tags they would send."""
    for count in range(1, 5):
        waiting = Running(rankwire.all_reduce, pair[0], np.ones(count))
        with pytest.raises(UnsupportedTypeError):
            WRONG["no array"](pair[1])
        assert isinstance(waiting.error(), CollectiveAbortedError)
        all_reduce_everywhere(pair)
    arrived = pair[1].mesh.peers[0].inbox._mailbox.arrived
    assert not arrived


def test_what_is_no_group_costs_nothing():
    with pytest.raises(ConfigurationError, match="first argument of all_reduce is a backend"):
        rankwire.all_reduce(np.ones(3), np.ones(3))


# -- time limits


def test_a_time_limit_names_exactly_those_who_did_not_come(make_world):
    with make_world(5) as world:
        collectives = [rankwire.all_reduce]
        if "Simulated" in repr(world):
            collectives += [rankwire.broadcast, rankwire.gather]
        for collective in collectives:
            runs = {
                rank: Running(collective, world[rank], np.ones(3), timeout=1.0)
                for rank in (0, 2, 4)
            }
            errors = [run.error() for run in runs.values()]
            late = [r for r in runs.values() if isinstance(r.error(), DeadlineExceededError)]
            assert late
            for run in late:
                assert run.error().waiting_for == [1, 3]
                assert 0.95 < run.seconds < 1.0 + SOON
            for error in errors:
                assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
                assert "waiting for ranks 1, 3" in str(error)
            for run in [Running(collective, world[rank], np.ones(3)) for rank in (1, 3)]:
                assert isinstance(run.error(), CollectiveAbortedError)


def test_what_was_told_before_the_time_was_up_counts():
    """One comes late, and says so shortly before the limit of the other: it is not missing."""
    with simulated_world(3, timeout=TIMEOUT) as world:
        first = Running(rankwire.all_reduce, world[0], np.ones(3), timeout=1.0)
        time.sleep(0.5)
        second = Running(rankwire.all_reduce, world[1], np.ones(3))
        error = first.error()
        assert isinstance(error, DeadlineExceededError)
        assert isinstance(second.error(), CollectiveAbortedError)
        assert error.waiting_for == [2]


@pytest.mark.parametrize("count", [3, 1 << 18])
def test_no_time_at_all_is_a_time_limit_too(make_world, count):
    with make_world(2) as world:
        all_reduce_everywhere(world)
        with pytest.raises(DeadlineExceededError) as caught:
            rankwire.all_reduce(world[0], np.ones(count), timeout=0)
        assert caught.value.waiting_for == [1]
        with contextlib.suppress(CollectiveAbortedError):  # what it needs may have come
            rankwire.all_reduce(world[1], np.ones(count))
            check_told(world, world[1])
        all_reduce_everywhere(world, count)


@pytest.mark.parametrize("count", [3, 1 << 18])
def test_a_time_limit_names_also_a_rank_that_was_never_connected(count):
    with tcp_world(3, transport="auto", timeout=TIMEOUT) as world, deaf(world[2]):
        runs = [Running(rankwire.all_reduce, b, np.ones(count), timeout=1.0) for b in world[:2]]
        for run in runs:
            error = run.error()
            assert isinstance(error, (DeadlineExceededError, CollectiveAbortedError))
            if isinstance(error, DeadlineExceededError):
                assert error.waiting_for == [2]
            assert "rank 2" in str(error)
            assert run.seconds < 1.0 + SOON


# -- leaving


@pytest.mark.parametrize("leaver", [0, 3])
def test_a_rank_that_leaves_is_named(make_world, leaver):
    with make_world(4) as world:
        # Closing a group ends a view and nothing else; its ranks leave with their world.
        leaving = getattr(world[leaver], "parent", world[leaver])
        in_parallel([partial(rankwire.barrier, backend) for backend in world])
        stay = [backend for backend in world if backend.rank != leaver]
        runs = [Running(rankwire.all_reduce, backend, np.ones(3)) for backend in stay]
        time.sleep(WAITING)
        leaving.close()
        left = time.monotonic()
        for run in runs:
            error = run.error()
            assert isinstance(error, (ChannelClosedError, CollectiveAbortedError)), repr(error)
            assert f"rank {leaving.rank} has left" in str(error)
            assert run.ended - left < SOON
        for backend in stay:
            with pytest.raises((ChannelClosedError, CollectiveAbortedError)):
                rankwire.all_reduce(backend, np.ones(3))


def begun(backend):
    """Return an operation that has a number, and that no thread runs."""
    operations = OperationSequence.of(backend)
    new = Operation(operations, "barrier()")
    new.deadline = Deadline(TIMEOUT, backend.clock)
    new.has_begun = True
    operations.refuse(new)
    return new


def test_the_first_failure_answers_for_what_is_queued_behind_it_when_ranks_leave(monkeypatch):
    with simulated_world(3, timeout=TIMEOUT) as (backend, *_):
        reports = []
        monkeypatch.setattr(backend.roll, "report", reports.append)
        monkeypatch.setattr(operation, "_FAREWELL_PATIENCE", 0.0)
        first, second, third = (begun(backend) for _ in range(3))
        first.give_up(CollectiveAbortedError(2, "barrier(): KeyboardInterrupt()"))
        later = begun(backend)
        for left, named in ((second, 2), (later, 1)):
            error = left.give_up(ChannelClosedError("rank 1 has left").during(peer=1))
            assert error.peer == named
            assert reports[-1].culprit == named
        assert isinstance(third.give_up(PeerLostError(1, "it was killed")), PeerLostError)


def test_a_rank_that_failed_first_blames_no_other_for_what_it_leaves_undone(monkeypatch):
    with simulated_world(3, timeout=TIMEOUT) as (backend, *_):
        reports = []
        monkeypatch.setattr(backend.roll, "report", reports.append)
        first, second, third = (begun(backend) for _ in range(3))
        first.give_up(KeyboardInterrupt())
        heard = "barrier(): KeyboardInterrupt() (number 0 of this group, which had succeeded on 2)"
        second.give_up(CollectiveAbortedError(2, heard))
        backend.close()
        assert isinstance(third.give_up(ChannelClosedError("closed")), ChannelClosedError)
        assert reports[-1].culprit == 0


def test_a_failure_is_forgotten_when_an_operation_succeeds(monkeypatch):
    with simulated_world(3, timeout=TIMEOUT) as (backend, *_):
        monkeypatch.setattr(operation, "_FAREWELL_PATIENCE", 0.0)
        first, second, third = (begun(backend) for _ in range(3))
        first.give_up(CollectiveAbortedError(2, "barrier(): KeyboardInterrupt()"))
        second.run_and_end(lambda exchange: None)
        assert third.give_up(ChannelClosedError("rank 1 has left").during(peer=1)).peer == 1


def test_a_rank_waits_once_for_what_another_had_to_say_before_its_connection_broke(monkeypatch):
    monkeypatch.setattr(operation, "_FAREWELL_PATIENCE", TIMEOUT)
    with simulated_world(3, timeout=TIMEOUT) as (backend, *_):
        first, second = begun(backend), begun(backend)
        interrupted = "barrier()", "failed", "KeyboardInterrupt()"
        notice = Notice(backend.group, first.sequence, *interrupted, culprit=2, src=2)
        threading.Timer(0.1, backend.roll.deliver, (notice,)).start()
        assert first.give_up(PeerLostError(1, "Broken pipe")).peer == 2
        begin = time.monotonic()
        assert second.give_up(PeerLostError(1, "Broken pipe")).peer == 1
        assert time.monotonic() - begin < SOON


def test_a_rank_that_leaves_says_which_operation_it_will_not_come_to(monkeypatch):
    with simulated_world(2, timeout=TIMEOUT) as world:
        in_parallel([backend.barrier for backend in world])
        in_parallel([partial(rankwire.barrier, backend) for backend in world])
        backend, reports = world[0], []
        monkeypatch.setattr(backend.roll, "report", reports.append)
        queued = [begun(backend) for _ in range(3)]
        backend.leave_roll()
        assert reports[-1].sequence == queued[0].sequence
        assert reports[-1].state == "left"


def test_closing_ends_ones_own_operations(make_world):
    with make_world(2) as world:
        works = [rankwire.all_reduce(world[0], np.ones(3), async_op=True) for _ in range(3)]
        waiting = Running(rankwire.all_reduce, world[0], np.ones(3))
        time.sleep(WAITING)
        begin = time.monotonic()
        world[0].close()
        for end in (*(work.wait for work in works), waiting.result):
            with pytest.raises(ChannelClosedError):
                end()
        assert time.monotonic() - begin < SOON + 1.0  # a group's view looks up every 0.25 s
        with pytest.raises(ChannelClosedError):
            rankwire.all_reduce(world[0], np.ones(3))


def test_no_thread_is_left(make_world):
    before = set(threading.enumerate())
    with make_world(3) as world:
        during = set(threading.enumerate())

        def run(backend):
            works = [rankwire.all_reduce(backend, np.ones(3), async_op=True) for _ in range(20)]
            assert len({t.name for t in threading.enumerate() if "collectives" in t.name}) <= 3
            for work in works:
                work.wait()

        in_parallel([partial(run, backend) for backend in world])
        workers = [t for t in threading.enumerate() if t.name.startswith("rankwire-collectives")]
        assert len(workers) <= 3
        eventually(lambda: set(threading.enumerate()) <= during)
        in_parallel([partial(run, backend) for backend in world])
    eventually(lambda: set(threading.enumerate()) <= before)


def test_a_dead_rank_outside_a_group_is_no_concern_of_it():
    with simulated_world(4, timeout=TIMEOUT) as world:
        groups = in_parallel(
            [partial(rankwire.SubBackend, b, [0, 1, 3]) for b in world[:2] + world[3:]]
        )
        world[0].network.kill(2)
        for slow in (0.0, WAITING):

            def run(group, slow=slow):
                time.sleep(slow * (group.rank == 1))
                return rankwire.all_reduce(group, np.ones(3))

            for result in in_parallel([partial(run, group) for group in groups]):
                np.testing.assert_array_equal(result, [3, 3, 3])
        world[0].network.kill(3)
        for group in groups[:2]:
            with pytest.raises(PeerLostError) as caught:
                rankwire.all_reduce(group, np.ones(3))
            assert caught.value.peer == 2  # as the group counts
