"""Ranks that die, stop, leave or lie: who learns of it, how soon, and who does not suffer.

Deaths are real: processes that are killed or stopped. Half messages and lies are told by raw peers,
which have passed the handshake and then send any bytes they like.
"""

import contextlib
import gc
import itertools
import resource
import signal
import socket
import threading
import time
import tracemalloc
import weakref
from pathlib import Path

import pytest

from headers import pack_header
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    RankwireError,
)
from rankwire.wire.frames import HEADER_NBYTES, Channel
from worlds import (
    Running,
    eventually,
    introduce,
    process_world,
    raw_peer,
    runtime_folder_of_its_own,
    spawn_ranks,
    tcp_world,
    until_in_a_barrier,
)

SOON = 8.0  # measured: 2 ms; the promise, which the tests of faults measure: 0.1 s


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path


@pytest.fixture(params=["tcp", "unix"])
def transport(request):
    return request.param


def until_waiting(rank, src: int, count: int = 1) -> None:
    """Wait until so many receives of a rank wait for ``src``, or one more that is a barrier's."""
    wanted = f"backend.mesh.peers[{src}].inbox._mailbox.wanted"
    eventually(lambda: rank.call("eval", wanted) >= count)


def until_sending(rank, dst: int) -> None:
    """Wait until a rank is in the middle of a message to ``dst``."""
    messages = f"backend.mesh.peers[{dst}].messages"
    eventually(lambda: rank.call("eval", f"{messages} and {messages}.outbox._lock.locked()"))


def talk(one, other) -> None:
    """Show that two ranks still reach each other."""
    one.call("send", b"still there?", other.rank, 77)
    assert other.call("recv", one.rank, 77) == b"still there?"
    other.call("send", b"yes", one.rank, 77)
    assert one.call("recv", other.rank, 77) == b"yes"


def assert_lost(command, rank: int, since: float) -> None:
    """Show that a command ended because a rank was lost, soon after that, and says which."""
    error = command.error()
    assert isinstance(error, PeerLostError), repr(error)
    assert error.peer == rank
    assert f"rank {rank} is lost" in str(error)
    assert command.ended - since < SOON


# -- killed


@pytest.mark.fault(1, "a killed rank ends what needs it, also a send half-way, and nothing else")
def test_a_killed_rank_ends_everything_that_needs_it_and_nothing_else(transport):
    """Also a send in the middle of a message; ``test_lookout`` has those that are lent."""
    with process_world(4, transport=transport, single_copy=False) as ranks:
        introduce(*ranks)
        victim, others = ranks[3], ranks[:3]
        pending = []
        for rank in others:
            pending.append(rank.start("recv", 3))
            pending.append(rank.start("recv", 3, 5))
            pending.append(rank.start("barrier"))
        for rank in others:
            until_waiting(rank, 3, 2)
            until_in_a_barrier(rank)
        pending.append(others[1].start("eval", "backend.send(bytes(64 << 20), 3)"))
        until_sending(others[1], 3)
        unharmed = ranks[0].start("recv", 1, 8)
        killed = victim.kill()
        for command in pending:
            assert_lost(command, 3, killed)
        for rank in others:
            for method, *args in (("recv", 3), ("send", b"x", 3), ("barrier",)):
                assert_lost(rank.start(method, *args), 3, time.monotonic())
        ranks[1].call("send", b"unharmed", 0, 8)
        assert unharmed.result() == b"unharmed"
        talk(ranks[0], ranks[1])
        talk(ranks[1], ranks[2])


def test_a_killed_rank_is_noticed_by_those_it_never_sent_anything(transport):
    """There is no connection to see the end of: the control plane tells."""
    with process_world(3, transport=transport) as ranks:
        pending = [rank.start("recv", 2) for rank in ranks[:2]]
        for rank in ranks[:2]:
            until_waiting(rank, 2)
        killed = ranks[2].kill()
        for command in pending:
            assert_lost(command, 2, killed)
        for rank in ranks[:2]:
            assert_lost(rank.start("send", b"x", 2), 2, time.monotonic())
        talk(ranks[0], ranks[1])


