"""breakpoint() in a rank without a terminal."""

import os
import sys

from rankwire.launch import breakpoints
from rankwire.launch.breakpoints import HOOK


def stop_twice():
    for _ in range(2):
        breakpoint()


def test_it_says_once_for_each_place_how_to_debug_that_rank(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONBREAKPOINT", HOOK)
    monkeypatch.setenv("RANKWIRE_RANK", "1")
    monkeypatch.setattr(breakpoints, "_seen", set())
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    stop_twice()
    breakpoint()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(f"{os.path.basename(__file__)}:" in line for line in lines)
    assert all("rankwire run --debug-rank 1 ..." in line for line in lines)


def test_it_says_nothing_while_another_rank_is_debugged(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONBREAKPOINT", HOOK)
    monkeypatch.setenv("RANKWIRE_DEBUG_RANK", "0")
    monkeypatch.setattr(breakpoints, "_seen", set())
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    stop_twice()
    assert capsys.readouterr().err == ""
