"""Listings: programs that a page shows, run as a reader would run them.

A listing is a block of Python whose first line is the name of its file, as a comment. A block of a
console below it shows commands, each after ``$ ``, and what they print.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# ([a-z_0-9]+\.py)\n")
_RUN = {"rankwire": [sys.executable, "-m", "rankwire"], "python": [sys.executable]}


@dataclass(frozen=True)
class Listing:
    """A command that a page shows, with what it prints."""

    command: str
    printed: tuple[str, ...]
    files: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.command

    def run(self, folder: Path) -> None:
        """Run it in a folder of its own; lines of different ranks may come in any order."""
        for name, text in self.files:
            (folder / name).write_text(text)
        program, *args = self.command.split()
        done = subprocess.run(
            [*_RUN[program], *args], cwd=folder, capture_output=True, text=True, timeout=50
        )
        assert sorted(done.stdout.splitlines()) == sorted(self.printed), done.stderr
        assert done.returncode == 0, done.stderr


def listings_of(page: Path) -> list[Listing]:
    """Return the commands of a page that run one of its programs."""
    files: dict[str, str] = {}
    found = []
    for language, text in _BLOCK.findall(page.read_text()):
        if language == "python":
            if (name := _NAME.match(text)) is not None:
                files[name[1]] = text
            continue
        for shown in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *printed = shown.rstrip().splitlines()
            if command.split()[-1] in files:
                found.append(Listing(command, tuple(printed), tuple(files.items())))
    return found
