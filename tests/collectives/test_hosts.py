"""Where ranks are: all of them see the same hosts, in the same order, with the same leaders."""

import pytest

from rankwire.collectives.hosts import Hosts


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ("aaa", [[0, 1, 2]]),
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("bac", [[0], [1], [2]]),
        ("abcac", [[0, 3], [1], [2, 4]]),
    ],
)
def test_all_ranks_see_the_same_hosts(hosts, groups):
    for rank in range(len(hosts)):
        seen = Hosts(hosts, rank)
        assert seen.groups == groups
        assert seen.groups[seen.here][seen.place] == rank
        assert seen.slots is None, "until they have agreed"


def test_the_lowest_rank_leads_its_host_unless_the_root_is_there():
    hosts = Hosts("abcac", 0)
    assert hosts.leaders() == [0, 1, 2]
    assert hosts.leaders(0) == [0, 1, 2]
    assert hosts.leaders(3) == [3, 1, 2]
    assert hosts.leaders(4) == [0, 1, 4]
