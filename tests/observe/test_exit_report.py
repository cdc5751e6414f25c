"""What a rank that falls says of itself."""

import pytest

from rankwire.errors import PeerLostError
from rankwire.observe.exit_report import fall_by


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0), GeneratorExit()], ids=repr)
def test_good_ends_are_no_falls(error):
    assert fall_by(error) is None


def test_reason_and_traceback_are_those_of_the_error():
    fall = fall_by(raised(ValueError("bad batch\nwith details")))
    assert fall.reason == "it raised ValueError: bad batch"
    assert fall.traceback.startswith("Traceback (most recent call last)")
    assert "with details" in fall.traceback


def test_an_error_whose_text_cannot_be_made_is_told_all_the_same():
    fall = fall_by(raised(Mute()))
    assert "Mute" in fall.reason
    assert "RuntimeError" in fall.reason


def test_texts_are_bounded_and_can_be_sent():
    fall = fall_by(raised(ValueError("\ud800" + "x" * 1_000_000)))
    assert len(fall.reason) < 1000
    assert len(fall.traceback) < 40_000
    (fall.reason + fall.traceback).encode()


def test_a_rank_does_not_fall_because_of_itself():
    lost = raised(PeerLostError(2, "it was given up", root=1))
    assert [fall_by(lost, rank=rank).cause for rank in (0, 1)] == [1, None]
