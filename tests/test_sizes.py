"""Modules, classes and functions are small enough to be read at once; only a few may be larger."""

import ast
from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent

# No module is longer than the second number, and at most so many are longer than the first.
LINES, MOST_LINES, LONG_MODULES = 400, 500, 6
# The same for the methods of a class; large is also a class with more attributes.
METHODS, ATTRIBUTES, MOST_METHODS, LARGE_CLASSES = 20, 12, 30, 20
FUNCTION_LINES, LONG_FUNCTIONS = 60, 6
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        yield str(path.relative_to(SOURCE)), text, ast.parse(text)


def classes():
    """Yield the module, the name, and the number of methods and attributes of each class."""
    for name, _, tree in modules():
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            if "TypedDict" in [getattr(base, "id", "") for base in cls.bases]:
                continue  # the keywords of a function
            methods = [item for item in cls.body if isinstance(item, FUNCTIONS)]
            names = {method.name for method in methods}  # an overload is not another method
            yield name, cls.name, len(names), len(attributes_of(cls, methods))


def attributes_of(cls, methods):
    """Return what ``__init__`` sets, what ``__slots__`` lists, and what the body declares."""
    found = set()
    for item in cls.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
        if isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == "__slots__":
            found |= set(ast.literal_eval(item.value))
    for method in methods:
        if method.name == "__init__":
            for node in ast.walk(method):
                is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_set and getattr(node.value, "id", "") == "self":
                    found.add(node.attr)
    return found


def test_few_modules_are_long_and_none_is_very_long():
    lengths = {name: len(text.splitlines()) for name, text, _ in modules()}
    long = {name: length for name, length in lengths.items() if length > LINES}
    assert len(long) <= LONG_MODULES, long
    assert not {name for name, length in long.items() if length > MOST_LINES}


def test_few_classes_are_large_and_none_is_very_large():
    large = [each for each in classes() if each[2] > METHODS or each[3] > ATTRIBUTES]
    assert len(large) <= LARGE_CLASSES, large
    assert not {each[0] for each in large if each[2] > MOST_METHODS}


def test_few_functions_are_long():
    long = [
        f"{name}: {node.name}"
        for name, _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]
    assert len(long) <= LONG_FUNCTIONS, long


def test_no_docstring_argues_for_a_size():
    assert not [name for name, text, _ in modules() if "Size: " in text]
