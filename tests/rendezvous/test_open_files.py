"""The limit of open files is raised where it is needed, and no further than is allowed."""

import os
import resource

import pytest

from rankwire.rendezvous import reachability

NO_LIMIT = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch):
    """The soft and the hard limit, which the system does not see."""
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.__setitem__(slice(2), new))
    monkeypatch.setattr(reachability, "_open_now", lambda: 10)
    return limits


def test_a_limit_that_is_high_enough_stays(limits):
    assert reachability.allow_files(1014) == 0
    assert limits == [1024, 4096]


def test_the_soft_limit_is_raised_to_what_is_needed(limits):
    assert reachability.allow_files(1015) == 0
    assert limits == [1025, 4096]


def test_it_is_raised_as_far_as_possible_and_the_rest_is_told(limits):
    assert reachability.allow_files(5000) == 914
    assert limits == [4096, 4096]


@pytest.mark.parametrize(
    ("before", "after"), [([1024, NO_LIMIT], 5010), ([NO_LIMIT, NO_LIMIT], NO_LIMIT)]
)
def test_there_may_be_no_limit(limits, before, after):
    limits[:] = before
    assert reachability.allow_files(5000) == 0
    assert limits[0] == after


def test_without_proc_the_usual_number_of_open_files_is_assumed(monkeypatch):
    def hidden(path):
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", hidden)
        assert reachability._open_now() == 64


def test_the_system_takes_the_new_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"no more than {hard} open files are allowed here")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert reachability.allow_files(1024) == 0
        assert 1024 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
