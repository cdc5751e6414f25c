"""Who is to blame, and what is shown of it."""

import signal

import pytest

from rankwire.launch.child import Ending
from rankwire.launch.summary import Failure, excerpt, first_failure, list_ranks

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
LOST = Failure(0, Ending(code=1), [*TRACEBACK, "rankwire.errors.PeerLostError: rank 1 is lost"])
OWN = Failure(1, Ending(code=2), [*TRACEBACK, "ValueError: no"])


def test_the_first_with_a_reason_of_its_own():
    assert first_failure([LOST, OWN]) is OWN
    assert first_failure([OWN, LOST]) is OWN


def test_the_first_if_all_lost_another():
    later = Failure(3, Ending(code=1), LOST.errors)
    assert first_failure([LOST, later]) is LOST


def test_a_loss_that_was_only_logged_explains_nothing():
    handled = Failure(2, Ending(code=1), [*LOST.errors, "and then", *OWN.errors])
    assert not handled.is_consequence
    assert not Failure(2, Ending(code=1), ["PeerLostError: seen"]).is_consequence


def test_who_was_killed_lost_nobody():
    killed = Failure(2, Ending(signal=signal.SIGKILL), LOST.errors)
    assert first_failure([LOST, killed]) is killed


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
        (Ending(signal=40), "killed by signal 40", 168),
        (Ending(signal=signal.SIGSEGV), "killed by SIGSEGV (a crash in native code)", 139),
    ],
)
def test_endings(ending, text, code):
    assert str(ending) == text
    assert ending.exit_code == code
    assert ending.is_failure == (code != 0)


def test_lists_of_ranks():
    assert list_ranks([3]) == "rank 3"
    assert list_ranks([0, 2]) == "ranks 0, 2"
