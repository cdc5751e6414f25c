"""Pipes of ranks on one side, the launcher's outputs on the other, without a process."""

import contextlib
import errno
import os
import selectors

import pytest

from rankwire.clock import Clock
from rankwire.launch import output as output_module
from rankwire.launch.output import REMIND_AFTER, Output


class Harness:
    """An Output whose stdout and stderr are pipes that we read."""

    def __init__(self, **options) -> None:
        self.selector = selectors.PollSelector()
        self.output = Output(self.selector, **options)
        self.readers = []
        for queue in (self.output._stdout, self.output._stderr):
            reader, queue.fd = os.pipe()
            os.set_blocking(reader, False)
            self.readers.append(reader)
        self.writers: list[int] = []

    def attach(self, rank: int) -> tuple[int, int]:
        pipes = [os.pipe(), os.pipe()]
        self.output.attach(rank, *(os.fdopen(reader, "rb", buffering=0) for reader, _ in pipes))
        writers = pipes[0][1], pipes[1][1]
        self.writers += writers
        return writers

    def turn(self) -> None:
        while events := self.selector.select(0):
            for key, _ in events:
                key.data()

    def read(self, which: int = 0) -> str:
        try:
            return os.read(self.readers[which], 1 << 20).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        self.output.close()
        self.selector.close()
        sinks = (self.output._stdout.fd, self.output._stderr.fd)
        for fd in (*self.readers, *self.writers, *sinks):
            with contextlib.suppress(OSError):  # a test has closed it
                os.close(fd)


@pytest.fixture
def harness():
    made = Harness()
    yield made
    made.close()


def test_each_stream_to_its_own_output(harness):
    out, err = harness.attach(3)
    os.write(out, b"to out\nunfin")
    os.write(err, b"to err\n")
    harness.turn()
    assert harness.read(0) == "[rank 3] to out\n"
    assert harness.read(1) == "[rank 3] to err\n"
    os.close(out)
    harness.turn()
    assert harness.read(0) == "[rank 3] unfin\n"


def test_lines_of_two_ranks_are_not_mixed(harness):
    first, _ = harness.attach(0)
    second, _ = harness.attach(1)
    os.write(first, b"one ")
    harness.turn()
    os.write(second, b"other\n")
    harness.turn()
    os.write(first, b"line\n")
    harness.turn()
    assert harness.read() == "[rank 1] other\n[rank 0] one line\n"


def test_what_the_launcher_says(harness):
    _, err = harness.attach(0)
    os.write(err, "\n".join(map(str, range(100))).encode() + b"\n" + b"x" * 5000 + b"\n")
    harness.turn()
    harness.read(1)
    harness.output.say("[rank 0] is no markup")
    harness.output.quote(harness.output.last_errors(0)[-2:])
    harness.turn()
    assert harness.read(1) == f"rankwire: [rank 0] is no markup\n    99\n    {'x' * 500}\n"
    assert harness.output.last_errors(9) == []


def test_ranks_wait_for_an_output_without_a_reader(harness):
    out, err = harness.attach(0)
    os.set_blocking(out, False)
    line = b"x" * 99 + b"\n"
    sent = 0
    for _ in range(1000):
        harness.turn()
        try:
            sent += os.write(out, line * 100)
        except BlockingIOError:
            break
    else:
        pytest.fail("the launcher buffers without end")
    assert sent < 3 * output_module._QUEUE_HIGH_NBYTES
    os.write(err, b"the other is read\n")
    harness.turn()
    assert harness.read(1) == "[rank 0] the other is read\n"

    received = ""
    while not harness.output.is_written or received.count("x") < sent // 100 * 99:
        received += harness.read()
        harness.turn()
    assert received.count("x") == received.count("[rank 0] ") * 99


def test_the_rest_is_taken_without_waiting(harness):
    out, _ = harness.attach(0)
    os.write(out, b"a\nb")  # and never closed
    harness.output.detach()
    harness.turn()
    assert harness.read() == "[rank 0] a\n[rank 0] b\n"


def test_an_output_that_is_gone_takes_nothing(harness):
    out, _ = harness.attach(0)
    os.close(harness.readers[0])
    os.write(out, b"a\n")
    harness.turn()
    assert harness.output.stdout_trouble.errno == errno.EPIPE
    os.write(out, b"b\n" * 10)
    harness.turn()
    assert harness.output.is_written
    harness.output.drop_rest()
    assert harness.read(1) == "rankwire: not written: 11 lines of rank 0\n"


def test_lines_that_are_given_up_are_counted_by_rank(harness):
    """Also those of which a part was written, and none of the launcher's own."""
    (one, _), (other, _) = harness.attach(1), harness.attach(4)
    line = b"x" * 999 + b"\n"
    for _ in range(5):
        os.write(one, line * 20)
        os.write(other, line * 10)
        harness.turn()
    harness.output.drop_rest()
    lines = [text for text in harness.read(0).splitlines(keepends=True) if text.endswith("\n")]
    written = [sum(text.startswith(f"[rank {rank}]") for text in lines) for rank in (1, 4)]
    assert harness.read(1) == (
        f"rankwire: not written: {100 - written[0]} lines of rank 1,"
        f" {50 - written[1]} lines of rank 4\n"
    )


