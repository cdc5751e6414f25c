"""Training by torch's own means gives the losses that it gives on Gloo, bit for bit."""

import os
import random
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed import init_device_mesh  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.distributed.fsdp import (  # noqa: E402
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_ranks import on_both, run_ranks  # noqa: E402

from worlds import runtime_folder_of_its_own  # noqa: E402

PROMPT = 5.0  # seconds for what takes milliseconds, on a busy machine


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def losses(rank, trained, steps=6):
    optimizer = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(rank + 1)
    found = []
    for _ in range(steps):
        loss = trained(torch.randn(8, 16)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def by_ddp(**options):
    return lambda: DistributedDataParallel(model(), **options)


def with_hook():
    trained = DistributedDataParallel(model())
    trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trained


def with_hook_in_python():
    def hook(group, bucket):
        work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    trained = DistributedDataParallel(model())
    trained.register_comm_hook(None, hook)
    return trained


def by_fsdp2(**options):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    trained = model()
    for layer in trained[::2]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(trained, mesh=mesh, **options)


def by_fsdp2_in_bfloat16():
    return by_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


WAYS = {
    "ddp": by_ddp(),
    "ddp, small buckets": by_ddp(bucket_cap_mb=0.001),
    "ddp, static graph": by_ddp(static_graph=True),
    "ddp, unused parameters": by_ddp(find_unused_parameters=True),
    "ddp, views of buckets": by_ddp(gradient_as_bucket_view=True),
    "ddp, fp16 hook": with_hook,
    "ddp, hook in Python": with_hook_in_python,
    "fsdp2": by_fsdp2,
    "fsdp2 in bfloat16": by_fsdp2_in_bfloat16,
    "fsdp1": lambda: FullyShardedDataParallel(model(), device_id=torch.device("cpu")),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_gloo(way):
    gloo, ours = on_both(2, lambda rank: losses(rank, WAYS[way]()))
    assert gloo == ours


def test_ranks_that_run_out_of_data_join_the_others():
    def run(rank):
        trained = DistributedDataParallel(model())
        with trained.join():
            return losses(rank, trained, steps=3 + 2 * rank)

    gloo, ours = on_both(2, run)
    assert gloo == ours
    assert [len(found) for found in ours] == [3, 5]


def test_gradients_are_added_up_without_talking():
    def run(rank):
        trained = DistributedDataParallel(model())
        torch.manual_seed(rank + 1)
        with trained.no_sync():
            trained(torch.randn(8, 16)).sum().backward()
        trained(torch.randn(8, 16)).sum().backward()
        return [parameter.grad.tolist() for parameter in trained.parameters()]

    gloo, ours = on_both(2, run)
    assert gloo == ours
    assert ours[0] == ours[1]


def test_layers_that_are_cut_give_the_losses_of_gloo():
    def run(rank):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        trained = parallelize_module(model(), init_device_mesh("cpu", (2,)), plan)
        return losses(0, trained)  # all ranks have the same data

    gloo, ours = on_both(2, run)
    assert gloo == ours


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp1"])
def test_losses_on_four_ranks_are_those_of_gloo_but_for_rounding(way):
    gloo, ours = on_both(4, lambda rank: losses(rank, WAYS[way](), steps=3))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(gloo), rtol=1e-5, atol=0)


def test_hybrid_sharding_on_a_grid_gives_the_losses_of_gloo():
    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        trained = model()
        fully_shard(trained[0], mesh=mesh)
        return losses(rank, fully_shard(trained, mesh=mesh), steps=3)

    gloo, ours = on_both(4, run)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(gloo), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]
)
def test_a_rank_that_is_killed_in_training_is_named_by_the_others_at_once(seed, tmp_path):
    """At some step of a thousand; within the backward pass of the others, as a rule."""
    chance = random.Random(seed)
    doomed, at = chance.randrange(3), chance.randrange(1000)
    killed_at = tmp_path / "killed at"

    def run(rank):
        trained = DistributedDataParallel(model())
        optimizer = torch.optim.SGD(trained.parameters(), 0.01)
        for step in range(1000):
            if (rank, step) == (doomed, at):
                killed_at.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                trained(torch.randn(4, 16)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            except RuntimeError as error:
                late = time.monotonic() - float(killed_at.read_text())
                return step, f"rank {doomed}" in str(error), type(error).__name__, late
        return None

    with runtime_folder_of_its_own():  # who is killed leaves its socket there
        results = [each for each in run_ranks(3, run, killed=[doomed]) if each is not None]
    assert len(results) == 2
    for step, is_named, kind, late in results:
        print(f"rank {doomed} at step {at}: {kind} after {late * 1000:.1f} ms")
        assert (step, is_named) == (at, True)
        assert late < PROMPT
