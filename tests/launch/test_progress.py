"""Progress bars of ranks: redrawn on a terminal, a line every few seconds elsewhere."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

import rankwire
from children import Child
from launched import COMMAND
from rankwire.launch.lines import PROGRESS_EVERY, StreamLines

# Draws as tqdm does. It stops at 50 % until the test has seen that.
PROGRAM = r"""
import os, sys, time
rank, folder = int(os.environ["RANKWIRE_RANK"]), os.path.dirname(os.path.abspath(__file__))

def draw(percent):
    sys.stderr.write(f"\r{percent:3d}%|{'#' * (percent // 10):10}| rank {rank}")

for percent in range(51):
    draw(percent)
    time.sleep(0.002)
print("half of rank", rank)
while not os.path.exists(os.path.join(folder, "go on")):
    time.sleep(0.01)
for percent in range(51, 101):
    draw(percent)
    time.sleep(0.002)
sys.stderr.write("\n")
"""
RICH_PROGRAM = r"""
from rich.console import Console
from rich.progress import Progress

with Progress(console=Console(force_terminal=True, width=45), auto_refresh=False) as progress:
    tasks = [progress.add_task(name, total=20) for name in ("first", "second")]
    for _ in range(20):
        for task in tasks:
            progress.advance(task)
        progress.refresh()
