"""Whether the kernel says that it killed for want of memory."""

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from rankwire.launch.process import OomCounter


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/job/7\n", "sys/fs/cgroup/job/7/memory.events"),
        ("0::/as/the/host/sees/it\n", "sys/fs/cgroup/memory.events"),
        ("4:cpu,memory:/x\n0::/\n", "sys/fs/cgroup/memory/x/memory.oom_control"),
        ("0::/\n", "proc/vmstat"),
    ],
)
def test_the_nearest_counter_is_asked(tmp_path, cgroup, counter):
    write(tmp_path, "proc/self/cgroup", cgroup)
    path = write(tmp_path, counter, "low 0\noom_kill 3\n")
    memory = OomCounter(tmp_path)
    assert not memory.has_grown()
    path.write_text("low 0\noom_kill 4\n")
    assert memory.has_grown()
    assert not memory.has_grown()


def test_without_a_counter_no_growth_is_reported(tmp_path):
    assert not OomCounter(tmp_path).has_grown()


@pytest.fixture
def small_group():
    """A memory cgroup of 200 MB, by the file to write a process id into."""
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / f"rankwire-test-{secrets.token_hex(4)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text("200000000")
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            yield group / "cgroup.procs"
        except OSError:
            continue
        finally:
            group.rmdir()
        return
    pytest.skip("memory cgroups cannot be made here (needs root and a writable /sys/fs/cgroup)")


@pytest.mark.fault(53, "a rank killed for want of memory is named, with that reason")
def test_row_53_a_rank_that_is_out_of_memory(tmp_path, small_group):
    script = tmp_path / "greedy.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANKWIRE_RANK'] == '1':\n"
        "    time.sleep(0.3)\n"
        "    hoard = [bytearray(os.urandom(1 << 20)) for _ in range(400)]\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "rankwire", "run", "-n", "2", str(script)]
    done = subprocess.run(
        ["sh", "-c", f'echo $$ > {small_group} && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 137, done
    assert "rank 1 failed first: killed by SIGKILL by the kernel: out of memory" in done.stderr
