"""Callbacks for lost and silent peers."""

import threading

import pytest

from rankwire.errors import PeerLostError
from rankwire.mesh.events import PeerEvents
from worlds import eventually


def test_callbacks_run_in_order_and_never_two_at_once():
    events, seen, inside = PeerEvents(), [], threading.Lock()

    def callback(error):
        assert inside.acquire(blocking=False)
        seen.append(error.peer)
        inside.release()

    events.on_lost(callback)
    threads = [
        threading.Thread(target=lambda rank=rank: events.lost(PeerLostError(rank, "x")))
        for rank in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(seen) == 50)
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_callback_that_raises_does_not_keep_others_from_being_called(caplog, error):
    def raising(_):
        raise error

    events, seen = PeerEvents(), []
    events.on_lost(raising)
    events.on_lost(lambda error: seen.append(error.peer))
    events.lost(PeerLostError(3, "x"))
    eventually(lambda: seen == [3])
    assert error.__name__ in caplog.text


def test_what_finds_no_thread_is_told_with_the_next(monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    events, seen = PeerEvents(), []
    events.on_lost(lambda error: seen.append(error.peer))
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        events.lost(PeerLostError(1, "x"))
    assert "must wait" in caplog.text
    events.lost(PeerLostError(2, "x"))
    eventually(lambda: seen == [1, 2])


def test_each_callback_gets_an_error_of_its_own():
    events, seen = PeerEvents(), []
    events.on_lost(seen.append)
    events.on_lost(seen.append)
    events.lost(PeerLostError(3, "x"))
    eventually(lambda: len(seen) == 2)
    assert seen[0] is not seen[1]


def test_silence_goes_to_those_who_asked_for_it():
    events, seen = PeerEvents(), []
    remove = events.on_suspected(lambda rank, seconds: seen.append((rank, seconds)))
    events.suspected(1, 5.0)
    eventually(lambda: seen == [(1, 5.0)])
    remove()
    events.suspected(1, 0.0)
    events.on_suspected(lambda rank, seconds: seen.append((rank, seconds)))
    events.suspected(2, 6.0)
    eventually(lambda: len(seen) == 2)
    assert seen[1] == (2, 6.0)
