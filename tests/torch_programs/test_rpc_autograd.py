"""Gradients over calls: the same as without ranks, errors with the rank, nothing left behind."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from rpc_ranks import on_first, run_workers

import rankwire.torch.rpc as rpc
from rankwire.codec.hooks import BuildContext
from rankwire.errors import InvalidMessageError
from rankwire.torch.rpc import autograd
from rankwire.torch.rpc.autograd_contexts import (
    CONTEXT,
    COUNTER_BITS,
    Contexts,
    Incoming,
    Tracking,
    inside,
)
from rankwire.torch.rpc.session import current
from worlds import eventually

HERE = [__name__]
weight = torch.full((3,), 2.0, requires_grad=True)
bias = torch.full((3,), 5.0, requires_grad=True)
hook_grads = []
holds, may_go_on, is_done = (threading.Event() for _ in range(3))


def scaled(x):
    return x * weight


def identity(value):
    return value


def scaled_and_back(x, depth):
    """Go to the next rank and the next, and add what went in on the way back."""
    x = x * weight
    if depth:
        me = rpc.get_worker_info().id
        x = rpc.rpc_sync((me + 1) % 3, scaled_and_back, args=(x, depth - 1)) + x
    return x + bias


def with_hook(x):
    y = x * weight
    y.register_hook(lambda grad: hook_grads.append(grad.clone()))
    return y * 2, y * 3


def gradient_of_weight(context_id):
    return autograd.get_gradients(context_id).get(weight)


def count_contexts():
    return len(autograd._here().contexts)


def hook_calls():
    return len(hook_grads)


class Cloning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Failing(Cloning):
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


class Dying(Cloning):
    @staticmethod
    def backward(ctx, gradient):
        os.kill(os.getpid(), signal.SIGKILL)


class Waiting(Cloning):
    @staticmethod
    def backward(ctx, gradient):
        holds.set()
        may_go_on.wait(20)
        return gradient


def apply(kind, x):
    return {"failing": Failing, "dying": Dying, "waiting": Waiting}[kind].apply(x)


def by_way_of(rank, kind, x):
    return rpc.rpc_sync(rank, apply, args=(kind, x)) * weight


def wait_until_waiting():
    return holds.wait(20)


def go_on():
    may_go_on.set()


def finish():
    is_done.set()


def locally(x, depth):
    """Return what ``scaled_and_back`` returns, without ranks."""
    x = x * weight
    if depth:
        x = locally(x, depth - 1) + x
    return x + bias


def test_gradients_over_many_hops_are_those_of_one_process():
    def run():
        x = torch.arange(3.0, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", scaled_and_back, args=(x, 7))
            z = rpc.rpc_sync("worker2", scaled, args=(y + x,)) + y
            autograd.backward(context_id, [z.sum()])
            own = autograd.get_gradients(context_id)
            theirs = [
                rpc.rpc_sync(other, gradient_of_weight, args=(context_id,)) for other in (1, 2)
            ]
            total = sum(theirs) + own[weight]
            mine = own[x]
        y = locally(x, 7)
        z = (y + x) * weight + y
        expected = torch.autograd.grad(z.sum(), [x, weight])
        assert torch.equal(mine, expected[0])
        assert torch.equal(total, expected[1])
        assert x.grad is None
        assert weight.grad is None
        return True

    assert on_first(run, size=3)


def test_a_chain_of_calls_with_ways_around_each_is_gone_back_once():
    """A pass per way would be 2 to the power of 40."""

    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = x
            for _ in range(40):
                y = rpc.rpc_sync("worker1", scaled, args=(y,)) * 0.25 + y * 0.5
            autograd.backward(context_id, [y.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones(3))
        return True

    assert on_first(run)


def combined(a, b, route):
    """Mix two tensors with what the next rank of a route makes of them."""
    mixed = (a * weight + b).sin()
    if route:
        there = rpc.rpc_sync(route[0], combined, args=(mixed, a, route[1:]))
        mixed = there * b + mixed
    return mixed


def combined_here(a, b, route):
    mixed = (a * weight + b).sin()
    if route:
        mixed = combined_here(mixed, a, route[1:]) * b + mixed
    return mixed


def random_graph(draw, here):
    """Return the leaves of a random graph and a scalar at its end, with calls or without."""
    leaves = [torch.full((3,), 0.1 * number, requires_grad=True) for number in range(1, 4)]
    tensors = list(leaves)
    for _ in range(draw.randint(5, 25)):
        a, b = draw.choice(tensors), draw.choice(tensors)
        route = [draw.randrange(3) for _ in range(draw.randint(0, 4))]
        if here:
            new = combined_here(a, b, route[1:]) if route else a * b
        else:
            new = rpc.rpc_sync(route[0], combined, args=(a, b, route[1:])) if route else a * b
        tensors.append(new)
    return leaves, sum(draw.sample(tensors[3:], 3)).sum()


def test_random_graphs_over_ranks_have_the_gradients_of_one_process():
    def run():
        for seed in range(10):
            leaves, loss = random_graph(random.Random(seed), here=True)
            expected = torch.autograd.grad(loss, [*leaves, weight], allow_unused=True)
            with autograd.context() as context_id:
                leaves, loss = random_graph(random.Random(seed), here=False)
                autograd.backward(context_id, [loss])
                own = autograd.get_gradients(context_id)
                weights = [
                    rpc.rpc_sync(other, gradient_of_weight, args=(context_id,))
                    for other in range(3)
                ]
            total = sum((found for found in weights if found is not None), torch.zeros(3))
            for gradient, wanted in zip(
                [*(own.get(leaf) for leaf in leaves), total], expected, strict=True
            ):
                if wanted is None:
                    assert gradient is None or not gradient.any()
                else:
                    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
        return True

    assert on_first(run, size=3)


def test_a_result_that_was_not_used_is_not_waited_for():
    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            rpc.rpc_sync("worker1", scaled, args=(x,))
            used = rpc.rpc_sync("worker1", scaled, args=(x,))
            autograd.backward(context_id, [(used + x).sum()])
            return autograd.get_gradients(context_id)[x].tolist()

    assert on_first(run, rpc_timeout=10.0) == [3.0, 3.0, 3.0]


def test_parameters_and_what_is_in_containers_takes_part():
    def run():
        parameter = torch.nn.Parameter(torch.ones(3))
        x = torch.ones(3, requires_grad=True)
        same = rpc.rpc_sync("worker1", identity, args=(parameter,))
        assert type(same) is torch.nn.Parameter
        with autograd.context() as context_id:
            found = rpc.rpc_sync("worker1", identity, args=({"a": [parameter, x]},))
            autograd.backward(context_id, [(found["a"][0] * 2 + found["a"][1] * 3).sum()])
            gradients = autograd.get_gradients(context_id)
            return gradients[parameter].tolist(), gradients[x].tolist()

    assert on_first(run) == ([2.0] * 3, [3.0] * 3)


def test_a_hook_sees_each_whole_gradient_once():
    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            a, b = rpc.rpc_sync("worker1", with_hook, args=(x,))
            c = rpc.rpc_sync("worker1", scaled, args=(a,))
            autograd.backward(context_id, [(b + c).sum()])
            return (
                autograd.get_gradients(context_id)[x].tolist(),
                rpc.rpc_sync("worker1", hook_calls),
            )

    assert on_first(run) == ([14.0, 14.0, 14.0], 1)


def test_passes_add_up_if_the_graph_is_retained():
    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", scaled, args=(x,)).sum()
            for _ in range(3):
                autograd.backward(context_id, [loss], retain_graph=True)
            autograd.backward(context_id, [loss])
            with pytest.raises(RuntimeError, match="a second time"):
                autograd.backward(context_id, [loss])
            return autograd.get_gradients(context_id)[x].tolist()

    assert on_first(run) == [8.0, 8.0, 8.0]


def test_remote_references_take_part():
    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            rref = rpc.remote("worker1", scaled, args=(x,))
            again = rpc.remote("worker2", scaled, args=(rref.to_here(),))
            total = again.remote().sum()
            total.backward(context_id)
            return autograd.get_gradients(context_id)[x].tolist()

    assert on_first(run, size=3) == [4.0, 4.0, 4.0]


def test_an_error_names_the_rank_and_others_can_go_on():
    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", by_way_of, args=("worker2", "failing", x))
            with pytest.raises(RuntimeError, match="Error on Node 2: no gradient today"):
                autograd.backward(context_id, [y.sum()])
            y = rpc.rpc_sync("worker1", scaled, args=(x,))
            autograd.backward(context_id, [y.sum()])
            return autograd.get_gradients(context_id)[x].tolist()

    assert on_first(run, size=3) == [2.0, 2.0, 2.0]


def test_a_rank_that_dies_in_a_pass_is_named_at_once():
    def run(rank):
        if rank:
            return is_done.wait(30)
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", by_way_of, args=("worker2", "dying", x))
            start = time.monotonic()
            with pytest.raises(RuntimeError, match="rank 2"):
                autograd.backward(context_id, [y.sum()])
            took = time.monotonic() - start
        rpc.rpc_sync("worker1", finish)
        return took

    # It takes milliseconds; the time limit of calls would be the other way to hear of it.
    assert run_workers(3, run, allow=HERE, killed=(2,), rpc_timeout=55.0)[0] < 30


def test_the_contexts_of_a_killed_rank_end_everywhere():
    def run(rank):
        if rank == 2:
            x = torch.ones(3, requires_grad=True)
            with autograd.context():
                rpc.rpc_sync("worker1", by_way_of, args=("worker0", "failing", x))
                os.kill(os.getpid(), signal.SIGKILL)
        eventually(count_contexts)
        return eventually(lambda: count_contexts() == 0)

    assert run_workers(3, run, allow=HERE, killed=(2,))[:2] == [True, True]


def hop(x, ranks):
    """Go from rank to rank, and double at the last."""
    return rpc.rpc_sync(ranks[0], hop, args=(x, ranks[1:])) if ranks else x * 2


def os_pid():
    return os.getpid()


def thread_states(pid):
    return [
        stat.read_text().rpartition(")")[2].split()[0]
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]


def has_no_context(rank):
    return rpc.rpc_sync(rank, count_contexts) == 0


def wait_for_loss(rank):
    eventually(lambda: rank not in current().agent.backend.alive)


@pytest.mark.parametrize("ranks", [[1, 2], [1, 2, 3], [1, 2, 3, 2, 3, 2]], ids=str)
def test_a_context_ends_on_all_ranks_also_if_one_dies_between_them_and_its_maker(ranks):
    def run(rank):
        if rank:
            return is_done.wait(30)
        x = torch.ones(3, requires_grad=True)
        with autograd.context():
            rpc.rpc_sync(1, hop, args=(x, ranks[1:]))
            os.kill(rpc.rpc_sync(1, os_pid), signal.SIGKILL)
            with inside(None):  # so that it does not tell the others of the end by itself
                for other in (2, 3):
                    rpc.rpc_sync(other, wait_for_loss, args=(1,))
                assert rpc.rpc_sync(2, count_contexts) == 1
        for other in (2, 3):
            eventually(lambda other=other: has_no_context(other))
            rpc.rpc_sync(other, finish)
        return count_contexts()

    assert run_workers(4, run, allow=HERE, killed=(1,))[0] == 0


def test_a_context_ends_also_if_a_rank_dies_before_it_passes_on_the_end():
    def run(rank):
        if rank:
            return is_done.wait(30)
        x = torch.ones(3, requires_grad=True)
        pid = rpc.rpc_sync(1, os_pid)
        with autograd.context():
            rpc.rpc_sync(1, hop, args=(x, [2]))
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda: all(state == "T" for state in thread_states(pid)))
        assert rpc.rpc_sync(2, count_contexts) == 1
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: has_no_context(2))
        rpc.rpc_sync(2, finish)
        return count_contexts()

    assert run_workers(3, run, allow=HERE, killed=(1,))[0] == 0


def call_after_the_end(x):
    """Call the next rank when the context of this call has ended here."""
    eventually(lambda: count_contexts() == 0)
    rpc.rpc_sync(2, scaled, args=(x,))
    is_done.set()


def test_a_call_made_after_the_end_of_its_context_does_not_bring_it_to_another_rank():
    def run():
        x = torch.ones(3, requires_grad=True)
        with autograd.context():
            call = rpc.rpc_async(1, call_after_the_end, args=(x,))
            eventually(lambda: rpc.rpc_sync(1, count_contexts) == 1)
        call.wait()
        return rpc.rpc_sync(2, count_contexts)

    assert on_first(run, size=3) == 0


def test_calls_that_come_after_the_loss_or_the_end_do_not_bring_a_context():
    contexts = Contexts(0)
    of_one = (1 << COUNTER_BITS) + 5
    known = contexts.meet(of_one, 2)
    assert contexts.lose(2) == [known]
    assert not known.callers
    assert contexts.meet(of_one, 2) is None  # its caller is lost
    assert contexts.meet(of_one, 3) is known
    assert contexts.lose(1) == [known]  # its maker is lost
    assert contexts.meet(of_one + 1, 3) is None
    of_four = 4 << COUNTER_BITS
    contexts.end_for(of_four, 3)
    assert contexts.meet(of_four, 3) is None
    assert contexts.meet(of_four, 5) is not None


def test_contexts_end_on_all_ranks_and_late_calls_do_not_bring_them_back():
    def run():
        x = torch.ones(3, requires_grad=True)
        for _ in range(50):
            with autograd.context():
                rpc.rpc_sync("worker1", scaled_and_back, args=(x, 2))
                rpc.rpc_async("worker2", scaled, args=(x,))  # nobody waits for it
        for other in (1, 2):
            eventually(lambda other=other: has_no_context(other))
        return count_contexts()

    assert on_first(run, size=3) == 0


def test_an_interrupt_ends_the_pass_on_all_ranks():
    def run():
        x = torch.ones(3, requires_grad=True)

        def interrupt():
            rpc.rpc_sync("worker1", wait_until_waiting)
            os.kill(os.getpid(), signal.SIGINT)

        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker2", by_way_of, args=("worker1", "waiting", x))
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                autograd.backward(context_id, [y.sum()])
            rpc.rpc_sync("worker1", go_on)
            y = rpc.rpc_sync("worker2", scaled, args=(x,))
            autograd.backward(context_id, [y.sum()])
            return autograd.get_gradients(context_id)[x].tolist()

    assert on_first(run, size=3) == [2.0, 2.0, 2.0]


def test_many_threads_of_all_ranks_go_back_through_each_other():
    def work(rank):
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context_id:
                y = rpc.rpc_sync((rank + 1) % 3, scaled_and_back, args=(x, 3))
                autograd.backward(context_id, [y.sum()])
                got = autograd.get_gradients(context_id)[x]
            expected = torch.autograd.grad(locally(x, 3).sum(), x)[0]
            assert torch.equal(got, expected)

    def run(rank):
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(work, [rank] * 5))

    run_workers(3, run, allow=HERE)


def test_loss_backward_says_what_to_call_instead():
    def run():
        with autograd.context():
            loss = rpc.rpc_sync("worker1", scaled, args=(torch.ones(3, requires_grad=True),)).sum()
            with pytest.raises(RuntimeError, match=r"autograd.backward\(context_id"):
                loss.backward()
        return CONTEXT.get() is None

    assert on_first(run)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        ["1", "name", [], {}, Incoming(1, 0)],
        [1, "name", [], {}, None],
        [1, "name", [], [], Incoming(1, 0)],
        [1, "name", [], {}, Incoming(1, 1)],
        [1, "name", [], {}, Incoming(1, 1 << 62)],
    ],
)
def test_a_malformed_call_is_refused(state):
    tracking = Tracking(Contexts(0), lambda name, args, kwargs: None)
    with pytest.raises(InvalidMessageError):
        tracking._build_call(state, BuildContext(1))


def test_a_call_after_the_end_of_its_context_runs_without_one():
    contexts = Contexts(0)
    context = contexts.meet(1 << COUNTER_BITS, 1)
    assert contexts.end(context.id) is context
    tracking = Tracking(contexts, lambda name, args, kwargs: CONTEXT.get())
    call = tracking._build_call([context.id, "name", [], {}, Incoming(1, 0)], BuildContext(1))
    assert call.context is None
    assert tracking.serve(call) is None
    assert len(contexts) == 0
