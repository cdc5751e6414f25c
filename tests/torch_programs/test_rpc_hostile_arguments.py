"""What another rank may call of torch and Python neither ends a process nor shows its memory.

``hostile_arguments`` calls all of it with hostile shapes, strides, indices, values and dtypes in a
child process. The outcomes must be the same in children whose free memory is filled differently.
"""

import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from faults.sizes import NIGHTLY

torch = pytest.importorskip("torch")

from rpc_ranks import run_workers  # noqa: E402

import rankwire.torch.rpc as rpc  # noqa: E402
from rankwire.errors import FunctionNotFoundError, RemoteError  # noqa: E402
from rankwire.torch.rpc import bounds  # noqa: E402
from rankwire.torch.rpc.guards import guarded  # noqa: E402
from rankwire.torch.rpc.listed_functions import LAYERS, LISTED_FUNCTIONS  # noqa: E402
from rankwire.torch.rpc.naming_rule import NameRefusedError, NamingRule  # noqa: E402
from rankwire.torch.rpc.session import current  # noqa: E402
from rankwire.torch.rpc.torch_codec import build_tensor  # noqa: E402

PROGRAM = str(Path(__file__).with_name("hostile_arguments.py"))
CASES, SEEDS = (1000, range(1, 11)) if NIGHTLY else (40, (1,))
FILLS = ("90", "165")


def outcomes(seed, cases, fill, *name):
    """Return the outcome of each case by its name, and how the child has ended."""
    env = {**os.environ, "MALLOC_PERTURB_": fill, "PYTHONHASHSEED": "0"}
    # A new process and not a fork, because glibc reads MALLOC_PERTURB_ when it starts.
    command = [sys.executable, PROGRAM, str(seed), str(cases), *name]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    lines = ended.stdout.splitlines()
    begun = [line for line in lines if line.startswith("begin")]
    told = [line for line in lines if line.startswith("end")]
    return dict(zip_longest(begun, told, fillvalue="did not end")), ended


def check(seed, cases, *name):
    runs = [outcomes(seed, cases, fill, *name) for fill in FILLS]
    for found, ended in runs:
        assert ended.returncode == 0, (list(found.items())[-1], ended.stderr[-2000:])
    for found, _ in runs:
        too_large = [case for case, told in found.items() if told.startswith("end too large")]
        assert not too_large, "torch was asked for more memory than the checks allow"
    first, *others = (found for found, _ in runs)
    for found in others:
        assert [case for case in first if found[case] != first[case]] == []
    return first


@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_arguments_neither_end_the_process_nor_show_its_memory(seed):
    told = check(seed, CASES).values()
    assert sum(outcome.startswith("end returned") for outcome in told) > len(told) / 5


@pytest.mark.parametrize("name", ["shows memory", "writes", "dies"])
def test_this_would_notice_a_function_that(name):
    with pytest.raises(AssertionError):
        check(1, 2, name)


KILLS = torch.tensor(-(2**63)), torch.tensor(-1)
ZEROS = torch.zeros(3)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("torch:div", KILLS, {"rounding_mode": "trunc"}),
        ("torch:ones", (2**40,), {}),
        ("torch:ones", ([2**20, 2**20, 0],), {}),
        ("torch:ones", (3,), {"device": "meta"}),
        ("torch:add", (torch.zeros(2**20, 1), torch.zeros(2**20)), {}),
        ("torch:add", (ZEROS, ZEROS), {"out": torch.zeros(1)}),
        ("torch:sum", (torch.zeros(0, 2**40), 0), {}),
        ("torch:matmul", (torch.zeros(2**16, 1), torch.zeros(1, 2**16)), {}),
        ("torch:split", (torch.zeros(2**17), 1), {}),
        ("torch:neg", (ZEROS.to_sparse(),), {}),
        ("torch:neg", (torch.zeros(3, device="meta"),), {}),
        ("_operator:mul", ([0], 10**9), {}),
        ("_operator:mul", (1 << 2**20, 1 << 2**20), {}),
        ("builtins:max", ([1, 2],), {"key": print}),
        ("builtins:list", (range(10**9),), {}),
        ("builtins:list", ("abc",), {}),
        ("torch.nn.modules.linear:Linear", (10**6, 10**6), {}),
        ("torch.nn.modules.rnn:LSTM", (1, 1, 10**9), {}),
        ("torch.nn.modules.linear:Linear", (3, 3), {"device": "meta"}),
        ("torch.nn.modules.sparse:Embedding", (3, 3), {"_weight": torch.ones(2, 3)}),
        ("torch.nn.modules.activation:GELU", (torch.Tensor,), {}),
    ],
)
def test_arguments_are_refused_before_torch_or_python_sees_them(name, args, kwargs):
    function = guarded(NamingRule().find(name))
    with pytest.raises((TypeError, ValueError), match=r"another rank|no named arguments"):
        function(*args, **kwargs)


