"""Single copy: what is read out of another process is the payload, or is said not to be."""

import array
import contextlib
import errno
import gc
import mmap
import os
import random
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interrupts import Interrupt, every_interrupt
from rankwire.clock import REAL_TIME
from rankwire.errors import DeadlineExceededError, PeerLostError, ProtocolError
from rankwire.links import borrower
from rankwire.links import lender as lender_module
from rankwire.links import memory as process_memory
from rankwire.links.borrower import Borrowed
from rankwire.links.lender import lend
from rankwire.links.memory import probe
from rankwire.links.send_handle import SendHandle
from rankwire.transports import stream_of
from rankwire.wire.loans import MAX_PIECES, LoanRefusedError, unpack_loan
from rankwire.wire.receive import MessageWithdrawnError
from real_time import Deadline
from worlds import PATIENCE, Running, spawn_ranks

MIB = 1 << 20
SOON = 8.0  # seconds for what takes milliseconds, on a machine that is busy with other things


class Loaned:
    """Memory of this process that is lent, and the borrower's parcel of it in this process.

    ``failures`` has what the borrower reported about its connection.
    """

    def __init__(self, *buffers):
        self.nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self.lent, self.description = lend(list(buffers), self.nbytes)
        self.failures = []
        self.parcel = self.borrowed()

    def borrowed(self):
        return borrow(self.description, os.getpid(), self.failures)


def borrow(description, pid, failures):
    loan = unpack_loan(bytearray(description), max_nbytes=1 << 30)

    def fail(cause):
        failures.append(cause)
        return cause.copy()

    return Borrowed(loan, pid, 1, REAL_TIME, fail)


def read(parcel, start=0, nbytes=None):
    """Return some bytes of a parcel."""
    memory = bytearray(len(parcel) - start if nbytes is None else nbytes)
    parcel.read_into(start, memoryview(memory))
    return memory


def no_end():
    """The connection stands."""


def handle_of(lent, look_for_end=no_end, meanwhile=None, peer=1):
    """Return the handle of a loan on a connection that cannot send it by stream."""

    def enqueue(*_):
        raise LoanRefusedError("there is no stream")

    outbox = SimpleNamespace(enqueue=enqueue, withdraw=lambda _: True)
    connection = SimpleNamespace(
        peer=peer, look_for_end=look_for_end, outbox=outbox, at_once=Deadline(0.0)
    )
    return SendHandle(connection, lent, (0, 0, 0), ((), 0), meanwhile)


def settle(lent, timeout=PATIENCE, *, look_for_end=no_end, meanwhile=None):
    handle_of(lent, look_for_end, meanwhile).settle(Deadline(timeout))


def pattern(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


# -- one loan


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4095, 4096, 4097, 3 * MIB + 5])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.array])
def test_what_is_borrowed_is_what_was_lent(nbytes, kind):
    data = pattern(nbytes)
    buffer = np.frombuffer(bytearray(data), np.uint8).data if kind is np.array else kind(data)
    loaned = Loaned(buffer)
    assert len(loaned.parcel) == nbytes
    assert read(loaned.parcel) == data
    whole = loaned.parcel.whole()
    assert type(whole) is bytearray
    assert whole == data
    assert not loaned.failures


