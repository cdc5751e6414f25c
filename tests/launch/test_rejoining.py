"""Ranks that are killed and restarted: real launchers, real processes, real signals.

Every rank calls and writes to every other all the time, checks what it gets, and leaves in a file
whom it has reached. The test kills ranks at random moments and waits until all reach all again.
"""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from faults.sizes import QUICK
from launched import COMMAND, Launched, is_running

PATIENCE = 60.0
RESTART = ("--on-failure", "restart")
CONTINUE = ("--on-failure", "continue")

# A rank talks to all others until there is a file "stop", and says which incarnation it is.
PROGRAM = """
import json
import rankwire
folder = os.path.dirname(os.path.abspath(__file__))
LOST = (rankwire.PeerLostError, rankwire.ChannelClosedError, rankwire.DeadlineExceededError)
backend = rankwire.connect(timeout=20.0)
agent = rankwire.RpcAgent(backend)
agent.register("who", lambda: (backend.rank, backend.incarnation, os.getpid()))
others = [other for other in range(backend.world_size) if other != rank]
called, heard, events = {}, {}, []
backend.on_peer_lost(lambda error: events.append(("lost", error.peer, 0)))
backend.on_peer_joined(lambda other, life: events.append(("joined", other, life)))

def call(other):
    before = backend.status().peers[other].incarnation
    who = agent.rpc_sync(other, "who")
    assert who[0] == other and who[1] >= before, (who, before)
    called[other] = who[1]

def talk(other):
    backend.send(json.dumps([rank, backend.incarnation]).encode(), other, tag=7)
    before = backend.status().peers[other].incarnation
    src, life = json.loads(bytes(backend.recv(other, tag=7, timeout=0.2)))
    after = backend.status().peers[other].incarnation
    assert src == other and before <= life <= after, (src, life, before, after)
    heard[other] = life

def leave_word():
    word = {"pid": os.getpid(), "life": backend.incarnation, "called": called, "heard": heard,
            "open": len(os.listdir("/proc/self/fd")), "events": list(events)}
    with open(f"{folder}/word-{rank}.new", "w") as file:
        json.dump(word, file)
    os.replace(f"{folder}/word-{rank}.new", f"{folder}/word-{rank}")

while not os.path.exists(f"{folder}/stop"):
    for other in others:
        for act in (call, talk):
            try:
                act(other)
            except LOST:
                pass
    leave_word()
    time.sleep(0.01)
agent.close()
backend.close()
"""


class Job:
    """A launcher whose ranks are killed."""

    def __init__(self, folder: Path, script: str, ranks: int, *options: str) -> None:
        self.folder = folder
        self.ranks = range(ranks)
        self.lives = [0] * ranks
        command = [*COMMAND, "-n", str(ranks), "--on-failure", "restart", *options, script]
        self.launched = Launched(command)

    def word(self, rank: int) -> dict:
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.folder / f"word-{rank}").read_text())
        return {}

    def kill(self, *ranks: int) -> None:
        """Kill processes that are there: each is started anew as its next incarnation."""
        for rank in ranks:
            os.kill(self.word(rank)["pid"], signal.SIGKILL)
            self.lives[rank] += 1

    def has_settled(self) -> bool:
        for rank in self.ranks:
            word = self.word(rank)
            others = {str(r): life for r, life in enumerate(self.lives) if r != rank}
            if word.get("life") != self.lives[rank] or not is_running(word["pid"]):
                return False
            if word["called"] != others or word["heard"] != others:
                return False
        return True

    def settle(self) -> None:
        end = time.monotonic() + PATIENCE
        while not self.has_settled():
            assert self.launched.process.poll() is None, self.launched.wait()
            words = [self.word(rank) for rank in self.ranks]
            assert time.monotonic() < end, f"expected {self.lives}, there is {words}"
            time.sleep(0.02)

    def stop(self) -> tuple[int, str]:
        (self.folder / "stop").touch()
        code, _, stderr = self.launched.wait(60.0)
        return code, stderr


