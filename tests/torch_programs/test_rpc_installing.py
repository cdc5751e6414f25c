"""Installing: libraries that import ``torch.distributed.rpc`` themselves run on rankwire's."""

import importlib
import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.rpc as stock  # noqa: E402
from rpc_ranks import run_workers  # noqa: E402
from torch.distributed.rpc import rpc_sync as torchs_own  # noqa: E402

import rankwire.torch.rpc as rpc  # noqa: E402


def add(a, b):
    return a + b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_names_are_ours_until_it_is_undone():
    optimizer = importlib.import_module("torch.distributed.optim.optimizer")
    names = ("rpc_sync", "rpc_async", "remote", "RRef", "init_rpc", "shutdown", "WorkerInfo")
    theirs = {name: getattr(stock, name) for name in names}
    undo = rpc.install()
    try:
        for name in names:
            assert getattr(stock, name) is getattr(rpc, name)
        assert stock.api._all_gather is rpc._all_gather
        assert stock.functions.async_execution is rpc.functions.async_execution
        assert stock.backend_registry.BackendType is rpc.BackendType
        assert stock.exposed is rpc.exposed
        assert optimizer.RRef is rpc.RRef
    finally:
        undo()
    assert {name: getattr(stock, name) for name in names} == theirs
    assert stock.rpc_sync is torchs_own
    assert not hasattr(stock, "exposed")
    assert optimizer.RRef is theirs["RRef"]
    undo()  # once more does nothing


def test_a_program_of_torchs_runs_on_ours():
    def check(rank):
        undo = rpc.install()
        assert stock.api._is_current_rpc_agent_set()
        if rank == 0:
            assert stock.rpc_sync("worker1", add, args=(1, 2)) == 3
            assert stock.remote("worker1", torch.add, args=(1, 2)).to_here() == 3
            infos = stock._get_current_rpc_agent().get_worker_infos()
            assert [info.name for info in infos] == ["worker0", "worker1"]
        undo()

    run_workers(2, check, allow=[__name__])


PROGRAM = """
    import os
    import rankwire.torch.rpc as rpc
    import torch
    import torch.distributed as dist

    def double(x):
        return x * 2

    if "{group}" == "group first":
        dist.init_process_group("rankwire")
    rank = int(os.environ.get("RANK", os.environ.get("RANKWIRE_RANK", -1)))
    size = int(os.environ.get("WORLD_SIZE", os.environ.get("RANKWIRE_WORLD_SIZE", -1)))
    rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=size)
    assert rpc.rpc_sync(f"worker{{1 - rank}}", double, args=(torch.ones(2),)).tolist() == [2, 2]
    if "{group}" == "group second":
        dist.init_process_group("rankwire")
    if "{group}" != "no group":
        dist.barrier()
        dist.destroy_process_group()
    rpc.shutdown()
    print("done", rank)
"""


@pytest.mark.parametrize("group", ["no group", "group first", "group second"])
@pytest.mark.parametrize("launcher", ["torchrun", "rankwire"])
def test_under_a_launcher_with_a_process_group_or_without(launcher, group, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(group=group)))
    start = {
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        "rankwire": ["rankwire", "run", "-n", "2"],
    }[launcher]
    done = subprocess.run(
        [sys.executable, "-m", *start, str(program)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2