def test_words_stay_where_they_are_when_all_loans_around_them_were_revoked():
    """A late look at the guard must find it, or its owner would be taken for dead."""
    loans = [lend([b"x"], 1) for _ in range(3 * lender_module._ARENA_NBYTES // 16)]
    failures = []
    parcels = [borrow(description, os.getpid(), failures) for _, description in loans]
    for lent, _ in loans:
        lent.revoke()
    del loans, lent
    gc.collect()
    assert all(parcel.is_revoked for parcel in parcels)
    with pytest.raises(MessageWithdrawnError):
        parcels[0].whole()
    assert not failures


def test_pieces_of_all_sizes_come_as_one_and_empty_ones_do_not_matter():
    pieces = [pattern(size, size) for size in (0, 1, 0, 5000, 3, 0, 4096, 0)]
    loaned = Loaned(*pieces)
    assert loaned.parcel.whole() == b"".join(pieces)


def test_a_buffer_of_numbers_is_lent_whole():
    for code in "bhilqfd":
        numbers = array.array(code, range(100))
        loaned = Loaned(memoryview(numbers), b"and more")
        assert loaned.parcel.whole() == numbers.tobytes() + b"and more"


@pytest.mark.parametrize(("count", "is_lent"), [(1, True), (512, True), (513, False), (0, False)])
def test_what_is_in_too_many_pieces_is_not_lent(count, is_lent):
    pieces = [bytes([n % 256]) * 10 for n in range(count)]
    loan = lend([*pieces, b""], 10 * count)
    assert MAX_PIECES == 512
    assert (loan is not None) is is_lent
    if loan is not None:
        assert borrow(loan[1], os.getpid(), []).whole() == b"".join(pieces)


SIZES = st.lists(st.sampled_from([1, 2, 7, 8, 100, 4096, 5000]), min_size=1, max_size=8)


@given(sizes=SIZES, data=st.data())
def test_any_part_can_be_read_wherever_the_pieces_are_cut(sizes, data):
    pieces = [pattern(size, index) for index, size in enumerate(sizes)]
    whole = b"".join(pieces)
    loaned = Loaned(*pieces)
    for _ in range(3):
        start = data.draw(st.integers(0, len(whole)))
        nbytes = data.draw(st.integers(0, len(whole) - start))
        assert read(loaned.parcel, start, nbytes) == whole[start : start + nbytes]
    loaned.parcel.release()
    settle(loaned.lent)


@given(sizes=SIZES, most=st.sampled_from([8, 9, 15, 100, 4096, 4104]), data=st.data())
def test_a_kernel_that_copies_only_so_much_at_once_changes_nothing(sizes, most, data):
    # The real one stops at 2 GiB.
    sizes = sizes if most > 15 else [min(size, 20) for size in sizes]
    pieces = [pattern(size, index) for index, size in enumerate(sizes)]
    whole = b"".join(pieces)
    loaned = Loaned(*pieces)
    start = data.draw(st.integers(0, len(whole) - 1))
    transfer = borrower.transfer

    def transfer_little(call, pid, here, there):
        return transfer(call, pid, shortened(here, most), shortened(there, most))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(borrower, "transfer", transfer_little)
        assert read(loaned.parcel, start) == whole[start:]
        assert loaned.parcel.whole() == whole
    assert loaned.lent.is_settled


def shortened(vectors, most):
    """Return the beginning of vectors of (address, length); the last one, a word, is not cut."""
    short = []
    for address, length in vectors[:-1]:
        taken = min(length, most)
        most -= taken
        short.append((address, taken))
    return short if most < 8 else [*short, vectors[-1]]


def test_the_parts_that_a_reader_asks_for_are_the_only_ones_it_writes():
    loaned = Loaned(pattern(1000))
    memory = bytearray(b"." * 3000)
    loaned.parcel.read_into(100, memoryview(memory)[1000:1500])
    assert memory[1000:1500] == pattern(1000)[100:600]
    assert memory[:1000] == memory[1500:][:1000] == b"." * 1000


def test_the_lender_keeps_the_memory_alive():
    loaned = Loaned(bytearray(pattern(8 * MIB)))  # nobody else has it
    rubbish = [bytearray(b"\xee" * (8 * MIB)) for _ in range(3)]
    assert loaned.parcel.whole() == pattern(8 * MIB)
    assert rubbish


def test_a_parcel_says_what_it_is():
    loaned = Loaned(b"abc")
    assert repr(loaned.parcel) == "<Borrowed 3 bytes of rank 1, lent>"
    loaned.parcel.release()
    assert repr(loaned.parcel) == "<Borrowed 3 bytes of rank 1, given back>"
    loaned = Loaned(b"abcd")
    loaned.lent.revoke()
    with pytest.raises(MessageWithdrawnError):
        loaned.parcel.whole()
    assert repr(loaned.parcel) == "<Borrowed 4 bytes of rank 1, revoked>"


# -- receipts


def test_reading_is_no_receipt_but_giving_back_is():
    loaned = Loaned(b"abc")
    assert read(loaned.parcel) == b"abc"
    assert not loaned.lent.is_settled
    for _ in range(2):
        loaned.parcel.release()
        assert loaned.lent.is_settled
    settle(loaned.lent, 0.0)


@pytest.mark.parametrize("how", ["whole", "release"])
def test_a_parcel_is_given_back_by(how):
    loaned = Loaned(b"abc")
    getattr(loaned.parcel, how)()
    assert loaned.lent.is_settled


def test_what_was_given_back_unread_cannot_be_read_any_more():
    loaned = Loaned(b"abc")
    loaned.parcel.release()
    with pytest.raises(ProtocolError, match="given back"):
        read(loaned.parcel)
    with pytest.raises(ProtocolError, match="given back"):
        loaned.parcel.whole()
    assert not loaned.failures


# -- revoking


def test_a_revoked_loan_cannot_be_read_from_then_on():
    memory = bytearray(b"before")
    loaned = Loaned(memory)
    assert read(loaned.parcel, 0, 3) == b"bef"
    for _ in range(2):
        loaned.lent.revoke()
    memory[:] = b"after!"
    for take in (lambda: read(loaned.parcel), loaned.parcel.whole, lambda: read(loaned.parcel, 5)):
        with pytest.raises(MessageWithdrawnError):
            take()
    loaned.parcel.release()
    assert not loaned.lent.is_settled, "a receipt for what was never read"
    assert not loaned.failures, "the connection has nothing to do with it"


@pytest.mark.parametrize("first_read", [False, True])
def test_a_loan_that_was_revoked_and_unmapped_is_revoked_and_nothing_worse(first_read):
    memory = mmap.mmap(-1, 4 * MIB)
    memory[:] = b"x" * len(memory)
    view = memoryview(memory)
    loaned = Loaned(view)
    if first_read:
        assert read(loaned.parcel, 0, 5) == b"xxxxx"
    loaned.lent.revoke()
    view.release()
    memory.close()
    with pytest.raises(MessageWithdrawnError):
        read(loaned.parcel)
    assert not loaned.failures


def test_memory_that_cannot_be_read_although_it_is_lent_is_refused():
    good = bytearray(5000)
    loaned = Loaned(good)
    address = process_memory.address_of(good)
    for pieces in ([(8, 5000)], [(address, 2000), (8, 3000)]):
        failures = []
        parcel = Borrowed(
            parse(loaned.description)._replace(pieces=pieces),
            os.getpid(),
            7,
            REAL_TIME,
            reported(failures),
        )
        with pytest.raises(MessageWithdrawnError):
            parcel.whole()
        assert not failures
    assert not loaned.lent.is_settled
    with pytest.raises(LoanRefusedError):
        settle(loaned.lent)


def parse(description):
    return unpack_loan(bytearray(description), max_nbytes=1 << 30)


def reported(failures):
    return lambda cause: failures.append(cause) or cause


def test_a_process_that_is_gone_is_a_lost_peer():
    with spawn_ranks(1) as (rank,):
        rank.kill()
    failures = []
    loaned = Loaned(b"abc")
    parcel = borrow(loaned.description, rank.pid, failures)
    with pytest.raises(PeerLostError, match="No such process"):
        read(parcel)
    assert [failure.peer for failure in failures] == [1]
    parcel.release()  # there is nobody to give it to


def test_what_was_scribbled_on_after_a_revoke_never_surfaces():
    """One thread lends, revokes and scribbles, the other reads all the time."""
    memory = np.zeros(2 * MIB, np.uint8)
    shelf, done, chance = [], threading.Event(), random.Random(1)
    reads = revoked = 0

    def lend_and_scribble():
        number = 0
        while not done.is_set():
            number = number % 200 + 1
            memory[:] = number
            loaned = Loaned(memory.data)
            shelf.append((number, loaned.parcel))
            time.sleep(chance.uniform(0, 0.003))
            loaned.lent.revoke()
            memory[:] = 255
            while shelf and not done.is_set():
                time.sleep(0.0001)

    lender = Running(lend_and_scribble)
    enough, give_up = time.monotonic() + 0.7, time.monotonic() + PATIENCE
    target = np.zeros(2 * MIB, np.uint8)
    while time.monotonic() < enough or (
        (reads <= 20 or revoked <= 20) and time.monotonic() < give_up
    ):
        if not shelf:
            time.sleep(0.0001)
            continue
        number, parcel = shelf[0]
        try:
            parcel.read_into(0, target.data)
        except MessageWithdrawnError:
            revoked += 1
            shelf.pop()
        else:
            reads += 1
            assert (target == number).all(), "scribbles were taken for the payload"
    done.set()
    lender.result()
    assert reads > 20
    assert revoked > 20


# -- the words


def test_the_words_of_a_settled_loan_are_used_again():
    addresses = set()
    for _ in range(10_000):
        loaned = Loaned(b"abc")
        loaned.parcel.release()
        settle(loaned.lent, 0.0)
        addresses.add(loaned.lent.address)
    assert len(addresses) < 10


def test_the_words_of_a_loan_revoked_without_a_receipt_are_never_used_again():
    revoked = [Loaned(b"abc") for _ in range(100)]
    for loaned in revoked:
        loaned.lent.revoke()
    words = {loaned.lent.address for loaned in revoked}
    others = [Loaned(b"def") for _ in range(6000)]  # more than one arena
    assert len({loaned.lent.address for loaned in others}) == 6000
    assert not words & {loaned.lent.address for loaned in others}
    for loaned in revoked:
        with pytest.raises(MessageWithdrawnError):
            loaned.parcel.release()  # it had read everything when the loan was revoked
    assert not any(loaned.lent.is_settled for loaned in others)
    assert {bytes(loaned.parcel.whole()) for loaned in others} == {b"def"}
    for loaned in others:
        settle(loaned.lent, 0.0)


def test_a_loan_that_was_settled_and_then_revoked_frees_its_words_once():
    loaned = Loaned(b"abc")
    loaned.parcel.release()
    for _ in range(3):
        loaned.lent.revoke()
    others = [Loaned(b"def") for _ in range(3)]
    assert len({other.lent.address for other in others}) == 3


def test_numbers_are_unique_among_threads():
    numbers, lock = [], threading.Lock()

    def work():
        mine = [Loaned(b"x").lent.number for _ in range(500)]
        with lock:
            numbers.extend(mine)

    for thread in [Running(work) for _ in range(4)]:
        thread.result()
    assert len(set(numbers)) == 2000
    assert 0 not in numbers


# -- waiting for the receipt


class Watched:
    """A ``Meanwhile`` that counts."""

    def __init__(self, descriptors=(), on_read=None):
        self.descriptors = [stream_of(sock) for sock in descriptors]
        self.reads = []
        self.watched = 0
        self._on_read = on_read

    def watch(self):
        self.watched += 1
        return self.descriptors

    def read(self):
        self.reads.append(time.monotonic())
        if self._on_read is not None:
            self._on_read()


def test_a_lender_waits_until_the_memory_was_read():
    loaned = Loaned(b"abc")
    waiting = Running(settle, loaned.lent)
    time.sleep(0.05)
    assert not waiting.done
    loaned.parcel.whole()
    waiting.result(SOON)


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.125])
@pytest.mark.parametrize("reads", [False, True])
def test_a_deadline_revokes_and_is_kept_and_reported_exactly(limit, reads):
    loaned = Loaned(b"abc")
    deadline = Deadline(limit)
    with pytest.raises(DeadlineExceededError, match="does not take the message") as caught:
        handle_of(loaned.lent, no_end, Watched() if reads else None, 7).settle(deadline)
    assert limit <= deadline.waited < limit + SOON
    assert (caught.value.limit, caught.value.waiting_for) == (limit, [7])
    with pytest.raises(MessageWithdrawnError):
        loaned.parcel.whole()


