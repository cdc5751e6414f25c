"""Who has which key: from the secret to the key of two ranks, with bytes alone."""

import hmac
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.errors import InvalidMessageError
from rankwire.wire.keys import (
    KEY_NBYTES,
    SALT_NBYTES,
    RankKey,
    pair_keys,
    rank_key,
    unwrap,
    wrap,
)

SECRET = b"the secret of this job, 32 bytes"
WORLD_KEY = bytes(range(32))
SALT = b"s" * SALT_NBYTES


def keys_of(rank, world_size, world_key=WORLD_KEY):
    wrapped = wrap(rank_key(SECRET, rank), pair_keys(world_key, rank, world_size), SALT)
    return unwrap(rank_key(SECRET, rank), wrapped, rank, world_size)


def test_the_key_of_a_rank_is_this():
    expected = hmac.digest(SECRET, b"rankwire v3 rank" + bytes([3, 1, 0, 0]), "sha256")
    assert rank_key(SECRET, 259) == expected


def test_every_rank_has_another_key():
    assert len({rank_key(SECRET, rank) for rank in range(1000)}) == 1000
    assert rank_key(b"another secret, also 32 bytes...", 1) != rank_key(SECRET, 1)


def test_a_rank_key_is_not_shown():
    key = rank_key(SECRET, 1)
    assert repr(key) == f"{key!s}" == "RankKey(...)"
    assert isinstance(pickle.loads(pickle.dumps(key)), RankKey)


@given(st.integers(2, 40))
def test_two_ranks_have_the_same_key_and_no_two_pairs_do(world_size):
    keys = [keys_of(rank, world_size) for rank in range(world_size)]
    pairs = list(itertools.combinations(range(world_size), 2))
    assert all(keys[a][b] == keys[b][a] for a, b in pairs)
    assert len({keys[a][b] for a, b in pairs}) == len(pairs)
    assert all(rank not in keys[rank] for rank in range(world_size))
    assert all(len(key) == KEY_NBYTES for of_one in keys for key in of_one.values())


def test_another_world_has_other_keys():
    assert keys_of(0, 2) != keys_of(0, 2, bytes(32))


def test_keys_are_wrapped_for_one_rank_and_with_one_salt():
    keys = pair_keys(WORLD_KEY, 1, 3)
    wrapped = wrap(rank_key(SECRET, 1), keys, SALT)
    assert wrapped[:SALT_NBYTES] == SALT
    assert len(wrapped) == SALT_NBYTES + len(keys)
    pieces = {keys[at : at + 4] for at in range(len(keys) - 3)}
    assert not any(piece in wrapped for piece in pieces)
    good = unwrap(rank_key(SECRET, 1), wrapped, 1, 3)
    assert not set(good.values()) & set(unwrap(rank_key(SECRET, 2), wrapped, 1, 3).values())
    again = wrap(rank_key(SECRET, 1), keys, b"t" * SALT_NBYTES)
    assert again[SALT_NBYTES:] != wrapped[SALT_NBYTES:]


@pytest.mark.parametrize("cut", [0, 1, SALT_NBYTES, -1])
def test_keys_for_another_number_of_ranks_are_refused(cut):
    wrapped = wrap(rank_key(SECRET, 1), pair_keys(WORLD_KEY, 1, 3), SALT)
    with pytest.raises(InvalidMessageError, match="keys of a world of 3"):
        unwrap(rank_key(SECRET, 1), wrapped[:cut], 1, 3)
    with pytest.raises(InvalidMessageError, match="keys of a world of 4"):
        unwrap(rank_key(SECRET, 1), wrapped, 1, 4)
