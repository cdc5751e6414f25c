"""rankwire doctor, with a real world."""

import json
import os
import subprocess
import sys

import pytest

from rankwire.launch import doctor

DOCTOR = [sys.executable, "-m", "rankwire", "doctor", "--megabytes", "4"]


def examine(*options: str, command: list[str] = DOCTOR, **variables: str):
    return subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | variables,
    )


def test_every_link_in_numbers():
    done = examine("-n", "3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sorted((cell["src"], cell["dst"]) for cell in report["cells"]) == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1),
    ]  # fmt: skip
    for cell in report["cells"]:
        assert cell["transport"] == "unix"
        assert cell["latency"] > 0
        assert cell["bandwidth"] > 0
    assert [fact["rank"] for fact in report["facts"]] == [0, 1, 2]


class _AskedError(Exception):
    pass


def test_messages_above_the_usual_limit_can_be_measured(monkeypatch):
    """Else the network would be blamed for our own limit."""
    asked = {}

    def connect(**options):
        asked.update(options)
        raise _AskedError

    monkeypatch.setattr(doctor, "connect", connect)
    with pytest.raises(_AskedError):
        doctor.main(["--nbytes", str(2000 << 20)])
    assert asked["max_message_nbytes"] == 2000 << 20


def test_a_table_for_people():
    done = examine("-n", "3", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" us") >= 6
    assert "GB/s" in done.stdout
    assert "from row to column" in done.stdout
    assert "\x1b[" not in done.stdout


@pytest.mark.slow
def test_in_a_world_of_another_start():
    command = [sys.executable, "-m", "rankwire", "run", "-n", "2", "-m", "rankwire.launch.doctor"]
    done = examine("--nbytes", "100000", command=command)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] from row to column" in done.stdout


@pytest.mark.slow
def test_too_few_files_for_the_world_is_bad():
    limited = ["sh", "-c", 'ulimit -n 60; exec "$@"', "sh", *DOCTOR]
    done = examine("-n", "2", command=limited)
    assert done.returncode == 1
    assert "bad: a rank on" in done.stdout
    assert "change: ulimit -n" in done.stdout


@pytest.mark.parametrize("option", ["0", "1"])
def test_a_world_needs_two(option):
    done = examine("-n", option)
    assert done.returncode == 2
