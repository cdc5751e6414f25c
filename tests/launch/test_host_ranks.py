"""The ranks of one host, driven by hand in this process."""

import selectors
from contextlib import closing
from pathlib import Path

import pytest

from rankwire.launch.host_ranks import HostRanks, LaunchedRank
from rankwire.launch.output import Loop, Output
from rankwire.launch.process import Subreaper
from rankwire.launch.reaper import Reaper
from rankwire.launch.run_options import JobHosts, Program, RunOptions
from rankwire.rendezvous.launchers import Start

HOSTS = JobHosts(master="127.0.0.1:1")


@pytest.fixture
def ranks(tmp_path: Path):
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    with (
        selectors.PollSelector() as selector,
        Reaper(0.1) as reaper,
        closing(Subreaper(reaper)) as subreaper,
    ):
        output = Output(selector)
        options = RunOptions([Program([str(tmp_path / "script.py")], 2)], hosts=HOSTS, grace=0.1)
        local = HostRanks(options, Loop(selector, list, output), subreaper, b"x" * 32)
        local.start(Start(2, 0, "job", 0))
        yield local
        local.close()
        output.close()


def test_ranks_that_are_slow_to_die_can_be_killed_again(ranks, monkeypatch):
    """SIGKILL waits for a process that is inside the kernel, such as for a dead file server."""
    monkeypatch.setattr(LaunchedRank, "send_group", lambda self, number: True)
    ranks.kill()
    ranks.kill()
    assert (ranks.stopped, ranks.killed) == ([], [0, 1])
    said = bytes(ranks._loop.output._stderr.pending)
    assert b"killed already, but blocked in the kernel: ranks 0, 1\n" in said
