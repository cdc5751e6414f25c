"""Several programs in one world, and ranks that wait for those that are restarted."""

import os
import re
import signal
from pathlib import Path

import pytest

from children import Child
from launched import COMMAND

ROLLOUT = """
import os, signal, sys, rankwire
class Rollout:
    def step(self, n):
        return [backend.roles.name_of(backend.rank), n, sys.argv[1:]]
    def life(self):
        return backend.incarnation
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
backend = rankwire.connect()
agent = rankwire.RpcAgent(backend, serve={"rollout": Rollout()})
agent.serve()
agent.close()
backend.close()
"""

TRAINER = """
import os, sys, rankwire
backend = rankwire.connect(timeout=30)
agent = rankwire.RpcAgent(backend)
rollouts = [agent.to(backend.roles.name_of(rank)).rollout for rank in backend.roles["rollout"]]
def leave():
    agent.stop("rollout")
    agent.close()
    backend.close()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollout.py").write_text(ROLLOUT)
    return tmp_path


def launch(folder: Path, body: str, *options: str, later: str = "-n 2 rollout.py"):
    (folder / "trainer.py").write_text(TRAINER + body)
    command = [*COMMAND, *options, "-n", "1", "trainer.py", "--lr", "3", ":", *later.split()]
    return Child(command, cwd=folder).result(50)


def test_each_program_has_its_arguments_its_role_and_its_prefix(folder):
    body = """
print(sys.argv[1:], dict(backend.roles))
print([rollout.step(n) for n, rollout in enumerate(rollouts)])
leave()
"""
    ended = launch(folder, body, later="-n 1 --name rollout rollout.py -x : -n 1 rollout.py y")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "[rank 0 trainer/0] ['--lr', '3'] {'trainer': (0,), 'rollout': (1, 2)}",
        "[rank 0 trainer/0] [['rollout/0', 0, ['-x']], ['rollout/1', 1, ['y']]]",
    ]


def test_a_rank_is_restarted_with_its_own_program_and_called_when_it_is_back(folder):
    """Nothing is called too early: its functions are there before any other rank can call."""
    body = """
for life in range(3):
    assert [rollout.life() for rollout in rollouts] == [life, 0]
    try:
        rollouts[0].die()
    except rankwire.PeerLostError as error:
        assert "peer 1 (rollout/0)" in str(error)
    backend.wait_for("rollout/0")
print(rollouts[0].step(1))
leave()
"""
    ended = launch(folder, body, "--on-failure", "restart", "--log-dir", "logs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == "[rank 0 trainer/0] ['rollout/0', 1, []]\n"
    lines = ended.stderr.splitlines()
    assert len(lines) == 3
    assert all("rank 1 (rollout/0) failed (killed by SIGKILL" in line for line in lines)
    assert (folder / "logs" / "rank_0.log").read_text() == "['rollout/0', 1, []]\n"


def test_a_wait_ends_at_its_limit_while_the_rank_is_down(folder):
    """The pause before the second restart is 0.5 s."""
    body = """
for _ in range(2):
    try:
        rollouts[1].die()
    except rankwire.PeerLostError:
        pass
    try:
        backend.wait_for(2, timeout=0.1)
    except rankwire.DeadlineExceededError as error:
        print(error)
    backend.wait_for(2)
leave()
"""
    ended = launch(folder, body, "--on-failure", "restart", "--no-prefix")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 2
    for line in ended.stdout.splitlines():
        assert line.startswith("no result within 0.1 s waiting for rank 2; it was lost")
        assert re.search(r"\[op wait_for, rank 0, peer 2 \(rollout/1\), waited 0.1\d* s\]$", line)


@pytest.mark.parametrize("later", ["rollouts[0].die()", "agent.stop('rollout/0')"])
def test_a_wait_in_vain_raises_at_once(folder, later):
    body = f"""
import time
try:
    {later}
except rankwire.PeerLostError:
    pass
while backend.failure_of(1) is None:
    time.sleep(0.01)
begin = time.monotonic()
try:
    backend.wait_for(1)
