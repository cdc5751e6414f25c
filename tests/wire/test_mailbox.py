"""The mailbox: every message goes to exactly one receive of its key, in order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from faults.sizes import examples
from rankwire.errors import ChannelClosedError, PeerLostError, SizeMismatchError
from rankwire.wire.frames import Channel
from rankwire.wire.mailbox import Mailbox
from rankwire.wire.receive import Destination, Placed, Receive

KEY = (0, Channel.MESSAGE, 7)
# Each differs from KEY in one part only.
OTHERS = [(1, Channel.MESSAGE, 7), (0, Channel.COLLECTIVE, 7), (0, Channel.MESSAGE, 8)]


def posted(mailbox, key=KEY):
    receive = Receive(key)
    mailbox.post(receive)
    return receive


def taken(mailbox, key=KEY):
    receive = posted(mailbox, key)
    assert receive.done
    return receive.result()


def test_messages_of_one_key_are_taken_in_the_order_in_which_they_came():
    mailbox = Mailbox()
    for number in range(5):
        assert mailbox.deliver(KEY, bytearray([number])) is None
    assert [taken(mailbox) for _ in range(5)] == [b"\0", b"\1", b"\2", b"\3", b"\4"]


def test_receives_of_one_key_are_served_in_the_order_in_which_they_were_posted():
    mailbox = Mailbox()
    receives = [posted(mailbox) for _ in range(3)]
    for number, receive in enumerate(receives):
        assert not receive.done
        assert mailbox.deliver(KEY, bytearray([number])) is receive
        assert receive.done
        assert receive.result() == bytes([number])


def placing(mailbox, nbytes=4):
    """Have a message begin to come into the memory of a receive."""
    receive = Receive(KEY, into=Destination(memoryview(bytearray(nbytes))))
    mailbox.post(receive)
    assert mailbox.find_place(KEY, nbytes, memoryview(b"")) is receive.into
    return receive


def test_a_receive_into_whose_memory_a_message_is_coming_gets_no_other_one():
    mailbox = Mailbox()
    receive = placing(mailbox)
    assert mailbox.deliver(KEY, bytearray(b"went back")) is None
    assert (receive.done, mailbox.wanted) == (False, 1)
    assert mailbox.deliver(KEY, Placed(b"", receive.into)) is receive
    assert (receive.done, mailbox.wanted) == (True, 0)
    assert taken(mailbox) == b"went back"


def test_a_failure_ends_also_the_receive_whose_message_is_coming():
    for end in (Mailbox.fail, lambda mailbox, error: mailbox.fail_group(0, error)):
        mailbox = Mailbox()
        receive = placing(mailbox)
        assert end(mailbox, PeerLostError(1, "gone")) == [receive]
        with pytest.raises(PeerLostError):
            receive.take()


def test_tidying_completes_a_delivery_to_where_it_was_wanted_that_was_interrupted():
    mailbox = Mailbox()
    receive = placing(mailbox)
    receive.on_done = print
    receive._cell.append(Placed(b"", receive.into))
    mailbox.tidy()
    assert receive.done
    assert (mailbox.placing, list(mailbox.due)) == (None, [receive])


@pytest.mark.parametrize("other", OTHERS)
def test_group_channel_and_tag_each_keep_messages_apart(other):
    mailbox = Mailbox()
    receive = posted(mailbox)
    assert mailbox.deliver(other, bytearray(b"not yours")) is None
    assert not receive.done
    assert mailbox.deliver(KEY, bytearray(b"yours")) is receive
    assert receive.result() == b"yours"
    assert taken(mailbox, other) == b"not yours"


FAMILY = 3 << 16  # tags that differ in the lower 16 bits only


def test_what_is_refused_is_dropped_now_and_later_and_nothing_else_is():
    kept = [
        (0, Channel.COLLECTIVE, FAMILY - 1),
        (0, Channel.COLLECTIVE, FAMILY + (1 << 16)),
        (0, Channel.MESSAGE, FAMILY),
        (1, Channel.COLLECTIVE, FAMILY),
    ]
    mailbox = Mailbox()
    for when in ("now", "later"):
        for key in [*kept, *((0, Channel.COLLECTIVE, FAMILY + step) for step in (0, 9, 65535))]:
            assert mailbox.deliver(key, bytearray(when.encode())) is None
        if when == "now":
            mailbox.arrived.refuse((0, Channel.COLLECTIVE, FAMILY + 5))
            assert (mailbox.arrived.dropped, mailbox.arrived.nbytes) == (3, 4 * 3)
    assert (mailbox.arrived.dropped, mailbox.arrived.nbytes) == (6, 4 * 8)
    for key in kept:
        assert [taken(mailbox, key), taken(mailbox, key)] == [b"now", b"later"]
    assert mailbox.arrived.nbytes == 0


def test_a_refused_message_still_reaches_a_waiting_receive():
    mailbox = Mailbox()
    receive = posted(mailbox)
    mailbox.arrived.refuse(KEY)
    assert mailbox.deliver(KEY, bytearray(b"x")) is receive
    assert mailbox.deliver(KEY, bytearray(b"y")) is None
    assert mailbox.arrived.dropped == 1


def test_only_the_last_256_refusals_are_remembered():
    mailbox = Mailbox()
    for number in range(257):
        mailbox.arrived.refuse((0, Channel.COLLECTIVE, number << 16))
    for number in range(257):
        mailbox.deliver((0, Channel.COLLECTIVE, number << 16), bytearray(b"x"))
    assert (mailbox.arrived.dropped, mailbox.arrived.nbytes) == (256, 1)


@pytest.mark.parametrize(("key", "nbytes"), [(KEY, None), ((0, Channel.MESSAGE, 2**64 - 1), 5)])
def test_what_is_wanted_is_known(key, nbytes):
    mailbox = Mailbox()
    assert not mailbox.taker_of(key, 5)
    receive = Receive(key, nbytes=nbytes)
    mailbox.post(receive)
    assert mailbox.taker_of(key, 5)
    assert (mailbox.taker_of(key, 6) is not None) is (nbytes is None)
    assert not any(mailbox.taker_of(other, 5) for other in OTHERS)
    mailbox.withdraw(receive)
    assert not mailbox.taker_of(key, 5)


def test_an_empty_message_is_a_message():
    mailbox = Mailbox()
    mailbox.deliver(KEY, bytearray())
    assert taken(mailbox) == b""
    receive = posted(mailbox)
    assert mailbox.deliver(KEY, bytearray()) is receive
    assert receive.done
    assert receive.result() == b""


def test_a_message_is_given_without_a_copy():
    mailbox = Mailbox()
    payload = bytearray(b"payload")
    mailbox.deliver(KEY, payload)
    assert taken(mailbox) is payload


def test_a_withdrawn_receive_gets_nothing_and_the_message_waits_for_the_next():
    mailbox = Mailbox()
    receive = posted(mailbox)
    assert mailbox.withdraw(receive)
    assert not mailbox.withdraw(receive)
    assert mailbox.deliver(KEY, bytearray(b"late")) is None
    assert not receive.done
    assert taken(mailbox) == b"late"


def test_withdrawing_one_of_several_leaves_the_others_in_order():
    mailbox = Mailbox()
    first, second, third = (posted(mailbox) for _ in range(3))
    assert mailbox.withdraw(second)
    assert mailbox.wanted == 2
    mailbox.deliver(KEY, bytearray(b"1"))
    mailbox.deliver(KEY, bytearray(b"2"))
    assert (first.result(), third.result(), second.done) == (b"1", b"2", False)


def test_a_receive_that_is_done_cannot_be_withdrawn():
    mailbox = Mailbox()
    receive = posted(mailbox)
    mailbox.deliver(KEY, bytearray(b"x"))
    assert not mailbox.withdraw(receive)
    mailbox.fail(PeerLostError(1, "gone"))
    assert not mailbox.withdraw(receive)


def test_a_message_that_is_put_back_is_the_next_to_be_taken():
    mailbox = Mailbox()
    for content in (b"first", b"second"):
        mailbox.deliver(KEY, bytearray(content))
    receive = posted(mailbox)
    mailbox.put_back(receive)
    assert taken(mailbox) == b"first"
    assert taken(mailbox) == b"second"


def test_a_message_that_is_put_back_reaches_a_waiting_receive():
    # Two threads in recv_into on one tag: the first has a buffer of the wrong size.
    mailbox = Mailbox()
    first, second = posted(mailbox), posted(mailbox)
    mailbox.deliver(KEY, bytearray(b"message 1"))
    assert mailbox.put_back(first) is second
    mailbox.deliver(KEY, bytearray(b"message 2"))
    assert second.done
    assert second.result() == b"message 1", "messages of one key are taken in order"
    assert taken(mailbox) == b"message 2"


def test_a_message_of_another_size_ends_the_receive_and_stays_for_the_next():
    mailbox = Mailbox()
    mailbox.deliver(KEY, bytearray(5))
    misfit = Receive(KEY, nbytes=4)
    mailbox.post(misfit)
    assert misfit.done
    with pytest.raises(SizeMismatchError) as caught:
        misfit.result()
    assert (caught.value.expected, caught.value.got) == (4, 5)
    fitting = Receive(KEY, nbytes=5)
    mailbox.post(fitting)
    assert fitting.result() == bytes(5)
    assert not mailbox.misfits, "whoever posts sees that it is done"


def test_a_message_ends_receives_of_another_size_and_reaches_the_one_of_its_size():
    mailbox = Mailbox()
    receives = [Receive(KEY, nbytes=nbytes) for nbytes in (4, 6, 5, 5)]
    for receive in receives:
        mailbox.post(receive)
    assert mailbox.deliver(KEY, bytearray(5)) is receives[2]
    assert mailbox.misfits == receives[:2]
    assert [receive.done for receive in receives] == [True, True, True, False]
    for receive in receives[:2]:
        with pytest.raises(SizeMismatchError):
            receive.result()


def test_a_message_that_fits_no_waiting_receive_is_kept():
    mailbox = Mailbox()
    misfit = Receive(KEY, nbytes=0)
    mailbox.post(misfit)
    assert mailbox.deliver(KEY, bytearray(5)) is None
    assert mailbox.misfits == [misfit]
    assert (mailbox.wanted, mailbox.arrived.nbytes) == (0, 5)
    assert taken(mailbox) == bytes(5)


def test_a_message_that_is_put_back_meets_sizes_too():
    mailbox = Mailbox()
    first = posted(mailbox)
    misfit = Receive(KEY, nbytes=3)
    mailbox.post(misfit)
    mailbox.deliver(KEY, bytearray(5))
    assert mailbox.put_back(first) is None
    assert mailbox.misfits == [misfit]
    assert taken(mailbox) == bytes(5)


def test_failure_ends_every_receive_now_and_later():
    mailbox = Mailbox()
    receives = [posted(mailbox, key) for key in (KEY, KEY, *OTHERS)]
    ended = mailbox.fail(PeerLostError(1, "killed"))
    assert set(ended) == set(receives)
    assert mailbox.wanted == len(mailbox.wanted_by) == 0
    for receive in (*receives, posted(mailbox)):
        assert receive.done
        with pytest.raises(PeerLostError, match="killed"):
            receive.result()


def test_each_receive_raises_its_own_error():
    mailbox = Mailbox()
    first, second = posted(mailbox), posted(mailbox)
    mailbox.fail(PeerLostError(1, "killed"))
    raised = []
    for receive in (first, second):
        with pytest.raises(PeerLostError) as caught:
            receive.result()
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_the_first_cause_of_a_failure_is_kept():
    mailbox = Mailbox()
    mailbox.fail(PeerLostError(1, "killed"))
    assert mailbox.fail(ChannelClosedError("closed")) == []
    with pytest.raises(PeerLostError, match="killed"):
        posted(mailbox).result()


def test_messages_that_came_before_the_failure_are_still_received_and_then_the_failure():
    mailbox = Mailbox()
    for content in (b"1", b"2"):
        mailbox.deliver(KEY, bytearray(content))
    mailbox.fail(PeerLostError(1, "killed"))
    assert taken(mailbox) == b"1"
    assert taken(mailbox) == b"2"
    with pytest.raises(PeerLostError):
        posted(mailbox).result()


def test_a_mailbox_is_full_at_its_limit_of_unmatched_messages(monkeypatch):
    monkeypatch.setattr("rankwire.wire.mailbox._MOST_UNMATCHED", 3)
    mailbox = Mailbox()
    for tag in range(3):
        assert not mailbox.arrived.full
        mailbox.deliver((tag, Channel.MESSAGE, tag << 16), bytearray())
    assert mailbox.arrived.full
    assert taken(mailbox, (0, Channel.MESSAGE, 0)) == b""
    assert (mailbox.arrived.count, mailbox.arrived.full) == (2, False)
    mailbox.arrived.refuse((1, Channel.MESSAGE, 1 << 16))
    assert mailbox.arrived.count == 1
    mailbox.fail_group(2, ChannelClosedError("left"))
    assert mailbox.arrived.count == 0


def test_a_mailbox_is_full_at_its_limit_of_unmatched_bytes():
    mailbox = Mailbox(unmatched_limit=10)
    posted(mailbox)
    mailbox.deliver(KEY, bytearray(100))
    assert not mailbox.arrived.full, "what is taken at once does not count"
    mailbox.deliver(KEY, bytearray(9))
    assert (mailbox.arrived.nbytes, mailbox.arrived.full) == (9, False)
    mailbox.deliver(OTHERS[0], bytearray(1))
    assert (mailbox.arrived.nbytes, mailbox.arrived.full) == (10, True)
    receive = posted(mailbox, OTHERS[0])
    assert (mailbox.arrived.nbytes, mailbox.arrived.full) == (9, False)
    mailbox.put_back(receive)
    assert (mailbox.arrived.nbytes, mailbox.arrived.full) == (10, True)


def test_dropped_messages_without_a_receive_are_counted():
    mailbox = Mailbox(keep_unmatched=False)
    assert mailbox.deliver(KEY, bytearray(b"a reply to nobody")) is None
    assert (mailbox.arrived.dropped, mailbox.arrived.nbytes, mailbox.arrived.full) == (1, 0, False)
    receive = posted(mailbox)
    assert not receive.done
    assert mailbox.deliver(KEY, bytearray(b"a reply")) is receive
    assert mailbox.arrived.dropped == 1
    mailbox.put_back(receive)
    assert mailbox.arrived.dropped == 2
    assert not posted(mailbox).done


def test_wanted_counts_receives_and_wanted_by_has_each_envelope_once():
    mailbox = Mailbox()
    for key in (KEY, KEY, OTHERS[0]):
        posted(mailbox, key)
    assert (mailbox.wanted, len(mailbox.wanted_by)) == (3, 2)


def test_leaving_a_group_ends_its_receives_and_drops_its_messages():
    mailbox = Mailbox(unmatched_limit=10)
    left, stays = posted(mailbox, (5, 1, 0)), posted(mailbox, (6, 1, 0))
    mailbox.deliver((5, 1, 1), bytearray(9))
    mailbox.deliver((6, 1, 1), bytearray(1))
    assert mailbox.arrived.full
    assert mailbox.fail_group(5, ChannelClosedError("left the group")) == [left]
    with pytest.raises(ChannelClosedError, match="left the group"):
        left.result()
    assert not stays.done
    assert (mailbox.arrived.nbytes, mailbox.arrived.full) == (1, False)
    assert taken(mailbox, (6, 1, 1)) == bytes(1)


def test_a_receive_that_is_posted_after_its_group_was_left_ends_too():
    mailbox = Mailbox()
    mailbox.fail_group(5, ChannelClosedError("left the group"))
    for group in range(100, 300):
        mailbox.fail_group(group, ChannelClosedError("left another"))
    late = posted(mailbox, (5, 1, 1))
    with pytest.raises(ChannelClosedError, match="left the group"):
        late.result()
    assert not posted(mailbox, (6, 1, 1)).done


# -- against a model


KEYS = [KEY, *OTHERS]


def fits(receive, payload):
    return receive.nbytes is None or receive.nbytes == len(payload)


class MailboxMachine(RuleBasedStateMachine):
    """Any sequence of operations, compared with lists that are simple enough to be right."""

    keep_unmatched = True

    def __init__(self):
        super().__init__()
        self.mailbox = Mailbox(keep_unmatched=self.keep_unmatched, unmatched_limit=20)
        self.arrived = {key: [] for key in KEYS}
        self.wanted = {key: [] for key in KEYS}
        self.expected = {}  # receive -> its payload, or the error it must have
        self.failed = None
        self.abandoned = {}
        self.dropped = 0
        self.count = 0

    def new_payload(self, nbytes):
        self.count += 1
        return bytearray(self.count.to_bytes(4, "little") + bytes(nbytes))

    @rule(key=st.sampled_from(KEYS), nbytes=st.none() | st.integers(4, 6))
    def post(self, key, nbytes):
        receive = Receive(key, nbytes=nbytes)
        self.mailbox.post(receive)
        if self.arrived[key] and not fits(receive, self.arrived[key][0]):
            self.expected[receive] = SizeMismatchError
        elif self.arrived[key]:
            self.expected[receive] = self.arrived[key].pop(0)
        elif self.failed is not None:
            self.expected[receive] = self.failed
        elif key[0] in self.abandoned:
            self.expected[receive] = self.abandoned[key[0]]
        else:
            self.wanted[key].append(receive)

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(0, 2))
    def deliver(self, key, nbytes):
        payload = self.new_payload(nbytes)
        ended = self.mailbox.deliver(key, payload)
        assert ended is self.serve(key, payload)
        if ended is None:
            self.keep(key, payload, at=len(self.arrived[key]))

    def serve(self, key, payload):
        """End those that wait for the key, up to the first that fits, and return it."""
        misfits = []
        while self.wanted[key]:
            receive = self.wanted[key].pop(0)
            if fits(receive, payload):
                self.expected[receive] = payload
                break
            self.expected[receive] = SizeMismatchError
            misfits.append(receive)
        else:
            receive = None
        assert self.mailbox.misfits == misfits
        self.mailbox.misfits.clear()
        return receive

    def keep(self, key, payload, *, at):
        if self.keep_unmatched:
            self.arrived[key].insert(at, payload)
        else:
            self.dropped += 1

    @precondition(lambda self: any(self.wanted.values()))
    @rule(data=st.data())
    def withdraw(self, data):
        waiting = [receive for receives in self.wanted.values() for receive in receives]
        receive = data.draw(st.sampled_from(waiting))
        assert self.mailbox.withdraw(receive)
        self.wanted[receive.envelope].remove(receive)
        assert not receive.done

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def withdraw_too_late(self, data):
        receive = data.draw(st.sampled_from(list(self.expected)))
        assert not self.mailbox.withdraw(receive)

    @precondition(lambda self: any(isinstance(r, bytearray) for r in self.expected.values()))
    @rule(data=st.data())
    def put_back(self, data):
        ended = [r for r, result in self.expected.items() if isinstance(result, bytearray)]
        receive = data.draw(st.sampled_from(ended))
        payload, key = self.expected.pop(receive), receive.envelope
        ended = self.mailbox.put_back(receive)
        assert ended is self.serve(key, payload)
        if ended is None:
            self.keep(key, payload, at=0)

    @rule(group=st.sampled_from([0, 1]))
    def fail_group(self, group):
        error = self.abandoned[group] = ChannelClosedError(f"left group {group}")
        ended = self.mailbox.fail_group(group, error)
        for key in KEYS:
            if key[0] == group:
                self.arrived[key].clear()
                for receive in self.wanted[key]:
                    assert receive in ended
                    self.expected[receive] = error
                self.wanted[key].clear()

    @precondition(lambda self: self.count > 5)
    @rule()
    def fail(self):
        ended = self.mailbox.fail(PeerLostError(1, "killed"))
        self.failed = self.failed or self.mailbox.failure
        waiting = [receive for receives in self.wanted.values() for receive in receives]
        assert set(ended) == set(waiting)
        for receive in waiting:
            self.expected[receive] = self.failed
            self.wanted[receive.envelope].clear()

    @invariant()
    def agrees_with_the_model(self):
        for receive, result in self.expected.items():
            assert receive.done
            if result is SizeMismatchError:
                assert isinstance(receive.error, SizeMismatchError)
            else:
                assert receive.payload is result or receive.error is result
        for receives in self.wanted.values():
            assert not any(receive.done for receive in receives)
        kept = sum(len(payload) for payloads in self.arrived.values() for payload in payloads)
        assert self.mailbox.arrived.nbytes == kept
        assert self.mailbox.arrived.full is (kept >= 20)
        assert self.mailbox.wanted == sum(map(len, self.wanted.values()))
        assert len(self.mailbox.wanted_by) == sum(map(bool, self.wanted.values()))
        assert self.mailbox.arrived.dropped == self.dropped
        assert self.mailbox.failure is self.failed

    def teardown(self):
        for key, payloads in self.arrived.items():
            assert [posted(self.mailbox, key).payload for _ in payloads] == payloads


class DroppingMailboxMachine(MailboxMachine):
    keep_unmatched = False


TestAnyUse = MailboxMachine.TestCase
TestAnyUseWhenDropping = DroppingMailboxMachine.TestCase
TestAnyUse.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestAnyUseWhenDropping.settings = TestAnyUse.settings
