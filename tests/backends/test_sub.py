import pickle
import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep

import msgspec
import numpy as np
import pytest

import rankwire
from rankwire.backends.simulated import SimulatedBackend
from rankwire.backends.sub import SubBackend
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidMessageError,
    InvalidRankError,
    MembershipError,
    PeerLostError,
    RankwireError,
    SelfSendError,
)
from rankwire.mesh.calls import CallCancelled, CallerGone, IncomingCall
from rankwire.testing import in_parallel, run_ranks
from rankwire.wire.frames import Channel
from real_time import Deadline

SOON = 10.0  # what must happen "at once" happens within it on the slowest machine
LATER = 40.0  # a time limit that no operation here may need


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def make_world():
    worlds = []

    def make(world_size, **options):
        worlds.append(SimulatedBackend.create_group(world_size, **{"timeout": LATER, **options}))
        return worlds[-1]

    yield make
    for world in worlds:
        for backend in world:
            backend.close()


def make_group(world, members, **options):
    """Make a group on all its members; return the members' views by their rank in the group."""
    ranks = sorted(set(members))
    return in_parallel([partial(SubBackend, world[rank], members, **options) for rank in ranks])


def notes(error):
    return getattr(error, "__notes__", [])


# -- in a given order ------------------------------------------------------------------------------


def make_ordered(world, members):
    """Make a group in this order; return the members' views by their rank in the group."""
    return in_parallel(
        [partial(SubBackend, world[rank], members, keep_order=True) for rank in members]
    )


def test_members_can_be_numbered_in_a_given_order(make_world):
    group = make_ordered(make_world(4), [3, 0, 2])
    assert [view.members for view in group] == [[3, 0, 2]] * 3
    assert [view.rank for view in group] == [0, 1, 2]
    assert [view.parent.rank for view in group] == [3, 0, 2]
    assert [group[1].to_global(rank) for rank in range(3)] == [3, 0, 2]
    assert [group[1].to_local(rank) for rank in range(4)] == [1, None, 2, 0]
    assert [group[0].world_rank_of(rank) for rank in range(3)] == [3, 0, 2]


def test_any_iterable_gives_the_order(make_world):
    world = make_world(3)
    making = [partial(SubBackend, world[r], iter((2, 0)), keep_order=True) for r in (2, 0)]
    assert [view.rank for view in in_parallel(making)] == [0, 1]


def test_another_order_is_another_group_and_the_ascending_one_is_the_usual(make_world):
    world = make_world(3)
    orders = ([0, 1, 2], [2, 1, 0], [1, 0, 2])
    ids = [{view.group for view in make_ordered(world, order)} for order in orders]
    ids.append({view.group for view in make_group(world, [0, 1, 2])})
    assert all(len(each) == 1 for each in ids), "all members know the same"
    assert len(set.union(*ids)) == 4
    again = [{view.group for view in make_ordered(make_world(3), order)} for order in orders]
    assert again == ids[:3]


@pytest.mark.fault(51, "members that disagree about the order of a group are all told")
def test_another_order_is_a_disagreement(make_world, pool):
    world = make_world(2)
    making = [
        pool.submit(SubBackend, world[0], [1, 0], keep_order=True, timeout=SOON),
        pool.submit(SubBackend, world[1], [1, 0], timeout=SOON),
    ]
    for attempt in making:
        error = attempt.exception(SOON)
        assert isinstance(error, MembershipError)
        assert "rank 0 says [1, 0]" in str(error)
        assert "rank 1 says [0, 1]" in str(error)
    assert [view.members for view in make_ordered(world, [1, 0])] == [[1, 0]] * 2


@pytest.mark.parametrize("members", [[1, 0, 1], [0, 0]])
def test_a_member_has_one_place_in_the_order(make_world, members):
    world = make_world(2)
    with pytest.raises(ConfigurationError, match=f"is repeated in {re.escape(str(members))}"):
        SubBackend(world[0], members, keep_order=True)


