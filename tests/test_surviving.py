"""The page on surviving a death: its listings run, under kills, and print what is said."""

import re
import sys
from pathlib import Path

import pytest

from children import Child

PAGE = Path(__file__).parents[1] / "docs/fault-tolerance.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def run_listing(name, folder, *, ranks=None):
    """Run a listing as the page says; return what was printed, and what is said."""
    (script,) = [block for block in blocks("python") if block.startswith(f"# {name}")]
    (shown,) = [block for block in blocks("console") if name in block]
    command, *expected = shown.strip().splitlines()
    words = command.removeprefix("$ rankwire ").split()
    if ranks is not None:
        words[words.index("-n") + 1] = str(ranks)
    (folder / name).write_text(script)
    done = Child([sys.executable, "-m", "rankwire", *words], cwd=folder).result(50)
    assert done.returncode == 0, done.stderr
    return done, expected


@pytest.mark.parametrize("name", ["router.py", "training.py"])
def test_a_listing_survives_and_prints_what_it_is_said_to_print(name, tmp_path):
    done, expected = run_listing(name, tmp_path)
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.stderr.count("it starts again in 0.25 s") == 1, done.stderr


@pytest.mark.slow
def test_more_workers_do_the_same(tmp_path):
    """Each falls once, if it is asked the wrong question; the others are asked then."""
    done, expected = run_listing("router.py", tmp_path, ranks=4)
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_training_survives_kills_of_any_rank_at_any_step(seed, tmp_path):
    """Each rank dies up to twice, with its own dice, also while it makes a new group."""
    (script,) = [block for block in blocks("python") if block.startswith("# training.py")]
    condition = "backend.rank == 1 and step == 7 and backend.incarnation == 0"
    assert script.count(condition) == 1
    begin = "    weights, step, group = np"
    assert script.count(begin) == 1
    dice = f"    numbers = np.random.default_rng([{seed}, backend.rank, backend.incarnation])\n"
    script = script.replace(begin, dice + begin)
    script = script.replace(condition, "numbers.random() < 0.08 and backend.incarnation < 2")
    (tmp_path / "training.py").write_text(script)
    command = ["run", "-n", "3", "--on-failure", "restart", "training.py"]
    done = Child([sys.executable, "-m", "rankwire", *command], cwd=tmp_path).result(90)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("it starts again in") >= 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    printed = done.stdout.splitlines()
    assert printed == ["[rank 0] 20 [-40. -40. -40. -40.]"], done