def test_a_killed_rank_0_is_noticed_and_the_others_still_talk(transport):
    with process_world(3, transport=transport) as ranks:
        pending = [ranks[1].start("recv", 0), ranks[2].start("barrier")]
        until_waiting(ranks[1], 0)
        until_in_a_barrier(ranks[2])
        killed = ranks[0].kill()
        for command in pending:
            assert_lost(command, 0, killed)
        assert_lost(ranks[1].start("send", b"x", 0), 0, time.monotonic())
        talk(ranks[1], ranks[2])


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("introduced", [True, False], ids=["connected", "strangers"])
def test_a_killed_rank_is_noticed_also_without_rank_0(how, introduced):
    """The promise is made for every rank, whatever became of the one that coordinates."""
    with process_world(3) as ranks:
        if introduced:
            introduce(*ranks)
        if how == "killed":
            ranks[0].kill()
        else:
            ranks[0].call("close")
        eventually(lambda: "gone: [0]" in ranks[1].call("eval", "repr(backend)"))
        pending = ranks[1].start("recv", 2, timeout=3.0)
        until_waiting(ranks[1], 2)
        assert_lost(pending, 2, ranks[2].kill())


def test_a_barrier_ends_when_any_rank_is_killed_not_only_the_one_it_waits_for_first():
    """Rank 1 is busy and has not entered; rank 3 never will."""
    with process_world(4) as ranks:
        introduce(*ranks)
        pending = ranks[0].start("barrier", timeout=3.0)
        until_in_a_barrier(ranks[0])
        assert_lost(pending, 3, ranks[3].kill())


@pytest.mark.fault(47, "all survivors of a barrier name the same killed rank")
def test_all_survivors_of_a_barrier_name_the_same_rank():
    with process_world(4) as ranks:
        introduce(*ranks)
        pending = [ranks[rank].start("barrier") for rank in (0, 1, 3)]
        for rank in (0, 1, 3):
            until_in_a_barrier(ranks[rank])
        killed = ranks[2].kill()
        for command in pending:
            assert_lost(command, 2, killed)


def test_a_rank_that_is_killed_while_another_one_joins_it_is_noticed():
    """The news comes together with the news that the world has formed."""
    with spawn_ranks(3) as ranks:
        address = f"127.0.0.1:{ranks[0].call('eval', 'free_port()')}"
        zero = ranks[0].form(3, address)
        one = ranks[1].form(3, address)
        eventually(lambda: ranks[0].call("eval", "joined_ranks()") == {0, 1})
        ranks[1].stop()
        ranks[2].form(3, address).result()
        zero.result()
        ranks[2].kill()
        eventually(lambda: "gone: [2]" in ranks[0].call("eval", "repr(backend)"))
        ranks[1].signal(signal.SIGCONT)
        one.result()
        assert_lost(ranks[1].start("recv", 2, timeout=3.0), 2, time.monotonic())


