"""DistributedOptimizer steps each parameter where it is, with the gradients of a context."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch
from rpc_ranks import on_first
from torch import nn

import rankwire.torch.rpc as rpc
from rankwire.torch.rpc import DistributedOptimizer, autograd


def make_layer(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


class Layer:
    """A part of a model, on the rank that made it."""

    def __init__(self, seed):
        self.layer = make_layer(seed)

    def forward(self, x):
        return self.layer(x).tanh()

    def parameters(self):
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]

    def values(self):
        return [parameter.detach().clone() for parameter in self.layer.parameters()]

    def gradients(self):
        return [parameter.grad for parameter in self.layer.parameters()]


class Halving(torch.optim.Optimizer):
    """An optimizer of the program: it has no use for gradients."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, {"factor": factor})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(group["factor"])


class Failing(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        raise ValueError("no step today")


def layers_and_parameters(world):
    layers = [rpc.remote(rank, Layer, args=(rank,)) for rank in range(1, world)]
    return layers, [parameter for layer in layers for parameter in layer.rpc_sync().parameters()]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {})],
)
def test_training_over_ranks_is_training_in_one_process(optimizer, options):
    def run():
        layers, parameters = layers_and_parameters(3)
        stepped = DistributedOptimizer(optimizer, parameters, **options)
        local = [make_layer(seed) for seed in (1, 2)]
        alone = optimizer([p for layer in local for p in layer.parameters()], **options)
        for step in range(5):
            x = torch.full((2, 4), float(step))
            with autograd.context() as context_id:
                y = x
                for layer in layers:
                    y = layer.rpc_sync().forward(y)
                autograd.backward(context_id, [y.pow(2).sum()])
                stepped.step(context_id)
            y = x
            for layer in local:
                y = layer(y).tanh()
            alone.zero_grad()
            y.pow(2).sum().backward()
            alone.step()
        for layer, own in zip(layers, local, strict=True):
            for value, expected in zip(layer.rpc_sync().values(), own.parameters(), strict=True):
                assert torch.equal(value, expected)
            assert layer.rpc_sync().gradients() == [None, None]
        return True

    assert on_first(run, size=3)


def test_an_optimizer_of_the_program_and_its_errors():
    def run():
        layers, parameters = layers_and_parameters(2)
        before = layers[0].rpc_sync().values()
        with autograd.context() as context_id:
            rpc.rpc_sync(1, len, args=([],))  # for it to know of the context
            DistributedOptimizer(Halving, parameters, 0.5).step(context_id)
            for value, old in zip(layers[0].rpc_sync().values(), before, strict=True):
                assert torch.equal(value, old / 2)
            with pytest.raises(ValueError, match="no step today"):
                DistributedOptimizer(Failing, parameters).step(context_id)
        with pytest.raises(TypeError, match="is not an optimizer"):
            DistributedOptimizer(Layer, parameters)
        return True

    assert on_first(run)


INSTALLED = """
import sys
import rankwire.torch.rpc
undo = rankwire.torch.rpc.install()
import torch.distributed.autograd as autograd
from torch.distributed.optim import DistributedOptimizer
assert DistributedOptimizer is rankwire.torch.rpc.DistributedOptimizer
assert autograd.backward is rankwire.torch.rpc.autograd.backward
undo()
from torch.distributed.optim import DistributedOptimizer
assert DistributedOptimizer.__module__.startswith("torch.")
assert autograd.backward is not rankwire.torch.rpc.autograd.backward
"""


def test_libraries_find_it_under_the_name_of_torch():
    subprocess.run([sys.executable, "-c", INSTALLED], check=True, timeout=50)