def test_messages_calls_and_errors_speak_of_ranks_in_the_order(make_world):
    world = make_world(4)
    first, second, third = make_ordered(world, [3, 0, 2])
    first.send(b"from 3 to 0", 1)
    assert second.recv(0) == b"from 3 to 0"
    ports = [view.open_calls(7) for view in (first, second)]
    waiting = call(ports[0], 1, 5)
    (request,) = poll(ports[1])
    assert request.src == 0
    reply(ports[1], request, b"answer")
    assert bytes(waiting.wait(Deadline(LATER))) == b"answer"
    with pytest.raises(DeadlineExceededError) as caught:
        third.recv(0, timeout=0.05)
    assert (caught.value.rank, caught.value.peer) == (2, 0)
    assert "rank 0 of the group [3, 0, 2] is rank 3 of the world" in notes(caught.value)
    world[3].close()
    with pytest.raises(RankwireError) as gone:
        second.recv(0, timeout=LATER)
    assert gone.value.peer == 0
    assert first.closed or second.failure_of(0) is not None


def test_a_group_in_an_order_of_a_group_in_an_order(make_world):
    world = make_world(4)
    outer = make_ordered(world, [3, 0, 2])
    inner = make_ordered(outer, [2, 0])
    assert [view.world_rank_of(view.rank) for view in inner] == [2, 3]
    inner[0].send(b"from 2 to 3", 1)
    assert inner[1].recv(0) == b"from 2 to 3"
    with pytest.raises(DeadlineExceededError) as caught:
        inner[1].recv(0, timeout=0.05)
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert notes(caught.value) == ["rank 0 of the group [2, 3] is rank 2 of the world"]


@pytest.mark.parametrize("world", ["simulated", "auto", "tcp"])
def test_collectives_go_by_the_order(world):
    def each(backend):
        with SubBackend(backend, [2, 0, 1], keep_order=True) as group:
            mine = np.array([backend.rank])
            gathered = rankwire.all_gather(group, mine)
            sent = rankwire.broadcast(group, mine.copy(), root=0)
            parts = rankwire.all_to_all(group, np.arange(3) + 10 * backend.rank)
            late = _missing(group) if group.rank == 1 else None
            backend.barrier(timeout=SOON)
            return gathered.tolist(), sent.tolist(), parts.tolist(), late

    results = run_ranks(3, each, backend=world)
    assert [result[0] for result in results] == [[2, 0, 1]] * 3
    assert [result[1] for result in results] == [[2]] * 3
    assert [result[2] for result in results] == [[21, 1, 11], [22, 2, 12], [20, 0, 10]]
    assert [result[3] for result in results] == [[0, 2], None, None]


def _missing(group):
    with pytest.raises(DeadlineExceededError) as caught:
        rankwire.barrier(group, timeout=0.5)
    return caught.value.waiting_for


def test_ranks_are_mapped_both_ways(make_world):
    (first, _) = make_group(make_world(4), [0, 2])
    assert [first.to_global(0), first.to_global(1)] == [0, 2]
    assert [first.to_local(rank) for rank in range(4)] == [0, None, 1, None]
    for wrong in (2, -1):
        with pytest.raises(InvalidRankError) as caught:
            first.to_global(wrong)
        assert (caught.value.invalid_rank, caught.value.world_size) == (wrong, 2)


def test_the_list_of_members_is_the_callers_own(make_world):
    (first, _) = make_group(make_world(2), [0, 1])
    first.members.append(7)
    assert first.members == [0, 1]


def test_a_group_inherits_the_settings_of_its_parent(make_world):
    world = make_world(2, timeout=7.0, max_message_nbytes=100)
    (first, _) = make_group(world, [0, 1])
    assert (first.parent, first.timeout, first.max_message_nbytes) == (world[0], 7.0, 100)
    (first, _) = make_group(world, [0, 1], timeout=3.0)
    assert first.timeout == 3.0


