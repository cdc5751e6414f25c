"""Debugging one rank: it gets the launcher's terminal, and breakpoint() elsewhere says how."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launched import COMMAND
from rankwire.launch import process
from rankwire.launch.process import BREAKPOINT_HOOK, Terminal
from worlds import eventually

PROGRAM = """
import os, sys
import rankwire
with rankwire.connect() as backend:
    value = 40 + backend.rank
    breakpoint()
    print("rank", backend.rank, "has", value, flush=True)
    backend.barrier()
"""


LINE_OF_A_RANK = re.compile(r"\[rank \d+\] [^\n]*\n")


class Screen:
    """A program in a terminal of its own, and somebody who types there."""

    def __init__(self, command):
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_have_terminal,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, words, seconds=30.0):
        end = time.monotonic() + seconds
        # A line of another rank may come in the middle of what the debugger writes.
        while words not in self.text and words not in LINE_OF_A_RANK.sub("", self.text):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words!r} did not come; there is {self.text!r}"
            try:
                self.text += os.read(self._ours, 65536).decode()
            except OSError:  # the last who had the other end is gone
                assert words in self.text, f"{words!r} did not come; there is {self.text!r}"

    def read_prompt(self):
        """Read up to the debugger's prompt, and until it waits there for what is typed.

        An interrupt between the two is not lost, but readline looks for it only with the next key:
        the debugger of a program without rankwire does the same.
        """
        self.read_until("(Pdb)")
        stat = Path(f"/proc/{os.tcgetpgrp(self._ours)}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")

    def type(self, text):
        os.write(self._ours, text.encode())

    def end(self):
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self.text += data.decode()
        return self.process.wait(15.0)

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(15.0)
        os.close(self._ours)


def _have_terminal():
    os.setsid()
    # The first terminal that a session leader opens is its own.
    os.close(os.open(os.ttyname(0), os.O_RDWR))


@pytest.fixture
def screen(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    screens = []

    def start(*options):
        screens.append(Screen([*COMMAND, "-n", "2", *options, str(script)]))
        return screens[-1]

    yield start
    for each in screens:
        each.close()


def test_the_debugged_rank_has_the_terminal_and_the_others_pass_by(screen):
    terminal = screen("--debug-rank", "1")
    terminal.read_until("(Pdb)")
    terminal.type("p value * 2\n")
    terminal.read_until("82")
    terminal.type("value = 7\n")
    terminal.type("continue\n")
    assert terminal.end() == 0, terminal.text
    assert "rank 1 has 7" in terminal.text
    assert "rank 0 has 40" in terminal.text
    assert "passed by" not in terminal.text


def test_an_interrupt_goes_to_the_debugged_rank(screen):
    terminal = screen("--debug-rank", "1")
    terminal.read_prompt()
    terminal.type("\x03")
    terminal.read_until("--KeyboardInterrupt--")
    terminal.type("p 'still ' + 'here'\n")
    terminal.read_until("'still here'")
    terminal.type("continue\n")
    assert terminal.end() == 0, terminal.text


def test_the_job_ends_when_the_debugger_is_quit(screen):
    terminal = screen("--debug-rank", "1")
    terminal.read_until("(Pdb)")
    terminal.type("quit\n")
    assert terminal.end() != 0
    assert "rank 1 failed first" in terminal.text


def test_without_debug_rank_breakpoints_say_how_to_debug_and_the_program_goes_on(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [*COMMAND, "-n", "2", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        (line,) = [line for line in done.stderr.splitlines() if f"--debug-rank {rank}" in line]
        assert line.startswith(f"[rank {rank}] breakpoint() at {script}:6 ")


def test_a_rank_outside_the_world_cannot_be_debugged(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [*COMMAND, "-n", "2", "--debug-rank", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--debug-rank 2: there are ranks 0 to 1" in done.stderr


def test_without_a_terminal_giving_it_to_a_rank_does_nothing():
    """As in a job of a scheduler: the rank has the launcher's stdin, whatever that is."""
    Terminal().take_back()
    code = "from rankwire.launch.process import Terminal; t = Terminal(); t.give(0); t.take_back()"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, start_new_session=True, check=False
    )
    assert done.returncode == 0


def stop_twice():
    for _ in range(2):
        breakpoint()


def test_it_says_once_for_each_place_how_to_debug_that_rank(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONBREAKPOINT", BREAKPOINT_HOOK)
    monkeypatch.setenv("RANKWIRE_RANK", "1")
    monkeypatch.setattr(process, "_seen", set())
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    stop_twice()
    breakpoint()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(f"{os.path.basename(__file__)}:" in line for line in lines)
    assert all("rankwire run --debug-rank 1 ..." in line for line in lines)


def test_it_says_nothing_while_another_rank_is_debugged(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONBREAKPOINT", BREAKPOINT_HOOK)
    monkeypatch.setenv("RANKWIRE_DEBUG_RANK", "0")
    monkeypatch.setattr(process, "_seen", set())
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    stop_twice()
    assert capsys.readouterr().err == ""
