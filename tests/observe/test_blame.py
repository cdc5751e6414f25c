"""Whose failure began it."""

import contextlib
import pickle

import numpy as np
import pytest

from rankwire import all_reduce
from rankwire.backends.sub import SubBackend
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    DeadlineExceededError,
    PeerLostError,
    PeerUnresponsiveError,
    RemoteError,
)
from rankwire.observe.blame import Losses, describe_failure, is_consequence, root_of
from rankwire.testing import simulated_world
from worlds import Running, eventually, process_world, runtime_folder_of_its_own, tcp_world


def lost(peer, **options):
    return PeerLostError(peer, "it raised ValueError: bad batch", **options)


def caught(*errors):
    """Return the last of several errors, each raised while the one before it is handled."""
    before = None
    for error in errors:
        try:
            try:
                if before is not None:
                    raise before
            finally:
                raise error
        except BaseException as raised:
            before = raised
    return before


# -- what an error says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "root"),
    [
        (None, None),
        (ValueError("mine"), None),
        (lost(0, root=1), 1),
        (caught(lost(0, root=1), RuntimeError("gave up")), 1),
        (caught(lost(0, root=1), SystemExit(3)), 1),
        (ExceptionGroup("tasks", [lost(0, root=1), lost(2, root=1)]), 1),
        (ExceptionGroup("tasks", [lost(0, root=1), ValueError("mine")]), None),
    ],
    ids=repr,
)
def test_the_root_is_that_of_the_error_or_of_one_before_it(error, root):
    assert root_of(error) == root


def test_a_circle_of_causes_ends():
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert root_of(one) is None
    assert not is_consequence(one)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(), False),
        (RemoteError("ValueError", "", ""), False),
        (lost(1), True),
        (CollectiveAbortedError(1, "all_reduce"), True),
        (RemoteError("PeerUnresponsiveError", "rank 1 is lost", ""), True),
        (caught(lost(1), KeyError()), True),
        (ExceptionGroup("", [lost(1)]), True),
    ],
    ids=repr,
)
def test_errors_are_classified_as_consequences_of_another_rank(error, expected):
    assert is_consequence(error) is expected


# -- what is known of losses -----------------------------------------------------------------------


def test_a_first_loss_is_reported_unchanged():
    losses = Losses()
    error = losses.explain(lost(1, remote_traceback="Traceback ..."))
    assert (error.peer, error.root) == (1, 1)
    assert str(error) == str(lost(1, remote_traceback="Traceback ...").during(peer=1))
    assert losses.first == 1


def test_a_consequence_is_reported_with_the_first_cause_alone():
    losses = Losses()
    losses.explain(lost(1, remote_traceback="of rank 1"))
    second = PeerUnresponsiveError(0, "it raised PeerLostError", remote_traceback="of rank 0")
    losses.explain(second, cause=1)
    third = losses.explain(PeerLostError(3, "it raised ...", remote_traceback="of 3"), cause=0)
    assert (third.peer, third.root, third.remote_traceback) == (3, 1, "of rank 1")
    assert third.message == (
        "rank 3 is lost: it failed because rank 1 is lost: it raised ValueError: bad batch"
    )
    assert "traceback on rank 1:" in str(third)
    assert str(pickle.loads(pickle.dumps(third))) == str(third)
    assert losses.first == 1


def test_a_later_independent_failure_is_reported_with_the_first_loss():
    losses = Losses()
    losses.explain(lost(1))
    later = losses.explain(PeerLostError(0, "it raised KeyError", remote_traceback="of rank 0"))
    assert (later.root, later.remote_traceback) == (0, "of rank 0")
    assert later.reason == (
        "it raised KeyError (after rank 1 was lost: it raised ValueError: bad batch)"
    )
    left = losses.explain(ChannelClosedError("rank 2 has left").during(peer=2))
    assert left.root == 2
    assert left.message.startswith("rank 2 has left (after rank 1 was lost: ")


def test_an_unexplained_end_counts_as_a_consequence():
    losses = Losses()
    losses.explain(lost(1, remote_traceback="of rank 1"))
    error = losses.explain(PeerLostError(2, "its connection ended"), is_told=False)
    assert (error.root, error.remote_traceback) == (1, "of rank 1")
    assert error.reason.startswith("its connection ended (after rank 1 was lost: ")


def test_a_rank_that_failed_because_another_left_says_so():
    error = Losses().explain(PeerLostError(0, "it raised ChannelClosedError: ..."), cause=1)
    assert (error.root, error.reason) == (1, "it raised ChannelClosedError: ...")


def test_a_ranks_own_traceback_is_not_attributed_to_the_rank_it_blames():
    """That one may live: whom a rank blames is its claim."""
    error = Losses().explain(PeerLostError(0, "it says", remote_traceback="of rank 0"), cause=1)
    assert (error.root, error.told_by) == (1, 0)
    assert "traceback on rank 0:\n  | of rank 0" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- worlds ----------------------------------------------------------------------------------------


