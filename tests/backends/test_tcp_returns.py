"""A rank that was started anew comes back to its world: ranks in threads, started by a launcher."""

import contextlib
import os
import threading

import numpy as np
import pytest

import rankwire
from rankwire import RpcAgent, SubBackend
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    DeadlineExceededError,
    MembershipError,
    PeerLostError,
    RendezvousError,
)
from rankwire.links.dialer import authenticate
from rankwire.rendezvous.coordinator_host import CoordinatorHost
from rankwire.rendezvous.reports import Told
from rankwire.transports.security import UNPROTECTED
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp
from rankwire.wire.handshake import Purpose
from rankwire.wire.keys import rank_key
from real_time import Deadline
from worlds import (
    PATIENCE,
    SECRET,
    Running,
    address_of,
    bound_socket,
    eventually,
    runtime_folder_of_its_own,
)


class Job:
    """A world of ranks in threads, and the launcher that starts them anew."""

    def __init__(self, world_size=3):
        self.world_size = world_size
        listener = bound_socket()
        self.address = address_of(listener)
        self.told = []
        self.incarnations = [0] * world_size
        self.host = CoordinatorHost(
            listener,
            world_size,
            secret=SECRET,
            job="returns",
            told=Told(
                on_gone=lambda gone: self.told.append(("gone", gone.rank)),
                on_joined=lambda member: self.told.append(("joined", member.rank)),
            ),
            are_restarted=True,
            clock=REAL_TIME,
            policy=UNPROTECTED,
        )
        starting = [self.start(rank) for rank in range(world_size)]
        self.ranks = [each.result() for each in starting]

    def start(self, rank, incarnation=None, **options):
        incarnation = self.incarnations[rank] if incarnation is None else incarnation
        settings = {"join_timeout": PATIENCE, "timeout": PATIENCE} | options
        return Running(
            TcpBackend,
            rank,
            self.world_size,
            self.address,
            secret=rank_key(SECRET, rank, incarnation),
            job="returns",
            has_coordinator=True,
            **settings,
        )

    def lose(self, rank):
        gone = ("gone", rank)
        before = self.told.count(gone)
        self.ranks[rank].close(error=RuntimeError("it fell"))
        eventually(lambda: self.told.count(gone) > before)  # there may be no other to hear of it
        for other in self.ranks:
            if other is not self.ranks[rank] and not other.closed:
                eventually(lambda other=other: rank not in other.alive)

    def expect(self, rank):
        self.incarnations[rank] += 1
        self.host.expect_again(rank, self.incarnations[rank])

    def restart(self, rank):
        self.expect(rank)
        self.ranks[rank] = self.start(rank).result()
        return self.ranks[rank]

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.host.close()


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path


@pytest.fixture
def job():
    with contextlib.closing(Job()) as job:
        yield job


def test_a_rank_comes_back_and_talks_to_all(job):
    job.lose(1)
    back = job.restart(1)
    assert back.incarnation == 1
    assert back.alive == (0, 1, 2)
    for other in (0, 2):
        # When the new one is in the world, all others know it.
        assert job.ranks[other].alive == (0, 1, 2)
        job.ranks[other].send(b"welcome", 1)
        assert back.recv(other) == b"welcome"
        back.send(b"thanks", other)
        assert job.ranks[other].recv(1) == b"thanks"
        status = job.ranks[other].status().peers[1]
        assert (status.state, status.incarnation) == ("up", 1)
        assert "incarnation 1" in str(status)
        assert job.ranks[other].link_to(1).incarnation == 1
        assert back.status().peers[other].incarnation == 0


def test_a_wait_returns_when_the_rank_is_back(job):
    job.ranks[0].wait_for(1, timeout=0.0)
    job.lose(1)
    waiting = [Running(job.ranks[rank].wait_for, 1) for rank in (0, 2)]
    with pytest.raises(DeadlineExceededError, match="it was lost and has not come back"):
        job.ranks[0].wait_for(1, timeout=0.05)
    assert not any(each.done for each in waiting)
    job.restart(1)
    for each in waiting:
        each.result()
    job.ranks[0].send(b"welcome", 1)
    assert job.ranks[1].recv(0) == b"welcome"


