"""Which rank is to blame, and what is shown of its output."""

import signal

import pytest

from rankwire.launch.attempt import (
    Failure,
    blamed,
    excerpt,
    first_failure,
    in_order_of_loss,
)
from rankwire.launch.process import Ending
from rankwire.wire.control_messages import Fallen, Gone, gone_by

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
LOST = Failure(0, Ending(code=1), [*TRACEBACK, "rankwire.errors.PeerLostError: rank 1 is lost"])
OWN = Failure(1, Ending(code=2), [*TRACEBACK, "ValueError: no"])


def fallen(rank, *, cause=None, traceback=""):
    return gone_by(rank, Fallen("it raised ValueError", traceback, cause))


def test_the_first_rank_that_did_not_lose_another_is_to_blame():
    assert first_failure([LOST, OWN]) is OWN
    assert first_failure([OWN, LOST]) is OWN


def test_the_first_rank_is_to_blame_if_all_lost_another():
    later = Failure(3, Ending(code=1), LOST.errors)
    assert first_failure([LOST, later]) is LOST


def test_a_loss_that_was_only_logged_explains_nothing():
    handled = Failure(2, Ending(code=1), [*LOST.errors, "and then", *OWN.errors])
    assert not handled.is_consequence
    assert not Failure(2, Ending(code=1), ["PeerLostError: seen"]).is_consequence


def test_the_one_line_of_a_rank_that_failed_because_of_another_counts():
    assert Failure(0, Ending(code=1), ["x", "failed because of rank 2: y"]).is_consequence
    assert not Failure(0, Ending(code=1), ["failed because of rank 2: y", "x"]).is_consequence


def test_a_traceback_of_several_errors_is_one():
    printed = ["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: two"]
    failure = Failure(1, Ending(code=1), ["before", *printed], fallen(1, traceback="told"))
    assert failure.is_in_its_stderr, "it would be printed twice"
    assert failure.excerpt == printed


def test_a_killed_rank_lost_no_other():
    killed = Failure(2, Ending(signal=signal.SIGKILL), LOST.errors)
    assert first_failure([LOST, killed]) is killed


def test_a_quoted_traceback_does_not_count_as_the_ranks():
    quoted = [f"  | {line}" for line in [*TRACEBACK, "ValueError: theirs"]]
    lost = Failure(0, Ending(code=1), [*LOST.errors, *quoted])
    assert lost.is_consequence
    assert first_failure([lost, OWN]) is OWN
    assert excerpt(["noise", *quoted]) == ["noise", *quoted]


def test_a_report_to_the_coordinator_counts_if_stderr_has_no_error():
    told = fallen(2, traceback="\n".join(OWN.errors))
    quiet = Failure(2, Ending(code=1), ["shutting down"], told)
    assert quiet.excerpt == OWN.errors
    other = fallen(2, traceback="other")
    assert Failure(2, Ending(code=1), OWN.errors, other).excerpt == OWN.errors


def test_what_a_rank_said_of_itself_counts_more_than_its_text():
    assert Failure(0, Ending(code=1), [], fallen(0, cause=1)).is_consequence
    assert Failure(0, Ending(code=1), OWN.errors, fallen(0, cause=1)).is_consequence
    assert not Failure(0, Ending(code=1), LOST.errors, fallen(0)).is_consequence
    ended = Gone(0, "its connection ended")
    assert Failure(0, Ending(code=1), LOST.errors, ended).is_consequence
    assert Failure(0, Ending(code=1), [], fallen(0)).reason == "it raised ValueError"
    assert Failure(0, Ending(code=1), [], ended).reason == ""


def test_ranks_to_blame_are_found_from_the_reports_of_all_ranks():
    assert blamed([]) == set()
    assert blamed([Gone(3, "its connection ended"), fallen(0, cause=1), fallen(2)]) == {1, 2}
    assert blamed([Gone(1, "silent", silent=True), fallen(0, cause=1)]) == set()


def test_the_order_in_which_the_coordinator_lost_them():
    failures = [Failure(rank, Ending(code=1), []) for rank in (4, 3, 0, 1)]
    assert [f.rank for f in in_order_of_loss(failures, [2, 1, 3])] == [1, 3, 4, 0]


def test_the_lines_worth_showing():
    assert excerpt(["noise", *TRACEBACK, "end"]) == [*TRACEBACK, "end"]
    assert excerpt([str(i) for i in range(30)]) == [str(i) for i in range(20, 30)]
    assert excerpt([]) == []


@pytest.mark.parametrize(
    ("ending", "text", "code"),
    [
        (Ending(code=0), "exit code 0", 0),
        (Ending(code=3), "exit code 3", 3),
        (Ending(signal=signal.SIGTERM), "killed by SIGTERM", 143),
        (Ending(signal=9, is_oom=True), "killed by SIGKILL by the kernel: out of memory", 137),
        (Ending(signal=40), "killed by signal 40", 168),
        (Ending(signal=signal.SIGSEGV), "killed by SIGSEGV (a crash in native code)", 139),
    ],
)
def test_the_ending_of_a_rank_has_a_text_and_an_exit_code(ending, text, code):
    assert str(ending) == text
    assert ending.exit_code == code
    assert ending.is_failure == (code != 0)
