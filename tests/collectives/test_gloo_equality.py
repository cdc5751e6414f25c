"""The same results as torch's Gloo, wherever it has the operation.

Run as a script, this module is one rank of a Gloo world that writes its results to a file.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sums import ops_of, run, values

import rankwire

DTYPES = ["float32", "float64", "int32", "int64", "uint8"]
OPS = {
    "sum": "SUM",
    "product": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "bitwise_and": "BAND",
    "bitwise_or": "BOR",
    "bitwise_xor": "BXOR",
}
COUNTS = [1, 30, 60_000]


def contribution(count, dtype, rank, *, exact=True):
    """Return a rank's numbers; exact ones give the same sum in any order."""
    if exact:
        return values(count, "int64", seed=rank).astype(dtype)
    return values(count, dtype, seed=rank)


def cases():
    for dtype in DTYPES:
        for op in OPS:
            if op in ops_of(dtype):
                for count in COUNTS:
                    yield dtype, op, count


def rows(size, dtype, rank):
    return contribution(size * 10, dtype, rank).reshape(size * 2, 5)


# -- what both worlds compute ----------------------------------------------------------------------


def of_rankwire(backend):
    rank, size = backend.rank, backend.world_size
    results = {}
    for dtype, op, count in cases():
        mine = contribution(count, dtype, rank)
        results[f"all_reduce {op} {dtype} {count}"] = rankwire.all_reduce(backend, mine, op)
        if count == 30:
            mine = contribution(count, dtype, rank)
            total = rankwire.reduce(backend, mine, size - 1, op)
            if total is not None:
                results[f"reduce {op} {dtype}"] = total
    for dtype in ("float32", "float64"):
        mine = contribution(1000, dtype, rank, exact=False)
        results[f"all_reduce inexact {dtype}"] = rankwire.all_reduce(backend, mine)
    for dtype in DTYPES:
        mine = rows(size, dtype, rank)
        results[f"broadcast {dtype}"] = rankwire.broadcast(backend, mine.copy(), size - 1)
        results[f"all_gather {dtype}"] = rankwire.all_gather(backend, mine)
        joined = rankwire.gather(backend, mine, size - 1)
        if joined is not None:
            results[f"gather {dtype}"] = joined
        results[f"scatter {dtype}"] = rankwire.scatter(backend, mine, size - 1)
        results[f"all_to_all {dtype}"] = rankwire.all_to_all(backend, mine)
        counts = [2 * size - (size - 1), *[1] * (size - 1)]
        results[f"uneven {dtype}"] = rankwire.all_to_all(backend, mine, send_counts=counts)
        results[f"reduce_scatter {dtype}"] = rankwire.reduce_scatter(backend, mine)
    return results


def of_gloo(rank, size, store):
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    results = {}

    def record(name, compute):
        """What this Gloo does not have is not compared."""
        try:
            result = compute()
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            print(f"Gloo has no {name}: {str(error).splitlines()[0][:100]}")
            return
        if result is not None:
            results[name] = result.numpy()

    def tensor_of(array):
        return torch.from_numpy(array.copy())

    def all_reduce(mine, op):
        dist.all_reduce(mine, getattr(dist.ReduceOp, OPS[op]))
        return mine

    def reduce(mine, op):
        dist.reduce(mine, size - 1, getattr(dist.ReduceOp, OPS[op]))
        return mine if rank == size - 1 else None

    def broadcast(mine):
        dist.broadcast(mine, size - 1)
        return mine

    def all_gather(mine):
        out = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(out, mine)
        return torch.cat(out)

    def gather(mine):
        out = [torch.empty_like(mine) for _ in range(size)] if rank == size - 1 else None
        dist.gather(mine, out, size - 1)
        return torch.cat(out) if out else None

    def scatter(mine):
        out = torch.empty_like(mine[:2])
        dist.scatter(out, list(mine.chunk(size)) if rank == size - 1 else None, size - 1)
        return out

    def all_to_all(mine):
        out = torch.empty_like(mine)
        dist.all_to_all_single(out, mine)
        return out

    def uneven(mine):
        counts = [2 * size - (size - 1), *[1] * (size - 1)]
        out = torch.empty((size * counts[rank], 5), dtype=mine.dtype)
        dist.all_to_all_single(out, mine, [counts[rank]] * size, counts)
        return out

    def reduce_scatter(mine):
        out = torch.empty_like(mine[:2])
        dist.reduce_scatter_tensor(out, mine)
        return out

    for dtype, op, count in cases():
        mine = contribution(count, dtype, rank)
        record(
            f"all_reduce {op} {dtype} {count}",
            lambda mine=mine, op=op: all_reduce(tensor_of(mine), op),
        )
        if count == 30:
            record(f"reduce {op} {dtype}", lambda mine=mine, op=op: reduce(tensor_of(mine), op))
    for dtype in ("float32", "float64"):
        mine = contribution(1000, dtype, rank, exact=False)
        record(f"all_reduce inexact {dtype}", lambda mine=mine: all_reduce(tensor_of(mine), "sum"))
    for dtype in DTYPES:
        mine = rows(size, dtype, rank)
        for compute in (
            broadcast, all_gather, gather, scatter, all_to_all, uneven, reduce_scatter,
        ):  # fmt: skip
            record(
                f"{compute.__name__} {dtype}",
                lambda mine=mine, compute=compute: compute(tensor_of(mine)),
            )
    dist.barrier()
    dist.destroy_process_group()
    return results


# -- the comparison --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def results(request, tmp_path_factory):
    """Those of Gloo and of rankwire, each a list by rank."""
    pytest.importorskip("torch")
    size, folder = request.param, tmp_path_factory.mktemp("gloo")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), str(folder)], stdout=subprocess.PIPE
        )
        for rank in range(size)
    ]
    output = [rank.communicate(timeout=50)[0].decode() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), output
    gloo = []
    for rank in range(size):
        with np.load(folder / f"{rank}.npz") as file:
            gloo.append(dict(file))
    return gloo, run(size, of_rankwire, backend="auto"), output[0]


def compare(results, kind):
    gloo, ours, missing = results
    compared = 0
    for theirs, mine in zip(gloo, ours, strict=True):
        for name in theirs:
            if name.split()[0] == kind and "inexact" not in name:
                assert mine[name].dtype == theirs[name].dtype, name
                np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
                compared += 1
    if not compared:
        pytest.skip(missing)


@pytest.mark.parametrize(
    "kind",
    [
        "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
        "uneven", "reduce_scatter",
    ],
)  # fmt: skip
def test_the_results_are_those_of_gloo(results, kind):
    compare(results, kind)


def test_sums_that_depend_on_the_order_are_close(results):
    gloo, ours, _ = results
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13)):
        name = f"all_reduce inexact {dtype}"
        for theirs, mine in zip(gloo, ours, strict=True):
            if len(gloo) == 2:  # where there is one order only
                np.testing.assert_array_equal(mine[name], theirs[name])
            scale = np.abs(theirs[name]) + 1.0
            assert (np.abs(mine[name] - theirs[name]) <= tolerance * scale).all()


def test_gloo_has_nearly_everything(results):
    """Or the comparison would mean little."""
    gloo, ours, missing = results
    lacking = {name.split()[0] for name in ours[0] if name not in gloo[0]}
    assert len(lacking) <= 1, missing


if __name__ == "__main__":
    own_rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    computed = of_gloo(own_rank, world_size, folder / "store")
    np.savez(folder / f"{own_rank}.npz", **computed)