def test_a_rank_that_is_not_a_member_is_told_so(make_world):
    world = make_world(4)
    with pytest.raises(
        InvalidRankError, match=r"rank 0 is not a member of the group \[1, 3\]"
    ) as it:
        SubBackend(world[0], [1, 3])
    assert (it.value.invalid_rank, it.value.world_size) == (0, 2)
    assert str(pickle.loads(pickle.dumps(it.value))) == str(it.value)


@pytest.mark.parametrize("wrong", [4, -1, "1", 1.0])
def test_a_member_must_be_a_rank_of_the_parent(make_world, wrong):
    with pytest.raises(InvalidRankError) as caught:
        SubBackend(make_world(4)[0], [0, wrong])
    assert (caught.value.invalid_rank, caught.value.world_size) == (wrong, 4)


def test_a_group_of_one_needs_nobody(make_world):
    world = make_world(2)
    alone = SubBackend(world[1], [1], timeout=0)
    alone.barrier(timeout=0)
    assert (alone.rank, alone.world_size) == (0, 1)


# -- agreement -------------------------------------------------------------------------------------


def test_all_members_know_the_same_id_and_each_group_has_its_own(make_world):
    world = make_world(4)
    ids = []
    for members in ([0, 1], [0, 1], [0, 1, 2], [0, 2]):
        group = make_group(world, members)
        assert len({view.group for view in group}) == 1
        ids.append(group[0].group)
    assert len(set(ids)) == 4
    assert 0 not in ids


def test_the_same_groups_made_again_elsewhere_have_the_same_ids(make_world):
    first, second = (
        [make_group(world, members)[0].group for members in ([0, 1], [0, 1], [1, 2])]
        for world in (make_world(3), make_world(3))
    )
    assert first == second


@pytest.mark.fault(51, "members that disagree about a group are both told")
def test_a_disagreement_is_found_by_both(make_world, pool):
    world = make_world(3, timeout=60.0)
    begin = monotonic()
    made = [pool.submit(SubBackend, world[0], [0, 1]), pool.submit(SubBackend, world[1], [0, 1, 2])]
    errors = [future.exception(SOON) for future in made]
    assert [type(error) for error in errors] == [MembershipError] * 2
    for error in errors:
        assert "rank 0 says [0, 1]" in str(error)
        assert "rank 1 says [0, 1, 2]" in str(error)
    assert [error.rank for error in errors] == [0, 1]
    assert monotonic() - begin < SOON  # rank 2, which never came, was not waited for


def test_a_missing_member_is_named(make_world, pool):
    world = make_world(5)
    made = [pool.submit(SubBackend, world[rank], [0, 1, 3, 4], timeout=1.0) for rank in (0, 3)]
    errors = [future.exception(SOON) for future in made]
    assert [type(error) for error in errors] == [DeadlineExceededError] * 2
    assert [error.waiting_for for error in errors] == [[1, 4], [1, 4]]
    assert (errors[1].op, errors[1].rank, errors[1].limit) == ("SubBackend", 3, 1.0)


def test_after_a_disagreement_the_members_can_agree(make_world, pool):
    world = make_world(3)
    lists = ([0, 1], [0, 1, 2])
    made = [pool.submit(SubBackend, world[rank], lists[rank]) for rank in (0, 1)]
    assert [type(future.exception(SOON)) for future in made] == [MembershipError] * 2
    in_parallel([view.barrier for view in make_group(world, [0, 1])])


def test_the_members_agree_on_the_highest_count(make_world):
    world = make_world(2)

    def announce(ordinal):
        payload = msgspec.msgpack.encode(([0, 1], ordinal))
        world[1].messages.transmit(
            0, (0, Channel.CONTROL, 0), ([payload], len(payload)), Deadline(0)
        )

    def announced():
        return msgspec.msgpack.decode(
            world[1].messages.receive(0, (0, Channel.CONTROL, 0), Deadline(0))
        )

    announce(5)
    SubBackend(world[0], [0, 1])
    announce(2)
    SubBackend(world[0], [0, 1])
    announce(7)
    SubBackend(world[0], [0, 1])
    assert [announced() for _ in range(3)] == [[[0, 1], 0, []], [[0, 1], 6, []], [[0, 1], 7, []]]


