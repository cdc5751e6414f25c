"""Large messages: lent within a host, as a stream otherwise, and alike in all that can be seen.

``send`` of a large message to a rank of this host returns when that rank has read it. Ranks are
threads of this process, or processes of their own where one of them has to die or to stop.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import signal
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rankwire import RpcAgent, SubBackend, all_gather, broadcast
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    InvalidRankError,
    PeerLostError,
    RankwireError,
    SelfSendError,
    SizeMismatchError,
)
from rankwire.links import borrower, connection
from rankwire.links.borrower import Borrowed
from rankwire.mesh.connections import Link
from rankwire.mesh.message_port import Lookout
from rankwire.transports.shared_memory import CAN_SHARE
from real_time import Deadline
from worlds import (
    PATIENCE,
    Running,
    eventually,
    process_world,
    runtime_folder_of_its_own,
    tcp_world,
)

MIB = 1 << 20
LARGE = MIB
SOON = 8.0  # within which a death is noticed; measured: milliseconds
QUICK = 8.0  # seconds for what takes milliseconds, on a machine that is busy with other things

KINDS = {
    "lent": {"transport": "auto"},
    "stream": {"transport": "auto", "single_copy": False},
    "tcp": {"transport": "tcp"},
}


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def pair(kind):
    with tcp_world(2, **kind) as world:
        yield world


@pytest.fixture
def lending():
    """Two ranks that read large messages out of each other's memory."""
    with tcp_world(2) as world:
        link = world[0].link_to(1)
        if not link.single_copy:
            pytest.skip(link.reason)
        yield world


@contextlib.contextmanager
def lending_processes(world_size, **options):
    with process_world(world_size, **options) as ranks:
        for rank in ranks:
            for other in range(world_size):
                if other != rank.rank:
                    link = rank.call("link_to", other)
                    if not link.single_copy:
                        pytest.skip(link.reason)
        yield ranks


def pattern(nbytes, seed=0):
    return np.random.default_rng(seed).bytes(nbytes)


def until_offered(backend, dst):
    """Wait until a rank has said where its next message to ``dst`` lies; return a new count."""
    sent = backend.mesh.peers[dst].messages.outbox.frames_sent
    return lambda: eventually(lambda: backend.mesh.peers[dst].messages.outbox.frames_sent > sent)


def offer(backend, message, dst, tag=0, **options):
    """Begin to send a message; return once its receiver can know of it."""
    wait = until_offered(backend, dst)
    sending = Running(backend.send, message, dst, tag, **options)
    wait()
    return sending


def offer_from(rank, nbytes, dst, tag=0, *, fill=1, timeout=PATIENCE):
    """Do the same in a process that has sent nothing yet but its introduction."""
    sequence = f"backend.mesh.peers[{dst}].messages.outbox.frames_sent"
    before = rank.call("eval", sequence)
    code = f"backend.send(bytes([{fill}]) * {nbytes}, {dst}, {tag}, timeout={timeout})"
    sending = rank.start("eval", code)
    eventually(lambda: rank.call("eval", sequence) > before)
    return sending


def assert_lost(command, rank, since):
    error = command.error()
    assert isinstance(error, PeerLostError), repr(error)
    assert error.peer == rank
    assert f"rank {rank} is lost" in str(error)
    assert command.ended - since < SOON


def resident(pid="self"):
    """Return the bytes of memory that a process really has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


# -- one message


def test_a_large_message_arrives(pair):
    for nbytes in (256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 5 * MIB + 3, 64 * MIB):
        message, buffer = pattern(nbytes), bytearray(nbytes)
        sending = Running(pair[0].send, message, 1)
        assert pair[1].recv(0) == message
        sending.result()
        sending = Running(pair[0].send, message, 1)
        assert pair[1].recv_into(buffer, 0) == nbytes
        sending.result()
        assert buffer == message


def test_a_large_message_in_pieces_arrives_as_one(pair):
    for count in (2, 511, 512, 513, 2000):
        pieces = [bytes([number % 251]) * (1 + 2 * MIB // count) for number in range(count)]
        sending = Running(pair[0].send, pieces, 1)
        assert pair[1].recv(0) == b"".join(pieces)
        sending.result()


@pytest.mark.parametrize("kind_of_memory", ["bytes", "read-only array", "file", "numbers"])
def test_a_message_is_sent_from_any_memory(pair, kind_of_memory, tmp_path):
    message = pattern(LARGE)
    array = np.frombuffer(message, "<f8")
    if kind_of_memory == "bytes":
        memory = message
    elif kind_of_memory == "file":
        (tmp_path / "file").write_bytes(message)
        memory = np.memmap(tmp_path / "file", "<f8", "r")
    elif kind_of_memory == "numbers":
        memory = memoryview(array.copy())
    else:
        memory = array
    sending = Running(pair[0].send, memory, 1)
    assert pair[1].recv(0) == message
    sending.result()


def memory_for_nobody_else(nbytes):
    """Memory that the kernel copies for nobody but its owner, as that of some devices."""
    descriptor = ctypes.CDLL(None).syscall(447, 0)  # memfd_secret
    if descriptor < 0:
        pytest.skip("this kernel has no such memory")
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)


def test_a_message_in_memory_that_nobody_else_can_read_arrives_too(pair):
    memory = memory_for_nobody_else(LARGE)
    memory[:] = pattern(LARGE)
    sending = Running(pair[0].send, memory, 1)
    assert pair[1].recv(0) == pattern(LARGE)
    sending.result()
    sending = Running(pair[0].send, b"and the link lives", 1)
    assert pair[1].recv(0) == b"and the link lives"
    sending.result()


def test_what_the_sender_does_with_its_memory_afterwards_is_not_seen(pair):
    memory = bytearray(8 * MIB)
    received = []
    for number in range(10):
        memory[:] = bytes([number]) * len(memory)
        receiving = Running(pair[1].recv, 0)
        pair[0].send(memory, 1)
        memory[:] = b"\xff" * len(memory)
        received.append(receiving.result())
    for number, message in enumerate(received):
        assert message.count(number) == len(memory)


def test_the_receiver_owns_what_it_gets(pair):
    sending = Running(pair[0].send, bytes(LARGE), 1)
    message = pair[1].recv(0)
    sending.result()
    message[:3] = b"abc"
    message.extend(b"more")
    assert len(message) == LARGE + 4


# -- order


def test_one_that_waits_for_another_tag_takes_what_comes_first(pair):
    """The sender's thread sends tag 7 first, and cannot send tag 5 before that is taken."""

    def send():
        pair[0].send(pattern(8 * MIB, 7), 1, tag=7)
        pair[0].send(pattern(8 * MIB, 5), 1, tag=5)
        pair[0].send(b"small", 1, tag=6)

    sending = Running(send)
    assert pair[1].recv(0, tag=6) == b"small"
    sending.result()
    assert pair[1].recv(0, tag=5) == pattern(8 * MIB, 5)
    assert pair[1].recv(0, tag=7) == pattern(8 * MIB, 7)


