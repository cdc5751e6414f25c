"""Ranks of torch RPC programs: forked processes that are workers for the time of one function."""

from torch_ranks import run_forked

import rankwire.torch.rpc as rpc


def worker(rank):
    return f"worker{rank}"


def run_workers(size, function, *, killed=(), rpc_timeout=20.0, graceful=None, **options):
    """Run ``function(rank)`` on forked workers ``worker0`` ...; return what each returns.

    Args:
        size: How many.
        function: What to run; closures are fine.
        killed: Ranks that end without a result.
        rpc_timeout: For calls without a limit, in seconds.
        graceful: How they end; with each other if none is killed.
        **options: Of ``init_rpc``.
    """

    def be_worker(rank, path):
        limits = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{path}", rpc_timeout=rpc_timeout
        )
        rpc.init_rpc(
            worker(rank), rank=rank, world_size=size, rpc_backend_options=limits, **options
        )
        value = function(rank)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=not killed if graceful is None else graceful)
        return value

    return run_forked(size, be_worker, killed=killed)


def on_first(function, size=2, allow=None, **options):
    """Run something on rank 0, while the others serve functions of its module."""
    allow = [function.__module__] if allow is None else allow
    return run_workers(
        size, lambda rank: function() if rank == 0 else None, allow=allow, **options
    )[0]
