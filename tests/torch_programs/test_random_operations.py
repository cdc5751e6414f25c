"""Operations drawn at random do on rankwire what they do on Gloo, in one program with both."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch_ranks import run_ranks  # noqa: E402

OPERATIONS = [
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier",
    "send", "coalesced",
]  # fmt: skip
STEPS = st.tuples(
    st.sampled_from(OPERATIONS),
    st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64]),
    st.sampled_from([(), (1,), (3, 2), (0, 4), (1000,), (70, 500)]),
    st.sampled_from(["SUM", "MIN", "MAX", "PRODUCT"]),
    st.booleans(),
    st.integers(0, 1),
)


def drawn(seed, shape, dtype):
    """Return small whole numbers: their sums and products are exact in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def do(step, number, rank, size, group):
    """Do one operation on a group; return what it gives this rank."""
    name, dtype, shape, op_name, is_async, root = step
    own, op = drawn(1000 * number + rank, shape, dtype), getattr(dist.ReduceOp, op_name)
    options = {"group": group, "async_op": is_async}
    parts = [drawn(100 * number + 10 * rank + at, shape, dtype) for at in range(size)]
    out = [torch.zeros_like(own) for _ in range(size)]
    joined = torch.zeros((size, *shape), dtype=dtype)
    work = None
    match name:
        case "all_reduce":
            work, out = dist.all_reduce(own, op, **options), own
        case "reduce":
            work = dist.reduce(own, root, op, **options)
            out = own if rank == root else []
        case "broadcast":
            work, out = dist.broadcast(own, root, **options), own
        case "all_gather":
            work = dist.all_gather(out, own, **options)
        case "all_gather_single":
            flat = own.reshape(-1)
            out = torch.zeros(size * flat.numel(), dtype=dtype)
            work = dist.all_gather_single(out, flat, **options)
        case "gather":
            out = out if rank == root else None
            work = dist.gather(own, out, root, **options)
        case "scatter":
            out = torch.zeros_like(own)
            work = dist.scatter(out, parts if rank == root else None, root, **options)
        case "reduce_scatter":
            out = torch.zeros_like(own)
            work = dist.reduce_scatter(out, parts, op, **options)
        case "reduce_scatter_single":
            out = torch.zeros_like(own).reshape(-1)
            work = dist.reduce_scatter_single(out, torch.stack(parts).reshape(-1), op, **options)
        case "all_to_all":
            work = dist.all_to_all(out, parts, **options)
        case "all_to_all_single":
            work, out = dist.all_to_all_single(joined, torch.stack(parts), **options), joined
        case "barrier":
            work = dist.barrier(group, async_op=is_async)
        case "send":
            sending = dist.isend(own, (rank + 1) % size, group=group, tag=number)
            out = torch.zeros_like(own)
            dist.recv(out, (rank - 1) % size, group=group, tag=number)
            sending.wait()
        case "coalesced":
            work, out = dist.all_reduce_coalesced(parts, op, **options), parts
    if is_async and work is not None:
        work.wait()
    return out if isinstance(out, list) else [out] if out is not None else []


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 4), st.lists(STEPS, min_size=20, max_size=40))
def test_what_gloo_gives_is_what_rankwire_gives(size, steps):
    def run(rank):
        groups = [dist.new_group(backend=backend) for backend in ("gloo", "rankwire")]
        for number, step in enumerate(steps):
            gloo, ours = (do(step, number, rank, size, group) for group in groups)
            for theirs, mine in zip(gloo, ours, strict=True):
                assert torch.equal(theirs, mine), (number, step, theirs, mine)
        return True

    assert run_ranks(size, run, backend="gloo") == [True] * size