def test_a_barrier_takes_what_comes_before_it(pair):
    def send():
        pair[0].send(pattern(8 * MIB), 1)
        pair[0].barrier()

    sending = Running(send)
    pair[1].barrier()
    sending.result()
    assert pair[1].recv(0) == pattern(8 * MIB)


def test_two_ranks_that_both_send_first_do_not_wait_for_each_other(pair):
    messages = [pattern(64 * MIB, rank) for rank in (0, 1)]

    def exchange(rank):
        for _ in range(2):
            pair[rank].send(messages[rank], 1 - rank)
        return [pair[rank].recv(1 - rank) == messages[1 - rank] for _ in range(2)]

    running = [Running(exchange, rank) for rank in (0, 1)]
    assert [each.result() for each in running] == [[True, True], [True, True]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [KINDS["lent"], KINDS["tcp"]], ids=["lent", "tcp"])
def test_two_processes_that_both_send_256_mib_first_do_not_wait_for_each_other(options):
    code = (
        "(backend.send(bytes([rank]) * (256 << 20), 1 - rank), "
        "backend.recv(1 - rank).count(1 - rank))[1]"
    )
    with process_world(2, **options) as ranks:
        running = [rank.start("eval", code, rank=rank.rank) for rank in ranks]
        assert [each.result() for each in running] == [256 * MIB, 256 * MIB]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_all_send_before_they_know_of_each_other_do_not_wait_for_each_other(world_size):
    """Everyone is blocked in a send when the others' connections come in."""
    with tcp_world(world_size, transport="tcp") as world:
        come_in = threading.Event()
        for backend in world:
            backend.mesh.enter = lambda *args, enter=backend.mesh.enter: (
                come_in.wait(PATIENCE),
                enter(*args),
            )

        def turn(rank):
            world[rank].send(pattern(32 * MIB, rank), (rank + 1) % world_size, timeout=PATIENCE)
            left = (rank - 1) % world_size
            return world[rank].recv(left) == pattern(32 * MIB, left)

        running = [Running(turn, rank) for rank in range(world_size)]
        for rank, backend in enumerate(world):
            peer = backend.mesh.peers[(rank + 1) % world_size]
            eventually(lambda peer=peer: peer.messages and peer.messages.outbox._lock.locked())
        time.sleep(0.2)
        come_in.set()
        assert [each.result(2 * QUICK) for each in running] == [True] * world_size


def test_three_ranks_that_send_in_a_circle_first_do_not_wait_for_each_other(kind):
    with tcp_world(3, **kind) as world:

        def turn(rank):
            for number in range(3):
                world[rank].send(pattern(8 * MIB, 10 * rank + number), (rank + 1) % 3)
            left = (rank - 1) % 3
            return [
                world[rank].recv(left) == pattern(8 * MIB, 10 * left + number)
                for number in range(3)
            ]

        running = [Running(turn, rank) for rank in range(3)]
        assert [each.result() for each in running] == [[True] * 3] * 3


def test_three_ranks_that_send_to_everyone_first_do_not_wait_for_each_other(kind):
    with tcp_world(3, **kind) as world:

        def talk(rank):
            others = [other for other in range(3) if other != rank]
            for dst in others:
                world[rank].send(pattern(4 * MIB, 10 * rank + dst), dst)
            return [world[rank].recv(src) == pattern(4 * MIB, 10 * src + rank) for src in others]

        running = [Running(talk, rank) for rank in range(3)]
        assert [each.result() for each in running] == [[True, True]] * 3


