"""Messages and barriers over TCP and Unix sockets, between ranks in threads of this process."""

import contextlib
import itertools
import os
import statistics
import threading
import time

import numpy as np
import pytest

from rankwire.backends.tcp import TcpBackend
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    PeerLostError,
    ProtocolError,
    RankwireError,
    SelfSendError,
    SizeMismatchError,
)
from rankwire.mesh.tcp_connections import Introductions
from rankwire.wire.handshake import Purpose
from real_time import Deadline
from worlds import PATIENCE, SECRET, Running, deaf, eventually, runtime_folder_of_its_own, tcp_world

SOON = 8.0  # seconds for what takes milliseconds, on a busy machine


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path
        assert not path.exists() or list(path.iterdir()) == [], "files are left behind"


# On one host "auto" is "unix": that it is, every other world shows.
@pytest.fixture(params=["tcp", "unix", pytest.param("auto", marks=pytest.mark.slow)])
def transport(request):
    return request.param


@pytest.fixture
def pair(transport):
    with tcp_world(2, transport=transport) as world:
        yield world


@pytest.fixture
def four(transport):
    with tcp_world(4, transport=transport) as world:
        yield world


def wanted(backend: TcpBackend, src: int) -> int:
    """Return how many receives from ``src`` wait."""
    return backend.mesh.peers[src].inbox._mailbox.wanted


def in_a_barrier(backend: TcpBackend) -> bool:
    return backend.status().operation == "barrier()"


def wait_until_wanted(backend: TcpBackend, src: int, count: int) -> None:
    eventually(lambda: wanted(backend, src) == count)


# -- what it is


def test_the_transport_is_what_was_asked_for(pair, transport):
    pair[0].send(b"x", 1)
    used = "tcp" if transport == "tcp" else "unix"
    assert pair[0].mesh.peers[1].messages.transport == used


@pytest.mark.parametrize("transport", ["", "udp", None, "TCP"], indirect=False)
def test_an_unknown_transport_is_refused(transport):
    with pytest.raises(ConfigurationError, match="transport"):
        TcpBackend(0, 2, "127.0.0.1:0", transport=transport)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused_before_anything_else(world_size):
    with pytest.raises(InvalidWorldSizeError):
        TcpBackend(0, world_size, "not an address")


def test_a_rank_outside_the_world_is_refused_before_anything_else():
    with pytest.raises(InvalidRankError):
        TcpBackend(2, 2, "not an address")


