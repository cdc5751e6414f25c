"""What a session of tests has whatever started it, and what it tells about itself."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from nursery import nursery, wait
from rankwire.launch.process import Ending

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
TELL_IGNORED = (
    "import signal; print([n for n in (1, 2, 3, 15) if signal.getsignal(n) is signal.SIG_IGN])"
)


def test_no_signal_is_ignored_here_or_in_a_child():
    assert [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN] == []
    told = subprocess.run(
        [sys.executable, "-c", TELL_IGNORED], capture_output=True, text=True, check=True
    )
    assert told.stdout == "[]\n"


def test_nor_where_the_session_was_started_with_all_of_them_ignored():
    probe = f"{Path(__file__)}::{test_no_signal_is_ignored_here_or_in_a_child.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "--overview", "-p", "no:cacheprovider", probe]
    done = subprocess.run(
        ["sh", "-c", "trap '' HUP INT QUIT TERM; exec \"$@\"", "sh", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "100% of 1 tests" in done.stdout
    assert "where the time went" in done.stdout
    assert f"{probe.rpartition('/')[2]}\n" in done.stdout


def test_children_keep_their_bytecode():
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert not sys.dont_write_bytecode


def test_a_program_of_the_nursery_has_what_was_asked_for(tmp_path):
    program = "import os, sys; print(sys.argv[1:], os.getcwd(), sorted(os.environ)); sys.exit(3)"
    with nursery() as shared:
        arguments = ["-c", program, "x"]
        with contextlib.closing(
            shared.fork_program(arguments, {"A": "1"}, str(tmp_path))
        ) as forked:
            assert forked.pipes[0].read().decode() == f"['x'] {tmp_path} ['A']\n"
            assert wait(forked, 20.0) == Ending(code=3)
