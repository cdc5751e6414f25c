"""What a short call keeps although its way is short: limits, explanations, deadlines.

A small plain call is read, run and answered by one thread without a hand-over, and many of them are
read and answered together. Nothing of this may be seen: ``workers`` and ``max_queued`` hold, every
error says what it says elsewhere, and a call among many ends in time and with its own outcome.
"""

import random
import re
import signal
import threading
import time
from concurrent.futures import as_completed, wait

import pytest

from rankwire import (
    DeadlineExceededError,
    FunctionNotFoundError,
    OverloadedError,
    PeerLostError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.rpc import call_inquiries
from real_time import Deadline
from rpc.callee import SOON, WORLDS, in_flight, pair
from worlds import PATIENCE, Running, eventually, nursery, runtime_folder_of_its_own


@pytest.fixture(scope="module", autouse=True)
def shared_nursery():
    with nursery():
        yield


@pytest.fixture(autouse=True)
def folder(shared_nursery):
    """Who is killed leaves the file of its socket here."""
    with runtime_folder_of_its_own():
        yield


@pytest.fixture(params=WORLDS)
def world(request):
    return request.param


@pytest.fixture
def patient(monkeypatch):
    """Whoever is late waits for what its callee says, however busy the machine is."""
    monkeypatch.setattr(call_inquiries, "Deadline", lambda _, clock: Deadline(PATIENCE, clock))


def call(caller, how, name, *args, timeout=PATIENCE):
    """Make a call in one of the two ways, and return its value."""
    if how == "rpc_async":
        return caller.rpc_async(1, name, *args, timeout=timeout).result(2 * PATIENCE)
    return caller.rpc_sync(1, name, *args, timeout=timeout)


# -- how many run at once --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_short_calls_run_at_once_than_there_are_workers(world, workers):
    """The first of each length is served by the thread that polls, until another one takes over."""

    def many(seed):
        lengths = random.Random(seed).choices([0.0, 0.0005, 0.004], [6, 3, 1], k=40)
        for future in [caller.rpc_async(1, "nap", seconds) for seconds in lengths]:
            assert future.result(PATIENCE) is None
        for seconds in lengths[:8]:
            caller.rpc_sync(1, "nap", seconds)

    with pair(world, workers=workers) as (caller, callee):
        for running in [Running(many, seed) for seed in range(3)]:
            running.result()
        assert callee.most() <= workers


@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_calls_run_at_once_as_there_are_workers(world, workers):
    with pair(world, workers=workers) as (caller, _):
        for _ in range(3):  # they are known to be slow after the first time
            futures = [caller.rpc_async(1, "meet", workers) for _ in range(workers)]
            assert [future.result(PATIENCE) for future in futures] == [workers] * workers


@pytest.mark.parametrize("workers", [1, 2])
def test_calls_that_come_while_all_workers_run_wait_and_are_refused_beyond_the_queue(
    world, workers
):
    """Also if another thread has taken over polling since the function began."""
    with pair(world, workers=workers, max_queued=3) as (caller, callee):
        for _ in range(2):
            held = [caller.rpc_async(1, "hold") for _ in range(workers)]
            callee.wait_until_held(workers)
            before = callee.notes()
            waiting = [caller.rpc_async(1, "note", number) for number in range(3)]
            with pytest.raises(OverloadedError) as refused:
                caller.rpc_sync(1, "note", "too many", timeout=PATIENCE)
            assert f"{workers} calls are running and 3 waiting" in refused.value.message
            again = caller.rpc_async(1, "note", "too many").exception(PATIENCE)
            assert isinstance(again, OverloadedError)
            time.sleep(0.02)  # the standby looks every millisecond
            assert callee.notes() == before
            assert not any(future.done() for future in (*held, *waiting))
            callee.release()
            assert [future.result(PATIENCE) for future in waiting] == [0, 1, 2]
            assert [future.result(PATIENCE) for future in held] == ["released"] * workers
            noted = callee.notes()[len(before) :]
            assert (noted if workers == 1 else sorted(noted)) == [0, 1, 2]


def test_calls_that_are_read_together_do_not_pass_the_limits_together(world):
    with pair(world, workers=1, max_queued=10) as (caller, callee):
        assert call(caller, "rpc_sync", "echo", 1) == 1
        held = caller.rpc_async(1, "hold")
        futures = [caller.rpc_async(1, "note", number) for number in range(40)]
        for future in futures[10:]:
            assert isinstance(future.exception(PATIENCE), OverloadedError)
        callee.wait_until_held(1)
        assert callee.notes() == []
        callee.release()
        assert held.result(PATIENCE) == "released"
        assert [future.result(PATIENCE) for future in futures[:10]] == list(range(10))
        assert callee.notes() == list(range(10))


def test_a_function_that_waits_for_a_call_of_its_own_keeps_its_place(world):
    """What it calls passes, however deep: nested calls have places of their own."""

    def back():
        assert caller.rpc_sync(1, "note", "nested") == "nested"
        waiting.append(Running(caller.rpc_sync, 1, "note", "waiting", timeout=PATIENCE))
        assert caller.rpc_sync(1, "note", "nested too") == "nested too"
        time.sleep(0.02)
        return callee.notes()

    waiting = []
    with pair(world, workers=1) as (caller, callee):
        caller.register("back", back)
        assert caller.rpc_sync(1, "outer", "back") == ["nested", "nested too"]
        assert waiting[0].result() == "waiting"
        assert callee.notes() == ["nested", "nested too", "waiting"]


def test_calls_to_oneself_count_like_others(world):
    with pair(world, workers=1) as (caller, callee):
        callee.call_itself("hold")
        callee.wait_until_held(1)
        waiting = caller.rpc_async(1, "note", "from rank 0")
        callee.call_itself("note", "its own")
        time.sleep(0.02)
        assert callee.notes() == []
        callee.release()
        assert waiting.result(PATIENCE) == "from rank 0"
        assert callee.own_results() == ["released", "its own"]


def test_however_a_call_ends_its_place_is_free_again(world):
    with pair(world, workers=1, max_queued=4) as (caller, callee):
        for how in ("rpc_sync", "rpc_async"):
            for name, args in (("fail", (1,)), ("leave", ()), ("unsendable", ()), ("echo", ())):
                with pytest.raises(RemoteError):
                    call(caller, how, name, *args)
        held = caller.rpc_async(1, "hold")
        callee.wait_until_held(1)
        late = [caller.rpc_async(1, "note", "late", timeout=0.5) for _ in range(2)]
        cancelled, kept = (caller.rpc_async(1, "note", word) for word in ("cancelled", "kept"))
        assert cancelled.cancel()
        for future in late:
            assert isinstance(future.exception(PATIENCE), DeadlineExceededError)
        eventually(lambda: callee.waiting() == ["kept"])
        callee.release()
        assert (held.result(PATIENCE), kept.result(PATIENCE)) == ("released", "kept")
        assert callee.notes() == ["kept"]
        # No place was lost, and none was won.
        held = caller.rpc_async(1, "hold")
        callee.wait_until_held(1)
        waiting = [caller.rpc_async(1, "note", number) for number in range(4)]
        assert isinstance(caller.rpc_async(1, "echo", 1).exception(PATIENCE), OverloadedError)
        assert callee.notes() == ["kept"]
        callee.release()
        assert [future.result(PATIENCE) for future in waiting] == [0, 1, 2, 3]


# -- what errors say -------------------------------------------------------------------------------


@pytest.fixture(params=["rpc_sync", "rpc_async"])
def how(request):
    return request.param


def check_context(error, how, name, least=0.0):
    assert (error.op, error.rank, error.peer) == (f"{how} {name!r}", 0, 1)
    assert least <= error.waited < least + PATIENCE
    assert f"[op {how} {name!r}, rank 0, peer 1, waited " in str(error)


def test_a_late_call_says_what_its_callee_is_doing(world, how, patient):
    with pair(world, workers=1) as (caller, callee):
        assert call(caller, how, "echo", 0) == 0  # they are connected
        with pytest.raises(DeadlineExceededError) as caught:
            call(caller, how, "hold", timeout=0.5)
        error = caught.value
        assert re.search(r"rank 1 has had 'hold' for \d+\.\d+ s; it is running", error.detail)
        assert (error.limit, error.waiting_for, error.may_have_run) == (0.5, [1], True)
        check_context(error, how, "hold", 0.5)
        with pytest.raises(DeadlineExceededError) as caught:
            call(caller, how, "note", 1, timeout=0.5)
        assert "it waits for the one worker" in caught.value.detail
        check_context(caught.value, how, "note", 0.5)
        eventually(lambda: not callee.waiting())
        callee.release()
        assert call(caller, how, "echo", 1) == 1
        assert callee.notes() == []


def test_a_late_call_says_for_whom_its_callee_waits(world, how, patient):
    go_on = threading.Event()
    with pair(world) as (caller, callee):
        caller.register("stuck", lambda: go_on.wait(PATIENCE))
        assert call(caller, how, "echo", 0) == 0  # they are connected
        with pytest.raises(DeadlineExceededError) as caught:
            call(caller, how, "ask", "stuck", timeout=0.5)
        assert "rank 1 has had 'ask' for" in caught.value.detail
        assert "rank 0 'stuck'" in caught.value.detail
        check_context(caught.value, how, "ask", 0.5)
        callee.release()
        go_on.set()
        assert call(caller, how, "echo", 1) == 1


def test_an_error_of_a_function_has_its_type_its_text_and_its_own_frames(world, how):
    with pair(world) as (caller, _):
        for _ in range(3):
            with pytest.raises(RemoteError) as caught:
                call(caller, how, "fail", [1, "two"])
            error = caught.value
            assert error.remote_type == "ValueError"
            assert error.remote_message == "cannot take [1, 'two']"
            trace = error.remote_traceback
            assert trace.rstrip().endswith("ValueError: cannot take [1, 'two']")
            assert 'callee.py", line ' in trace
            assert "in _fail" in trace
            assert 'raise ValueError(f"cannot take {value!r}") from error' in trace
            assert "KeyError: 'the reason'" in trace
            assert "rankwire/rpc" not in trace  # the frames that ran it are not its own
            assert str(error).startswith("ValueError: cannot take [1, 'two'] [op ")
            assert f"traceback on rank 1:\n{trace.rstrip()}" in str(error)
            check_context(error, how, "fail")


@pytest.mark.parametrize(
    ("name", "args", "kind", "text"),
    [
        ("leave", (), "SystemExit", "wants to end its process"),
        ("echo", (), "TypeError", "missing 1 required positional argument"),
        ("unsendable", (), "rankwire.errors.UnsupportedTypeError", "['inside']"),
        ("outer", ("gone",), "rankwire.errors.FunctionNotFoundError", "'gone'"),
    ],
)
def test_whatever_a_function_raises_is_told_to_its_caller(world, how, name, args, kind, text):
    with pair(world) as (caller, _):
        for _ in range(2):
            with pytest.raises(RemoteError) as caught:
                call(caller, how, name, *args)
            assert caught.value.remote_type == kind
            assert text in caught.value.remote_message.replace('"', "'")
            assert caught.value.remote_traceback
            check_context(caught.value, how, name)
        assert call(caller, how, "echo", 1) == 1


def test_an_error_that_passes_several_ranks_stays_what_it_was(world, how):
    with pair(world) as (caller, _):
        caller.register("inner", lambda: caller.rpc_sync(1, "fail", "this"))
        with pytest.raises(RemoteError) as caught:
            call(caller, how, "outer", "inner")
        assert caught.value.remote_type == "ValueError"
        assert caught.value.remote_message == "cannot take 'this'"
        for frame in ("in _outer", "in _fail"):
            assert frame in caught.value.remote_traceback
        check_context(caught.value, how, "outer")


def test_a_name_that_is_not_registered_is_answered_with_those_that_are(world, how):
    with pair(world) as (caller, _):
        for _ in range(2):
            with pytest.raises(FunctionNotFoundError) as caught:
                call(caller, how, "ecko", 1)
            assert caught.value.name == "ecko"
            assert caught.value.known == sorted(caught.value.known)
            assert {"echo", "note", "hold"} <= set(caught.value.known)
            assert "echo" in str(caught.value)
            check_context(caught.value, how, "ecko")
        assert call(caller, how, "echo", 1) == 1


def test_an_argument_that_cannot_be_sent_is_named_with_its_place(world, how):
    with pair(world) as (caller, callee):
        with pytest.raises(UnsupportedTypeError) as caught:
            call(caller, how, "note", 1, {"lock": object()})
        assert caught.value.path == 'args[1]["lock"]'
        check_context(caught.value, how, "note")
        assert in_flight(caller) == 0
        assert call(caller, how, "echo", 1) == 1
        assert callee.notes() == []


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_callee_that_dies_is_named_by_every_call_that_waits_for_it(transport):
    with pair(transport) as (caller, callee):
        futures = [caller.rpc_async(1, "hold") for _ in range(4)]
        waiting = Running(caller.rpc_sync, 1, "hold", timeout=PATIENCE)
        callee.wait_until_held(5)
        killed = callee.rank.signal(signal.SIGKILL)
        errors = {"rpc_sync": [waiting.error(SOON)]}
        errors["rpc_async"] = [future.exception(SOON) for future in futures]
        assert time.monotonic() - killed < SOON
        for way, ended in errors.items():
            for error in ended:
                assert isinstance(error, PeerLostError), repr(error)
                assert error.may_have_run
                check_context(error, way, "hold")


# -- many at once ----------------------------------------------------------------------------------


def test_each_of_many_calls_ends_at_its_own_deadline_and_the_others_do_not_notice(world):
    with pair(world) as (caller, callee):
        limits = {place: 1.0 + place / 400 for place in range(3, 64, 7)}
        ended = {}
        begin = time.monotonic()
        futures = []
        for place in range(64):
            if place in limits:
                future = caller.rpc_async(1, "watch", place, timeout=limits[place])
            else:
                future = caller.rpc_async(1, "note", -place, timeout=PATIENCE)
            future.add_done_callback(lambda _, p=place: ended.setdefault(p, time.monotonic()))
            futures.append(future)
        slow = [futures[place] for place in limits]
        quick = [future for future in futures if future not in slow]
        # While nobody waits for the slow ones, and while somebody waits for those around them.
        assert [future.result(PATIENCE) for future in quick] == [
            -place for place in range(64) if place not in limits
        ]
        assert not wait(slow, PATIENCE).not_done
        for place, limit in limits.items():
            error = futures[place].exception(0)
            assert isinstance(error, DeadlineExceededError), repr(error)
            assert (error.limit, error.waiting_for) == (limit, [1])
            check_context(error, "rpc_async", "watch", limit)
            assert limit <= ended[place] - begin < limit + SOON
        last_quick = max(ended[place] for place in range(64) if place not in limits)
        assert last_quick < min(ended[place] for place in limits)
        # Those who were too late were told, and did their work once; so did all others.
        eventually(lambda: sorted(callee.cancelled()) == sorted(limits))
        noted = callee.notes()
        assert sorted(noted) == sorted([*limits, *(-p for p in range(64) if p not in limits)])
        assert in_flight(caller) == 0


def test_a_call_that_is_waited_for_ends_in_time_among_many(world):
    """Whoever reads for all others must look at its own clock."""
    with pair(world) as (caller, callee):
        held = [caller.rpc_async(1, "hold") for _ in range(8)]
        driving = Running(held[0].result, PATIENCE)  # it reads what comes, for all
        callee.wait_until_held(8)
        for limit in (0.0, 0.01, 0.1):
            begin = time.monotonic()
            with pytest.raises(DeadlineExceededError) as caught:
                caller.rpc_sync(1, "watch", limit, timeout=limit)
            assert time.monotonic() - begin < limit + SOON
            assert caught.value.limit == limit
            assert caller.rpc_sync(1, "echo", limit, timeout=PATIENCE) == limit
        with pytest.raises(TimeoutError):
            held[3].result(0.01)
        assert not any(future.done() for future in held)
        callee.release()
        assert [future.result(PATIENCE) for future in held] == ["released"] * 8
        assert driving.result() == "released"


def test_many_calls_end_in_the_order_in_which_their_functions_do(world):
    with pair(world, workers=16) as (caller, callee):
        futures = [caller.rpc_async(1, "wait_for", gate) for gate in range(12)]
        caller.rpc_sync(1, "echo", 1)
        order = random.Random(world).sample(range(12), 12)
        for place, gate in enumerate(order):
            assert not any(futures[later].done() for later in order[place:])
            callee.open(gate)
            # One of them by waiting, the next by what others read for it.
            if place % 2:
                assert futures[gate].result(PATIENCE) == gate
            else:
                assert next(as_completed([futures[gate]], PATIENCE)) is futures[gate]
        assert [future.result(0) for future in futures] == list(range(12))


def test_a_call_that_is_cancelled_in_the_middle_of_many_leaves_its_neighbours_alone(world):
    with pair(world) as (caller, callee):
        for _ in range(3):
            futures = [
                caller.rpc_async(1, "watch" if place % 6 == 3 else "echo", place)
                for place in range(36)
            ]
            given_up = futures[3::6]
            for future in given_up:
                assert future.cancel()
            kept = [place for place in range(36) if place % 6 != 3]
            assert [futures[place].result(PATIENCE) for place in kept] == kept
            assert all(future.cancelled() for future in given_up)
            eventually(lambda: in_flight(caller) == 0)
            # Those that had begun were told; the others never begin.
            eventually(lambda: sorted(callee.cancelled()) == sorted(callee.notes()))
        assert caller.rpc_sync(1, "echo", 1, timeout=PATIENCE) == 1


@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_of_calls_has_the_outcome_that_each_would_have_alone(world, seed):
    rng = random.Random(seed)
    kinds = rng.choices(
        ["quick", "failing", "missing", "late", "cancelled", "large"], [60, 8, 4, 3, 6, 4], k=240
    )

    def begin(place, kind):
        match kind:
            case "quick" | "cancelled":
                return caller.rpc_async(1, "note", place)
            case "failing":
                return caller.rpc_async(1, "fail", place)
            case "missing":
                return caller.rpc_async(1, f"no {place}")
            case "late":
                return caller.rpc_async(1, "watch", place, timeout=1.0 + place / 2000)
            case "large":
                return caller.rpc_async(1, "echo", bytes([place % 256]) * (20_000 + place))
        raise AssertionError(kind)

    def check(place, kind, future):
        error = future.exception(PATIENCE)
        match kind:
            case "quick":
                assert future.result() == place
            case "failing":
                assert error.remote_message == f"cannot take {place}"
            case "missing":
                assert isinstance(error, FunctionNotFoundError)
                assert error.name == f"no {place}"
            case "late":
                assert isinstance(error, DeadlineExceededError)
                assert error.limit == 1.0 + place / 2000
            case "large":
                assert future.result() == bytes([place % 256]) * (20_000 + place)

    with pair(world, max_in_flight=32) as (caller, callee):
        futures = []
        for place, kind in enumerate(kinds):
            futures.append(begin(place, kind))
            if kind == "cancelled" and not futures[-1].cancel():
                kinds[place] = "quick"  # it was done before
            if rng.random() < 0.05:
                assert caller.rpc_sync(1, "echo", place, timeout=PATIENCE) == place
        for place, future in enumerate(futures):
            if kinds[place] != "cancelled":
                check(place, kinds[place], future)
        noted = callee.notes()
        assert len(noted) == len(set(noted))  # nothing ran twice
        must = {place for place, kind in enumerate(kinds) if kind == "quick"}
        may = {place for place, kind in enumerate(kinds) if kind in ("cancelled", "late")}
        assert must <= set(noted) <= must | may
        eventually(lambda: in_flight(caller) == 0)
