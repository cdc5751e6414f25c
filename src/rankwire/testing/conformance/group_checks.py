"""Conformance checks of groups on every parent, and of what ranks know of each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.backends.sub import SubBackend
from rankwire.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    InvalidRankError,
    InvalidWorldSizeError,
    MembershipError,
    PeerLostError,
)
from rankwire.testing.conformance.tools import PATIENCE, expect, leave, until
from rankwire.testing.ranks import MakeWorld, in_parallel


def _groups(world: Sequence[Backend], members: Sequence[int]) -> list[SubBackend]:
    return in_parallel([partial(SubBackend, world[rank], members) for rank in sorted(set(members))])


def a_group_has_ranks_of_its_own(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        first, second = _groups(world, [1, 3])
        assert (first.rank, first.world_size) == (0, 2)
        assert (second.rank, second.world_size) == (1, 2)
        assert first.parent is world[1]


def members_are_sorted_and_counted_once(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        group = _groups(world, [3, 2, 0, 2, 3])[1]
        assert (list(group.members), group.rank, group.world_size) == ([0, 2, 3], 1, 3)


def wrong_members_are_refused(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        empty = expect(InvalidWorldSizeError, partial(SubBackend, world[0], []))
        assert empty.world_size == 0
        outside = expect(InvalidRankError, partial(SubBackend, world[0], [0, 9]))
        assert (outside.invalid_rank, outside.world_size) == (9, 4)
        stranger = expect(InvalidRankError, partial(SubBackend, world[0], [1, 3]))
        assert stranger.invalid_rank == 0


def ranks_are_translated_both_ways(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        group, _ = _groups(world, [0, 2])
        assert [group.to_global(rank) for rank in (0, 1)] == [0, 2]
        assert [group.to_local(rank) for rank in (0, 1, 2, 3)] == [0, None, 1, None]
        for wrong in (2, -1):
            expect(InvalidRankError, partial(group.to_global, wrong))


def messages_go_through_the_parent(make_world: MakeWorld) -> None:
    with make_world(4) as world:
        first, second = _groups(world, [0, 2])
        first.send(bytes([9, 8, 7]), 1)
        assert second.recv(0) == bytes([9, 8, 7])
        expect(InvalidRankError, partial(first.send, b"x", 2))


def a_groups_barrier_is_its_own(make_world: MakeWorld) -> None:
    with make_world(6) as world:
        groups = _groups(world, [0, 2, 4])
        in_parallel([group.barrier for group in groups])
        late = expect(DeadlineExceededError, partial(groups[0].barrier, timeout=0.1))
        assert late.waiting_for == [1, 2]


def overlapping_groups_and_their_parent_never_mix(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        groups: dict[str, Sequence[Backend]] = {
            "world": world,
            "low": _groups(world, [0, 1]),
            "high": _groups(world, [1, 2]),
            "everyone": _groups(world, [0, 1, 2]),
        }

        def talk(backend: Backend, name: str) -> None:
            right = (backend.rank + 1) % backend.world_size
            left = (backend.rank - 1) % backend.world_size
            for number in range(30):
                backend.send(f"{name} {number}".encode(), right)
                backend.barrier()
                assert backend.recv(left) == f"{name} {number}".encode()

        in_parallel(
            [partial(talk, member, name) for name, group in groups.items() for member in group]
        )


def members_that_disagree_are_told(make_world: MakeWorld) -> None:
    with make_world(3) as world:

        def disagree(rank: int, members: list[int]) -> MembershipError:
            return expect(MembershipError, partial(SubBackend, world[rank], members, timeout=5.0))

        errors = in_parallel([partial(disagree, 0, [0, 1]), partial(disagree, 1, [0, 1, 2])])
        assert all("[0, 1]" in error.message for error in errors)


def a_member_that_does_not_come_is_named(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        late = expect(DeadlineExceededError, partial(SubBackend, world[0], [0, 1, 2], timeout=0.2))
        assert late.waiting_for == [1, 2]


def leaving_a_group_leaves_the_parent_alone(make_world: MakeWorld) -> None:
    with make_world(2) as world:
        groups = _groups(world, [0, 1])
        groups[0].close()
        expect(ChannelClosedError, partial(groups[0].send, b"x", 1))
        world[0].send(b"still here", 1)
        assert world[1].recv(0) == b"still here"


# -- what ranks know of each other -----------------------------------------------------------------


def at_first_all_are_alive(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        for backend in world:
            assert backend.alive == (0, 1, 2)
            status = backend.status()
            assert (status.rank, status.world_size) == (backend.rank, 3)
            assert {peer.state for peer in status.peers.values()} == {"up"}
            assert sorted([*status.peers, backend.rank]) == [0, 1, 2]


def the_status_shows_what_a_rank_waits_for(make_world: MakeWorld) -> None:
    with make_world(2, timeout=PATIENCE) as (first, second):
        waiting = runtime.Thread(target=partial(first.recv, 1, 5))
        waiting.start()
        wanted = ("a message with tag 5",)
        until(lambda: first.status().peers[1].waiting_for == wanted)
        assert first.status().waiting_on == [1]
        assert "a message with tag 5" in str(first.status())
        second.send(b"", 0, 5)
        waiting.join()
        assert first.status().waiting_on == []


def unreceived_messages_are_reported(make_world: MakeWorld) -> None:
    with make_world(2, timeout=PATIENCE) as (first, second):
        for tag in (9, 7, 9):
            second.send(b"", 0, tag)
        second.send(b"last", 0, 1)
        assert first.recv(1, 1) == b"last"  # the others were read before it
        late = expect(DeadlineExceededError, partial(first.recv, 1, 5, 0.05))
        assert "messages of rank 1 lie here unreceived: 1 with tag 7, 2 with tag 9" in str(late)
        assert first.status().peers[1].unreceived == ("1 with tag 7", "2 with tag 9")
        assert "unreceived: 1 with tag 7, 2 with tag 9" in str(first.status())
        for tag in (7, 9, 9):
            first.recv(1, tag)
        assert first.status().peers[1].unreceived == ()


def the_error_of_a_failed_rank_reaches_the_others(make_world: MakeWorld) -> None:
    with make_world(3, timeout=PATIENCE) as world:
        told: list[PeerLostError] = []
        world[0].on_peer_lost(told.append)
        try:
            raise ValueError("bad batch")
        except ValueError as error:
            leave(world[1], error)
        for other in (world[0], world[2]):
            lost = expect(PeerLostError, partial(other.recv, 1))
            assert lost.peer == 1
            assert lost.reason == "it raised ValueError: bad batch"
            assert "the_error_of_a_failed_rank" in lost.remote_traceback
            until(lambda other=other: other.alive == (0, 2))  # type: ignore[misc]
            assert other.status().peers[1].state == "lost"
        until(lambda: [error.peer for error in told] == [1])
        late: list[PeerLostError] = []
        world[0].on_peer_lost(late.append)
        until(lambda: [error.peer for error in late] == [1])


def a_rank_that_leaves_is_not_lost(make_world: MakeWorld) -> None:
    with make_world(3, timeout=PATIENCE) as world:
        told: list[PeerLostError] = []
        world[0].on_peer_lost(told.append)
        leave(world[2])
        expect(ChannelClosedError, lambda: world[0].recv(2))
        until(lambda: world[0].alive == (0, 1))
        assert world[0].status().peers[2].state == "left"
        assert told == []