def test_waiting_without_settling_leaves_the_loan_as_it_is_at_the_deadline():
    loaned = Loaned(b"abc")
    assert not loaned.lent.wait(Deadline(0.02), no_end, None)
    assert loaned.parcel.whole() == b"abc"
    assert loaned.lent.wait(Deadline(0.0), no_end, None)
    loaned.lent.revoke()


def test_a_lender_learns_of_the_end_of_the_connection_and_revokes():
    loaned = Loaned(b"abc")
    looks = []

    def look_for_end():
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise PeerLostError(1, "its connection ended")

    began = time.monotonic()
    with pytest.raises(PeerLostError):
        settle(loaned.lent, look_for_end=look_for_end)
    assert time.monotonic() - began < SOON
    with pytest.raises(MessageWithdrawnError):
        read(loaned.parcel)


def test_a_lender_that_is_interrupted_revokes():
    loaned = Loaned(b"abc")

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        settle(loaned.lent, meanwhile=Watched(on_read=interrupt))
    with pytest.raises(MessageWithdrawnError):
        read(loaned.parcel)


@pytest.mark.parametrize("ends", ["lost", "deadline"])
def test_a_receipt_at_the_last_moment_counts(ends):
    """The peer read it and left at once: it has the message, so the send has not failed."""
    loaned = Loaned(b"abc")

    def look_for_end():
        loaned.parcel.whole()
        if ends == "lost":
            raise PeerLostError(1, "its connection ended")

    settle(loaned.lent, 0.0 if ends == "deadline" else PATIENCE, look_for_end=look_for_end)


