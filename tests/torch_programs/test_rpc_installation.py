"""Installing: libraries that import ``torch.distributed.rpc`` themselves run on rankwire's."""

import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.rpc as stock  # noqa: E402
from rpc_ranks import run_workers  # noqa: E402
from torch.distributed.rpc import rpc_sync as torchs_own  # noqa: E402

import rankwire.torch.rpc as rpc  # noqa: E402
from rankwire.torch.rpc.initialization import (  # noqa: E402
    _BESIDE_RPC,
    put_back,
    put_in_place,
)


def add(a, b):
    return a + b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_names_are_ours_until_it_is_undone():
    optimizer = importlib.import_module("torch.distributed.optim.optimizer")
    names = ("rpc_sync", "rpc_async", "remote", "RRef", "init_rpc", "shutdown", "WorkerInfo")
    theirs = {name: getattr(stock, name) for name in names}
    extension = torch._C._distributed_rpc
    theirs_too = dict(vars(extension))
    undo = rpc.install()
    try:
        for name in names:
            assert getattr(stock, name) is getattr(rpc, name)
        assert stock.api._all_gather is rpc._all_gather
        assert stock.functions.async_execution is rpc.functions.async_execution
        assert stock.backend_registry.BackendType is rpc.BackendType
        assert stock.exposed is rpc.exposed
        assert optimizer.RRef is rpc.RRef
        assert extension.PyRRef is rpc.RRef
        assert extension._is_current_rpc_agent_set is rpc._is_current_rpc_agent_set
    finally:
        undo()
    assert {name: getattr(stock, name) for name in names} == theirs
    assert dict(vars(extension)) == theirs_too
    assert stock.rpc_sync is torchs_own
    assert not hasattr(stock, "exposed")
    assert optimizer.RRef is theirs["RRef"]
    undo()  # once more does nothing


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch.jit.script, if imported first here
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


TUTORIAL = """
    import sys
    import torch
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.autograd import backward
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer
    import rankwire.torch.rpc as rpc

    theirs = dist_autograd.context, backward, RemoteModule, DistributedOptimizer

    def make():
        return torch.nn.Parameter(torch.ones(2))

    def dot(parameter, x):
        return (parameter.local_value() * x).sum()

    def value_of(parameter):
        return parameter.local_value().tolist()

    rank = int(sys.argv[1])
    options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[2])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        parameter = rpc.remote("worker1", make)
        optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", dot, args=(parameter, torch.arange(2.0)))
            backward(context_id, [loss])
            optimizer.step(context_id)
        assert rpc.rpc_sync("worker1", value_of, args=(parameter,)) == [1.0, 0.5]
        layer = RemoteModule("worker1/cpu", torch.nn.Linear, args=(2, 3))
        assert layer(torch.ones(2)).shape == (3,)
    rpc.shutdown()
    assert (dist_autograd.context, backward, RemoteModule, DistributedOptimizer) == theirs
"""


def run_two_ranks(program, *arguments):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=50)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], told


def test_a_tutorials_program_runs_when_only_its_import_of_rpc_is_changed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TUTORIAL))
    run_two_ranks(program, f"file://{tmp_path}/store")


def test_what_is_found_beside_torchs_rpc_is_found_beside_ours():
    assert rpc.dist_autograd is rpc.autograd
    assert {"DistributedOptimizer", "RemoteModule", "dist_autograd"} <= set(rpc.__all__)


def test_torchs_names_stay_while_its_own_rpc_is_initialized(monkeypatch):
    theirs = torch.distributed.autograd.backward
    extension = torch._C._distributed_rpc
    monkeypatch.setattr(extension, "_is_current_rpc_agent_set", lambda: True)
    put_in_place(_BESIDE_RPC)
    assert torch.distributed.autograd.backward is theirs
    monkeypatch.undo()
    put_in_place(_BESIDE_RPC)
    assert torch.distributed.autograd.backward is rpc.autograd.backward
    put_back()
    assert torch.distributed.autograd.backward is theirs


LIBRARIES = {
    "torch_geometric": """
    from torch_geometric.distributed import LocalFeatureStore
    from torch_geometric.distributed.dist_context import DistContext, DistRole
    from torch_geometric.distributed.rpc import (
        RPCRouter, global_barrier, init_rpc, rpc_is_initialized, rpc_partition_to_workers,
        shutdown_rpc,
    )

    rankwire.message(DistRole)
    context = DistContext(rank, rank, 2, 2, "worker")
    for _ in range(2):  # the second time it sees that there is nothing to do
        init_rpc(context, "127.0.0.1", port, rpc_timeout=20)
    nodes = torch.arange(4) + 4 * rank
    store = LocalFeatureStore.from_data(node_id=nodes, x=nodes[:, None] * torch.ones(1, 3))
    store.num_partitions, store.partition_idx = 2, rank
    store.meta, store.local_only = {"is_hetero": False}, False
    store.node_feat_pb = torch.arange(8) // 4
    store.set_rpc_router(RPCRouter(rpc_partition_to_workers(context, 2, rank)))
    global_barrier(timeout=10)
    found = store.lookup_features(torch.tensor([0, 7, 5])).wait()
    assert found.tolist() == [[0.0] * 3, [7.0] * 3, [5.0] * 3]
    shutdown_rpc()
    assert not rpc_is_initialized()
    """,
    "torchrl": """
    import torch.distributed.rpc as rpc
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer

    class Buffer(RemoteTensorDictReplayBuffer):
        def __init__(self, size):
            super().__init__(storage=LazyTensorStorage(size), batch_size=4)

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        buffer = rpc.remote("worker1", Buffer, args=(100,))
        data = TensorDict({"a": torch.ones(8)}, [8])
        rpc.rpc_sync(buffer.owner(), Buffer.extend, args=(buffer, data))
        assert buffer.rpc_sync().sample()["a"].tolist() == [1.0] * 4
        assert buffer.rpc_sync().__len__() == 8
    rpc.shutdown()
    """,
}
OPTIONS = {
    "torch_geometric": """allow=[
        "torch_geometric.distributed",
        "torch_geometric.distributed.rpc:_rpc_async_call",
        "torch_geometric.distributed.rpc:_rpc_sync_call",
    ]""",
    "torchrl": "pickle=True",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_runs_on_ours(library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = tmp_path / "program.py"
    head = f"""
    import os, warnings
    warnings.simplefilter("ignore")
    import torch, rankwire, rankwire.torch.rpc
    rankwire.torch.rpc.install({OPTIONS[library]})
    rank, port = int(os.environ["RANK"]), {port}
    """
    program.write_text(textwrap.dedent(head) + textwrap.dedent(LIBRARIES[library]))
    run_two_ranks(program)
