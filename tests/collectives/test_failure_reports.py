"""How a failure of one rank becomes an error on the others."""

import pytest

from rankwire.collectives.failure_reports import error_of, failure_notice
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    DeadlineExceededError,
    InvalidMessageError,
    PeerLostError,
)
from rankwire.wire.control_messages import Notice, pack, unpack


def told(error, *, rank=2, sender=2):
    notice = failure_notice(Notice(0, 7, "barrier()", epoch=5), rank, error)
    assert (notice.sequence, notice.description, notice.epoch) == (7, "barrier()", 5)
    assert notice.is_failure
    return error_of(unpack(bytearray(pack(notice))), sender)


def test_a_disagreement_is_one_for_everybody():
    error = told(CollectiveMismatchError("rank 0 is elsewhere").during(peer=0))
    assert type(error) is CollectiveMismatchError
    assert (error.message, error.peer) == ("rank 0 is elsewhere", 0)
    assert told(CollectiveMismatchError("somebody is elsewhere")).peer == 2


def test_a_lost_rank_is_named_by_everybody():
    error = told(PeerLostError(1, "it was killed"))
    assert type(error) is PeerLostError
    assert error.peer == 1
    assert "it was killed" in error.reason
    assert "rank 2 says" in error.reason


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ValueError("no such thing"), "ValueError('no such thing')"),
        (KeyboardInterrupt(), "KeyboardInterrupt()"),
        (ChannelClosedError("this backend is closed"), "this backend is closed"),
    ],
)
def test_any_other_failure_ends_the_operation(cause, text):
    error = told(cause)
    assert type(error) is CollectiveAbortedError
    assert error.peer == 2
    assert text in error.reason
    assert "barrier()" in error.reason


def test_a_failure_that_a_rank_has_heard_of_names_the_rank_that_failed():
    heard = CollectiveAbortedError(1, "barrier(): KeyboardInterrupt()")
    error = told(heard)
    assert type(error) is CollectiveAbortedError
    assert error.peer == 1
    assert error.message == "rank 1 failed in barrier(): KeyboardInterrupt() (rank 2 says)"
    to_the_failed_one = error_of(failure_notice(Notice(0, 7, "barrier()"), 2, heard), 2, 1)
    assert to_the_failed_one.message == "rank 2 failed in barrier(): KeyboardInterrupt()"


def test_who_was_late_is_in_what_the_others_hear():
    error = told(DeadlineExceededError(1.5, waiting_for=[3]))
    assert "waiting for rank 3" in error.message


def test_a_text_that_is_not_unicode_is_told_too():
    # As in the name of a file, say. If this failed, the others would not hear of the failure.
    error = told(InvalidMessageError("no file 'a\udc80'"))
    assert "no file 'a" in error.reason


def test_a_rank_that_leaves_is_named_once():
    notice = Notice(0, 7, "", "left", "rank 2 has left", culprit=2)
    assert str(error_of(notice, 2, 3).message) == "rank 2 has left"
    assert str(error_of(notice, 1, 3).message) == "rank 2 has left (rank 1 says)"


def test_a_rank_that_could_not_begin_says_so():
    notice = failure_notice(Notice(0, 7, "reduce"), 2, ValueError("no such thing"), refused=True)
    assert notice.state == "refused"
    error = error_of(notice, 2)
    assert type(error) is CollectiveAbortedError
    assert "rank 2 failed in reduce: ValueError('no such thing')" in str(error)


@pytest.mark.parametrize(
    "cause",
    [ValueError("none"), CollectiveMismatchError("elsewhere"), PeerLostError(1, "it was killed")],
)
def test_who_had_done_its_part_is_told_which_one_it_was(cause):
    error = error_of(failure_notice(Notice(0, 7, "barrier()"), 2, cause), 2, 3, is_news=True)
    assert "number 7 of this group, which had succeeded on rank 3" in str(error)
