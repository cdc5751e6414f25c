"""torch RPC: objects of other workers, their handles, and how long they live."""

import gc
import logging
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from rpc_ranks import on_first, run_workers, worker  # noqa: E402

import rankwire.torch.rpc as rpc  # noqa: E402
from rankwire.errors import (  # noqa: E402
    ChannelClosedError,
    InvalidMessageError,
    OverloadedError,
    PeerLostError,
)
from rankwire.finalizers import hand_over  # noqa: E402
from rankwire.torch.rpc.api import current_agent, rref_debug_info  # noqa: E402
from rankwire.torch.rpc.object_requests import (  # noqa: E402
    MethodThreads,
    ObjectServer,
    apply_updates,
)
from rankwire.torch.rpc.owned_objects import (  # noqa: E402
    MOST_EXPECTED,
    ObjectId,
    OwnedObject,
    OwnedObjects,
)
from rankwire.torch.rpc.session import current  # noqa: E402
from worlds import eventually  # noqa: E402

ALLOW = [__name__]


class Counter:
    def __init__(self, count=0):
        self.count = count

    def add(self, number=1):
        self.count += number
        return self.count

    def whole(self):
        return self

    @staticmethod
    def static(number):
        return number + 1

    @classmethod
    def named(cls):
        return cls.__name__

    def fail(self):
        raise ValueError("expected")

    def with_timeout(self, *, timeout):
        return timeout

    @rpc.functions.async_execution
    def add_there(self, to, number):
        return rpc.rpc_async(to, plus, args=(self.count, number))

    def _private(self):
        return 1


gate = threading.Event()


def plus(a, b):
    return a + b


def open_gate():
    gate.set()


def make_slowly(count):
    gate.wait()
    return Counter(count)


def count_of(rref):
    return rref.local_value().count


def fetch(rref):
    return rref.to_here()


def call_add(rref, number):
    return rref.rpc_sync().add(number)


def pass_to(to, function, rref):
    return rpc.rpc_sync(to, function, args=(rref,))


def give_back(rref):
    return rref


def make_there(to, count):
    return rpc.remote(to, plus, args=(count, 0))


def make_here(count):
    return rpc.RRef(Counter(count))


kept = []


def keep(rref):
    kept.append(rref)


def let_go():
    kept.clear()


def raise_error():
    raise ValueError("expected")


def owned_here():
    return int(rref_debug_info()["num_owner_rrefs"])


def counters_here():
    gc.collect()
    return sum(isinstance(thing, Counter) for thing in gc.get_objects())


def process():
    return os.getpid()


def nothing_is_owned(*workers):
    gc.collect()
    for name in workers:
        eventually(lambda name=name: rpc.rpc_sync(name, owned_here) == 0)


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
def test_an_object_is_made_asked_for_and_called(owner):
    def check():
        rref = rpc.remote(owner, Counter, args=(5,))
        assert rref.rpc_sync().add() == 6
        assert rref.rpc_async().add(number=2).wait() == 8
        assert rref.remote().add(2).to_here() == 10
        assert rref.rpc_sync().static(3) == 4
        assert rref.rpc_sync().named() == "Counter"
        assert rref.rpc_sync().with_timeout(timeout=3) == 3
        assert rref.rpc_sync().add_there("worker1", 1) == 11
        assert rref.remote().add_there("worker0", 1).to_here() == 11
        assert rref.owner() == rpc.get_worker_info(owner)
        assert rref.owner_name() == owner
        assert rref.is_owner() == (owner == "worker0")
        assert rref._get_type() is Counter
        assert rref.confirmed_by_owner()
        with pytest.raises(ValueError, match="expected"):
            rref.rpc_sync().fail()
        with pytest.raises(ValueError, match="expected"):
            rref.remote().fail().to_here()
        for call in (rref.rpc_sync, rref.rpc_async, rref.remote):
            with pytest.raises(AttributeError, match="has no attribute 'missing'"):
                call().missing().wait()
            with pytest.raises(RuntimeError, match="private"):
                call()._private().wait()

    on_first(check)