def test_an_attempt_that_only_one_side_had_heard_of_leaves_both_in_step(make_world):
    """Rank 1 gives up before rank 0 has begun; rank 0 hears its word, and then gives up for rank 2.

    Each has said its word once, and one of them has heard the other's.
    """
    world = make_world(3)
    for rank in (1, 0):
        with pytest.raises(DeadlineExceededError):
            SubBackend(world[rank], [0, 1, 2], timeout=0.05)
    groups = make_group(world, [0, 1, 2], timeout=SOON)
    assert len({group.group for group in groups}) == 1
    groups = make_group(world, [0, 1], timeout=SOON)  # and nothing is left of all that
    groups[0].send(b"x", 1)
    assert groups[1].recv(0) == b"x"


def test_a_word_on_a_group_with_a_rank_that_is_lost_is_not_taken_for_one_without(make_world):
    world = make_world(3)
    with pytest.raises(DeadlineExceededError):
        SubBackend(world[0], [0, 1, 2], timeout=0.05)
    world[0].network.kill(2)
    groups = make_group(world, [0, 1], timeout=SOON)
    groups[0].send(b"x", 1)
    assert groups[1].recv(0) == b"x"


def test_a_member_that_hears_later_of_a_new_process_is_in_step_at_the_next_attempt(
    make_world, pool, monkeypatch
):
    """Rank 2 was started anew. Rank 1 does not know it, and makes the group with the old one."""
    world = make_world(3)

    def hear_of_it(rank):
        monkeypatch.setattr(world[rank], "incarnation_of", lambda other: int(other == 2))

    for rank in (0, 2):
        hear_of_it(rank)
    making = [pool.submit(SubBackend, world[rank], [0, 1, 2], timeout=SOON) for rank in (0, 2)]
    with pytest.raises(PeerLostError, match="started anew, as another member says") as caught:
        SubBackend(world[1], [0, 1, 2], timeout=SOON)
    assert caught.value.peer == 2
    assert not any(future.done() for future in making)  # what it said does not count
    hear_of_it(1)
    group = SubBackend(world[1], [0, 1, 2], timeout=SOON)
    assert {future.result(SOON).group for future in making} == {group.group}
    make_group(world, [0, 1])  # nothing of the past is left over


def test_a_member_that_was_late_is_in_step_at_the_next_attempt(make_world):
    world = make_world(3)
    with pytest.raises(DeadlineExceededError):
        SubBackend(world[0], [0, 1], timeout=0)
    late = SubBackend(world[1], [0, 1])  # finds the announcement of the first attempt
    first = SubBackend(world[0], [0, 1])
    assert first.group == late.group
    group = make_group(world, [0, 1])
    assert group[0].group == group[1].group != first.group
    in_parallel([view.barrier for view in group])
    make_group(world, [0, 1, 2])  # no announcement of the past is left over


def test_a_lost_member_is_named(make_world):
    world = make_world(3)
    world[0].network.kill(2)
    with pytest.raises(PeerLostError) as caught:
        SubBackend(world[0], [0, 2])
    assert (caught.value.peer, caught.value.op) == (2, "SubBackend")


def test_an_announcement_that_does_not_decode_is_refused(make_world):
    world = make_world(2)
    garbage = msgspec.msgpack.encode(["no", "list"])
    world[1].messages.transmit(0, (0, Channel.CONTROL, 0), ([garbage], len(garbage)), Deadline(0))
    with pytest.raises(InvalidMessageError) as caught:
        SubBackend(world[0], [0, 1])
    assert caught.value.peer == 1


def test_one_thread_makes_a_group_at_a_time(make_world, pool):
    world = make_world(2)
    first = pool.submit(SubBackend, world[0], [0, 1], timeout=SOON)
    sleep(0.05)
    with pytest.raises(DeadlineExceededError):
        SubBackend(world[0], [0, 1], timeout=0.05)
    SubBackend(world[1], [0, 1])
    assert first.result(SOON).members == [0, 1]