def test_a_rank_that_connects_again_while_its_old_connection_is_forgotten_is_read_all_the_same():
    class Connecting:
        """An inbox that has no connection when it is asked the first time."""

        due = ()

        def __init__(self):
            self.states = [True, False, False]
            self.reads = 0

        def read(self):
            self.reads += 1

        @property
        def is_over(self):
            return self.states.pop(0)

    inbox = Connecting()
    reading = Lookout(REAL_TIME)
    reading.add(inbox)
    reading.read()
    reading.read()
    assert inbox.reads == 2


def test_many_threads_that_send_large_and_small_keep_the_order_of_each_tag(pair):
    threads, rounds = 6, 12
    sizes = [10, 300_000, 1000, 2 * MIB, 70_000]

    def message(tag, number):
        return bytes([tag, number]) * (sizes[(tag + number) % len(sizes)] // 2)

    def send(tag):
        for number in range(rounds):
            pair[0].send(message(tag, number), 1, tag)

    def receive(tag):
        for number in range(rounds):
            if number % 2:
                assert pair[1].recv(0, tag) == message(tag, number)
            else:
                buffer = bytearray(len(message(tag, number)))
                pair[1].recv_into(buffer, 0, tag)
                assert buffer == message(tag, number)

    running = [Running(work, tag) for tag in range(threads) for work in (send, receive)]
    for each in running:
        each.result()
    assert pair[1].mesh.peers[0].inbox._mailbox.arrived.nbytes == 0


def test_a_small_message_passes_a_large_one_that_nobody_takes(lending):
    sending = offer(lending[0], bytes(LARGE), 1, tag=1)
    lending[0].send(b"small", 1, tag=2, timeout=PATIENCE)
    assert not sending.done
    assert lending[1].recv(0, tag=2) == b"small"
    sending.result()
    assert lending[1].recv(0, tag=1) == bytes(LARGE)


def test_a_message_of_another_size_stays_receivable(pair):
    message, buffer = pattern(LARGE), bytearray(b"." * (LARGE - 1))
    sending = Running(pair[0].send, message, 1)
    for _ in range(2):
        with pytest.raises(SizeMismatchError) as caught:
            pair[1].recv_into(buffer, 0)
        assert (caught.value.expected, caught.value.got) == (LARGE - 1, LARGE)
    sending.result(QUICK)
    assert buffer == b"." * (LARGE - 1)
    assert pair[1].recv(0) == message


PASS_50 = """
data = bytes(8 << 20)
for _ in range(50):
    if backend.rank == 0:
        backend.send(data, 1)
    else:
        assert len(backend.recv(0)) == 8 << 20
del data
"""


# -- straight to where it is wanted

HALF = np.ones(MIB, np.uint8)
WAYS = {
    "recv_into": (lambda rank, data: rank.send(data, 1), lambda rank, out: rank.recv_into(out, 0)),
    "recv_array": (
        lambda rank, data: rank.send_array(data, 1),
        lambda rank, out: rank.recv_array(0, out=out),
    ),
    "broadcast": (broadcast, broadcast),
    "all_gather": (
        lambda rank, data: all_gather(rank, HALF, out=data),
        lambda rank, out: all_gather(rank, HALF, out=out),
    ),
}


@pytest.fixture(params=["world", "group"])
def streaming(request):
    """Two ranks between which large messages are a stream, and the inbox of the second."""
    with tcp_world(2, transport="tcp") as world:
        inbox = world[1].mesh.peers[0].inbox
        if request.param == "world":
            yield *world, inbox
        else:
            first = Running(SubBackend, world[0], [0, 1])
            second = SubBackend(world[1], [0, 1])
            yield first.result(), second, inbox


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_is_received_without_memory_beside_the_receivers(streaming, way):
    first, second, inbox = streaming
    send, receive = WAYS[way]
    data = np.ones(2 * MIB, np.uint8)
    for _ in range(2):  # the first time takes memory for connections
        out = np.zeros(2 * MIB, np.uint8)
        tracemalloc.start()
        try:
            receiving = Running(receive, second, out)
            eventually(lambda: inbox.in_flight)
            send(first, data)
            receiving.result()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (out == data).all()
    assert peak < data.nbytes, "what both ranks, threads of this process, have taken"


def test_memory_does_not_grow_with_the_number_of_messages(kind):
    with process_world(2, **kind) as ranks:
        for _ in range(2):  # the first time, memory is taken that is kept
            before = [resident(rank.pid) for rank in ranks]
            running = [rank.start("eval", "exec(code, globals())", code=PASS_50) for rank in ranks]
            for each in running:
                each.result()
            grown = [resident(rank.pid) - size for rank, size in zip(ranks, before, strict=True)]
        assert max(grown) < 50 * MIB, "of the 400 MiB that passed"


def test_a_sender_that_waits_does_not_eat_the_processor(lending):
    sending = offer(lending[0], bytes(LARGE), 1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
    assert lending[1].recv(0) == bytes(LARGE)
    sending.result()


# -- time limits


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.2])
def test_a_sender_whose_time_is_up_has_sent_nothing_and_the_link_stays_usable(lending, limit):
    memory = bytearray(pattern(LARGE))
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        lending[0].send(memory, 1, timeout=limit)
    assert limit <= time.monotonic() - began < limit + QUICK
    assert (caught.value.limit, caught.value.waiting_for) == (limit, [1])
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("send", 0, 1)
    memory[:] = bytes(LARGE)
    with pytest.raises(DeadlineExceededError):
        lending[1].recv(0, timeout=0.05)
    for message in (b"small", pattern(LARGE, 2)):
        sending = Running(lending[0].send, message, 1)
        assert lending[1].recv(0) == message
        sending.result()
    lending[1].send(b"and back", 0)
    assert lending[0].recv(1) == b"and back"


