"""The reaper, alone: what it ends when its launcher is gone, and what it leaves."""

import subprocess

from rankwire.launch.reaper import Reaper


def start() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_ranks_and_what_was_adopted_is_ended_when_the_launcher_is_gone():
    rank, gone, adopted, forgotten = processes = [start() for _ in range(4)]
    reaper = Reaper(0.1)
    reaper.watch(rank.pid, None)
    reaper.watch(gone.pid, None)
    reaper.forget(gone.pid)
    reaper.adopt(adopted.pid)
    reaper.adopt(forgotten.pid)
    reaper.forget(forgotten.pid)
    reaper._process.stdin.close()  # as the kernel does
    reaper._process.wait(10)
    assert [rank.wait(5), adopted.wait(5)] == [-15, -15]
    assert [process.poll() for process in (gone, forgotten)] == [None, None]
    for process in processes:
        process.kill()
        process.wait()
    reaper.close()


def test_no_process_is_ended_when_all_have_ended():
    rank = start()
    with Reaper(0.1) as reaper:
        reaper.watch(rank.pid, None)
    assert rank.poll() is None
    rank.kill()
    rank.wait()
