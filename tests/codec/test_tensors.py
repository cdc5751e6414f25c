"""torch tensors through the codec."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from codec import payloads
from rankwire.codec import tensors
from rankwire.codec.codec import Codec
from rankwire.codec.tensors import bytes_of, map_tensor
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

payload_of = partial(payloads.payload_of, Codec())
roundtrip = partial(payloads.roundtrip, Codec())

torch = pytest.importorskip("torch")

DTYPES = [getattr(torch, name) for name in tensors.CODES if hasattr(torch, name)]


class Marked(torch.Tensor):
    """A subclass, which may mean more."""


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is torch.Tensor
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    if "float8" in str(left.dtype):  # torch compares none of them
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_arrive_equal(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert_same(roundtrip(tensor), tensor)


def test_a_tensor_among_other_values():
    value = {"a": (torch.arange(3), np.arange(4)), "b": [torch.ones(2, 2), b"x" * 5000]}
    arrived = roundtrip(value)
    assert_same(arrived["a"][0], torch.arange(3))
    assert_same(arrived["b"][0], torch.ones(2, 2))


def test_a_dense_tensor_is_not_copied_by_the_sender():
    for tensor in (torch.ones(100), torch.ones(100, dtype=torch.bfloat16)):
        buffers, _ = Codec().encode(tensor)
        data = np.frombuffer(buffers[-1], "u1")
        assert data.ctypes.data == tensor.data_ptr()


def test_a_received_tensor_is_a_writable_view_of_the_payload():
    for dtype in (torch.float32, torch.bfloat16):
        payload = payload_of([b"x" * 5000, torch.ones(10, dtype=dtype)])
        tensor = Codec().decode(payload)[1]
        start = np.frombuffer(payload, "u1").ctypes.data
        assert start <= tensor.data_ptr() < start + len(payload)
        assert tensor.data_ptr() % 16 == 0
        tensor += 1
        assert torch.equal(tensor, torch.full((10,), 2, dtype=dtype))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::2],
        lambda t: t.T,
        lambda t: t[:, 1],
        lambda t: t.expand(3, 4, 4),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
)
def test_views_arrive_with_the_elements_they_show(view):
    tensor = view(torch.arange(16.0).reshape(4, 4))
    assert_same(roundtrip(tensor), tensor)


def test_gradients_are_not_sent():
    tensor = torch.ones(3, requires_grad=True)
    arrived = roundtrip(tensor * 2)
    assert not arrived.requires_grad
    assert_same(arrived, torch.full((3,), 2.0))


def test_nan_bits_of_bfloat16_are_kept():
    tensor = torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.bfloat16)
    assert torch.equal(roundtrip(tensor).view(torch.int16), tensor.view(torch.int16))


def test_a_tensor_on_another_device_says_call_cpu():
    with pytest.raises(UnsupportedTypeError, match=r"\.cpu\(\)") as caught:
        Codec().encode({"w": torch.ones(2, device="meta")})
    assert caught.value.path == 'value["w"]'


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [
        (torch.nn.Parameter(torch.ones(2)).as_subclass(Marked), "detach"),
        (torch.ones(2, 2).to_sparse(), "to_dense"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "dtype"),
        (torch.ones((1,) * 33), "dimensions"),
    ],
    ids=["subclass", "sparse", "bits8", "33 dimensions"],
)
def test_other_tensors_are_refused_with_advice(tensor, advice):
    with pytest.raises(UnsupportedTypeError, match=advice):
        Codec().encode(tensor)


@pytest.mark.parametrize(
    "description",
    [
        [],
        ["float32"],
        ["float32", 3],
        ["float32", -2],
        ["float32", 2**62, 2**62],
        ["float32", "2"],
        ["bool", 8],
        ["object", 1],
        ["Tensor", 2],
        ["load", 2],
        [1, 2],
        [["float32"], 2],
    ],
    ids=str,
)
def test_a_malformed_tensor_is_refused(description):
    head = msgspec.msgpack.encode(Ext(42, msgspec.msgpack.encode(description)))
    prefix = struct.pack("<I", len(head)) + head
    with pytest.raises(InvalidMessageError):
        Codec().decode(bytearray(prefix + bytes(-len(prefix) % 16) + b"\2" * 8))


def test_the_codec_does_not_import_torch_to_send():
    program = (
        "import sys, numpy; from rankwire.codec.codec import Codec;"
        "Codec().encode([numpy.ones(2), (1,), numpy.float32(1)]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_a_tensor_that_was_encoded_can_still_be_resized():
    """What ``Tensor.numpy`` forbids for ever."""
    for tensor in (torch.ones(8), torch.ones(8, dtype=torch.bfloat16), torch.ones(8).conj()):
        assert_same(roundtrip(tensor), tensor)
        tensor.untyped_storage().resize_(0)


def test_a_hook_for_tensors_replaces_the_codecs_encoding():
    codec = Codec()
    codec.register(
        torch.Tensor,
        take=lambda tensor, _: (tensor.detach().numpy(), tensor.requires_grad),
        build=lambda state, _: torch.from_numpy(state[0]).requires_grad_(state[1]),
    )
    tensor = torch.arange(3.0, requires_grad=True)
    arrived = codec.decode(bytearray().join(codec.encode([tensor])[0]))[0]
    assert_same(arrived, tensor)
    assert arrived.requires_grad
    assert not roundtrip(tensor).requires_grad


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_parameter_arrives_as_one(dtype, requires_grad):
    parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype), requires_grad=requires_grad)
    (parameter * 2).sum().abs().backward() if requires_grad else None
    arrived = roundtrip([parameter])[0]
    assert type(arrived) is torch.nn.Parameter
    assert arrived.requires_grad is requires_grad
    assert arrived.is_leaf
    assert arrived.grad is None
    assert_same(arrived.data, parameter.data)


def test_a_parameter_is_sent_from_where_it_is():
    parameter = torch.nn.Parameter(torch.ones(2000))
    buffers = Codec().encode(parameter)[0]
    assert np.frombuffer(buffers[-1], np.uint8).ctypes.data == parameter.data_ptr()


def test_the_description_of_a_parameter_has_its_gradient_in_front():
    packed = msgspec.msgpack.encode([True, "float32", 2])
    payload = payload_of(torch.nn.Parameter(torch.ones(2)))
    assert bytes(Ext(44, packed).data) in payload


@pytest.mark.parametrize(
    "description",
    [[], [True], [1, "float32", 2], ["float32", 2], [True, "int32", 2], [True, "object", 2]],
    ids=str,
)
def test_a_malformed_parameter_is_refused(description):
    head = msgspec.msgpack.encode(Ext(44, msgspec.msgpack.encode(description)))
    payload = struct.pack("<I", len(head)) + head
    payload += bytes(-len(payload) % 16) + bytes(8)
    with pytest.raises(InvalidMessageError):
        Codec().decode(bytearray(payload))


# -- whole states ----------------------------------------------------------------------------------


def model() -> Any:
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(*layers)


def test_the_state_of_a_module_arrives_whole():
    first, second = model(), model()
    state = roundtrip({"state": first.state_dict()})["state"]
    assert type(state) is OrderedDict
    assert state._metadata == first.state_dict()._metadata
    second.load_state_dict(state, strict=True)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    for value in roundtrip(first.state_dict(keep_vars=True)).values():
        assert type(value) in (torch.nn.Parameter, torch.Tensor)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"])
def test_the_state_of_an_optimizer_arrives_whole(name):
    def trained() -> tuple[Any, Any]:
        torch.manual_seed(1)
        net = model()
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(3):
            net(torch.ones(5, 3)).sum().backward()
            optimizer.step()
            schedule.step()
        return optimizer, schedule

    (first, schedule), (second, other) = trained(), trained()
    second.load_state_dict(roundtrip(first.state_dict()))
    other.load_state_dict(roundtrip(schedule.state_dict()))
    assert str(second.state_dict()) == str(first.state_dict())
    assert other.state_dict() == schedule.state_dict()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_not_just_memory_has_no_bytes():
    dense = torch.ones(4, 4)
    others = (
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.t()[:, :2],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.empty(0),
        torch.empty(3, device="meta"),
    )
    for tensor in others:
        assert bytes_of(tensor) is None
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert bytes_of(freed) is None


@pytest.mark.parametrize("look", [bytes_of, lambda tensor: map_tensor(tensor, np.dtype("f4")).data])
def test_memory_that_is_looked_at_stays_when_the_tensor_gets_another(look):
    """As by ``module.half()`` in another thread while a message leaves."""
    tensor = torch.ones(1 << 18)[5:]
    memory = look(tensor)
    tensor.data = torch.zeros(3)
    others = [torch.full((1 << 18,), 7.0) for _ in range(4)]
    assert set(np.frombuffer(memory, "f4").tolist()) == {1.0}
    assert len(others) == 4
