"""Torch programs find their world under every launcher."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = """
import sys, torch, torch.distributed as dist
import rankwire.torch
dist.init_process_group("rankwire")
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
sys.stdout.write(f"sum {tensor.item()} {dist.get_backend()}\\n")
dist.destroy_process_group()
"""
TOOLS = Path(sys.executable).parent
LAUNCHERS = {
    "rankwire run": [sys.executable, "-m", "rankwire", "run", "-n", "2", "--no-prefix"],
    "torchrun": [str(TOOLS / "torchrun"), "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_runs_under(launcher, tmp_path):
    command = LAUNCHERS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0 rankwire") == 2


SAYS_ITS_RANK = """
import os, sys
import rankwire.torch.rpc as rpc
rank = int(os.environ["RANKWIRE_RANK"]) ^ int(sys.argv[1])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
sys.stdout.write(f"length {rpc.rpc_sync(1 - rank, len, args=([1, 2],))}\\n")
rpc.shutdown()
"""


@pytest.mark.parametrize(("lie", "expected"), [(0, "length 2"), (1, "the program says rank")])
def test_a_program_may_say_its_rank_if_it_is_the_launchers(lie, expected, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SAYS_ITS_RANK)
    done = subprocess.run(
        [*LAUNCHERS["rankwire run"], str(script), str(lie)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode == 0) == (lie == 0)
    assert expected in done.stdout + done.stderr
