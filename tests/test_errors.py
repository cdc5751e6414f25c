"""Errors carry their data, survive pickling and say where they happened."""

import copy
import pickle
import re
import typing

import pytest

from rankwire import errors
from rankwire.errors import (
    AuthenticationError,
    CallCancelledError,
    ChannelClosedError,
    CircularCallError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    ForkedProcessError,
    FunctionNotFoundError,
    GroupCallError,
    InvalidMessageError,
    InvalidRankError,
    InvalidWorldSizeError,
    MembershipError,
    MessageTooLargeError,
    NoConnectionError,
    OverloadedError,
    PeerLostError,
    PeerUnresponsiveError,
    ProtocolError,
    QueueEndedError,
    RankFailedError,
    RanksStuckError,
    RankwireError,
    RemoteError,
    RendezvousError,
    ResourceError,
    SelfSendError,
    SizeMismatchError,
    UnsupportedTypeError,
    VersionMismatchError,
)

# One of each: how it is made, the type of the standard library that catches it, and its data.
EXAMPLES = [
    (lambda: RankwireError("trouble"), Exception, {}),
    (lambda: ConfigurationError("no such transport"), ValueError, {}),
    (lambda: InvalidWorldSizeError(0), ValueError, {"world_size": 0}),
    (lambda: InvalidRankError(7, 4), ValueError, {"invalid_rank": 7, "world_size": 4}),
    (lambda: SelfSendError(2), ValueError, {"rank": 2}),
    (
        lambda: UnsupportedTypeError('args[1]["opt"]', "Foo", "Register it."),
        TypeError,
        {"path": 'args[1]["opt"]', "type_name": "Foo"},
    ),
    (lambda: QueueEndedError("queue 'q' has ended"), EOFError, {}),
    (lambda: MessageTooLargeError(11, 10), ValueError, {"nbytes": 11, "limit": 10}),
    (lambda: SizeMismatchError(8, 9), ValueError, {"expected": 8, "got": 9}),
    (lambda: ProtocolError("unknown channel"), ConnectionError, {}),
    (lambda: InvalidMessageError("not msgpack"), ValueError, {}),
    (lambda: VersionMismatchError(1, 2), ConnectionError, {"ours": 1, "theirs": 2}),
    (lambda: AuthenticationError("the secrets differ"), ConnectionError, {}),
    (
        lambda: RendezvousError("too late", missing={3, 1}),
        ConnectionError,
        {"reason": "too late", "missing": [1, 3]},
    ),
    (lambda: NoConnectionError("refused"), ConnectionError, {}),
    (lambda: ResourceError("no file descriptors"), RuntimeError, {}),
    (
        lambda: PeerLostError(3, "it was killed"),
        ConnectionError,
        {"peer": 3, "reason": "it was killed", "may_have_run": False},
    ),
    (
        lambda: PeerUnresponsiveError(3, "silent for 30 s"),
        ConnectionError,
        {"peer": 3, "reason": "silent for 30 s"},
    ),
    (lambda: ChannelClosedError("closed"), ConnectionError, {"may_have_run": False}),
    (
        lambda: DeadlineExceededError(0.25, waiting_for=[1, 3], detail="it is stopped"),
        TimeoutError,
        {"limit": 0.25, "waiting_for": [1, 3], "may_have_run": False},
    ),
    (
        lambda: CircularCallError([(0, "f"), (1, "g")], ["waits for 'g'", "waits for 'f'"]),
        RuntimeError,
        {"circle": [(0, "f"), (1, "g")], "may_have_run": True},
    ),
    (lambda: CallCancelledError("not wanted"), RuntimeError, {"may_have_run": True}),
    (
        lambda: GroupCallError("loss", {0: 1.5}, {}, [1]),
        RuntimeError,
        {"name": "loss", "values": {0: 1.5}, "missing": [1]},
    ),
    (lambda: ForkedProcessError("this backend"), RuntimeError, {}),
    (lambda: OverloadedError("1024 calls in flight"), RuntimeError, {}),
    (
        lambda: FunctionNotFoundError("add", ["mul", "sub"]),
        LookupError,
        {"name": "add", "known": ["mul", "sub"]},
    ),
    (
        lambda: RemoteError("KeyError", "'x'", "Traceback ...\nKeyError: 'x'"),
        RuntimeError,
        {
            "remote_type": "KeyError",
            "remote_message": "'x'",
            "remote_traceback": "Traceback ...\nKeyError: 'x'",
        },
    ),
    (lambda: CollectiveMismatchError("all_reduce here, broadcast there"), RuntimeError, {}),
    (
        lambda: CollectiveAbortedError(3, "all_reduce(sum): no memory"),
        RuntimeError,
        {"peer": 3, "reason": "all_reduce(sum): no memory"},
    ),
    (
        lambda: RankFailedError(1, "it was killed", killed=True),
        RuntimeError,
        {"rank": 1, "reason": "it was killed", "killed": True, "outcomes": []},
    ),
    (
        lambda: RanksStuckError(2.0, {3: "there", 1: "here"}),
        TimeoutError,
        {"limit": 2.0, "ranks": [1, 3], "stacks": {1: "here", 3: "there"}, "outcomes": []},
    ),
    (lambda: MembershipError("rank 2 is not in it"), RuntimeError, {}),
]
CONTEXT = {"op": "rpc_sync add", "rank": 1, "peer": 3, "tag": 42, "waited": 1.25}

