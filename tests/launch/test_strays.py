"""Processes that left their parent's group, found again by descent."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from rankwire.launch import strays as module
from rankwire.launch.strays import Strays


class Told:
    """What a reaper is told."""

    pid = 0

    def __init__(self) -> None:
        self.adopted: list[int] = []
        self.disowned: list[int] = []
        self.adopt = self.adopted.append
        self.disown = self.disowned.append


DAEMON = "setsid sleep 60 >/dev/null 2>&1 & echo $!"


@pytest.fixture
def strays() -> Iterator[Strays]:
    with contextlib.closing(Strays(Told())) as made:
        if not made.is_adopting:
            pytest.skip("this kernel does not let a process adopt others")
        yield made


@pytest.fixture
def bystander() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def start_daemon() -> int:
    done = subprocess.run(["sh", "-c", DAEMON], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def test_an_orphan_is_found_ended_and_collected(bystander, strays):
    """And a child that was there before is left alone."""
    told = strays._reaper
    pid = start_daemon()
    strays.collect(())
    assert strays.find(()) == told.adopted == [pid]
    assert strays.find({pid}) == []  # ended with its group
    assert strays.send(signal.SIGKILL, ())
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end
        strays.collect(())
        time.sleep(0.01)
    assert strays.find(()) == []
    assert told.disowned == [pid]
    assert os.path.exists(f"/proc/{bystander}")


def test_ranks_are_not_collected(strays):
    process = subprocess.Popen(["sh", "-c", "exit 3"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    strays.collect({process.pid})
    assert process.wait() == 3


def test_where_children_cannot_be_listed_nobody_is_a_stray(monkeypatch, bystander):
    monkeypatch.setattr(module, "_can_list_children", lambda: False)
    strays = Strays(Told())
    assert not strays.is_adopting
    assert strays.find(()) == []
    strays.collect(())
    strays.close()
