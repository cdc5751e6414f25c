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
    pair_key,
    pair_keys,
    rank_key,
    unwrap,
    unwrap_one,
    wrap,
)

SECRET = b"the secret of this job, 32 bytes"
WORLD_KEY = bytes(range(32))
SALT = b"s" * SALT_NBYTES


def keys_of(rank, world_size, world_key=WORLD_KEY):
    wrapped = wrap(rank_key(SECRET, rank), pair_keys(world_key, rank, [0] * world_size), SALT)
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
    keys = pair_keys(WORLD_KEY, 1, [0] * 3)
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
    wrapped = wrap(rank_key(SECRET, 1), pair_keys(WORLD_KEY, 1, [0] * 3), SALT)
    with pytest.raises(InvalidMessageError, match="keys of a world of 3"):
        unwrap(rank_key(SECRET, 1), wrapped[:cut], 1, 3)
    with pytest.raises(InvalidMessageError, match="keys of a world of 4"):
        unwrap(rank_key(SECRET, 1), wrapped, 1, 4)


def test_every_incarnation_of_a_rank_has_another_key():
    assert rank_key(SECRET, 1, 0) == rank_key(SECRET, 1)
    assert len({rank_key(SECRET, rank, life) for rank in range(9) for life in range(9)}) == 81


def test_a_rank_that_is_started_anew_has_another_key_with_everyone():
    before, after = [0, 0, 0], [0, 1, 0]
    for other in (0, 2):
        keys = {pair_key(WORLD_KEY, other, 1, lives) for lives in (before, after)}
        assert len(keys) == 2
        assert pair_key(WORLD_KEY, 1, other, after) in keys
    assert pair_key(WORLD_KEY, 0, 2, before) == pair_key(WORLD_KEY, 0, 2, after)
    # Which of the two is the new one matters.
    assert pair_key(WORLD_KEY, 0, 1, [1, 0]) != pair_key(WORLD_KEY, 0, 1, [0, 1])


def test_one_key_is_wrapped_as_all_are():
    wrapped = wrap(rank_key(SECRET, 1), WORLD_KEY, SALT)
    assert unwrap_one(rank_key(SECRET, 1), wrapped) == WORLD_KEY
    assert unwrap_one(rank_key(SECRET, 1, 1), wrapped) != WORLD_KEY
    for other in (wrapped[:-1], wrapped + b"x", b""):
        with pytest.raises(InvalidMessageError, match="key of two ranks"):
            unwrap_one(rank_key(SECRET, 1), other)
