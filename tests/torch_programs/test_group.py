"""The process group: what ``torch.distributed`` does on rankwire is what it does on Gloo."""

import gc
import itertools
import os
import signal
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_ranks import on_both, run_ranks  # noqa: E402

from rankwire.errors import ChannelClosedError  # noqa: E402
from rankwire.torch import monitored_barrier  # noqa: E402
from rankwire.torch.group import RankwireGroup  # noqa: E402
from worlds import eventually  # noqa: E402

SIZES = [2, 3]
REDUCTIONS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def numbers(rank, shape=(5, 3), dtype=torch.float32):
    torch.manual_seed(rank)
    return (torch.rand(shape) * 10 + 1).to(dtype)


def same(results, tolerance=0.0):
    """Check that Gloo and rankwire gave the same on all ranks, bit for bit unless it is said."""
    gloo, ours = results
    for theirs, mine in zip(gloo, ours, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_reductions_are_those_of_gloo(size):
    def run(rank):
        results = []
        for name in REDUCTIONS:
            dtype = torch.int64 if name.startswith("B") else torch.float64
            tensor = numbers(rank, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            results.append(tensor)
            tensor = numbers(rank, dtype=dtype)
            dist.reduce(tensor, 1, getattr(dist.ReduceOp, name))
            if rank == 1:
                results.append(tensor)
        return results

    same(on_both(size, run))


@pytest.mark.parametrize("size", SIZES)
def test_movements_are_those_of_gloo(size):
    def run(rank):
        results = []
        for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64):
            own = numbers(rank, dtype=dtype)
            tensor = own.clone()
            dist.broadcast(tensor, 1)
            results.append(tensor)
            everything = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(everything, own)
            results.extend(everything)
            joined = torch.empty(size * 5, 3, dtype=dtype)
            dist.all_gather_single(joined, own)
            results.append(joined)
            if not dtype.is_complex:  # which Gloo does not gather
                at_root = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
                dist.gather(own, at_root, 0)
                results.extend(at_root or [])
            part = torch.empty_like(own)
            dist.scatter(part, [own.roll(at) for at in range(size)] if rank == 1 else None, 1)
            results.append(part)
            sent = [numbers(10 * rank + dst, dtype=dtype) for dst in range(size)]
            received = [torch.empty_like(own) for _ in range(size)]
            dist.all_to_all(received, sent)
            results.extend(received)
        return results

    same(on_both(size, run))


@pytest.mark.parametrize("size", SIZES)
def test_uneven_and_coalesced_forms_are_those_of_gloo(size):
    def run(rank):
        results = []
        rows = [at + rank + 1 for at in range(size)]
        received = torch.empty(sum(rank + at + 1 for at in range(size)), 2)
        dist.all_to_all_single(
            received, numbers(rank, (sum(rows), 2)), [rank + at + 1 for at in range(size)], rows
        )
        results.append(received)
        out = torch.empty(4, 2)
        dist.reduce_scatter(out, [numbers(10 * rank + at, (4, 2)) for at in range(size)])
        results.append(out)
        part = torch.empty(4, 2)
        dist.reduce_scatter_single(part, numbers(rank, (4 * size, 2)))
        results.append(part)
        many = [numbers(rank, (at, 3)) for at in (1, 5, 2)]
        with dist._coalescing_manager():
            for each in many:
                dist.all_reduce(each)
        return results + many

    same(on_both(size, run), tolerance=0.0 if size == 2 else 1e-6)


def test_what_gloo_cannot_move_is_moved():
    """Parts of different shapes, and dtypes that are only bytes to us."""

    def run(rank):
        uneven = [torch.empty(at + 1, 2) for at in range(3)]
        dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)))
        assert [each.tolist() for each in uneven] == [
            [[float(at)] * 2] * (at + 1) for at in range(3)
        ]
        for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            own = torch.tensor([rank, 1, 0]).to(dtype)
            at_root = [torch.empty_like(own) for _ in range(3)] if rank == 0 else None
            dist.gather(own, at_root, 0)
            for at, each in enumerate(at_root or []):
                assert each.float().tolist() == torch.tensor([at, 1, 0]).to(dtype).float().tolist()
        transposed = torch.empty(4, 5).t()
        sending = dist.isend(torch.arange(20.0).reshape(4, 5).t(), (rank + 1) % 3)
        dist.recv(transposed, (rank - 1) % 3)
        sending.wait()
        assert transposed.t().flatten().tolist() == list(range(20))
        return True

    assert run_ranks(3, run) == [True] * 3


