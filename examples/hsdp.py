"""Train with hybrid sharding: parameters are sharded over some ranks, and replicated over groups.

    rankwire run -n 4 examples/hsdp.py

A grid of 2 x 2 ranks: within a row every rank has half of each parameter (``fully_shard``), and the
rows hold the same and average their gradients. The model learns to add two numbers that it is shown
as digits.
"""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankwire.torch  # noqa: F401  (registers the backend "rankwire" with torch)

DIGITS = 2


def sums(count: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of numbers, digit by digit, and what they add up to."""
    pairs = torch.randint(10**DIGITS, (count, 2), generator=draw)
    places = 10 ** torch.arange(DIGITS)
    digits = (pairs.unsqueeze(2) // places % 10).flatten(1)
    return nn.functional.one_hot(digits, 10).flatten(1).float(), pairs.sum(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--backend", default="rankwire", help="of torch: rankwire or gloo")
    options.add_argument("--steps", type=int, default=200)
    chosen = options.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(chosen.backend, timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    if size % 2:
        raise SystemExit("an even number of ranks makes a grid of two columns")
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    answers = 2 * 10**DIGITS
    model = nn.Sequential(
        nn.Linear(20 * DIGITS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, answers),
    )  # fmt: skip
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())

    loss = torch.zeros(())
    start = time.monotonic()
    for _ in range(chosen.steps):
        shown, wanted = sums(64, draw)
        loss = nn.functional.cross_entropy(model(shown), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shown, wanted = sums(500, torch.Generator().manual_seed(10_000))
    right = (model(shown).argmax(1) - wanted).abs().float().mean()
    if dist.get_rank() == 0:
        speed = chosen.steps / (time.monotonic() - start)
        grid = " x ".join(map(str, mesh.shape))
        print(f"{chosen.backend}, {grid} ranks: loss {loss.item():.2f}, {speed:.1f} steps/s")
        print(f"the sums that it gives are off by {right.item():.1f} on average")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
