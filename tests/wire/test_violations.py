"""What is wrong with a stream is said in numbers, and names the first thing that is wrong."""

import pytest

from rankwire.errors import MessageTooLargeError
from rankwire.wire.frames import LOAN, Channel
from rankwire.wire.violations import broken_seal, describe_violation


@pytest.mark.parametrize(
    ("word", "sequence", "nbytes", "text"),
    [
        (99, 7, 0, "unknown channel 99"),
        (Channel.CANCEL | LOAN, 7, 0, "channel 6 cannot lend"),
        (Channel.MESSAGE | 0x200, 7, 0, "unknown flags 0x2"),
        (Channel.MESSAGE | 0x10000, 7, 0, "reserved bits 0x1"),
        (Channel.MESSAGE, 8, 0, "sequence number 8, expected 7"),
        (Channel.MESSAGE, 7, 101, "announced 101 bytes, the limit is 100"),
    ],
)
def test_the_first_thing_that_is_wrong_is_said(word, sequence, nbytes, text):
    assert text in describe_violation(int(word), sequence, 7, nbytes, 100).message


def test_a_size_that_is_too_large_says_so_in_its_cause_too():
    error = describe_violation(int(Channel.MESSAGE), 7, 7, 101, 100)
    assert isinstance(error.__cause__, MessageTooLargeError)


def test_a_seal_that_does_not_fit_says_what_may_have_happened():
    assert "altered, repeated or left out" in broken_seal().message
