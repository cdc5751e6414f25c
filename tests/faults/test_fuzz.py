"""A hundred thousand damaged inputs for everything that reads bytes from the wire.

Each reader is fuzzed in a process of its own, with little memory (see ``fuzzing``). The nightly run
has a hundred times as many, from other seeds each time, and ``make test`` a fifth.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from faults import fuzzing
from faults.adversary import Adversary
from faults.mutator import Mutator
from faults.sizes import NIGHTLY, time_limit, trials

pytestmark = pytest.mark.timeout(time_limit(60, 3600))

INPUTS = trials(100_000, 10_000_000, quick=20_000)
HARD_INPUTS = trials(40, 5_000, quick=5)
# By day the same each time; by night something new, and the seed is in the error.
SEED = str(time.time_ns()) if NIGHTLY else "day"


def run(target, count=INPUTS, *options):
    return subprocess.run(
        [sys.executable, fuzzing.__file__, target, SEED, str(count), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def check(target, measured):
    ended = run(target)
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads(ended.stdout)
    outcomes = result["outcomes"]
    assert outcomes.pop("read") > 1000, "the fuzzer must reach both ends"
    assert sum(outcomes.values()) > 1000
    measured(f"damaged inputs to the {target}", result["inputs"], unit="inputs")
    measured("slowest input", result["slowest"], limit=fuzzing.SLOW)
    measured("memory beyond the start", result["memory"] / (1 << 20), unit="MiB", limit=64)


@pytest.mark.fault(17, "no damaged greeting is let in, crashes, hangs or takes memory")
@pytest.mark.parametrize("target", ["listener", "dialler"])
def test_f17_a_damaged_handshake(target, measured):
    check(target, measured)


@pytest.mark.fault(
    12, "no damaged frame crashes, hangs or takes memory: a protocol error or nothing"
)
def test_f12_a_damaged_stream_of_frames(measured):
    check("frame", measured)


@pytest.mark.fault(
    60, "no damaged payload crashes, hangs or takes memory: a typed error or a value"
)
@pytest.mark.parametrize("target", ["codec", "array", "control", "request", "reply"])
def test_f60_a_damaged_payload(target, measured):
    check(target, measured)


@pytest.mark.fault(60, "no payload takes more time than is in proportion to its length")
@pytest.mark.parametrize(
    "target", [name for name, target in fuzzing.TARGETS.items() if target.hard is not None]
)
def test_f60_a_payload_that_is_meant_to_take_long(target, measured):
    ended = run(target, HARD_INPUTS, "hard")
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads(ended.stdout)
    measured(f"hard inputs to the {target}", sum(result["outcomes"].values()), unit="inputs")
    measured("slowest, beyond 0.1 s", result["slowest"] * 1e6, unit="us a byte", limit=4)


def test_an_input_that_takes_long_is_found():
    target = fuzzing.Target(
        [b"x"], lambda data, _: sum(range(100 * len(data))), ValueError, hard=Adversary.control
    )
    fuzzing.fuzz_hard(target, "fine", 5)
    target.feed = lambda data, _: sum(range(min(len(data) ** 2, 10**8)))
    with pytest.raises(AssertionError, match="bytes took"):
        fuzzing.fuzz_hard(target, "not fine", 50)


def test_the_same_seed_gives_the_same_hard_inputs():
    one, other = Adversary("seed", [], []), Adversary("seed", [], [])
    assert [one.payload() for _ in range(5)] == [other.payload() for _ in range(5)]


def test_the_same_seed_gives_the_same_inputs():
    corpus = [bytes(range(50)), b"another one"]
    one, other = Mutator(corpus, "seed"), Mutator(corpus, "seed")
    assert [one.next() for _ in range(500)] == [other.next() for _ in range(500)]


def test_a_defect_is_reported_with_its_input():
    """A reader that lets anything but its own errors out is found at once."""
    target = fuzzing.Target(
        [b"\x01\x02\x03"], lambda data, _: data.decode("ascii") and None, ValueError
    )
    assert fuzzing.fuzz(target, "fine", 500)["outcomes"]["UnicodeDecodeError"]
    target.expected = (KeyError,)
    with pytest.raises(UnicodeDecodeError) as info:
        fuzzing.fuzz(target, "not fine", 500)
    assert "input " in info.value.__notes__[0]


GREEDY = """
from faults import fuzzing
def greedy(data, _):
    bytearray(100 << 20)[::4096] = bytes(100 << 8)
fuzzing.fuzz(fuzzing.Target([b"x"], greedy, ValueError), "greedy", 2)
"""


def test_an_allocation_by_a_false_length_is_found():
    """Also in a child of a process that is larger than that."""
    ballast = bytearray(b"x") * (200 << 20)
    ended = subprocess.run(
        [sys.executable, "-c", GREEDY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    del ballast  # it had to live until here
    assert "memory grew by" in ended.stderr, ended.stderr
