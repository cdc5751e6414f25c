"""The part of the conformance suite about what ranks know of each other."""

from __future__ import annotations

import threading
from functools import partial

from rankwire.backends.base import Backend
from rankwire.errors import ChannelClosedError, DeadlineExceededError, PeerLostError
from rankwire.testing.conformance.tools import PATIENCE, expect, until
from rankwire.testing.worlds import MakeWorld


def _leave(backend: Backend, error: BaseException | None = None) -> None:
    """Let a rank leave the world; a group is left with the world that it is a part of."""
    while (parent := getattr(backend, "parent", None)) is not None:
        backend = parent
    backend.close(error=error)


def at_first_all_are_alive(make_world: MakeWorld) -> None:
    with make_world(3) as world:
        for backend in world:
            assert backend.alive == (0, 1, 2)
            status = backend.status()
            assert (status.rank, status.world_size) == (backend.rank, 3)
            assert {peer.state for peer in status.peers.values()} == {"up"}
            assert sorted([*status.peers, backend.rank]) == [0, 1, 2]


def the_status_tells_what_is_waited_for(make_world: MakeWorld) -> None:
    with make_world(2, timeout=PATIENCE) as (first, second):
        waiting = threading.Thread(target=partial(first.recv, 1, 5))
        waiting.start()
        wanted = ("a message with tag 5",)
        until(lambda: first.status().peers[1].waiting_for == wanted)
        assert first.status().waiting_on == [1]
        assert "a message with tag 5" in str(first.status())
        second.send(b"", 0, 5)
        waiting.join()
        assert first.status().waiting_on == []


def messages_that_nobody_receives_are_told(make_world: MakeWorld) -> None:
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


def the_error_that_a_rank_falls_by_reaches_the_others(make_world: MakeWorld) -> None:
    with make_world(3, timeout=PATIENCE) as world:
        told: list[PeerLostError] = []
        world[0].on_peer_lost(told.append)
        try:
            raise ValueError("bad batch")
        except ValueError as error:
            _leave(world[1], error)
        for other in (world[0], world[2]):
            lost = expect(PeerLostError, partial(other.recv, 1))
            assert lost.peer == 1
            assert lost.reason == "it raised ValueError: bad batch"
            assert "the_error_that_a_rank_falls_by" in lost.remote_traceback
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
        _leave(world[2])
        expect(ChannelClosedError, lambda: world[0].recv(2))
        until(lambda: world[0].alive == (0, 1))
        assert world[0].status().peers[2].state == "left"
        assert told == []