def test_methods_that_are_nobodys_business_are_refused():
    def check():
        rref = rpc.remote("worker1", give_back, args=({"a": 1},))
        assert rref.rpc_sync().get("a") == 1
        text = rpc.remote("worker1", str, args=("{0.__class__}",))
        with pytest.raises(RuntimeError, match="refused"):
            text.rpc_sync().format(1)
        tensor = rpc.remote("worker1", torch.ones, args=(2,))
        assert tensor.rpc_sync().add(1).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="refused"):
            tensor.rpc_sync().untyped_storage()

    on_first(check)


def test_who_waits_for_an_object_that_is_refused_is_told_at_once():
    """The call that makes it does not begin, and what comes after it must not wait for that."""

    def be(rank):
        if rank == 0:
            begun = time.monotonic()
            for use in (
                lambda rref: rref.rpc_sync().get(),
                lambda rref: rref.rpc_async().get().wait(),
                lambda rref: rref.to_here(),
                lambda rref: rpc.rpc_sync("worker2", fetch, args=(rref,)),
            ):
                rref = rpc.remote("worker1", give_back, args=(os.getcwd,))
                with pytest.raises(RuntimeError, match=r"is refused|never made"):
                    use(rref)
            assert time.monotonic() - begun < 10.0
            del rref
        rpc.api._barrier({"worker0", "worker1", "worker2"})
        for _ in range(2):  # tracebacks have handles, and futures have tracebacks
            gc.collect()
        if rank == 1:
            eventually(lambda: rref_debug_info()["num_owner_rrefs"] == "0")

    run_workers(3, be, allow=ALLOW)


def test_the_owner_has_the_object_itself_and_others_do_not():
    def check():
        own = rpc.RRef(Counter(1))
        assert own.local_value() is own.to_here()
        assert str(own) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
        rref = rpc.remote("worker1", Counter, args=(1,))
        with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user WorkerInfo"):
            rref.local_value()
        assert str(rref).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=1)")
        with pytest.raises(RuntimeError, match="cannot be sent"):
            rref.to_here()  # a Counter is not carried
        with pytest.raises(RuntimeError, match="Can not pickle rref"):
            rref.__reduce__()

    on_first(check)


def test_handles_are_passed_on_and_come_back():
    def check():
        rref = rpc.remote("worker1", Counter, args=(1,))
        assert rpc.rpc_sync("worker1", count_of, args=(rref,)) == 1
        assert rpc.rpc_sync("worker2", call_add, args=(rref, 2)) == 3
        assert rpc.rpc_sync("worker2", pass_to, args=("worker1", count_of, rref)) == 3
        own = rpc.RRef(40)
        assert rpc.rpc_sync("worker1", fetch, args=(own,)) == 40
        assert rpc.rpc_sync("worker1", pass_to, args=("worker2", fetch, own)) == 40
        assert rpc.rpc_sync("worker1", give_back, args=(own,)).local_value() == 40
        assert rpc.rpc_sync("worker0", fetch, args=(own,)) == 40
        assert rpc.rpc_sync("worker1", make_here, args=(7,)).rpc_sync().add() == 8
        there = rpc.rpc_sync("worker1", make_there, args=("worker2", 5))
        assert there.owner_name() == "worker2"
        assert there.to_here() == 5
        handles = {"list": [own, there], "tuple": (rref,)}
        back = rpc.rpc_sync("worker2", give_back, args=(handles,))
        assert back["list"][1].to_here() == 5
        assert rpc.remote("worker1", fetch, args=(there,)).to_here() == 5

    on_first(check, size=3)


def test_what_goes_wrong_in_making_is_told_by_every_use():
    def check():
        rref = rpc.remote("worker1", raise_error)
        for use in (
            rref.to_here,
            lambda: rref.rpc_sync().anything(),
            lambda: rref.rpc_async().anything().wait(),
            lambda: rref._get_type(),
            lambda: rpc.rpc_sync("worker1", fetch, args=(rref,)),
        ):
            with pytest.raises(ValueError, match="expected"):
                use()

    on_first(check)


