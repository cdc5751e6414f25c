"""The wheel and the sdist install into an empty environment, and work there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import rankwire
with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
    agent.register("add", lambda a, b: a + b)
    backend.barrier()
    if backend.rank == 0:
        print(agent.rpc_sync(1, "add", 2, 3))
    backend.barrier()
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_they_install_and_run_in_an_empty_environment(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    install = (tmp_path / "venv/bin/pip", "install", "--quiet")
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    run(*install, wheel, cwd=tmp_path)
    check_it_works(tmp_path)
    run(*install, "--force-reinstall", "--no-deps", sdist, cwd=tmp_path)
    check_it_works(tmp_path)


def check_it_works(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    printed = run(folder / "venv/bin/rankwire", "run", "-n", 2, "program.py", cwd=folder)
    assert printed == "[rank 0] 5\n"
    files = run(folder / "venv/bin/pip", "show", "--files", "rankwire", cwd=folder)
    assert "rankwire/py.typed" in files
    assert "LICENSE" in files