def test_what_a_killed_rank_had_sent_is_still_received(transport):
    with process_world(2, transport=transport) as ranks:
        for number in range(5):
            ranks[1].call("send", str(number).encode(), 0)
        ranks[1].kill()
        eventually(lambda: "gone: [1]" in ranks[0].call("eval", "repr(backend)"))
        assert [ranks[0].call("recv", 1) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        assert_lost(ranks[0].start("recv", 1), 1, time.monotonic())


def test_many_waiting_threads_all_learn_of_a_death(transport):
    with process_world(2, transport=transport) as ranks:
        introduce(*ranks)
        pending = [ranks[0].start("recv", 1, tag % 4) for tag in range(20)]
        until_waiting(ranks[0], 1, 20)
        killed = ranks[1].kill()
        for command in pending:
            assert_lost(command, 1, killed)


# -- left


@pytest.mark.fault(46, "a rank that leaves is told from one that died, and what it sent arrives")
def test_a_rank_that_leaves_is_said_to_have_left_and_what_it_sent_is_received(transport):
    with process_world(3, transport=transport) as ranks:
        for rank in ranks[:2]:
            for number in range(3):
                ranks[2].call("send", str(number).encode(), rank.rank)
        pending = [rank.start("recv", 2, 9) for rank in ranks[:2]]
        pending += [rank.start("barrier") for rank in ranks[:2]]
        for rank in ranks[:2]:
            until_waiting(rank, 2)
            until_in_a_barrier(rank)
        ranks[2].call("close")
        for command in pending:
            error = command.error()
            assert type(error) is ChannelClosedError, repr(error)
            assert error.peer == 2
            assert "rank 2 has left" in str(error)
        for rank in ranks[:2]:
            assert [rank.call("recv", 2) for _ in range(3)] == [b"0", b"1", b"2"]
            for method, *args in (("recv", 2), ("send", b"x", 2), ("barrier",)):
                assert type(rank.start(method, *args).error()) is ChannelClosedError
        talk(ranks[0], ranks[1])


def test_a_rank_0_that_leaves_is_said_to_have_left():
    with process_world(3) as ranks:
        pending = [rank.start("recv", 0) for rank in ranks[1:]]
        for rank in ranks[1:]:
            until_waiting(rank, 0)
        ranks[0].call("close")
        for command in pending:
            assert type(command.error()) is ChannelClosedError
        talk(ranks[1], ranks[2])


@pytest.mark.parametrize("how", ["killed", "left"])
def test_one_that_leaves_without_rank_0_is_still_said_to_have_left(how):
    with process_world(3) as ranks:
        introduce(*ranks)
        if how == "killed":
            ranks[0].kill()
        else:
            ranks[0].call("close")
        pending = ranks[1].start("recv", 2, timeout=3.0)
        until_waiting(ranks[1], 2)
        ranks[2].call("close")
        assert type(pending.error()) is ChannelClosedError


def test_a_program_that_ends_without_closing_is_lost_not_left():
    with process_world(2) as ranks:
        pending = ranks[0].start("recv", 1)
        until_waiting(ranks[0], 1)
        ranks[1].start("eval", "os._exit(0)")
        assert isinstance(pending.error(), PeerLostError)


# -- stopped


@pytest.mark.fault(3, "a rank that is stopped and goes on within the deadlines has lost nothing")
def test_a_rank_that_stops_and_goes_on_within_the_deadline_loses_nothing(transport):
    with process_world(3, transport=transport, single_copy=False) as ranks:
        introduce(*ranks)
        waiting = ranks[0].start("recv", 1, 1)
        barrier = ranks[0].start("barrier")
        until_in_a_barrier(ranks[0])
        until_waiting(ranks[0], 1)
        ranks[1].stop()
        large = bytes(range(256)) * (1 << 15)
        sending = [ranks[0].start("send", large, 1, tag) for tag in (2, 3)]
        until_sending(ranks[0], 1)
        with pytest.raises(DeadlineExceededError):
            ranks[2].call("recv", 1, timeout=0.1)
        ranks[1].signal(signal.SIGCONT)
        assert ranks[1].call("recv", 0, 3) == large
        assert ranks[1].call("recv", 0, 2) == large
        for command in sending:
            command.result()
        ranks[1].call("send", b"went on", 0, 1)
        assert waiting.result() == b"went on"
        for command in [ranks[1].start("barrier"), ranks[2].start("barrier"), barrier]:
            command.result()


def test_a_first_message_to_a_rank_that_is_stopped_waits_for_it(transport):
    """There is no connection yet, and nobody answers the door until it goes on."""
    with process_world(2, transport=transport) as ranks:
        ranks[1].stop()
        sending = ranks[0].start("send", b"patience", 1)
        eventually(lambda: ranks[0].call("eval", "backend.mesh.peers[1].dial_lock.locked()"))
        ranks[1].signal(signal.SIGCONT)
        sending.result()
        assert ranks[1].call("recv", 0) == b"patience"


@pytest.mark.fault(3, "operations with a stopped rank end at their own deadlines at the latest")
def test_operations_with_a_rank_that_is_stopped_end_at_their_own_deadlines(transport):
    with process_world(2, transport=transport) as ranks:
        introduce(*ranks)
        ranks[1].stop()
        began = time.monotonic()
        commands = [
            ranks[0].start("recv", 1, timeout=0.2),
            ranks[0].start("barrier", timeout=0.2),
            ranks[0].start("eval", "backend.send(bytes(64 << 20), 1, timeout=0.2)"),
        ]
        for command in commands:
            error = command.error()
            assert isinstance(error, DeadlineExceededError), repr(error)
            assert error.limit == 0.2
            assert 0.2 <= command.ended - began < 0.2 + SOON
        ranks[1].signal(signal.SIGCONT)


# -- half a message


def frame(payload: bytes, *, tag: int = 0, sequence: int = 0) -> bytes:
    return pack_header((0, Channel.MESSAGE, tag), len(payload), sequence) + payload


@pytest.fixture
def victim(transport):
    """Rank 0 of a world of three, and a connection that rank 1 seems to have opened to it."""
    # Who does not look has no ring, which the peer would have to open.
    with tcp_world(3, transport=transport, spin=0.0) as world:
        with raw_peer(world[1], world[0], unix=transport == "unix") as sock:
            if transport == "unix":  # the victim says whether it can read this process's memory
                header = sock.recv(HEADER_NBYTES, socket.MSG_WAITALL)
                assert header[0] == Channel.GREETING
                sock.recv(int.from_bytes(header[24:], "little"), socket.MSG_WAITALL)
            yield world[0], sock, world


def hang_up(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


@pytest.mark.fault(2, "of a message whose sender is killed half-way nothing is delivered")
@pytest.mark.parametrize("die", [hang_up, reset], ids=["ends", "resets"])
@pytest.mark.parametrize("nbytes", [1, 31, 32, 33, 131, 50_000, 132_000])
def test_a_peer_that_dies_in_the_middle_of_a_message_delivers_nothing_of_it(victim, nbytes, die):
    backend, sock, world = victim
    small = frame(b"whole")
    sock.sendall(small)
    assert backend.recv(1) == b"whole"
    large = frame(b"x" * 132_000, sequence=1)
    buffer = bytearray(b"." * 132_000)
    waiting = Running(backend.recv_into, buffer, 1)
    eventually(lambda: backend.mesh.peers[1].inbox.is_read)
    sock.sendall(large[:nbytes])
    die(sock)
    error = waiting.error()
    assert isinstance(error, PeerLostError)
    assert error.peer == 1
    came = max(nbytes - HEADER_NBYTES, 0)  # it may be in the buffer, which means nothing
    assert buffer[came:] == b"." * (132_000 - came)
    with pytest.raises(PeerLostError):
        backend.recv(1)
    assert backend.mesh.peers[1].inbox._mailbox.arrived.nbytes == 0
    for operation in (lambda: backend.recv(1), lambda: backend.send(b"x", 1)):
        with pytest.raises(PeerLostError):
            operation()
    world[2].send(b"others go on", 0)
    assert backend.recv(2) == b"others go on"


def test_a_peer_that_dies_between_messages_has_delivered_all_of_them(victim):
    backend, sock, _ = victim
    sock.sendall(b"".join(frame(str(n).encode(), sequence=n) for n in range(3)))
    sock.close()
    assert [backend.recv(1) for _ in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(PeerLostError, match="its connection ended"):
        backend.recv(1)


def say_nonsense(sock: socket.socket) -> None:
    sock.sendall(b"\xff" * HEADER_NBYTES)
    sock.close()


class Belonging:
    """What a function has in a variable while it waits."""


@pytest.mark.parametrize("die", [hang_up, reset, say_nonsense])
def test_nothing_of_those_who_waited_is_held_for_a_rank_that_is_gone(victim, die):
    """An error that is kept for later must not hold the frames of who has seen it first."""
    backend, sock, _ = victim
    sock.sendall(frame(b"whole"))
    assert backend.recv(1) == b"whole"
    refs = []

    def wait() -> None:
        belonging = Belonging()
        refs.append(weakref.ref(belonging))
        with pytest.raises(RankwireError):
            backend.recv(1)

    waiting = Running(wait)
    eventually(lambda: backend.mesh.peers[1].inbox.is_read)
    die(sock)
    waiting.result()
    gc.collect()
    assert [ref() for ref in refs] == [None]


@pytest.mark.fault(38, "after a deadline in the middle of a message the next receive gets it whole")
@pytest.mark.parametrize("split", [1, 8, 31, 32, 40, 65_600, 131_000])
def test_a_deadline_in_the_middle_of_a_message_loses_nothing(victim, split):
    """The next receive goes on where the last one stopped."""
    backend, sock, _ = victim
    message = bytes(range(256)) * 512
    stream = frame(message) + frame(b"next", sequence=1)
    sock.sendall(stream[:split])
    with pytest.raises(DeadlineExceededError) as caught:
        backend.recv(1, timeout=0.05)
    assert caught.value.limit == 0.05
    rest = Running(sock.sendall, stream[split:])
    assert backend.recv(1) == message
    assert backend.recv(1) == b"next"
    rest.result()


def test_a_flood_of_other_messages_does_not_stretch_a_deadline(victim):
    backend, sock, _ = victim
    is_over = threading.Event()

    def flood():
        numbers = itertools.count()
        with contextlib.suppress(OSError):
            while not is_over.is_set():
                sock.sendall(b"".join(frame(b"", tag=9, sequence=next(numbers)) for _ in range(50)))

    flooding = Running(flood)
    receiving = Running(backend.recv, 1, timeout=0.1)
    try:
        assert isinstance(receiving.error(20.0), DeadlineExceededError)
    finally:
        is_over.set()
        sock.shutdown(socket.SHUT_RDWR)
        flooding.result()


@pytest.mark.fault(38, "bytes that trickle in do not stretch a deadline")
def test_bytes_that_trickle_in_do_not_stretch_a_deadline(victim):
    backend, sock, _ = victim
    stream, done = frame(bytes(200)), []

    def trickle():
        for byte in stream:
            if done:
                return
            sock.sendall(bytes([byte]))
            time.sleep(0.01)

    trickling = Running(trickle)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        backend.recv(1, timeout=0.2)
    assert 0.2 <= time.monotonic() - began < SOON
    assert not trickling.done, "a deadline for each byte would have waited for all of them"
    done.append(True)
    trickling.result()


@pytest.mark.fault(16, "a message that comes byte by byte arrives whole")
def test_a_message_in_single_bytes_arrives_whole(victim):
    backend, sock, _ = victim
    for byte in frame(b"slowly"):
        sock.sendall(bytes([byte]))
    assert backend.recv(1) == b"slowly"


# -- lies


def resident() -> int:
    """Return the bytes of memory that this process really has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.fault(12, "an impossible length is refused from the header alone, and its rank named")
@pytest.mark.parametrize(
    "nbytes", [2**63, 2**64 - 1, 2**40, (1 << 30) + 1], ids=["2**63", "2**64-1", "2**40", "1 more"]
)
def test_an_announced_size_above_the_limit_is_refused_from_the_header(victim, nbytes):
    backend, sock, world = victim
    sock.sendall(pack_header((0, Channel.MESSAGE, 0), nbytes, 0))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=str(nbytes)) as caught:
            backend.recv(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.peer == 1
    assert peak < 1 << 20, "memory was taken for it"
    assert sock.recv(1) == b"", "the connection is closed"
    with pytest.raises(RankwireError):
        backend.recv(1)
    world[2].send(b"others go on", 0)
    assert backend.recv(2) == b"others go on"


@pytest.mark.fault(
    13, "a message that was announced and does not come takes no memory before it comes"
)
def test_a_large_announced_size_within_the_limit_takes_memory_only_as_it_comes(victim):
    backend, sock, _ = victim
    before = resident()
    sock.sendall(pack_header((0, Channel.MESSAGE, 0), 1 << 30, 0) + bytes(100_000))
    with pytest.raises(DeadlineExceededError):
        backend.recv(1, timeout=0.1)
    assert backend.mesh.peers[1].inbox.connection.parser.in_frame
    assert resident() - before < 64 << 20, "more than one step ahead of what came"


@pytest.mark.parametrize(
    "stream",
    [
        b"\xff" * HEADER_NBYTES,
        bytes(HEADER_NBYTES),
        pack_header((0, 99, 0), 0, 0),
        pack_header((0, Channel.MESSAGE, 0), 0, 1),
        frame(b"first") + frame(b"repeated"),
        b"\x01\x01" + pack_header((0, Channel.MESSAGE, 0), 0, 0)[2:],
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["ones", "zeros", "channel", "gap", "repeated", "flags", "http"],
)
def test_a_stream_that_breaks_the_rules_ends_that_peer_and_no_other(victim, stream):
    backend, sock, world = victim
    sock.sendall(stream)
    if stream.startswith(frame(b"first")):
        with contextlib.suppress(ProtocolError):
            assert backend.recv(1) == b"first"
    for _ in range(2):
        with pytest.raises(ProtocolError) as caught:
            backend.recv(1)
        assert caught.value.peer == 1
    world[2].send(b"others go on", 0)
    assert backend.recv(2) == b"others go on"
    world[2].send(b"also with it", 1)
    assert world[1].recv(2) == b"also with it"


def test_messages_for_other_groups_and_channels_do_not_reach_the_user(victim):
    backend, sock, _ = victim
    envelopes = [(Channel.COLLECTIVE, 0), (Channel.REPLY, 0), (Channel.CALL, 0), (1, 12345)]
    stream = b""
    for sequence, (channel, group) in enumerate(envelopes):
        stream += pack_header((group, channel, 0), 4, sequence) + b"evil"
    sock.sendall(stream + frame(b"good", sequence=len(envelopes)))
    assert backend.recv(1) == b"good"
    with pytest.raises(DeadlineExceededError):
        backend.recv(1, timeout=0.05)


# -- out of descriptors


def limit_descriptors(rank, *, spare: int) -> None:
    """Leave a process so many more descriptors to open."""
    rank.call("eval", "limit_descriptors(spare)", spare=spare)


@pytest.mark.fault(30, "a rank without descriptors says so, and goes on when there are some")
@pytest.mark.parametrize("transport", ["tcp", "unix", "auto"])
def test_a_rank_out_of_descriptors_cannot_dial_and_says_so_and_recovers(transport):
    with process_world(3, transport=transport) as ranks:
        ranks[0].call("send", b"x", 2)
        limit_descriptors(ranks[0], spare=0)
        error = ranks[0].start("send", b"x", 1, timeout=1.0).error()
        assert isinstance(error, RankwireError), repr(error)
        assert "open files" in str(error)
        ranks[0].call("send", b"existing connections live", 2)
        limit_descriptors(ranks[0], spare=100)
        ranks[0].call("send", b"recovered", 1)
        assert ranks[1].call("recv", 0) == b"recovered"
        assert ranks[2].call("recv", 0) == b"x"
        assert ranks[2].call("recv", 0) == b"existing connections live"


@pytest.mark.fault(
    30, "a rank without descriptors keeps its links, and accepts again when there are some"
)
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_rank_out_of_descriptors_cannot_accept_and_recovers(transport):
    with process_world(3, transport=transport) as ranks:
        ranks[2].call("send", b"x", 0)
        limit_descriptors(ranks[0], spare=0)
        sending = ranks[1].start("send", b"patience", 0)
        ranks[2].call("send", b"existing connections live", 0)
        assert ranks[0].call("recv", 2) == b"x"
        assert ranks[0].call("recv", 2) == b"existing connections live"
        limit_descriptors(ranks[0], spare=100)
        sending.result()
        assert ranks[0].call("recv", 1) == b"patience"


def test_a_rank_out_of_descriptors_cannot_join_and_says_so():
    with spawn_ranks(1) as (rank,):
        limit_descriptors(rank, spare=0)
        error = rank.form(2, "127.0.0.1:9", join_timeout=1.0).error()
        assert isinstance(error, RankwireError), repr(error)
        assert "open files" in str(error)
