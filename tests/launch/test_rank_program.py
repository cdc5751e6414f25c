"""Parcels: functions and values by value, with the globals of __main__."""

import dataclasses
import linecache
import subprocess
import sys
import types

import numpy as np
import pytest

from rankwire.launch.rank_program import pack, unpack


@pytest.fixture
def main(monkeypatch):
    """A ``__main__`` of one's own, as a program has."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module.__dict__


def define(main, source, filename="<cell>"):
    exec(compile(source, filename, "exec"), main)


def to_another_process(main, monkeypatch, value):
    """Pack here and unpack where ``__main__`` is another one; return both."""
    parcel = pack(value)
    there = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", there)
    return unpack(parcel), there.__dict__


def test_what_is_importable_travels_by_name():
    assert unpack(pack(np.sum)) is np.sum
    assert unpack(pack((define, {"a": [1, 2.0]}))) == (define, {"a": [1, 2.0]})


def test_a_function_of_main_takes_the_globals_along_that_it_names(main, monkeypatch):
    define(main, "factor = 3; unused = 4\ndef g(x): return factor * x\ndef f(x): return g(x) + 1")
    f, there = to_another_process(main, monkeypatch, main["f"])
    assert f(2) == 7
    assert (there["factor"], "unused" in there) == (3, False)
    assert f.__globals__ is there
    there["factor"] = 10
    assert f(2) == 21


def test_functions_that_came_at_different_times_have_the_same_globals(main, monkeypatch):
    define(main, "def keep(x):\n global kept\n kept = x\ndef look(): return kept")
    one, two = pack(main["keep"]), pack(main["look"])
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    unpack(one)("it")
    assert unpack(two)() == "it"


def test_closures_lambdas_and_classes_of_main_travel(main, monkeypatch):
    define(
        main,
        "import dataclasses\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "def make(n): return lambda k: Point(n + k)",
    )
    add, _ = to_another_process(main, monkeypatch, main["make"](5))
    assert dataclasses.asdict(add(1)) == {"x": 6}


def test_the_source_of_a_cell_travels_along_for_tracebacks(main, monkeypatch):
    name, source = "/tmp/ipykernel_1/2.py", "def f():\n    return 1 / 0\n"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(True), name))
    define(main, source, name)
    parcel = pack((main["f"], ()))
    monkeypatch.delitem(linecache.cache, name)
    unpack(parcel)
    assert linecache.getline(name, 2) == "    return 1 / 0\n"


def test_a_message_class_of_a_script_can_be_sent_by_its_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from dataclasses import dataclass\n"
        "import rankwire\n"
        "@rankwire.message\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "def main(backend):\n"
        "    return [p.x for p in rankwire.all_gather_object(backend, Point(backend.rank))]\n"
        "with rankwire.local(2) as world:\n"
        "    print(world.run(main))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=50)
    assert done.stdout == "[[0, 1], [0, 1]]\n", done.stderr
