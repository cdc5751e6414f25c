"""Roles: the names of ranks, as a user gives and reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.backends.arguments import check_rank, check_ranks
from rankwire.backends.connect import connect
from rankwire.backends.roles import Roles, format_roles, parse_roles, roles_of_world
from rankwire.backends.simulated import SimulatedBackend
from rankwire.errors import ConfigurationError, InvalidRankError
from rankwire.testing import run_ranks, tcp_world

WORLD = roles_of_world(["trainer", "rollout", "rollout"], 3)


def test_a_role_is_a_tuple_of_ranks_that_have_names():
    assert dict(WORLD) == {"trainer": (0,), "rollout": (1, 2)}
    assert [WORLD.name_of(rank) for rank in range(3)] == ["trainer/0", "rollout/0", "rollout/1"]
    assert [WORLD.rank_of(WORLD.name_of(rank)) for rank in range(3)] == [0, 1, 2]
    assert repr(WORLD) == "<Roles {'trainer': (0,), 'rollout': (1, 2)}>"


def test_ranks_of_a_role_need_not_follow_each_other():
    roles = roles_of_world(["trainer", "rollout", "trainer", "rollout"], 4)
    assert dict(roles) == {"trainer": (0, 2), "rollout": (1, 3)}
    assert roles.name_of(2) == "trainer/1"


def test_a_world_without_roles_has_no_names():
    roles = roles_of_world(None, 2)
    assert (len(roles), roles.name_of(1)) == (0, "")
    with pytest.raises(InvalidRankError, match=r"'x/0' is not .*; these ranks have no names"):
        roles.rank_of("x/0")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rolout/0", "'rolout/0' is not the name of a rank or role; there are trainer/0, rollout/"),
        ("rollout/2", "there are trainer/0, rollout/0 to rollout/1"),
        ("rollout", "'rollout' is the role of 2 ranks; name one of them: trainer/0"),
        ("", "is not the name"),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_ones(name, words):
    with pytest.raises(InvalidRankError, match=words) as caught:
        WORLD.rank_of(name)
    assert (caught.value.invalid_rank, caught.value.world_size) == (name, 3)


def test_the_names_of_a_large_world_are_cut():
    roles = roles_of_world([f"role{n}" for n in range(1000)], 1000)
    with pytest.raises(InvalidRankError) as caught:
        roles.rank_of("x")
    assert len(str(caught.value)) < 700


def test_names_and_roles_stand_for_ranks():
    assert check_rank("rollout/1", 3, WORLD) == 2
    assert check_ranks("rollout", 3, WORLD) == [1, 2]
    assert check_ranks("trainer/0", 3, WORLD) == [0]
    assert check_ranks([2, "rollout", "trainer"], 3, WORLD) == [2, 1, 0]
    assert check_ranks(None, 3, WORLD) == [0, 1, 2]
    with pytest.raises(InvalidRankError):
        check_ranks("rollout", 3)
    with pytest.raises(InvalidRankError):
        check_rank("rollout/1", 3)


def test_a_group_keeps_names():
    group = WORLD.of_group([2, 0])
    assert dict(group) == {"rollout": (0,), "trainer": (1,)}
    assert group.name_of(0) == "rollout/1"
    assert len(Roles().of_group([0, 1])) == 0


@pytest.mark.parametrize("roles", [["a"], ["a"] * 3, "ab", ["a", "b/c"], ["a", ""], ["a", 3]])
def test_roles_that_do_not_fit_a_world_are_refused(roles):
    with pytest.raises(ConfigurationError):
        SimulatedBackend.create_group(2, roles=roles)


@given(st.lists(st.sampled_from(["a", "b.c", "ä-1"]), min_size=1, max_size=20))
def test_the_variable_keeps_roles(roles):
    assert parse_roles(format_roles(roles)) == roles


@pytest.mark.parametrize("text", ["trainer", "a:", "a:0", "a:-1", ":2", "a:1,", "a b:1", "a:1:2"])
def test_a_variable_that_says_nothing_is_refused(text):
    with pytest.raises(ConfigurationError):
        parse_roles(text)


def test_worlds_take_roles():
    roles = ["trainer", "rollout", "rollout"]
    assert run_ranks(3, lambda backend: backend.roles.name_of(2), roles=roles) == ["rollout/1"] * 3
    with tcp_world(3, roles=roles) as world:
        assert all(dict(backend.roles) == dict(WORLD) for backend in world)


@pytest.fixture
def one_rank(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("RANKWIRE_LAUNCHER", "env")
    return monkeypatch


def test_connect_reads_roles_under_any_launcher(one_rank):
    one_rank.setenv("RANKWIRE_ROLES", "trainer:1")
    with connect() as backend:
        assert dict(backend.roles) == {"trainer": (0,)}
    with connect(roles=["learner"]) as backend:
        assert dict(backend.roles) == {"learner": (0,)}


def test_a_variable_for_another_number_of_ranks_is_refused(one_rank):
    one_rank.setenv("RANKWIRE_ROLES", "trainer:1,rollout:2")
    with pytest.raises(ConfigurationError, match="each of the 1 ranks"):
        connect()
    with connect(world_size=1) as backend:  # not the world that the variable describes
        assert len(backend.roles) == 0
