"""RemoteModule: a module of another worker is run, trained and passed on like one of this rank."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

import torch
from rpc_ranks import on_first, run_workers
from torch import nn

import rankwire.torch.rpc as rpc
from rankwire.codec.hooks import BuildContext
from rankwire.errors import InvalidMessageError, PeerLostError
from rankwire.torch.rpc import DistributedOptimizer, RemoteModule, autograd
from rankwire.torch.rpc.remote_module import build_remote_module

HERE = [__name__]


class Net(nn.Module):
    """A module of the program."""

    def __init__(self, seed, width=4):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, factor=1.0):
        return self.inner(x) * self.scale * factor


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        raise ValueError("no module today")


class Plain:
    """It is no module."""


def make_net(seed):
    return Net(seed)


def not_a_net():
    return 3


def run_module(module, x):
    assert type(module) is RemoteModule
    return module(x)


def pass_on(to, module, x):
    return rpc.rpc_sync(to, run_module, args=(module, x))


def give_back(value):
    return value


def is_training(rref):
    return rref.local_value().training


def weights_of(rref):
    return [parameter.detach().clone() for parameter in rref.local_value().parameters()]


def process():
    return os.getpid()


def test_torchs_own_example_runs():
    def check():
        module = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        assert module.forward_async(torch.randn(128, 20)).wait().shape == (128, 30)
        assert rpc.remote("worker1", nn.Linear, args=(2, 3)).rpc_sync().forward(
            torch.ones(1, 2)
        ).shape == (1, 3)

    on_first(check, allow=())


@pytest.mark.parametrize(
    ("place", "on"),
    [("worker1/cpu", "worker1"), ("worker1", "worker1"), ("rank:1/cpu", 1), ("worker0", "worker0")],
)
def test_a_module_is_made_and_run(place, on):
    def check():
        module = RemoteModule(place, Net, args=(3,), kwargs={"width": 2})
        alone, x = Net(3, width=2), torch.randn(5, 4)
        expected = alone(x, factor=2.0)
        assert torch.equal(module(x, factor=2.0), expected)
        assert torch.equal(module.forward(x, 2.0), expected)
        assert torch.equal(module.forward_async(x, factor=2.0).wait(), expected)
        assert (module.on, module.device, module.is_scriptable) == (on, "cpu", False)
        assert repr(module) == f"RemoteModule(on={on!r}, device='cpu')"
        assert module.get_module_rref() is module.module_rref
        assert module.get_module_rref().owner() == rpc.get_worker_info(on)

    on_first(check)


def test_many_runs_at_once():
    def check():
        module = RemoteModule("worker1", make_net, args=(3,))
        futures = [module.forward_async(torch.full((1, 4), float(n))) for n in range(20)]
        for n, future in enumerate(futures):
            assert torch.equal(future.wait(), Net(3)(torch.full((1, 4), float(n))))

    on_first(check)


def test_it_trains_or_not_as_a_part_of_a_local_module_does():
    def check():
        module = RemoteModule("worker1", Net, args=(3,))
        rref = module.get_module_rref()
        assert module.eval() is module
        assert not rpc.rpc_sync("worker1", is_training, args=(rref,))
        assert module.train() is module
        assert rpc.rpc_sync("worker1", is_training, args=(rref,))
        module.train(False)
        assert not module.training
        assert not rpc.rpc_sync("worker1", is_training, args=(rref,))
        both = nn.ModuleDict({"there": module, "here": nn.Linear(4, 1)})
        nn.Module.train(both, True)
        assert rpc.rpc_sync("worker1", is_training, args=(rref,))
        assert both["here"](both["there"](torch.ones(2, 4))).shape == (2, 1)

    on_first(check)


def test_two_share_a_module():
    def check():
        first = RemoteModule("worker1", Net, args=(3,))
        second = RemoteModule.init_from_module_rref("rank:1/cpu", first.get_module_rref())
        x = torch.ones(2, 4)
        assert torch.equal(first(x), second(x))
        assert second.get_module_rref() is first.get_module_rref()
        third = rpc.rpc_sync(
            "worker0",
            RemoteModule.init_from_module_rref,
            args=("worker0", first.get_module_rref()),
        )
        assert torch.equal(first(x), third(x))  # it runs where it is
        assert len(third.remote_parameters()) == 3
        with pytest.raises(RuntimeError, match="worker9"):
            RemoteModule.init_from_module_rref("worker9", first.get_module_rref())
        with pytest.raises(TypeError, match="is an RRef, not Linear"):
            RemoteModule.init_from_module_rref("worker1", nn.Linear(1, 1))

    on_first(check)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_over_ranks_is_training_in_one_process(optimizer):
    def check():
        modules = [RemoteModule(f"worker{rank}", Net, args=(rank,)) for rank in (1, 2)]
        alone = [Net(1), Net(2)]
        references = [rref for module in modules for rref in module.remote_parameters()]
        stepped = DistributedOptimizer(optimizer, references, lr=0.05)
        local = optimizer([p for net in alone for p in net.parameters()], lr=0.05)
        for step in range(4):
            x = torch.full((3, 4), float(step))
            with autograd.context() as context_id:
                middle = modules[0](x)
                loss = modules[1].forward_async(middle, factor=2.0).wait().pow(2).sum()
                autograd.backward(context_id, [loss])
                stepped.step(context_id)
            expected = alone[1](alone[0](x), factor=2.0).pow(2).sum()
            assert torch.equal(loss, expected)
            local.zero_grad()
            expected.backward()
            local.step()
        for module, net in zip(modules, alone, strict=True):
            there = rpc.rpc_sync(module.on, weights_of, args=(module.get_module_rref(),))
            for value, parameter in zip(there, net.parameters(), strict=True):
                assert torch.equal(value, parameter)

    on_first(check, size=3)


def test_parameters_are_those_of_the_module_alone_or_with_all_in_it():
    def check():
        module = RemoteModule("worker1", Net, args=(3,))
        assert [rref.to_here().shape for rref in module.remote_parameters(recurse=False)] == [(1,)]
        values = [rref.to_here() for rref in module.remote_parameters()]
        for value, parameter in zip(values, Net(3).parameters(), strict=True):
            assert torch.equal(value, parameter)

    on_first(check)


@pytest.mark.parametrize("pickled", [False, True])
def test_it_is_passed_on(pickled):
    def check():
        module = RemoteModule("rank:1", Net, args=(3,))
        x = torch.ones(2, 4)
        expected = Net(3)(x)
        assert torch.equal(rpc.rpc_sync("worker2", run_module, args=(module, x)), expected)
        assert torch.equal(rpc.rpc_sync("worker1", run_module, args=(module, x)), expected)
        assert torch.equal(rpc.rpc_sync("worker0", run_module, args=(module, x)), expected)
        assert torch.equal(rpc.rpc_sync("worker2", pass_on, args=("worker1", module, x)), expected)
        back = rpc.rpc_sync("worker2", give_back, args=([module],))[0]
        del module
        assert (back.on, back.device) == ("worker1", "cpu")
        assert torch.equal(back(x), expected)
        assert len(back.remote_parameters()) == 3

    on_first(check, size=3, pickle=pickled)


def test_it_is_passed_on_in_a_context():
    def check():
        module = RemoteModule("worker1", Net, args=(3,))
        x, alone = torch.ones(2, 4, requires_grad=True), Net(3)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker2", run_module, args=(module, x)).sum()
            autograd.backward(context_id, [loss])
            gradient = autograd.get_gradients(context_id)[x]
        alone(x).sum().backward()
        assert torch.equal(gradient, x.grad)

    on_first(check, size=3)


def test_outside_of_calls_it_is_neither_copied_nor_pickled():
    def check():
        module = RemoteModule("worker1", Net, args=(3,))
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
                copied(module)

    on_first(check)


def test_one_that_no_rank_sends_is_refused():
    def check():
        rref = rpc.RRef(nn.Linear(1, 1))
        assert build_remote_module([rref, "cpu"], BuildContext(1)).on == "worker0"
        for wrong in (None, [], [rref], [rref, "cuda:0"], [3, "cpu"], [rref, "cpu", 1]):
            with pytest.raises(InvalidMessageError):
                build_remote_module(wrong, BuildContext(1))

    on_first(check)


def test_what_is_wrong_is_said_when_it_is_made():
    def check():
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="worker9"):
            RemoteModule("worker9/cpu", nn.Linear, args=(1, 1))
        with pytest.raises(RuntimeError, match="could not find destination 7"):
            RemoteModule("rank:7/cpu", nn.Linear, args=(1, 1))
        for device in ("cuda", "cuda:0", "meta"):
            with pytest.raises(ValueError, match=f"is on a CPU, not on {device}"):
                RemoteModule(f"worker1/{device}", nn.Linear, args=(1, 1))
        with pytest.raises(RuntimeError, match="could not find destination cpu"):
            RemoteModule("cpu", nn.Linear, args=(1, 1))
        for place in ("", "/cpu", "worker1/", "worker1/cpu/0"):
            with pytest.raises(ValueError, match="Could not parse remote_device"):
                RemoteModule(place, nn.Linear, args=(1, 1))
        for wrong in (Plain, not_a_net, torch.Tensor, dict):
            with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
                RemoteModule("worker1", wrong)
        with pytest.raises(ValueError, match="no module today"):
            RemoteModule("worker1", Failing)
        with pytest.raises(TypeError, match="out_features"):
            RemoteModule("worker1", nn.Linear, args=(1,))
        with pytest.raises(RuntimeError, match=r"size mismatch|shapes cannot be multiplied"):
            RemoteModule("worker1", nn.Linear, args=(2, 2))(torch.ones(1, 3))
        assert time.monotonic() - began < 5

    on_first(check)


def test_a_class_that_the_worker_refuses():
    def check():
        with pytest.raises(RuntimeError, match="is refused"):
            RemoteModule("worker1", Net, args=(3,))
        with pytest.raises(RuntimeError, match="is refused"):
            RemoteModule("worker1", subprocess.Popen, args=("true",))
        with pytest.raises(RuntimeError, match="top of its module"):
            RemoteModule("worker1", lambda: nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="is refused"):
            RemoteModule("worker1", nn.Sequential)

    on_first(check, allow=())


def test_strictly_only_exposed_layers_are_made():
    def check(rank):
        if rank == 1:
            rpc.exposed(nn.Linear)
        rpc._barrier(["worker0", "worker1"])
        if rank == 0:
            assert RemoteModule("worker1", nn.Linear, args=(2, 3))(torch.ones(1, 2)).shape == (1, 3)
            with pytest.raises(RuntimeError, match="it is not exposed"):
                RemoteModule("worker1", nn.Bilinear, args=(2, 3, 4))

    run_workers(2, check, allow="decorated")


REFUSED = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu"),
    *("type", "float", "double", "half", "bfloat16", "to", "register_backward_hook"),
    *("register_forward_pre_hook", "register_forward_hook", "state_dict", "load_state_dict"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children"),
    *("modules", "named_modules", "requires_grad_", "zero_grad", "share_memory", "extra_repr"),
)


def test_what_a_module_elsewhere_cannot_do_is_refused_by_name():
    def check():
        module = RemoteModule("worker1", nn.Linear, args=(1, 1))
        for name in REFUSED:
            with pytest.raises(ValueError, match=f"Method ``{name}`` not supported"):
                getattr(module, name)()
        with pytest.raises(ValueError, match="use ``remote_parameters`` instead"):
            module.parameters()

    on_first(check)


def test_without_rpc_there_is_none():
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        RemoteModule("worker1/cpu", nn.Linear, args=(1, 1))


def test_a_killed_owner_is_named_at_once():
    def check(rank):
        if rank == 1:
            time.sleep(60)
        module = RemoteModule("worker1", nn.Linear, args=(4, 4))
        os.kill(rpc.rpc_sync("worker1", process), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="worker1") as caught:
            module(torch.ones(1, 4))
        assert isinstance(caught.value.__cause__, PeerLostError)
        for lost in (module.remote_parameters, module.eval):
            with pytest.raises(RuntimeError, match="rank 1 is lost"):
                lost()
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            RemoteModule("worker1", nn.Linear, args=(4, 4))
        assert time.monotonic() - began < 2
        rpc.shutdown(graceful=False)

    run_workers(2, check, allow=HERE, killed=[1])


INSTALLED = """
import rankwire.torch.rpc as rpc
undo = rpc.install()
import torch.distributed.nn
from torch.distributed.nn.api import remote_module
assert torch.distributed.nn.RemoteModule is rpc.RemoteModule
assert remote_module.RemoteModule is rpc.RemoteModule
undo()
assert torch.distributed.nn.RemoteModule.__module__ == "torch.distributed.nn.api.remote_module"
assert remote_module.RemoteModule is torch.distributed.nn.RemoteModule
"""


def test_libraries_find_it_under_the_name_of_torch():
    subprocess.run([sys.executable, "-c", INSTALLED], check=True, timeout=50)