# -- messages --------------------------------------------------------------------------------------


def test_groups_and_parent_share_ranks_and_tags_without_mixing(make_world):
    world = make_world(4)
    left, middle = make_group(world, [0, 1, 2]), make_group(world, [1, 2, 3])
    again = make_group(world, [1, 2, 3])
    worlds = {"world": world, "left": left, "middle": middle, "again": again}

    def talk(name, one, peer):
        for number in range(10):
            one.send(f"{name} {number}".encode(), peer, tag=5)
            one.barrier()
        for number in range(10):
            assert one.recv((one.rank - 1) % one.world_size, tag=5) == f"{name} {number}".encode()
            one.barrier()

    in_parallel(
        [
            partial(talk, name, one, (one.rank + 1) % one.world_size)
            for name, ranks in worlds.items()
            for one in ranks
        ]
    )


def test_a_group_of_a_group_speaks_of_ranks_of_its_parent(make_world):
    world = make_world(6)
    middle = make_group(world, [1, 3, 5])
    inner = make_group(middle, [0, 2])
    assert [view.members for view in inner] == [[0, 2], [0, 2]]
    assert inner[1].parent is middle[2]
    inner[0].send(b"deep", 1)
    middle[0].send(b"middle", 2)
    world[1].send(b"world", 5)
    assert (world[5].recv(1), middle[2].recv(0), inner[1].recv(0)) == (b"world", b"middle", b"deep")
    in_parallel([view.barrier for view in inner])


# -- errors ----------------------------------------------------------------------------------------


def test_a_timeout_names_ranks_of_the_group_and_notes_the_world_ranks(make_world):
    (_, second) = make_group(make_world(5), [1, 4])
    with pytest.raises(DeadlineExceededError) as caught:
        second.recv(0, timeout=0)
    error = caught.value
    assert (error.rank, error.peer, error.waiting_for) == (1, 0, [0])
    assert notes(error) == ["rank 0 of the group [1, 4] is rank 1 of the world"]
    assert "rank 1 of the world" in "".join(traceback.format_exception(error))


def test_a_barrier_names_the_missing_and_notes_the_world_ranks(make_world):
    group = make_group(make_world(6), [1, 3, 5])
    with pytest.raises(DeadlineExceededError) as caught:
        group[0].barrier(timeout=0.1)
    assert caught.value.waiting_for == [1, 2]
    assert notes(caught.value)[-2:] == [
        "rank 1 of the group [1, 3, 5] is rank 3 of the world",
        "rank 2 of the group [1, 3, 5] is rank 5 of the world",
    ]


def test_a_death_fails_all_that_is_pending_and_names_the_rank(make_world, pool):
    world = make_world(6)
    group = make_group(world, [1, 3, 5])
    waiting = [pool.submit(group[0].recv, 2), pool.submit(group[0].recv, 2, 1)]
    sleep(0.02)
    world[0].network.kill(5)
    for error in [future.exception(SOON) for future in waiting]:
        assert (type(error), error.peer) == (PeerLostError, 2)
        assert notes(error) == ["rank 2 of the group [1, 3, 5] is rank 5 of the world"]
    with pytest.raises(PeerLostError):
        group[1].barrier()
    group[0].send(b"we go on", 1)
    assert group[1].recv(0) == b"we go on"


def test_an_error_of_a_group_of_a_group_notes_the_world_rank(make_world):
    world = make_world(6)
    inner = make_group(make_group(world, [1, 3, 5]), [1, 2])
    world[0].network.kill(5)
    with pytest.raises(PeerLostError) as caught:
        inner[0].send(b"x", 1)
    assert caught.value.peer == 1
    assert notes(caught.value) == ["rank 1 of the group [3, 5] is rank 5 of the world"]


def test_a_message_to_oneself_is_refused_by_the_rank_in_the_group(make_world):
    (_, second) = make_group(make_world(3), [0, 2])
    with pytest.raises(SelfSendError) as caught:
        second.send(b"", 1)
    assert caught.value.rank == 1


