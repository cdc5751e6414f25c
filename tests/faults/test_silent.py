"""Ranks that are alive and silent: stopped, busy in C code, or not reading."""

import signal
import time

import pytest
from msgspec.structs import asdict

from faults.sizes import time_limit, trials
from rankwire import DeadlineExceededError, PeerUnresponsiveError
from rankwire.wire.control_messages import DEFAULT_PATIENCE
from worlds import eventually, introduce, process_world

pytestmark = pytest.mark.timeout(time_limit(60, 600))

TIGHT = {"suspect_after": 0.4, "fail_after": 1.0}
TIGHT_LIMIT = 2.0
SUSPECT_LIMIT, FAIL_LIMIT = 6.0, 31.0  # with the default limits

# Keeps what a rank hears about silence, with the time.
LISTEN = """
globals().__setitem__("suspected", []) or backend.on_peer_suspected(
    lambda rank, seconds: suspected.append((rank, time.monotonic()))) and None
"""
HOLD_THE_INTERPRETER = "__import__('ctypes').PyDLL(None).usleep(int({seconds} * 1e6))"


def resident(rank):
    """Return the bytes of memory that a rank's process has."""
    return rank.call("eval", "int(open('/proc/self/statm').read().split()[1]) * 4096")


def assert_unresponsive(command, peer):
    error = command.error(60.0)
    assert isinstance(error, PeerUnresponsiveError), repr(error)
    assert error.peer == peer


@pytest.mark.fault(
    3, "a stopped rank is suspected, then fails what waits on it; limits as asked for"
)
def test_f03_a_stopped_rank_with_tight_limits(measured):
    for _ in range(trials(2, 50)):
        with process_world(3, **TIGHT) as ranks:
            introduce(*ranks)
            ranks[0].call("eval", LISTEN)
            pending = [rank.start("recv", 2) for rank in ranks[:2]]
            stopped = ranks[2].stop()
            for command in pending:
                assert_unresponsive(command, 2)
                measured(
                    "stopped: failed, tight limits", command.ended - stopped, limit=TIGHT_LIMIT
                )
            # On a busy machine another one may have been silent for a while, too.
            heard = next(told for told in ranks[0].call("eval", "suspected") if told[0] == 2)
            measured("stopped: suspected, tight limits", heard[1] - stopped, limit=TIGHT_LIMIT)
            ranks[0].call("send", b"still there?", 1)
            assert ranks[1].call("recv", 0) == b"still there?"


@pytest.mark.fault(
    3, "a stopped rank is suspected and fails what waits on it within the default limits"
)
@pytest.mark.parametrize(
    "share", [pytest.param(1, marks=pytest.mark.slow), 12], ids=["whole", "a twelfth of them"]
)
def test_f03_a_stopped_rank_with_default_limits(share, measured):
    limits = {name: value / share for name, value in asdict(DEFAULT_PATIENCE).items()}
    with process_world(3, timeout=60.0, **(limits if share > 1 else {})) as ranks:
        introduce(*ranks)
        ranks[0].call("eval", LISTEN)
        pending = ranks[0].start("recv", 2)
        stopped = ranks[2].stop()
        assert_unresponsive(pending, 2)
        heard = next(told for told in ranks[0].call("eval", "suspected") if told[0] == 2)
        if share == 1:
            measured("stopped: failed, default limits", pending.ended - stopped, limit=FAIL_LIMIT)
            measured("stopped: suspected, default limits", heard[1] - stopped, limit=SUSPECT_LIMIT)


@pytest.mark.fault(
    3, "a rank that goes on before the limit has lost nothing, and is suspected no more"
)
def test_f03_a_stopped_rank_that_goes_on():
    with process_world(2, suspect_after=0.3, fail_after=10.0) as ranks:
        introduce(*ranks)
        ranks[0].call("eval", LISTEN)
        received = ranks[1].start("eval", "[bytes(backend.recv(0)) for _ in range(50)]")
        ranks[1].stop()
        sent = ranks[0].start("eval", "[backend.send(b'%d' % n, 1) for n in range(50)] and None")
        eventually(lambda: ranks[0].call("eval", "suspected"))
        ranks[1].signal(signal.SIGCONT)
        sent.result()
        assert received.result() == [b"%d" % number for number in range(50)]
        assert ranks[0].call("eval", "backend.alive") == (0, 1)


@pytest.mark.fault(4, "a rank that holds the interpreter for too long fails as alive but silent")
def test_f04_a_rank_holds_the_interpreters_lock(measured):
    with process_world(2, **TIGHT) as ranks:
        introduce(*ranks)
        pending = ranks[0].start("recv", 1)
        began = time.monotonic()
        ranks[1].start("eval", HOLD_THE_INTERPRETER.format(seconds=4))
        assert_unresponsive(pending, 1)
        measured("interpreter held: failed", pending.ended - began, limit=TIGHT_LIMIT)


@pytest.mark.fault(4, "a rank that holds the interpreter for a while is not lost")
def test_f04_a_rank_holds_the_interpreters_lock_for_a_while():
    with process_world(2) as ranks:
        introduce(*ranks)
        pending = ranks[0].start("recv", 1)
        ranks[1].call("eval", HOLD_THE_INTERPRETER.format(seconds=1))
        ranks[1].call("send", b"back", 0)
        assert pending.result() == b"back"


MESSAGE_NBYTES = 8 << 20
SEND_TO_2 = f"""
globals().__setitem__("data", b"x" * {MESSAGE_NBYTES}) or globals().__setitem__(
    "sending", [Running(backend.send, data, 2, 0, 1.5) for _ in range(64)])
"""
HOW_THEY_ENDED = "[type(one.error()) for one in sending]"
EXCHANGE = """
[(backend.send(bytes(1 << 16), {peer}), backend.recv({peer})) for _ in range(500)] and None
"""


@pytest.mark.fault(
    11, "whoever sends to a rank that does not read waits to its deadline, and keeps one message"
)
@pytest.mark.fault(11, "the others talk on while a rank does not read")
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_f11_a_rank_does_not_read(transport, measured):
    with process_world(3, transport=transport, single_copy=False) as ranks:
        introduce(*ranks)
        ranks[2].stop()
        before = resident(ranks[0])
        ranks[0].call("eval", SEND_TO_2)
        talking = [ranks[n].start("eval", EXCHANGE.format(peer=1 - n)) for n in (0, 1)]
        began = time.monotonic()
        for command in talking:
            command.result()
        measured("500 exchanges of 64 KiB meanwhile", time.monotonic() - began)
        assert set(ranks[0].call("eval", HOW_THEY_ENDED)) == {DeadlineExceededError}
        grown = resident(ranks[0]) - before - MESSAGE_NBYTES
        limit = 64 + (MESSAGE_NBYTES >> 20)
        measured("memory kept for it", grown / (1 << 20), unit="MiB", limit=limit)
        ranks[2].signal(signal.SIGCONT)