@pytest.mark.parametrize("address", ["", "127.0.0.1", ":1", "127.0.0.1:x", "::1:80", "h:70000"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigurationError):
        TcpBackend(0, 2, address)


def test_the_repr_says_who_where_and_how_it_is():
    with tcp_world(3) as world:
        assert repr(world[1]) == f"<TcpBackend rank 1 of 3 at {world[0].address}, all up>"
        world[2].close()
        eventually(lambda: "gone: [2]" in repr(world[1]))
    assert "closed" in repr(world[1])


# -- one message


def test_a_message_arrives_whatever_its_length(pair):
    for nbytes in (0, 1, 31, 32, 33, 16384, 16385, 65504, 65505, 65536, 1 << 20):
        message = os.urandom(nbytes)
        sending = Running(pair[0].send, message, 1)
        assert pair[1].recv(0) == message
        sending.result()


def test_an_empty_message_is_a_message(pair):
    pair[0].send(b"", 1)
    pair[0].send([], 1)
    assert pair[1].recv(0) == b""
    assert pair[1].recv_into(bytearray(), 0) == 0
    with pytest.raises(DeadlineExceededError):
        pair[1].recv(0, timeout=0.0)


def test_a_sequence_of_more_buffers_than_a_system_call_takes_arrives_whole(pair):
    pieces = [os.urandom(37) for _ in range(3000)]
    sending = Running(pair[0].send, pieces, 1)
    assert pair[1].recv(0) == b"".join(pieces)
    sending.result()


def test_arrays_arrive_bit_by_bit(pair):
    sent = np.random.default_rng(1).standard_normal((50, 70)).astype("f4")
    got = np.full_like(sent, -1)
    sending = Running(pair[0].send, sent, 1)
    assert pair[1].recv_into(got, 0) == sent.nbytes
    sending.result()
    assert np.array_equal(sent, got)


def test_64_mib_go_both_ways_one_after_the_other(pair):
    message = np.random.default_rng(2).bytes(64 << 20)
    for src, dst in ((0, 1), (1, 0)):
        sending = Running(pair[src].send, message, dst)
        assert pair[dst].recv(src) == message
        sending.result()


def test_large_messages_go_both_ways_at_once(pair):
    """Both send first: whoever waits for the other's memory to empty must not stop reading."""
    message = np.random.default_rng(3).bytes(16 << 20)
    sending = [Running(pair[rank].send, message, 1 - rank) for rank in (0, 1)]
    receiving = [Running(pair[rank].recv, 1 - rank) for rank in (0, 1)]
    for thread in sending:
        thread.result()
    assert [thread.result() == message for thread in receiving] == [True, True]


# -- direct and duplex


def test_any_rank_reaches_any_rank_directly(four):
    for src, dst in itertools.permutations(range(4), 2):
        four[src].send(f"{src} to {dst}".encode(), dst)
    for src, dst in itertools.permutations(range(4), 2):
        assert four[dst].recv(src) == f"{src} to {dst}".encode()


def test_ranks_1_and_2_talk_without_rank_0(four):
    """Nothing of it passes through rank 0, not even once rank 0 has left."""
    four[0].close()
    four[1].send(b"there", 2)
    assert four[2].recv(1) == b"there"
    four[2].send(b"and back", 1)
    assert four[1].recv(2) == b"and back"


@pytest.mark.fault(40, "a send never waits for a receive")
def test_a_rank_sends_while_the_peer_and_itself_wait_in_recv(pair):
    """With one lock for both directions neither could send again."""
    waiting = [Running(pair[rank].recv, 1 - rank) for rank in (0, 1)]
    for rank in (0, 1):
        wait_until_wanted(pair[rank], 1 - rank, 1)
    assert not any(thread.done for thread in waiting)
    for rank in (0, 1):
        pair[rank].send(f"from {rank}".encode(), 1 - rank, timeout=5.0)
    assert [thread.result() for thread in waiting] == [b"from 1", b"from 0"]


def test_both_sides_loop_in_recv_and_still_talk(pair):
    def answer():
        for _ in range(50):
            pair[1].send(pair[1].recv(0), 0)

    answering = Running(answer)
    for number in range(50):
        waiting = Running(pair[0].recv, 1)
        pair[0].send(str(number).encode(), 1)
        assert waiting.result() == str(number).encode()
    answering.result()


# -- matching


@pytest.mark.fault(41, "messages of one tag from one rank arrive in order")
def test_messages_of_one_tag_arrive_in_order(pair):
    for number in range(500):
        pair[0].send(str(number).encode(), 1, tag=5)
    assert [int(pair[1].recv(0, tag=5)) for _ in range(500)] == list(range(500))


def test_tags_do_not_take_each_others_messages(pair):
    for tag in (3, 1, 2**64 - 1, 0):
        pair[0].send(str(tag).encode(), 1, tag)
    for tag in (0, 1, 2**64 - 1, 3):
        assert pair[1].recv(0, tag) == str(tag).encode()


def test_ranks_do_not_take_each_others_messages(four):
    for src in (3, 1, 2):
        four[src].send(str(src).encode(), 0)
    assert [four[0].recv(src) for src in (1, 2, 3)] == [b"1", b"2", b"3"]


def test_one_byte_messages_in_flight_do_not_pass_for_barriers(four):
    """In the seeds a user's byte satisfied a barrier."""
    rounds, entered = 10, [0] * 4

    def run(rank):
        for number in range(rounds):
            for dst in range(4):
                if dst != rank:
                    for tag in (0, number):
                        four[rank].send(b"\0", dst, tag)
            entered[rank] += 1
            four[rank].barrier()
            assert min(entered) >= number + 1
        for number in range(rounds):
            for src in range(4):
                if src != rank:
                    assert four[rank].recv(src, number) == b"\0"

    for thread in [Running(run, rank) for rank in range(4)]:
        thread.result()


@pytest.mark.fault(
    39, "a buffer of the wrong size is an error with both sizes, and the message is kept"
)
def test_a_size_mismatch_names_both_sizes_and_loses_nothing(pair):
    buffer = bytearray(b"....")
    pair[0].send(b"first one", 1)
    pair[0].send(b"next", 1)
    for _ in range(2):
        with pytest.raises(SizeMismatchError) as caught:
            pair[1].recv_into(buffer, 0)
        assert (caught.value.expected, caught.value.got) == (4, 9)
    assert buffer == b"...."
    assert pair[1].recv(0) == b"first one"
    assert pair[1].recv_into(buffer, 0) == 4
    assert buffer == b"next"


def test_a_message_that_does_not_fit_one_receiver_goes_to_the_next(pair):
    """It stays receivable, also for a thread that waits already."""
    too_small = Running(pair[1].recv_into, bytearray(4), 0)
    wait_until_wanted(pair[1], 0, 1)
    fitting = Running(pair[1].recv, 0, timeout=3.0)
    wait_until_wanted(pair[1], 0, 2)
    pair[0].send(b"eight...", 1)
    assert isinstance(too_small.error(), SizeMismatchError)
    assert fitting.result() == b"eight..."


def test_a_message_that_did_not_fit_keeps_its_place_in_the_order(pair):
    too_small = Running(pair[1].recv_into, bytearray(4), 0)
    wait_until_wanted(pair[1], 0, 1)
    fitting = Running(pair[1].recv, 0, timeout=3.0)
    wait_until_wanted(pair[1], 0, 2)
    pair[0].send(b"eight...", 1)
    pair[0].send(b"the second", 1)
    assert isinstance(too_small.error(), SizeMismatchError)
    assert fitting.result() == b"eight..."
    assert pair[1].recv(0) == b"the second"


@pytest.mark.fault(40, "each message goes to exactly one of many receiving threads")
def test_every_message_goes_to_exactly_one_of_many_receivers(four):
    """16 threads receive from 4 peers' worth of senders, each message once and whole."""
    per_thread, threads = 40, 16

    def send(src):
        for number in range(per_thread * threads):
            four[src].send(f"{src}:{number}".encode() + bytes(number), 0)

    def receive(src):
        return [bytes(four[0].recv(src)) for _ in range(per_thread)]

    receiving = {src: [Running(receive, src) for _ in range(threads)] for src in (1, 2, 3)}
    sending = [Running(send, src) for src in (1, 2, 3)]
    for thread in sending:
        thread.result()
    for src, running in receiving.items():
        got = [message for thread in running for message in thread.result()]
        expected = [f"{src}:{n}".encode() + bytes(n) for n in range(per_thread * threads)]
        assert sorted(got) == sorted(expected)


def test_16_threads_talk_to_4_peers_at_once(transport):
    with tcp_world(5, transport=transport) as world:
        rounds, threads = 15, 16

        def talk(number):
            rank, tag = number % 5, number // 5
            for turn in range(rounds):
                others = [other for other in range(5) if other != rank]
                for dst in others:
                    world[rank].send(f"{rank} {tag} {turn}".encode() + bytes(turn * 500), dst, tag)
                for src in others:
                    expected = f"{src} {tag} {turn}".encode() + bytes(turn * 500)
                    assert world[rank].recv(src, tag) == expected

        running = [Running(talk, number) for number in range(5 * threads)]
        for thread in running:
            thread.result()


def test_frames_of_concurrent_senders_stay_whole(pair):
    sizes = [10, 20_000, 70_000, 300_000]

    def send(tag):
        for _ in range(20):
            pair[0].send(bytes([tag]) * sizes[tag], 1, tag)

    running = [Running(send, tag) for tag in range(4)]
    for _ in range(20):
        for tag in range(4):
            message = pair[1].recv(0, tag)
            assert message == bytes([tag]) * sizes[tag]
    for thread in running:
        thread.result()


# -- time limits


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.125])
@pytest.mark.parametrize("op", ["recv", "recv_into", "barrier"])
def test_a_time_limit_is_kept_and_reported_exactly(pair, op, limit):
    operation = {
        "recv": lambda: pair[1].recv(0, 7, timeout=limit),
        "recv_into": lambda: pair[1].recv_into(bytearray(1), 0, 7, timeout=limit),
        "barrier": lambda: pair[1].barrier(timeout=limit),
    }[op]
    if op == "barrier":  # the connection is there, so that a limit of 0 has nothing to wait for
        pair[1].send(b"x", 0)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        operation()
    assert limit <= time.monotonic() - began < limit + SOON
    error = caught.value
    assert (error.limit, error.op.removesuffix("()"), error.rank) == (limit, op, 1)
    assert error.waiting_for == [0]
    assert limit <= error.waited < limit + SOON
    assert isinstance(error, TimeoutError)
    assert f"within {limit:g} s" in str(error)


