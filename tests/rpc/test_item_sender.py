"""Items of a stream: which leave together, in which order, and what an item that waits costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.codec.codec import Codec
from rankwire.errors import DeadlineExceededError, UnsupportedTypeError
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc.item_sender import ItemSender
from rankwire.rpc.messages import decode_items, encode_items
from rankwire.wire.credit import Credit
from rankwire.wire.mailbox import KeptMessages
from real_time import Deadline

CODEC = Codec()


class Replies:
    """Encodes as an agent does."""

    def items(self, values, peer):
        return encode_items(CODEC, values, peer)


class Port:
    """Keeps the frames that it is given, or refuses them."""

    def __init__(self):
        self.frames = []
        self.sizes = []
        self.is_full = self.is_half_full = False

    def reply(self, call, message, deadline, hold, channel):
        if self.is_full:
            raise DeadlineExceededError(deadline.limit)
        self.sizes.append(message[1])
        self.frames.append(decode_items(CODEC, bytearray().join(message[0]), 0))
        if self.is_half_full:  # the connection sends the rest
            error = DeadlineExceededError(deadline.limit)
            error.may_have_arrived = True
            raise error


def sender():
    port = Port()
    return ItemSender(IncomingCall(1, 7, bytearray(), None), port, Replies()), port


values = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=6000),
    st.binary(max_size=6000),
    st.lists(st.integers(), max_size=3),
)


@given(st.lists(st.tuples(values, st.booleans(), st.booleans())))
def test_items_leave_in_order_however_prompt_they_are_and_whenever_the_standby_sends(steps):
    items, port = sender()
    for value, is_prompt, is_standby_here in steps:
        items.add(value, Deadline(1.0), is_prompt=is_prompt)
        if is_standby_here:
            assert not items.flush_late()
    items.flush(Deadline(1.0))
    assert [value for frame in port.frames for value in frame] == [v for v, *_ in steps]
    assert items.items == len(steps)


def test_small_items_that_come_quickly_share_a_frame():
    items, port = sender()
    for number in range(100):
        items.add(number, Deadline(1.0), is_prompt=True)
    items.flush(Deadline(1.0))
    assert max(map(len, port.frames)) == 32
    assert len(port.frames) == 4


def test_an_item_that_can_change_leaves_before_the_generator_goes_on():
    items, port = sender()
    value = [1]
    items.add(value, Deadline(1.0), is_prompt=True)
    value.append(2)
    assert port.frames == [[[1]]]


def test_items_that_cannot_leave_now_are_kept_in_order():
    items, port = sender()
    port.is_full = True
    items.add(1, Deadline(1.0), is_prompt=True)
    assert items.flush_late(), "some are left"
    assert not items.add_at_once([2])
    port.is_full = False
    items.flush(Deadline(1.0))
    assert port.frames == [[1], [[2]]]


def test_an_item_that_cannot_be_sent_says_so_and_is_not_counted():
    items, port = sender()
    with pytest.raises(UnsupportedTypeError, match="item"):
        items.add(object(), Deadline(1.0), is_prompt=True)
    assert items.items == 0
    assert not port.frames


def test_collected_items_count_against_the_credit():
    items, _ = sender()
    credit = Credit(3, 1 << 20)
    for number in range(3):
        assert items.may_send(credit)
        items.add(number, Deadline(1.0), is_prompt=True)
    assert not items.may_send(credit)
    items, _ = sender()
    items.add(b"x" * 3000, Deadline(1.0), is_prompt=True)
    assert items.may_send(Credit(10, 3100))
    assert not items.may_send(Credit(10, 3000))


@given(st.lists(st.tuples(values, st.booleans())), st.integers(1, 300))
def test_the_reader_keeps_all_that_a_producer_sends_within_its_credit(steps, window_nbytes):
    items, port = sender()
    kept = KeptMessages(1000, window_nbytes)
    for value, is_prompt in steps:
        if not items.may_send(Credit(1000, window_nbytes)):
            break
        items.add(value, Deadline(1.0), is_prompt=is_prompt)
    items.flush(Deadline(1.0))
    for nbytes in port.sizes:
        assert kept.has_room
        kept.append(bytearray(nbytes))
        kept.nbytes += nbytes


@pytest.mark.parametrize("value", [b"x" * 10, [1, 2]])
def test_an_item_of_which_a_part_has_left_is_not_sent_again(value):
    items, port = sender()
    port.is_half_full = True
    items.add(value, Deadline(1.0), is_prompt=False)
    port.is_half_full = False
    items.flush(Deadline(1.0))
    assert not items.flush_late()
    assert port.frames == [[value]]
