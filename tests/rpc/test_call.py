"""A function can ask by whom it was called."""

from rankwire.rpc.call import Call, current_call, describe_chain, serving
from real_time import Deadline


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