def test_the_backends_own_limit_is_used_without_another(transport):
    with tcp_world(2, transport=transport, timeout=0.0625) as world:
        with pytest.raises(DeadlineExceededError) as caught:
            world[0].recv(1)
        assert caught.value.limit == 0.0625


def test_a_limit_of_zero_takes_what_has_arrived(pair):
    def poll():
        with contextlib.suppress(DeadlineExceededError):
            return pair[1].recv(0, timeout=0.0)

    assert poll() is None
    for nbytes in (1, 1000, 60_000):
        pair[0].send(bytes(nbytes), 1)
        assert len(eventually(poll)) == nbytes  # on TCP the kernel may still be at it
    assert poll() is None


def test_a_limit_of_zero_takes_a_message_larger_than_one_read(pair, transport):
    """All of it has arrived when ``send`` returns, so one look must be enough."""
    if transport == "tcp":
        pytest.skip("when it has arrived is known to the kernel only")
    pair[0].send(b"first", 1)
    assert pair[1].recv(0) == b"first"
    pair[0].send(bytes(150_000), 1)
    assert len(pair[1].recv(0, timeout=0.0)) == 150_000


def test_the_deadline_of_a_second_receiver_is_its_own(pair):
    pair[0].send(b"", 1, 9)  # there is a connection, and the first receiver reads it
    first = Running(pair[1].recv, 0, timeout=PATIENCE)
    wait_until_wanted(pair[1], 0, 1)
    second = Running(pair[1].recv, 0, timeout=0.1)
    other = Running(pair[1].recv, 0, 3, timeout=0.1)
    for thread in (second, other):
        assert thread.error().limit == 0.1
        assert 0.1 <= thread.seconds < SOON
    assert not first.done
    pair[0].send(b"for the first", 1)
    assert first.result() == b"for the first"


