"""The keeper, alone: what it ends when its launcher is gone, and what it leaves."""

import subprocess

from rankwire.launch.keeper import Keeper


def start() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_ranks_and_what_was_adopted_is_ended_when_the_launcher_is_gone():
    rank, gone, adopted, disowned = processes = [start() for _ in range(4)]
    keeper = Keeper(0.1)
    keeper.watch(rank.pid, None)
    keeper.watch(gone.pid, None)
    keeper.forget(gone.pid)
    keeper.adopt(adopted.pid)
    keeper.adopt(disowned.pid)
    keeper.disown(disowned.pid)
    keeper._process.stdin.close()  # as the kernel does
    keeper._process.wait(10)
    assert [rank.wait(5), adopted.wait(5)] == [-15, -15]
    assert [process.poll() for process in (gone, disowned)] == [None, None]
    for process in processes:
        process.kill()
        process.wait()
    keeper.close()


def test_nobody_is_ended_when_all_have_ended():
    rank = start()
    with Keeper(0.1) as keeper:
        keeper.watch(rank.pid, None)
    assert rank.poll() is None
    rank.kill()
    rank.wait()
