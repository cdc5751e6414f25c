"""Lists of nodes, as Slurm and Open MPI write them."""

import itertools

import pytest

from rankwire.errors import ConfigurationError
from rankwire.rendezvous.schedulers import expand_nodes, expand_nodes_of_open_mpi


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b.example,10.0.0.1", ["a", "b.example", "10.0.0.1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]x", ["gpu098x", "gpu099x", "gpu100x", "gpu101x"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_what_a_list_stands_for(text, nodes):
    assert list(expand_nodes(text)) == nodes


@pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a]1[", "a[]", "a[x]", "a[3-1]", "a[[1]]"])
def test_what_is_no_list(text):
    with pytest.raises(ConfigurationError, match="not a list of nodes"):
        list(expand_nodes(text))


def test_a_huge_list_costs_nothing_until_it_is_read():
    assert list(itertools.islice(expand_nodes("n[1-999999999999]"), 2)) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("vm,[2:10].99.0.2,[2:10].99.0.3@0(3)", ["vm", "10.99.0.2", "10.99.0.3"]),  # seen, 4.1.4
        ("gpu[3:7-9,11].local,login@0(5)", ["gpu007.local", "gpu008.local", "gpu009.local",
                                            "gpu011.local", "login"]),
        ("a,b", ["a", "b"]),
    ],
)  # fmt: skip
def test_what_a_list_of_open_mpi_stands_for(text, nodes):
    assert expand_nodes_of_open_mpi(text) == nodes


def test_what_is_no_list_of_open_mpi():
    with pytest.raises(ConfigurationError, match="not a list of nodes"):
        expand_nodes_of_open_mpi("gpu[2:x]@0(2)")
