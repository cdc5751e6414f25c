"""rankwire.local: a world of processes, or of simulated ranks, from a program that runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

import rankwire
from rankwire import FaultPlan, RankFailedError, RanksStuckError
from rankwire.testing.conformance.tools import until


@pytest.fixture(scope="module", params=["processes", "simulated"])
def world(request):
    with rankwire.local(2, simulated=request.param == "simulated") as world:
        yield world


@pytest.fixture(scope="module")
def processes():
    with rankwire.local(2) as world:
        yield world


def rank_of(backend):
    return backend.rank


# -- running ---------------------------------------------------------------------------------------


def test_a_function_runs_on_all_ranks_and_its_results_come_in_rank_order(world):
    assert world.world_size == 2
    assert world.run(rank_of) == [0, 1]
    assert world.run(lambda backend, factor: factor * backend.rank, 5) == [0, 5]


def test_a_function_runs_on_one_rank(world):
    assert world.on(1).run(rank_of) == 1
    with pytest.raises(rankwire.InvalidRankError):
        world.on(2)


def test_ranks_are_a_world(world):
    def exchange(backend):
        array = np.full(1000, float(backend.rank + 1))
        rankwire.all_reduce(backend, array)
        return array

    assert [result.sum() for result in world.run(exchange)] == [3000.0, 3000.0]


def test_a_function_can_be_started_and_its_result_taken_later(world):
    receiving = world.on(1).start(lambda backend: bytes(backend.recv(0)))
    assert isinstance(receiving, Future)
    with pytest.raises(rankwire.ConfigurationError, match="rank 1 still runs '<lambda>'"):
        world.on(1).run(rank_of)
    world.on(0).run(lambda backend: backend.send(b"later", 1))
    assert receiving.result(20) == b"later"


def test_a_future_of_a_function_that_fails_has_the_rank(world):
    failing = world.on(1).start(lambda backend: 1 / 0)
    with pytest.raises(RankFailedError, match="rank 1 failed: ZeroDivisionError") as info:
        failing.result(20)
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_what_functions_leave_in_globals_stays_there(processes):
    main = sys.modules["__main__"].__dict__
    before = set(main)
    try:
        exec(SERVING, main)
        processes.run(main["serve"])
        assert processes.on(0).run(main["ask"], 20) == 42
        processes.run(main["stop"])
    finally:
        for name in set(main) - before:
            del main[name]


SERVING = """
import rankwire

step = 22

def serve(backend):
    global agent
    agent = rankwire.RpcAgent(backend)
    agent.register(add)
    backend.barrier()

def add(a):
    return a + step

def ask(backend, value):
    return agent.rpc_sync(1, "add", value)

def stop(backend):
    backend.barrier()
    agent.close()
