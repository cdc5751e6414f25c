"""DeviceMesh: index arithmetic, and the groups along its axes on every kind of world."""

import itertools
import math
import pickle
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankwire
from rankwire import device_mesh as mesh_module
from rankwire.backends.sub import SubBackend
from rankwire.device_mesh import DeviceMesh
from rankwire.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MembershipError,
)
from rankwire.testing import in_parallel, run_ranks, simulated_world, sub_world, tcp_world

WORLDS = {
    "simulated": simulated_world,
    "tcp": partial(tcp_world, transport="tcp"),
    "unix": partial(tcp_world, transport="unix"),
    "sub of simulated": sub_world(simulated_world),
    "sub of tcp": sub_world(partial(tcp_world, transport="tcp")),
}
on_every_world = pytest.mark.parametrize("make_world", WORLDS.values(), ids=WORLDS.keys())

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def mesh_of(shape, **options):
    return DeviceMesh(shape, math.prod(shape), **options)


@st.composite
def meshes_and_axes(draw):
    mesh = mesh_of(draw(shapes))
    return mesh, draw(st.integers(-mesh.ndim, mesh.ndim - 1))


# -- arithmetic ------------------------------------------------------------------------------------


def test_it_says_what_it_is():
    mesh = DeviceMesh([2, 4], 8)
    assert (mesh.shape, mesh.ndim, mesh.size, mesh.names) == ((2, 4), 2, 8, None)
    named = DeviceMesh((2, 4), 8, names=["node", "local"])
    assert named.names == ("node", "local")
    assert repr(mesh) == "DeviceMesh((2, 4), 8)"
    for original in (mesh, named, DeviceMesh([3], 3, names=["all"])):
        assert eval(repr(original)) == original
        assert pickle.loads(pickle.dumps(original)) == original


def test_equality_is_of_shape_and_names():
    mesh = DeviceMesh([2, 2], 4, names=("a", "b"))
    same = DeviceMesh((2, 2), 4, names=["a", "b"])
    assert mesh == same
    assert hash(mesh) == hash(same)
    others = [DeviceMesh([4], 4), DeviceMesh([2, 2], 4), DeviceMesh([2, 2], 4, names=("b", "a"))]
    for other in [*others, (2, 2), None]:
        assert mesh != other


def test_ranks_along_an_axis():
    mesh = DeviceMesh([2, 4], 8)
    assert mesh.ranks_along_dim(0, 5) == [1, 5]
    assert mesh.ranks_along_dim(1, 5) == [4, 5, 6, 7]


def test_groups_along_an_axis():
    mesh = DeviceMesh([2, 4], 8)
    assert mesh.groups_along_dim(0) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups_along_dim(1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_axes_have_names():
    mesh = DeviceMesh([2, 4], 8, names=("node", "local"))
    assert mesh.ranks_along_dim("node", 5) == mesh.ranks_along_dim(0, 5)
    assert mesh.groups_along_dim("local") == mesh.groups_along_dim(1)


def test_numpy_integers_count_as_integers():
    mesh = DeviceMesh(np.array([2, 4]), np.int32(8))
    assert mesh == DeviceMesh([2, 4], 8)
    rank = mesh.rank_of(np.array([1, 1]))
    results = [
        rank, mesh.size, *mesh.shape, *mesh.coords(np.int64(5)),
        *mesh.ranks_along_dim(np.int8(1), np.uint8(5)),
    ]  # fmt: skip
    assert results == [5, 8, 2, 4, 1, 1, 4, 5, 6, 7]
    assert {type(result) for result in results} == {int}


@given(shapes)
def test_coordinates_are_numpys_and_lead_back(shape):
    mesh = mesh_of(shape)
    for rank, expected in enumerate(np.ndindex(*shape)):
        assert mesh.coords(rank) == expected
        assert mesh.rank_of(expected) == rank


@given(meshes_and_axes())
def test_groups_are_the_lines_of_an_array(mesh_and_axis):
    mesh, axis = mesh_and_axis
    lines = np.moveaxis(np.arange(mesh.size).reshape(mesh.shape), axis, -1)
    assert mesh.groups_along_dim(axis) == lines.reshape(-1, mesh.shape[axis]).tolist()


@given(meshes_and_axes())
def test_groups_are_a_partition_of_the_world(mesh_and_axis):
    mesh, axis = mesh_and_axis
    groups = mesh.groups_along_dim(axis)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    assert groups == sorted(groups)
    for group in groups:
        assert group == sorted(group)
        assert len(group) == mesh.shape[axis]
        for rank in group:
            assert mesh.ranks_along_dim(axis, rank) == group


@given(shapes)
def test_two_ranks_meet_along_one_axis_at_most(shape):
    mesh = mesh_of(shape)
    for rank in range(mesh.size):
        lines = [set(mesh.ranks_along_dim(axis, rank)) for axis in range(mesh.ndim)]
        for one, other in itertools.combinations(lines, 2):
            assert one & other == {rank}


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "world_size", "text"),
    [
        ([], 1, r"at least 1 axis, not the shape \(\)"),
        ([2, 0], 0, r"not 0 as in \(2, 0\)"),
        ([4, 0], 4, r"not 0 as in \(4, 0\)"),  # nodes of no ranks
        ([-2, -2], 4, "not -2"),
        ([2.0, 2], 4, "not 2.0"),
        (["2", 2], 4, "not '2'"),
        ("22", 4, "not '2'"),
        (4, 4, "not 4"),
        ([2, 3], 5, r"\(2, 3\) has 6 ranks, the world 5"),
        ([2, 3], 4, r"\(2, 3\) has 6 ranks, the world 4"),
        ([4 // 3, 3], 4, r"\(1, 3\) has 3 ranks, the world 4"),  # nodes of 3 ranks
    ],
)
def test_a_wrong_shape_is_refused(shape, world_size, text):
    with pytest.raises(ConfigurationError, match=text):
        DeviceMesh(shape, world_size)


@pytest.mark.parametrize("world_size", [0, -4, 4.0, None])
def test_a_wrong_world_size_is_refused(world_size):
    with pytest.raises(InvalidWorldSizeError, match=f"not {world_size}"):
        DeviceMesh([2, 2], world_size)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("node",), r"2 axes has as many names, not \('node',\)"),
        (("a", "b", "c"), r"2 axes has as many names, not \('a', 'b', 'c'\)"),
        ((), r"2 axes has as many names, not \(\)"),
        (("local", "local"), "'local' is given to several axes"),
        (("node", 1), "a string, not 1"),
        ("dp", "not 'dp'"),
        (7, "not 7"),
    ],
)
def test_wrong_names_are_refused(names, text):
    with pytest.raises(ConfigurationError, match=text):
        DeviceMesh([2, 2], 4, names=names)


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (2, r"no axis 2: .* has -2\.\.1"),
        (-3, r"no axis -3: .* has -2\.\.1"),
        ("tensor", r"no axis 'tensor': the names are \('node', 'local'\)"),
        (1.0, "an integer or a name, not 1.0"),
        (None, "an integer or a name, not None"),
    ],
)
def test_an_unknown_axis_is_refused(axis, text):
    mesh = DeviceMesh([2, 4], 8, names=("node", "local"))
    with pytest.raises(ConfigurationError, match=text):
        mesh.ranks_along_dim(axis, 0)
    with pytest.raises(ConfigurationError, match=text):
        mesh.groups_along_dim(axis)