def test_a_receiver_waits_on_when_a_message_is_withdrawn_under_its_hands(lending, monkeypatch):
    slowly(monkeypatch, 16 * MIB)
    receiving = Running(lending[1].recv, 0)
    with pytest.raises(DeadlineExceededError):
        lending[0].send(pattern(16 * MIB), 1, timeout=0.05)
    assert not receiving.done
    sending = Running(lending[0].send, b"the next one", 1)
    assert receiving.result() == b"the next one"
    sending.result()


def slowly(patch, nbytes):
    """Have everything that is read take a second for so many bytes."""
    transfer, piece = borrower.transfer, nbytes // 10

    def transfer_slowly(call, pid, here, there):
        if call is borrower.READ and sum(length for _, length in here) > piece:
            time.sleep(0.1)
            here, there = shortened(here, piece), shortened(there, piece)
        return transfer(call, pid, here, there)

    patch.setattr(borrower, "transfer", transfer_slowly)


def shortened(vectors, most):
    short = []
    for address, length in vectors:
        taken = min(length, most)
        most -= taken
        short.append((address, taken))
    return short


@pytest.mark.parametrize("retry", [3, 2 * LARGE], ids=["smaller", "larger"])
@pytest.mark.parametrize("waits", [False, True], ids=["before", "after"])
def test_a_retry_of_another_size_is_received_by_one_that_wants_this_size(lending, retry, waits):
    buffer = bytearray(retry)
    lending[0].send(b"", 1, tag=9)
    assert lending[1].recv(0, tag=9) == b""
    with pytest.raises(DeadlineExceededError):
        lending[0].send(pattern(LARGE), 1, timeout=0.05)
    receiving = Running(lending[1].recv_into, buffer, 0) if waits else None
    time.sleep(0.05)
    sending = Running(lending[0].send, pattern(retry, 1), 1)
    if receiving is None:
        lending[1].recv_into(buffer, 0)
    else:
        receiving.result()
    sending.result()
    assert buffer == pattern(retry, 1)


def test_messages_that_were_withdrawn_take_no_room(lending):
    message = bytes(128 * MIB)
    for _ in range(9):  # more than the 1 GiB that is kept for later
        with pytest.raises(DeadlineExceededError):
            lending[0].send(message, 1, tag=1, timeout=0.02)
        with pytest.raises(DeadlineExceededError):
            lending[1].recv(0, tag=2, timeout=0.0)
    lending[0].send(b"small", 1, tag=2)
    assert lending[1].recv(0, tag=2, timeout=QUICK) == b"small"


def test_the_sender_and_the_receiver_agree_on_whether_a_message_was_sent(lending, monkeypatch):
    """The deadline passes when the receiver has read everything and is about to say so."""
    write, read, late = Borrowed._write_receipt, threading.Event(), threading.Event()

    def write_late(parcel, value):
        read.set()
        assert late.wait(PATIENCE)
        write(parcel, value)

    monkeypatch.setattr(Borrowed, "_write_receipt", write_late)
    sending = Running(lending[0].send, pattern(LARGE), 1, timeout=1.0)
    receiving = Running(lending[1].recv, 0, timeout=2.0)
    assert read.wait(PATIENCE)
    time.sleep(1.2)
    late.set()
    outcomes = []
    for running in (sending, receiving):
        try:
            running.result()
            outcomes.append("sent")
        except DeadlineExceededError:
            outcomes.append("not sent")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", ["lent", "tcp"], indirect=True)
def test_a_receiver_that_is_busy_for_long_is_not_lost(kind, monkeypatch):
    """It lives, its kernel answers, and the sender's time is not up."""
    monkeypatch.setattr("rankwire.transports.tcp_stream._USER_TIMEOUT_MS", 200)
    with tcp_world(2, **kind) as world:
        sending = Running(world[0].send, pattern(16 * MIB), 1)
        time.sleep(0.8)
        assert world[1].recv(0) == pattern(16 * MIB)
        sending.result()


# -- deaths


SLOWLY = """
import time
from rankwire.links import borrower

transfer, begun = borrower.transfer, []

def transfer_slowly(call, pid, here, there):
    if call is borrower.READ and here[0][1] > 1 << 20:
        begun.append(1)
        time.sleep(0.05)
        here, there = [(here[0][0], 1 << 20)], [(there[0][0], 1 << 20)]
    return transfer(call, pid, here, there)

borrower.transfer = transfer_slowly
"""


