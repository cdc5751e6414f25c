"""Sizes, dtypes, devices, layouts and memory formats of torch."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from codec import payloads
from codec.payloads import forge_extension as forge
from rankwire.codec import tensors
from rankwire.codec.codec import Codec
from rankwire.codec.values import Code
from rankwire.errors import InvalidMessageError, UnsupportedTypeError

roundtrip = partial(payloads.roundtrip, Codec())


def test_without_torch_nothing_is_of_torch_and_nothing_of_torch_arrives(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    tensors._torch.cache_clear()
    assert tensors.size_of((1, 2)) is None
    assert tensors.constant_of("float32") is None
    for code, body in [(Code.TORCH_SIZE, [1]), (Code.TORCH_CONSTANT, ["dtype", "float32"])]:
        with pytest.raises(InvalidMessageError, match="not installed here"):
            Codec().decode(forge(code, body))


def test_nothing_imports_torch_to_refuse_a_value():
    program = (
        "import sys; from rankwire import Codec\n"
        "for value in (object(), (1,), [1]):\n"
        "    try: Codec().encode([value, object()])\n"
        "    except TypeError: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- with torch ------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("extents", [[], [0], [-1, 2], [3, 0, 2**40], [1] * 100])
def test_sizes_stay_sizes(torch, extents):
    size = torch.Size(extents)
    arrived = roundtrip([size, {size: (size,)}])
    assert arrived == [size, {size: (size,)}]
    assert type(arrived[0]) is torch.Size
    assert [type(key) for key in arrived[1]] == [torch.Size]


def test_every_constant_arrives_as_itself(torch):
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    constants = [value for value in vars(torch).values() if type(value) in kinds]
    assert len(constants) > 40
    for constant in constants:
        assert roundtrip((constant, [constant]))[0] is constant


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:3", "mps", "meta", "xpu:1", "cpu:0"])
def test_devices_arrive_equal(torch, name):
    device = torch.device(name)
    assert roundtrip({"d": device}) == {"d": device}
    assert type(roundtrip(device)) is torch.device


def test_the_encoding_is_these_bytes(torch):
    for value, code, body in [
        (torch.Size([2, 3]), 45, [2, 3]),
        (torch.bfloat16, 46, ["dtype", "bfloat16"]),
        (torch.device("cuda:1"), 46, ["device", "cuda:1"]),
        (torch.sparse_coo, 46, ["layout", "sparse_coo"]),
        (torch.channels_last, 46, ["memory_format", "channels_last"]),
    ]:
        assert bytearray().join(Codec().encode(value)[0]) == forge(code, body)


@pytest.mark.parametrize(
    "body",
    [
        ["dtype", "load"],
        ["dtype", "Tensor"],
        ["dtype", "nn"],
        ["dtype", "compiler"],
        ["dtype", "strided"],
        ["layout", "float32"],
        ["dtype", "nn.functional"],
        ["dtype", ["float32"]],
        ["dtype"],
        ["dtype", "float32", 1],
        ["device", "cpu:-1"],
        ["device", "no such device"],
        ["device", "x" * 1000],
        ["device", "cuda:99999999999999"],
        ["device", 1],
        ["Tensor", "float32"],
        ["hub", "load"],
        [["dtype"], "float32"],
        {"dtype": "float32"},
        "dtype",
        [],
    ],
    ids=str,
)
def test_a_name_outside_the_table_is_refused(torch, body):
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge(Code.TORCH_CONSTANT, body))


@pytest.mark.parametrize("body", [["1"], [1.0], [True], [None], 3, "12"])
def test_a_malformed_size_is_refused(torch, body):
    with pytest.raises(InvalidMessageError):
        Codec().decode(forge(Code.TORCH_SIZE, body))


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda torch: torch.nn.Linear(1, 1), r"send its state_dict\(\)"),
        (lambda torch: torch.optim.SGD([torch.ones(1)], 0.1), r"send its state_dict\(\)"),
        (lambda torch: torch.Generator(), "get_state"),
        (lambda torch: torch.ones(2, 2).to_sparse(), "to_dense"),
        (lambda torch: torch.ones(1, device="meta"), r"\.cpu\(\)"),
        (lambda torch: torch.add, "register it there with agent.register"),
        (lambda torch: torch, "send its name"),
    ],
)
def test_what_torch_has_and_is_refused_says_what_to_do(torch, make, advice):
    with pytest.raises(UnsupportedTypeError, match=advice):
        Codec().encode([make(torch)])
