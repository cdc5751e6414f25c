"""Calls that are late: what their caller learns of them, and how often it asks."""

import threading
from concurrent.futures import wait

import pytest

from rankwire import DeadlineExceededError, RpcAgent
from rankwire.testing import simulated_world, tcp_world
from worlds import PATIENCE, eventually

LIMIT = 1.0


@pytest.fixture(params=["tcp", "simulated"])
def agents(request):
    """Two agents, of which the second has two workers that are held until the test ends."""
    make_world = tcp_world if request.param == "tcp" else simulated_world
    end = threading.Event()
    with make_world(2, timeout=PATIENCE) as backends:
        first, second = RpcAgent(backends[0]), RpcAgent(backends[1], workers=2)
        second.register("hold", lambda: end.wait(PATIENCE))
        yield first, second
        end.set()
        first.close()
        second.close()


def late_errors(futures):
    assert not wait(futures, timeout=PATIENCE).not_done
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, DeadlineExceededError) for error in errors)
    return errors


def test_calls_that_wait_for_a_worker_say_so_and_none_of_them_is_said_to_run(agents):
    first, second = agents
    futures = [first.rpc_async(1, "hold", timeout=LIMIT) for _ in range(20)]
    eventually(lambda: len(second._server.pool.queue.jobs()) == 18)
    assert len(first.backend.status().peers[1].serving) == 0
    assert second.backend.status().peers[0].serving == ("hold", "hold")
    texts = [str(error) for error in late_errors(futures)]
    waiting = [text for text in texts if "it waits for one of 2 workers; rank 1 says: " in text]
    running = [text for text in texts if "it is running: it waits " in text]
    assert (len(waiting), len(running)) == (18, 2)
    for text in texts:
        assert text.count("it has served 'hold' of rank 0 for") == 2
        assert "18 calls wait for one of 2 workers, up to " in text


def test_a_call_that_waits_and_is_made_alone_says_so_too(agents):
    first, second = agents
    futures = [first.rpc_async(1, "hold") for _ in range(2)]
    eventually(lambda: second.activity().in_service == 2)
    with pytest.raises(DeadlineExceededError, match="it waits for one of 2 workers"):
        first.rpc_sync(1, "hold", timeout=LIMIT)
    assert not any(future.done() for future in futures)


def test_a_callee_is_asked_once_about_all_calls_that_are_late_together(agents, monkeypatch):
    first, second = agents
    asked = []
    describe, doing_of = second._port.describe, first.backend.mesh.inquiries.doing_of

    def note_account(keys):
        asked.extend([keys] if keys else [])
        return describe(keys)

    def note_doing(rank, deadline):
        asked.append(rank)
        return doing_of(rank, deadline)

    monkeypatch.setattr(second._port, "describe", note_account)
    monkeypatch.setattr(first.backend.mesh.inquiries, "doing_of", note_doing)
    late_errors([first.rpc_async(1, "hold", timeout=LIMIT) for _ in range(20)])
    assert sum(len(keys) for keys in asked if keys != 1) >= 20
    assert len(asked) <= 8  # a few times at most, if the machine is busy; not once for each


@pytest.mark.parametrize("make_world", [tcp_world, simulated_world])
@pytest.mark.parametrize("ends", ["cancelled", "late"])
def test_a_call_that_is_given_up_while_it_waits_for_a_worker_frees_its_place(make_world, ends):
    end = threading.Event()
    with make_world(2, timeout=PATIENCE) as backends:
        with (
            RpcAgent(backends[0]) as first,
            RpcAgent(backends[1], workers=1, max_queued=2) as second,
        ):
            second.register("hold", lambda: end.wait(PATIENCE))
            running = first.rpc_async(1, "hold")
            eventually(lambda: second.activity().in_service == 1)
            limit = LIMIT if ends == "late" else None
            waiting = [first.rpc_async(1, "hold", timeout=limit) for _ in range(2)]
            eventually(lambda: len(second._server.pool.queue.jobs()) == 2)
            if ends == "late":
                late_errors(waiting)
            else:
                assert all(future.cancel() for future in waiting)
            eventually(lambda: not second._server.pool.queue.jobs())
            again = [first.rpc_async(1, "hold") for _ in range(2)]
            eventually(lambda: len(second._server.pool.queue.jobs()) == 2)
            end.set()
            assert [future.result() for future in (running, *again)] == [True] * 3
