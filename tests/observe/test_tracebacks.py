"""What a rank prints of the error that ends it."""

import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

import rankwire
from rankwire.errors import PeerLostError, RankwireError
from rankwire.observe import tracebacks
from rankwire.observe.tracebacks import FULL_TRACEBACK, brief, folded, install
from worlds import tcp_world


def caught(function, *args):
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("no error")


def whole(error):
    return "".join(traceback.format_exception(error))


@pytest.fixture(scope="module")
def loss():
    """The error of rank 0 that has lost rank 1, which raised."""
    with tcp_world(2) as (zero, one):
        one.close(error=caught(int, "no number"))
        return caught(zero.recv, 1)


def raise_again(error):
    raise RuntimeError("gave up") from error


def test_a_rank_that_failed_because_of_another_prints_one_line(loss):
    assert whole(loss).count("\n") > 10
    text = brief(loss)
    assert text.startswith(
        "failed because of rank 1: PeerLostError: rank 1 is lost: it raised ValueError [op recv,"
    )
    assert text.endswith(f"({__file__}:{caught.__code__.co_firstlineno + 2} in caught)\n")
    assert text.count("\n") == 1


def test_an_interrupted_rank_prints_one_line():
    def interrupt():
        raise KeyboardInterrupt

    where = f"{__file__}:{interrupt.__code__.co_firstlineno + 1} in interrupt"
    assert brief(caught(interrupt)) == f"KeyboardInterrupt ({where})\n"


def test_the_place_is_in_the_program_and_not_in_pythons_own_library():
    library = {}
    exec(compile("def wait():\n  raise KeyboardInterrupt", threading.__file__, "exec"), library)
    assert f"({__file__}:" in brief(caught(library["wait"]))


def test_what_the_user_raises_upon_a_loss_is_shown_without_the_other_ranks_traceback(loss):
    error = caught(raise_again, loss)
    assert whole(error).count("Traceback") == 3
    text = brief(error)
    assert text.count("Traceback") == 2
    assert "in raise_again" in text
    assert "rank 1 is lost: it raised ValueError: invalid" in text
    assert "  | " not in text


def raise_group(*errors):
    raise ExceptionGroup("unhandled errors in a TaskGroup", errors)


def test_a_rank_that_failed_with_a_group_of_losses_prints_one_line(loss):
    assert brief(caught(raise_group, loss)) == brief(loss)
    two = brief(caught(raise_group, loss, loss))
    assert two == brief(loss).removesuffix("\n") + ", and 1 error like it\n"


def test_a_group_with_another_error_is_shown_without_the_other_ranks_traceback(loss):
    text = brief(caught(raise_group, loss, caught(int, "mine")))
    assert "PeerLostError: rank 1 is lost" in text
    assert "ValueError: invalid literal for int() with base 10: 'mine'" in text
    assert "traceback on rank 1" not in text
    assert "traceback on rank 1" in str(loss), "the error itself keeps it"


def test_a_rank_that_was_removed_itself_did_not_fail_because_of_another():
    error = PeerLostError(0, "the others have given up this rank", root=1)
    assert "because of" not in brief(error, rank=1)
    assert "because of rank 1" in brief(error, rank=0)


def test_the_ranks_own_error_is_shown_without_frames_of_rankwire():
    def ask():
        with tcp_world(2) as (zero, _):
            zero.recv(5)

    error = caught(ask)
    assert isinstance(error, RankwireError)
    text = brief(error)
    assert f"of rankwire; {FULL_TRACEBACK}=1 shows]\nrankwire.errors.InvalidRankError: " in text
    assert "in ask" in text
    assert "/rankwire/backends/" not in text


OURS = f'  File "{Path(rankwire.__file__).parent}/x.py", line 1, in f'
USERS = '  File "/home/train.py", line 9, in main'
CODE = ["    code()", "    ^^^^^^"]


def test_frames_are_folded_wherever_they_are():
    head, ours, error = "Traceback (most recent call last):", [OURS, *CODE], "rankwire.errors.X: y"
    assert folded([head, *ours, error]) == [
        head,
        f"  [1 frame of rankwire; {FULL_TRACEBACK}=1 shows]",
        error,
    ]
    lines = folded([head, *ours, *ours, USERS, *CODE, *ours, error, "", "  | 2nd line"])
    assert lines[2:5] == [USERS, *CODE]
    assert "[2 frames of" in lines[1]
    assert "[1 frame of" in lines[5]
    assert lines[6:] == [error, "", "  | 2nd line"]
    quoted = [f"  | {line}" for line in [head, *ours, USERS, *CODE, "ValueError: z"]]
    assert folded(quoted)[1].startswith("  |   [1 frame of rankwire;")
    assert folded(quoted)[2:] == quoted[4:]


def test_the_place_where_a_foreign_error_came_from_is_shown():
    lines = [OURS, *CODE, OURS, *CODE, "TypeError: no"]
    assert folded(lines)[1:] == lines[3:]
    assert "[1 frame of" in folded(lines)[0]


@pytest.mark.parametrize("text", ["", "no traceback\n  at all", "    indented"])
def test_text_that_is_not_a_traceback_is_unchanged(text):
    assert folded(text.splitlines()) == text.splitlines()


def test_an_excepthook_of_the_program_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", print)
    install()
    assert sys.excepthook is print
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(FULL_TRACEBACK, "1")
    install()
    assert sys.excepthook is sys.__excepthook__
    monkeypatch.setenv(FULL_TRACEBACK, "0")
    install()
    assert sys.excepthook is tracebacks._report


@pytest.mark.parametrize("obstacle", ["a device", "nothing", "a link", "a pipe"])
def test_if_the_log_cannot_be_written_everything_is_printed(
    monkeypatch, capsys, tmp_path, obstacle, loss
):
    log, other = tmp_path / "rank_0.log", tmp_path / "precious"
    other.write_text("")
    if obstacle == "a link":
        log.symlink_to(other)
    elif obstacle == "a pipe":
        os.mkfifo(log)
    monkeypatch.setenv(tracebacks.LOG_FILE, "/dev/full" if obstacle == "a device" else str(log))
    tracebacks._report(type(loss), loss, loss.__traceback__)
    assert capsys.readouterr().err == whole(loss)
    assert other.read_text() == ""


def test_outside_the_launcher_nothing_is_shortened(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import rankwire, sys\nb = rankwire.connect()\nb.recv(7)\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ
        | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "/rankwire/backends/base.py" in done.stderr