each_error = pytest.mark.parametrize(
    ("make", "stdlib_type", "data"),
    EXAMPLES,
    ids=[type(make()).__name__ for make, _, _ in EXAMPLES],
)


def facts(error):
    """All that a handler of an error can see."""
    context = {name: getattr(error, name) for name in CONTEXT}
    return type(error), str(error), error.args, context, vars(error)


def test_every_class_is_exercised_here():
    assert {type(make()).__name__ for make, _, _ in EXAMPLES} == set(errors.__all__)


def test_the_table_in_the_docstring_names_every_class_once():
    named = re.findall(r"\b[A-Z][A-Za-z]+Error\b", errors.__doc__ or "")
    assert sorted(named) == sorted(errors.__all__)


@each_error
def test_is_caught_by_the_package_base_and_by_the_stdlib_type(make, stdlib_type, data):
    with pytest.raises(RankwireError):
        raise make()
    with pytest.raises(stdlib_type):
        raise make()


@each_error
def test_carries_its_data_as_attributes(make, stdlib_type, data):
    error = make()
    assert {name: getattr(error, name) for name in data} == data
    assert error.message
    assert str(error).startswith(error.message)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@each_error
def test_survives_pickling(make, stdlib_type, data, protocol):
    error = make()
    twin = pickle.loads(pickle.dumps(error, protocol))
    assert facts(twin) == facts(error)
    assert {name: getattr(twin, name) for name in data} == data


@each_error
def test_survives_pickling_with_context_and_late_attributes(make, stdlib_type, data):
    error = make().during(**CONTEXT)
    error.may_have_run = True
    twin = pickle.loads(pickle.dumps(error))
    assert facts(twin) == facts(error)
    assert twin.may_have_run is True


@each_error
def test_survives_the_copy_module(make, stdlib_type, data):
    error = make().during(**CONTEXT)
    assert facts(copy.copy(error)) == facts(error)
    assert facts(copy.deepcopy(error)) == facts(error)


@each_error
def test_tells_op_rank_peer_tag_and_seconds_waited(make, stdlib_type, data):
    text = str(make().during(**CONTEXT))
    rank, peer = data.get("rank", 1), data.get("peer", 3)
    assert f"[op rpc_sync add, rank {rank}, peer {peer}, tag 42, waited 1.25 s]" in text


def test_tells_only_the_context_that_is_known():
    assert str(OverloadedError("full")) == "full"
    assert str(OverloadedError("full").during(tag=0)) == "full [tag 0]"
    assert str(OverloadedError("full").during(rank=0, waited=0.0)) == "full [rank 0, waited 0 s]"


def test_during_returns_the_error_itself_and_keeps_what_was_known_first():
    error = PeerLostError(3, "reset").during(op="recv", waited=0.5)
    assert error.during(op="barrier", rank=1, peer=9, tag=4, waited=7.0) is error
    assert (error.op, error.rank, error.peer, error.tag, error.waited) == ("recv", 1, 3, 4, 0.5)