def test_a_wait_ends_when_nobody_can_bring_the_rank_back(job):
    job.lose(1)
    waiting = Running(job.ranks[0].wait_for, 1)
    job.host.close()
    with pytest.raises(PeerLostError, match="it fell"):
        waiting.result()
    with pytest.raises(PeerLostError):
        job.ranks[2].wait_for(1)


def test_a_wait_ends_when_its_backend_is_closed(job):
    job.lose(1)
    waiting = Running(job.ranks[0].wait_for, 1)
    job.ranks[0].close()
    with pytest.raises(ChannelClosedError, match="this backend is closed"):
        waiting.result()


def test_a_group_does_not_wait_for_a_lost_member(job):
    groups = [Running(SubBackend, rank, [0, 1, 2]) for rank in job.ranks]
    group, *_ = [each.result() for each in groups]
    group.wait_for(1)
    for _ in range(2):
        job.lose(1)
        with pytest.raises(PeerLostError):
            group.wait_for(1)
        job.restart(1)
        job.ranks[0].wait_for(1)
        with pytest.raises(PeerLostError):
            group.wait_for(1)


def test_others_are_told_of_the_loss_and_then_of_the_return(job):
    heard = []
    job.ranks[0].on_peer_lost(lambda error: heard.append(("lost", error.peer)))
    job.ranks[0].on_peer_joined(lambda *joined: heard.append(("joined", *joined)))
    for incarnation in (1, 2):
        job.lose(1)
        job.restart(1)
        expected = [("lost", 1), ("joined", 1, incarnation)]
        eventually(lambda expected=expected: heard[-2:] == expected)
    assert len(heard) == 4


def test_who_asks_late_is_told_of_who_is_back_and_not_of_its_old_loss(job):
    job.lose(1)
    job.restart(1)
    heard = []
    job.ranks[0].on_peer_lost(lambda error: heard.append(error.peer))
    job.ranks[0].on_peer_joined(lambda *joined: heard.append(joined))
    eventually(lambda: heard == [(1, 1)])
    job.lose(1)
    eventually(lambda: heard == [(1, 1), 1])
    job.ranks[0].on_peer_joined(lambda *joined: heard.append("told of one that is gone"))
    job.restart(1)
    eventually(lambda: heard[2:3] == [(1, 2)])


def test_a_callback_that_was_removed_is_not_called(job):
    heard = []
    remove = job.ranks[0].on_peer_joined(lambda *joined: heard.append("removed"))
    job.ranks[0].on_peer_joined(lambda *joined: heard.append(joined))
    remove()
    job.lose(1)
    job.restart(1)
    eventually(lambda: heard == [(1, 1)])


def test_calls_to_the_old_process_fail_and_new_ones_go_to_the_new_one(job):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        entered.set()
        leave.wait(PATIENCE)
        return "old"

    with RpcAgent(job.ranks[0]) as caller:
        callee = RpcAgent(job.ranks[1])
        callee.register("who", hold)
        waiting = caller.rpc_async(1, "who")
        assert entered.wait(PATIENCE)
        job.lose(1)
        with pytest.raises(PeerLostError) as caught:
            waiting.result()
        assert caught.value.peer == 1
        with pytest.raises(PeerLostError):
            caller.rpc_sync(1, "who")
        leave.set()
        back = job.restart(1)
        with RpcAgent(back) as agent:
            agent.register("who", lambda: "new")
            assert caller.rpc_sync(1, "who") == "new"


def test_messages_of_the_old_process_are_never_the_new_ones(job):
    job.ranks[1].send(b"of the old one", 0, tag=7)
    job.ranks[1].send(b"also", 0, tag=8)
    assert job.ranks[0].recv(1, tag=8) == b"also"  # so the other one has been read too
    job.lose(1)
    back = job.restart(1)
    with pytest.raises(rankwire.DeadlineExceededError):
        job.ranks[0].recv(1, tag=7, timeout=0.05)
    back.send(b"of the new one", 0, tag=7)
    assert job.ranks[0].recv(1, tag=7) == b"of the new one"


def test_what_a_lost_rank_had_sent_can_be_received_until_it_is_back(job):
    job.ranks[1].send(b"before it fell", 0, tag=7)
    job.ranks[1].send(b"also", 0, tag=8)
    assert job.ranks[0].recv(1, tag=8) == b"also"
    job.lose(1)
    assert job.ranks[0].recv(1, tag=7) == b"before it fell"


