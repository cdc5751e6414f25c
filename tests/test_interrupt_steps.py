"""The steps of ``rankwire.interrupts``, with an interrupt at every place."""

import threading
from contextlib import suppress

import pytest

from interrupts import Interrupt, Interrupting, every_interrupt
from rankwire.interrupts import call_and_note, pop_into


def test_a_lock_is_noted_if_it_was_taken_wherever_an_interrupt_falls():
    def run(interrupting: Interrupting):
        lock, grip = threading.Lock(), []
        with suppress(Interrupt), interrupting:
            call_and_note(grip, lock.acquire, False)
        assert lock.locked() == (grip == [True])

    assert every_interrupt(run) >= 0


def test_an_item_is_passed_on_or_still_there_wherever_an_interrupt_falls():
    def run(interrupting: Interrupting):
        passed, items = [], ["item"]
        with suppress(Interrupt), interrupting:
            pop_into(passed.append, items)
        assert items + passed == ["item"]

    assert every_interrupt(run) >= 0


def test_what_the_function_raises_is_raised_and_nothing_is_noted():
    notes = []
    with pytest.raises(ZeroDivisionError):
        call_and_note(notes, divmod, 1, 0)
    assert not notes
    call_and_note(notes, divmod, 7, 2)
    assert notes == [(3, 1)]
