"""Train a small language model with torch's DistributedDataParallel, on rankwire or on Gloo.

    rankwire run -n 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --backend gloo

It learns to predict the next character of a text that every Python has: the source of its standard
library. The only lines that are about rankwire are the import and the name of the backend.
"""

import argparse
import inspect
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwire.torch  # noqa: F401  (registers the backend "rankwire" with torch)

CONTEXT = 64


class Model(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.remember = nn.GRU(width, width, batch_first=True)
        self.predict = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character, for every place of the text."""
        memory, _ = self.remember(self.embed(text))
        return self.predict(memory)


def read_text() -> torch.Tensor:
    """Return the characters of a text, numbered."""
    modules = (argparse, inspect)
    text = "".join(inspect.getsource(module) for module in modules)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def batch(text: torch.Tensor, size: int, draw: torch.Generator) -> torch.Tensor:
    """Return some places of the text, and the character after each."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size, 1), generator=draw)
    return text[starts + torch.arange(CONTEXT + 1)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--backend", default="rankwire", help="of torch: rankwire or gloo")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--batch", type=int, default=16, help="texts a rank and step")
    chosen = options.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(chosen.backend, timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    text = read_text()
    torch.manual_seed(0)  # the same model everywhere, and a different part of the data
    model = DistributedDataParallel(Model(int(text.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(rank)

    start, losses = time.monotonic(), []
    for step in range(1, chosen.steps + 1):
        places = batch(text, chosen.batch, draw)
        logits = model(places[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), places[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    if rank == 0:
        speed = chosen.steps / (time.monotonic() - start)
        print(
            f"{chosen.backend}, {size} ranks: {losses[0]:.3f} -> {losses[-1]:.3f}, "
            f"{speed:.1f} steps/s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
