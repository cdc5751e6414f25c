"""An error that several ranks end with is printed once."""

import os

import pytest

from launched import PATIENT_COMMAND
from rankwire.launch.lines import PrintedErrors, RepeatFilter
from rankwire.observe.tracebacks import FULL_TRACEBACK

BEGIN = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 3, in <module>'
CODE = "    step(batch)"


def error(text="ValueError: no", frame=FRAME):
    return [BEGIN, frame, CODE, text]


class Ranks:
    """The folds of a job's ranks."""

    def __init__(self):
        printed = PrintedErrors()
        self.folds = [RepeatFilter(rank, printed) for rank in range(3)]

    def feed(self, rank, *lines):
        return self.folds[rank].feed(lines)

    def finish(self, rank):
        return self.folds[rank].finish(), self.folds[rank].same_as


@pytest.fixture
def ranks():
    return Ranks()


def test_the_first_rank_prints_its_error_at_once(ranks):
    assert ranks.feed(0, *error()) == error()
    assert ranks.finish(0) == ([], None)


def test_a_second_rank_that_ends_with_the_same_error_prints_nothing(ranks):
    ranks.feed(0, "a line before", *error())
    assert ranks.feed(1, "another line", *error()) == ["another line"]
    assert ranks.finish(1) == ([], 0)


def test_what_differs_by_rank_makes_no_difference(ranks):
    ours = "rankwire.errors.PeerLostError: rank 1 is lost: it ended"
    hidden = "  [{} frames of rankwire; RANKWIRE_FULL_TRACEBACK=1 shows]"
    ranks.feed(0, BEGIN, FRAME, hidden.format(4), f"{ours} [op recv, rank 0, waited 3 s]")
    one = f"{ours} (rank 0 says) [op recv, rank 2, peer 1, waited 0.5 s]"
    assert ranks.feed(2, BEGIN, FRAME, hidden.format(12), one) == []
    assert ranks.finish(2) == ([], 0)


@pytest.mark.parametrize("begin", [BEGIN, "  + Exception Group Traceback (most recent call last):"])
def test_errors_of_many_lines_that_quote_others_are_compared_whole(ranks, begin):
    chained = [
        *error(),
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        begin,
        FRAME,
        "KeyError: 3",
        "",
        "traceback on rank 1:",
        *error(),
    ]
    assert ranks.feed(0, *chained) == chained
    chained[-5] = "traceback on rank 2:"
    assert ranks.feed(1, *chained) == []
    assert ranks.finish(1) == ([], 0)


def test_of_another_message_at_the_same_place_the_message_is_printed(ranks):
    ranks.feed(0, *error())
    assert ranks.feed(1, *error("ValueError: yes"), "more of it") == []
    message = "same traceback as rank 0, but: ValueError: yes"
    assert ranks.finish(1) == ([message, "more of it"], None)


def test_an_error_at_another_place_is_printed_whole(ranks):
    other = error(frame=FRAME.replace("3", "4"))
    ranks.feed(0, *error())
    assert ranks.feed(1, *other) == other
    assert ranks.finish(1) == ([], None)
    # And a third rank is compared with both.
    assert ranks.feed(2, *other) == []
    assert ranks.finish(2) == ([], 1)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_lines_that_come_in_pieces_are_the_same_lines(ranks, step):
    ranks.feed(0, *error())
    lines = error()
    for begin in range(0, 4, step):
        assert ranks.feed(1, *lines[begin : begin + step]) == []
    assert ranks.finish(1) == ([], 0)


def test_an_error_is_printed_if_its_rank_goes_on(ranks):
    ranks.feed(0, *error())
    assert ranks.feed(1, *error()) == []
    assert ranks.folds[1].is_holding
    assert ranks.folds[1].release() == error()
    assert not ranks.folds[1].is_holding
    assert ranks.feed(1, "step 4") == ["step 4"]
    assert ranks.finish(1) == ([], None)


def test_a_line_after_the_error_that_the_other_did_not_print_has_both_printed(ranks):
    ranks.feed(0, *error())
    lines = [*error(), "a line of this rank alone"]
    assert ranks.feed(1, *lines) == []  # the other rank may be behind with printing
    assert ranks.finish(1) == (lines, None)


def test_a_rank_that_prints_its_error_faster_than_the_first_is_compared_with_all_of_it(ranks):
    ranks.feed(0, *error()[:1])
    assert ranks.feed(1, *error()) == []
    ranks.feed(0, *error()[1:])
    assert ranks.finish(1) == ([], 0)


