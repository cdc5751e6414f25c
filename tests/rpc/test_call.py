"""A function can ask by whom it was called."""

import threading

import pytest

from rankwire import CallCancelledError, DeadlineExceededError
from rankwire.rpc.call import Call, current_call, describe_chain, serving
from rankwire.testing import simulated_world, sub_world, tcp_world
from real_time import Deadline
from rpc.agents import agents_of
from worlds import PATIENCE, eventually


def test_outside_of_a_call_there_is_none():
    assert current_call() is None


def test_inside_of_a_call_it_is_known():
    call = Call()
    call.src, call.name, call.deadline = 3, "add", Deadline(5.0)
    call.links = [0, "f", 3, "g"]
    token = serving.set(call)
    try:
        assert current_call() is call
    finally:
        serving.reset(token)
    assert "add" in repr(call)
    assert "rank 3" in repr(call)
    assert not call.cancelled
    assert call.chain == ((0, "f"), (3, "g"))


def test_a_chain_reads_as_a_sentence():
    chain = [0, "f", 1, "g", 0, "h"]
    assert describe_chain(chain) == "rank 0 'f' -> rank 1 'g' -> rank 0 'h'"


# -- why it is not wanted any more -----------------------------------------------------------------


class Function:
    """A function of rank 1 that waits for one of rank 0, and notes how that ends."""

    def __init__(self, agents):
        self.call = self.error = None
        self.inner = None
        self.go_on = threading.Event()
        self._agent = agents[1]
        agents[0].register("inner", self._inner)
        agents[1].register("outer", self._outer)

    def _inner(self):
        self.inner = current_call()
        self.go_on.wait(PATIENCE)

    def _outer(self, *, is_async=False):
        self.call = current_call()
        try:
            if is_async:
                self._agent.rpc_async(0, "inner", timeout=PATIENCE).result()
            else:
                self._agent.rpc_sync(0, "inner", timeout=PATIENCE)
        except Exception as error:
            self.error = error
            raise


@pytest.fixture(
    params=[simulated_world, tcp_world, sub_world(tcp_world)], ids=["simulated", "tcp", "sub"]
)
def agents(request):
    with request.param(2) as world, agents_of(world, 0.5) as agents:
        yield agents


@pytest.fixture
def function(agents):
    function = Function(agents)
    yield function
    function.go_on.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_whose_time_is_up_is_told_so_and_so_are_its_calls(agents, function, is_async):
    with pytest.raises(DeadlineExceededError):
        agents[0].rpc_sync(1, "outer", is_async=is_async, timeout=0.7)
    error = eventually(lambda: function.error)
    assert isinstance(error, DeadlineExceededError)
    eventually(lambda: function.inner.cancelled)  # the other one may have ended before its cancel
    assert function.call.expired
    assert function.inner.expired


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_whose_caller_cancels_is_told_so_and_so_are_its_calls(
    agents, function, is_async
):
    future = agents[0].rpc_async(1, "outer", is_async=is_async, timeout=PATIENCE)
    eventually(lambda: function.inner)
    assert not function.call.cancelled
    assert not function.call.expired
    future.cancel()
    error = eventually(lambda: function.error)
    assert isinstance(error, CallCancelledError)
    eventually(lambda: function.call.cancelled and function.inner.cancelled)
    assert not function.call.expired
    assert not function.inner.expired


def test_of_a_cancelled_call_the_reason_does_not_change_when_time_goes_on():
    call = Call()
    call.src, call.name, call.deadline, call.outgoing = 3, "add", Deadline(0.0), {}
    assert call.expired
    call.cancelled = True
    assert not call.expired
    assert isinstance(call.cancellation(), CallCancelledError)
    call.was_late = True
    assert "'add', for which rank 3 has no more time" in str(call.cancellation())
