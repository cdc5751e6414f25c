"""Insisting: a step that puts things in order comes to its end through one or two interrupts."""

import pytest

from interrupts import Interrupt
from rankwire.links.insisting import insist


class Step:
    """A step that is interrupted, or fails, so many times."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.done: list[int] = []

    def __call__(self, argument: int) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.done.append(argument)


def test_a_step_is_taken_once():
    step = Step()
    insist(step, 5)
    assert step.done == [5]


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_step_is_taken_all_the_same_and_the_interrupt_raised(count):
    step = Step(*(Interrupt() for _ in range(count)))
    with pytest.raises(Interrupt):
        insist(step, 5)
    assert step.done == [5]


@pytest.mark.parametrize("interrupts", [0, 1])
def test_an_error_is_not_repeated(interrupts):
    step = Step(*(Interrupt() for _ in range(interrupts)), ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        insist(step, 5)
    assert step.done == []