def test_a_reader_that_leaves_hands_the_reading_on(pair):
    pair[0].send(b"", 1, 9)
    reader = Running(pair[1].recv, 0, 1, timeout=0.2)
    eventually(lambda: pair[1].mesh.peers[0].inbox.is_read)
    parked = Running(pair[1].recv, 0, 2)
    assert isinstance(reader.error(), DeadlineExceededError)
    pair[0].send(b"for the other", 1, 2)
    assert parked.result() == b"for the other"


def test_a_send_to_a_rank_that_takes_nothing_ends_at_its_deadline(pair):
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        pair[0].send(bytes(64 << 20), 1, timeout=0.25)
    assert 0.25 <= time.monotonic() - began < SOON
    assert (caught.value.limit, caught.value.op, caught.value.peer) == (0.25, "send", 1)


def test_a_send_that_came_too_late_leaves_no_half_message_behind(pair):
    """What was sent before it is received in order, and whole."""
    pair[0].send(b"", 1, 9)
    sent = 0
    with contextlib.suppress(DeadlineExceededError):
        while True:
            pair[0].send(sent.to_bytes(4, "little") + bytes(996), 1, timeout=0.0)
            sent += 1
    assert sent > 0
    for number in range(sent):
        assert pair[1].recv(0) == number.to_bytes(4, "little") + bytes(996)
    try:
        pair[0].send(b"after", 1)
    except PeerLostError:  # a part of the last one had left: then the stream is given up (R7)
        with pytest.raises(PeerLostError, match="middle of a message"):
            pair[1].recv(0)
    else:
        assert pair[1].recv(0) == b"after"