@pytest.mark.parametrize(
    "name",
    [
        *("torch:as_strided", "torch:segment_reduce", "torch:native_batch_norm"),
        *("torch:fbgemm_pack_gemm_matrix_fp16", "torch:sparse_coo_tensor", "torch:fmod"),
        *("builtins:pow", "_operator:pow", "_operator:lshift", "builtins:range", "builtins:bytes"),
        *("builtins:sum", "builtins:str", "_operator:floordiv", "_operator:concat"),
    ],
)
def test_what_can_show_memory_end_the_process_or_hold_the_interpreter_is_not_listed(name):
    with pytest.raises(NameRefusedError):
        NamingRule().find(name)


def test_nothing_of_torch_and_python_is_found_where_only_what_is_exposed_is():
    for name in (*LISTED_FUNCTIONS, *LAYERS):
        with pytest.raises(NameRefusedError):
            NamingRule("decorated").find(name)


HOSTILE = {
    "torch:div": (*KILLS, {"rounding_mode": "trunc"}),
    "torch:native_batch_norm": (torch.rand(2, 3000), *[torch.rand(1)] * 4, False, 0.1, 1e-5),
    "torch:segment_reduce": (torch.zeros(4), "sum"),
    "builtins:pow": (3, 30_000_000),
    f"{__name__}:Shell": (["false"],),
    f"{__name__}:_private": (),
}


class Shell(subprocess.Popen):
    pass


def _private():
    raise AssertionError("a private function ran")


def test_a_worker_refuses_hostile_calls_and_serves_the_next():
    def check(rank):
        if rank == 0:
            return None
        for name, args in HOSTILE.items():
            kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
            positional = args[:-1] if kwargs else args
            with pytest.raises((FunctionNotFoundError, RemoteError)) as caught:
                current().agent.rpc_sync(0, name, *positional, timeout=20, **kwargs)
            assert "refused" in str(caught.value) or caught.value.remote_type == "TypeError"
        return rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1)).tolist()

    assert run_workers(2, check, allow=[__name__])[1] == [2, 2]


def test_the_page_lists_them():
    page = (Path(__file__).parents[2] / "docs" / "from-torch-rpc.md").read_text()
    _, functions, rest = re.split(r"these functions of torch:|of Python:", page, maxsplit=2)
    listed = {name.partition(":")[2] for name in LISTED_FUNCTIONS if name.startswith("torch:")}
    assert set(re.findall(r"`(\w+)`", functions)) == listed
    _, made, _ = re.split(r"to be made for a `RemoteModule`:|For any other module", rest)
    assert set(re.findall(r"`(\w+)`", made)) == {cls.__name__ for cls in LAYERS.values()}


def test_limits_are_those_of_the_result_and_not_of_each_tensor(monkeypatch):
    monkeypatch.setattr(bounds.ResultLimits, "elements", 8)
    large = torch.ones(4, 4)
    assert guarded(torch.add)(large, 1).shape == (4, 4)
    assert guarded(torch.sub)(large, torch.ones(4)).shape == (4, 4)
    with pytest.raises(ValueError, match="at most 8 elements"):
        guarded(torch.sub)(torch.ones(4, 1), torch.ones(4))


def test_the_gaps_of_a_tensor_with_strides_are_zero():
    torch.use_deterministic_algorithms(True)  # fills what is not written
    try:
        built = build_tensor([0, False, torch.ones(57), [16]], None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert built.stride() == (16,)
    assert torch.equal(built, torch.ones(57))
    every = built.as_strided((56 * 16 + 1,), (1,))
    assert every.sum() == 57