def test_who_asks_for_an_object_that_is_being_made_waits_without_a_worker():
    def check():
        rref = rpc.remote("worker1", make_slowly, args=(5,))
        calls = [rref.rpc_async().add() for _ in range(40)]  # more than there are workers
        types = [rpc.rpc_async("worker2", pass_to, args=("worker1", count_of, rref))]
        made = [ThreadPoolExecutor(1).submit(lambda: rref.remote().add(0).to_here())]
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref.rpc_sync(timeout=0.1).add()
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref.to_here(timeout=0.1)
        rpc.rpc_sync("worker1", open_gate)
        assert sorted(torch.futures.wait_all(calls))[:40] == list(range(6, 46))
        assert types[0].wait() >= 5
        assert made[0].result() >= 5

    on_first(check, size=3)


def test_methods_that_have_not_begun_fail_when_their_threads_are_closed():
    threads = MethodThreads(1)
    began, go = threading.Event(), threading.Event()
    running, waiting, late = Future(), Future(), Future()
    threads.run(lambda: (began.set(), go.wait(20.0)), running)
    assert began.wait(20.0)
    threads.run(lambda: "never", waiting)
    threads.close()
    assert isinstance(waiting.exception(0.0), ChannelClosedError)
    with pytest.raises(ChannelClosedError, match="shut down"):
        threads.run(lambda: "never", late)
    go.set()
    assert running.result(20.0) == (None, True)


def test_a_call_of_an_object_that_is_made_after_the_end_fails(monkeypatch):
    monkeypatch.setattr("rankwire.torch.rpc.object_requests.sender", lambda: 1)
    owned = OwnedObjects(0)
    session = SimpleNamespace(owned=owned, agent=SimpleNamespace(register=lambda *_: None))
    server = ObjectServer(session, 1)
    thing = owned.begin(ObjectId(1, 2, 3))
    reply = server.type_of(1, 2, 3)
    server.threads.close()
    thing.resolve(Counter(), None)
    assert isinstance(reply.exception(20.0), ChannelClosedError)


def test_an_own_object_that_is_being_made_is_waited_for():
    def check():
        rref = rpc.remote("worker0", make_slowly, args=(5,))
        assert rref.is_owner()
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref.to_here(timeout=0.1)
        threading.Timer(0.05, open_gate).start()
        assert rref.local_value().count == 5

    on_first(check)


def test_a_handle_is_of_no_use_after_the_end():
    def check(rank):
        rref = rpc.remote(worker(1 - rank), Counter)
        rref.to_here if rank else rref.rpc_sync().add()
        rpc.shutdown()
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion"):
            rref.to_here()
        with pytest.raises(RuntimeError, match="after deletion"):
            rref.rpc_sync().add()
        with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
            rref._serialize()

    run_workers(2, check, allow=ALLOW)


def test_an_object_is_let_go_with_its_last_handle():
    def check():
        rref = rpc.remote("worker1", Counter)
        rref.rpc_sync().add()
        assert rref.rpc_sync().add_there("worker2", 1) == 2
        assert rpc.rpc_sync("worker1", owned_here) == 1
        rpc.rpc_sync("worker2", keep, args=(rref,))
        del rref
        gc.collect()
        assert rpc.rpc_sync("worker2", process)  # its handle lives
        assert rpc.rpc_sync("worker1", owned_here) == 1
        rpc.rpc_sync("worker2", let_go)
        nothing_is_owned("worker0", "worker1", "worker2")
        eventually(lambda: rpc.rpc_sync("worker1", counters_here) == 0)

    on_first(check, size=3)


def test_nothing_is_left_after_many_handles_went_many_ways():
    def check():
        def go(number):
            rref = rpc.remote(worker(1 + number % 2), plus, args=(number, 0))
            other = worker(1 + (number + 1) % 2)
            futures = [
                rpc.rpc_async(other, fetch, args=(rref,)),
                rpc.rpc_async(other, pass_to, args=(rref.owner_name(), fetch, rref)),
                rpc.rpc_async(other, give_back, args=([rref, rref],)),
                rpc.rpc_async(rref.owner(), give_back, args=(rref,)),
                rpc.rpc_async("worker0", give_back, args=(rref,)),
            ]
            del rref
            values = [future.wait() for future in futures]
            assert values[:2] == [number, number]
            assert values[2][1].to_here() == number
            own = rpc.RRef(number)
            futures = [
                rpc.rpc_async(other, give_back, args=(own,)),
                rpc.rpc_async(other, pass_to, args=("worker0", fetch, own)),
                rpc.rpc_async("worker0", fetch, args=(own,)),
            ]
            del own
            assert futures[0].wait().to_here() == number
            assert futures[1].wait() == futures[2].wait() == number

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(go, range(60)))
        nothing_is_owned("worker0", "worker1", "worker2")

    on_first(check, size=3)