"""


def bar(percent, rank):
    return f"[rank {rank}] {percent:3d}%|{'#' * (percent // 10):10}| rank {rank}"


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


# -- on a terminal


class Terminal:
    """A program on a terminal of 24 rows and 60 columns, and what its screen shows."""

    def __init__(self, command):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        # Readline sets COLUMNS in workers of pytest; it would override the size of the terminal.
        inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        variables = inherited | {"TERM": "xterm", "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables
        )
        os.close(theirs)
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unfinished = ""  # the beginning of a control
        self._rows = [""]
        self._row = self._column = 0

    def read_until(self, condition, seconds=30.0):
        end = time.monotonic() + seconds
        while not condition(self.screen):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"it did not come; the screen is {self.screen}"
            assert self._read(), f"the program has ended; the screen is {self.screen}"

    def end(self):
        while self._read():
            pass
        return self._process.wait(15.0)

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    @property
    def screen(self):
        return [row.rstrip() for row in self._rows if row.strip()]

    def _read(self):
        with contextlib.suppress(OSError):  # the last process that had the other end is gone
            text = self._decoder.decode(os.read(self._ours, 65536))
            self.written += text
            text = self._unfinished + text
            self._unfinished = re.search(r"(\x1b(\[[\d;?]*)?)?\Z", text)[0]
            self._show(text.removesuffix(self._unfinished))
            return True
        return False

    def _show(self, text):
        for control, up, plain in re.findall(
            r"(\r|\n|\x1b\[(\d+)A|\x1b\[[JK]|\x1b\[[\d;?]*[a-zA-Z])|([^\r\n\x1b]+)", text
        ):
            row = self._rows[self._row]
            if plain:
                self._rows[self._row] = (
                    row[: self._column] + plain + row[self._column + len(plain) :]
                )
                self._column += len(plain)
                assert self._column < 60, "the row would go on in the next one"
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._row += 1
                self._rows += [""] * (self._row == len(self._rows))
            elif up:
                self._row -= int(up)
                assert self._row >= 0
            elif control in ("\x1b[J", "\x1b[K"):
                self._rows[self._row :] = [row[: self._column]]


@pytest.fixture
def terminal():
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            made = Terminal([*COMMAND, *arguments])
            stack.callback(made.close)
            return made

        yield start


def test_on_a_terminal_each_rank_redraws_its_own_line(terminal, program, tmp_path):
    started = terminal("-n", "2", program(PROGRAM))
    half = [bar(50, rank) for rank in range(2)]
    started.read_until(lambda screen: half == [line for line in screen if "|" in line])
    assert [line for line in started.screen if "half" in line], "lines are above the bars"
    (tmp_path / "go on").touch()
    assert started.end() == 0
    lines = {f"[rank {rank}] half of rank {rank}" for rank in range(2)}
    assert set(started.screen) == lines | {bar(100, 0), bar(100, 1)}
    assert len(started.screen) == 4
    assert started.written.count("| rank 0") < 150, "not for each rank that changes"


def test_more_bars_than_the_terminal_has_rows_are_counted(terminal, program, tmp_path):
    started = terminal("-n", "30", program(PROGRAM))
    started.read_until(
        lambda screen: (
            [line for line in screen if "|" in line] == [bar(50, rank) for rank in range(21)]
            and "(9 more)" in screen
        ),
        seconds=60.0,
    )
    (tmp_path / "go on").touch()
    assert started.end() == 0
    assert {bar(100, rank) for rank in range(30)} <= set(started.screen)


def test_the_rows_of_rich_are_redrawn(terminal, program):
    started = terminal("-n", "1", program(RICH_PROGRAM))
    assert started.end() == 0
    ended = [line for line in started.screen if "100%" in line]
    assert [line.split()[2] for line in ended] == ["first", "second"]
    assert len(started.screen) <= 4, "only the first state is left behind"


def test_a_bar_that_is_wider_than_the_terminal_is_cut(terminal, program, tmp_path):
    """Behind the last column the terminal would begin another row, which is not redrawn."""
    wide = PROGRAM.replace("{'#' * (percent // 10):10}", "{'漢字' * 20 if percent < 100 else ''}")
    started = terminal("-n", "1", program(wide))
    half = f"[rank 0]  50%|{'漢字' * 11}"
    started.read_until(lambda screen: half in screen)
    (tmp_path / "go on").touch()
    assert started.end() == 0
    assert started.screen == ["[rank 0] half of rank 0", "[rank 0] 100%|| rank 0"]


# -- elsewhere


def test_in_a_pipe_a_bar_is_a_line_every_few_seconds(program, tmp_path):
    """Also when it stops: its last state is printed then."""
    began = time.monotonic()
    child = Child([*COMMAND, "-n", "1", program(PROGRAM)])
    try:
        lines = []
        for line in child.stderr:
            lines.append(line.rstrip("\n"))
            if lines[-1] == bar(50, 0):
                break
        (tmp_path / "go on").touch()
        stdout, stderr = child.communicate(30)
    finally:
        child.close()
    lines += stderr.splitlines()
    assert lines[0].startswith("[rank 0]   ")
    assert lines.count(bar(50, 0)) == 1
    assert lines[-1] == bar(100, 0)
    assert len(lines) <= 3 + (time.monotonic() - began) / PROGRESS_EVERY
    assert stdout == "[rank 0] half of rank 0\n"


def test_the_log_of_a_rank_has_all_that_it_wrote(program, tmp_path):
    (tmp_path / "go on").touch()
    logs = str(tmp_path / "logs")
    ended = Child([*COMMAND, "-n", "1", "--log-dir", logs, program(PROGRAM)]).result(30)
    assert ended.returncode == 0
    assert (tmp_path / "logs" / "rank_0.log").read_bytes().count(b"\r") == 101


def test_in_a_local_world_a_bar_is_a_line_every_few_seconds(capsys):
    def draw(backend):
        for percent in range(101):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\n")

    began = time.monotonic()
    with rankwire.local(2) as world:
        world.run(draw)
    lines = capsys.readouterr().err.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine[-1] == f"[rank {rank}] 100%"
        assert len(mine) <= 3 + (time.monotonic() - began) / PROGRESS_EVERY


# -- when a line is due


def test_rows_are_due_at_first_and_then_every_few_seconds_if_they_changed():
    lines = StreamLines()
    assert lines.due(100.0) == []

    def due(written, now):
        assert lines.feed(written) == []
        return lines.due(now)

    assert due(b"\r1%", 100.0) == [b"1%"]
    assert due(b"\r2%", 100.1) == []
    assert due(b"\r3%", 100.0 + PROGRESS_EVERY) == [b"3%"]
    assert lines.due(200.0) == []
    assert due(b"\x1b[Aouter", 200.0) == [b"outer"]


def test_a_row_that_was_printed_is_not_printed_again_when_it_is_complete():
    lines = StreamLines()
    lines.feed(b"\r100%\x1b[Aouter")
    assert lines.due(0.0) == [b"outer", b"100%"]
    assert lines.feed(b"\n\n\n100%\n") == [b"100%"]
    assert lines.feed(b"100%\n") == [b"100%"]