@pytest.fixture
def job(script, tmp_path):
    jobs = []

    def start(ranks: int, *options: str) -> Job:
        jobs.append(Job(tmp_path, script(PROGRAM), ranks, *options))
        jobs[-1].settle()
        return jobs[-1]

    yield start
    for each in jobs:
        each.launched.close()


def assert_quiet(job: Job) -> None:
    """See that the job ends well, and that nothing was said but who was started again."""
    code, stderr = job.stop()
    assert code == 0, stderr
    again = [line for line in stderr.splitlines() if "it starts again in" in line]
    assert len(again) == sum(job.lives), stderr
    assert stderr.splitlines() == again


def test_rank_0_is_restarted_as_any_other(job):
    job = job(3)
    job.kill(0)
    job.settle()
    for rank in (1, 2):
        assert job.word(rank)["events"] == [["lost", 0, 0], ["joined", 0, 1]]
    assert_quiet(job)


def test_a_rank_is_started_twice_and_two_ranks_at_once(job):
    job = job(3)
    for victims in ((1,), (1, 2)):
        job.kill(*victims)
        job.settle()
    assert job.lives == [0, 2, 1]
    assert job.word(0)["events"].count(["joined", 1, 2]) == 1
    assert_quiet(job)


@pytest.mark.slow
def test_all_ranks_are_killed_at_once(job):
    job = job(3)
    job.kill(0, 1, 2)
    job.settle()
    assert_quiet(job)


@pytest.mark.slow
def test_a_rank_is_killed_on_its_way_back(job):
    """At whatever moment: it is found among the children of the launcher as soon as it is there."""
    job = job(3)
    known = {job.word(rank)["pid"] for rank in job.ranks}
    job.kill(1)
    killed = 0
    chance = random.Random(7)
    children = Path(f"/proc/{job.launched.process.pid}/task/{job.launched.process.pid}/children")
    reaper = {int(pid) for pid in children.read_text().split()} - known
    while killed < 2:
        found = {int(pid) for pid in children.read_text().split()} - known - reaper
        for pid in filter(is_running, found):
            time.sleep(chance.uniform(0.0, 0.4))  # from its first line to its first call
            os.kill(pid, signal.SIGKILL)
            known.add(pid)
            job.lives[1] += 1
            killed += 1
        time.sleep(0.005)
    job.settle()
    assert_quiet(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2 if QUICK else 4))
def test_ranks_are_killed_at_random_moments(job, seed):
    chance = random.Random(seed)
    job = job(4, "--max-restarts", "20")
    for _ in range(6):
        time.sleep(chance.uniform(0.0, 0.8))
        victims = chance.sample(job.ranks, chance.choice([1, 1, 2]))
        there = [r for r in victims if job.word(r)["life"] == job.lives[r]]
        job.kill(*there)
    job.settle()
    before = [job.word(rank)["open"] for rank in job.ranks]
    assert max(before) <= 48, before  # of one link there are some; of nine old ones there are none
    assert_quiet(job)


def test_a_stopped_rank_is_killed_and_restarted(run):
    done = run(
        """
import rankwire
with rankwire.connect(suspect_after=0.2, fail_after=0.6, timeout=20.0) as backend:
    if rank == 1 and backend.incarnation == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    import threading
    back = threading.Event()
    backend.on_peer_joined(lambda *joined: back.set())
    if rank == 0:
        assert back.wait(20.0)
        backend.send(b"hello again", 1)
    else:
        print("got", bytes(backend.recv(0)).decode(), flush=True)
""",
        *RESTART,
    )
    assert done.returncode == 0, done.stderr
    assert "got hello again" in done.stdout
    assert "rank 1 is killed: its process has been silent" in done.stderr
    assert "it starts again in 0.25 s, restart 1 of 3" in done.stderr


