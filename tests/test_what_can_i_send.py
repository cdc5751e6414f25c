"""The listings of the page "What can I send" print what they are said to print."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "what-can-i-send.md"
LISTINGS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SHOWN = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_every_listing_is_run():
    assert len(LISTINGS) == PAGE.read_text().count("```python")
    assert [command.split()[-1] for command, _ in SHOWN] == [name for name, _ in LISTINGS]


@pytest.mark.parametrize(("name", "program"), LISTINGS, ids=[name for name, _ in LISTINGS])
def test_a_listing_prints_what_is_shown(name, program, tmp_path):
    if "import torch" in program and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    (command, expected), *_ = [shown for shown in SHOWN if shown[0].endswith(f" {name}")]
    (tmp_path / name).write_text(program)
    module = ["-m", "rankwire"] if command.startswith("rankwire") else []
    ended = subprocess.run(
        [sys.executable, *module, *command.split()[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout == expected, ended.stderr
