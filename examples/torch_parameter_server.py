"""Train with a parameter server that steps with the gradients of all trainers, on torch RPC.

    rankwire run -n 3 examples/torch_parameter_server.py
    torchrun --nproc-per-node 3 examples/torch_parameter_server.py --stock

Rank 0 has the parameters. The other ranks have the data: each computes gradients on its own part,
sends them, and gets the new parameters when those of all have come. No thread of the server waits
for that, because ``update`` answers later. It learns to predict the next character of a text that
every Python has: the source of its standard library.

The only line that is about rankwire is an import; ``--stock`` takes torch's own in its place.
"""

import argparse
import inspect
import os
import sys
import threading
import time

import torch
from torch import nn

if "--stock" in sys.argv:
    import torch.distributed.rpc as rpc
else:
    import rankwire.torch.rpc as rpc

CONTEXT = 12
SERVER = "server"

Tensors = list[torch.Tensor]


class Model(nn.Sequential):
    """Predicts a character from those before it."""

    def __init__(self, characters: int, width: int = 24) -> None:
        super().__init__(
            nn.Embedding(characters, width),
            nn.Flatten(),
            nn.Linear(CONTEXT * width, 256),
            nn.ReLU(),
            nn.Linear(256, characters),
        )


class ParameterServer:
    """The parameters, and the gradients that have come for their next step."""

    def __init__(self, trainers: int, characters: int) -> None:
        torch.manual_seed(0)
        self.trainers = trainers
        self.model = Model(characters)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.lock = threading.Lock()
        self.came = 0
        self.step_done: torch.futures.Future[Tensors] = torch.futures.Future()

    def parameters(self) -> Tensors:
        """Return copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def update(server: rpc.RRef, gradients: Tensors) -> torch.futures.Future[Tensors]:
        """Add gradients; the future is of the parameters after the step that they are part of."""
        self: ParameterServer = server.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                part = gradient / self.trainers
                parameter.grad = part if parameter.grad is None else parameter.grad + part
            self.came += 1
            step_done = self.step_done
            if self.came < self.trainers:
                return step_done
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.came, self.step_done = 0, torch.futures.Future()
        step_done.set_result(self.parameters())
        return step_done


def read_text() -> torch.Tensor:
    """Return the characters of a text, numbered."""
    text = "".join(inspect.getsource(module) for module in (argparse, inspect))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def train(server: rpc.RRef, rank: int, steps: int, batch: int) -> list[float]:
    """Train on a part of the text; return the loss of each step."""
    text = read_text()
    draw = torch.Generator().manual_seed(rank)
    model = Model(int(text.max()) + 1)
    parameters = server.rpc_sync().parameters()
    losses = []
    for _ in range(steps):
        with torch.no_grad():
            for own, new in zip(model.parameters(), parameters, strict=True):
                own.copy_(new)
        starts = torch.randint(len(text) - CONTEXT - 1, (batch, 1), generator=draw)
        places = text[starts + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(places[:, :-1]), places[:, -1])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        losses.append(loss.item())
        parameters = rpc.rpc_sync(SERVER, ParameterServer.update, args=(server, gradients))
    return losses


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--stock", action="store_true", help="torch's own RPC")
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--batch", type=int, default=64, help="places a trainer and step")
    chosen = options.parse_args()

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK") or os.environ["RANKWIRE_RANK"])
    size = int(os.environ.get("WORLD_SIZE") or os.environ["RANKWIRE_WORLD_SIZE"])
    rpc.init_rpc(SERVER if rank == 0 else f"trainer{rank}", rank=rank, world_size=size)
    if rank == 0:
        server = rpc.RRef(ParameterServer(size - 1, int(read_text().max()) + 1))
        start = time.monotonic()
        trainers = [
            rpc.rpc_async(
                f"trainer{trainer}",
                train,
                args=(server, trainer, chosen.steps, chosen.batch),
                timeout=0,
            )
            for trainer in range(1, size)
        ]
        losses = torch.tensor([trainer.wait() for trainer in trainers]).mean(0)
        speed = chosen.steps / (time.monotonic() - start)
        print(
            f"{'torch' if chosen.stock else 'rankwire'}, {size - 1} trainers: "
            f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}, {speed:.1f} steps/s"
        )
    rpc.shutdown()


if __name__ == "__main__":
    main()