def test_after_the_last_restart_a_failure_is_the_jobs(run):
    done = run(
        """
print("start", os.environ["RANKWIRE_RESTART_COUNT"], flush=True)
if rank == 1:
    sys.exit(7)
time.sleep(60)
""",
        *RESTART,
        *("--max-restarts", "2"),
    )
    assert done.returncode == 7
    starts = sorted(line for line in done.stdout.splitlines() if line.startswith("[rank 1]"))
    assert starts == [f"[rank 1] start {count}" for count in range(3)]
    assert "restart 2 of 2" in done.stderr
    assert "rank 1 failed first: exit code 7" in done.stderr
    assert "stopped: rank 0" in done.stderr


def test_a_rank_that_ends_well_is_not_started_again(run):
    done = run("print('once', flush=True)", "--on-failure", "restart")
    assert done.returncode == 0
    assert done.stdout.count("once") == 2
    assert done.stderr == ""


def test_a_rank_that_fails_before_the_world_has_formed_is_restarted_too(run):
    done = run(
        """
import rankwire
if rank == 1 and os.environ["RANKWIRE_RESTART_COUNT"] == "0":
    sys.exit(3)
with rankwire.connect(timeout=20.0) as backend:
    backend.barrier()  # this world formed with the second process: all is as ever
    print("incarnation", backend.incarnation, flush=True)
""",
        *RESTART,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] incarnation 0" in done.stdout
    assert "[rank 1] incarnation 1" in done.stdout


def test_what_a_killed_rank_had_started_ends_before_it_starts_again(run, tmp_path):
    done = run(
        """
if rank == 0:
    time.sleep(0.1)
elif os.environ["RANKWIRE_RESTART_COUNT"] == "0":
    child = subprocess.Popen(["sleep", "60"])
    open("child.pid", "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
else:
    stat = f"/proc/{open('child.pid').read()}/stat"
    while os.path.exists(stat) and open(stat).read().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)
    print("it is gone", flush=True)
""",
        *RESTART,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "it is gone" in done.stdout


def test_with_continue_the_others_go_on_and_the_failure_is_the_exit_code(run):
    done = run(
        """
import rankwire
with rankwire.connect(timeout=20.0) as backend:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        backend.recv(1)
    except rankwire.PeerLostError as error:
        print("lost", error.peer, flush=True)
    if rank == 0:
        backend.send(b"we go on", 2)
    else:
        print(bytes(backend.recv(0)).decode(), flush=True)
""",
        *CONTINUE,
        ranks=3,
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert "[rank 0] lost 1" in done.stdout
    assert "[rank 2] we go on" in done.stdout
    assert "rank 1 failed (killed by SIGKILL" in done.stderr
    assert "the others go on" in done.stderr
    assert "stopped:" not in done.stderr


def test_with_continue_no_rank_waits_for_a_rank_that_failed_before_it_joined(run):
    begin = time.monotonic()
    done = run(
        """
import rankwire
if rank == 1:
    sys.exit(3)
try:
    rankwire.connect()
except rankwire.RendezvousError as error:
    print("cannot form", error.missing, flush=True)
""",
        *CONTINUE,
    )
    assert time.monotonic() - begin < 25.0
    assert "cannot form [1]" in done.stdout
    assert done.returncode == 3


def test_an_interrupt_while_a_rank_waits_to_be_started_ends_the_job(start):
    launched = start(
        """
ready()
if rank == 1:
    sys.exit(3)
time.sleep(60)
""",
        *RESTART,
        *("--max-restarts", "50"),
        pids=5,  # rank 1 comes again and again, ever later
    )
    launched.send(signal.SIGINT)
    code, _, stderr = launched.wait(20.0)
    assert code in (128 + signal.SIGINT, 3), stderr
    launched.wait_until_all_gone(5.0)


def test_restarting_all_and_restarting_one_cannot_be_combined(run):
    done = run("", "--on-failure", "restart", "--restarts", "1")
    assert done.returncode == 2
    assert "choose one of the two" in done.stderr