def test_a_receive_that_waited_for_the_old_process_fails(job):
    waiting = Running(job.ranks[0].recv, 1, tag=3)
    handle = job.ranks[0].irecv(1, tag=4)
    job.lose(1)
    assert isinstance(waiting.error(), PeerLostError)
    back = job.restart(1)
    back.send(b"new", 0, tag=4)
    with pytest.raises(PeerLostError):
        handle.wait()
    assert job.ranks[0].recv(1, tag=4) == b"new"


def test_a_receive_from_any_rank_hears_the_one_that_is_back(job):
    waiting = Running(job.ranks[0].recv_any, tag=5)
    job.lose(1)
    back = job.restart(1)
    back.send(b"here again", 0, tag=5)
    assert waiting.result() == (1, b"here again")


def test_collectives_of_the_world_say_that_a_new_group_is_needed(job):
    job.lose(1)
    back = job.restart(1)
    for rank in (0, 2):
        for barrier in (TcpBackend.barrier, rankwire.barrier):
            with pytest.raises(PeerLostError, match=r"started anew .*make a new group") as caught:
                barrier(job.ranks[rank])
            assert caught.value.peer == 1
        with pytest.raises(PeerLostError, match="make a new group"):
            rankwire.all_reduce(job.ranks[rank], np.ones(2))
    for operation in (back.barrier, lambda: rankwire.all_reduce(back, np.ones(2))):
        with pytest.raises(MembershipError, match="rank 1 joined when the world had formed"):
            operation()


def test_a_new_group_of_all_ranks_has_collectives_again(job):
    arrays = [np.ones(4) for _ in range(3)]
    running = [Running(rankwire.all_reduce, *pair) for pair in zip(job.ranks, arrays, strict=True)]
    for each in running:
        each.result()
    for _ in range(2):
        job.lose(1)
        job.restart(1)
        making = [Running(SubBackend, rank, range(3)) for rank in job.ranks]
        groups = [each.result() for each in making]
        assert len({group.group for group in groups}) == 1
        arrays = [np.full(4, rank + 1.0) for rank in range(3)]
        running = [Running(rankwire.all_reduce, *pair) for pair in zip(groups, arrays, strict=True)]
        for each in running:
            each.result()
        assert all(np.array_equal(array, np.full(4, 6.0)) for array in arrays)
        meeting = [Running(group.barrier) for group in groups]
        for each in meeting:
            each.result()


def test_a_group_made_before_is_over_for_the_rank_that_is_back_and_not_for_others(job):
    making = [Running(SubBackend, rank, range(3)) for rank in job.ranks]
    groups = [each.result() for each in making]
    pair = [Running(SubBackend, job.ranks[rank], [0, 2]) for rank in (0, 2)]
    pair = [each.result() for each in pair]
    heard = []
    groups[0].on_peer_joined(lambda *joined: heard.append(joined))
    job.lose(1)
    job.restart(1)
    eventually(lambda: heard == [(1, 1)])
    for operation in (
        lambda: groups[0].send(b"x", 1),
        lambda: groups[0].recv(1),
        groups[0].barrier,
        lambda: rankwire.all_reduce(groups[0], np.ones(1)),
    ):
        with pytest.raises(PeerLostError, match="make a new group") as caught:
            operation()
        assert caught.value.peer == 1
    assert groups[0].alive == (0, 2)
    groups[0].send(b"among the others", 2)
    assert groups[2].recv(0) == b"among the others"
    meeting = [Running(group.barrier) for group in pair]
    for each in meeting:
        each.result()


def test_two_ranks_come_back_at_once_and_know_each_other(job):
    job.lose(1)
    job.lose(2)
    job.expect(1)
    job.expect(2)
    starting = [job.start(1), job.start(2)]
    job.ranks[1:] = [each.result() for each in starting]
    for a, b in ((0, 1), (1, 2), (2, 0)):
        eventually(lambda a=a, b=b: b in job.ranks[a].alive)
        job.ranks[a].send(b"hello", b)
        assert job.ranks[b].recv(a) == b"hello"


