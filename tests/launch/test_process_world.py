"""The processes of a world that a program has started: what they print, say, and leave behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rankwire.launch.process_world import ProcessWorld
from rankwire.testing import in_parallel
from rankwire.testing.conformance.tools import until


@pytest.fixture(scope="module")
def world():
    world = ProcessWorld(1, {})
    yield world
    world.close()


@pytest.fixture
def rank(world):
    return world.ranks[0]


def outcome(world, future):
    assert world.printer.print_until(future.done, 30)
    return future.result()


def print_much(backend):
    for number in range(1000):
        print("line", number)
    print("no end of line", end="", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)


def test_all_that_is_printed_before_the_end_is_shown_before_it(world, rank, capfd):
    assert outcome(world, rank.start(print_much, ())).returned
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert sorted(lines)[:1] == ["[rank 0] from a child"]
    assert [line for line in lines if "line" in line] == [
        f"[rank 0] line {number}" for number in range(1000)
    ]
    assert err == ""  # that line goes on
    outcome(world, rank.start(lambda backend: sys.stderr.write(" yet\n"), ()))
    assert capfd.readouterr().err == "[rank 0] no end of line yet\n"


def test_an_interrupt_reaches_a_function_that_has_not_begun_and_none_after_it(world, rank):
    running = rank.start(lambda backend: time.sleep(60), ())
    assert rank.interrupt()
    assert isinstance(outcome(world, running).error, KeyboardInterrupt)
    assert not rank.interrupt()
    for _ in range(20):
        running = rank.start(lambda backend: backend.rank, ())
        rank.interrupt()
        assert isinstance(outcome(world, running).error, (KeyboardInterrupt, type(None)))
        assert outcome(world, rank.start(lambda backend: "well", ())).value == "well"


MODULE = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
if os.getpid() != {starter}:
    with open(here / "imported", "a") as imported:
        imported.write("once ")
    while not (here / "go").exists():
        time.sleep(0.01)
def function(backend):
    return (here / "imported").read_text()
"""


def test_an_interrupt_does_not_leave_a_module_half_imported(tmp_path, monkeypatch):
    (tmp_path / "imported_slowly.py").write_text(MODULE.format(starter=os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    from imported_slowly import function

    world = ProcessWorld(1, {})
    try:
        rank = world.ranks[0]
        running = rank.start(function, ())
        until((tmp_path / "imported").exists)
        rank.interrupt()
        outcome(world, rank.ask_for_stacks())  # it has heard of the interrupt
        (tmp_path / "go").touch()
        assert isinstance(outcome(world, running).error, KeyboardInterrupt)
        assert outcome(world, rank.start(function, ())).value == "once "
    finally:
        world.close()


def test_stacks_can_be_read_while_a_function_runs(world, rank):
    def hang(backend):
        time.sleep(60)

    running = rank.start(hang, ())
    until(lambda: "in hang" in outcome(world, rank.ask_for_stacks()))
    rank.interrupt()
    outcome(world, running)


def test_exit_in_a_function_is_an_error_of_it_and_the_process_stays(world, rank):
    assert isinstance(outcome(world, rank.start(lambda backend: sys.exit(3), ())).error, SystemExit)
    assert outcome(world, rank.start(lambda backend: "here", ())).value == "here"


def test_a_function_runs_in_the_main_thread_without_input(world, rank):
    def look(backend):
        return threading.current_thread() is threading.main_thread(), sys.stdin.read()

    assert outcome(world, rank.start(look, ())).value == (True, "")


def test_what_a_rank_has_started_ends_with_it():
    world = ProcessWorld(1, {})
    try:
        started = world.ranks[0].start(lambda backend: subprocess.Popen(["sleep", "60"]).pid, ())
        pid = outcome(world, started).value
        os.kill(world.ranks[0].pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))
    finally:
        world.close()
    assert world.ranks[0].ended == "its process was killed by SIGKILL"


def _is_zombie(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_many_runs_and_interrupts_from_several_threads():
    world = ProcessWorld(2, {})
    over = threading.Event()
    ended = [0, 0]

    def run_on(rank):
        for number in range(150):
            told = outcome(world, world.ranks[rank].start(nap, (number % 3 / 1000, number)))
            assert told.value == number or isinstance(told.error, KeyboardInterrupt), told
            ended[rank] += 1

    def interrupt():
        while not over.is_set():
            for rank in world.ranks:
                rank.interrupt()
            time.sleep(0.002)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        in_parallel([lambda: run_on(0), lambda: run_on(1)])
    finally:
        over.set()
        interrupting.join()
        world.close()
    assert ended == [150, 150]


def nap(backend, seconds, value):
    time.sleep(seconds)
    return value


def test_a_stopped_rank_does_not_keep_its_world_from_closing():
    world = ProcessWorld(2, {})
    os.kill(world.ranks[1].pid, signal.SIGSTOP)
    world.close(patience=0.2)
    assert all(rank.ended for rank in world.ranks)
    assert world.ranks[1].ended == "its process was killed by SIGKILL"
