"""The verbs of torch RPC: each refuses a rank that has no part in what it is about."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from rpc_ranks import run_workers

import rankwire.torch.rpc as rpc
from rankwire.errors import InvalidMessageError, OverloadedError, PeerLostError, RemoteError
from rankwire.torch.rpc import autograd, verbs
from rankwire.torch.rpc.autograd_contexts import COUNTER_BITS, MOST_KEPT, Contexts, TrackedCall
from rankwire.torch.rpc.autograd_pass import LocalPass
from rankwire.torch.rpc.owned_objects import MOST_EXPECTED, ObjectId
from rankwire.torch.rpc.session import current
from worlds import eventually

ALLOW = [__name__]
weight = torch.ones(3, requires_grad=True)


def scaled(x):
    return x * weight


def identity(value):
    return value


def messages_sent(context_id):
    return list(autograd._retrieve_context(context_id).sent)


def requests(thing, context_id, message):
    """Return the arguments of each verb, as a rank sends them that knows all but the key.

    Args:
        thing: The id of an object of rank 0 that rank 1 made and holds, with a guessed key.
        context_id: A context of rank 1, in which that has called rank 0.
        message: A message with tensors, from rank 0 to rank 1 in that context.
    """
    backward_pass = 1 << COUNTER_BITS
    foreign_context = autograd._here().contexts.make()
    return {
        verbs.APPLY: (verbs.FETCH, list(thing), {}),
        verbs.GATHER: (["worker0", "worker1"], 0, None),
        verbs.MAKE: (1, 10**6, 0, "builtins:len", []),
        verbs.MAKE_BY_METHOD: (2, 10**6, 0, *thing, "sum"),
        verbs.FETCH: thing,
        verbs.CALL: (*thing, "fill_", 666.0),
        verbs.CHECK: (*thing, "fill_"),
        verbs.TYPE: thing,
        verbs.BACKWARD: (*thing, context_id, False),
        verbs.TELL: ([(1, *thing, 1, -1)],),
        verbs.CALL_IN_CONTEXT: (TrackedCall(foreign_context, verbs.FETCH, list(thing), {}),),
        verbs.REACH: (context_id, backward_pass, [message]),
        verbs.RUN: (context_id, backward_pass, False),
        verbs.ARRIVE: (context_id, backward_pass, message, [torch.ones(3)]),
        verbs.FAIL: (context_id, backward_pass, "failed, says rank 2"),
        verbs.END: (context_id,),
        verbs.ADOPT: (context_id,),
    }


def refused_as(verb, args):
    """Return the class of the error that rank 0 answers a verb with."""
    with pytest.raises(RemoteError) as caught:
        current().agent.rpc_sync(0, verb, *args, timeout=20)
    return caught.value.remote_type


def test_every_verb_refuses_a_rank_that_has_no_part_in_it():
    def be_honest():
        thing = rpc.remote("worker0", torch.ones, args=(3,))
        assert thing.to_here().tolist() == [1, 1, 1]
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker0", scaled, args=(x,))
            (message,) = rpc.rpc_sync("worker0", messages_sent, args=(context_id,))
            rpc._all_gather((list(thing._id), context_id, message))
            rpc._all_gather(None)  # rank 2 acts before that
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [1.0, 1.0, 1.0]
        assert thing.to_here().tolist() == [1, 1, 1]

    def be_foreign():
        (creator, number, key), context_id, message = rpc._all_gather(None)["worker1"]
        guessed = ObjectId(creator, number, key ^ 1)
        asked = requests(guessed, context_id, message)
        assert asked.keys() == verbs.SENDERS.keys()
        outcomes = {verb: refused_as(verb, args) for verb, args in asked.items()}
        rpc._all_gather(None)
        return set(outcomes.values())

    def check(rank):
        if rank == 1:
            return be_honest()
        if rank == 2:
            return be_foreign()
        for _ in range(2):
            rpc._all_gather(None)
        return sorted(current().agent.functions()) == sorted(verbs.SENDERS)

    served, _, outcomes = run_workers(3, check, allow=ALLOW)
    assert served
    assert outcomes == {"PermissionError"}


def test_the_page_on_security_says_who_may_send_each_verb():
    page = (Path(__file__).parents[2] / "docs" / "security-details.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    for verb, sender in verbs.SENDERS.items():
        assert any(f"`{verb}`" in line and sender in line for line in lines), verb


def test_a_forged_handle_is_refused_and_harms_no_other():
    def check(rank):
        if rank == 0:
            own = rpc.RRef(5)
            ids = rpc._all_gather(list(own._id))
            rpc._all_gather(None)
            return own.local_value(), ids is not None
        creator, number, key = rpc._all_gather(None)["worker0"]
        forged = rpc.RRef._of(current(), 0, ObjectId(creator, number, key ^ 1))
        if rank == 1:
            with pytest.raises(RuntimeError, match="has no handle of object") as caught:
                rpc.rpc_sync("worker0", identity, args=(forged,))
            assert isinstance(caught.value.__cause__, InvalidMessageError)
            rpc.rpc_sync("worker2", identity, args=(1,))
        del forged  # its release is refused too
        rpc._all_gather(None)
        return None

    assert run_workers(3, check, allow=ALLOW)[0] == (5, True)


def test_objects_that_never_were_are_kept_up_to_a_limit_for_each_rank():
    def check(rank):
        if rank == 1:
            news = [(1, 1, number, 0, 0, 1) for number in range(MOST_EXPECTED + 10)]
            with pytest.raises(RemoteError, match="objects here that are not made") as caught:
                current().agent.rpc_sync(0, verbs.TELL, news, timeout=30)
            assert caught.value.remote_type.endswith("OverloadedError")
            with pytest.raises(RemoteError, match="objects here that are not made"):
                current().agent.rpc_sync(0, verbs.FETCH, 1, 10**6, 0, timeout=30)
        rpc._all_gather(None)
        return current().owned.count()[0]

    assert run_workers(2, check, allow=ALLOW)[0] == MOST_EXPECTED


def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


def test_numbered_tensors_outside_of_a_context_are_not_kept(monkeypatch):
    def check(rank):
        if rank == 0:
            return None
        numbers = iter(range(10**6))
        monkeypatch.setattr("rankwire.torch.rpc.torch_codec._history", lambda tensor: next(numbers))
        x = torch.ones(1 << 20, requires_grad=True)
        rpc.rpc_sync("worker0", torch.numel, args=(x,))
        before = rpc.rpc_sync("worker0", resident_mib)
        for _ in range(50):
            rpc.rpc_sync("worker0", torch.numel, args=(x,))
        return rpc.rpc_sync("worker0", resident_mib) - before

    assert run_workers(2, check, allow=ALLOW)[1] < 100  # all of them are 200 MiB


def test_contexts_and_their_messages_are_kept_up_to_a_limit_for_each_rank(monkeypatch):
    monkeypatch.setattr("rankwire.torch.rpc.autograd_contexts.MOST_KEPT", 10)
    contexts = Contexts(0)
    for number in range(9):
        context = contexts.meet((1 << COUNTER_BITS) + number, 2)
    contexts.charge(context, 2)
    with pytest.raises(OverloadedError, match="because of rank 2"):
        contexts.meet((1 << COUNTER_BITS) + 99, 2)
    with pytest.raises(OverloadedError, match="because of rank 2"):
        contexts.charge(context, 2)
    assert contexts.meet((1 << COUNTER_BITS) + 99, 3) is not None
    contexts.end(context.id)
    contexts.charge(context, 2)  # nothing is kept in it any more
    for number in range(20, 22):
        assert contexts.meet((1 << COUNTER_BITS) + number, 2) is not None
    with pytest.raises(OverloadedError):
        contexts.meet((1 << COUNTER_BITS) + 98, 2)
    assert MOST_KEPT > 10**5


def test_contexts_that_their_maker_does_not_know_end_with_the_rank_that_has_called_in_them():
    def check(rank):
        engine = autograd._here()
        if rank == 0:
            mine = engine.contexts.make()
            forged = [(maker << COUNTER_BITS) + 5 for maker in (2, 99)]
            for number in forged:
                engine.contexts.meet(number, 1)
            engine._lost(PeerLostError(1, "killed"))
            eventually(lambda: engine.contexts.all() == [mine])
            assert all(engine.contexts.meet(number, 2) is None for number in forged)
            engine.contexts.end(mine.id)
            assert engine.contexts.meet(mine.id, 2) is None
        rpc._all_gather(None)

    run_workers(3, check, allow=ALLOW)


def test_gradients_that_are_not_awaited_and_parts_that_run_are_refused():
    x = torch.ones(3, requires_grad=True)
    context = Contexts(0).make()
    part = LocalPass(context, lambda *_: None, [x.sum()])
    with pytest.raises(RuntimeError, match="no gradients are awaited for message 1"):
        part.arrive(1, [None])
    with pytest.raises(RuntimeError, match="no message 1 with tensors was sent"):
        part.reach_from([1])
    part.reach_from_roots()
    part.run(retain_graph=False)
    with pytest.raises(RuntimeError, match="begun before"):
        part.run(retain_graph=False)


def test_a_gathering_is_refused_beyond_a_limit_and_forgotten_when_no_worker_waits(monkeypatch):
    monkeypatch.setattr("rankwire.torch.rpc.session._MOST_WAITING", 5)

    def check(rank):
        session = current()
        if rank == 1:
            names = ["worker0", "worker1"]
            waiting = [
                session.agent.rpc_async(0, verbs.GATHER, names, number, None, timeout=60)
                for number in range(100, 105)
            ]
            with pytest.raises(RemoteError, match="waits in 5 gatherings"):
                session.agent.rpc_sync(0, verbs.GATHER, names, 200, None, timeout=60)
            for call in waiting:
                call.cancel()
            eventually(lambda: rpc.rpc_sync("worker0", count_gatherings) == 0)
        rpc._all_gather(None)

    run_workers(2, check, allow=ALLOW)


def count_gatherings():
    """Return how many there are of the test's own."""
    return sum(number >= 100 for _, number in current().gatherer._gathers)
