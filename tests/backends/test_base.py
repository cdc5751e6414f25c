"""What every backend does alike: checks, deadlines, and the context in errors."""

import math
from typing import Any

import numpy as np
import pytest

from rankwire.backends.arguments import check_world
from rankwire.backends.base import Backend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MessageTooLargeError,
    PeerLostError,
    SelfSendError,
    SizeMismatchError,
)
from rankwire.mesh.mesh import Mesh
from rankwire.mesh.message_port import MessagePort
from rankwire.observe.status import PeerStatus
from rankwire.wire.frames import DEFAULT_MAX_MESSAGE_NBYTES, WORLD_GROUP, Channel


class PaperInquiries:
    """Knows nothing of other ranks."""

    def silences(self):
        return {}

    def unreceived(self, src, group):
        return {}

    def doing_of(self, rank, deadline):
        return None

    def status_of(self, rank):
        return PeerStatus(rank, "up")


class PaperMessagePort(MessagePort):
    """Writes down what it is asked to send, and receives what it was given."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.sent: list[tuple[Any, ...]] = []
        self.arrived: dict[tuple[int, Channel, int], Any] = {}
        self.limits: list[float] = []

    def transmit(self, dst, envelope, message, deadline):
        self.limits.append(deadline.limit)
        self.sent.append((dst, *envelope, *message))

    def receive(self, src, envelope, deadline, *, nbytes=None):
        _, channel, tag = envelope
        self.limits.append(deadline.limit)
        found = self.arrived.get((src, channel, tag))
        if found is None:
            raise DeadlineExceededError(deadline.limit, waiting_for=[src])
        if isinstance(found, Exception):
            raise found
        if nbytes is not None and len(found) != nbytes:
            raise SizeMismatchError(nbytes, len(found))
        return bytearray(found)


class PaperMesh(Mesh):
    """A rank that is connected to nobody."""

    def __init__(self, rank: int, world_size: int, **options: Any) -> None:
        usual = {"timeout": None, "max_message_nbytes": 1 << 30, "clock": REAL_TIME}
        super().__init__(rank, world_size, **{**usual, **options})
        self.messages = PaperMessagePort(self)
        self.inquiries = PaperInquiries()

    def tell_agent(self, says):
        return False

    def tell_fall(self, fallen):
        pass

    def depart(self):
        pass


class Paper(Backend):
    """A rank of a world on paper."""

    def __init__(self, rank: int = 0, world_size: int = 4, **options: Any) -> None:
        super().__init__(PaperMesh(*check_world(rank, world_size), **options))

    @property
    def sent(self) -> list[tuple[Any, ...]]:
        return self.messages.sent

    @property
    def arrived(self) -> dict[tuple[int, Channel, int], Any]:
        return self.messages.arrived

    @property
    def limits(self) -> list[float]:
        return self.messages.limits

    def give(self, src: int, message: Any, *, tag: int = 0, channel: Channel = Channel.MESSAGE):
        self.arrived[src, channel, tag] = message

    def sent_bytes(self) -> bytes:
        """Return the one message that was sent."""
        ((_, _, _, _, buffers, nbytes),) = self.sent
        joined = b"".join(buffers)
        assert nbytes == len(joined)
        return joined


# -- who it is


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2", None])
def test_a_world_without_ranks_is_refused(world_size):
    with pytest.raises(InvalidWorldSizeError) as caught:
        Paper(0, world_size)
    assert caught.value.world_size == world_size


@pytest.mark.parametrize("rank", [-1, 4, 5, 1.0, "1", None])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(InvalidRankError) as caught:
        Paper(rank, 4)
    assert (caught.value.invalid_rank, caught.value.world_size) == (rank, 4)


@pytest.mark.parametrize("timeout", [-1.0, -0.001, math.nan])
def test_a_time_limit_below_zero_is_refused(timeout):
    with pytest.raises(ConfigurationError):
        Paper(timeout=timeout)
    for operation in (
        lambda: Paper().send(b"", 1, timeout=timeout),
        lambda: Paper().recv(1, timeout=timeout),
        lambda: Paper().recv_into(bytearray(), 1, timeout=timeout),
    ):
        with pytest.raises(ConfigurationError):
            operation()


def test_the_defaults():
    backend = Paper()
    assert backend.timeout == 60.0
    assert DEFAULT_MAX_MESSAGE_NBYTES == 1 << 30
    assert backend.group == WORLD_GROUP


def test_the_repr_says_who_and_whether_closed():
    backend = Paper(2, 4)
    assert repr(backend) == "<Paper rank 2 of 4>"
    backend.close()
    assert repr(backend) == "<Paper rank 2 of 4, closed>"


def test_it_is_closed_at_the_end_of_its_block_whatever_happens():
    with Paper() as backend:
        assert not backend.closed
    assert backend.closed
    with pytest.raises(KeyError), Paper() as backend:
        raise KeyError
    assert backend.closed


# -- peers and tags


OPERATIONS = {
    "send": lambda backend, peer, **options: backend.send(b"", peer, **options),
    "recv": lambda backend, peer, **options: backend.recv(peer, **options),
    "recv_into": lambda backend, peer, **options: backend.recv_into(bytearray(), peer, **options),
}

every_operation = pytest.mark.parametrize("op", OPERATIONS)


@every_operation
@pytest.mark.parametrize("peer", [4, 5, -1, 1.0, "1", None])
def test_a_peer_outside_the_world_is_refused(op, peer):
    backend = Paper()
    with pytest.raises(InvalidRankError) as caught:
        OPERATIONS[op](backend, peer)
    assert (caught.value.invalid_rank, caught.value.world_size) == (peer, 4)
    assert (caught.value.op, caught.value.rank) == (op, 0)
    assert backend.limits == []


@every_operation
def test_a_message_to_or_from_oneself_is_refused(op):
    backend = Paper(2)
    with pytest.raises(SelfSendError) as caught:
        OPERATIONS[op](backend, 2)
    assert caught.value.rank == 2
    assert backend.limits == []


def test_a_rank_may_be_a_numpy_integer():
    backend = Paper()
    backend.send(b"x", np.int64(1))
    assert backend.sent[0][0] == 1


@every_operation
@pytest.mark.parametrize("tag", [-1, 2**64, 1.0, "1", None])
def test_a_tag_that_does_not_fit_is_refused(op, tag):
    backend = Paper()
    with pytest.raises(ConfigurationError, match="tag"):
        OPERATIONS[op](backend, 1, tag=tag)
    assert backend.limits == []


@pytest.mark.parametrize("tag", [0, 1, 2**63, 2**64 - 1])
def test_every_other_tag_is_part_of_the_envelope(tag):
    backend = Paper()
    backend.send(b"x", 1, tag)
    assert backend.sent[0][:4] == (1, WORLD_GROUP, Channel.MESSAGE, tag)
    backend.give(1, b"x", tag=tag)
    assert backend.recv(1, tag) == b"x"


# -- what can be sent


@pytest.mark.parametrize(
    "data",
    [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"xabcdx")[1:-1]],
    ids=["bytes", "bytearray", "memoryview", "slice"],
)
def test_any_buffer_can_be_sent(data):
    backend = Paper()
    backend.send(data, 1)
    assert backend.sent_bytes() == b"abcd"


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "u1", "?", "c8", "c16", ">f8", "S3"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_arrays_of_every_kind_and_shape_can_be_sent(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    backend = Paper()
    backend.send(array, 1)
    assert backend.sent_bytes() == array.tobytes()


def test_a_list_or_tuple_of_buffers_is_one_message():
    pieces = [b"ab", bytearray(b""), np.frombuffer(b"cd", "u2"), memoryview(b"e")]
    for data in (pieces, tuple(pieces)):
        backend = Paper()
        backend.send(data, 1)
        assert backend.sent_bytes() == b"abcde"


@pytest.mark.parametrize("data", [b"", [], [b"", b""], np.empty((3, 0))], ids=repr)
def test_a_message_may_be_empty(data):
    backend = Paper()
    backend.send(data, 1)
    assert backend.sent_bytes() == b""


def test_what_is_sent_is_not_copied():
    array = np.zeros(4)
    backend = Paper()
    backend.send([array, b"x"], 1)
    array[2] = 7.0
    assert backend.sent_bytes() == array.tobytes() + b"x"


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 4))[:, 1],
        np.zeros((4, 4))[::2],
        np.zeros((2, 3)).T,
        np.asfortranarray(np.zeros((2, 3))),
        memoryview(b"abcdef")[::2],
        [b"fine", np.zeros(4)[::-1]],
    ],
    ids=["column", "step", "transposed", "fortran", "memoryview", "in a list"],
)
def test_what_is_not_contiguous_is_refused_and_the_error_says_so(data):
    backend = Paper()
    with pytest.raises(ConfigurationError, match="contiguous"):
        backend.send(data, 1)
    assert backend.sent == []


@pytest.mark.parametrize(
    "data",
    ["text", 7, None, 1.5, {"a": 1}, {1, 2}, ["text"], [1, 2], [[b"nested"]], iter([b"x"])],
    ids=lambda data: type(data).__name__ + str(data)[:8],
)
def test_what_is_no_buffer_is_refused_and_the_error_says_so(data):
    backend = Paper()
    with pytest.raises(ConfigurationError, match="buffer"):
        backend.send(data, 1)
    assert backend.sent == []


def test_an_array_that_exports_no_buffer_is_refused_with_our_error():
    backend = Paper()
    with pytest.raises(ConfigurationError, match="buffer"):
        backend.send(np.zeros(3, "M8[s]"), 1)


@pytest.mark.parametrize("data", [bytes(11), [bytes(6), bytes(5)], np.zeros(2)], ids=repr)
def test_a_message_above_the_limit_is_refused_before_its_first_byte(data):
    backend = Paper(max_message_nbytes=10)
    with pytest.raises(MessageTooLargeError) as caught:
        backend.send(data, 1)
    assert caught.value.nbytes in (11, 16)
    assert caught.value.limit == 10
    assert backend.sent == []


def test_a_message_at_the_limit_is_sent():
    backend = Paper(max_message_nbytes=10)
    backend.send(bytes(10), 1)
    assert len(backend.sent_bytes()) == 10


# -- receiving into a buffer


def test_an_array_is_filled_and_its_size_returned():
    array = np.full((2, 3), -1.0)
    backend = Paper()
    backend.give(1, np.arange(6.0).tobytes())
    assert backend.recv_into(array, 1) == 48
    assert array.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_an_empty_message_fills_an_empty_buffer():
    backend = Paper()
    backend.give(1, b"")
    assert backend.recv_into(np.empty((0, 3)), 1) == 0


def test_a_message_of_another_size_leaves_the_buffer_as_it_was():
    buffer = bytearray(b"before")
    backend = Paper()
    backend.give(1, b"longer than before")
    with pytest.raises(SizeMismatchError) as caught:
        backend.recv_into(buffer, 1)
    assert (caught.value.expected, caught.value.got) == (6, 18)
    assert buffer == b"before"


def test_a_buffer_that_cannot_be_written_is_refused_and_the_message_kept():
    backend = Paper()
    backend.give(1, b"abcd")
    array = np.zeros(4, "u1")
    array.flags.writeable = False
    for buffer in (b"....", array, memoryview(b"....")):
        with pytest.raises(ConfigurationError, match="writable"):
            backend.recv_into(buffer, 1)
    assert backend.limits == [], "nothing was received"


@pytest.mark.parametrize(
    "buffer",
    [np.zeros((4, 4))[:, 1], np.zeros((2, 3)).T, "text", None, 7],
    ids=["column", "transposed", "text", "none", "number"],
)
def test_a_buffer_that_cannot_be_filled_is_refused_with_our_error(buffer):
    backend = Paper()
    with pytest.raises(ConfigurationError):
        backend.recv_into(buffer, 1)
    assert backend.limits == [], "nothing was received"


# -- deadlines


@every_operation
@pytest.mark.parametrize(("timeout", "limit"), [(None, 7.5), (0, 0), (0.25, 0.25), (math.inf,) * 2])
def test_the_time_limit_is_the_calls_own_or_the_backends(op, timeout, limit):
    backend = Paper(timeout=7.5)
    backend.give(1, b"")
    OPERATIONS[op](backend, 1, timeout=timeout)
    assert backend.limits == [limit]


@pytest.mark.parametrize("op", ["recv", "recv_into"])
def test_an_error_says_what_was_done_with_whom_and_how_long(op):
    with pytest.raises(DeadlineExceededError) as caught:
        OPERATIONS[op](Paper(3), 1, tag=9, timeout=0.125)
    error = caught.value
    assert (error.op, error.rank, error.peer, error.tag) == (op, 3, 1, 9)
    assert error.limit == 0.125
    assert 0 <= error.waited < 60
    for part in (op, "rank 3", "peer 1", "tag 9", "0.125 s"):
        assert part in str(error)


def test_an_error_keeps_its_cause():
    cause = OSError("the cable was cut")
    lost = PeerLostError(1, "reset")
    lost.__cause__ = cause
    backend = Paper()
    backend.give(1, lost)
    with pytest.raises(PeerLostError) as caught:
        backend.recv(1)
    assert caught.value.__cause__ is cause


# -- the barrier


def test_a_barrier_alone_returns_at_once():
    backend = Paper(0, 1)
    backend.barrier(timeout=0.0)
    assert backend.sent == []


def test_a_barrier_is_the_one_of_the_collectives(monkeypatch):
    met = []
    monkeypatch.setattr(Paper, "meeting", lambda *args: met.append(args), raising=False)
    backend = Paper()
    backend.barrier(timeout=3.0)
    assert met == [(backend, 3.0)]


# -- integers of all kinds


@pytest.mark.parametrize("number", [np.int32(2), np.uint64(2), np.array(2)])
def test_any_integer_is_a_rank_and_a_tag_and_becomes_a_plain_one(number):
    backend = Paper()
    backend.send(b"x", number, tag=number)
    ((dst, _, _, tag, _, _),) = backend.sent
    assert (type(dst), type(tag)) == (int, int)
    backend.give(2, b"y", tag=2)
    assert backend.recv(number, tag=number) == b"y"
    with pytest.raises(DeadlineExceededError) as info:
        backend.recv(3, tag=number)
    assert type(info.value.tag) is int


@pytest.mark.parametrize("tag", [1.0, np.float64(1), np.array([1]), "1", None, -1, 2**64])
def test_what_is_no_tag_is_refused(tag):
    with pytest.raises(ConfigurationError, match="a tag is"):
        Paper().send(b"x", 1, tag=tag)


@pytest.mark.parametrize("rank", [1.0, np.array([1, 2]), np.array(1.0), "1", None])
def test_what_is_no_rank_is_refused(rank):
    with pytest.raises(InvalidRankError):
        Paper().send(b"x", rank)


@pytest.mark.parametrize("timeout", ["5", 10**400])
def test_a_timeout_that_is_none_is_a_configuration_error(timeout):
    with pytest.raises(ConfigurationError):
        Paper(timeout=timeout)
    with pytest.raises(ConfigurationError):
        Paper().recv(1, timeout=timeout)
