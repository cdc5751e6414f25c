"""Texts of others: short, harmless to a terminal, and otherwise as they were."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.texts import name_ranks, one_line, one_of, printable, shortened, type_name


@pytest.mark.parametrize("text", ["", "plain", "two\n\tlines", "äöü 漢字 \U0001f600", "x" * 1000])
def test_an_ordinary_text_stays_as_it_is(text):
    assert printable(text) == text


def test_the_middle_of_a_long_text_is_left_out_with_a_note():
    text = "".join(f"{number}\n" for number in range(10_000))
    found = shortened(text, 1000)
    assert len(found) <= 1000
    assert found.startswith("0\n1\n2\n")
    assert found.endswith("9998\n9999\n")
    left_out = len(text) - len(found.split("...")[0]) + 1 - len(found.split("...\n")[-1])
    assert f"... {left_out} characters left out ..." in found


@pytest.mark.parametrize(
    "character", ["\x1b", "\r", "\b", "\x00", "\x7f", "\x9b", "\u202e", "\ud800"]
)
def test_a_character_that_is_not_shown_becomes_an_escape(character):
    escape = character.encode("unicode_escape").decode()
    assert printable(f"a{character}b") == f"a{escape}b"
    assert one_line(f"a{character}b") == f"a{escape}b"


def test_escapes_do_not_make_a_text_longer_than_allowed():
    assert len(printable("\x1b" * 5000, 1000)) <= 1000
    assert len(one_line("\x1b" * 5000, 100)) <= 100


def test_one_line_is_one_line_and_cut_at_its_end():
    assert one_line("first\nsecond") == "first second"
    assert one_line("x" * 1000) == "x" * 497 + "..."


@given(st.text(), st.integers(100, 300))
def test_what_was_treated_once_is_not_changed_again(text, longest):
    assert printable(printable(text, longest), longest) == printable(text, longest)
    assert one_line(one_line(text, longest), longest) == one_line(text, longest)
    assert len(printable(text, longest)) <= longest
    assert len(one_line(text, longest)) <= longest


@pytest.mark.parametrize(
    ("value", "name"),
    [(1, "int"), (ValueError(), "ValueError"), (OrderedDict(), "collections.OrderedDict")],
)
def test_a_type_is_named_with_its_module_unless_it_is_built_in(value, name):
    assert type_name(value) == name


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([2], "rank 2"),
        ([5, 3], "ranks 5, 3"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(9), "9 ranks: 0-8"),
        ([*range(1, 299), 301], "299 ranks: 1-298, 301"),
        ([9, 7, 5, 3, 1, 11, 13, 14, 15], "9 ranks: 1, 3, 5, 7, 9, 11, 13-15"),
    ],
)
def test_many_ranks_are_named_by_ranges_and_their_number(ranks, words):
    assert name_ranks(list(ranks)) == words


def test_the_names_of_any_number_of_ranks_fit_on_a_line():
    words = name_ranks(range(0, 1_000_000, 3))
    assert words.startswith("333334 ranks: 0, 3, 6, ")
    assert words.endswith(", ...")
    assert len(words) <= 150


def test_one_of_several_and_the_only_one():
    assert one_of(2, "worker") == "one of 2 workers"
    assert one_of(1, "worker") == "the one worker"
