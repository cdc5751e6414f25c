"""The README shows only what runs, and the pages can be read."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_fifteen_lines_print_what_they_are_said_to_print(tmp_path):
    (script,) = [block for block in blocks("python") if block.startswith("# hello.py")]
    (shown,) = [block for block in blocks("console") if "hello.py" in block]
    command, *expected = shown.strip().splitlines()
    assert command == "$ rankwire run -n 4 hello.py"
    (tmp_path / "hello.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "-m", "rankwire", "run", "-n", "4", "hello.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert run.stdout.splitlines() == expected, run.stderr


def test_the_collectives_print_what_they_are_said_to_print(tmp_path):
    (script,) = [block for block in blocks("python") if block.startswith("# average.py")]
    (shown,) = [block for block in blocks("console") if "average.py" in block]
    command, *expected = shown.strip().splitlines()
    assert command == "$ rankwire run -n 2 average.py"
    (tmp_path / "average.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "-m", "rankwire", "run", "-n", "2", "average.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert sorted(run.stdout.splitlines()) == expected, run.stderr


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_its_commands_are_targets_of_the_makefile():
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make ([a-z-]+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_no_line_of_the_pages_is_too_long_to_read():
    """Rows of tables apart, which cannot be broken."""
    root = README.parent
    long = [
        f"{page.relative_to(root)}:{number}"
        for page in (*root.glob("*.md"), *root.glob("docs/*.md"))
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 180 and not line.startswith("|")
    ]
    assert not long


def test_the_pages_name_files_that_exist():
    root = README.parent
    folders = [path.name for path in (root / "src/rankwire").iterdir() if path.is_dir()]
    named = re.compile(rf"(?<![\w/])(?:tests/)?((?:{'|'.join(folders)})/[a-z_0-9/]+\.py)")
    gone = [
        f"{page.relative_to(root)}: {match[0]}"
        for page in (root / "README.md", root / "SECURITY.md", *root.glob("docs/*.md"))
        for match in named.finditer(page.read_text())
        if not any((base / match[1]).exists() for base in (root / "src/rankwire", root / "tests"))
    ]
    assert not gone