def test_a_name_is_refused_where_there_are_none():
    with pytest.raises(ConfigurationError, match=r"no axis 'node': .* have no names"):
        DeviceMesh([2, 4], 8).groups_along_dim("node")


@pytest.mark.parametrize("rank", [8, -1, 1.0, "1", None])
def test_a_rank_outside_is_refused(rank):
    mesh = DeviceMesh([2, 4], 8)
    for ask in (mesh.coords, partial(mesh.ranks_along_dim, 0)):
        with pytest.raises(InvalidRankError, match=f"rank {rank!r} is not one of the 8") as caught:
            ask(rank)
        assert (caught.value.invalid_rank, caught.value.world_size) == (rank, 8)


@pytest.mark.parametrize(
    ("coords", "text"),
    [
        ((1,), r"2 coordinates, not \(1,\)"),
        ((1, 2, 0), r"2 coordinates, not \(1, 2, 0\)"),
        ((2, 0), r"coordinate 2 of \(2, 0\) .* 0 to 1, as axis 0 \('node'\)"),
        ((0, 4), r"coordinate 4 of \(0, 4\) .* 0 to 3, as axis 1 \('local'\)"),
        ((0, -1), r"coordinate -1 of \(0, -1\)"),
        ((0, 1.0), r"coordinate 1.0 of \(0, 1.0\)"),
        (5, "not 5"),
    ],
)
def test_wrong_coordinates_are_refused(coords, text):
    with pytest.raises(ConfigurationError, match=text):
        DeviceMesh([2, 4], 8, names=("node", "local")).rank_of(coords)


def test_a_coordinate_is_named_by_its_axis_where_there_are_no_names():
    with pytest.raises(ConfigurationError, match="as axis 1 has"):
        DeviceMesh([2, 4], 8).rank_of((0, 4))


# -- groups ----------------------------------------------------------------------------------------


def met(group, word):
    """Tell every member of a group a word; return all words by rank, one's own included."""
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    for dst in others:
        group.send(word.encode(), dst)
    words = {src: group.recv(src).decode() for src in others}
    return [words.get(rank, word) for rank in range(group.world_size)]


def meet_along_every_axis(backend, mesh):
    groups = mesh.subgroups(backend)
    assert isinstance(groups, tuple)
    assert [group.parent for group in groups] == [backend] * mesh.ndim
    # The last first: a group's messages do not depend on when it was made.
    words = [met(group, str(backend.rank)) for group in reversed(groups)][::-1]
    for group in groups:
        group.barrier()
    expected = [mesh.ranks_along_dim(axis, backend.rank) for axis in range(mesh.ndim)]
    assert [group.members for group in groups] == expected
    assert [[int(word) for word in said] for said in words] == expected
    assert tuple(group.rank for group in groups) == mesh.coords(backend.rank)