def test_a_sender_that_is_killed_while_its_message_waits_is_lost():
    with lending_processes(3) as ranks:
        offer_from(ranks[1], LARGE, 2)
        killed = ranks[1].kill()
        assert_lost(ranks[2].start("recv", 1), 1, max(killed, time.monotonic()))
        assert_lost(ranks[2].start("eval", "backend.recv_into(bytearray(1 << 20), 1)"), 1, killed)
        ranks[0].call("send", b"others go on", 2)
        assert ranks[2].call("recv", 0) == b"others go on"


def test_a_sender_that_is_killed_in_the_middle_of_its_message_is_lost():
    with lending_processes(3) as ranks:
        ranks[2].call("eval", "exec(code, globals())", code=SLOWLY)
        receiving = ranks[2].start("eval", "len(backend.recv(1))")
        offer_from(ranks[1], 100 * MIB, 2)
        eventually(lambda: ranks[2].call("eval", "len(begun)") > 2)
        assert_lost(receiving, 1, ranks[1].kill())


def test_what_was_sent_before_the_sender_was_killed_is_received():
    with lending_processes(2) as ranks:
        reading = ranks[0].start("recv", 1, 9)
        for number in range(3):
            ranks[1].call("eval", f"backend.send(bytes([{number}]) * {LARGE}, 0)")
        killed = ranks[1].kill()
        assert_lost(reading, 1, killed)
        for number in range(3):
            assert ranks[0].call("recv", 1) == bytes([number]) * LARGE
        assert_lost(ranks[0].start("recv", 1), 1, time.monotonic())


@pytest.mark.parametrize("coordinator", ["there", "killed", "left"])
def test_a_receiver_that_is_killed_while_the_sender_waits_is_lost(coordinator):
    with lending_processes(3) as ranks:
        without_rank_0(ranks, coordinator)
        sending = [offer_from(ranks[1], LARGE, 2, tag) for tag in (1, 2)]
        killed = ranks[2].kill()
        for command in sending:
            assert_lost(command, 2, killed)


@pytest.mark.parametrize("coordinator", ["there", "killed", "left"])
def test_a_receiver_that_leaves_while_the_sender_waits_is_said_to_have_left(coordinator):
    with lending_processes(3) as ranks:
        without_rank_0(ranks, coordinator)
        sending = offer_from(ranks[1], LARGE, 2, timeout=5.0)
        left = time.monotonic()
        ranks[2].call("close")
        error = sending.error()
        assert type(error) is ChannelClosedError, repr(error)
        assert error.peer == 2
        assert sending.ended - left < SOON


def without_rank_0(ranks, how):
    """Have the coordinator gone, and everyone know it."""
    if how == "there":
        return
    if how == "killed":
        ranks[0].kill()
    else:
        ranks[0].call("close")
    thread = "backend.mesh.introductions._thread"
    introduced = f"{thread}.ident and not {thread}.is_alive()"
    for rank in ranks[1:]:
        eventually(lambda rank=rank: rank.call("eval", introduced))


def test_a_receiver_that_is_stopped_and_goes_on_loses_nothing():
    with lending_processes(2) as ranks:
        ranks[1].stop()
        sending = offer_from(ranks[0], LARGE, 1, fill=7)
        late = ranks[0].start("eval", "backend.send(bytes(1 << 20), 1, 5, timeout=0.2)")
        assert isinstance(late.error(), DeadlineExceededError)
        ranks[1].signal(signal.SIGCONT)
        assert ranks[1].call("recv", 0) == b"\7" * LARGE
        sending.result()
        assert isinstance(ranks[1].start("recv", 0, 5, timeout=0.05).error(), DeadlineExceededError)


def test_a_sender_that_is_stopped_is_read_all_the_same():
    with lending_processes(2) as ranks:
        sending = offer_from(ranks[0], LARGE, 1, fill=7)
        ranks[0].stop()
        assert ranks[1].call("recv", 0) == b"\7" * LARGE
        ranks[0].signal(signal.SIGCONT)
        sending.result()


def test_a_third_rank_that_is_killed_harms_no_message_between_others():
    with lending_processes(3) as ranks:
        sending = offer_from(ranks[0], LARGE, 1, fill=7)
        ranks[2].kill()
        eventually(lambda: "gone: [2]" in ranks[0].call("eval", "repr(backend)"))
        time.sleep(0.1)
        assert ranks[1].call("recv", 0) == b"\7" * LARGE
        sending.result()


def test_a_sender_waits_for_a_receiver_that_leaves_others(lending):
    """Closing a third connection, such as an agent's, is not the end of this one."""
    with RpcAgent(lending[0]) as agent, RpcAgent(lending[1]) as other:
        other.register("noop", lambda: None)
        agent.rpc_sync(1, "noop")
        sending = offer(lending[0], bytes(LARGE), 1)
    time.sleep(0.1)
    assert not sending.done
    assert lending[1].recv(0) == bytes(LARGE)
    sending.result()


# -- interrupts


class Interrupt(BaseException):
    """What a signal raises, as KeyboardInterrupt does."""


