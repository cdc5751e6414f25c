"""A docstring says what its function or class does, not where else to look for it."""

import ast
import re
from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent

SAYS_NOTHING = re.compile(r"See (``|the module|above|there)|(Do|Return|Like) the same\b|The same\b")
# Files that still have such docstrings; to be emptied.
STILL_SAY_NOTHING = {
    "backends/bulk.py", "backends/mesh.py", "backends/peers.py", "backends/simulated.py",
    "backends/sub.py", "backends/tcp.py", "backends/tcp_formation.py", "links/connection.py",
    "links/inbox.py", "links/memory_stream.py", "links/poller.py", "rpc/agent.py",
    "rpc/event_loop.py", "rpc/messages.py", "wire/frames.py",
}  # fmt: skip


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