"""


# -- failing ---------------------------------------------------------------------------------------


def test_an_error_has_the_rank_and_its_traceback_and_the_world_goes_on(processes):
    def fail(backend):
        if backend.rank == 1:
            raise KeyError("on purpose")

    with pytest.raises(RankFailedError) as info:
        processes.run(fail)
    assert info.value.rank == 1
    assert 'raise KeyError("on purpose")' in str(info.value)
    assert isinstance(info.value.__cause__, KeyError)
    assert [outcome.returned for outcome in info.value.outcomes] == [True, False]
    assert processes.run(rank_of) == [0, 1]


def test_ranks_that_wait_for_a_failed_rank_are_interrupted(processes):
    def fail_or_wait(backend):
        if backend.rank == 1:
            raise ZeroDivisionError
        backend.recv(1, timeout=60)

    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1"):
        processes.run(fail_or_wait)
    assert time.monotonic() - began < 30
    assert processes.run(rank_of) == [0, 1]


def test_a_limit_shows_the_stacks_and_interrupts(processes):
    def hang(backend):
        time.sleep(60)

    with pytest.raises(RanksStuckError, match=r"ranks \[0, 1\]") as info:
        processes.run(hang, limit=0.3)
    assert all("in hang" in info.value.stacks[rank] for rank in (0, 1))
    assert processes.run(rank_of) == [0, 1]


def test_a_rank_that_was_killed_is_named_and_the_others_go_on():
    def be_killed(backend):
        if backend.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with rankwire.local(2) as world:
        with pytest.raises(RankFailedError, match="killed by SIGKILL") as info:
            world.run(be_killed)
        assert info.value.killed
        assert repr(world) == (
            "<LocalWorld of 2 processes, rank 1: its process was killed by SIGKILL>"
        )
        with pytest.raises(RankFailedError, match="rank 1 failed: its process was killed"):
            world.run(rank_of)
        assert world.on(0).run(rank_of) == 0


def test_a_simulated_rank_can_be_killed():
    with rankwire.local(2, simulated=True, faults=FaultPlan().kill(1)) as world:
        with pytest.raises(RankFailedError, match="rank 1 failed: it was killed"):
            world.run(rank_of)
        assert repr(world) == "<LocalWorld of 2 simulated ranks, rank 1: it was killed>"


def test_a_world_that_cannot_form_says_why_and_leaves_nothing():
    with pytest.raises(RankFailedError, match="ConfigurationError: transport is"):
        rankwire.local(2, transport="pigeon")
    with pytest.raises(rankwire.InvalidWorldSizeError):
        rankwire.local(0)


# -- ending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("simulated", [False, True])
def test_a_world_that_is_closed_is_gone_and_says_so(simulated):
    world = rankwire.local(1, simulated=simulated)
    running = world.on(0).start(lambda backend: backend.rank)
    running.result(20)
    world.close()
    world.close()
    assert world.closed
    assert repr(world).endswith(", closed>")
    with pytest.raises(rankwire.ChannelClosedError, match="this world is closed"):
        world.run(rank_of)


def test_closing_interrupts_what_runs():
    with rankwire.local(1) as world:
        running = world.on(0).start(lambda backend: time.sleep(60))
    with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
        running.result(0)


PROGRAM = """
import os, sys, time, rankwire
world = rankwire.local(2)
print(*world.run(lambda backend: os.getpid()), flush=True)
"""


def start(rest, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + rest)
    return subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def are_gone(pids):
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_program_that_ends_without_closing_takes_its_ranks_with_it(tmp_path):
    with start("world.on(1).start(lambda backend: time.sleep(60))", tmp_path) as program:
        out, err = program.communicate(timeout=50)
    assert (program.returncode, err) == (0, "")
    assert are_gone(out.split())


@pytest.mark.slow
def test_a_program_that_is_killed_takes_its_ranks_with_it(tmp_path):
    with start("world.run(lambda backend: time.sleep(60))", tmp_path) as program:
        pids = program.stdout.readline().split()
        program.kill()
    until(lambda: are_gone(pids))


def test_ctrl_c_interrupts_the_ranks_and_the_world_stays(tmp_path):
    rest = """
def wait(backend):
    print("waiting")
    time.sleep(60)
try:
    world.run(wait)
except KeyboardInterrupt:
    print("interrupted", *world.run(lambda backend: backend.rank))
"""
    with start(rest, tmp_path) as program:
        program.stdout.readline()
        assert sorted(program.stdout.readline() for _ in range(2)) == [
            "[rank 0] waiting\n",
            "[rank 1] waiting\n",
        ]
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=50)
    assert (program.returncode, out, err) == (0, "interrupted 0 1\n", "")


def test_ctrl_c_twice_interrupts_the_ranks_too(processes):
    def wait(backend):
        time.sleep(60)

    for _ in range(3):
        for seconds in (0.2, 0.201):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                processes.run(wait)
            time.sleep(0.05)
        except KeyboardInterrupt:  # the second one
            pass
        until(lambda: is_idle(processes))


def is_idle(world):
    try:
        return world.run(rank_of) == [0, 1]
    except rankwire.ConfigurationError:
        return False


def test_a_forked_child_cannot_use_it(processes):
    pid = os.fork()
    if not pid:
        try:
            processes.run(rank_of)
        except rankwire.ForkedProcessError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert processes.run(rank_of) == [0, 1]


# -- a real notebook -------------------------------------------------------------------------------

CELLS = (
    "import rankwire; world = rankwire.local(2); world",
    "def greet(backend):\n    print('hello'); return backend.rank\n\nworld.run(greet)",
    "def fail(backend):\n    return 1 / backend.rank\n\nworld.run(fail)",
    "import time; world.run(lambda backend: (print('asleep'), time.sleep(60)))",
    "world.run(greet)",
)


# In a process of its own: what speaks to a kernel leaves descriptors behind.
NOTEBOOK = """
import json, sys, time
import jupyter_client

