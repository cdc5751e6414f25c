"""Ranks that the launcher started: how they join, and what they print when they fall."""

import os

import pytest

from launched import PATIENT_COMMAND
from rankwire.observe.tracebacks import FULL_TRACEBACK
from worlds import free_port


def test_ranks_listen_where_the_environment_says(run):
    low = free_port()
    done = run(
        """
import rankwire
with rankwire.connect(transport="tcp") as backend:
    ports = rankwire.all_gather_object(backend, backend.mesh._me.port)
    assert len(set(ports)) == 2, ports
    print(*ports)
""",
        "--no-prefix",
        env=os.environ | {"RANKWIRE_LISTEN": f"127.0.0.1:{low}-{low + 50}"},
    )
    assert done.returncode == 0, done.stderr
    assert all(low <= int(port) <= low + 50 for port in done.stdout.split())


@pytest.mark.slow
def test_one_world_of_processes_after_another(run):
    done = run(
        """
from rankwire.backends.connect import connect
from rankwire.transports.security import Tls
for _ in range(3):
    with connect() as backend:
        backend.barrier()
        assert backend.rank == rank
        if rank == 0:
            time.sleep(0.1)  # the others are back before this world is closed
print(backend.world_size)
""",
        "--no-prefix",
        ranks=3,
    )
    assert (done.returncode, done.stdout) == (0, "3\n" * 3), done.stderr


KILLED = """
import os, signal, rankwire
backend = rankwire.connect()
backend.barrier()
if rank == 1:
    {end}
try:
    backend.recv(1)
except rankwire.PeerLostError as error:
    print(error.reason)
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (the kernel does that too"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_survivors_learn_how_the_process_of_a_lost_rank_ended(run, end, how):
    done = run(KILLED.format(end=end), "--no-prefix", ranks=3, launcher=PATIENT_COMMAND)
    reasons = done.stdout.splitlines()
    assert len(reasons) == 2, done.stderr
    assert all(reason.startswith(f"its process ended: {how}") for reason in reasons), reasons


# -- what they print

CASCADE = """
import rankwire
backend = rankwire.connect()
backend.barrier()
if rank == 1:
    raise ValueError("the reason")
backend.recv({0: 1, 2: 0, 3: 2}[rank])
"""


def test_the_first_failure_is_printed_once_and_one_line_for_each_other(run, tmp_path):
    done = run(CASCADE, "--log-dir", str(tmp_path), ranks=4, launcher=PATIENT_COMMAND)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert done.stderr.count("Traceback") == 1
    assert [line for line in lines if line.endswith("ValueError: the reason")] == [
        "[rank 1] ValueError: the reason"
    ]
    for rank in (0, 2, 3):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert len(mine) == 1
        assert mine[0].startswith(f"[rank {rank}] failed because of rank 1: PeerLostError: rank ")
        assert "it raised ValueError [op recv" in mine[0]
        log = (tmp_path / f"rank_{rank}.log").read_text()
        assert log.count("Traceback") == 2  # its own, and that of rank 1
        assert log.endswith(mine[0].removeprefix(f"[rank {rank}] ") + "\n")
    assert (tmp_path / "rank_1.log").read_text().count("Traceback") == 1
    assert lines[-2:] == [
        "rankwire: rank 1 failed first: exit code 1 (it raised ValueError)",
        lines[-1],
    ]
    assert lines[-1].startswith("rankwire: failed too: ")


@pytest.mark.slow
def test_full_tracebacks_are_printed_on_request(run):
    done = run(CASCADE, ranks=2, env=os.environ | {FULL_TRACEBACK: "1"}, launcher=PATIENT_COMMAND)
    assert done.stderr.count("Traceback") == 3
    assert "/rankwire/backends/base.py" in done.stderr


def test_an_interrupt_prints_a_line_for_each_rank(start):
    launched = start(
        "\nimport rankwire\nwith rankwire.connect() as backend:\n"
        "    ready()\n    backend.recv((rank + 1) % 3)\n",
        ranks=3,
    )
    launched.send(2)
    code, _, stderr = launched.wait()
    assert code == 130
    assert len(stderr.splitlines()) == 5
    assert stderr.count("KeyboardInterrupt") + stderr.count("because of rank") >= 3