def test_other_work_is_done_only_after_a_while():
    for _ in range(20):  # a busy machine may be late, but not every time
        loaned = Loaned(b"abc")
        loaned.parcel.release()
        meanwhile = Watched()
        settle(loaned.lent, meanwhile=meanwhile)
        assert not meanwhile.reads
    loaned = Loaned(b"abc")
    began = time.monotonic()
    meanwhile = Watched(on_read=lambda: loaned.parcel.release())
    settle(loaned.lent, meanwhile=meanwhile)
    assert meanwhile.reads[0] - began >= 0.001
    assert len(meanwhile.reads) == 1


def test_what_can_be_read_is_read_at_once_while_waiting():
    near, far = socket.socketpair()
    with near, far:
        loaned = Loaned(b"abc")

        def on_read():
            with contextlib.suppress(BlockingIOError):
                if near.recv(1, socket.MSG_DONTWAIT):
                    loaned.parcel.release()

        waiting = Running(settle, loaned.lent, meanwhile=Watched([near], on_read))
        time.sleep(0.02)
        far.send(b"x")
        waiting.result(SOON)


@pytest.mark.parametrize("what", ["nothing", "no descriptors", "a silent one"])
def test_waiting_does_not_eat_the_processor(what):
    near, far = socket.socketpair()
    with near, far:
        meanwhile = {
            "nothing": None,
            "no descriptors": Watched(),
            "a silent one": Watched([near]),
        }[what]
        loaned = Loaned(b"abc")
        before = time.thread_time()
        with pytest.raises(DeadlineExceededError):
            settle(loaned.lent, 0.5, meanwhile=meanwhile)
        assert time.thread_time() - before < 0.2, "it looked all the time"


