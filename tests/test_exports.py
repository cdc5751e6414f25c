"""The public names are the ones documented; within the package, an underscore says the rest."""

import ast
import importlib
import pkgutil
from pathlib import Path

import rankwire
from rankwire import errors

SOURCE = Path(rankwire.__file__).parent

# Those of ``rankwire.torch`` need torch; they are loaded by their own tests.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(rankwire.__path__, "rankwire.", onerror=lambda name: None)
    if not module.name.endswith("__main__") and not module.name.startswith("rankwire.torch")
]


def test_no_module_imports_what_another_keeps_to_itself():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert set(private) <= {"__version__", "__all__"}, f"{path}: {private}"


def test_every_module_says_what_it_is_for():
    for name in MODULES:
        assert importlib.import_module(name).__doc__, name


def test_the_package_exports_the_public_names():
    public = {
        "TcpBackend", "SimulatedBackend", "SubBackend", "Backend", "FaultPlan", "connect",
        "ANY_RANK", "MessageHandle", "TakeContext", "BuildContext", "message",
        "RpcAgent", "RpcFuture", "Stream", "Codec", "current_call", "Call", "__version__",
        "DeviceMesh", "Roles",
        "Work", "Tls", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter",
        "reduce_scatter", "all_to_all", "barrier", "all_reduce_coalesced", "all_gather_object",
        "gather_object", "broadcast_object", "scatter_object", "all_to_all_object", "PremulSum",
        "all_gather_coalesced", "reduce_scatter_coalesced", "local", "LocalWorld",
        "TaskMap", "TaskOutcome", "GroupResult",
        "Queue", "QueueStats",
    }  # fmt: skip
    assert public | set(errors.__all__) == set(rankwire.__all__)
    for name in rankwire.__all__:
        assert getattr(rankwire, name) is not None
