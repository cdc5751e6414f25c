"""When and how often a rank is restarted, without a process."""

import math

from rankwire.launch.attempt import FIRST_PAUSE, LONGEST_PAUSE, Restarts
from rankwire.launch.run_options import OnFailure


def test_each_rank_has_its_own_limit_and_ever_longer_pauses():
    restarts = Restarts(3)
    assert [restarts.plan(1, 0.0) for _ in range(4)] == [0.25, 0.5, 1.0, None]
    assert restarts.counts == {1: 3}
    assert restarts.plan(2, 0.0) == FIRST_PAUSE


def test_a_pause_is_never_longer_than_the_longest():
    restarts = Restarts(100)
    pauses = [restarts.plan(0, 0.0) for _ in range(100)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE


def test_ranks_are_due_at_their_time_and_once():
    restarts = Restarts(3)
    assert restarts.next_at == math.inf
    restarts.plan(1, 10.0)
    restarts.plan(2, 10.1)
    assert restarts.next_at == 10.25
    assert restarts.take_due(10.2) == []
    assert restarts.take_due(10.25) == [1]
    assert restarts.due
    assert restarts.take_due(99.0) == [2]
    assert not restarts.due
    assert restarts.take_due(99.0) == []


def test_no_rank_is_started_after_the_job_was_asked_to_end():
    restarts = Restarts(3)
    restarts.plan(1, 0.0)
    restarts.due.clear()
    assert not restarts.due
    assert restarts.take_due(99.0) == []


def test_with_no_restarts_every_failure_is_the_jobs():
    assert Restarts(0).plan(0, 0.0) is None


def test_the_words_are_those_of_the_command_line():
    assert [str(word) for word in OnFailure] == ["stop", "continue", "restart"]
