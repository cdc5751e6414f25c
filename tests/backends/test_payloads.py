"""Arrays as messages: ``send_array``, ``recv_array`` and ``sendrecv`` on every backend.

And what becomes of a payload that is still with its sender: it is read once and given back, also
when nothing can be made of it.
"""

import contextlib
import ctypes
import struct
import time
import tracemalloc
from functools import partial

import numpy as np
import pytest

from rankwire.backends.payloads import read_array, share_memory
from rankwire.deadline import AT_ONCE
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidMessageError,
    InvalidRankError,
    MessageTooLargeError,
    PeerLostError,
    SelfSendError,
    UnsupportedTypeError,
)
from rankwire.links.memory import allocate
from rankwire.links.receive_handle import ReceiveHandle
from rankwire.testing import simulated_world, tcp_world
from rankwire.testing.ranks import sub_world
from rankwire.wire.array_messages import pack_array
from rankwire.wire.frames import UnreadPayload
from rankwire.wire.receive import MessageWithdrawnError, copy_payload
from worlds import PATIENCE, Running, eventually

WORLDS = {
    "simulated": simulated_world,
    "auto": tcp_world,
    "stream": partial(tcp_world, single_copy=False),
    "tcp": partial(tcp_world, transport="tcp"),
    "sub of simulated": sub_world(simulated_world),
    "sub of tcp": sub_world(tcp_world),
}
SOON = 8.0  # seconds for what takes milliseconds, on a machine that is busy with other things


@pytest.fixture(params=WORLDS)
def make_world(request):
    return partial(WORLDS[request.param], timeout=PATIENCE)


@pytest.fixture
def pair(make_world):
    with make_world(2) as world:
        yield world


@pytest.fixture
def lending():
    """Two ranks that read large messages out of each other's memory."""
    with tcp_world(2, timeout=PATIENCE) as world:
        if not world[0].link_to(1).single_copy:
            pytest.skip(world[0].link_to(1).reason)
        yield world


def passed_on(pair, array, **options):
    """Send an array from rank 0 to rank 1; return what arrives."""
    sending = Running(pair[0].send_array, array, 1)
    received = pair[1].recv_array(0, **options)
    sending.result()
    return received


def assert_same(array, other):
    assert type(other) is np.ndarray
    assert other.dtype.str == array.dtype.str
    assert other.shape == array.shape
    assert other.tobytes() == array.tobytes()


def numbered(shape, dtype="<f4", order="C"):
    count = int(np.prod(shape, dtype=int))
    return np.array(np.arange(count).reshape(shape), dtype=dtype, order=order)