def test_an_object_whose_handle_is_dropped_at_once_is_let_go():
    def check():
        for number in range(50):
            rpc.remote("worker1", plus, args=(number, 0))
        nothing_is_owned("worker1")

    on_first(check)


def test_handles_are_dropped_by_the_collector_wherever_it_runs():
    def check():
        rrefs = [rpc.remote("worker1", Counter, args=(0,)) for _ in range(300)]
        counter = rpc.remote("worker1", Counter, args=(0,))
        collections = 0

        def litter(phase, info):
            nonlocal collections
            collections += phase == "stop"
            if phase == "stop" and rrefs and collections % 5 == 0:
                cycle = [rrefs.pop()]
                cycle.append(cycle)

        gc.callbacks.append(litter)
        gc.set_threshold(1, 100, 1000)
        for number in range(100):
            assert counter.rpc_sync().add() == number + 1
        gc.callbacks.remove(litter)
        gc.set_threshold(700, 10, 10)
        assert not rrefs
        del counter
        nothing_is_owned("worker1")

    on_first(check)


def test_a_handle_that_could_not_be_sent_is_not_counted():
    def check():
        own, rref = rpc.RRef(1), rpc.remote("worker1", plus, args=(1, 0))
        for handle in (own, rref):
            for to in ("worker1", "worker2"):
                with pytest.raises(TypeError, match="cannot be sent"):
                    rpc.rpc_sync(to, give_back, args=([handle, object()],))
        assert owned_here() == 0
        del rref, handle
        nothing_is_owned("worker1")

    on_first(check, size=3)


def test_a_killed_user_leaves_nothing_behind():
    def check(rank):
        if rank == 2:
            kept.append([rpc.remote("worker1", Counter) for _ in range(10)])
            rpc.rpc_sync("worker0", keep, args=(rpc.remote("worker1", Counter),))
            kept[0][-1].rpc_sync().add()
            rpc.rpc_sync("worker0", open_gate)
            time.sleep(60)
        if rank == 1:
            eventually(lambda: owned_here() == 11)
            eventually(lambda: owned_here() == 1)  # that of rank 0
            eventually(lambda: owned_here() == 0)
        if rank == 0:
            gate.wait()
            eventually(lambda: rpc.rpc_sync("worker1", owned_here) == 11)
            os.kill(rpc.rpc_sync("worker2", process), signal.SIGKILL)
            eventually(lambda: rpc.rpc_sync("worker1", owned_here) == 1)
            assert kept.pop().rpc_sync().add() == 1
            gc.collect()
            eventually(lambda: rpc.rpc_sync("worker1", owned_here) == 0)
        rpc._barrier(["worker0", "worker1"])
        rpc.shutdown(graceful=False)

    run_workers(3, check, allow=ALLOW, killed=[2])


def test_an_object_that_was_offered_to_a_killed_worker_is_let_go():
    def check(rank):
        if rank == 2:
            time.sleep(60)
        if rank == 0:
            own, rref = rpc.RRef(Counter()), rpc.remote("worker1", Counter)
            rpc.rpc_sync("worker1", keep, args=(own,))
            os.kill(rpc.rpc_sync("worker2", process), signal.SIGKILL)
            eventually(lambda: 2 not in current().agent.backend.alive)
            for handle in (own, rref):
                with pytest.raises(RuntimeError, match="worker2"):
                    rpc.rpc_sync("worker2", keep, args=(handle,))
            del own, rref, handle
            rpc.rpc_sync("worker1", let_go)
            nothing_is_owned("worker0", "worker1")
        rpc._barrier(["worker0", "worker1"])
        rpc.shutdown(graceful=False)

    run_workers(3, check, allow=ALLOW, killed=[2])