def test_an_error_of_which_the_first_rank_has_printed_only_a_part_is_printed(ranks):
    ranks.feed(0, *error()[:1])
    assert ranks.feed(1, *error()) == []
    assert ranks.finish(1) == (error(), None)


def test_a_rank_that_has_ended_before_the_first_has_printed_all_of_it_can_wait(ranks):
    ranks.feed(0, *error()[:1])
    assert ranks.feed(1, *error()) == []
    assert ranks.folds[1].finish(waits=True) == []
    assert ranks.folds[1].is_holding
    ranks.feed(0, *error()[1:])
    assert ranks.folds[1].finish(waits=True) == []
    assert not ranks.folds[1].is_holding
    assert ranks.folds[1].same_as == 0


def test_no_line_is_lost_of_more_than_are_remembered(ranks):
    lines = [BEGIN, *(f"  line {n}" for n in range(1000))]
    assert ranks.feed(0, *lines) == lines
    assert [*ranks.feed(1, *lines), *ranks.finish(1)[0]] == lines


def test_a_rank_is_not_compared_with_itself(ranks):
    assert ranks.feed(0, *error(), *error()) == [*error(), *error()]


# -- programs

PROGRAMS = {
    "killed": """
import numpy, signal, rankwire
with rankwire.connect() as backend:
    backend.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    rankwire.all_reduce(backend, numpy.ones(4))
""",
    "shapes": """
import numpy, rankwire
with rankwire.connect() as backend:
    rankwire.all_reduce(backend, numpy.ones(4 + (rank == 2)))
""",
    "late": """
import threading, rankwire
with rankwire.connect(timeout=1) as backend:
    if rank == 2:
        threading.Event().wait(60)
    backend.barrier()
""",
    "raises": """
import rankwire
with rankwire.connect() as backend:
    backend.barrier()
    if rank == 2:
        raise ValueError("the reason")
    backend.barrier()
""",
    "called function": """
import rankwire
def fail():
    raise ValueError("the reason")
with rankwire.connect() as backend, rankwire.RpcAgent(backend) as agent:
    agent.register(fail)
    backend.barrier()
    try:
        agent.rpc_sync((rank + 1) % 4, "fail")
    except ValueError:
        backend.barrier()  # all of them have called
        raise
""",
    "all ranks": "import rankwire\nwith rankwire.connect():\n    raise KeyError('NOT_THERE')\n",
    "before connect": "os.environ['NOT_THERE']\n",
}
FACTS = {
    "killed": "PeerLostError: rank 2 is lost: its process ended: killed by SIGKILL",
    "shapes": "all_reduce(sum, float64, (5,)) on rank 2",
    "late": "no result within 1 s waiting for rank 2;",
    "raises": "ValueError: the reason",
    "called function": "RemoteError: ValueError: the reason",
    "all ranks": "KeyError: 'NOT_THERE'",
    "before connect": "KeyError: 'NOT_THERE'",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_failure_of_four_ranks_prints_at_most_15_lines_and_each_fact_once(run, name):
    done = run(PROGRAMS[name], ranks=4, launcher=PATIENT_COMMAND)
    assert done.returncode
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) <= 15, done.stderr
    assert done.stderr.count(FACTS[name]) == 1, done.stderr
    assert sum("Traceback" in line for line in lines) <= 2, done.stderr


def test_the_log_of_each_rank_has_all_of_it(run, tmp_path):
    logs = tmp_path / "logs"
    run(PROGRAMS["shapes"], "--log-dir", str(logs), ranks=4, launcher=PATIENT_COMMAND)
    for rank in range(4):
        assert FACTS["shapes"] in (logs / f"rank_{rank}.log").read_text()


def test_everything_is_printed_on_request(run):
    environment = os.environ | {FULL_TRACEBACK: "1"}
    done = run(PROGRAMS["before connect"], ranks=4, env=environment, launcher=PATIENT_COMMAND)
    assert done.stderr.count("Traceback") == 4
    assert "the same error" not in done.stderr


def test_an_error_that_a_rank_logs_and_outlives_is_printed(start):
    launched = start(
        """
import traceback
try:
    os.environ["NOT_THERE"]
except KeyError:
    traceback.print_exc()
ready()
time.sleep(60)
""",
        ranks=2,
    )
    errors = (line for line in launched.process.stderr if "KeyError: 'NOT_THERE'" in line)
    assert {next(errors)[:8], next(errors)[:8]} == {"[rank 0]", "[rank 1]"}
    launched.send(15)
    launched.wait()