def with_gaps(array):
    """Return an equal array that is every second element of a larger one."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


SMALL = {
    "0-d": np.array(3.5),
    "0-d of text": np.array("text"),
    "empty": np.zeros(0, "<i4"),
    "empty in the middle": np.zeros((3, 0, 2), ">f8"),
    "C": numbered((3, 4, 5)),
    "F": numbered((3, 4, 5), order="F"),
    "gaps": with_gaps(numbered((3, 4))),
    "backwards": numbered(7)[::-1],
    "big-endian": numbered((2, 3), ">i8"),
    "bools": np.array([[True, False], [False, True]]),
    "half": numbered(5, "<f2"),
    "complex": numbered((2, 2), "<c16"),
    "bytes": np.array([b"ab", b"c"], "S3"),
    "text": np.array(["ab", "c"], ">U3"),
    "times": np.array(["2026-11-15", "NaT"], "<M8[D]"),
    "spans": np.array([1, -2], ">m8[ns]"),
    "8 dimensions": numbered((1, 2, 1, 2, 1, 2, 1, 2), "<u2"),
}
LARGE = {
    "C": numbered((512, 700)),
    "F": numbered((512, 700), order="F"),
    "gaps": with_gaps(numbered((512, 300), "<i8")),
    "backwards": numbered(200_000, "<f8")[::-1],
    "big-endian": numbered((3, 300, 100), ">f8"),
    "bools": numbered((600, 600)) % 3 == 0,
    "bytes": np.arange(1 << 20).astype(np.uint8),
}


# -- out and back in


def test_an_array_arrives_as_it_was_sent(pair):
    for array in (*SMALL.values(), *LARGE.values()):
        received = passed_on(pair, array)
        assert_same(array, received)
        assert received.flags.writeable


@pytest.mark.parametrize("layout", ["C", "F", "gaps", "backwards"])
def test_an_array_arrives_in_one_that_is_there_already_however_that_lies(pair, layout):
    for array in (*SMALL.values(), *LARGE.values()):
        out = np.zeros(array.shape, array.dtype, order="F" if layout == "F" else "C")
        if array.ndim and layout in ("gaps", "backwards"):
            out = with_gaps(out) if layout == "gaps" else out[::-1]
        assert passed_on(pair, array, out=out) is out
        assert_same(array, out)


def test_an_array_arrives_in_a_part_of_another_one_and_the_rest_stays(pair):
    for size in (10, 1000):
        array, whole = numbered((size, size)), np.full((size, 3 * size), -1, "<f4")
        passed_on(pair, array, out=whole[:, size : 2 * size])
        assert (whole[:, size : 2 * size] == array).all()
        assert (whole[:, :size] == -1).all()
        assert (whole[:, 2 * size :] == -1).all()


def test_an_array_arrives_in_a_file(pair, tmp_path):
    for size in (10, 1000):
        mapped = np.memmap(tmp_path / str(size), "<f4", "w+", shape=(size, size))
        assert passed_on(pair, numbered((size, size)), out=mapped) is mapped
        assert (mapped == numbered((size, size))).all()


def test_the_sender_may_change_it_afterwards(pair):
    for size in (10, 1000):
        array = numbered((size, size))
        sending = Running(pair[0].send_array, array, 1)
        received = pair[1].recv_array(0)
        sending.result()
        array[...] = -1
        assert (received == numbered((size, size))).all()


def test_arrays_keep_their_order_and_their_tags(pair):
    def send():
        for number in range(6):
            pair[0].send_array(numbered(number * 50_000, "<i4") + number, 1, tag=number % 2)

    sending = Running(send)
    for number in (0, 2, 4, 1, 3, 5):
        received = pair[1].recv_array(0, tag=number % 2)
        assert (received == numbered(number * 50_000, "<i4") + number).all()
    sending.result()


def test_the_bytes_of_an_array_can_be_received_as_a_message(pair):
    for size in (10, 100_000):
        array = numbered(size)
        sending = Running(pair[0].send_array, array, 1)
        assert pair[1].recv(0) == b"".join(map(bytes, pack_array(array)[0]))
        sending.result()


def test_a_lent_array_is_copied_once_straight_to_where_it_belongs(lending):
    array, out = numbered(4 << 20), np.zeros(4 << 20, "<f4")
    passed_on(lending, array[:10])  # connected
    tracemalloc.start()
    try:
        passed_on(lending, array, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, "there was another copy"
    assert (out == array).all()


# -- what does not fit


def wrong_outs(array):
    read_only = np.zeros_like(array)
    read_only.flags.writeable = False
    return {
        "dtype": np.zeros(array.shape, "<f8"),
        "byte order": np.zeros(array.shape, ">f4"),
        "same size": np.zeros(array.shape, "<i4"),
        "shape": np.zeros((*array.shape, 1), "<f4"),
        "length": np.zeros(array.size + 1, "<f4"),
        "read-only": read_only,
        "list": [0.0] * 3,
        "bytearray": bytearray(array.nbytes),
    }


def content(out):
    return bytes(out) if isinstance(out, bytearray) else np.array(out).tobytes()


@pytest.mark.parametrize("size", [6, 300_000])
def test_an_out_that_does_not_fit_is_refused_and_the_message_dropped(pair, size):
    array = numbered(size)
    for wrong, out in wrong_outs(array).items():
        before = content(out)
        sending = Running(pair[0].send_array, array, 1)
        with pytest.raises(ConfigurationError, match="out") as caught:
            pair[1].recv_array(0, out=out)
        assert (caught.value.op, caught.value.peer) == ("recv_array", 0)
        sending.result(SOON)  # nobody will read it any more
        assert content(out) == before, wrong
        assert_same(array + 1, passed_on(pair, array + 1))


@pytest.mark.parametrize("size", [600, 1 << 20])
def test_a_plain_message_is_no_array_and_its_sender_is_not_left_waiting(pair, size):
    for message in (b"\xff" * size, bytes(size), b"", b"abc"):
        for out in (None, np.zeros(size // 4, "<f4")):
            sending = Running(pair[0].send, message, 1)
            with pytest.raises(InvalidMessageError) as caught:
                pair[1].recv_array(0, out=out)
            assert (caught.value.op, caught.value.rank) == ("recv_array", 1)
            assert caught.value.peer == 0
            sending.result(SOON)
            assert_same(numbered(5), passed_on(pair, numbered(5)))


@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
def test_bytes_that_are_no_values_of_the_dtype_never_reach_an_array(pair, into):
    """A bool that is 2 makes C++ misbehave much later, far from here."""
    for size in (2, 1 << 20):
        (head, _), _ = pack_array(np.zeros(size, bool))
        sending = Running(pair[0].send, [head, b"\2" * size], 1)
        with pytest.raises(InvalidMessageError):
            pair[1].recv_array(0, out=np.zeros(size, bool) if into else None)
        sending.result(SOON)


def test_what_is_no_array_is_refused_before_anything_is_sent(pair):
    for value in ([1, 2], "text", None, 3, np.array([None]), np.zeros(2, "i4,f8")):
        for operation in ("send_array", "sendrecv"):
            with pytest.raises(UnsupportedTypeError) as caught:
                getattr(pair[0], operation)(value, 1, timeout=1.0)
            assert (caught.value.op, caught.value.rank) == (operation, 0)
    with pytest.raises(DeadlineExceededError):
        pair[1].recv(0, timeout=0.05)


def test_what_is_no_array_is_refused_also_with_an_out(pair):
    for value in ([1.0, 2.0], None):
        with pytest.raises(UnsupportedTypeError):
            pair[0].sendrecv(value, 1, out=np.zeros(2), timeout=1.0)


def test_what_is_no_out_is_refused_by_an_exchange_too(pair):
    answering = Running(pair[1].sendrecv, numbered(2), 0, timeout=0.2)
    with pytest.raises(ConfigurationError, match="out"):
        pair[0].sendrecv(numbered(2), 1, out=[1.0, 2.0], timeout=1.0)
    with contextlib.suppress(DeadlineExceededError):
        answering.result()


def test_an_array_above_the_limit_is_refused_before_its_first_byte(make_world):
    with make_world(2, max_message_nbytes=1 << 20) as pair:
        for operation in ("send_array", "sendrecv"):
            with pytest.raises(MessageTooLargeError):
                getattr(pair[0], operation)(np.zeros(1 << 20, np.uint8), 1, timeout=1.0)
        assert_same(numbered(200_000), passed_on(pair, numbered(200_000)))


def test_ranks_and_limits_are_checked(pair):
    array = np.zeros(3)
    for call in (
        lambda rank: pair[0].send_array(array, rank),
        lambda rank: pair[0].recv_array(rank),
        lambda rank: pair[0].sendrecv(array, rank),
        lambda rank: pair[0].sendrecv(array, 1, rank),
    ):
        with pytest.raises(SelfSendError):
            call(0)
        with pytest.raises(InvalidRankError):
            call(2)
    with pytest.raises(ConfigurationError, match="tag"):
        pair[0].send_array(array, 1, tag=-1)


@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_receiving_an_array_keeps_its_limit(pair, limit):
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        pair[1].recv_array(0, 7, timeout=limit)
    assert limit <= time.monotonic() - began < limit + SOON
    assert (caught.value.limit, caught.value.op) == (limit, "recv_array")
    assert (caught.value.peer, caught.value.tag) == (0, 7)
    assert_same(numbered(5), passed_on(pair, numbered(5)))


# -- sending and receiving at once


def exchange(world, call):
    """Run ``call(rank)`` as every rank at once; return what each gave."""
    return [each.result() for each in [Running(call, rank) for rank in range(len(world))]]


def test_two_ranks_exchange_arrays_of_all_kinds(pair):
    for size in (0, 10, 100_000, 2 << 20):
        arrays = [numbered(size, "<f4"), numbered((2, size), ">i8", order="F")]
        got = exchange(pair, lambda rank, a=arrays: pair[rank].sendrecv(a[rank], 1 - rank, tag=4))
        assert_same(arrays[1], got[0])
        assert_same(arrays[0], got[1])


def test_arrays_go_round_in_a_circle(make_world):
    with make_world(3) as world:

        def turn(rank, size):
            array = numbered(size) + rank
            return world[rank].sendrecv(array, (rank + 1) % 3, (rank - 1) % 3)

        for size in (10, 300_000, 10, 300_000):
            got = exchange(world, lambda rank, size=size: turn(rank, size))
            for rank in range(3):
                assert_same(numbered(size) + (rank - 1) % 3, got[rank])


@pytest.mark.parametrize("size", [10, 300_000])
def test_arrays_are_exchanged_in_place(pair, size):
    def swap(rank, overlap):
        memory = np.full(size + 1, rank, "<f4")
        array = memory[:size]
        out = {
            "same": array,
            "view": array[...],
            "shifted": memory[1:],
            "other": np.zeros(size, "<f4"),
        }[overlap]
        assert pair[rank].sendrecv(array, 1 - rank, out=out) is out
        return out

    for overlap in ("same", "view", "shifted", "other"):
        got = exchange(pair, lambda rank, overlap=overlap: swap(rank, overlap))
        assert (got[0] == 1).all()
        assert (got[1] == 0).all()


def test_an_array_in_fortran_order_is_exchanged_in_place(pair):
    for size in (3, 600):
        arrays = [numbered((size, size), order="F") + rank for rank in (0, 1)]
        exchange(pair, lambda rank, a=arrays: pair[rank].sendrecv(a[rank], 1 - rank, out=a[rank]))
        assert_same(numbered((size, size)) + 1, np.ascontiguousarray(arrays[0]))
        assert_same(numbered((size, size)), np.ascontiguousarray(arrays[1]))


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_exchange_with_a_rank_that_does_nothing_ends_in_time_and_leaves_the_link_usable(
    pair, size
):
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        pair[0].sendrecv(numbered(size), 1, timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 0.2 + SOON
    assert (caught.value.limit, caught.value.op, caught.value.waiting_for) == (0.2, "sendrecv", [1])
    with contextlib.suppress(DeadlineExceededError):  # a small one had left already
        assert_same(numbered(size), pair[1].recv_array(0, timeout=0.1))
    assert_same(numbered(size) + 7, passed_on(pair, numbered(size) + 7))


def test_an_exchange_that_was_withdrawn_is_not_received(lending):
    with pytest.raises(DeadlineExceededError):
        lending[0].sendrecv(numbered(300_000), 1, timeout=0.1)
    with pytest.raises(DeadlineExceededError):
        lending[1].recv_array(0, timeout=0.1)


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_exchange_with_an_out_that_does_not_fit_leaves_the_link_usable(pair, size):
    def swap(rank):
        out = np.zeros(size + 1 - rank, "<f4")
        return pair[rank].sendrecv(numbered(size) + rank, 1 - rank, out=out, timeout=1.5)

    running = [Running(swap, rank) for rank in (0, 1)]
    assert isinstance(running[0].error(), ConfigurationError)
    with contextlib.suppress(DeadlineExceededError):  # what was lent may have been taken back
        assert_same(numbered(size), running[1].result())
    assert_same(numbered(size) + 7, passed_on(pair, numbered(size) + 7))


@pytest.mark.parametrize("ending", [None, RuntimeError("it fell")])
def test_an_exchange_ends_when_the_rank_that_was_to_take_the_array_goes(ending):
    """Also while it waits for another rank: that one sends only much later."""
    with tcp_world(3, timeout=PATIENCE) as world:
        if not world[1].link_to(2).single_copy:
            pytest.skip(world[1].link_to(2).reason)
        waiting = Running(world[1].sendrecv, numbered(1 << 20), 2, 0)
        eventually(lambda: world[1].mesh.peers[0].inbox.wanted())
        world[2].close(error=ending)
        gone = time.monotonic()
        error = waiting.error()
        assert isinstance(error, ChannelClosedError if ending is None else PeerLostError)
        assert (error.peer, error.op) == (2, "sendrecv")
        assert waiting.ended - gone < SOON


def test_an_exchange_ends_when_the_rank_that_was_to_send_an_array_goes():
    """Also while it cannot send its own: the one that was to take it reads nothing."""
    with tcp_world(3, transport="tcp", timeout=PATIENCE) as world:
        stuck = Running(world[1].sendrecv, numbered(8 << 20), 2, 0)
        eventually(lambda: world[1].mesh.peers[2].messages is not None)
        world[0].close(error=RuntimeError("it fell"))
        gone = time.monotonic()
        error = stuck.error()
        assert isinstance(error, PeerLostError)
        assert error.peer == 0
        assert stuck.ended - gone < SOON


def test_an_exchange_goes_on_when_the_rank_that_took_the_array_goes(lending):
    """It needs nothing of it any more. What it left is received, too."""
    first = Running(lending[0].sendrecv, numbered(1 << 20), 1)
    assert_same(numbered(1 << 20), lending[1].recv_array(0))
    time.sleep(0.12)  # it has looked up, and seen that
    lending[1].send_array(numbered(3), 0)
    lending[1].close()
    assert_same(numbered(3), first.result())


# -- payloads that are still with their sender


class Lent(UnreadPayload):
    """A payload elsewhere; counts the bytes that are read, and whether it was given back."""

    def __init__(self, data, *, revoked_after=None):
        self.data = bytes(data)
        self.nbytes_read = 0
        self.given_back = 0
        self._revoked_after = revoked_after

    def __len__(self):
        return len(self.data)

    def read_into(self, start, view):
        assert not self.given_back
        assert start + len(view) <= len(self)
        view[:] = self.data[start : start + len(view)]
        self.nbytes_read += len(view)
        if self._revoked_after is not None and self.nbytes_read > self._revoked_after:
            view[:] = b"\xee" * len(view)
            raise MessageWithdrawnError("the sender took the message back")

    def whole(self):
        memory = allocate(len(self))
        self.read_into(0, memoryview(memory))
        self.release()
        return memory

    def release(self):
        self.given_back += 1
        return True


class Arrived(ReceiveHandle):
    """A message that has come."""

    def __init__(self, payload):
        super().__init__()
        self._wait = lambda deadline: payload

    def _wait(self, deadline):
        raise NotImplementedError

    def post(self):
        pass

    def give_up(self):
        pass


def read_and_release(payload, read):
    return Arrived(payload).take_now(AT_ONCE, read)


def to_array(payload, out):
    """Return the array of a message, as ``recv_array`` does."""
    return read_and_release(payload, partial(read_array, out=out))


def array_parcel(array, **options):
    return Lent(b"".join(map(bytes, pack_array(array)[0])), **options)


def test_copying_reads_what_is_asked_for_and_gives_back():
    for payload in (Lent(b"0123456789"), bytearray(b"0123456789")):
        target = bytearray(7)
        read_and_release(payload, partial(copy_payload, view=memoryview(target), start=3))
        assert target == b"3456789"
    parcel = Lent(b"0123456789")
    read_and_release(parcel, partial(copy_payload, view=memoryview(target), start=3))
    assert (parcel.nbytes_read, parcel.given_back) == (7, 1)


def test_the_elements_of_an_array_are_read_once():
    array = numbered((30, 40))
    parcel = array_parcel(array)
    out = np.zeros_like(array)
    assert to_array(parcel, out) is out
    assert_same(array, out)
    assert parcel.given_back
    assert parcel.nbytes_read <= 512 + array.nbytes
    parcel = array_parcel(array)
    assert_same(array, to_array(parcel, None))
    assert parcel.given_back


@pytest.mark.parametrize(
    ("parcel", "out", "error"),
    [
        (array_parcel(np.zeros(9)), np.zeros(8), ConfigurationError),
        (array_parcel(np.zeros(9)), [1, 2], ConfigurationError),
        (Lent(b"x" * 1000), None, InvalidMessageError),
        (Lent(b""), None, InvalidMessageError),
        (Lent(bytes(1000)), np.zeros(3), InvalidMessageError),
        (Lent(b"".join(pack_array(np.zeros(9))[0]) + b"x"), None, InvalidMessageError),
    ],
    ids=["size", "list", "text", "empty", "zeros", "longer"],
)
def test_of_what_no_array_can_be_made_only_the_head_is_read(parcel, out, error):
    with pytest.raises(error):
        to_array(parcel, out)
    assert parcel.nbytes_read <= 512


@pytest.mark.parametrize("after", [0, 100, 600])
def test_what_was_taken_back_meanwhile_is_said_to_be(after):
    array = numbered(1000)
    for out in (None, np.zeros(1000, "<f4"), np.zeros(2000, "<f4")[::2]):
        with pytest.raises(MessageWithdrawnError):
            to_array(array_parcel(array, revoked_after=after), out)


def test_a_head_that_claims_more_than_there_is_reads_no_more_than_there_is():
    message = struct.pack("<BBH", 0, 0, 60_000) + bytes(2000)
    parcel = Lent(message)
    with pytest.raises(InvalidMessageError):
        to_array(parcel, None)
    assert parcel.nbytes_read <= 512


def test_memory_in_common_is_noticed():
    memory = np.zeros(10)
    assert share_memory(memory, memory)
    assert share_memory(memory[2:], memory[:5])
    assert not share_memory(memory, np.zeros(10))


# -- what has a mask -------------------------------------------------------------------------------

MASKED = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])


@pytest.mark.parametrize(
    "send",
    [
        lambda backend: backend.send(MASKED, 1),
        lambda backend: backend.send([b"x", MASKED], 1),
        lambda backend: backend.isend(MASKED, 1),
        lambda backend: backend.recv_into(MASKED, 1),
        lambda backend: backend.send_array(MASKED, 1),
        lambda backend: backend.isend_array(MASKED, 1),
        lambda backend: backend.sendrecv(MASKED, 1, 1),
        lambda backend: backend.sendrecv(np.zeros(3), 1, 1, out=MASKED),
        lambda backend: backend.recv_array(1, out=MASKED),
        lambda backend: backend.irecv_array(1, out=MASKED),
    ],
)
def test_an_array_with_a_mask_is_refused_before_anything_moves(send):
    with simulated_world(2, timeout=PATIENCE) as (first, _second):
        with pytest.raises((ConfigurationError, UnsupportedTypeError), match=r"mask"):
            send(first)


# -- what holds references -------------------------------------------------------------------------

OBJECTS = {
    "objects": np.array([None, {"b": 1}, [3]], dtype=object),
    "record": np.zeros(3, dtype=[("thing", object), ("number", "d")]),
    "view": memoryview(np.array([None, None, None], dtype=object)),
    "py_object": (ctypes.py_object * 3)(1, 2, 3),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_buffer_that_holds_references_is_neither_sent_nor_received_into(pair, name):
    buffer = OBJECTS[name]
    before = bytes(memoryview(buffer).cast("B"))
    with pytest.raises(ConfigurationError, match="references"):
        pair[0].send(buffer, 1)
    with pytest.raises(ConfigurationError, match="references"):
        pair[0].send([b"first", buffer], 1)
    message = b"\x41" * len(before)
    pair[0].send(message, 1)  # it is the first one: nothing has travelled before
    with pytest.raises(ConfigurationError, match="references"):
        pair[1].recv_into(buffer, 0)
    assert bytes(memoryview(buffer).cast("B")) == before
    assert pair[1].recv(0) == message


@pytest.mark.parametrize("name", ["objects", "record"])
def test_an_array_of_objects_is_neither_sent_nor_received_into(pair, name):
    array = OBJECTS[name]
    for send in (pair[0].send_array, pair[0].sendrecv):
        with pytest.raises(UnsupportedTypeError, match="not carried"):
            send(array, 1)
    numbers = np.arange(3.0)
    with pytest.raises(ConfigurationError, match="not carried"):
        pair[0].sendrecv(numbers, 1, out=array)
    pair[0].send_array(numbers, 1)  # likewise
    with pytest.raises(ConfigurationError, match="not carried"):
        pair[1].recv_array(0, out=array)
    assert_same(numbers, pair[1].recv_array(0))