def run_cell(code):
    request, shown = client.execute(code), []
    while True:
        message = client.get_iopub_msg(timeout=50)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                before = "".join(shown).count("asleep")
                shown.append(content["text"])
                if before < 2 <= "".join(shown).count("asleep"):
                    manager.interrupt_kernel()
            case "execute_result":
                shown.append(content["data"]["text/plain"])
            case "error":
                shown.append("\\n".join(content["traceback"]))
            case "status" if content["execution_state"] == "idle":
                return "\\n".join(shown)

manager = jupyter_client.KernelManager(kernel_name="python3")
manager.start_kernel()
client = manager.client()
client.start_channels()
try:
    client.wait_for_ready(timeout=30)
    print(json.dumps([run_cell(cell) for cell in json.load(sys.stdin)]))
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""


@pytest.mark.slow
def test_a_notebook_has_the_ranks_output_in_the_cell_and_can_be_interrupted():
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        input=json.dumps(CELLS),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout)
    assert "<LocalWorld of 2 processes>" in texts[0]
    for text in (texts[1], texts[4]):
        assert "[rank 0] hello" in text
        assert "[rank 1] hello" in text
        assert "[0, 1]" in text
    assert "return 1 / backend.rank" in texts[2]
    assert "rank 0 failed: ZeroDivisionError" in texts[2]
    assert "KeyboardInterrupt" in texts[3]


# -- tasks -----------------------------------------------------------------------------------------


def inverse(number):
    return 1 / number


def test_tasks_run_on_all_ranks_and_fail_alone(world):
    outcomes = sorted(world.map(inverse, range(10)), key=lambda outcome: outcome.index)
    assert [outcome.task for outcome in outcomes] == list(range(10))
    assert isinstance(outcomes[0].error, ZeroDivisionError)
    assert [outcome.value for outcome in outcomes[1:]] == [1 / n for n in range(1, 10)]
    assert {outcome.rank for outcome in outcomes} <= {0, 1}


def test_tasks_of_a_rank_that_died_fail_and_the_others_go_on():
    def work(task):
        if task == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with rankwire.local(2) as world:
        told = []
        outcomes = list(world.map(work, range(20), progress=lambda *args: told.append(args)))
        errors = {outcome.task: outcome.error for outcome in outcomes if outcome.error is not None}
        assert list(errors) == [2]
        assert isinstance(errors[2], RankFailedError)
        assert told[-1] == (20, 20)
        outcomes = list(world.map(work, [2, 3, 4]))
        assert all(isinstance(outcome.error, RankFailedError) for outcome in outcomes)
        assert len(outcomes) == 3


def test_a_task_that_cannot_be_sent_fails_alone(processes):
    outcomes = list(processes.map(inverse, [threading.Lock(), 2]))
    assert sorted(outcome.error is None for outcome in outcomes) == [False, True]


def test_leaving_the_loop_interrupts_the_ranks(processes):
    begin = time.monotonic()
    for outcome in processes.map(time.sleep, [0, 60, 60, 60]):
        assert outcome.task == 0
        break
    del outcome
    assert processes.run(rank_of) == [0, 1]
    assert time.monotonic() - begin < 20
