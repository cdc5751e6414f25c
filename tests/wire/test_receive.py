"""Destinations: a large message comes to where it is wanted, and moves out in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headers import note_received, pack_header
from rankwire.errors import ProtocolError
from rankwire.wire.frames import LOAN, Channel, whole_of
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.parser import FrameParser
from rankwire.wire.receive import Destination, Placed, Receive
from rankwire.wire.seals import Seal

KEY = (0, Channel.MESSAGE, 7)
OTHER = (0, Channel.MESSAGE, 8)
LARGE = 200_000
SEAL_KEY = b"k" * 32


def pattern(nbytes, seed=1):
    period = bytes((seed + 7 * at) & 0xFF for at in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


class WithHead(Destination):
    """Takes what comes behind a head of 16 bytes."""

    def head_nbytes(self, nbytes, beginning):
        return 16 if nbytes == 16 + len(self.view) and len(beginning) >= 16 else None


class Receiver:
    """A parser, and a mailbox that says where messages are to go."""

    def __init__(self, *, seal=None):
        self.mailbox = Mailbox()
        self.parser = FrameParser(seal=seal)
        self.parser.find_place = self.mailbox.find_place

    def want(self, key=KEY, nbytes=LARGE, *, kind=Destination):
        memory = bytearray(nbytes)
        receive = Receive(key, into=kind(memoryview(memory)))
        self.mailbox.post(receive)
        return receive, memory

    def feed(self, stream, size=1 << 20, *, deliver=True):
        view = memoryview(stream)
        while view:
            room = self.parser.receive_buffer()
            count = min(size, len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            note_received(self.parser, count)
            self.parser.commit(self.parser.parse()[0])
            if deliver:
                self.deliver()

    def deliver(self):
        while self.parser.frames:
            envelope, payload = self.parser.frames.popleft()
            self.mailbox.deliver(envelope, payload)

    def vacate(self, receive):
        self.mailbox.withdraw(receive)
        self.parser.vacate(receive.into)
        self.mailbox.vacated(receive)

    def arrived(self, key=KEY):
        return [whole_of(payload) for payload in self.mailbox.arrived.get(key, ())]


def stream_of(*messages, seal=None):
    stream = b""
    for number, (key, payload) in enumerate(messages):
        header = pack_header(key, len(payload), number)
        rest = [payload]
        if seal is not None:
            rest, _ = seal.around(number, header, key[1], ([payload], len(payload)))
        stream += b"".join([header, *rest])
    return stream


seals = pytest.mark.parametrize("seal", [None, Seal(SEAL_KEY)], ids=["bare", "sealed"])


@seals
@pytest.mark.parametrize("size", [1, 1000, 65536, 1 << 20])
def test_a_large_message_comes_to_where_it_is_wanted_however_the_stream_is_split(seal, size):
    receiver = Receiver(seal=seal)
    receive, memory = receiver.want()
    data = pattern(LARGE)
    receiver.feed(stream_of((KEY, data), (OTHER, b"next"), seal=seal), size)
    assert isinstance(receive.payload, Placed)
    assert memory == data
    assert receive.take().whole() == data
    assert receiver.arrived(OTHER) == [b"next"]
    assert receiver.mailbox.placing is None


@seals
def test_the_head_before_the_elements_is_kept_apart(seal):
    receiver = Receiver(seal=seal)
    receive, memory = receiver.want(kind=WithHead)
    data = pattern(16 + LARGE)
    receiver.feed(stream_of((KEY, data), (OTHER, b"next"), seal=seal))
    assert (receive.payload.head, memory) == (data[:16], data[16:])
    assert receiver.arrived(OTHER) == [b"next"]
    part = bytearray(100)
    receive.payload.read_into(10, memoryview(part))
    assert part == data[10:110]


class WithPadding(Destination):
    """Knows from the first 4 bytes of a head that it has 16."""

    def head_nbytes(self, nbytes, beginning):
        return 16 if nbytes == 16 + len(self.view) and len(beginning) >= 4 else None


@pytest.mark.parametrize("come", range(18))
def test_wherever_a_head_is_split_the_rest_is_what_follows_it(come):
    receiver = Receiver()
    receive, memory = receiver.want(kind=WithPadding)
    stream = stream_of((KEY, pattern(16 + LARGE)))
    start = len(stream) - LARGE - 16
    receiver.feed(stream[: start + come])
    receiver.feed(stream[start + come :])
    assert whole_of(receive.payload) == pattern(16 + LARGE)
    assert not isinstance(receive.payload, Placed) or memory == pattern(16 + LARGE)[16:]


@pytest.mark.parametrize(
    ("key", "nbytes"), [(OTHER, LARGE), (KEY, LARGE - 1), (KEY, 100)], ids=["other", "size", "few"]
)
def test_a_message_that_is_not_wanted_there_does_not_come_there(key, nbytes):
    receiver = Receiver()
    receive, memory = receiver.want()
    receiver.feed(stream_of((key, pattern(nbytes))))
    assert memory == bytes(LARGE)
    assert not isinstance(receive.payload, Placed)


def test_an_earlier_message_of_the_same_key_goes_first():
    receiver = Receiver()
    receive, memory = receiver.want()
    data = pattern(LARGE)
    receiver.feed(stream_of((KEY, b"first"), (KEY, data)), deliver=False)
    receiver.deliver()
    assert receive.payload == b"first"
    assert memory == bytes(LARGE)
    assert receiver.arrived() == [data]


def test_an_earlier_message_of_the_same_key_that_is_lent_goes_first():
    """Its own receiver may be the one that waits: it is not known before the frames are taken."""
    receiver = Receiver()
    _, memory = receiver.want()
    group, channel, tag = KEY
    lent = (group, channel | LOAN, tag), b"where it lies"
    receiver.feed(stream_of(lent, (KEY, pattern(LARGE))), deliver=False)
    assert memory == bytes(LARGE)
    assert receiver.mailbox.placing is None


def test_the_next_message_does_not_overwrite_one_that_was_not_taken():
    receiver = Receiver()
    receive, memory = receiver.want()
    first, second = pattern(LARGE), pattern(LARGE, 3)
    receiver.feed(stream_of((KEY, first), (KEY, second)), deliver=False)
    receiver.deliver()
    assert memory == first
    assert receive.take().whole() == first
    assert receiver.arrived() == [second]


@given(
    st.integers(min_value=33, max_value=LARGE + 31),
    st.sampled_from([1, 5000, 70_000]),
    st.booleans(),
    st.booleans(),
)
def test_a_withdrawn_receive_gets_its_memory_back_and_no_message_is_lost(
    cut, size, is_sealed, has_head
):
    seal = Seal(SEAL_KEY) if is_sealed else None
    receiver = Receiver(seal=seal)
    kind = WithHead if has_head else Destination
    receive, memory = receiver.want(kind=kind)
    data = pattern(LARGE + 16 * has_head)
    stream = stream_of((KEY, data), (KEY, b"next"), seal=seal)
    receiver.feed(stream[:cut], max(size, cut // 100))
    receiver.vacate(receive)
    memory[:] = bytes(len(memory))
    receiver.feed(stream[cut:], max(size, cut // 100))
    assert memory == bytes(len(memory)), "written to after it was given back"
    assert receive.payload is None
    assert receiver.arrived() == [data, b"next"]


def test_a_complete_message_that_is_not_taken_is_moved_too():
    receiver = Receiver()
    receive, memory = receiver.want()
    data = pattern(LARGE)
    receiver.feed(stream_of((KEY, data)), deliver=False)
    receiver.vacate(receive)
    memory[:] = bytes(LARGE)
    receiver.deliver()
    assert receiver.arrived() == [data]


def test_a_message_delivered_after_its_receive_was_withdrawn_is_kept_in_other_memory():
    receiver = Receiver()
    receive, memory = receiver.want()
    data = pattern(LARGE)
    receiver.feed(stream_of((KEY, data)), deliver=False)
    receiver.mailbox.withdraw(receive)  # and before its memory is vacated
    receiver.deliver()
    memory[:] = bytes(LARGE)
    assert receiver.arrived() == [data]


def test_reading_continues_after_an_interrupt_while_asking_for_memory():
    receiver = Receiver()
    receive, memory = receiver.want()
    data = pattern(LARGE)
    stream = stream_of((KEY, data))
    room = receiver.parser.receive_buffer()
    room[:] = stream[: len(room)]
    note_received(receiver.parser, len(room))
    receiver.parser.parse()  # and not committed
    assert receiver.mailbox.placing is receive
    receiver.parser.commit(receiver.parser.parse()[0])
    receiver.feed(stream[len(room) :])
    assert memory == data


def test_without_memory_to_move_a_message_to_nothing_more_is_read():
    def refuse(nbytes):
        raise MemoryError

    receiver = Receiver()
    receive, _ = receiver.want()
    stream = stream_of((KEY, pattern(LARGE)))
    receiver.feed(stream[:100_000])
    receiver.parser._allocate = refuse
    receiver.vacate(receive)
    with pytest.raises(ProtocolError, match="no memory"):
        receiver.parser.take_in(lambda room: 0)