@on_every_world
def test_subgroups_reach_the_ranks_along_each_axis(make_world):
    run_ranks(4, meet_along_every_axis, DeviceMesh([2, 2], 4), backend=make_world)


@pytest.mark.parametrize("shape", [[1], [4], [1, 4], [4, 1], [3, 2], [1, 1], [2, 2, 2], [2, 1, 3]])
def test_subgroups_of_any_shape(shape):
    mesh = mesh_of(shape)
    run_ranks(mesh.size, meet_along_every_axis, mesh)


def meet_along_one_axis(backend, mesh, axis):
    with mesh.subgroup(backend, axis, timeout=7.0) as group:
        assert group.timeout == 7.0
        group.barrier()
        return group.members


def test_a_subgroup_of_one_axis():
    mesh = DeviceMesh([2, 2], 4, names=("node", "local"))
    for axis in ("node", 0, -2):
        assert run_ranks(4, meet_along_one_axis, mesh, axis) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert run_ranks(4, meet_along_one_axis, mesh, "local") == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_one_group_of_a_mesh_needs_its_own_members_only():
    mesh = DeviceMesh([2, 2], 4)
    with simulated_world(4) as world:
        groups = in_parallel([partial(mesh.subgroup, world[rank], 0) for rank in (1, 3)])
        assert [(group.rank, group.members) for group in groups] == [(0, [1, 3]), (1, [1, 3])]


def test_subgroups_take_the_limit_and_default_to_the_backends():
    mesh = DeviceMesh([1, 1], 1)
    with simulated_world(1, timeout=9.0) as (backend,):
        assert [group.timeout for group in mesh.subgroups(backend)] == [9.0, 9.0]
        assert [group.timeout for group in mesh.subgroups(backend, timeout=3.0)] == [3.0, 3.0]


def test_a_backend_of_another_size_is_refused():
    mesh = DeviceMesh([2, 2], 4)
    with simulated_world(2) as (backend, _):
        for make in (mesh.subgroups, partial(mesh.subgroup, axis=0)):
            with pytest.raises(ConfigurationError, match=r"has 4 ranks, the backend 2"):
                make(backend)


def test_different_meshes_on_two_ranks_are_found():
    def make(backend, shape):
        with pytest.raises(MembershipError) as caught:
            DeviceMesh(shape, 4).subgroup(backend, 1)
        return caught.value.message

    with simulated_world(4) as world:
        messages = in_parallel([partial(make, world[0], [2, 2]), partial(make, world[1], [1, 4])])
    assert messages == [
        "the members disagree: rank 0 says [0, 1], rank 1 says [0, 1, 2, 3]",
        "the members disagree: rank 1 says [0, 1, 2, 3], rank 0 says [0, 1]",
    ]


def test_groups_made_before_a_failure_are_closed(monkeypatch):
    made = []

    class Recorded(SubBackend):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    def make(backend):
        with pytest.raises(DeadlineExceededError) as caught:
            DeviceMesh([2, 2], 4).subgroups(backend, timeout=0.3)
        return caught.value.waiting_for

    monkeypatch.setattr(mesh_module, "SubBackend", Recorded)
    with simulated_world(4) as world:  # ranks 1 and 3 make no groups
        assert in_parallel([partial(make, world[rank]) for rank in (0, 2)]) == [[1], [3]]
        assert [group.members for group in made] == [[0, 2], [0, 2]]
        assert all(group.closed for group in made)
        assert not any(backend.closed for backend in world)


# -- hybrid sharding: split within a node, replicated between nodes --------------------------------


def hybrid_shards(backend, parameters, gradients):
    """Return a rank's part of the parameters and of the mean gradient, and the whole parameters."""
    mesh = DeviceMesh([2, 2], 4, names=("node", "local"))
    inter, intra = mesh.subgroups(backend)
    parameter = np.array(parameters)
    shard = np.split(parameter, intra.world_size)[intra.rank].copy()
    gradient = rankwire.reduce_scatter(intra, np.array(gradients[backend.rank]), op="mean")
    rankwire.all_reduce(inter, gradient, op="mean")
    whole = rankwire.all_gather(intra, shard)
    backend.barrier()  # nobody leaves while others still exchange
    return shard.tolist(), gradient.tolist(), whole.tolist()


@on_every_world
def test_hybrid_sharding_takes_the_mean_of_all_ranks(make_world):
    parameters = [10.0, 20.0, 30.0, 40.0]
    gradients = [[1.0 * rank, 10.0 * rank, 100.0 * rank, 1000.0 * rank] for rank in range(4)]
    results = run_ranks(4, hybrid_shards, parameters, gradients, backend=make_world)
    halves = [([10.0, 20.0], [1.5, 15.0], parameters), ([30.0, 40.0], [150.0, 1500.0], parameters)]
    assert results == halves * 2