def test_a_second_sender_waits_for_the_first_no_longer_than_its_limit(transport):
    with tcp_world(2, transport=transport, single_copy=False) as pair:
        blocked = Running(pair[0].send, bytes(64 << 20), 1, timeout=PATIENCE)
        eventually(lambda: pair[0].mesh.peers[1].messages is not None)
        eventually(lambda: pair[0].mesh.peers[1].messages.outbox._lock.locked())
        second = Running(pair[0].send, b"x", 1, timeout=0.05)
        assert second.error().limit == 0.05
        assert not blocked.done
        pair[0].close()
        assert isinstance(blocked.error(), ChannelClosedError)


def test_a_rank_that_was_sent_half_a_message_is_still_reached_by_others(transport):
    """The stream between two ranks is given up; the living rank itself is not."""
    with tcp_world(3, transport=transport, single_copy=False) as world:
        with pytest.raises(DeadlineExceededError):
            world[0].send(bytes(64 << 20), 1, timeout=0.1)
        world[2].send(b"are you there?", 1, timeout=5.0)
        assert world[1].recv(2) == b"are you there?"
        world[1].send(b"yes", 2, timeout=5.0)
        assert world[2].recv(1) == b"yes"
        world[2].send(b"and you?", 0, timeout=5.0)
        assert world[0].recv(2) == b"and you?"


def test_the_limit_also_covers_connecting_and_is_reported_exactly(pair):
    with deaf(pair[1]):
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError) as caught:
            pair[0].send(b"x", 1, timeout=0.1)
        assert 0.1 <= time.monotonic() - began < SOON
        assert caught.value.limit == 0.1
    pair[0].send(b"after all", 1)
    assert pair[1].recv(0) == b"after all"


def test_the_limit_also_covers_waiting_for_a_thread_that_connects(pair):
    with deaf(pair[1]):
        connecting = Running(pair[0].send, b"one", 1)
        eventually(lambda: pair[0].mesh.peers[1].dial_lock.locked())
        second = Running(pair[0].send, b"two", 1, timeout=0.1)
        error = second.error()
        assert second.seconds < SOON
        assert isinstance(error, DeadlineExceededError)
        assert error.limit == 0.1
    connecting.result()


def test_a_peer_that_is_slow_to_answer_the_door_is_given_all_of_the_limit(pair, monkeypatch):
    """The handshake's own limit is against strangers; it must not cut the user's."""
    monkeypatch.setattr("rankwire.links.dialer.HANDSHAKE_LIMIT", 0.1)
    with deaf(pair[1]):
        sending = Running(pair[0].send, b"slow", 1, timeout=PATIENCE)
        time.sleep(0.4)
    sending.result()
    assert pair[1].recv(0) == b"slow"


def test_a_dial_that_was_given_up_does_not_end_the_peer(pair):
    """The deadline passes between proof and verdict: the other end finds a dead connection."""
    admit, asked, answer = pair[1].mesh.admit, threading.Event(), threading.Event()

    def admit_late(hello):
        asked.set()
        assert answer.wait(PATIENCE)
        return admit(hello)

    pair[1].mesh.admit = admit_late
    sending = Running(pair[0].send, b"too late", 1, timeout=0.2)
    assert asked.wait(PATIENCE)
    assert isinstance(sending.error(), DeadlineExceededError)
    answer.set()
    with contextlib.suppress(DeadlineExceededError):
        assert pair[1].recv(0, timeout=0.2) is None, "nothing was sent"
    pair[0].send(b"in time", 1, timeout=5.0)
    assert pair[1].recv(0) == b"in time"


@pytest.mark.parametrize("transport", ["unix"], indirect=True)
def test_a_dial_that_was_given_up_before_the_introduction_does_not_end_the_peer(pair):
    """The deadline passes when the peer has let it in, but has not said whether it can borrow."""
    enter, entering, go_on = pair[1].mesh.enter, threading.Event(), threading.Event()

    def enter_late(hello, sock, seals):
        entering.set()
        assert go_on.wait(PATIENCE)
        enter(hello, sock, seals)

    pair[1].mesh.enter = enter_late
    sending = Running(pair[0].send, b"too late", 1, timeout=0.2)
    assert entering.wait(PATIENCE)
    assert isinstance(sending.error(), DeadlineExceededError)
    go_on.set()
    with contextlib.suppress(DeadlineExceededError):
        assert pair[1].recv(0, timeout=0.2) is None, "nothing was sent"
    pair[0].send(b"in time", 1, timeout=5.0)
    assert pair[1].recv(0) == b"in time"


