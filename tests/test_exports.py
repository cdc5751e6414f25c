"""The public names are the ones documented, and each module says what it exports."""

import importlib
import pkgutil

import rankwire
from rankwire import errors

MODULES = [
    module.name
    for module in pkgutil.walk_packages(rankwire.__path__, "rankwire.")
    if not module.name.endswith("__main__")
]


def test_every_module_exports_what_exists():
    for name in MODULES:
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            assert hasattr(module, exported), name


def test_every_module_says_what_it_is_for():
    for name in MODULES:
        assert importlib.import_module(name).__doc__, name


def test_the_package_exports_the_public_names():
    public = {
        "TcpBackend", "SimulatedBackend", "SubBackend", "Backend", "FaultPlan", "connect",
        "RpcAgent", "RpcFuture", "Codec", "current_call", "Call", "__version__", "DeviceMesh",
        "Work", "Tls", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter",
        "reduce_scatter", "all_to_all", "barrier", "all_reduce_coalesced", "all_gather_object",
        "gather_object", "broadcast_object", "scatter_object", "all_to_all_object",
    }  # fmt: skip
    assert public | set(errors.__all__) == set(rankwire.__all__)
    for name in rankwire.__all__:
        assert getattr(rankwire, name) is not None


def test_every_error_is_a_rankwire_error():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), rankwire.RankwireError)