def weigh(x):
    return x * torch.ones(3, requires_grad=True)


def test_nothing_is_logged_of_calls_to_a_killed_worker_whose_failure_is_known_otherwise():
    def check(rank):
        if rank:
            time.sleep(60)
        lines = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("rankwire").addHandler(handler)
        rref = rpc.remote("worker1", Counter)
        assert rref.rpc_sync().add() == 1
        unused = rpc.remote("worker1", make_slowly, args=(60,))
        with rpc.autograd.context() as context_id:
            x = torch.ones(3, requires_grad=True)
            y = rpc.rpc_sync("worker1", weigh, args=(x,))
            os.kill(rpc.rpc_sync("worker1", process), signal.SIGKILL)
            eventually(lambda: 1 not in current().agent.backend.alive)
            with pytest.raises(RuntimeError, match="rank 1 is lost"):
                rpc.autograd.backward(context_id, [y.sum()])
        late = rpc.remote("worker1", Counter)
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            late.to_here()
        rpc.remote("worker1", Counter)
        del rref, unused, late
        gc.collect()
        eventually(lambda: current().updates.is_quiet)
        has_logged = threading.Event()
        hand_over(has_logged.set)
        assert has_logged.wait(20)
        rpc.shutdown(graceful=False)
        return lines

    assert run_workers(2, check, allow=ALLOW, killed=[1])[0] == []


def test_a_killed_owner_is_named_at_once():
    def check(rank):
        if rank == 1:
            time.sleep(60)
        rref = rpc.remote("worker1", make_slowly, args=(1,))
        future = rref.rpc_async().add()
        os.kill(rpc.rpc_sync("worker1", process), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="worker1") as caught:
            future.wait()
        assert isinstance(caught.value.__cause__, PeerLostError)
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            rref.to_here()
        failed = rref.rpc_async().add(), rref.remote().add(), rpc.remote("worker1", make_slowly)
        for wait in (failed[0].wait, failed[1].to_here, failed[2].to_here):
            with pytest.raises(RuntimeError, match="rank 1 is lost"):
                wait()
        assert time.monotonic() - began < 2
        rpc.shutdown(graceful=False)

    run_workers(2, check, allow=ALLOW, killed=[1])


KEY = 7


def objects():
    return OwnedObjects(0)


def made(owned, number=1):
    """Return an object that rank 1 has made, and has a handle of."""
    thing = owned.begin(ObjectId(1, number, KEY))
    thing.resolve("thing")
    return thing


def test_what_is_told_in_another_order_than_it_was_done_comes_out_right():
    owned = objects()
    id = ObjectId(1, 1, KEY)
    owned.release(id, 1, giver=0)  # the creator has let go before its call has come
    made(owned)
    owned.tidy(owned.expect(id, 1))
    assert owned.count() == (0, 0)

    thing = made(owned, number=2)
    owned.release(thing.id, 2, giver=1)  # before the owner is told that rank 2 has got one
    assert owned.count()[0] == 1
    owned.pass_on(thing.id, 1, 2, 1)
    owned.release(thing.id, 1, giver=0)
    assert owned.count() == (0, 0)

    thing = made(owned, number=3)
    owned.release(thing.id, 1, giver=0, sent_back=1)  # what it has sent back is still on its way
    assert owned.count()[0] == 1
    assert owned.came_back(thing.id, 1) is thing
    assert owned.count() == (0, 0)

    id = ObjectId(1, 4, KEY)
    owned.release(id, 2, giver=1)  # a third rank, before all else
    owned.pass_on(id, 1, 2, 1)
    thing = made(owned, number=4)
    owned.release(id, 1, giver=0)
    assert owned.count() == (0, 0)


