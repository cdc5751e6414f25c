"""The layers of the design, as a table, and nothing imports upwards."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import rankwire

SOURCE = Path(rankwire.__file__).parent

LEAVES = {"errors", "texts", "deadline", "fork", "shutdown"}
# What each layer may import of ours (its own modules apart).
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "texts": set(),
    "fork": {"errors"},
    "shutdown": {"errors"},
    "deadline": {"errors"},
    "codec": {"errors", "texts"},
    "wire": {"errors", "texts", "codec"},
    "links": {*LEAVES, "wire"},
    "rendezvous": {*LEAVES, "wire", "links"},
    "backends": {*LEAVES, "codec", "wire", "links", "rendezvous"},
    "rpc": {*LEAVES, "codec", "wire", "links", "backends"},
    "collectives": {*LEAVES, "codec", "wire", "backends"},
    "device_mesh": {"errors", "backends"},
    "testing": {*LEAVES, "codec", "wire", "rendezvous", "backends", "rpc", "collectives"},
    "launch": {*LEAVES, "version", "links", "backends", "rendezvous"},
    "cli": {"errors", "version", "launch"},
    "__main__": {"cli"},
    "__init__": {"errors", "version", "codec", "backends", "rpc", "collectives", "device_mesh"},
}
BACKENDS = {"tcp", "simulated", "sub"}  # these do not know each other, and only this one makes one
MAKES_A_BACKEND = "connect"
BACKEND_INTERFACE = {
    "arguments",
    "base",
    "calls",
    "payloads",
    "transport",
}  # all that the layers above know of backends
PURE = {"texts", "codec", "wire"}
ABOVE_LINKS = {"rendezvous", "backends", "rpc", "collectives", "device_mesh"}
IMPURE_MODULES = {
    "socket", "ssl", "select", "selectors", "threading", "asyncio", "time", "os", "subprocess",
    "logging", "multiprocessing", "signal", "pathlib", "tempfile", "io", "ctypes", "mmap", "fcntl",
}  # fmt: skip
# Types of ctypes are buffers that a user may send; nothing is called there.
TYPES_ONLY = {("references.py", "ctypes")}
# What carries bytes: sockets, and what one waits with for them.
IO_MODULES = {"socket", "ssl", "select", "selectors", "fcntl", "mmap", "ctypes"}
IO_OF_OS = {"eventfd", "eventfd_read", "eventfd_write", "pipe", "read", "write", "close"}
# What runs code, or makes objects of any class, out of bytes.
PICKLE_LIKE = {
    "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "yaml",
}  # fmt: skip
OPTIONAL = {"torch", "mpi4py", "ray", "rich", "typer", "pytest", "cryptography", "ssl"}


def modules():
    return sorted(SOURCE.rglob("*.py"))


def imports(path):
    """Yield (module, is_at_import_time) for every import in a file, TYPE_CHECKING blocks apart."""
    tree = ast.parse(path.read_text())
    skipped = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    top_level = {node for statement in tree.body for node in _outside_functions(statement)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in top_level
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node in top_level
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in top_level


def _outside_functions(node):
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def layer_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_imports_go_down_only():
    for path, (module, _) in all_imports():
        layer = layer_of(path)
        if module.startswith("rankwire."):
            target = module.split(".")[1]
            if (SOURCE / target).is_dir() or (SOURCE / f"{target}.py").exists():
                assert target == layer or target in MAY_IMPORT[layer], f"{path} imports {module}"


def test_backends_do_not_know_each_other():
    for path, (module, _) in all_imports():
        if layer_of(path) != "backends" or path.stem == MAKES_A_BACKEND:
            continue
        own, parts = path.stem.split("_")[0], module.split(".")
        if parts[:2] == ["rankwire", "backends"] and len(parts) > 2:
            other = parts[2].split("_")[0]
            assert other == own or other not in BACKENDS, f"{path} imports {module}"


@functools.cache
def all_imports():
    """Each module with each of its imports."""
    return [(path, found) for path in modules() for found in imports(path)]


def test_calls_and_collectives_know_no_concrete_backend():
    for path in modules():
        if layer_of(path) in ("rpc", "collectives"):
            for module, _ in imports(path):
                parts = module.split(".")
                if parts[:2] == ["rankwire", "backends"] and len(parts) > 2:
                    assert parts[2] in BACKEND_INTERFACE, f"{path} imports {module}"


def test_codec_and_wire_are_pure():
    for path in modules():
        if layer_of(path) in PURE:
            for module, _ in imports(path):
                root = module.split(".")[0]
                if (path.name, root) not in TYPES_ONLY:
                    assert root not in IMPURE_MODULES, f"{path} imports {module}"


def test_only_links_touch_sockets_and_wait_for_them():
    for path in modules():
        if layer_of(path) not in ABOVE_LINKS:
            continue
        for module, _ in imports(path):
            assert module.split(".")[0] not in IO_MODULES, f"{path} imports {module}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os":
                assert node.attr not in IO_OF_OS, f"{path}:{node.lineno}: os.{node.attr}"


def test_pickle_is_only_behind_its_option():
    for path in modules():
        for module, _ in imports(path):
            if module.split(".")[0] in PICKLE_LIKE:
                assert path == SOURCE / "codec" / "pickling.py", f"{path} imports {module}"
            if module == "rankwire.codec.pickling" and path.name != "pickling.py":
                assert not _, f"{path} loads pickling for everyone"


def test_importing_rankwire_loads_nothing_optional_and_no_launcher():
    code = "import rankwire, sys; rankwire.connect; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded = set(printed.split())
    assert not loaded & OPTIONAL
    assert not {name for name in loaded if name.startswith(("rankwire.launch", "rankwire.cli"))}


@pytest.mark.fault(55, "only monotonic time is used anywhere")
def test_only_monotonic_time_is_used():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "time":
                assert getattr(node.value, "id", "") != "time", f"{path}:{node.lineno}"