def test_a_peer_that_has_not_let_go_of_an_earlier_dial_is_waited_for_and_not_lost(pair):
    """As on a busy machine, where its thread sees late that the first dial was given up."""
    zero, one = pair
    peer, deadline = zero.mesh.peers[1], Deadline(PATIENCE)
    early, _ = zero.mesh.connections.open_stream(peer, Purpose.MESSAGES, 0, deadline)
    with contextlib.closing(early):
        eventually(lambda: one.mesh.peers[0].inbox.connection is not None)
        with pytest.raises(DeadlineExceededError):
            zero.send(b"too early", 1, timeout=1.0)  # twice as long as a peer that leaves is given
    zero.send(b"in time", 1, timeout=PATIENCE)
    assert one.recv(0) == b"in time"


# -- size limits


def test_a_message_above_the_receivers_limit_is_refused_from_its_header(transport):
    with tcp_world(3, transport=transport) as world:
        world[1].mesh.max_message_nbytes = 1000  # before it has any connection
        sending = Running(world[0].send, bytes(100_000), 1)
        with pytest.raises(ProtocolError, match="100000") as caught:
            world[1].recv(0)
        assert caught.value.peer == 0
        with contextlib.suppress(RankwireError):
            sending.result()
        world[2].send(b"others go on", 1)
        assert world[1].recv(2) == b"others go on"


# -- speed


def test_small_messages_have_no_steps_of_40_ms(pair):
    """Nagle's algorithm against delayed acknowledgements."""

    def echo():
        for _ in range(210):
            pair[1].send(pair[1].recv(0), 0)

    echoing = Running(echo)
    times = []
    for _ in range(210):
        began = time.perf_counter()
        pair[0].send(b"ping", 1)
        pair[0].recv(1)
        times.append(time.perf_counter() - began)
    echoing.result()
    assert statistics.median(times[10:]) < 0.03


# -- the barrier


def test_nobody_leaves_a_barrier_before_the_last_one_enters(four):
    waiting = [Running(four[rank].barrier) for rank in (0, 1, 3)]
    for rank in (0, 1, 3):
        eventually(lambda rank=rank: in_a_barrier(four[rank]))
    assert not any(thread.done for thread in waiting)
    four[2].barrier()
    for thread in waiting:
        thread.result()


def test_a_barrier_that_times_out_names_the_missing_ranks_on_everybody(four):
    waiting = {rank: Running(four[rank].barrier, timeout=1.0) for rank in (0, 2)}
    for thread in waiting.values():
        error = thread.error()
        assert isinstance(error, DeadlineExceededError | CollectiveAbortedError)
        assert error.waiting_for == [1, 3]
        assert error.op == "barrier()"


def test_a_barrier_also_names_a_rank_that_does_not_answer_the_door(transport):
    """A rank that is stopped cannot even be told that this one has entered."""
    with tcp_world(3, transport=transport) as world:
        entered = Running(world[2].barrier, timeout=2.5)
        eventually(lambda: in_a_barrier(world[2]))
        with deaf(world[1]), pytest.raises(DeadlineExceededError) as caught:
            world[0].barrier(timeout=1.0)
        assert caught.value.waiting_for == [1]
        assert entered.error().waiting_for == [1]


def test_a_barrier_after_a_failed_one_works(four):
    for thread in [Running(four[rank].barrier, timeout=2.0) for rank in (0, 1, 2)]:
        assert thread.error().waiting_for == [3]
    with pytest.raises(CollectiveAbortedError):
        four[3].barrier()  # too late for the others, but it is the same barrier
    entered = [0] * 4

    def run(rank):
        for number in range(1, 4):
            entered[rank] += 1
            four[rank].barrier()
            assert min(entered) >= number

    for thread in [Running(run, rank) for rank in range(4)]:
        thread.result()


# -- closing