def test_an_object_that_is_not_made_fails_for_all_who_wait_and_is_forgotten_with_its_handle():
    owned = objects()
    id, other = ObjectId(1, 9, KEY), ObjectId(1, 10, KEY)
    waiter = owned.expect(id, 2).when_ready()
    owned.not_made(id)
    assert "never made" in str(waiter.exception(0))
    assert "never made" in str(owned.expect(id, 2).error)  # who comes later
    owned.not_made(id)
    owned.release(id, 1, giver=0)
    assert owned.count() == (0, 0)
    owned.release(other, 1, giver=0)  # before it is known
    owned.not_made(other)
    assert owned.count() == (0, 0)
    thing = made(owned)
    owned.not_made(thing.id)  # it was made, whatever its creator says
    assert thing.error is None
    owned.lose(1, PeerLostError(1, "killed"))
    owned.not_made(ObjectId(1, 11, KEY))
    assert owned.count() == (0, 0)


def test_a_lost_rank_lets_go_and_what_it_was_going_to_make_fails():
    owned = objects()
    thing = made(owned)
    owned.give(thing, 2)
    unmade = ObjectId(1, 9, KEY)
    waiter = owned.expect(unmade, 2).when_ready()
    owned.pass_on(unmade, 1, 2, 1)
    owned.lose(1, PeerLostError(1, "killed"))
    assert owned.count() == (1, 1)
    assert isinstance(waiter.exception(0), PeerLostError)
    assert isinstance(owned.expect(unmade, 2).error, PeerLostError)
    assert isinstance(owned.came_back(unmade, 2).error, PeerLostError)
    owned.release(unmade, 2, giver=1)
    owned.release(thing.id, 2, giver=0)
    assert owned.count() == (0, 0)


def test_an_object_that_is_offered_to_a_lost_rank_is_let_go_with_its_other_handles():
    owned = objects()
    thing = made(owned)
    owned.lose(2, PeerLostError(2, "killed"))
    owned.give(thing, 2)
    owned.release(thing.id, 2, giver=0)  # the message did not leave
    owned.pass_on(thing.id, 1, 2, 1)
    owned.pass_on(thing.id, 1, 2, -1)
    assert owned.count() == (1, 1)
    owned.release(thing.id, 1, giver=0)
    assert owned.count() == (0, 0)


def test_what_a_lost_rank_had_not_told_yet_is_not_waited_for():
    owned = objects()
    thing = made(owned)
    owned.release(thing.id, 3, giver=2)  # rank 2 has not told that it gave one to rank 3
    owned.release(thing.id, 3, giver=1)
    owned.lose(2, PeerLostError(2, "killed"))
    owned.release(thing.id, 3, giver=2)  # another one
    owned.pass_on(thing.id, 1, 3, 1)  # rank 1 tells it now
    assert owned.count() == (1, 1)
    owned.release(thing.id, 1, giver=0)
    assert owned.count() == (0, 0)


def test_what_was_waited_for_in_vain_is_forgotten():
    owned = objects()
    thing = owned.expect(ObjectId(1, 1, KEY), 2)
    first, second = thing.when_ready(), thing.when_ready()
    first.cancel()
    owned.abandon(thing)
    assert owned.count()[0] == 1
    second.cancel()
    owned.abandon(thing)
    assert owned.count()[0] == 0
    thing.resolve("late")


def test_each_rank_can_have_so_many_objects_expected_and_lets_go_of_them_when_it_is_lost():
    owned = objects()
    for number in range(MOST_EXPECTED):
        owned.pass_on(ObjectId(1, number, KEY), 2, 3, 1)
    for refused in (
        lambda: owned.expect(ObjectId(1, MOST_EXPECTED, KEY), 2),
        lambda: owned.release(ObjectId(1, MOST_EXPECTED, KEY), 2, giver=1),
        lambda: owned.came_back(ObjectId(1, MOST_EXPECTED, KEY), 2),
        lambda: owned.not_made(ObjectId(2, 0, KEY)),
        lambda: owned.claims.charge(2),
    ):
        with pytest.raises(OverloadedError, match="rank 2"):
            refused()
    assert owned.expect(ObjectId(1, MOST_EXPECTED, KEY), 3).is_expected  # others can
    made(owned, number=5)
    owned.claims.charge(2)  # that one does not count any more
    owned.lose(2, PeerLostError(2, "killed"))
    owned.lose(3, PeerLostError(3, "killed"))
    assert owned.count() == (1, 1)  # that which was made
    for number in range(3):
        owned.not_made(ObjectId(4, number, KEY))
        owned.release(ObjectId(4, number, KEY), 4, giver=0)
    assert not any(owned.claims.count(rank) for rank in range(5))