def test_the_end_of_the_connection_is_looked_for_often_enough_and_not_all_the_time():
    loaned = Loaned(b"abc")
    looks = []
    with pytest.raises(DeadlineExceededError):
        settle(loaned.lent, 0.5, look_for_end=lambda: looks.append(1))
    assert 3 <= len(looks) <= 15


# -- another process


LEND = """
data = bytearray(range(256)) * 5000
lent, description = lend([data], len(data))
"""
LENDER = """
import random, socket, time
import numpy as np
from rankwire.links.lender import lend

def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.recv(1)

def lend_and_scribble(path, seed, rounds):
    memory, chance = np.zeros(4 << 20, np.uint8), random.Random(seed)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        for number in range(rounds):
            memory[:] = number % 200 + 1
            lent, description = lend([memory.data], memory.nbytes)
            sock.sendall(description)
            time.sleep(chance.uniform(0, 0.004))
            lent.revoke()
            memory[:] = 255
            sock.recv(1)
"""


@contextlib.contextmanager
def lender(folder):
    """A process that knows how to lend, and a listener that it can connect to."""
    path = f"{folder}.{os.getpid()}.lender"
    with spawn_ranks(1) as (rank,), socket.socket(socket.AF_UNIX) as listener:
        rank.call("eval", "exec(code, globals())", code=LENDER)
        listener.bind(path)
        listener.listen()
        listener.settimeout(PATIENCE)
        try:
            yield rank, listener, path
        finally:
            os.unlink(path)


