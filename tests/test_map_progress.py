"""How many tasks are done, on a terminal, elsewhere, and told to a function."""

import io
import sys

import pytest

from clocks import FastClock
from rankwire.clock import REAL_TIME
from rankwire.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, show=True, tasks=range(4), clock=REAL_TIME):
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(show, tasks, "score", clock)
    for task in range(4):
        progress.note(failed=task == 2)
    progress.end()
    progress.end()
    return stream.getvalue()


def test_a_terminal_has_one_row(monkeypatch):
    text = shown(monkeypatch, Terminal())
    rows = text.split("\r\x1b[K")
    assert rows[0] == ""
    assert rows[1].startswith("score ━")
    assert "1 of 4" in rows[1]
    assert "4 of 4, 1 failed" in rows[-1]
    assert text.endswith("/s\n")
    assert text.count("\n") == 1


def test_elsewhere_there_are_lines(monkeypatch):
    text = shown(monkeypatch, io.StringIO(), tasks=iter(range(4)))
    assert text.startswith("score: 4, 1 failed, ")
    assert text.count("\n") == 1
    text = shown(monkeypatch, io.StringIO(), clock=FastClock(1e7))
    assert text.count("\n") == 4


def test_nothing_is_shown_unless_wanted(monkeypatch):
    assert shown(monkeypatch, io.StringIO(), show=False) == ""


def test_a_closed_stderr_does_no_harm(monkeypatch):
    stream = Terminal()
    stream.close()
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress(True, [1], "score", REAL_TIME)
    for stderr in (stream, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        progress.note(failed=False)
    progress.end()


def test_an_error_of_the_function_is_raised():
    def fail(done, total):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Progress(fail, [], "score", REAL_TIME).note(failed=False)