def test_a_member_whose_parent_left_is_gone(make_world):
    world = make_world(3)
    first, second = make_group(world, [0, 2])
    first.send(b"last words", 1)
    world[0].close()
    assert second.recv(0) == b"last words"
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        second.recv(0)


# -- closing ---------------------------------------------------------------------------------------


def test_closing_a_group_leaves_the_parent_usable(make_world):
    world = make_world(3)
    first, second = make_group(world, [0, 2])
    for view in (first, second):
        view.close()
        view.close()
        assert view.closed
    for action in (
        lambda: first.send(b"x", 1),
        lambda: first.recv(1),
        first.barrier,
        lambda: first.open_calls(1),
    ):
        with pytest.raises(ChannelClosedError):
            action()
    world[0].send(b"still here", 2)
    assert world[2].recv(0) == b"still here"
    assert not world[0].closed
    in_parallel([view.barrier for view in make_group(world, [0, 2])])


def test_closing_a_group_wakes_whoever_waits_in_it(make_world, pool):
    world = make_world(3)
    first, _ = middle = make_group(world, [0, 2])
    inner, _ = make_group(middle, [0, 1])
    elsewhere = pool.submit(world[0].recv, 2)
    waiting = [
        pool.submit(action)
        for action in (
            lambda: first.recv(1),
            lambda: first.recv(1, tag=4),
            first.barrier,
            lambda: inner.recv(1),
        )
    ]
    first.close()
    assert [type(future.exception(SOON)) for future in waiting] == [ChannelClosedError] * 4
    world[2].send(b"for the parent", 0)
    assert elsewhere.result(SOON) == b"for the parent"


def test_closing_a_group_of_a_group_leaves_its_parent_usable(make_world, pool):
    middle = make_group(make_world(3), [0, 2])
    inner = make_group(middle, [0, 1])
    waiting = [pool.submit(inner[0].recv, 1), pool.submit(middle[0].recv, 1)]
    inner[0].close()
    assert isinstance(waiting[0].exception(SOON), ChannelClosedError)
    middle[1].send(b"x", 0)
    assert waiting[1].result(SOON) == b"x"


def test_closing_a_group_ends_a_receive_whose_thread_reads_for_another_group(make_world, pool):
    world = make_world(2)
    first, second = make_group(world, [0, 1])
    closing = pool.submit(first.recv, 1)
    sleep(0.05)  # it reads the connection; the next one sleeps meanwhile
    going_on = pool.submit(world[0].recv, 1)
    sleep(0.05)
    first.close()
    assert isinstance(closing.exception(SOON), ChannelClosedError)
    world[1].send(b"x", 0)
    assert going_on.result(SOON) == b"x"
    second.close()


def test_a_port_that_is_opened_while_the_group_closes_is_closed(make_world, monkeypatch):
    world = make_world(1)
    group = SubBackend(world[0], [0])
    open_calls = world[0].mesh.open_calls

    def close_meanwhile(service, ranks):
        port = open_calls(service, ranks)
        group.close()
        return port

    monkeypatch.setattr(world[0].mesh, "open_calls", close_meanwhile)
    port = group.open_calls(1)
    with pytest.raises(ChannelClosedError):
        poll(port)


def test_a_group_is_a_context_manager(make_world):
    with SubBackend(make_world(1)[0], [0]) as group:
        pass
    assert group.closed


# -- calls -----------------------------------------------------------------------------------------


def call(port, dst, request_id, payload=b"?"):
    return port.call(dst, request_id, ([payload], len(payload)), Deadline(LATER))


def reply(port, request, payload):
    port.reply(request, ([payload], len(payload)), Deadline(LATER))


def poll(port, timeout=LATER):
    return port.poll(Deadline(timeout))