except (rankwire.PeerLostError, rankwire.ChannelClosedError) as error:
    print(type(error).__name__, time.monotonic() - begin < 5)
agent.stop("rollout/1")
agent.close()
backend.close()
"""
    for option in ("continue",) if "die" in later else ("continue", "restart"):
        ended = launch(folder, body, "--on-failure", option, "--no-prefix", "--exit-code", "rank0")
        kind = "PeerLostError" if "die" in later else "ChannelClosedError"
        assert ended.stdout == f"{kind} True\n", ended.stderr
        assert ended.returncode == 0


LOSSES = "try: rollouts[0].die()\nexcept rankwire.PeerLostError: pass\n"


@pytest.mark.parametrize(
    ("rule", "body", "code"),
    [
        ("any", f"{LOSSES}leave()", 128 + signal.SIGKILL),
        ("rank0", f"{LOSSES}leave()", 0),
        ("rank0", f"{LOSSES}leave(); sys.exit(3)", 3),
        ("any", "leave()", 0),
        ("rank0", "leave()", 0),
    ],
)
def test_the_exit_code_of_a_job_that_bears_losses(folder, rule, body, code):
    ended = launch(folder, body, "--on-failure", "continue", "--exit-code", rule)
    assert ended.returncode == code, ended.stderr


def test_rank_0_does_not_decide_for_a_job_that_was_stopped(folder):
    """The worker has no restart left, so the launcher stops rank 0, which then ends well."""
    body = "import signal\nsignal.signal(15, lambda *_: os._exit(0))\nsignal.pause()\n"
    options = ("--on-failure", "restart", "--max-restarts", "0", "--exit-code", "rank0")
    (folder / "rollout.py").write_text("import rankwire; rankwire.connect(); raise SystemExit(7)")
    ended = launch(folder, body, *options, later="-n 1 rollout.py")
    assert ended.returncode == 7, ended.stderr


def test_a_summary_names_the_rank_that_failed(folder):
    ended = launch(folder, "rollouts[1].die()")
    assert "rankwire: rank 2 (rollout/1) failed first: killed by SIGKILL" in ended.stderr


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ("-n 1 --restarts 3 rollout.py", "--restarts is no option of a program after `:`"),
        ("-n 1 nothing.py", "no script 'nothing.py'"),
        ("rollout.py", "Missing option"),
        ("-n 0 rollout.py", "Invalid value for '-n'"),
        ("-n 1", "Missing argument 'SCRIPT'"),
        ("", "Missing argument 'SCRIPT'"),
        ("-n 1 --name a/b rollout.py", "the name of a role has"),
    ],
)
def test_a_wrong_program_is_refused_before_anything_starts(folder, later, words):
    ended = launch(folder, "print('started')", later=later)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert ended.stdout == ""


def test_one_program_has_a_role_and_the_usual_prefix(folder):
    (folder / "my train.py").write_text("import rankwire; print(rankwire.connect().roles)")
    ended = Child([*COMMAND, "-n", "2", "my train.py"], cwd=folder).result(30)
    line = "<Roles {'my_train': (0, 1)}>"
    assert sorted(ended.stdout.splitlines()) == [f"[rank 0] {line}", f"[rank 1] {line}"]
    command = [*COMMAND, "-n", "1", "--name", "x", "-m", "json.tool", "--help", ":"]
    ended = Child([*command, "-n", "1", "-m", "json.tool", "--help"], cwd=folder).result(30)
    assert "[rank 0 x/0] usage" in ended.stdout
    assert "[rank 1 tool/0] usage" in ended.stdout


def test_modules_and_scripts_in_other_folders_have_the_name_of_their_file(folder):
    (folder / "deep").mkdir()
    os.rename(folder / "rollout.py", folder / "deep" / "rollout.py")
    ended = launch(folder, "print(backend.roles)\nleave()", later="-n 1 -m deep.rollout")
    assert "{'trainer': (0,), 'rollout': (1,)}" in ended.stdout
    ended = launch(folder, "print(backend.roles)\nleave()", later="-n 1 deep/rollout.py")
    assert "{'trainer': (0,), 'rollout': (1,)}" in ended.stdout
