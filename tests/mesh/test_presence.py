"""Presence: what an agent says of itself, and how long it waits for the answer."""

import threading

import pytest

from rankwire.clock import REAL_TIME
from rankwire.mesh.presence import Presences
from rankwire.wire.control_messages import AgentState
from worlds import Running, eventually

OPEN, SERVING, LEAVING, CLOSED = AgentState


class Coordinator:
    """Hears what agents say, and answers if it is told to."""

    def __init__(self):
        self.heard = []
        self.answers_openings = True
        self.is_there = True
        self.presences = Presences(self.hear, REAL_TIME.wait)

    def hear(self, says):
        self.heard.append(says)
        if self.answers_openings and says.state is OPEN:
            self.presences.answered(says.number)
        return self.is_there

    @property
    def states(self):
        return [says.state for says in self.heard]


@pytest.fixture
def coordinator():
    return Coordinator()


def leaving(coordinator, presence):
    running = Running(presence.leave, [])
    eventually(lambda: coordinator.states[-1:] == [LEAVING])
    assert not running.done
    return running


def test_opening_returns_when_it_is_known(coordinator):
    coordinator.answers_openings = False
    opening = Running(coordinator.presences.of(1).open)
    eventually(lambda: coordinator.heard)
    assert not opening.done
    coordinator.presences.answered(coordinator.heard[0].number)
    opening.result()


def test_leaving_returns_when_all_have_left(coordinator):
    presence = coordinator.presences.of(1)
    presence.open()
    running = leaving(coordinator, presence)
    coordinator.presences.answered(coordinator.heard[-1].number + 1)  # for another agent
    assert not running.done
    coordinator.presences.answered(coordinator.heard[-1].number)
    running.result()
    presence.close()
    assert coordinator.states == [OPEN, LEAVING]  # no more is to be said


def test_closing_ends_the_leaving_of_another_thread(coordinator):
    presence = coordinator.presences.of(1)
    presence.open()
    running = leaving(coordinator, presence)
    presence.close()
    running.result()
    assert coordinator.states == [OPEN, LEAVING, CLOSED]
    presence.leave([])
    presence.close()
    assert coordinator.states == [OPEN, LEAVING, CLOSED]


def test_the_end_of_the_coordinator_ends_all_waiting(coordinator):
    presence = coordinator.presences.of(1)
    running = leaving(coordinator, presence)
    coordinator.presences.end()
    running.result()
    coordinator.presences.of(2).open()
    coordinator.presences.of(2).leave([])
    assert coordinator.states == [LEAVING]


def test_without_anyone_to_answer_nothing_waits(coordinator):
    coordinator.is_there = coordinator.answers_openings = False
    presence = coordinator.presences.of(1)
    presence.open()
    presence.leave([])


def test_serving_is_said_for_its_time(coordinator):
    presence = coordinator.presences.of(1)
    presence.open()
    with presence.serving():
        assert coordinator.states == [OPEN, SERVING]
    assert coordinator.states == [OPEN, SERVING, OPEN]
    with pytest.raises(KeyError), presence.serving():
        raise KeyError
    assert coordinator.states == [OPEN, SERVING, OPEN, SERVING, OPEN]


def test_an_agent_belongs_to_the_thread_that_uses_it(coordinator):
    presence = coordinator.presences.of(1)
    presence.open()
    presence.open()  # with RpcAgent(...): the same thread
    assert len(coordinator.heard) == 1
    thread = threading.Thread(target=presence.open)
    thread.start()
    thread.join()
    first, second = (says.owner for says in coordinator.heard)
    assert first != second