def test_calls_speak_of_ranks_of_the_group(make_world):
    caller, callee = (view.open_calls(1) for view in make_group(make_world(6), [3, 5]))
    receive = call(caller, 1, 8, b"question")
    (request,) = poll(callee)
    assert isinstance(request, IncomingCall)
    assert (request.src, request.request_id, request.payload) == (0, 8, b"question")
    assert caller.in_flight() == 1
    assert not caller.wait_for_room(1, 1, Deadline(0))
    assert not receive.drive(Deadline(0))
    assert caller.attend()
    callee.reply(request, ([b"answer"], 6), Deadline(LATER), hold=True)
    callee.flush()
    assert receive.drive(Deadline(LATER))
    assert receive.wait(Deadline(LATER)) == b"answer"
    assert not caller.attend()


def test_calls_of_a_group_of_a_group_are_translated_twice(make_world):
    inner = make_group(make_group(make_world(6), [1, 3, 5]), [1, 2])
    caller, callee = (view.open_calls(1) for view in inner)
    receive = call(caller, 1, 1)
    (request,) = poll(callee)
    assert request.src == 0
    reply(callee, request, b"deep")
    assert receive.wait(Deadline(LATER)) == b"deep"


def test_one_service_number_is_another_service_in_each_group(make_world):
    world = make_world(4)
    one, other = make_group(world, [1, 3]), make_group(world, [1, 3])
    pairs = [(world[3], world[1]), (one[1], one[0]), (other[1], other[0])]
    ports = [(caller.open_calls(9), callee.open_calls(9)) for caller, callee in pairs]
    for number, (caller, _) in enumerate(ports):
        call(caller, pairs[number][1].rank, 1, bytes([number]))
    for number, (_, callee) in enumerate(ports):
        assert [event.payload for event in poll(callee)] == [bytes([number])]
        assert poll(callee, 0) == []


def test_cancels_and_ends_are_translated(make_world):
    world = make_world(6)
    group = make_group(world, [3, 4, 5])
    ports = [view.open_calls(1) for view in group]
    call(ports[1], 2, 1)
    call(ports[0], 2, 1)
    ports[1].cancel(2, 1)
    ports[1].close()
    world[0].network.kill(3)
    events = []
    while len(events) < 5:
        events += poll(ports[2])
    kinds = {src: [type(event) for event in events if event.src == src] for src in (0, 1)}
    assert kinds == {
        0: [IncomingCall, CallerGone],
        1: [IncomingCall, CallCancelled, CallerGone],
    }


def test_errors_of_calls_name_ranks_of_the_group(make_world):
    world = make_world(6)
    first, second = make_group(world, [3, 5])
    caller, callee = first.open_calls(1), second.open_calls(1)
    receive = call(caller, 1, 1)
    with pytest.raises(DeadlineExceededError) as caught:
        receive.wait(Deadline(0))
    assert caught.value.waiting_for == [1]
    receive = call(caller, 1, 2)
    assert receive.withdraw()
    world[0].network.kill(5)
    with pytest.raises(PeerLostError) as caught:
        call(caller, 1, 3)
    assert caught.value.peer == 1
    assert notes(caught.value) == ["rank 1 of the group [3, 5] is rank 5 of the world"]
    with pytest.raises(PeerLostError) as caught:
        poll(callee)
    assert caught.value.peer == 1
    with pytest.raises(InvalidRankError):
        call(caller, 2, 4)


def poll_for_ever(port):
    while True:
        port.poll(Deadline(LATER))


def test_closing_a_group_closes_its_ports(make_world, pool):
    group = make_group(make_world(3), [0, 2])
    caller, callee = (view.open_calls(1) for view in group)
    receive = call(caller, 1, 1)
    waiting = [
        pool.submit(receive.wait, Deadline(LATER)),
        pool.submit(poll_for_ever, caller),
    ]
    sleep(0.02)
    group[0].close()
    assert [type(future.exception(SOON)) for future in waiting] == [ChannelClosedError] * 2
    events = [*poll(callee), *poll(callee)]
    assert [type(event) for event in events] == [IncomingCall, CallerGone]
    callee.wake()
    assert poll(callee) == []