def test_messages_are_those_of_gloo():
    def run(rank):
        results = []
        right, left = (rank + 1) % 3, (rank - 1) % 3
        for shape in ((1,), (300, 200), (0,)):
            got = torch.empty(shape)
            sending = dist.isend(numbers(rank, shape), right, tag=3)
            dist.recv(got, left, tag=3)
            sending.wait()
            results.append(got)
        batch = torch.empty(4, 5)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, numbers(rank, (4, 5)), right),
                dist.P2POp(dist.irecv, batch, left),
            ]
        )
        for work in works:
            work.wait()
        results.append(batch)
        if rank == 0:
            sources = sorted(dist.recv(torch.empty(2)) for _ in range(2))
            results.append(torch.tensor(sources))
        else:
            dist.send(torch.ones(2) * rank, 0)
        return results

    same(on_both(3, run))


@pytest.mark.parametrize("count", [3, 100_000, 600_000], ids=["small", "large", "lent"])
def test_posted_messages_move_on_whatever_a_rank_waits_for(count):
    """As with Gloo: the order in which works are waited for does not matter."""

    def exchange(rank):
        own, got = torch.full((count,), float(rank)), torch.empty(count)
        send = dist.P2POp(dist.isend, own, (rank + 1) % 3)
        receive = dist.P2POp(dist.irecv, got, (rank - 1) % 3)
        return got, lambda *order: dist.batch_isend_irecv([(send, receive)[at] for at in order])

    def run(rank):
        for order, is_reversed in itertools.product([(0, 1), (1, 0)], [False, True]):
            got, start = exchange(rank)
            works = start(*order)
            for work in reversed(works) if is_reversed else works:
                work.wait()
            assert bool((got == (rank - 1) % 3).all())
        got, start = exchange(rank)
        works = start(1, 0)
        dist.barrier()
        if count > 3:
            dist.all_reduce(torch.ones(count))
        while not all(work.is_completed() for work in works):
            pass
        for work in works:
            work.wait()
        return bool((got == (rank - 1) % 3).all())

    assert run_ranks(3, run) == [True] * 3


def test_means_and_premultiplied_sums():
    def run(rank):
        mean = torch.tensor([1.0, 2.0]) * (rank + 1)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        product = torch.tensor([1.0, 2.0]) * (rank + 1)
        dist.all_reduce(product, dist._make_nccl_premul_sum(0.5))
        return mean.tolist(), product.tolist()

    assert run_ranks(3, run) == [([2.0, 4.0], [3.0, 6.0])] * 3


def test_operations_in_the_background_have_futures_whose_callbacks_may_use_the_group():
    def run(rank):
        works = [dist.all_reduce(torch.full((3,), 1.0 + at), async_op=True) for at in range(5)]

        def again(future):
            [tensor] = future.value()
            dist.all_reduce(tensor)
            return tensor.tolist()

        futures = [work.get_future().then(again) for work in works]
        for work in works:
            work.wait()
            assert work.is_completed()
            assert work.is_success()
        return [future.wait() for future in futures]

    assert run_ranks(2, run) == [[[4.0 * (1 + at)] * 3 for at in range(5)]] * 2


def test_groups_overlap_and_have_their_own_order():
    def run(rank):
        results = []
        for members in ([0, 1], [2, 1], [0, 1, 2], [2, 0]):
            group = dist.new_group(members)
            if rank in members:
                tensor = torch.tensor([10.0**rank])
                dist.all_reduce(tensor, group=group)
                everything = [torch.empty(1) for _ in members]
                dist.all_gather(everything, torch.tensor([float(rank)]), group=group)
                place = dist.get_group_rank(group, rank)
                results.append((members, tensor.item(), torch.cat(everything).tolist(), place))
        return results

    gloo, ours = on_both(3, run)
    assert gloo == ours


def test_sparse_tensors_are_added_up_as_by_gloo():
    def run(rank):
        places = torch.tensor([[0, 2, rank], [1, rank, 0]])
        tensor = torch.sparse_coo_tensor(
            places, numbers(rank, (3,)), (4, 4), check_invariants=True
        ).coalesce()
        dist.all_reduce(tensor)
        return tensor.to_dense()

    same(on_both(3, run))


def test_objects_pass_as_on_gloo():
    def run(rank):
        everything = [None] * 3
        dist.all_gather_object(everything, {"rank": rank, "data": [1.5] * rank})
        names = [f"from {rank}"] * 2
        dist.broadcast_object_list(names, 1)
        mine = [None]
        dist.scatter_object_list(mine, ["a", {"b": 1}, 3] if rank == 0 else None, 0)
        return everything, names, mine

    gloo, ours = on_both(3, run)
    assert gloo == ours


