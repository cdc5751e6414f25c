"""What a rank makes of the tries that failed."""

import pytest

from rankwire.errors import AuthenticationError, NoConnectionError
from rankwire.rendezvous.join import Attempts
from rankwire.transports.tcp_stream import TcpAddress
from real_time import Deadline

ADDRESS = TcpAddress("127.0.0.1", 4000)


def attempts(*, has_coordinator=False, limit=60.0):
    return Attempts(1, ADDRESS, Deadline(limit), has_coordinator)


def test_a_coordinator_that_never_answered_is_missing_itself():
    joining = attempts()
    joining.begin()
    joining.failed(NoConnectionError("refused"))
    error = joining.too_late()
    assert (error.missing, error.rank, error.op) == ([0], 1, "join")
    text = "rank 0 was not reached at 127.0.0.1:4000 within 60 s, in 1 try (refused)"
    assert error.reason == text


def test_a_launcher_that_never_answered_is_not_a_missing_rank():
    joining = attempts(has_coordinator=True)
    joining.begin()
    joining.begin()
    error = joining.too_late()
    assert error.missing == []
    assert error.reason.startswith("the coordinator was not reached")
    assert error.reason.endswith("in 2 tries")


def test_a_rank_that_was_let_in_blames_the_ranks_that_did_not_come():
    joining = attempts()
    joining.begin()
    joining.connected()
    joining.admitted()
    joining.note_missing([2, 3])
    joining.note_missing([3])
    error = joining.too_late()
    assert (error.missing, error.reason) == ([3], "the world did not form within 60 s")


def test_ranks_that_give_up_at_the_same_deadline_are_not_the_cause():
    joining = attempts(limit=1e-9)
    joining.begin()
    joining.admitted()
    joining.note_missing([3])
    joining.note_missing([2, 3])
    assert joining.missing == [3]


def test_a_failed_handshake_is_blamed_before_a_connection_that_was_refused_later():
    joining = attempts()
    joining.begin()
    joining.connected()
    joining.failed(NoConnectionError("closed during the handshake"))
    joining.begin()
    joining.failed(NoConnectionError("refused"))
    assert "(closed during the handshake)" in joining.too_late().reason


def test_the_third_refusal_is_raised_and_names_both_ends():
    joining = attempts()
    for _ in range(2):
        joining.refused(AuthenticationError("the secrets differ"))
    with pytest.raises(AuthenticationError) as caught:
        joining.refused(AuthenticationError("the secrets differ"))
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("join", 1, 0)
