"""One name, one meaning: no two modules and no two classes are called the same."""

import ast
from collections import defaultdict
from pathlib import Path

import rankwire

SOURCE = Path(rankwire.__file__).parent


def test_no_two_modules_have_one_name():
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(str(path.relative_to(SOURCE)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert not {name: where for name, where in places.items() if len(where) > 1}