@pytest.mark.fault(45, "closing ends every operation in flight")
@pytest.mark.parametrize("single_copy", [True, False])
def test_closing_wakes_everybody_who_waits(transport, single_copy):
    lends = single_copy and transport != "tcp"
    # Who does not look has no ring: so two frames are a greeting and what is lent.
    with tcp_world(3, transport=transport, single_copy=single_copy, spin=0.0) as world:
        world[1].send(b"", 0, 9)
        waiting = [
            Running(world[0].recv, 1),  # reads the connection
            Running(world[0].recv, 1, 5),
            Running(world[0].recv, 2),  # there is no connection yet
            Running(world[0].recv_into, bytearray(4), 2),
            Running(world[0].send, bytes(64 << 20), 1),
        ]
        wait_until_wanted(world[0], 1, 2)
        wait_until_wanted(world[0], 2, 2)
        eventually(lambda: world[0].mesh.peers[1].messages is not None)
        outgoing = world[0].mesh.peers[1].messages
        eventually(
            lambda: outgoing.outbox.frames_sent == 2 if lends else outgoing.outbox._lock.locked()
        )
        began = time.monotonic()
        world[0].close()
        for thread in waiting:
            error = thread.error()
            assert isinstance(error, ChannelClosedError), error
            assert thread.ended - began < SOON


def test_closing_wakes_a_barrier(four):
    waiting = Running(four[0].barrier)
    eventually(lambda: in_a_barrier(four[0]))
    four[0].close()
    error = waiting.error()
    assert isinstance(error, ChannelClosedError)
    assert (error.op, error.rank) == ("barrier()", 0)


def test_closing_wakes_a_send_that_is_still_connecting(pair):
    with deaf(pair[1]):
        connecting = Running(pair[0].send, b"x", 1)
        eventually(lambda: pair[0].mesh.peers[1].dial_lock.locked())
        began = time.monotonic()
        pair[0].close()
        error = connecting.error(8.0)
        assert isinstance(error, ChannelClosedError)
        assert connecting.ended - began < SOON


@pytest.mark.fault(45, "closing twice is harmless")
def test_closing_again_and_from_several_threads_at_once_is_harmless(pair):
    for thread in [Running(pair[0].close) for _ in range(8)]:
        thread.result()
    pair[0].close()
    assert pair[0].closed
    assert not pair[1].closed


def test_a_close_does_not_wait_for_an_introduction_that_hangs(monkeypatch):
    """As in looking up a name: nothing can interrupt that."""
    monkeypatch.setattr("rankwire.mesh.tcp_connections._INTRODUCTIONS_PATIENCE", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def hang(introductions, peer):
        begun.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Introductions, "_greet", hang)
    with tcp_world(3) as world:
        world[0].close()  # who coordinated: the others introduce themselves to each other
        assert begun.wait(PATIENCE)
        try:
            Running(world[1].close).result()
        finally:
            go_on.set()


def test_a_close_has_ended_when_any_close_returns(pair):
    """The second caller may rely on it as well as the first."""
    closing = [Running(pair[0].close) for _ in range(4)]
    for thread in closing:
        thread.result()
        assert pair[0].mesh.peers[1].failure is not None
        assert not pair[0].mesh.formation.acceptor._thread.is_alive()


@pytest.mark.parametrize("used", [False, True])
def test_use_after_close_is_an_error_at_once(pair, used):
    if used:
        pair[0].send(b"x", 1)
        pair[1].send(b"y", 0)
        assert pair[0].recv(1) == b"y"
    pair[0].close()
    for operation in (
        lambda: pair[0].send(b"x", 1),
        lambda: pair[0].recv(1),
        lambda: pair[0].recv_into(bytearray(1), 1),
        lambda: pair[0].barrier(),
    ):
        began = time.monotonic()
        with pytest.raises(ChannelClosedError) as caught:
            operation()
        assert time.monotonic() - began < SOON
        assert caught.value.rank == 0
    with pytest.raises(RankwireError):
        pair[0].open_calls(1)


def test_closing_frees_the_port_and_all_files(folder, transport):
    with tcp_world(2, transport=transport) as world:
        address = world[0].address
        assert any(folder.iterdir())
    assert list(folder.iterdir()) == []
    with pytest.raises(RankwireError):
        TcpBackend(1, 2, address, secret=SECRET, join_timeout=0.0)


def test_closing_leaves_no_thread_and_no_descriptor(transport):
    def belongings():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = belongings()
    with tcp_world(3, transport=transport) as world:
        for src, dst in itertools.permutations(range(3), 2):
            world[src].send(b"x", dst)
    eventually(lambda: belongings() == before)


