"""A function can ask by whom it was called."""

from rankwire.deadline import Deadline
from rankwire.rpc.context import Call, current_call, serving


def test_outside_of_a_call_there_is_none():
    assert current_call() is None


def test_inside_of_a_call_it_is_known():
    call = Call(3, "add", Deadline(5.0), 2)
    token = serving.set(call)
    try:
        assert current_call() is call
    finally:
        serving.reset(token)
    assert "add" in repr(call)
    assert "rank 3" in repr(call)
    assert not call.cancelled