def test_a_rank_without_the_key_has_no_handle():
    owned = objects()
    thing = made(owned)
    guessed = thing.id._replace(key=8)
    for refused in (
        lambda: owned.expect(guessed, 2),
        lambda: owned.release(guessed, 2, giver=1),
        lambda: owned.pass_on(guessed, 2, 3, 1),
        lambda: owned.came_back(guessed, 2),
        lambda: owned.not_made(guessed),
        lambda: owned.begin(guessed),
    ):
        with pytest.raises(PermissionError, match="has no handle of object 1 of rank 1"):
            refused()
    assert owned.count() == (1, 1)


def test_the_owners_own_handle_keeps_an_object_findable():
    owned = objects()
    thing = OwnedObject(ObjectId(0, 1, KEY))
    thing.resolve("thing")
    owned.keep_own(thing)
    assert owned.expect(thing.id, 1) is thing
    owned.pass_on(thing.id, 1, 2, 1)
    assert owned.count() == (1, 1)
    id = thing.id
    del thing
    assert owned.expect(id, 2).value == "thing"
    owned.release(id, 2, giver=1)
    assert owned.count() == (0, 0)


def test_many_threads_count_alike():
    owned = objects()
    thing = made(owned)
    owned.give(thing, 3)
    owned.release(thing.id, 1, giver=0)

    def go(rank):
        for _ in range(500):
            owned.give(thing, rank)
            owned.pass_on(thing.id, 3, rank, 1)
            owned.release(thing.id, rank, giver=0)
            owned.release(thing.id, rank, giver=3, sent_back=1)
            owned.came_back(thing.id, rank)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go, [1, 2, 1, 2]))
    assert owned.count() == (1, 1)
    owned.release(thing.id, 3, giver=0)
    assert owned.count() == (0, 0)


@pytest.mark.parametrize(
    "news",
    [
        *([(7, 1, 1, KEY, 1, 1)], [(0, 1, 1, KEY, "a", 1)], [(0, 1)], [3]),
        *([(0, 1, 1, KEY, 0, -1)], [(1, 1, 1, KEY, 3, 1)], [(1, 1, 1, KEY, 2, -5)]),
        [(2, 2, 1, KEY, 0, 0)],
    ],
)
def test_news_that_no_rank_sends_are_refused(news):
    owned = objects()
    made(owned)
    with pytest.raises((ValueError, TypeError)):
        apply_updates(owned, 1, 3, news)
    assert owned.count() == (1, 1)


def test_news_that_are_refused_do_not_keep_others_from_being_counted():
    owned = objects()
    thing = made(owned)
    with pytest.raises(PermissionError):
        apply_updates(owned, 1, 3, [(0, 1, 1, KEY + 1, 0, 0), (0, *thing.id, 0, 0)])
    assert owned.count() == (0, 0)


def test_a_handle_that_no_rank_sends_is_refused():
    from rankwire.codec.hooks import BuildContext
    from rankwire.torch.rpc.torch_codec import build_rref

    def check():
        for wrong in (
            None,
            [1],
            [1, 2, "a", 0],
            [9, 0, 0, 0],
            [0, 9, 0, 0],
            [0, 0, -1, 0],
            [1, 0, 0],
        ):
            with pytest.raises(InvalidMessageError):
                build_rref(wrong, BuildContext(1))
        with pytest.raises(InvalidMessageError):
            build_rref([0, 0, 0, 0], BuildContext(None))

    on_first(check)


def test_programs_see_the_workers_and_numbers_of_the_agent():
    def check():
        agent = current_agent()
        assert [info.name for info in agent.get_worker_infos()] == ["worker0", "worker1"]
        assert agent.get_worker_info().id == 0
        assert agent.get_worker_info("worker1").id == 1
        assert agent.get_debug_info()["agent.thread_pool_size"] == "16"

    on_first(check)