def test_a_time_limit_names_who_did_not_come():
    def run(rank):
        dist.barrier()
        if rank == 1:
            time.sleep(2)
            return ""
        with pytest.raises(dist.DistBackendError, match="waiting for rank 1") as info:
            dist.barrier(timeout=timedelta(seconds=0.3))
        return str(info.value)

    texts = run_ranks(3, run)
    assert any(" Timed out " in text for text in texts), texts


def test_a_monitored_barrier_names_who_did_not_pass_it():
    def run(rank):
        monitored_barrier()
        pair = dist.new_group([0, 2])
        if rank == 1:
            time.sleep(1)
            return ""
        monitored_barrier(pair, timedelta(seconds=20))
        with pytest.raises(dist.DistBackendError) as info:
            monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
        return str(info.value)

    texts = run_ranks(3, run)
    assert any("Ranks 1 failed to pass monitoredBarrier" in text for text in texts), texts


def test_a_monitored_barrier_of_another_backend_is_that_of_torch():
    def run(rank):
        monitored_barrier(timeout=timedelta(seconds=20))
        return True

    assert run_ranks(2, run, backend="gloo") == [True] * 2


def test_a_killed_rank_is_named_by_the_others():
    def run(rank):
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank 2") as info:
            dist.all_reduce(torch.ones(3))
        return str(info.value.__cause__.peer)

    assert run_ranks(3, run, killed=[2]) == ["2", "2", None]


def test_a_world_can_be_destroyed_and_made_again():
    def run(rank):
        store = dist.distributed_c10d._get_default_store()
        sums = []
        for attempt in range(3):
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            sums.append(tensor[0].item())
            dist.destroy_process_group()
            dist.init_process_group(
                "rankwire", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=2
            )
        return sums

    assert run_ranks(2, run) == [[2.0] * 3] * 2


class Closable:
    """Stands for the backend of a group; closing it takes locks that are in use all the time."""

    rank, world_size, timeout, closed = 0, 2, 20.0, 0

    def __init__(self, world):
        self.world = world

    def close(self):
        self.world.messages.abandon(12345, ChannelClosedError("this group is closed"))
        Closable.closed += 1


@contextmanager
def dropping(make):
    """Have every collection leave something new for the next, which comes at any allocation."""

    class Cycle:
        def __init__(self, content):
            self.content, self.itself = content, self

    def litter(phase, info):
        if phase == "stop":
            Cycle(make())

    thresholds = gc.get_threshold()
    gc.callbacks.append(litter)
    gc.set_threshold(1, 100, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(litter)


def test_groups_are_dropped_by_the_collector_wherever_it_runs():
    """Also inside of locks that closing a group takes."""

    def run(rank):
        world = dist.group.WORLD.ranks
        made = itertools.count()

        def make():
            next(made)
            return RankwireGroup(Closable(world), None)

        with dropping(make):
            for _ in range(100):
                tensor = torch.ones(3)
                dist.all_reduce(tensor)
                works = [dist.isend(tensor, 1 - rank), dist.irecv(torch.empty(3), 1 - rank)]
                for work in works:
                    work.wait()
        gc.collect()
        count = next(made)
        eventually(lambda: Closable.closed == count)  # by a thread
        return count

    assert min(run_ranks(2, run)) > 100


def test_aborting_a_group_ends_what_waits_in_it_elsewhere():
    def run(rank):
        dist.barrier()
        if rank == 1:
            time.sleep(0.3)
            dist.group.WORLD.abort()
            return None
        with pytest.raises(dist.DistBackendError, match="aborted") as info:
            dist.all_reduce(torch.ones(2))
        return info.value.__cause__.peer

    assert run_ranks(2, run) == [1, None]


def test_who_leaves_without_a_word_is_not_waited_for():
    def run(rank):
        dist.barrier()
        if rank == 1:
            os._exit(0)
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            dist.all_reduce(torch.ones(2))
        return True

    assert run_ranks(2, run, killed=[1]) == [True, None]


def test_a_wrong_argument_is_a_value_error_and_a_disagreement_is_named_on_all_ranks():
    def run(rank):
        with pytest.raises(ValueError, match="complex"):
            dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
        with pytest.raises(dist.DistBackendError, match="all ranks must call the same"):
            dist.all_reduce(torch.ones(2 + rank))
        return True

    assert run_ranks(2, run) == [True] * 2


def test_parameters_are_tensors_too():
    def run(rank):
        layer = torch.nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight.fill_(rank + 1.0)
        dist.all_reduce(layer.weight)
        dist.broadcast(layer.bias, 0)
        return layer.weight.tolist(), layer.bias.tolist()

    first, second = run_ranks(2, run)
    assert first == second
    assert first[0] == [[3.0, 3.0]] * 2
