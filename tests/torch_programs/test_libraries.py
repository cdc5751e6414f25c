"""What torch builds on process groups runs on this one: meshes, checkpoints, compilers, loaders."""

import sys

import pytest

pytest.importorskip("torch")

from children import Child

HEAD = """
import sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import rankwire.torch
"""
PROGRAMS = {
    "tensors on a mesh": """
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = dist.init_device_mesh("cpu", (2,))
tensor = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
assert (tensor @ tensor.T).full_tensor().sum().item() == 3680.0
assert tensor.redistribute(mesh, [Replicate()]).to_local().shape == (4, 4)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
alone = model(torch.ones(2, 8)).sum().item()
parallel = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
loss = parallel(torch.ones(2, 8)).sum()
loss.backward()
assert abs(loss.item() - alone) < 1e-5
""",
    "checkpoints": """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Linear(8, 8), mesh=dist.init_device_mesh("cpu", (2,)))
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, 0)
before = model.weight.full_tensor().clone()
dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
with torch.no_grad():
    model.weight.mul_(2.0)
dcp.load({"model": model.state_dict()}, checkpoint_id=folder[0])
assert torch.equal(model.weight.full_tensor(), before)
dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder[0] + "/later").result()
""",
    "compiled graphs": """
import torch.distributed._functional_collectives as functional
def double_and_add(tensor):
    return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1
compiled = torch.compile(double_and_add, backend="aot_eager")
assert compiled(torch.ones(3)).tolist() == double_and_add(torch.ones(3)).tolist() == [5.0] * 3
""",
    "loaders in processes of their own": """
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for _ in range(2):
    for [batch] in DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, num_workers=2):
        model(batch).sum().backward()
""",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_runs_that_uses(what, tmp_path):
    script = tmp_path / "program.py"
    body = PROGRAMS[what] + 'sys.stdout.write("all is well\\n")\n'
    script.write_text(
        f'{HEAD}dist.init_process_group("rankwire")\n{body}dist.destroy_process_group()\n'
    )
    command = [sys.executable, "-m", "rankwire", "run", "-n", "2", "--no-prefix", str(script)]
    done = Child(command).result(55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2
