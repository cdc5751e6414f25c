"""torch tensors as messages: they arrive as tensors, and are sent from where they are."""

from functools import partial

import numpy as np
import pytest

from rankwire.backends.payloads import share_memory
from rankwire.errors import ConfigurationError, RankwireError, UnsupportedTypeError
from rankwire.testing import simulated_world, tcp_world
from rankwire.wire.array_messages import pack_array
from worlds import PATIENCE, Running

torch = pytest.importorskip("torch")

WORLDS = {
    "simulated": simulated_world,
    "auto": tcp_world,
    "tcp": partial(tcp_world, transport="tcp"),
}
SOON = 8.0
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]


@pytest.fixture(params=WORLDS)
def pair(request):
    with WORLDS[request.param](2, timeout=PATIENCE) as world:
        yield world


def passed_on(pair, tensor, **options):
    sending = Running(pair[0].send_array, tensor, 1)
    received = pair[1].recv_array(0, **options)
    sending.result()
    return received


def numbered(shape, dtype=torch.float32):
    count = int(np.prod(shape, dtype=int))
    numbers = torch.arange(count).reshape(shape)
    return numbers % 2 == 0 if dtype is torch.bool else (numbers % 100).to(dtype)


def assert_same(tensor, other):
    assert type(other) is torch.Tensor
    assert other.dtype == tensor.dtype
    assert other.shape == tensor.shape
    assert torch.equal(other, tensor.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_arrives_as_it_was_sent(pair, dtype):
    for shape in [(), (0,), (3, 0), (7,), (3, 4, 5), (600, 500)]:
        tensor = numbered(shape, dtype)
        assert_same(tensor, passed_on(pair, tensor))
        out = torch.zeros_like(tensor)
        assert passed_on(pair, tensor, out=out) is out
        assert_same(tensor, out)


@pytest.mark.parametrize("size", [10, 600])
def test_tensors_that_do_not_lie_in_order_arrive_in_order(pair, size):
    tensor = numbered((size, size, 2))
    for sent in (tensor.transpose(0, 1), tensor[::2], tensor[..., 0], tensor.permute(2, 0, 1)):
        assert_same(sent, passed_on(pair, sent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [10, 600])
def test_a_tensor_arrives_in_one_with_gaps(pair, size, dtype):
    memory = torch.zeros(size, 2 * size, dtype=dtype)
    for out in (memory[:, ::2], memory[:, :size], memory[:, size:].T):
        assert passed_on(pair, numbered((size, size), dtype), out=out) is out
        assert_same(numbered((size, size), dtype), out)


@pytest.mark.parametrize("size", [10, 600])
def test_a_tensor_with_a_gradient_is_sent_without_it(pair, size):
    tensor = numbered((size, size)).requires_grad_()
    received = passed_on(pair, tensor)
    assert_same(tensor, received)
    assert not received.requires_grad


def test_what_arrives_can_be_written(pair):
    for size in (10, 600):
        received = passed_on(pair, numbered((size, size)))
        received += 1
        assert_same(numbered((size, size)) + 1, received)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_sent_from_where_it_is(dtype):
    tensor = numbered((100, 100), dtype)
    _, elements = pack_array(tensor)[0]
    array = np.frombuffer(elements, np.uint8)
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    assert array.nbytes == tensor.nbytes


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda size: torch.zeros(size, dtype=torch.float64),
        lambda size: torch.zeros(size, dtype=torch.int32),
        lambda size: torch.zeros(size + 1),
        lambda size: torch.zeros(size, 1),
        lambda size: np.zeros(size, "<f4"),
    ],
    ids=["float64", "int32", "length", "shape", "array"],
)
def test_an_out_that_does_not_fit_a_tensor_is_refused(pair, size, wrong):
    out = wrong(size)
    sending = Running(pair[0].send_array, numbered(size), 1)
    with pytest.raises(ConfigurationError, match="tensor float32"):
        pair[1].recv_array(0, out=out)
    sending.result(SOON)
    assert not out.any()
    assert_same(numbered(size), passed_on(pair, numbered(size)))


def test_a_tensor_does_not_fit_an_array_of_the_same_bytes(pair):
    for sent, out in (
        (numbered(5, torch.bfloat16), torch.zeros(5, dtype=torch.int16)),
        (np.zeros(5, "<i2"), torch.zeros(5, dtype=torch.int16)),
        (np.zeros(5, "<f4"), torch.zeros(5)),
    ):
        sending = Running(pair[0].send_array, sent, 1)
        with pytest.raises(ConfigurationError, match="out is"):
            pair[1].recv_array(0, out=out)
        sending.result(SOON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("in_place", [False, True])
def test_two_ranks_exchange_tensors(pair, size, dtype, in_place):
    def swap(rank):
        tensor = torch.full((size,), rank + 1, dtype=dtype)
        out = tensor if in_place else torch.zeros_like(tensor)
        assert pair[rank].sendrecv(tensor, 1 - rank, out=out) is out
        return out

    got = [each.result() for each in [Running(swap, rank) for rank in (0, 1)]]
    assert (got[0] == 2).all()
    assert (got[1] == 1).all()


def test_a_tensor_and_an_array_are_exchanged(pair):
    sent = [numbered(300_000), np.arange(300_000)]
    got = [
        each.result()
        for each in [Running(pair[rank].sendrecv, sent[rank], 1 - rank) for rank in (0, 1)]
    ]
    assert (got[0] == sent[1]).all()
    assert_same(sent[0], got[1])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_is_not_carried_is_refused_with_advice(pair, tensor):
    with pytest.raises(UnsupportedTypeError):
        pair[0].send_array(tensor, 1)
    with pytest.raises(RankwireError):
        pair[0].sendrecv(tensor, 1, out=torch.zeros(3), timeout=1.0)


@pytest.mark.parametrize("size", [5, 300_000])
def test_a_parameter_is_sent_as_its_tensor_and_can_be_filled(pair, size):
    parameter = torch.nn.Parameter(torch.ones(size))
    assert_same(parameter, passed_on(pair, parameter))
    receiving = Running(pair[1].recv_array, 0, out=parameter)
    pair[0].send_array(numbered(size), 1)
    assert receiving.result() is parameter
    assert torch.equal(parameter.detach(), numbered(size))


def test_a_conjugated_tensor_arrives_as_the_numbers_it_shows(pair):
    tensor = torch.complex(numbered(5), numbered(5)).conj()
    assert tensor.is_conj()
    assert_same(tensor.resolve_conj(), passed_on(pair, tensor))
    out = torch.zeros(5, dtype=torch.complex64)
    answering = Running(pair[1].sendrecv, tensor, 0, out=torch.zeros_like(out))
    assert_same(tensor.resolve_conj(), pair[0].sendrecv(tensor, 1, out=out, timeout=PATIENCE))
    answering.result()


def test_memory_in_common_is_noticed_between_tensors_and_arrays():
    tensor = torch.zeros(10, dtype=torch.bfloat16)
    assert share_memory(tensor, tensor[2:])
    assert not share_memory(tensor, torch.zeros(10))
    tensor = torch.zeros(10)
    assert share_memory(tensor.numpy(), tensor)


def test_a_tensor_that_was_sent_or_filled_can_still_be_resized(pair):
    """What ``Tensor.numpy`` forbids for ever, and programs that free their parameters need."""
    own, filled = torch.ones(40_000), torch.zeros(40_000)
    passed_on(pair, own, out=filled)
    for tensor in (own, filled):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(40_000 * 4)


def test_a_tensor_whose_memory_was_freed_is_refused(pair):
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTypeError, match="freed"):
        pair[0].send_array(freed, 1)