def allowed(sock):
    """Return the process at the other end, or skip the test where the kernel says no."""
    pid, reason = probe(stream_of(sock))
    if not pid:
        pytest.skip(reason)
    return pid


@pytest.fixture
def path(own_runtime_folder):
    return own_runtime_folder


def test_the_memory_of_another_process_is_read_and_given_back(path):
    with lender(path) as (rank, listener, where):
        rank.call("eval", "exec(code, globals())", code=LEND)
        connecting = rank.start("eval", f"connect({where!r})")
        sock, _ = listener.accept()
        with sock:
            assert allowed(sock) == rank.pid
            parcel = borrow(rank.call("eval", "description"), rank.pid, [])
            assert not rank.call("eval", "lent.is_settled")
            assert parcel.whole() == bytes(range(256)) * 5000
            assert rank.call("eval", "lent.is_settled")
        connecting.result()


def test_a_process_that_revokes_and_scribbles_is_never_misread(path):
    rounds, reads, revoked = 120, 0, 0
    target = np.zeros(4 * MIB, np.uint8)
    with lender(path) as (rank, listener, where):
        scribbling = rank.start("eval", f"lend_and_scribble({where!r}, 1, {rounds})")
        sock, _ = listener.accept()
        with sock:
            pid = allowed(sock)
            for number in range(rounds):
                parcel = borrow(sock.recv(48, socket.MSG_WAITALL), pid, [])
                try:
                    while True:
                        parcel.read_into(0, target.data)
                        reads += 1
                        assert (target == number % 200 + 1).all()
                except MessageWithdrawnError:
                    revoked += 1
                sock.sendall(b"\0")
        scribbling.result()
    assert reads > 20
    assert revoked == rounds


# -- what the kernel allows


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_the_process_at_the_other_end_is_told_by_the_kernel(pair):
    assert probe(stream_of(pair[0])) == (os.getpid(), "")


def test_a_tcp_socket_has_no_process_at_its_other_end():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as sock:
            assert probe(stream_of(sock)) == (0, "it is not connected by a Unix socket")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ESRCH])
def test_a_refusal_of_the_kernel_is_named(pair, monkeypatch, number):
    monkeypatch.setattr(process_memory, "transfer", lambda *_: (-1, number))
    pid, reason = probe(stream_of(pair[0]))
    assert pid == 0
    assert os.strerror(number) in reason
    assert str(os.getpid()) in reason


def test_a_process_that_may_read_but_not_write_cannot_borrow(pair, monkeypatch):
    transfer = process_memory.transfer

    def transfer_one_way(call, *args):
        is_write = call is process_memory.WRITE
        return (-1, errno.EPERM) if is_write else transfer(call, *args)

    monkeypatch.setattr(process_memory, "transfer", transfer_one_way)
    assert probe(stream_of(pair[0]))[0] == 0
    assert "not permitted" in probe(stream_of(pair[0]))[1]


def test_a_process_of_another_pid_namespace_is_not_visible():
    class Foreign:
        transport = "unix"

        def peer_pid(self):
            return 0

    pid, reason = probe(Foreign())
    assert pid == 0
    assert "pid namespace" in reason


def test_probing_changes_nothing(pair):
    word = process_memory._probe_word.value
    for _ in range(3):
        assert probe(stream_of(pair[0]))[0] == os.getpid()
    assert process_memory._probe_word.value == word


def test_a_lender_gives_up_nothing_when_the_borrower_is_slow():
    loaned = Loaned(pattern(100_000))
    waiting = Running(settle, loaned.lent)
    for start in range(0, 100_000, 10_000):
        assert read(loaned.parcel, start, 10_000) == pattern(100_000)[start : start + 10_000]
        time.sleep(0.002)
        assert not waiting.done
    loaned.parcel.release()
    waiting.result(SOON)


def test_an_interrupt_anywhere_in_making_words_leaves_them_where_they_are():
    def run(interrupting):
        arena = lender_module._Arena()
        with contextlib.suppress(Interrupt), interrupting:
            arena.take()
        _, address = arena.take()
        pages = [process_memory.address_of(page) for page in arena._pages]
        assert any(page <= address < page + lender_module._ARENA_NBYTES for page in pages)

    assert every_interrupt(run) >= 5
