"""A docstring says what its function or class does, not where else to look for it."""

import ast
import re
from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent

SAYS_NOTHING = re.compile(r"See (``|the module|above|there)|(Do|Return|Like) the same\b|The same\b")
# Files that still have such docstrings; to be emptied.
STILL_SAY_NOTHING: set[str] = set()


def test_docstrings_say_what_a_thing_does():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if SAYS_NOTHING.match(text) and name not in STILL_SAY_NOTHING:
                    found.append(f"{name}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    assert not found
