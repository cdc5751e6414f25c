"""torch tensors as operands of the collectives."""

import weakref

import msgspec
import numpy as np
import pytest
from sums import left_fold, run, run_algorithm

import rankwire
from rankwire.collectives.operands import new_like, operand, pack_part, unpack_part
from rankwire.collectives.reductions import reduction
from rankwire.errors import (
    CollectiveMismatchError,
    ConfigurationError,
    InvalidMessageError,
    UnsupportedTypeError,
)

torch = pytest.importorskip("torch")

DTYPES = [
    getattr(torch, name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
        "complex64 complex128"
    ).split()
]
HALVES = [torch.float16, torch.bfloat16]


def tensors_of(size, shape=(6, 2), dtype=torch.float32):
    """One a rank, of numbers whose sum is exact in every dtype that has room for them."""
    generator = torch.Generator().manual_seed(1)
    most = 2 if dtype == torch.bool else 8
    return [torch.randint(0, most, shape, generator=generator).to(dtype) for _ in range(size)]


def equal(result, expected):
    assert type(result) is torch.Tensor
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    return torch.equal(result, expected)


def total_of(tensors):
    if tensors[0].dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot add these
        return torch.from_numpy(left_fold([tensor.numpy() for tensor in tensors]))
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total | tensor if tensor.dtype == torch.bool else total + tensor
    return total


class Marked(torch.Tensor):
    """A subclass, which may mean more."""


# -- every operation -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype):
    tensors = tensors_of(3, dtype=dtype)
    total, joined = total_of(tensors), torch.cat(tensors)

    def each(backend):
        rank = backend.rank
        mine = tensors[rank].clone()
        part = slice(2 * rank, 2 * rank + 2)
        assert rankwire.all_reduce(backend, mine) is mine
        assert equal(mine, total)
        mine = tensors[rank].clone()
        at_root = rankwire.reduce(backend, mine, 1)
        gathered = rankwire.gather(backend, mine, 1)
        if rank == 1:
            assert equal(at_root, total)
            assert equal(gathered, joined)
        else:
            assert at_root is gathered is None
        assert equal(rankwire.all_gather(backend, mine), joined)
        assert equal(rankwire.reduce_scatter(backend, mine), total[part])
        assert equal(rankwire.scatter(backend, mine, 2), tensors[2][part])
        assert equal(rankwire.all_to_all(backend, mine), torch.cat([t[part] for t in tensors]))
        uneven = rankwire.all_to_all(backend, mine, send_counts=[4, 1, 1])
        cut = [slice(0, 4), slice(4, 5), slice(5, 6)][rank]
        assert equal(uneven, torch.cat([t[cut] for t in tensors]))
        assert equal(mine, tensors[rank]), "an input was changed"
        assert rankwire.broadcast(backend, mine, 2) is mine
        assert equal(mine, tensors[2])

    run(3, each)


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_large_tensors_over_sockets(backend):
    for dtype in (torch.float32, torch.bfloat16):
        tensors = tensors_of(3, (600_000,), dtype)

        def each(backend, tensors=tensors):
            mine = tensors[backend.rank].clone()
            assert equal(rankwire.all_gather(backend, mine), torch.cat(tensors))
            assert equal(rankwire.scatter(backend, mine), tensors[0].chunk(3)[backend.rank])
            assert equal(rankwire.all_reduce(backend, mine), total_of(tensors))
            assert equal(rankwire.broadcast(backend, mine, 1), total_of(tensors))

        run(3, each, backend=backend)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1, 1)])
def test_shapes(shape):
    def each(backend):
        mine = torch.ones(shape, dtype=torch.bfloat16)
        rows = (2 * shape[0], *shape[1:]) if shape else (2,)
        assert rankwire.all_gather(backend, mine).shape == rows
        assert equal(rankwire.all_reduce(backend, mine), torch.full(shape, 2.0).bfloat16())
        assert rankwire.broadcast(backend, mine).shape == shape

    run(2, each)


