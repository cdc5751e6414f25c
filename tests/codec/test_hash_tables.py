"""Keys with hashes of their own that walk along one another are refused, honest ones are not."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.adversary import walkers
from faults.sizes import examples
from rankwire.codec.codec import Codec
from rankwire.codec.limits import MANY_KEYS, _Table, check_table
from rankwire.errors import InvalidMessageError

COUNT = 20_000
CHANCE = random.Random(1)


def hashes_of(keys):
    return np.fromiter(dict.fromkeys(map(hash, keys)), np.int64)


def slots_looked_at(hashes, size, neighbours):
    """Count by inserting one by one, as CPython does."""
    taken = [False] * size
    count = 0
    for value in hashes:
        perturb = value % 2**64
        base = perturb % size
        while True:
            near = neighbours if base + neighbours < size else 0
            for slot in range(base, base + near + 1):
                count += 1
                if not taken[slot]:
                    break
            else:
                perturb >>= 5
                base = (base * 5 + perturb + 1) % size
                continue
            taken[slot] = True
            break
    return count


def slots_counted(hashes, size, neighbours):
    table = _Table(np.array(hashes, np.int64).view(np.uint64), size, neighbours)
    asking = np.arange(len(hashes), dtype=np.int32)
    count = 0
    while len(asking):
        count += len(asking)
        asking = table.ask(asking)
    return count


HASHES = (
    st.integers(-(2**63), 2**63 - 1)
    | st.integers(-50, 50)
    | st.integers(0, 50).map(lambda n: n << 40)
    | st.integers(0, 50).map(lambda n: n << 6)
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(HASHES, max_size=60, unique=True), st.sampled_from([0, 9]))
def test_the_count_is_that_of_inserting_one_by_one(hashes, neighbours):
    size = 64 if len(hashes) > 20 else 32
    expected = slots_looked_at(hashes, size, neighbours)
    assert slots_counted(hashes, size, neighbours) == expected


@pytest.mark.parametrize("neighbours", [0, 9])
def test_the_count_is_right_for_many(neighbours):
    hashes = [CHANCE.randrange(-(2**63), 2**63) for _ in range(2500)]
    hashes += [n << 35 for n in range(2500)]
    expected = slots_looked_at(hashes, 8192, neighbours)
    assert slots_counted(hashes, 8192, neighbours) == expected


@pytest.mark.parametrize(
    "keys",
    [
        range(COUNT),
        range(-COUNT, 0),
        CHANCE.sample(range(COUNT), COUNT),
        [CHANCE.randrange(2**60) for _ in range(COUNT)],
        [n << 20 for n in range(COUNT)],
        [n << 40 for n in range(COUNT)],
        [n * 1000 for n in range(COUNT)],
        [n * n for n in range(COUNT)],
        [n / 7 for n in range(COUNT)],
        [n * 1e-3 for n in range(COUNT)],
        [n * 2.0**-40 for n in range(COUNT)],
        [float(np.float32(CHANCE.random())) for _ in range(COUNT)],
        [1_700_000_000_000_000_000 + 1_000_000 * n for n in range(COUNT)],
        [(n % 100, n // 100) for n in range(COUNT)],
        [complex(n % 100, n // 100) for n in range(COUNT)],
    ],
    ids=lambda keys: repr(list(keys[:3])),
)
def test_honest_keys_pass(keys):
    check_table(hashes_of(keys), is_set=True)


def test_keys_that_walk_along_one_another_are_refused():
    keys = walkers(1 << 14)
    assert len(keys) > MANY_KEYS
    with pytest.raises(InvalidMessageError, match="too long to sort into a table"):
        check_table(hashes_of(keys), is_set=False)
    codec = Codec()
    for value in (dict.fromkeys(keys), [keys]):  # the list is as long and passes
        parts, _ = codec.encode(value)
        payload = bytearray().join(parts)
        if type(value) is list:
            assert codec.decode(payload) == value
            continue
        with pytest.raises(InvalidMessageError, match="too long to sort into a table"):
            codec.decode(payload)


def test_such_keys_are_slow_in_the_real_table():
    """Or the check is against nothing."""
    keys = walkers(1 << 14)
    random_keys = CHANCE.sample(range(2**60), len(keys))
    times = []
    for each in (keys, random_keys):
        began = time.process_time()
        dict.fromkeys(each)
        times.append(time.process_time() - began)
    assert times[0] > 5 * times[1]


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys])
def test_many_honest_keys_travel(make):
    value = make([*range(COUNT), *[n / 7 + 0.1 for n in range(COUNT)], "text", (1, 2)])
    codec = Codec()
    found = codec.decode(bytearray().join(codec.encode(value)[0]))
    assert found == value
    assert type(found) is type(value)
    if type(value) is dict:
        assert list(found) == list(value)