HERE = (str(Path(connection.__file__).parent.parent), __file__)


@contextlib.contextmanager
def interrupted_after(seconds):
    """Raise ``Interrupt`` in this thread, which is the main one, in code of ours."""

    def interrupt(_, frame):
        if frame is not None and frame.f_code.co_filename.startswith(HERE):
            raise Interrupt
        signal.setitimer(signal.ITIMER_REAL, 0.0002)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seconds", [0.0005, 0.01, 0.1])
def test_a_sender_that_is_interrupted_has_sent_nothing_and_the_link_stays_usable(lending, seconds):
    memory = bytearray(pattern(LARGE))
    with pytest.raises(Interrupt), interrupted_after(seconds):
        lending[0].send(memory, 1)
    memory[:] = bytes(LARGE)
    with pytest.raises(DeadlineExceededError):
        lending[1].recv(0, timeout=0.05)
    sending = Running(lending[0].send, pattern(LARGE, 2), 1)
    assert lending[1].recv(0) == pattern(LARGE, 2)
    sending.result()


@pytest.mark.parametrize("how", ["recv", "recv_into"])
def test_a_receiver_that_is_interrupted_in_a_message_does_not_leave_its_sender_waiting(
    lending, monkeypatch, how
):
    """The message goes back, as one does whose receiver is interrupted before it looks at it."""
    sending = offer(lending[0], pattern(16 * MIB), 1)
    receive = {
        "recv": lambda: lending[1].recv(0),
        "recv_into": lambda: lending[1].recv_into(bytearray(16 * MIB), 0),
    }[how]
    with monkeypatch.context() as patch:
        slowly(patch, 16 * MIB)
        with pytest.raises(Interrupt), interrupted_after(0.1):
            receive()
    receiving = Running(lending[1].recv, 0, timeout=0.3)
    sending.result(QUICK)
    with contextlib.suppress(DeadlineExceededError):
        assert receiving.result() == pattern(16 * MIB)


@pytest.mark.fault(37, "interrupts at any time leave whole messages only")
def test_interrupts_at_any_time_leave_whole_messages_only():
    """After an interrupt, what comes next is a whole message, or the link has been given up."""
    received = interrupted = 0
    for seed in range(6):
        with tcp_world(2) as world:
            sending = Running(send_numbered, world[0], 8)
            last = -1
            for turn in itertools.count(seed):
                # Not once all is sent: the last message may have passed as an interrupt came.
                after = 0.0 if sending.done else 0.0003 + turn % 7 * 0.0004
                try:
                    with interrupted_after(after):
                        message = world[1].recv(0, timeout=0.5)
                except Interrupt:
                    interrupted += 1
                    continue
                except (PeerLostError, DeadlineExceededError):
                    break  # it was given up, or there is no more
                if message == b"last":
                    break
                assert message.count(message[0]) == LARGE
                assert message[0] > last, "each once, and in order"
                last = message[0]
                received += 1
            with contextlib.suppress(PeerLostError):
                sending.result()
    assert interrupted
    assert received


def send_numbered(backend, count):
    for number in range(count):
        with contextlib.suppress(DeadlineExceededError):
            backend.send(bytes([number]) * LARGE, 1, timeout=0.1)
    backend.send(b"last", 1)


# -- who lends to whom


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"transport": "auto"}, Link("unix", True, "", CAN_SHARE)),
        ({"transport": "unix"}, Link("unix", True, "", CAN_SHARE)),
        ({"transport": "tcp"}, Link("tcp", False, "it is not connected by a Unix socket")),
        ({"single_copy": False}, Link("unix", False, "it is turned off", CAN_SHARE)),
        ({"segment_nbytes": 0}, Link("unix", True, "", False)),
    ],
    ids=["auto", "unix", "tcp", "off", "nothing shared"],
)
def test_a_link_tells_how_messages_travel(options, expected):
    with tcp_world(2, **options) as world:
        assert world[0].link_to(1) == expected
        sending = Running(world[0].send, pattern(LARGE), 1)
        assert world[1].recv(0) == pattern(LARGE)
        sending.result()
        assert world[0].link_to(1) == expected


def test_a_link_to_nobody_is_refused():
    with tcp_world(2) as world:
        with pytest.raises(SelfSendError):
            world[0].link_to(0)
        with pytest.raises(InvalidRankError):
            world[0].link_to(2)
        world[1].close()
        eventually(lambda: world[0].mesh.peers[1].failure is not None)
        with pytest.raises(ChannelClosedError) as caught:
            world[0].link_to(1)
        assert (caught.value.op, caught.value.peer) == ("link_to", 1)


REFUSAL = "the kernel refuses to copy memory of process 7: Operation not permitted"


def test_where_the_kernel_refuses_messages_go_as_a_stream_and_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(connection, "probe", lambda sock: (0, REFUSAL))
    with tcp_world(2) as world:
        assert world[0].link_to(1) == Link("unix", False, REFUSAL, CAN_SHARE)
        sending = Running(world[0].send, pattern(LARGE), 1)
        assert world[1].recv(0) == pattern(LARGE)
        sending.result()
        with RpcAgent(world[0]) as agent, RpcAgent(world[1]) as other:
            other.register("echo", lambda x: x)
            assert (agent.rpc_sync(1, "echo", np.arange(MIB)) == np.arange(MIB)).all()


