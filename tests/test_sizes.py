"""Nothing is too large to be read at once, unless its docstring has a line that says why.

The line begins with ``Size: `` and stands in the docstring of the module or of the class.
"""

import ast
from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent

MOST_LINES = 400
MOST_METHODS = 25
MOST_ATTRIBUTES = 15
# Files that are still too large, or have classes that are; to be emptied.
STILL_TOO_LARGE: set[str] = {
    "backends/base.py", "backends/simulated_mesh.py", "mesh/call_port.py", "mesh/mesh.py",
}  # fmt: skip


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name not in STILL_TOO_LARGE:
            text = path.read_text()
            yield name, text, ast.parse(text)


def has_reason(node):
    lines = (ast.get_docstring(node) or "").splitlines()
    return any(line.startswith("Size: ") and len(line) > 20 for line in lines)


def methods_of(cls):
    return [item for item in cls.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def attributes_of(cls):
    """What ``__init__`` sets, what ``__slots__`` lists, what is declared in the body."""
    found = set()
    for item in cls.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
        if isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == "__slots__":
            found |= set(ast.literal_eval(item.value))
    for method in methods_of(cls):
        if method.name == "__init__":
            for node in ast.walk(method):
                is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_set and getattr(node.value, "id", "") == "self":
                    found.add(node.attr)
    return found


def test_no_module_is_too_long():
    lengths = {
        name: len(text.splitlines()) for name, text, tree in modules() if not has_reason(tree)
    }
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}


def test_no_class_is_too_large():
    too_large = []
    for name, _, tree in modules():
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            methods, attributes = len(methods_of(cls)), len(attributes_of(cls))
            if (methods > MOST_METHODS or attributes > MOST_ATTRIBUTES) and not has_reason(cls):
                too_large.append(f"{name}: {cls.name}, {methods} methods, {attributes} attributes")
    assert not too_large