# -- half precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "product", "min", "max"])
@pytest.mark.parametrize("count", [7, 50_000])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_torchs_result_in_single_rounded_once(dtype, count, op):
    generator = torch.Generator().manual_seed(2)
    tensors = [(100 * torch.randn(count, generator=generator)).to(dtype) for _ in range(4)]
    wide = tensors[0].float()
    for tensor in tensors[1:]:
        if op in ("sum", "mean"):
            wide = wide + tensor.float()
        elif op == "product":
            wide = wide * tensor.float()
        else:
            wide = getattr(torch, op + "imum")(wide, tensor.float())
    expected = (wide / 4 if op == "mean" else wide).to(dtype)

    def each(backend):
        mine = tensors[backend.rank]
        reduced = rankwire.all_reduce(backend, mine.clone(), op)
        assert torch.equal(reduced.view(torch.int16), expected.view(torch.int16))

    run(4, each)


def test_every_bfloat16_is_rounded_as_torch_rounds():
    """Sums of a number and half, or nearly half, of its last place; and all that is not finite."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = every.view(torch.bfloat16)
    r = reduction("sum", np.dtype(np.int16), is_bfloat16=True)
    for scale in (2**-8, 2**-9, 2**-8 + 2**-12, -(2**-9), 0.75):
        other = (numbers.float() * scale).to(torch.bfloat16)
        out = np.empty(1 << 16, np.int16)
        r.fold([every.numpy(), other.view(torch.int16).numpy()], 2, out)
        expected = (numbers.float() + other.float()).to(torch.bfloat16)
        result = torch.from_numpy(out).view(torch.bfloat16)
        assert torch.equal(result.isnan(), expected.isnan())
        finite = ~expected.isnan()
        assert torch.equal(result[finite].view(torch.int16), expected[finite].view(torch.int16))


def test_bfloat16_and_int16_are_not_the_same():
    def each(backend):
        dtype = torch.bfloat16 if backend.rank else torch.int16
        with pytest.raises(CollectiveMismatchError, match="bfloat16"):
            rankwire.all_reduce(backend, torch.ones(3, dtype=dtype))

    run(2, each)


def test_bfloat16_and_int16_do_not_travel_together():
    def each(backend):
        tensors = [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int16)]
        return rankwire.all_reduce_coalesced(backend, [*tensors, np.ones(1, np.int16)])

    for halves, whole, array in run(3, each):
        assert equal(halves, torch.full((3,), 3.0).bfloat16())
        assert equal(whole, torch.full((2,), 3, dtype=torch.int16))
        assert array.tolist() == [3]


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_may_lie_in_memory_as_they_like(dtype):
    tensors = tensors_of(2, (4, 6), dtype)

    def each(backend):
        strided = torch.zeros((8, 12), dtype=dtype)[::2, ::2]
        strided[...] = tensors[backend.rank]
        transposed = tensors[backend.rank].T.contiguous().T
        for mine in (strided, transposed):
            assert not mine.is_contiguous()
            assert equal(rankwire.all_gather(backend, mine), torch.cat(tensors))
            assert rankwire.all_reduce(backend, mine) is mine
            assert equal(mine, total_of(tensors))
        out = torch.zeros((6, 4), dtype=dtype).T
        assert rankwire.all_reduce(backend, tensors[backend.rank].clone(), out=out) is out
        assert equal(out, total_of(tensors))

    run(2, each)


def test_a_tensor_that_is_trained_is_reduced_in_place():
    def each(backend):
        weight = torch.ones(3, requires_grad=True)
        (weight * (backend.rank + 1)).sum().backward()
        rankwire.all_reduce(backend, weight.grad, "mean")
        rankwire.broadcast(backend, weight)
        assert weight.requires_grad
        assert weight.grad.tolist() == [1.5] * 3
        assert not rankwire.all_gather(backend, weight).requires_grad

    run(2, each)


def test_results_have_memory_of_their_own():
    def each(backend):
        mine = torch.ones(6)
        for result in (
            rankwire.all_gather(backend, mine),
            rankwire.scatter(backend, mine),
            rankwire.reduce_scatter(backend, mine),
            rankwire.all_to_all(backend, mine),
        ):
            result.fill_(-1.0)
        assert mine.tolist() == [1.0] * 6

    run(2, each)


# -- tensors and arrays ----------------------------------------------------------------------------


def test_some_ranks_may_pass_tensors_and_others_arrays():
    def each(backend):
        mine = np.full(4, backend.rank, np.float32)
        mine = torch.from_numpy(mine) if backend.rank == 1 else mine
        kind = type(mine)
        for result in (
            rankwire.all_gather(backend, mine),
            rankwire.reduce_scatter(backend, mine),
            rankwire.all_reduce(backend, mine),
        ):
            assert type(result) is kind
        return np.asarray(mine).tolist()

    assert run(2, each) == [[1.0] * 4] * 2


def test_what_a_root_scatters_says_what_it_is():
    def each(backend):
        return type(rankwire.scatter(backend, torch.ones(2) if backend.rank else None, 1))

    assert run(2, each) == [torch.Tensor] * 2


def test_out_may_be_of_the_other_kind():
    def each(backend):
        out = torch.empty(4, dtype=torch.float64)
        assert rankwire.all_gather(backend, np.full(2, backend.rank, float), out=out) is out
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
        out = np.empty(2, np.float32)
        assert rankwire.all_reduce(backend, torch.ones(2), out=out) is out
        assert out.tolist() == [2.0, 2.0]

    run(2, each)


def test_an_out_that_does_not_fit():
    with pytest.raises(ConfigurationError, match=r"out is bfloat16 .* the result is int16"):
        run(
            1,
            lambda b: rankwire.all_reduce(
                b, torch.ones(2, dtype=torch.int16), out=torch.ones(2, dtype=torch.bfloat16)
            ),
        )


def test_tensors_in_the_background_and_in_objects():
    def each(backend):
        mine = torch.full((3,), backend.rank + 1.0)
        work = rankwire.all_reduce(backend, mine, async_op=True)
        values = rankwire.all_gather_object(backend, {"w": torch.full((2,), backend.rank)})
        assert [value["w"].tolist() for value in values] == [[0, 0], [1, 1]]
        assert work.wait() is mine
        assert mine.tolist() == [3.0] * 3

    run(2, each)


# -- operands --------------------------------------------------------------------------------------


def test_an_operand_is_on_the_tensors_own_memory():
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros((2, 3), dtype=dtype)
        whole = operand(tensor)
        assert whole.value is tensor
        assert whole.flat().ctypes.data == tensor.data_ptr()
        assert whole.dtype_name == str(dtype).removeprefix("torch.")
        assert whole.is_bfloat16 == (dtype == torch.bfloat16)
        new = new_like(whole, (5,))
        assert (new.value.dtype, tuple(new.value.shape)) == (dtype, (5,))


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.ones(2).to_sparse(), "to_dense"),
        (lambda: torch.ones(2).as_subclass(Marked), "subclass"),
        (lambda: torch.ones(2, device="meta"), "cpu"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ],
    ids=["sparse", "subclass", "meta", "conjugate", "negative"],
)
def test_tensors_that_are_no_plain_memory_are_refused_with_advice(make, advice):
    with pytest.raises(UnsupportedTypeError, match=advice) as caught:
        operand(make(), "out")
    assert caught.value.path == "out"


def test_an_algorithm_sees_no_tensor():
    seen = []

    def each(x):
        seen.append(type(operand(torch.ones(2)).flat()))

    run_algorithm(2, each)
    assert seen == [np.ndarray] * 2


# -- the user's memory -----------------------------------------------------------------------------


def forms():
    """Every collective on tensors: returns the tensors that it was given, and its result."""
    ones = torch.ones

    def each_of(*tensors):
        return list(tensors)

    def with_out(call, mine, out, *args):
        return lambda b, **kw: (each_of(mine, out), call(b, mine, *args, out=out, **kw))

    def lists(count, shape=(3,)):
        return [ones(shape) for _ in range(count)]

    return {
        "all_reduce": lambda b, **kw: ((t := ones(4)), rankwire.all_reduce(b, t, **kw)),
        "all_reduce strided": lambda b, **kw: (
            (t := ones(4, 2)[:, 0]),
            rankwire.all_reduce(b, t, **kw),
        ),
        "reduce": with_out(rankwire.reduce, ones(4), ones(4), 0),
        "broadcast": lambda b, **kw: ((t := ones(4)), rankwire.broadcast(b, t, **kw)),
        "all_gather": with_out(rankwire.all_gather, ones(4), ones(8)),
        "gather": with_out(rankwire.gather, ones(4), ones(8), 0),
        "scatter": with_out(rankwire.scatter, ones(4), ones(2), 0),
        "reduce_scatter": with_out(rankwire.reduce_scatter, ones(4), ones(2)),
        "all_to_all": with_out(rankwire.all_to_all, ones(4), ones(4)),
        "uneven all_to_all": lambda b, **kw: (
            (t := ones(4)),
            rankwire.all_to_all(b, t, send_counts=[1, 3], **kw),
        ),
        "all_gather into a list": lambda b, **kw: (
            [t := ones(3), *(out := lists(2))],
            rankwire.all_gather(b, t, out=out, **kw),
        ),
        "reduce_scatter of a list": lambda b, **kw: (
            [*(given := lists(2)), out := ones(3)],
            rankwire.reduce_scatter(b, given, out=out, **kw),
        ),
        "all_to_all of lists": lambda b, **kw: (
            [*(given := lists(2)), *(out := lists(2))],
            rankwire.all_to_all(b, given, out=out, **kw),
        ),
        "scatter of a list": lambda b, **kw: (
            [*(given := lists(2)), out := ones(3)],
            rankwire.scatter(b, given, out=out, **kw),
        ),
        "gather into a list": lambda b, **kw: (
            [t := ones(3), *(out := lists(2))],
            rankwire.gather(b, t, out=out, **kw),
        ),
        "all_reduce_coalesced": lambda b, **kw: (
            given := lists(3),
            rankwire.all_reduce_coalesced(b, given, **kw),
        ),
        "all_gather_coalesced": lambda b, **kw: (
            [*(given := lists(3)), *(out := lists(3, (6,)))],
            rankwire.all_gather_coalesced(b, given, out=out, **kw),
        ),
        "reduce_scatter_coalesced": lambda b, **kw: (
            [*(given := lists(3, (4,))), *(out := lists(3, (2,)))],
            rankwire.reduce_scatter_coalesced(b, given, out=out, **kw),
        ),
    }


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("backend", ["simulated", "auto", "tcp"])
def test_a_storage_can_be_resized_after_every_collective(backend, async_op):
    """FSDP frees the memory of its parameters between two uses."""

    def each(backend):
        for name, form in forms().items():
            given, result = form(backend, async_op=async_op)
            result = result.wait() if async_op else result
            results = result if isinstance(result, list) else [result]
            given = given if isinstance(given, list) else [given]
            for tensor in [*given, *(t for t in results if t is not None)]:
                tensor.untyped_storage().resize_(0)
                assert tensor.untyped_storage().nbytes() == 0, name

    run(2, each, backend=backend)


@pytest.mark.parametrize("count", [3, 300_000])
@pytest.mark.parametrize("backend", ["simulated", "auto", "tcp"])
def test_a_tensor_that_is_dropped_is_held_until_it_was_read(backend, count):
    def each(backend):
        rank, size = backend.rank, backend.world_size
        here, there = [torch.zeros(count) for _ in range(size)], torch.zeros(size * count)
        parts = torch.zeros(count)
        works = [
            rankwire.all_to_all(
                backend, [torch.full((count,), 10.0 * rank + dst) for dst in range(size)],
                out=here, async_op=True,
            ),
            rankwire.all_gather(
                backend, torch.full((count,), rank + 1.0), out=there, async_op=True
            ),
            rankwire.reduce_scatter(
                backend, [torch.full((count,), 1.0 + dst) for dst in range(size)],
                out=parts, async_op=True,
            ),
        ]  # fmt: skip
        for _ in range(20):  # whoever gets the memory that was let go
            torch.full((count,), -1.0)
        for work in works:
            work.wait()
        assert [set(t.tolist()) for t in here] == [{10.0 * src + rank} for src in range(size)]
        assert [set(t.tolist()) for t in there.chunk(size)] == [{1.0 + src} for src in range(size)]
        assert set(parts.tolist()) == {size * (1.0 + rank)}

    run(3, each, backend=backend)


def test_an_array_on_a_tensor_holds_its_memory():
    memory = np.ones(1000, np.float32)
    tensor = torch.from_numpy(memory)
    gone = weakref.ref(memory)
    view = operand(tensor).flat()[3:].view(np.uint8).data
    del tensor, memory
    assert gone() is not None
    assert np.frombuffer(view, np.float32).tolist() == [1.0] * 997
    del view
    assert gone() is None


def test_a_tensor_whose_storage_was_freed_is_refused():
    whole = torch.ones(6)
    views = [whole, whole[3:], whole.view(2, 3).T]
    whole.untyped_storage().resize_(8)
    for tensor in views:
        with pytest.raises(UnsupportedTypeError, match="freed or resized"):
            operand(tensor)
    assert operand(whole[:2]).flat().size == 2


def test_an_expanded_tensor_is_read_but_not_written():
    def each(backend):
        expanded = torch.full((1,), backend.rank + 1.0).expand(3)
        assert rankwire.all_gather(backend, expanded).tolist() == [1.0] * 3 + [2.0] * 3
        with pytest.raises(ConfigurationError, match="read-only"):
            rankwire.all_reduce(backend, expanded)

    run(2, each)


def test_tensors_made_in_inference_mode_are_like_others():
    def each(backend):
        with torch.inference_mode():
            tensors = [torch.ones(4), torch.ones(4, 2)[:, 0]]
        for tensor in tensors:
            assert rankwire.all_reduce(backend, tensor, async_op=True).wait().tolist() == [2.0] * 4

    run(2, each)


# -- dtypes that numpy does not have ---------------------------------------------------------------

OPAQUE = [
    getattr(torch, name)
    for name in (
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex32"
    ).split()
    if hasattr(torch, name)
]


def patterns(dtype, rank, shape=(6,)):
    """Return a tensor of any bits; that they are numbers is nobody's business."""
    generator = torch.Generator().manual_seed(rank)
    nbytes = dtype.itemsize * int(np.prod(shape))
    raw = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("backend", ["simulated", "auto", "tcp"])