def test_where_one_of_two_cannot_read_only_its_messages_go_as_a_stream():
    """It is the reader who needs the permission."""
    with process_world(2) as ranks:
        refuse = f"setattr(connection, 'probe', lambda sock: (0, {REFUSAL!r}))"
        ranks[1].call("eval", "exec('from rankwire.links import connection', globals())")
        ranks[1].call("eval", refuse)
        links = [rank.call("link_to", 1 - rank.rank) for rank in ranks]
        assert links[0] == Link("unix", False, REFUSAL, CAN_SHARE)
        if not links[1].single_copy:
            pytest.skip(links[1].reason)
        for rank in ranks:
            other = ranks[1 - rank.rank]
            sending = rank.start("eval", f"backend.send(b'x' * {LARGE}, {other.rank})")
            assert other.call("recv", rank.rank) == b"x" * LARGE
            sending.result()


# -- calls


@contextlib.contextmanager
def three_agents(**options):
    """Agents of three ranks, with few workers."""
    with tcp_world(3, **options) as world, contextlib.ExitStack() as stack:
        agents = [stack.enter_context(RpcAgent(backend, workers=4)) for backend in world]
        for agent in agents:
            agent.register("echo", lambda x: x)
            agent.register("large", lambda number: np.full(LARGE, number, np.uint8))
        yield agents
        for agent in agents:
            agent.close(grace=0.2)


@pytest.fixture
def agents(kind):
    with three_agents(**kind) as agents:
        yield agents


@pytest.fixture
def lending_agents():
    with three_agents() as agents:
        link = agents[0].backend.link_to(1)
        if not link.single_copy:
            pytest.skip(link.reason)
        yield agents


@pytest.mark.parametrize("size", [10, 300_000, 16 * MIB])
def test_large_arguments_and_results_arrive(agents, size):
    array = np.arange(size, dtype=np.uint8)
    for _ in range(3):
        assert (agents[0].rpc_sync(1, "echo", array) == array).all()
        assert (agents[0].rpc_async(1, "echo", array).result() == array).all()


def test_several_callers_get_their_large_results_at_once(agents):
    def call(agent, number):
        for _ in range(4):
            result = agent.rpc_sync(1, "large", number)
            assert result.shape == (LARGE,)
            assert (result == number).all()

    running = [
        Running(call, agents[rank], 10 * rank + thread) for rank in (0, 2) for thread in range(4)
    ]
    for each in running:
        each.result()


def test_ranks_that_call_each_other_with_large_arguments_do_not_wait_for_each_other(agents):
    def call(rank, thread):
        array = np.full(LARGE, 10 * rank + thread, np.uint8)
        for turn in range(4):
            assert (agents[rank].rpc_sync((rank + 1 + turn % 2) % 3, "echo", array) == array).all()

    running = [Running(call, rank, thread) for rank in range(3) for thread in range(4)]
    for each in running:
        each.result()


def test_large_results_are_read_although_nobody_waits_for_them(agents):
    done, results = threading.Event(), []

    def on_done(future):
        results.append(future.result())
        if len(results) == 8:
            done.set()

    futures = [agents[0].rpc_async(1, "large", number) for number in range(8)]
    for future in futures:
        future.add_done_callback(on_done)
    assert done.wait(PATIENCE)
    assert sorted(int(result[0]) for result in results) == list(range(8))


def test_large_results_of_coroutines_arrive(agents):
    async def large(number):
        return np.full(LARGE, number, np.uint8)

    agents[1].register("async_large", large)
    futures = [agents[0].rpc_async(1, "async_large", number) for number in range(8)]
    for number, future in enumerate(futures):
        assert (future.result() == number).all()


def test_arguments_and_results_in_memory_that_nobody_else_can_read_arrive(agents):
    memory = memory_for_nobody_else(LARGE)
    memory[:] = pattern(LARGE)
    array = np.frombuffer(memory, np.uint8)
    agents[1].register("secret", lambda x: array)
    assert bytes(agents[0].rpc_sync(1, "secret", array, timeout=QUICK)) == pattern(LARGE)
    agents[1].unregister("secret")  # or the memory would live as long as the agent


class Slow:
    """A function that returns something large when it is told to."""

    def __init__(self, agent):
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        agent.register("slow_large", self.call)

    def call(self):
        self.entered.release()
        assert self.go.wait(PATIENCE)
        return np.zeros(4 * MIB, np.uint8)


def test_a_caller_that_gives_up_before_its_large_reply_does_not_stop_the_server(lending_agents):
    slow = Slow(lending_agents[1])
    assert lending_agents[0].rpc_sync(1, "echo", 5) == 5  # they are connected
    for _ in range(4):
        with pytest.raises(DeadlineExceededError) as caught:
            lending_agents[0].rpc_sync(1, "slow_large", timeout=0.1)
        assert caught.value.may_have_run
    slow.go.set()
    began = time.monotonic()
    assert lending_agents[2].rpc_sync(1, "echo", 5) == 5
    assert time.monotonic() - began < QUICK
    assert (lending_agents[0].rpc_sync(1, "large", 3) == 3).all()