def test_messages_sent_before_leaving_are_received(pair):
    for number in range(100):
        pair[0].send(str(number).encode(), 1)
    pair[0].close()
    assert [int(pair[1].recv(0)) for _ in range(100)] == list(range(100))
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        pair[1].recv(0)


def test_a_large_message_sent_before_leaving_is_received(transport):
    """``send`` returned, so some of it may still be in the kernel of the sender."""
    message = np.random.default_rng(4).bytes(64 << 20)
    sent, last = 0, len(message)
    # As much as is taken without a reader.
    for nbytes in (3 << 20, 2 << 20, 1 << 20, 1 << 19, 1 << 18, 1 << 17):
        with tcp_world(2, transport=transport, single_copy=False) as trial:
            with contextlib.suppress(RankwireError):
                trial[0].send(message[:nbytes], 1, timeout=0.3)
                sent = nbytes
                break
    assert 0 < sent < last
    with tcp_world(2, transport=transport, single_copy=False) as (sender, receiver):
        sender.send(message[:sent], 1)
        sender.close()
        eventually(lambda: receiver.mesh.peers[0].failure is not None)
        assert receiver.recv(0) == message[:sent]


def test_one_who_leaves_is_said_to_have_left(transport):
    with tcp_world(3, transport=transport) as world:
        world[1].send(b"", 0, 9)
        world[0].send(b"", 1, 9)
        waiting = [
            Running(world[0].recv, 1),
            Running(world[2].recv, 1),
            Running(world[0].barrier),
            Running(world[2].barrier),
        ]
        for rank in (0, 2):
            eventually(lambda rank=rank: wanted(world[rank], 1) >= 1 and in_a_barrier(world[rank]))
        world[1].close()
        for thread in waiting:
            error = thread.error()
            assert isinstance(error, ChannelClosedError), error
            assert error.peer == 1
        for rank in (0, 2):
            with pytest.raises(ChannelClosedError):
                world[rank].send(b"x", 1)
        world[0].send(b"others go on", 2)
        assert world[2].recv(0) == b"others go on"


def test_one_who_leaves_without_having_read_is_still_said_to_have_left(pair):
    """Closing a socket with unread bytes resets it; that must not look like a death."""
    pair[0].send(bytes(10_000), 1)
    pair[0].send(bytes(10_000), 1)
    eventually(lambda: pair[1].mesh.peers[0].inbox.connection is not None)
    pair[1].close()
    with pytest.raises(ChannelClosedError):  # noqa: PT012
        for _ in range(1000):
            pair[0].send(b"x", 1)
            time.sleep(0.001)


def test_one_who_dials_while_the_peer_leaves_sees_it_leave(pair):
    """Between the farewell to those it knew and the end of its door."""
    leave, errors = pair[1].mesh.formation.close, []

    def leave_after_a_late_visitor():
        try:
            pair[0].send(b"hello?", 1, timeout=PATIENCE)
        except RankwireError as error:
            errors.append(error)
        leave()

    pair[1].mesh.formation.close = leave_after_a_late_visitor
    pair[1].close()
    while not errors:
        try:
            pair[0].send(b"x", 1, timeout=PATIENCE)
        except RankwireError as error:
            errors.append(error)
    assert [type(error) for error in errors] == [ChannelClosedError]


# -- a world of one


def test_a_world_of_one_needs_no_peer():
    with TcpBackend(0, 1, "127.0.0.1:0") as alone:
        alone.barrier(timeout=0.0)
        with pytest.raises(SelfSendError):
            alone.send(b"x", 0)
        with pytest.raises(InvalidRankError):
            alone.recv(1)


def test_a_world_of_one_opens_no_socket_thread_or_file(folder):
    before = {*os.listdir("/proc/self/fd")}, threading.active_count()
    with TcpBackend(0, 1, "127.0.0.1:0"):
        assert ({*os.listdir("/proc/self/fd")}, threading.active_count()) == before
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_world_of_one_is_closed_like_any_other():
    alone = TcpBackend(0, 1, "127.0.0.1:0")
    alone.close()
    alone.close()
    assert alone.closed
    with pytest.raises(ChannelClosedError):
        alone.barrier()
