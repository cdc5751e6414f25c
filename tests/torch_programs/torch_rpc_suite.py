"""torch's own tests of ``torch.distributed.rpc``, on rankwire in place of TensorPipe.

    RPC=safe python -m unittest torch_rpc_suite.RpcTest.test_...

``RPC`` says what they run on: ``safe`` is rankwire as it is, ``pickle`` is rankwire with
``pickle=True``, ``stock`` is torch's own. The ranks of a test are forked from this process, which
has loaded everything. TorchScript is off, as if it were not there: its compiler knows no RRef but
torch's own.
"""

import importlib
import os

import torch
from torch.testing._internal import common_distributed

KIND = os.environ.get("RPC", "safe")
LEFT_OUT = ("profil", "record_function", "script", "jit")  # profiling and TorchScript

torch.jit._state.disable()
if KIND != "stock":
    import rankwire.torch.rpc

    # Where their functions are, as a user would say for a library; and one by one, those that a
    # module does not open: private ones at its top, and one of torch that is not in the table.
    HERE = "torch.testing._internal.distributed.rpc"
    AUTOGRAD = (
        "check_rpc_done",
        "compare_owner_value",
        "run_trainer",
        "set_rpc_done",
        "torch_ones",
    )
    rankwire.torch.rpc.install(
        allow=[
            *(HERE, "torch.testing._internal.dist_utils", torch.linalg.multi_dot),
            *(f"{HERE}.dist_autograd_test:_{name}" for name in AUTOGRAD),
            *(f"{HERE}.rpc_test:{name}" for name in ("_call_method_on_rref", "_increment_count")),
            *(f"{HERE}.rpc_test:_reset_count", f"{HERE}.dist_optimizer_test:_call_method"),
        ],
        pickle=KIND == "pickle",
    )

# They take the names that are there when they are imported.
rpc_test, autograd_test, optimizer_test, fixture = (
    importlib.import_module(f"torch.testing._internal.distributed.rpc.{name}")
    for name in (
        "rpc_test",
        "dist_autograd_test",
        "dist_optimizer_test",
        "tensorpipe_rpc_agent_test_fixture",
    )
)
common_distributed.TIMEOUT_DEFAULT = 60


class Forked(common_distributed.MultiProcessTestCase):
    """A test whose ranks are forked."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class RpcTest(rpc_test.RpcTest, fixture.TensorPipeRpcAgentTestFixture, Forked):
    """Calls, futures, remote references, workers."""


class DistAutogradTest(
    autograd_test.DistAutogradTest, fixture.TensorPipeRpcAgentTestFixture, Forked
):
    """Gradients over calls."""


class SparseDistAutogradTest(
    autograd_test.TensorPipeAgentDistAutogradTest, fixture.TensorPipeRpcAgentTestFixture, Forked
):
    """The same with sparse tensors."""


class DistOptimizerTest(
    optimizer_test.DistOptimizerTest, fixture.TensorPipeRpcAgentTestFixture, Forked
):
    """Optimizers of parameters on other ranks."""


SUITES = (RpcTest, DistAutogradTest, SparseDistAutogradTest, DistOptimizerTest)
for suite in SUITES:
    for name in dir(suite):
        if name.startswith("test") and any(word in name for word in LEFT_OUT):
            setattr(suite, name, None)