def test_a_caller_that_cancels_before_its_large_reply_does_not_stop_the_server(lending_agents):
    """It has all its time left, but nobody waits: a server that offers the reply must notice."""
    slow = Slow(lending_agents[1])
    futures = [lending_agents[0].rpc_async(1, "slow_large", timeout=PATIENCE) for _ in range(4)]
    for _ in futures:
        assert slow.entered.acquire(timeout=PATIENCE)
    for future in futures:
        assert future.cancel()
    eventually(
        lambda: all(job.cancelled for job in list(lending_agents[1]._server.active.values()))
    )
    slow.go.set()
    began = time.monotonic()
    assert lending_agents[2].rpc_sync(1, "echo", 5, timeout=PATIENCE) == 5
    assert time.monotonic() - began < QUICK
    assert (lending_agents[0].rpc_sync(1, "large", 3) == 3).all()


def test_a_caller_that_cancels_while_its_large_reply_is_offered_does_not_stop_the_server(
    lending_agents,
):
    slow = Slow(lending_agents[1])
    lending_agents[0].rpc_sync(1, "echo", 0)
    inbox = lending_agents[0]._port._calls.inbox_of(1)
    eventually(lambda: inbox._take_role(inbox))  # nobody reads replies for now
    try:
        futures = [lending_agents[0].rpc_async(1, "slow_large", timeout=PATIENCE) for _ in range(4)]
        inbox.connection.outbox.flush(Deadline(PATIENCE))
        for _ in futures:
            assert slow.entered.acquire(timeout=PATIENCE)
        slow.go.set()
        time.sleep(0.2)  # all four are offered, or one is half sent
        for future in futures:
            assert future.cancel()
    finally:
        with inbox._mutex:
            inbox._pass_role(inbox)
    began = time.monotonic()
    assert lending_agents[2].rpc_sync(1, "echo", 5, timeout=PATIENCE) == 5
    assert time.monotonic() - began < QUICK
    assert (lending_agents[0].rpc_sync(1, "large", 3) == 3).all()


def test_a_large_argument_waits_for_an_agent_that_comes_later(kind):
    with tcp_world(2, **kind) as world, RpcAgent(world[0]) as agent:
        calling = Running(agent.rpc_sync, 1, "sum", np.ones(LARGE, np.uint8))
        time.sleep(0.1)
        assert not calling.done
        with RpcAgent(world[1]) as other:
            other.register("sum", lambda x: int(x.sum()))
            with contextlib.suppress(RankwireError):  # it may have been served before
                calling.result()


def test_a_large_argument_that_is_not_taken_in_time_is_not_run(lending):
    with RpcAgent(lending[0]) as agent:
        with pytest.raises(DeadlineExceededError) as caught:
            agent.rpc_sync(1, "count", np.ones(LARGE, np.uint8), timeout=0.2)
        assert not caught.value.may_have_run
        with RpcAgent(lending[1]) as other:
            runs = []
            other.register("count", lambda x: runs.append(len(x)))
            agent.rpc_sync(1, "count", np.ones(3, np.uint8))
            assert runs == [3]


AGENT = """
import numpy as np
from rankwire import RpcAgent

agent = RpcAgent(backend, workers=4)
agent.register("echo", lambda x: x)
"""


def test_a_callee_that_is_killed_while_a_large_argument_waits_is_lost():
    with lending_processes(3) as ranks:
        for rank in ranks:
            rank.call("eval", "exec(code, globals())", code=AGENT)
        for rank in (0, 2):
            assert ranks[rank].call("eval", "agent.rpc_sync(1, 'echo', 5)") == 5
        ranks[1].stop()
        call = f"agent.rpc_sync(1, 'echo', np.zeros({LARGE}, np.uint8))"
        calling = ranks[0].start("eval", call)
        future = f"agent.rpc_async(1, 'echo', np.zeros({LARGE}, np.uint8)).result()"
        waiting = ranks[2].start("eval", future)
        time.sleep(0.1)
        killed = ranks[1].kill()
        for command in (calling, waiting):
            assert_lost(command, 1, killed)
        assert not calling.error().may_have_run, "nobody has read its argument"
        assert ranks[0].call("eval", "agent.rpc_sync(2, 'echo', 5)") == 5


def test_a_caller_that_is_killed_while_its_large_reply_is_offered_does_not_stop_the_server():
    with lending_processes(3) as ranks:
        for rank in ranks:
            rank.call("eval", "exec(code, globals())", code=AGENT)
        ranks[1].call(
            "eval", "agent.register('large', lambda: time.sleep(0.1) or np.zeros(1 << 22)) and None"
        )
        call = "[agent.rpc_async(1, 'large') for _ in range(4)] and None"
        ranks[0].call("eval", call)
        ranks[0].stop()
        time.sleep(0.3)
        killed = ranks[0].kill()
        assert ranks[2].call("eval", "agent.rpc_sync(1, 'echo', 5)") == 5
        assert time.monotonic() - killed < QUICK
        active = "agent.activity().in_service"
        eventually(lambda: ranks[1].call("eval", active) == 0, QUICK)
