"""Tensors of other devices: to their own backend, or through host memory.

There is no other device here. So one is made believe: what a tensor says where it is is asked in
one place.
"""

import logging

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch_ranks import run_ranks  # noqa: E402


class OnDevice(torch.Tensor):
    """A tensor that is said to be elsewhere."""


def elsewhere(args):
    """Stand in for ``Devices.device_of``."""
    first = args[0]
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return "cuda" if isinstance(first, OnDevice) else "cpu"


def test_without_a_backend_of_its_own_a_tensor_goes_through_the_host_and_that_is_said_once():
    def run(rank):
        group = dist.group.WORLD
        group.devices.device_of = elsewhere
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("rankwire").addHandler(handler)
        tensors = [torch.full((3,), 1.0 + rank).as_subclass(OnDevice) for _ in range(2)]
        for tensor in tensors:
            group.allreduce([tensor]).wait()
        said = [text for text in records if "host memory" in text]
        return [tensor.tolist() for tensor in tensors], len(said)

    assert run_ranks(2, run) == [([[3.0] * 3] * 2, 1)] * 2


def test_a_group_for_two_devices_makes_and_uses_both():
    def run(rank):
        group = dist.group.WORLD
        assert dist.get_backend_config(group) == "cpu:rankwire,cuda:gloo"
        on_host = torch.ones(2)
        dist.all_reduce(on_host)
        passed = []
        base = dist.ProcessGroup.allreduce
        group.devices.device_of = elsewhere
        dist.ProcessGroup.allreduce = lambda *args, **kwargs: passed.append(args[0] is group)
        try:
            group.allreduce([torch.ones(2).as_subclass(OnDevice)])
        finally:
            dist.ProcessGroup.allreduce = base
        made = group._get_backend(torch.device("cuda"))
        made.allreduce([on_host]).wait()
        return on_host.tolist(), passed, made.name()

    assert run_ranks(2, run, backend="cpu:rankwire,cuda:gloo") == [([4.0] * 2, [True], "gloo")] * 2
