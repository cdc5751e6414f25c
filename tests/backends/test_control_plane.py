"""Silence, death and falls: what the control plane notices, and what it tells everyone.

Ranks are processes that are really stopped and killed. Limits are short, so that tests are.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from rankwire.backends.tcp import TcpBackend
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
    PeerUnresponsiveError,
    RankwireError,
)
from rankwire.services.rpc_agent import RpcAgent
from rankwire.wire.frames import Channel
from real_time import Deadline
from worlds import (
    PATIENCE,
    Running,
    address_of,
    bound_socket,
    deaf,
    eventually,
    process_world,
    runtime_folder_of_its_own,
    tcp_world,
)

TIGHT = {"suspect_after": 0.3, "fail_after": 1.0}
SOON = 8.0  # seconds for what takes milliseconds, on a busy machine


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path


def watch(rank) -> None:
    """Have a rank process note what it is told of its peers."""
    rank.call("eval", "globals().update(lost=[], suspected=[])")
    rank.call("eval", "backend.on_peer_lost(lambda e: lost.append((e.peer, e.reason))) and None")
    rank.call("eval", "backend.on_peer_suspected(lambda r, s: suspected.append((r, s))) and None")


@pytest.mark.parametrize("stopped", [0, 1], ids=["the coordinator", "another"])
def test_f03_a_stopped_rank_is_given_up_after_the_limit_by_all(stopped):
    with process_world(3, **TIGHT) as ranks:
        others = [rank for rank in ranks if rank.rank != stopped]
        waiting = [rank.start("recv", stopped) for rank in others]
        at = ranks[stopped].stop()
        errors = [command.error() for command in waiting]
        assert [type(error) for error in errors] == [PeerUnresponsiveError] * 2
        assert [error.peer for error in errors] == [stopped] * 2
        assert "silent" in errors[0].reason
        assert all(0.7 < command.ended - at < 1.0 + SOON for command in waiting)
        # The others go on with each other.
        others[0].call("send", b"still here", others[1].rank)
        assert others[1].call("recv", others[0].rank) == b"still here"


def test_f03_a_rank_that_goes_on_before_the_limit_has_lost_nothing():
    with process_world(3, suspect_after=0.3, fail_after=20.0) as ranks:
        watch(ranks[2])
        waiting = ranks[2].start("recv", 1)
        ranks[1].stop()
        eventually(lambda: ranks[2].call("eval", "suspected"))
        status = ranks[2].call("eval", "backend.status().peers[1]")
        assert status.state == "suspected"
        assert status.waiting_for == ("a message with tag 0",)
        sent = ranks[0].start("send", b"for later", 1)
        ranks[1].signal(signal.SIGCONT)
        # On a busy machine others may have been silent for a while, too.
        told = "[seconds for rank, seconds in suspected if rank == 1]"
        eventually(lambda: 0.0 in ranks[2].call("eval", told))
        silent, heard_again, *_ = ranks[2].call("eval", told)
        assert silent >= 0.3
        assert heard_again == 0.0
        sent.result()
        assert ranks[1].call("recv", 0) == b"for later"
        ranks[1].call("send", b"awake", 2)
        assert waiting.result() == b"awake"
        eventually(lambda: ranks[2].call("eval", "backend.status().peers[1].state") == "up")
        assert ranks[2].call("eval", "lost") == []


def test_f03_a_rank_that_wakes_up_too_late_learns_that_it_was_given_up():
    with process_world(3, **TIGHT) as ranks:
        waiting = ranks[1].start("recv", 2)
        ranks[1].stop()
        ranks[0].start("recv", 1).error()
        ranks[1].signal(signal.SIGCONT)
        error = waiting.error()
        assert isinstance(error, PeerLostError)
        assert "given up this rank" in error.reason


def test_f04_a_rank_that_holds_the_interpreter_lock_is_silent_too():
    held = "__import__('ctypes').PyDLL(None).usleep(2_500_000)"
    with process_world(3, **TIGHT) as ranks:
        waiting = [ranks[0].start("recv", 1), ranks[2].start("recv", 1)]
        ranks[1].start("eval", held)
        assert [type(command.error()) for command in waiting] == [PeerUnresponsiveError] * 2


@pytest.mark.parametrize("stopped", [0, 2], ids=["the coordinator", "another"])
def test_an_error_of_a_rank_that_waits_for_a_bystander_mentions_the_silent_one(stopped):
    with process_world(4, suspect_after=0.4, fail_after=120.0) as ranks:
        ranks[stopped].stop()
        waiting, bystander = [rank for rank in ranks if rank.rank not in (0, stopped)][:2]
        silent = f"backend.status().peers[{stopped}].silent_for"
        eventually(lambda: waiting.call("eval", silent) > 1.0)
        error = waiting.start("recv", bystander.rank, timeout=0.5).error()
        assert isinstance(error, DeadlineExceededError)
        assert f"rank {stopped} has not been heard for " in str(error)
        assert error.waiting_for == [bystander.rank]
        ranks[stopped].signal(signal.SIGCONT)
        eventually(lambda: waiting.call("eval", silent) == 0.0)


def test_a_judge_that_was_stopped_itself_gives_up_nobody():
    with process_world(3, **TIGHT) as ranks:
        for rank in ranks:  # all at once: nobody hears anybody
            rank.stop()
        time.sleep(1.5)
        for rank in ranks:
            rank.signal(signal.SIGCONT)
        for command in [rank.start("barrier") for rank in ranks]:
            command.result()
        assert [rank.call("eval", "backend.alive") for rank in ranks] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("killed", [0, 2], ids=["the coordinator", "another"])
def test_f01_all_survivors_name_the_same_rank_and_cause(killed):
    with process_world(4) as ranks:
        survivors = [rank for rank in ranks if rank.rank != killed]
        waiting = [rank.start("recv", killed) for rank in survivors]
        for rank in survivors:  # some talk to it directly, some only know of it
            if rank.rank != 3:
                ranks[killed].call("send", b"", rank.rank, tag=9)
        ranks[killed].kill()
        errors = [command.error() for command in waiting]
        assert {(type(error), error.peer, error.reason) for error in errors} == {
            (PeerLostError, killed, "its connection ended")
        }
        eventually(
            lambda: all(killed not in rank.call("eval", "backend.alive") for rank in survivors)
        )


@pytest.mark.parametrize("fallen", [0, 1], ids=["the coordinator", "another"])
def test_the_error_that_a_rank_falls_by_reaches_all_others_with_its_traceback(fallen):
    with tcp_world(3) as world:
        others = [backend for backend in world if backend.rank != fallen]
        waiting = [Running(backend.recv, fallen) for backend in others]

        def bad_batch():
            raise ValueError("bad batch")

        with pytest.raises(ValueError, match="bad batch"), world[fallen]:
            bad_batch()
        for running in waiting:
            error = running.error()
            assert isinstance(error, PeerLostError)
            assert error.peer == fallen
            assert error.reason == "it raised ValueError: bad batch"
            assert "in bad_batch" in error.remote_traceback
            assert f"traceback on rank {fallen}:\n  | Traceback" in str(error)
        others[0].send(b"we go on", others[1].rank)
        assert others[1].recv(others[0].rank) == b"we go on"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(3), "it exited with 3"),
        (SystemExit("no data"), "it exited with 'no data'"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
    ],
    ids=repr,
)
def test_leaving_by_an_exit_code_or_an_interrupt_is_a_fall_too(error, reason):
    with tcp_world(2) as (zero, one):
        waiting = Running(one.recv, 0)
        with pytest.raises(type(error)), zero:
            raise error
        assert waiting.error().reason == reason


@pytest.mark.parametrize("code", [None, 0])
def test_f46_a_good_exit_code_is_an_orderly_end(code):
    with tcp_world(2) as (zero, one):
        waiting = Running(one.recv, 0)
        with pytest.raises(SystemExit), zero:
            raise SystemExit(code)
        assert isinstance(waiting.error(), ChannelClosedError)
        assert one.status().peers[0].state == "left"
        assert one.alive == (1,)


def test_who_asks_is_told_of_each_loss_once_also_of_earlier_ones():
    with process_world(4) as ranks:
        watch(ranks[0])
        ranks[3].kill()
        eventually(lambda: ranks[0].call("eval", "lost") == [(3, "its connection ended")])
        ranks[2].call("close")
        ranks[0].start("recv", 2).error()
        ranks[1].kill()
        eventually(lambda: ranks[0].call("eval", "len(lost)") == 2)
        watch(ranks[0])
        eventually(lambda: {peer for peer, _ in ranks[0].call("eval", "lost")} == {1, 3})
        assert ranks[0].call("eval", "backend.alive") == (0,)


def test_a_removed_callback_is_not_called():
    with process_world(3) as ranks:
        ranks[0].call("eval", "globals().update(lost=[], also=[])")
        ranks[0].call(
            "eval", "globals().update(remove=backend.on_peer_lost(lambda e: lost.append(e.peer)))"
        )
        ranks[0].call("eval", "backend.on_peer_lost(lambda e: also.append(e.peer)) and None")
        ranks[0].call("eval", "remove() or remove()")
        ranks[1].kill()
        eventually(lambda: ranks[0].call("eval", "also") == [1])
        assert ranks[0].call("eval", "lost") == []


def test_the_status_tells_what_is_waited_for_and_what_is_queued():
    with tcp_world(3, transport="tcp") as (zero, one, two):
        waiting = [Running(zero.recv, 1, 7), Running(zero.barrier)]
        eventually(lambda: zero.status().peers[1].waiting_for and zero.status().operation)
        status = zero.status()
        assert "a message with tag 7" in status.peers[1].waiting_for
        assert status.operation == "barrier()"
        assert status.waiting_on in ([1], [1, 2])
        assert "waited for: a message with tag 7" in str(status)
        assert "rank 0 of 3, in barrier()" in str(status)
        for _ in range(64):
            two.send(bytes(1 << 14), 1, tag=3)
        assert two.status().peers[1].queued_nbytes > 1 << 14  # rank 1 reads nothing
        assert two.status().peers[1].link == "tcp"
        one.send(b"", 0, tag=7)
        waiting += [Running(backend.barrier) for backend in (one, two)]
        for running in waiting:
            running.result()


@pytest.mark.parametrize(
    "limits",
    [(0.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (-1.0, 5.0), ("5", 10.0), (1.0, 10**400)],
)
def test_limits_that_cannot_work_are_refused(limits):
    suspect_after, fail_after = limits
    with pytest.raises(ConfigurationError, match=r"suspected before|a time limit is"):
        TcpBackend(0, 1, "127.0.0.1:0", suspect_after=suspect_after, fail_after=fail_after)


def test_a_limit_that_no_rank_can_keep_is_refused():
    with pytest.raises(ConfigurationError, match=r"after 0\.1 s of silence or later"):
        TcpBackend(0, 1, "127.0.0.1:0", suspect_after=0.05, fail_after=0.099)
    TcpBackend(0, 1, "127.0.0.1:0", suspect_after=0.05, fail_after=0.1).close()


def test_the_shortest_limits_of_all_ranks_count():
    listener = bound_socket()
    zero = Running(TcpBackend, 0, 2, address_of(listener), listener=listener, fail_after=9.0)
    one = Running(TcpBackend, 1, 2, address_of(listener), suspect_after=2.0, fail_after=20.0)
    with zero.result() as zero, one.result() as one:
        assert (
            zero.mesh.formation._coordinator._patience == one.mesh.formation._membership._patience
        )
        patience = one.mesh.formation._membership._patience
        assert (patience.suspect_after, patience.fail_after) == (2.0, 9.0)


def test_silence_of_hours_is_allowed_if_asked_for():
    with tcp_world(2, suspect_after=float("inf"), fail_after=float("inf")) as (zero, one):
        zero.send(b"x", 1)
        assert one.recv(0, timeout=PATIENCE) == b"x"


def test_a_call_to_a_rank_that_falls_ends_with_the_error_that_it_fell_by():
    with tcp_world(2) as (zero, one):
        release = threading.Event()
        with RpcAgent(one) as caller:
            running = None
            with contextlib.suppress(ValueError), zero, RpcAgent(zero) as callee:
                entered = []
                callee.register("wait", lambda: entered.append(1) or release.wait(PATIENCE))
                running = Running(caller.rpc_sync, 0, "wait")
                future = caller.rpc_async(0, "wait")
                eventually(lambda: len(entered) == 2)
                raise ValueError("bad batch")
            for error in (running.error(), future.exception(PATIENCE)):
                assert isinstance(error, PeerLostError)
                assert error.reason == "it raised ValueError: bad batch"
                assert error.may_have_run
            release.set()


def test_an_uncaught_error_without_any_block_reaches_the_others_too(tmp_path):
    script = tmp_path / "falls.py"
    script.write_text(
        "import rankwire\n"
        "backend = rankwire.connect()\n"
        "if backend.rank == 1:\n"
        "    raise ValueError('bad batch')\n"
        "try:\n"
        "    backend.recv(1)\n"
        "except rankwire.PeerLostError as error:\n"
        "    print(backend.rank, error.reason, 'falls.py' in error.remote_traceback)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "rankwire", "run", "-n", "3", "--no-prefix", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(ended.stdout.splitlines()) == [
        "0 it raised ValueError: bad batch True",
        "2 it raised ValueError: bad batch True",
    ]
    assert ended.returncode == 1


def test_f03_a_coordinator_that_wakes_up_too_late_learns_it_too_and_blames_nobody():
    with process_world(3, **TIGHT) as ranks:
        watch(ranks[0])
        waiting = ranks[0].start("recv", 2)
        ranks[0].stop()
        for rank in ranks[1:]:
            assert isinstance(rank.start("recv", 0).error(), PeerUnresponsiveError)
        ranks[0].signal(signal.SIGCONT)
        assert "given up this rank" in waiting.error().reason
        lost = eventually(lambda: len(told := ranks[0].call("eval", "lost")) == 2 and told)
        assert all("given up this rank" in reason for _, reason in lost)
        # Nor does it make the others blame each other.
        ranks[1].call("send", b"still here", 2)
        assert ranks[2].call("recv", 1) == b"still here"
        assert ranks[2].call("eval", "backend.alive") == (1, 2)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_without_a_coordinator_a_death_is_noticed_also_by_a_rank_that_waits_for_nothing(transport):
    with process_world(3, transport=transport) as ranks:
        watch(ranks[2])
        ranks[0].call("close")
        eventually(lambda: ranks[2].call("eval", "backend.mesh.peers[1].messages is not None"))
        ranks[1].kill()
        assert eventually(lambda: ranks[2].call("eval", "lost"))[0][0] == 1
        assert ranks[2].call("eval", "backend.alive") == (2,)


@pytest.mark.parametrize("security", ["auto", "auth"])
def test_without_a_coordinator_leaving_is_noticed_too_and_is_no_death(security):
    secret = b"of all ranks of this world"
    with process_world(3, transport="tcp", security=security, secret=secret) as ranks:
        watch(ranks[2])
        ranks[0].call("close")
        eventually(lambda: ranks[2].call("eval", "backend.mesh.peers[1].messages is not None"))
        ranks[1].call("close")
        eventually(lambda: ranks[2].call("eval", "backend.alive") == (2,))
        assert ranks[2].call("eval", "backend.status().peers[1].state") == "left"
        assert ranks[2].call("eval", "lost") == []


@pytest.mark.parametrize("how", ["close", "kill", "fall"])
def test_a_rank_that_went_right_after_the_coordinator_has_left_or_died_as_it_did(how):
    """They have no connection yet, so it could not say farewell; its socket file tells."""
    with process_world(3) as ranks:
        watch(ranks[2])
        ranks[0].call("close")
        eventually(lambda: ranks[1].call("eval", "backend.alive") == (1, 2))
        match how:
            case "close":
                ranks[1].call("close")
            case "kill":
                ranks[1].kill()
            case "fall":
                ranks[1].call("close", error=ValueError("a mistake"))
        eventually(lambda: ranks[2].call("eval", "backend.alive") == (2,))
        state = ranks[2].call("eval", "backend.status().peers[1].state")
        assert state == ("left" if how == "close" else "lost")
        error = ranks[2].start("send", b"too late", 1).error()
        assert isinstance(error, ChannelClosedError if how == "close" else PeerLostError)
        if how != "close":
            eventually(lambda: ranks[2].call("eval", "lost"))
        assert len(ranks[2].call("eval", "lost")) == (how != "close")


def test_the_status_tells_how_long_the_coordinator_is_silent_too():
    with process_world(2, suspect_after=0.3, fail_after=20.0) as ranks:
        watch(ranks[1])
        ranks[0].stop()
        eventually(lambda: ranks[1].call("eval", "suspected"))
        status = ranks[1].call("eval", "backend.status().peers[0]")
        assert status.state == "suspected"
        assert status.silent_for >= 0.3
        ranks[0].signal(signal.SIGCONT)


def test_nobody_stays_suspected_once_there_is_nobody_to_say_that_it_is_heard_again():
    with process_world(3, suspect_after=0.3, fail_after=20.0) as ranks:
        watch(ranks[2])
        ranks[1].stop()
        eventually(lambda: ranks[2].call("eval", "suspected"))
        ranks[0].call("close")
        ranks[1].signal(signal.SIGCONT)
        eventually(lambda: ranks[2].call("eval", "backend.status().peers[0].state") == "left")
        status = ranks[2].call("eval", "backend.status().peers[1]")
        assert (status.state, status.silent_for) == ("up", 0.0)


def test_a_verdict_that_has_come_counts_also_where_it_is_read_late():
    """As in a process that has just been woken up: whoever sees a connection end may be faster."""
    with tcp_world(3) as world:
        world[2].send(b"hello", 1)
        assert world[1].recv(2) == b"hello"
        with deaf(world[1]):
            waiting = Running(world[1].recv, 2)
            world[2].close(error=ValueError("a mistake"))
            eventually(lambda: world[0].failure_of(2))
            time.sleep(0.1)  # longer than anyone waits for a verdict that has not come
        assert "ValueError: a mistake" in waiting.error().reason


def test_a_control_message_that_is_too_long_ends_the_connection_of_its_sender():
    """From its header, before it is read; all are told who sent it."""
    with tcp_world(3) as ranks:
        waiting = [Running(ranks[survivor].recv, 1) for survivor in (0, 2)]
        control = ranks[1].mesh.formation._membership._control
        with contextlib.suppress(RankwireError):  # it may be hung up on before it has sent all
            control.send((0, Channel.CONTROL, 0), ([bytes(1 << 20)], 1 << 20), Deadline(PATIENCE))
        for command in waiting:
            error = command.error(PATIENCE)
            assert type(error) is PeerLostError
            assert error.peer == 1
            assert "announced 1048576 bytes, the limit is 262144" in error.reason