@pytest.mark.parametrize("dtype", OPAQUE, ids=str)
def test_what_numpy_has_no_dtype_for_is_moved_bit_for_bit(dtype, backend):
    def each(backend):
        rank = backend.rank
        all_of_them = [patterns(dtype, at) for at in range(3)]
        mine = all_of_them[rank].clone()
        joined = b"".join(map(raw, all_of_them))
        part = 2 * dtype.itemsize
        cut = slice(rank * part, (rank + 1) * part)
        gathered = rankwire.all_gather(backend, mine)
        assert (gathered.dtype, raw(gathered)) == (dtype, joined)
        at_root = rankwire.gather(backend, mine, 1)
        assert at_root is None if rank != 1 else raw(at_root) == joined
        for out in (None, torch.empty(2, dtype=dtype)):
            scattered = rankwire.scatter(backend, mine if rank == 2 else None, 2, out=out)
            assert (scattered.dtype, raw(scattered)) == (dtype, raw(all_of_them[2])[cut])
        exchanged = rankwire.all_to_all(backend, mine)
        assert raw(exchanged) == b"".join(raw(t)[cut] for t in all_of_them)
        out = [torch.empty_like(t) for t in all_of_them]
        assert rankwire.all_gather(backend, mine, out=out) is out
        assert [raw(t) for t in out] == [raw(t) for t in all_of_them]
        (many,) = rankwire.all_gather_coalesced(backend, [mine])
        assert raw(many) == joined
        rankwire.broadcast(backend, mine, 1)
        assert raw(mine) == raw(all_of_them[1])

    run(3, each, backend=backend)


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter"])
def test_what_numpy_has_no_dtype_for_is_not_reduced(call):
    with pytest.raises(ConfigurationError, match="float8_e5m2 can be moved, but not reduced"):
        run(1, lambda b: getattr(rankwire, call)(b, torch.ones(2).to(torch.float8_e5m2)))


