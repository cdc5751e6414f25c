"""A rank's side of the roll: reports go out, and what is told is kept until it is asked for."""

import gc

from rankwire.mesh.roll_client import RollClient
from rankwire.wire.control_messages import Notice


def test_what_was_told_of_a_group_is_taken_once_in_its_order():
    client = RollClient(lambda notice, patience: None)
    told = [Notice(group, number, "barrier()") for number in range(3) for group in (5, 0)]
    for notice in told:
        client.deliver(notice)
    assert client.take(5) == told[0::2]
    assert client.take(5) == []
    assert client.take(0) == told[1::2]
    assert not client.untaken


def test_only_a_failure_is_waited_for_until_it_has_left():
    sent = []
    client = RollClient(lambda notice, patience: sent.append((notice.state, patience > 0)))
    for state in ("waiting", "asking", "failed", "refused"):
        client.report(Notice(0, 1, "barrier()", state))
    assert sent == [("waiting", False), ("asking", False), ("failed", True), ("refused", True)]


def test_what_nobody_takes_is_bounded():
    client = RollClient(lambda notice, patience: None)
    for group in range(1000):
        client.deliver(Notice(group, 1, "barrier()"))
    assert list(client.untaken) == list(range(744, 1000)), "those of the oldest groups are dropped"
    for number in range(5000):
        client.deliver(Notice(999, number, "barrier()"))
    assert [notice.sequence for notice in client.take(999)][:3] == [1, 0, 1]
    assert not client.take(999)
    assert len(client.untaken) == 255


def test_without_a_coordinator_nothing_is_reported_and_no_more_is_to_come():
    for client in (RollClient(), RollClient(lambda notice, patience: 1 / 0)):
        client.is_kept = False
        client.report(Notice(0, 1, "barrier()", "failed"))
        assert client.has_heard_last_of(3)


def test_the_last_of_a_rank_is_heard_when_the_coordinator_says_that_it_is_gone():
    client = RollClient(lambda notice, patience: None)
    assert not client.has_heard_last_of(3)
    client.note_gone(3)
    assert client.has_heard_last_of(3)
    client.note_back(3)
    assert not client.has_heard_last_of(3)


def test_groups_are_told_when_the_rank_leaves_and_are_not_kept_alive():
    class Group:
        def leave_roll(self):
            left.append(self.name)

    left = []
    client = RollClient(lambda notice, patience: None)
    kept, dropped = Group(), Group()
    kept.name, dropped.name = "kept", "dropped"
    for group in (kept, dropped):
        client.add(group)
    del dropped, group
    gc.collect()
    client.leave()
    assert left == ["kept"]