def test_what_stderr_did_not_take_is_said_on_stdout(harness):
    _, err = harness.attach(0)
    os.close(harness.readers[1])
    os.write(err, b"a\n")
    harness.turn()
    harness.output.drop_rest()
    assert harness.read(0) == "rankwire: not written: 1 line of rank 0\n"


def test_a_full_disk_ends_the_log_but_not_the_output(tmp_path):
    harness = Harness(log_dir=tmp_path)
    harness.output.logs._files[0] = open("/dev/full", "wb", buffering=0)
    out, err = harness.attach(0)
    os.write(out, b"a\n")
    harness.turn()
    os.write(out, b"b\n")
    os.write(err, b"c\n")
    harness.turn()
    assert harness.read(0).splitlines() == ["[rank 0] a", "[rank 0] b"]
    assert harness.read(1).splitlines() == [
        f"rankwire: the log of rank 0, {tmp_path}/rank_0.log, ends here: No space left on device",
        "[rank 0] c",
    ]
    harness.close()


def test_without_a_terminal_a_reminder_comes_now_and_then(harness, monkeypatch):
    now = [1000.0]
    clock = Clock()
    clock.now = lambda: now[0]
    monkeypatch.setattr("rankwire.launch.output.REAL_TIME", clock)
    harness.output._remind_at = now[0] + REMIND_AFTER
    said = []
    for _ in range(100):
        now[0] += 1.0
        harness.output.remind(f"waiting ({now[0] - 1000:.0f})")
        harness.turn()
        said += harness.read(1).splitlines()
    assert said == [f"rankwire: waiting ({second})" for second in (5, 35, 65, 95)]


ERROR = b"Traceback (most recent call last):\n  File 'train.py', line 3\nValueError: no\n"


def test_ranks_that_end_with_the_same_error_are_named_before_the_launcher_says_more(harness):
    errors = [harness.attach(rank)[1] for rank in range(3)]
    for fd in errors:
        os.write(fd, ERROR)
        harness.turn()
        os.close(fd)
        harness.turn()
    lines = [f"[rank 0] {line}" for line in ERROR.decode().splitlines()]
    assert harness.read(1).splitlines() == lines
    harness.output.say("rank 0 failed first")
    harness.turn()
    assert harness.read(1).splitlines() == [
        "rankwire: ranks 1, 2 ended with the same error as rank 0",
        "rankwire: rank 0 failed first",
    ]
    assert all(harness.output.is_in_view(rank) for rank in range(3))


def test_ranks_that_end_with_the_same_error_are_named_if_the_launcher_says_nothing(harness):
    for rank in range(2):
        os.write(harness.attach(rank)[1], ERROR)
        harness.turn()
    harness.output.detach()
    harness.turn()
    lines = harness.read(1).splitlines()
    assert lines[3:] == ["rankwire: rank 1 ended with the same error as rank 0"]


def test_an_error_that_another_rank_has_printed_is_printed_later_if_the_rank_goes_on(
    harness, monkeypatch
):
    now = [1000.0]
    clock = Clock()
    clock.now = lambda: now[0]
    monkeypatch.setattr("rankwire.launch.output_streams.REAL_TIME", clock)
    for rank in range(2):
        os.write(harness.attach(rank)[1], ERROR)
        harness.turn()
    assert "[rank 1]" not in harness.read(1)
    harness.output.refresh()
    harness.turn()
    assert harness.read(1) == ""
    now[0] += 2.0
    harness.output.refresh()
    harness.turn()
    assert harness.read(1).splitlines() == [
        f"[rank 1] {line}" for line in ERROR.decode().splitlines()
    ]


def test_a_rank_that_is_restarted_prints_the_error_of_another_again(harness):
    for rank in (0, 1, 1):
        harness.output.detach(rank)
        os.write(harness.attach(rank)[1], ERROR)
        harness.turn()
    harness.output.detach()
    harness.turn()
    assert harness.read(1).count("[rank 1] ValueError: no") == 1


def test_a_rank_that_ends_while_another_prints_the_same_error_is_compared_with_all_of_it(harness):
    first, second = (harness.attach(rank)[1] for rank in range(2))
    for fd, piece in ((first, ERROR[:50]), (second, ERROR)):
        os.write(fd, piece)
        harness.turn()
    os.close(second)
    harness.turn()
    os.write(first, ERROR[50:])
    harness.turn()
    harness.output.refresh()
    harness.output.say("done")
    harness.turn()
    lines = [f"[rank 0] {line}" for line in ERROR.decode().splitlines()]
    notes = ["rankwire: rank 1 ended with the same error as rank 0", "rankwire: done"]
    assert harness.read(1).splitlines() == [*lines, *notes]


def test_a_rank_that_has_ended_is_printed_if_the_other_does_not_print_the_rest(harness):
    first, second = (harness.attach(rank)[1] for rank in range(2))
    for fd, piece in ((first, ERROR[:50]), (second, ERROR)):
        os.write(fd, piece)
        harness.turn()
    os.close(second)
    harness.turn()
    harness.output.say("done")
    harness.turn()
    lines = [f"[rank 1] {line}" for line in ERROR.decode().splitlines()]
    assert harness.read(1).splitlines()[-4:] == [*lines, "rankwire: done"]