def test_dtypes_of_one_size_are_told_apart():
    def each(backend):
        dtype = torch.float8_e5m2 if backend.rank else torch.float8_e4m3fn
        with pytest.raises(CollectiveMismatchError, match="float8_e5m2"):
            rankwire.all_gather(backend, torch.ones(2).to(dtype))

    run(2, each)


@pytest.mark.parametrize("dtype", [*DTYPES, *OPAQUE], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_a_root_scatters_has_torchs_dtype(dtype):
    for shape in ((), (0, 2), (3, 2)):
        tensor = patterns(torch.uint8, 1, shape).to(dtype)
        whole = operand(tensor)
        payload = bytearray(b"".join(pack_part(whole, whole.flat())[0]))
        out = torch.zeros(shape).to(dtype)
        for result in (unpack_part(payload, None), unpack_part(payload, operand(out))):
            assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
            assert raw(result) == raw(tensor)
        with pytest.raises(ConfigurationError, match="the message holds a tensor"):
            unpack_part(payload, operand(np.zeros(shape)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", ["load", "no_such_thing", "quint8", "float64", "__dict__"])
def test_what_is_no_dtype_of_torch_is_refused(name):
    body = msgspec.msgpack.encode([True, name, (4,)])
    head = len(body).to_bytes(4, "little") + body
    with pytest.raises(InvalidMessageError):
        unpack_part(bytearray(head + bytes(-len(head) % 64) + bytes(16)), None)


# -- lists and factors -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["simulated", "auto", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_lists_of_tensors(dtype, backend):
    shapes = [(3,), (), (2, 70_000), (0, 2)]

    def made(src, dst):
        generator = torch.Generator().manual_seed(4 * src + dst)
        return torch.randint(0, 2, shapes[dst], generator=generator).to(dtype)

    def each(backend):
        rank = backend.rank
        out = [torch.empty(shape).to(dtype) for shape in shapes]
        assert rankwire.all_gather(backend, made(9, rank), out=out) is out
        assert all(equal(t, made(9, at)) for at, t in enumerate(out))
        mine = [made(rank, dst) for dst in range(4)]
        total = total_of([made(src, rank) for src in range(4)])
        assert equal(rankwire.reduce_scatter(backend, mine), total)
        out = [torch.empty(shapes[rank]).to(dtype) for _ in range(4)]
        rankwire.all_to_all(backend, mine, out=out)
        assert all(equal(t, made(src, rank)) for src, t in enumerate(out))
        assert equal(rankwire.scatter(backend, mine, 2), made(2, rank))

    run(4, each, backend=backend)


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3), torch.tensor([0.3])], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_are_multiplied_before_they_are_added_up(dtype, factor):
    tensors = tensors_of(2, (500,), dtype)
    terms = [(tensor.float() * float(factor)).to(dtype) for tensor in tensors]
    expected = (terms[0].float() + terms[1].float()).to(dtype)

    def each(backend):
        mine = tensors[backend.rank].clone()
        assert equal(rankwire.all_reduce(backend, mine, rankwire.PremulSum(factor)), expected)

    run(2, each)


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["simulated", "auto"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_are_operands_as_tensors_are(backend, requires_grad):
    tensors = tensors_of(3)
    total = total_of(tensors)

    def parameter(rank):
        return torch.nn.Parameter(tensors[rank].clone(), requires_grad=requires_grad)

    def each(backend):
        rank = backend.rank
        mine = parameter(rank)
        assert rankwire.all_reduce(backend, mine) is mine
        assert type(mine) is torch.nn.Parameter
        assert mine.requires_grad is requires_grad
        assert torch.equal(mine.detach(), total)
        assert rankwire.broadcast(backend, mine := parameter(rank), 1) is mine
        assert torch.equal(mine.detach(), tensors[1])
        mine = parameter(rank)
        assert equal(rankwire.all_gather(backend, mine), torch.cat(tensors))
        assert equal(rankwire.reduce_scatter(backend, mine), total[2 * rank : 2 * rank + 2])
        rankwire.all_reduce_coalesced(backend, [mine, mine.detach().clone()])
        assert torch.equal(mine.detach(), total)
        values = rankwire.all_gather_object(backend, {"w": parameter(rank)})
        for value, expected in zip(values, tensors, strict=True):
            assert type(value["w"]) is torch.nn.Parameter
            assert torch.equal(value["w"].detach(), expected)

    run(3, each, backend=backend)


def test_a_model_is_trained_after_its_parameters_were_averaged():
    def each(backend):
        torch.manual_seed(backend.rank)
        net = torch.nn.Linear(2, 1)
        for parameter in net.parameters():
            rankwire.broadcast(backend, parameter)
        net(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        return [parameter.detach().tolist() for parameter in net.parameters()]

    first, second = run(2, each)
    assert first == second
