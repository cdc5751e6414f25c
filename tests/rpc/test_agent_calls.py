"""Calls as users write them: what is a setting, what is an argument of the function."""

import pytest

from rankwire import ConfigurationError, DeadlineExceededError, RpcFuture, current_call
from rankwire.errors import InvalidRankError
from rankwire.testing import simulated_world
from rpc.agents import agents_of


def patient(value, timeout=30):
    return [value, timeout]


def plain(value):
    return [value, current_call().deadline.limit]


@pytest.fixture
def agents():
    with simulated_world(2) as world, agents_of(world) as agents:
        yield agents


def test_settings_given_to_a_rank_leave_all_keywords_to_the_function(agents):
    caller, callee = agents
    callee.register(patient)
    assert caller.to(1).patient(1, timeout=7) == [1, 7]
    assert caller.to(1, timeout=5)("patient", 1) == [1, 30]
    future = caller.to_async(1, timeout=5).patient(1, timeout=7)
    assert isinstance(future, RpcFuture)
    assert future.result(10) == [1, 7]
    assert caller.to_async(1)("patient", 2).result(10) == [2, 30]


def test_settings_given_to_a_rank_are_those_of_each_call(agents):
    caller, callee = agents
    callee.register(plain)
    within = caller.to(1, timeout=5)
    for value in range(3):
        found, limit = within.plain(value)
        assert found == value
        assert 0 < limit <= 5
    assert caller.to_async(1, timeout=7).plain(1).result(10)[1] <= 7
    assert caller.to(1).plain(1)[1] > 7  # the agent's


def test_a_call_within_another_keeps_to_the_time_of_that(agents):
    caller, callee = agents
    callee.register(plain)

    @callee.register
    def nested():
        return [
            callee.to(1, timeout=50).plain(1)[1],
            callee.to_async(1, timeout=50).plain(1).result()[1],
            callee.rpc_sync(1, "plain", 1)[1],
            callee.rpc_async(1, "plain", 1, timeout=50).result()[1],
        ]

    assert max(caller.to(1, timeout=8).nested()) <= 8


def test_a_time_limit_of_a_rank_ends_its_calls(agents):
    caller, callee = agents

    @callee.register
    def hang():
        call = current_call()
        while not call.cancelled:
            call.deadline.clock.sleep(0.005)

    with pytest.raises(DeadlineExceededError):
        caller.to(1, timeout=0.05).hang()
    with pytest.raises(DeadlineExceededError):
        caller.to_async(1, timeout=0.05).hang().result()


@pytest.mark.parametrize("form", ["to", "to_async"])
def test_wrong_settings_are_refused_where_they_are_given(agents, form):
    with pytest.raises(InvalidRankError):
        getattr(agents[0], form)(2)
    with pytest.raises(ConfigurationError, match="time limit"):
        getattr(agents[0], form)(1, timeout=-1)


@pytest.mark.parametrize("call", ["rpc_sync", "rpc_async"])
def test_a_timeout_that_the_function_has_too_is_refused_if_that_is_known(agents, call):
    caller, callee = agents
    callee.register(patient)
    # Registered only there: what it takes is not known here, and the call has the limit.
    result = getattr(caller, call)(1, "patient", 1, timeout=5)
    assert (result if call == "rpc_sync" else result.result()) == [1, 30]
    caller.register(patient)
    for function in (patient, "patient"):
        with pytest.raises(ConfigurationError, match=r"agent\.to\(rank, timeout=\.\.\.\)"):
            getattr(caller, call)(1, function, 1, timeout=5)
    assert caller.rpc_sync(1, patient, 1) == [1, 30]  # no clash, no complaint


def test_a_function_that_takes_any_keyword_has_no_parameter_of_that_name(agents):
    def loose(*args, **kwargs):
        return [list(args), kwargs]

    for agent in agents:
        agent.register(loose)
    assert agents[0].rpc_sync(1, loose, 1, timeout=5) == [[1], {}]
    assert agents[0].to(1)(loose, 1, timeout=5) == [[1], {"timeout": 5}]


def test_a_function_whose_parameters_are_not_known_passes(agents):
    for agent in agents:
        agent.register("most", max)  # written in C, and says nothing of its parameters
    assert agents[0].rpc_sync(1, max, 3, 4, timeout=5) == 4
