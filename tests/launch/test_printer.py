"""Printer: in the thread that waits, and else in the one that brings the text."""

import threading

from rankwire.launch.function_run import Printer
from rankwire.testing.conformance.tools import until


class Stream:
    """Notes who writes what."""

    def __init__(self):
        self.written = []

    def write(self, text):
        self.written.append((threading.current_thread().name, text))

    def flush(self):
        pass


def test_a_text_is_printed_by_the_thread_that_waits(monkeypatch):
    stream = Stream()
    monkeypatch.setattr("sys.stdout", stream)
    printer, over = Printer(), threading.Event()

    def bring():
        until(lambda: printer._waiting)
        printer.put("stdout", "one\n")
        over.set()
        printer.wake()

    thread = threading.Thread(target=bring, name="bringer")
    thread.start()
    assert printer.print_until(over.is_set, 20)
    thread.join()
    assert stream.written == [("MainThread", "one\n")]


def test_a_text_is_printed_at_once_if_no_thread_waits(capsys):
    printer = Printer()
    printer.put("stderr", "two\n")
    printer.put("stdout", "three\n")
    assert capsys.readouterr() == ("three\n", "two\n")


def test_what_came_before_the_end_is_printed_before_the_wait_ends(capsys):
    printer = Printer()
    printer._waiting += 1  # as if another thread waited
    printer.put("stdout", "four\n")
    assert not capsys.readouterr().out
    assert printer.print_until(lambda: True)
    assert capsys.readouterr().out == "four\n"


def test_a_wait_ends_when_its_time_has_passed():
    assert not Printer().print_until(lambda: False, 0.01)


def test_a_closed_output_does_no_harm(monkeypatch):
    class Closed(Stream):
        def write(self, text):
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr("sys.stdout", Closed())
    Printer().put("stdout", "unseen")
