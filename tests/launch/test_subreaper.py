"""Processes that left their parent's group, found again by descent."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from rankwire.launch import process as module
from rankwire.launch.process import Subreaper


class Told:
    """What a reaper is told."""

    pid = 0

    def __init__(self) -> None:
        self.adopted: list[int] = []
        self.forgotten: list[int] = []
        self.adopt = self.adopted.append
        self.forget = self.forgotten.append


DAEMON = "setsid sleep 60 >/dev/null 2>&1 & echo $!"


@pytest.fixture
def subreaper() -> Iterator[Subreaper]:
    with contextlib.closing(Subreaper(Told())) as made:
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


def test_an_orphan_is_found_ended_and_collected(bystander, subreaper):
    """And a child that was there before is left alone."""
    told = subreaper.reaper
    pid = start_daemon()
    subreaper.collect(())
    assert subreaper.find(()) == told.adopted == [pid]
    assert subreaper.find({pid}) == []  # ended with its group
    assert subreaper.send(signal.SIGKILL, ())
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end
        subreaper.collect(())
        time.sleep(0.01)
    assert subreaper.find(()) == []
    assert told.forgotten == [pid]
    assert os.path.exists(f"/proc/{bystander}")


def test_ranks_are_not_collected(subreaper):
    process = subprocess.Popen(["sh", "-c", "exit 3"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    subreaper.collect({process.pid})
    assert process.wait() == 3


def test_where_children_cannot_be_listed_nothing_is_found(monkeypatch, bystander):
    monkeypatch.setattr(module, "_can_list_children", lambda: False)
    subreaper = Subreaper(Told())
    assert not subreaper.is_adopting
    assert subreaper.find(()) == []
    subreaper.collect(())
    subreaper.close()
