"""The command line: what it says about itself, and what it refuses."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

import pytest

from rankwire import __version__
from rankwire.cli import main


class Done(NamedTuple):
    exit_code: int
    output: str


def rankwire(*args: str) -> Done:
    output = io.StringIO()
    with (
        patch.object(sys, "argv", ["rankwire", *args]),
        redirect_stdout(output),
        redirect_stderr(output),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Done(ended.value.code, output.getvalue())


def test_python_m_rankwire_version():
    command = [sys.executable, "-m", "rankwire", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == f"rankwire {__version__}\n"


def test_help_lists_the_commands():
    done = rankwire("--help")
    assert done.exit_code == 0
    assert "run" in done.output
    assert "doctor" in done.output
    assert "certificates" in done.output


def test_help_of_run_tells_what_matters():
    done = rankwire("run", "-h")
    assert done.exit_code == 0
    told = ("-n", "-m", "--grace", "--no-prefix", "--log-dir", "SIGTERM", "Ctrl-C", "connect()")
    several = ("--nnodes", "--node-rank", "--master", "--secret-file", "--restarts", "--tls")
    for word in (*told, *several, "RANKWIRE_RANK", "rankwire run -n 4 train.py"):
        assert word in done.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "script.py"], "-n"),
        (["run", "-n", "0", __file__], "Invalid value"),
        (["run", "-n", "2", "missing.py"], "no script 'missing.py'"),
        (["run", "-n", "2", "json.tool"], "write -m json.tool"),
        (["run", "-n", "2", "--log-dir", __file__, __file__], "--log-dir"),
    ],
)
def test_refusals(args, words):
    done = rankwire(*args)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


def test_certificates_are_refused_where_there_are_some_and_without_the_extra(tmp_path, monkeypatch):
    done = rankwire("certificates", str(tmp_path), "-n", "2")
    assert done.exit_code == 2
    assert "exists" in done.output
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "rankwire.launch.certificates", raising=False)
    done = rankwire("certificates", str(tmp_path / "tls"), "-n", "2")
    assert done.exit_code == 2
    assert "pip install 'rankwire[tls]'" in done.output
    assert not (tmp_path / "tls").exists()