def test_a_world_that_all_ranks_were_lost_to_is_kept_for_them(job):
    for rank in range(3):
        job.lose(rank)
    first = job.restart(0)
    eventually(lambda: first.alive == (0,))
    job.restart(2)
    eventually(lambda: first.alive == (0, 2))
    job.restart(1)
    first.send(b"all again", 1)
    assert job.ranks[1].recv(0) == b"all again"


def test_a_rank_that_is_back_is_told_who_left_and_who_is_lost(job):
    job.ranks[2].close()
    job.lose(1)
    job.lose(0)
    back = job.restart(1)
    eventually(lambda: back.alive == (1,))
    states = {rank: peer.state for rank, peer in back.status().peers.items()}
    assert states == {0: "lost", 2: "left"}
    with pytest.raises(ChannelClosedError):
        back.send(b"x", 2)
    with pytest.raises(PeerLostError, match="it fell"):
        back.send(b"x", 0)


# -- nobody else takes its place


def test_nobody_takes_the_place_of_a_rank_that_lives(job):
    job.told.clear()
    error = job.start(1, join_timeout=0.3).error()
    assert isinstance(error, RendezvousError)
    assert "taken by another process" in str(error)
    # The key of the next incarnation, which nobody has yet, does not help either.
    assert isinstance(job.start(1, incarnation=1, join_timeout=2.0).error(), AuthenticationError)
    assert job.told == []
    job.ranks[0].send(b"still here", 1)
    assert job.ranks[1].recv(0) == b"still here"


def test_nobody_comes_in_place_of_a_lost_rank_before_it_is_started_anew(job):
    job.lose(1)
    error = job.start(1, join_timeout=0.3).error()
    assert isinstance(error, RendezvousError)
    assert "takes no more ranks" in str(error)


def test_the_key_of_the_old_process_opens_nothing_any_more(job):
    job.lose(1)
    job.expect(1)
    assert isinstance(job.start(1, incarnation=0, join_timeout=5.0).error(), AuthenticationError)
    job.ranks[1] = job.start(1).result()
    assert isinstance(job.start(1, incarnation=0, join_timeout=5.0).error(), AuthenticationError)
    assert isinstance(job.start(1, join_timeout=0.3).error(), RendezvousError)


def test_the_old_process_cannot_dial_the_others_with_its_keys(job):
    """A child that it forked, say, which lives on and has all that it knew."""
    old = job.ranks[1].mesh.formation
    keys, hello = dict(old.keys.shared), old.hello(Purpose.MESSAGES, 0)
    member = job.ranks[0].mesh._me
    job.lose(1)
    job.restart(1)
    deadline = Deadline(PATIENCE)
    sock = connect_tcp(TcpAddress(member.host, member.port), deadline)
    with sock, pytest.raises(AuthenticationError):
        authenticate(sock, hello, key=keys[0], deadline=deadline)
    job.ranks[1].send(b"the new one", 0)
    assert job.ranks[0].recv(1) == b"the new one"


def test_a_rank_that_dies_on_its_way_back_is_lost_again_and_may_come_again(job):
    heard = []
    job.ranks[0].on_peer_joined(lambda *joined: heard.append(joined))
    job.lose(1)
    for _ in range(3):
        job.expect(1)
        running = job.start(1)
        running.result().close(error=RuntimeError("and again"))
    eventually(lambda: heard == [(1, 1), (1, 2), (1, 3)])
    back = job.restart(1)
    back.send(b"at last", 0)
    assert job.ranks[0].recv(1) == b"at last"


# -- nothing is left


def test_nothing_is_left_of_old_processes(job):
    def exchange():
        for other in (0, 2):
            job.ranks[other].send(b"x" * 100, 1)
            job.ranks[1].recv(other)
            job.ranks[1].send(b"y" * 100, other)
            job.ranks[other].recv(1)

    exchange()
    counts, threads = [], []
    for _ in range(8):
        job.lose(1)
        job.restart(1)
        exchange()
        counts.append(len(os.listdir("/proc/self/fd")))
        threads.append(threading.active_count())
    assert max(counts[2:]) <= counts[1] + 2, counts
    assert max(threads[2:]) <= threads[1] + 2, threads
