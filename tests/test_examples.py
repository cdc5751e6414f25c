"""The examples run as their docstrings say, and do what they promise; shortened where possible."""

import re
import sys
from pathlib import Path

import pytest

from children import Child
from faults.sizes import QUICK

EXAMPLES = Path(__file__).parents[1] / "examples"


def launch(ranks: int, name: str, *args: str) -> str:
    command = [sys.executable, "-m", "rankwire", "run", "-n", str(ranks), "--no-prefix"]
    return run(*command, str(EXAMPLES / name), *args)


def run(*command: str) -> str:
    done = Child(list(command)).result(50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_parameter_server():
    output = launch(4, "parameter_server.py", "--steps", "600" if QUICK else "1200")
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 50  # of ten digits: guessing gives 10
    assert "calls per second" in output
    assert "generated" in output
    assert {"ping", "pull", "push"} == set(re.findall(r"│ (\w+) +│", output))


def test_actor_learner():
    output = launch(3, "actor_learner.py", "--updates", "150")
    rewards = re.search(r"mean reward (\S+) -> (\S+)", output)
    assert rewards is not None
    # By how much depends on how stale the policies are that actors play, so on the machine.
    assert float(rewards[1]) < float(rewards[2])


def test_data_loaders():
    output = launch(4, "data_loaders.py")
    error = re.search(r"300 batches, largest error ([\d.]+)", output)
    assert error is not None
    assert float(error[1]) < 0.05


def test_data_parallel_in_processes():
    check_training(launch(4, "data_parallel.py", "--steps", "12"))


def test_data_parallel_in_one_process(monkeypatch):
    monkeypatch.delenv("RANKWIRE_RANK", raising=False)
    example = str(EXAMPLES / "data_parallel.py")
    check_training(run(sys.executable, example, "--steps", "12", "--ranks", "4"))


def check_training(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    difference = re.search(r"largest difference from training alone: (\S+)", output)
    assert difference is not None
    assert float(difference[1]) < 1e-12
    assert "ms a step on 4 ranks" in output


PEER = [
    "hello rank {me}, this is rank {other}",
    "halves: [0.0, 0.5, 1.0, 1.5, 2.0]",
    "the way of a nested call: [{me}, {other}, {me}, {other}, {me}, {other}, {me}, {other}]",
    "ZeroDivisionError at rank {other}; its traceback:",
    "    return a / b",
    "1 / 4 = 0.25",
]


def test_two_peers_in_two_processes():
    check_talk(launch(2, "two_peers.py"), prefix="")


def test_two_peers_in_one_process(monkeypatch):
    monkeypatch.delenv("RANKWIRE_RANK", raising=False)
    check_talk(run(sys.executable, str(EXAMPLES / "two_peers.py")), prefix="[rank {me}] ")


def check_talk(output: str, *, prefix: str) -> None:
    lines = output.splitlines()
    for me in range(2):
        for line in PEER:
            assert (prefix + line).format(me=me, other=1 - me) in lines
    late = re.findall(r"DeadlineExceededError after (\d+\.\d) s", output)
    assert len(late) == 2
    assert all(0.3 <= float(seconds) < 10 for seconds in late)  # of the 30 that it would take


@pytest.mark.parametrize("name", ["parameter_server.py", "actor_learner.py", "two_peers.py"])
def test_what_to_do_with_one_rank(name):
    command = [sys.executable, "-m", "rankwire", "run", "-n", "1", str(EXAMPLES / name)]
    done = Child(command).result(50)
    assert done.returncode == 1
    assert "run with -n 2" in done.stderr


def test_router():
    """Workers die on their way; every question is answered all the same."""
    command = [sys.executable, "-m", "rankwire", "run", "--no-prefix"]
    command += ["--on-failure", "restart", "--max-restarts", "20"]
    command += ["-n", "1", str(EXAMPLES / "router.py"), "--batches", "150", ":", "-n", "3"]
    command += ["--name", "worker", str(EXAMPLES / "router_worker.py"), "--crash", "0.02"]
    done = Child(command).result(50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 batches in" in done.stdout
    assert "100.0% right" in done.stdout
    deaths = done.stderr.count("it starts again in")
    assert len(done.stderr.splitlines()) == deaths
    asked_again = re.search(r"asked again: (\d+)", done.stdout)
    # A worker that is lost just when it is free is asked in vain too.
    assert (int(asked_again[1]) if asked_again else 0) >= deaths - 3


def test_search():
    """One of 300 settings fails, a worker dies, and the others are all tried."""
    command = [sys.executable, "-m", "rankwire", "run", "-n", "4", "--no-prefix"]
    command += ["--on-failure", "continue", str(EXAMPLES / "search.py")]
    done = Child(command).result(50)
    assert "failed: degree 0 with penalty 0.0001 is not a model" in done.stdout, done.stderr
    assert "299 settings tried by ranks [1, 2, 3]" in done.stdout
    assert "best: degree 6, penalty 0.0045, error 0.096" in done.stdout


def test_evaluation_farm():
    """A rank dies half-way; every checkpoint is scored on every shard all the same."""
    command = [sys.executable, "-m", "rankwire", "run", "-n", "4", "--no-prefix"]
    command += ["--on-failure", "continue", str(EXAMPLES / "evaluation_farm.py"), "--kill"]
    done = Child(command).result(50)
    assert "rank 3 is lost" in done.stdout, done.stdout + done.stderr
    assert "20 checkpoints scored, the best is number 19: 92.6%" in done.stdout