def test_during_keeps_zero():
    error = OverloadedError("full").during(rank=0, peer=0, tag=0, waited=0.0)
    error.during(rank=5, peer=5, tag=5, waited=5.0)
    assert (error.rank, error.peer, error.tag, error.waited) == (0, 0, 0, 0.0)


@each_error
def test_a_copy_is_equal(make, stdlib_type, data):
    error = make().during(**CONTEXT)
    assert error.copy() is not error
    assert facts(error.copy()) == facts(error)


def test_a_copy_keeps_the_cause_but_not_the_traceback():
    cause = OSError(104, "Connection reset by peer")
    with pytest.raises(PeerLostError) as caught:
        raise PeerLostError(1, "reset") from cause
    twin = caught.value.copy()
    assert twin.__cause__ is cause
    assert caught.value.__traceback__ is not None
    assert twin.__traceback__ is None


def test_an_error_that_is_kept_holds_no_frames():
    with pytest.raises(OSError) as reset:
        raise OSError(104, "Connection reset by peer")
    with pytest.raises(PeerLostError) as caught:
        raise PeerLostError(1, "reset") from reset.value
    kept = caught.value.kept()
    assert facts(kept) == facts(caught.value)
    assert kept.__traceback__ is None
    assert isinstance(kept.__cause__, OSError)
    assert kept.__cause__.__traceback__ is None


def test_what_is_done_to_a_copy_is_not_done_to_the_original():
    error = DeadlineExceededError(1.0, waiting_for=[1, 2])
    error.add_note("seen while training")
    twin = error.copy().during(op="recv", rank=2)
    twin.waiting_for.remove(1)
    twin.add_note("seen by thread 2")
    assert (error.op, error.rank, error.waiting_for) == (None, None, [1, 2])
    assert error.__notes__ == ["seen while training"]


def test_a_rendezvous_error_names_the_missing_ranks_in_order():
    assert str(RendezvousError("too late", missing=(5, 2))) == "too late; missing ranks 2, 5"
    assert str(RendezvousError("refused")) == "refused"


def test_a_deadline_error_tells_a_limit_below_a_second_exactly():
    assert "within 0.0125 s" in str(DeadlineExceededError(0.0125))
    assert "waiting for rank 3" in str(DeadlineExceededError(1.0, waiting_for=[3]))
    assert "waiting for ranks 1, 3; stuck" in str(
        DeadlineExceededError(1.0, waiting_for=[1, 3], detail="stuck")
    )


def test_a_remote_error_shows_the_remote_traceback_and_where_it_is_from():
    error = RemoteError("KeyError", "'x'", "Traceback\n  line\nKeyError: 'x'\n")
    assert str(error).endswith("traceback on the remote rank:\nTraceback\n  line\nKeyError: 'x'")
    assert "traceback on rank 2:" in str(error.during(peer=2))


def test_the_class_tree_lets_families_be_caught():
    assert issubclass(PeerUnresponsiveError, PeerLostError)
    assert issubclass(InvalidMessageError, ProtocolError)
    assert issubclass(VersionMismatchError, ProtocolError)
    for kind in (InvalidRankError, InvalidWorldSizeError, SelfSendError):
        assert issubclass(kind, ConfigurationError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), RankwireError)


def test_a_deadline_error_can_be_explained_afterwards():
    error = DeadlineExceededError(1.5, waiting_for=[2]).explain("it is busy").explain("very")
    assert error.detail == "it is busy; very"
    assert str(error) == "no result within 1.5 s waiting for rank 2; it is busy; very"
    assert str(pickle.loads(pickle.dumps(error))) == str(error.copy()) == str(error)


@pytest.mark.parametrize(
    "kind", [errors.PeerLostError, errors.PeerUnresponsiveError, errors.CollectiveAbortedError]
)
def test_a_lost_peer_is_always_named(kind):
    """Whoever handles it need not ask whether there is one, nor does a type checker."""
    assert typing.get_type_hints(kind)["peer"] is int
    assert kind(3, "why").peer == 3


def test_a_function_of_a_rank_that_has_registered_none_asks_for_the_barrier():
    text = str(FunctionNotFoundError("work"))
    assert "nor any other: is a barrier missing between registering and the first call?" in text
    assert "barrier" not in str(FunctionNotFoundError("work", ["add"]))
    assert "barrier" not in str(FunctionNotFoundError("work", reason="not yours"))