def cascade(world, wrap):
    """Let rank 1 raise, rank 0 fall of that, and return what ranks 2 and 3 get from rank 0."""
    waiting = [Running(world[rank].recv, 0) for rank in (2, 3)]
    with contextlib.suppress(ValueError), world[1]:
        raise ValueError("bad batch")
    with contextlib.suppress(PeerLostError, RuntimeError), world[0]:
        wrap(world[0])
    return [running.error() for running in waiting]


def at_once(backend):
    backend.recv(1)


def wrapped(backend):
    try:
        backend.recv(1)
    except PeerLostError as error:
        raise RuntimeError("training failed") from error


def in_a_group(backend):
    SubBackend(backend, [0, 1])


@pytest.fixture(params=[tcp_world, simulated_world])
def world(request):
    with request.param(4) as ranks:
        yield ranks


@pytest.mark.parametrize("wrap", [at_once, wrapped, in_a_group])
def test_all_survivors_name_the_first_cause(world, wrap):
    for error in cascade(world, wrap):
        assert isinstance(error, PeerLostError)
        assert (error.peer, error.root) == (0, 1)
        assert error.reason == "it failed because rank 1 is lost: it raised ValueError: bad batch"
        assert str(error).count("Traceback") == 1
        assert "traceback on rank 1:" in str(error)


def test_a_rank_that_aborts_a_collective_of_a_group_is_named_by_its_world_rank():
    with simulated_world(4) as world, contextlib.ExitStack() as stack:
        making = [Running(SubBackend, world[rank], [1, 2, 3]) for rank in (1, 2, 3)]
        one, two, _ = (stack.enter_context(group.result()) for group in making)
        reducing = Running(all_reduce, one, np.ones(4))
        with pytest.raises(DeadlineExceededError):
            all_reduce(two, np.ones(4), timeout=0.05)  # the third does not come
        error = reducing.error()
        assert isinstance(error, CollectiveAbortedError)
        assert (error.peer, error.root) == (1, 2)
        waiting = Running(world[0].recv, 1)
        world[1].close(error=error)
        assert waiting.error().root == 2


def catch_and_fail_later(backend):
    with contextlib.suppress(PeerLostError):
        backend.recv(1)
    raise RuntimeError("gave up")


def test_a_rank_that_catches_a_loss_and_fails_later_is_reported_with_the_first_cause(world):
    for error in cascade(world, catch_and_fail_later):
        assert error.reason == (
            "it raised RuntimeError: gave up"
            " (after rank 1 was lost: it raised ValueError: bad batch)"
        )
        assert str(error).count("Traceback") == 1


def test_without_a_coordinator_an_unexplained_end_comes_with_the_first_cause():
    # Those that are killed leave the files of their sockets.
    with runtime_folder_of_its_own(), process_world(4) as ranks:
        ranks[3].call("send", b"", 2)  # so that the end of one is seen by the other
        ranks[2].call("recv", 3)
        with contextlib.suppress(Exception):
            ranks[0].call("eval", "backend.close(error=ValueError('bad batch'))")
        for rank in ranks[2:]:
            eventually(lambda rank=rank: 0 not in rank.call("eval", "backend.alive"))
        waiting = ranks[2].start("recv", 3)
        ranks[3].kill()
        error = waiting.error()
        assert (error.peer, error.root) == (3, 0)
        assert "after rank 0 was lost: it raised ValueError: bad batch" in error.reason


# -- what a rank that fails reports about itself ---------------------------------------------------


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0), GeneratorExit()], ids=repr)
def test_orderly_exits_are_not_failures(error):
    assert describe_failure(error) is None


def test_reason_and_traceback_are_those_of_the_error():
    fall = describe_failure(raised(ValueError("bad batch\nwith details")))
    assert fall.reason == "it raised ValueError: bad batch"
    assert fall.traceback.startswith("Traceback (most recent call last)")
    assert "with details" in fall.traceback


def test_an_error_whose_text_cannot_be_made_is_still_reported():
    fall = describe_failure(raised(Mute()))
    assert "Mute" in fall.reason
    assert "RuntimeError" in fall.reason


def test_texts_are_bounded_and_can_be_sent():
    fall = describe_failure(raised(ValueError("\ud800" + "x" * 1_000_000)))
    assert len(fall.reason) < 1000
    assert len(fall.traceback) < 40_000
    (fall.reason + fall.traceback).encode()


def test_a_rank_does_not_fail_because_of_itself():
    lost = raised(PeerLostError(2, "it was given up", root=1))
    assert [describe_failure(lost, rank=rank).cause for rank in (0, 1)] == [1, None]
