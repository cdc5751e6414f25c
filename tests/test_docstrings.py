"""A docstring says what its function or class does, not where else to look for it."""

import ast
import re
from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent

SAYS_NOTHING = re.compile(r"See (``|the module|above|there)|(Do|Return|Like) the same\b|The same\b")
# Files that still have such docstrings; to be emptied.
STILL_SAY_NOTHING = {
    "backends/simulated.py", "backends/simulated_calls.py", "backends/sub.py",
    "backends/sub_calls.py", "backends/tcp.py", "backends/tcp_bulk.py", "backends/tcp_calls.py",
    "backends/tcp_formation.py", "backends/tcp_peers.py", "links/connection.py", "links/inbox.py",
    "rpc/agent.py", "rpc/event_loop.py", "rpc/incoming.py", "rpc/loopback.py", "rpc/messages.py",
    "rpc/outgoing.py", "rpc/serving.py",
    "wire/frames.py",
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
