"""What Python prints of an interrupt, as one line."""

import traceback

from rankwire.launch.lines import InterruptFilter


def printed(error):
    def work():
        raise error

    try:
        work()
    except BaseException as caught:  # the interrupt too
        return "".join(traceback.format_exception(caught)).splitlines()
    raise AssertionError


def test_an_interrupt_is_one_line_that_says_where():
    (line,) = InterruptFilter().feed(printed(KeyboardInterrupt()))
    assert line.startswith("KeyboardInterrupt (")
    assert line.endswith(" in work)")
    assert f"{__file__}:" in line


def test_it_may_come_in_pieces():
    fold = InterruptFilter()
    lines = [found for line in ["before", *printed(KeyboardInterrupt()), "after"]
             for found in fold.feed([line])]  # fmt: skip
    assert len(lines) == 3
    assert (lines[0], lines[2]) == ("before", "after")


def test_another_error_is_passed_on_as_it_is():
    lines = ["before", *printed(ValueError("bad")), "after"]
    assert InterruptFilter().feed(lines) == lines


def test_an_unfinished_traceback_is_passed_on_at_the_end():
    fold = InterruptFilter()
    lines = printed(ValueError("bad"))[:-1]
    assert fold.feed(lines) == []
    assert fold.finish() == lines
    assert fold.finish() == []


def test_a_traceback_within_a_traceback_is_passed_on():
    begin = "Traceback (most recent call last):"
    lines = [begin, "  one", begin, "  two", "", "KeyboardInterrupt"]
    assert InterruptFilter().feed(lines) == lines


def test_a_traceback_without_frames_has_no_place():
    lines = ["Traceback (most recent call last):", "KeyboardInterrupt"]
    assert InterruptFilter().feed(lines) == ["KeyboardInterrupt"]


def test_an_endless_traceback_is_not_held_back_without_limit():
    fold = InterruptFilter()
    lines = ["Traceback (most recent call last):", *["  more"] * 1000]
    assert len(fold.feed(lines)) + len(fold.finish()) == 1001
