"""The examples for torch run as they say, and learn."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from children import Child

EXAMPLES = Path(__file__).parents[2] / "examples"


def launch(ranks: int, name: str, *args: str) -> str:
    command = [sys.executable, "-m", "rankwire", "run", "-n", str(ranks), "--no-prefix"]
    done = Child([*command, str(EXAMPLES / name), *args]).result(55)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ddp():
    losses = re.search(r"(\S+) -> (\S+), \S+ steps/s", launch(2, "ddp.py", "--steps", "40"))
    assert losses is not None
    assert float(losses[2]) < 0.8 * float(losses[1])


def test_hsdp():
    loss = re.search(r"2 x 2 ranks: loss (\S+),", launch(4, "hsdp.py", "--steps", "60"))
    assert loss is not None
    assert float(loss[1]) < 5.0  # guessing gives ln 200 = 5.3


def test_parameter_server_on_torch_rpc():
    printed = launch(3, "torch_parameter_server.py", "--steps", "60")
    losses = re.search(r"2 trainers: loss (\S+) -> (\S+), \S+ steps/s", printed)
    assert losses is not None
    assert float(losses[2]) < 0.8 * float(losses[1])
