"""Jobs of one host inside TLS: `rankwire certificates`, then `rankwire run --tls`."""

import os
import stat
import subprocess
import sys

import pytest

from rankwire.launch.certificates import make_certificates

pytest.importorskip("cryptography")


@pytest.fixture
def tls_dir(tmp_path):
    make_certificates(tmp_path / "tls", 2)
    return tmp_path / "tls"


def test_certificates_from_the_command_line_are_what_run_needs(run, tmp_path):
    command = [sys.executable, "-m", "rankwire", "certificates", "tls", "-n", "2", "--days", "1"]
    made = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True
    )
    for word in ("launcher.key", "rank-N.key", "--tls tls", "RANKWIRE_TLS_DIR=tls", "1 days"):
        assert word in made.stdout
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    done = run(
        """
import rankwire
os.chdir("/")
for _ in range(2):
    with rankwire.connect() as backend:
        backend.barrier()
        assert backend.security == "tls"
print(os.environ["RANKWIRE_TLS_DIR"])
""",
        "--no-prefix", "--tls", "tls",
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/tls\n" * 2), done.stderr


def test_a_rank_with_the_secret_but_no_certificate_is_refused(run, tls_dir):
    done = run(
        """
import rankwire
try:
    rankwire.connect(tls=None, join_timeout=10.0)
except rankwire.AuthenticationError as error:
    print(error)
""",
        "--no-prefix", "--tls", str(tls_dir),
    )  # fmt: skip
    assert done.stdout.count("wants TLS") == 2, done


def test_certificates_of_another_job_are_refused_with_a_clear_text(run, tls_dir, tmp_path):
    make_certificates(tmp_path / "other", 2)
    done = run(
        f"""
import rankwire
os.environ["RANKWIRE_TLS_DIR"] = {str(tmp_path / "other")!r}
try:
    rankwire.connect(join_timeout=10.0)
except rankwire.AuthenticationError as error:
    print(error)
""",
        "--no-prefix", "--tls", str(tls_dir),
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    assert all("TLS handshake failed" in line and "certificate" in line for line in lines)


@pytest.mark.parametrize("lost", ["ca.pem", "launcher.pem", "launcher.key", "rank-1.key"])
def test_a_missing_file_is_named_before_anything_starts(run, tls_dir, lost):
    (tls_dir / lost).unlink()
    done = run("print('started')", "--tls", str(tls_dir))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no {lost}" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_ranks_than_certificates_are_refused(run, tls_dir):
    done = run("print('started')", "--tls", str(tls_dir), ranks=3)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no rank-2.pem" in done.stderr


def test_files_that_are_no_certificates_are_refused_before_anything_starts(run, tls_dir):
    (tls_dir / "launcher.pem").write_text("nonsense")
    done = run("print('started')", "--tls", str(tls_dir))
    assert (done.returncode, done.stdout) == (2, "")
    assert "launcher.pem" in done.stderr


SHOW = """
print(*sorted(name for name in os.environ if name.startswith("RANKWIRE_TLS")))
"""
NESTED = (
    "subprocess.run([sys.executable, '-m', 'rankwire', 'run', '-n', '1', '--no-prefix', *{options},"
    " '-m', 'show'], check=True)"
)


@pytest.mark.slow
@pytest.mark.parametrize("inner_has_tls", [False, True])
def test_a_job_inside_a_job_has_tls_only_if_asked_for(run, tls_dir, tmp_path, inner_has_tls):
    (tmp_path / "show.py").write_text("import os" + SHOW)
    options = ["--tls", str(tls_dir)] if inner_has_tls else []
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run(
        SHOW + NESTED.format(options=options),
        "--no-prefix", "--tls", str(tls_dir),
        ranks=1,
        env=os.environ | {"RANKWIRE_TLS_CA": "/other/ca.pem", "PYTHONPATH": path},
    )  # fmt: skip
    inner = "RANKWIRE_TLS_DIR" if inner_has_tls else ""
    assert done.stdout == f"RANKWIRE_TLS_DIR\n{inner}\n", done.stderr


def test_a_rank_that_is_restarted_joins_inside_tls(run, tls_dir):
    done = run(
        """
import threading
import rankwire
back = threading.Event()
with rankwire.connect(timeout=20.0) as backend:
    backend.on_peer_joined(lambda *joined: back.set())
    if rank == 1 and backend.incarnation == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        assert back.wait(20.0)
        backend.send(b"hello again", 1)
    else:
        print(backend.security, bytes(backend.recv(0)).decode(), flush=True)
""",
        "--no-prefix", "--tls", str(tls_dir), "--on-failure", "restart",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "tls hello again\n"), done.stderr
