"""Attendance: who is answered when an agent opens, serves, leaves, closes or is lost."""

import itertools

import pytest

from rankwire.errors import ProtocolError
from rankwire.rendezvous.roll import MAX_AGENTS, Attendance
from rankwire.wire.control_messages import AgentSays, AgentState

OPEN, SERVING, LEAVING, CLOSED = AgentState


class Agents:
    """An attendance to which each rank says something; each rank is a process of its own."""

    def __init__(self):
        self.attendance = Attendance()
        self.numbers = itertools.count(1)

    def __call__(self, rank, state, *, service=7, owner=None, stopped=()):
        number = next(self.numbers)
        owner = 100 + rank if owner is None else owner
        says = AgentSays(service, number, state, owner, list(stopped))
        return [rank for rank, _ in self.attendance.hear(rank, says)]

    @property
    def is_empty(self):
        return not self.attendance._services and not self.attendance._services_of


@pytest.fixture
def say():
    return Agents()


def test_an_opening_is_answered_at_once(say):
    assert say(0, OPEN) == [0]
    assert say(1, OPEN) == [1]


def test_those_who_leave_wait_for_the_last(say):
    for rank in range(4):
        say(rank, OPEN)
    assert [say(rank, LEAVING) for rank in (2, 0, 1)] == [[], [], []]
    assert sorted(say(3, LEAVING)) == [0, 1, 2, 3]
    assert say.is_empty


def test_the_answer_has_the_number_of_what_was_said(say):
    say(0, OPEN)
    assert say.attendance.hear(0, AgentSays(7, 42, LEAVING)) == [(0, 42)]


def test_one_that_is_lost_or_closed_is_not_waited_for(say):
    for rank in range(3):
        say(rank, OPEN)
    assert say(0, LEAVING) == []
    assert say(1, CLOSED) == []
    assert say.attendance.forget(2) == [(0, 4)]
    assert say.is_empty


def test_one_that_only_serves_is_not_waited_for_until_it_has_served(say):
    say(0, OPEN)
    say(1, OPEN)
    assert say(0, LEAVING) == []
    assert say(1, SERVING) == [0]
    say(0, OPEN)
    say(1, OPEN)
    assert say(0, LEAVING) == []
    assert sorted(say(1, LEAVING)) == [0, 1]


@pytest.mark.parametrize("says_first", [True, False], ids=["before", "after"])
def test_one_that_was_told_to_stop_serving_is_waited_for(say, says_first):
    """Whether the coordinator hears first that it serves, or that it is to stop."""
    say(0, OPEN)
    say(1, OPEN)
    if says_first:
        say(1, SERVING)
    assert say(0, LEAVING, stopped=[1, 5]) == []
    if not says_first:
        assert say(1, SERVING) == []
    assert say(1, OPEN) == [1]
    assert sorted(say(1, LEAVING)) == [0, 1]
    assert say.is_empty


def test_a_new_agent_of_a_rank_that_was_stopped_may_only_serve(say):
    say(0, OPEN)
    say(1, OPEN)
    say(0, LEAVING, stopped=[1])
    assert say(1, CLOSED) == [0]
    say(0, OPEN)
    say(1, OPEN)
    say(1, SERVING)
    assert say(0, LEAVING) == [0]


def test_agents_of_other_names_do_not_count(say):
    say(0, OPEN, service=1)
    say(1, OPEN, service=2)
    assert say(0, LEAVING, service=1) == [0]
    assert say(1, LEAVING, service=2) == [1]


def test_a_thread_does_not_wait_for_its_own_agents(say):
    """``with RpcAgent(a), RpcAgent(b):`` in one thread."""
    say(0, OPEN, owner=1)
    say(1, OPEN, owner=1)
    say(2, OPEN, owner=2)
    assert say(1, LEAVING, owner=1) == []
    assert say(2, LEAVING, owner=2) == [1]
    assert sorted(say(0, LEAVING, owner=1)) == [0, 2]


def test_one_that_opens_when_the_others_have_left_leaves_alone(say):
    say(0, OPEN)
    assert say(0, LEAVING) == [0]
    assert say(1, OPEN) == [1]
    assert say(1, LEAVING) == [1]


def test_a_rank_that_comes_back_is_waited_for_again(say):
    say(0, OPEN)
    say(1, OPEN)
    say.attendance.forget(1)
    say(1, OPEN)
    assert say(0, LEAVING) == []
    assert sorted(say(1, LEAVING)) == [0, 1]


def test_a_rank_cannot_have_agents_without_end(say):
    for service in range(MAX_AGENTS):
        say(0, OPEN, service=service)
    with pytest.raises(ProtocolError, match="agents"):
        say(0, OPEN, service=MAX_AGENTS)
    assert say(0, CLOSED, service=0) == []
    assert say(0, OPEN, service=MAX_AGENTS) == [0]
    assert say.attendance.forget(0) == []
    assert say.is_empty


def test_a_rank_that_was_never_there_is_forgotten_without_a_trace(say):
    assert say.attendance.forget(3) == []
    assert say.is_empty
