"""A coordinator that is no rank: worlds one after another, and who else is let in."""

import threading

import pytest

from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError, PeerLostError, RendezvousError
from rankwire.rendezvous.coordinator_host import CoordinatorHost, bind
from rankwire.rendezvous.launchers import Here, dial_launcher
from rankwire.rendezvous.reports import Told
from rankwire.transports.security import UNPROTECTED
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


@pytest.fixture(autouse=True)
def folder():
    with runtime_folder_of_its_own() as path:
        yield path


class Launcher:
    """Notes what it is told."""

    def __init__(self, world_size):
        listener = bind("127.0.0.1:0")
        self.address = address_of(listener)
        self.told = []
        self.launchers = []
        self.host = CoordinatorHost(
            listener,
            world_size,
            secret=SECRET,
            job="hosted",
            told=Told(
                on_formed=lambda world: self.told.append("formed"),
                on_gone=lambda gone: self.told.append((gone.rank, gone.orderly)),
                on_hopeless=self.told.append,
            ),
            clock=REAL_TIME,
            policy=UNPROTECTED,
            nodes=3,
            on_launcher=lambda node, link: self.launchers.append((node, link)),
        )

    def join(self, rank, world_size, *, job="hosted", **options):
        return Running(
            TcpBackend,
            rank,
            world_size,
            self.address,
            secret=SECRET,
            job=job,
            has_coordinator=True,
            join_timeout=10.0,
            timeout=10.0,
            **options,
        )

    def dial(self, node, nodes):
        return dial_launcher(
            self.address,
            secret=SECRET,
            node=node,
            nodes=nodes,
            policy=UNPROTECTED,
            deadline=Deadline(PATIENCE),
            check=lambda: None,
        )

    def world(self, world_size, **options):
        forming = [self.join(rank, world_size, **options) for rank in range(world_size)]
        return [running.result() for running in forming]


@pytest.fixture
def launcher():
    launcher = Launcher(3)
    yield launcher
    launcher.host.close()
    launcher.host.close()


def test_rank_0_joins_like_any_other_and_its_end_is_an_ordinary_one(launcher):
    zero, one, two = launcher.world(3)
    one.send(b"by way of the launcher's list", 0)
    assert zero.recv(1).startswith(b"by way")
    waiting = Running(two.recv, 0)
    zero.close(error=ValueError("rank 0 fell"))
    assert waiting.error().reason == "it raised ValueError: rank 0 fell"
    two.send(b"on we go", 1)
    assert one.recv(2) == b"on we go"
    assert one.alive == (1, 2)
    one.close()
    two.close()
    eventually(lambda: launcher.told == ["formed", (0, False), (1, True), (2, True)])


def test_when_all_have_gone_the_next_world_may_form(launcher):
    for _ in range(2):
        world = launcher.world(3)
        for backend in world:
            backend.close()
        eventually(lambda: len(launcher.told) % 4 == 0)
    assert launcher.told.count("formed") == 2


def test_the_next_world_may_have_another_size_and_name(launcher):
    launcher.host.expect(world_size=2, job="next")
    for backend in launcher.world(2, job="next"):
        backend.close()
    eventually(lambda: launcher.told == ["formed", (0, True), (1, True)])
    with pytest.raises(RendezvousError, match="another job"):
        launcher.join(0, 2).result()


def test_launchers_are_let_in_by_their_numbers(launcher):
    link = launcher.dial(2, 3)
    eventually(lambda: launcher.launchers)
    ((node, other_end),) = launcher.launchers
    link.tell(Here(["role"] * 4, "host"))
    heard = []
    eventually(lambda: heard.extend(other_end.receive()) or heard)
    assert (node, heard) == (2, [Here(["role"] * 4, "host")])
    link.close()
    other_end.close()
    for number, nodes, words in ((1, 2, "--nnodes 3"), (3, 3, "not one of"), (0, 3, "not one of")):
        with pytest.raises(RendezvousError, match=words):
            launcher.dial(number, nodes)


def test_a_port_that_is_taken(launcher):
    with pytest.raises(ConfigurationError, match="Address already in use"):
        bind(launcher.address)


def test_a_launcher_begins_anew_while_an_old_rank_is_still_there(launcher):
    old = launcher.world(3)
    launcher.host.expect()
    for backend in old:
        eventually(lambda backend=backend: not backend.mesh.is_watched)
    new = launcher.world(3)
    new[1].send(b"new", 2)
    assert new[2].recv(1) == b"new"
    for backend in (*old, *new):
        backend.close()


def test_when_the_launcher_is_gone_ranks_still_notice_each_others_deaths(launcher):
    world = launcher.world(3)
    launcher.host.close()
    for backend in world:
        eventually(lambda backend=backend: not backend.mesh.is_watched)
    waiting = Running(world[1].recv, 2)
    world[2].close(error=ValueError("nobody tells this"))
    assert isinstance(waiting.error(), PeerLostError)
    for backend in world:
        backend.close()


def test_ranks_of_another_job_or_secret_or_size_are_refused(launcher):
    common = {"has_coordinator": True, "join_timeout": 5.0}
    with pytest.raises(RendezvousError, match="another job"):
        TcpBackend(0, 3, launcher.address, secret=SECRET, job="other", **common)
    with pytest.raises(RendezvousError, match="world size of 3"):
        TcpBackend(0, 4, launcher.address, secret=SECRET, job="hosted", **common)


def test_a_rank_that_does_not_coordinate_takes_no_listener():
    with bound_socket() as listener, pytest.raises(ConfigurationError, match="listener"):
        TcpBackend(0, 2, address_of(listener), listener=listener, has_coordinator=True)


def test_a_launcher_that_was_given_up_while_it_stood_still_blames_no_rank(launcher):
    ranks = launcher.world(3, suspect_after=0.2, fail_after=1.0)
    awake = threading.Event()
    launcher.host._acceptor.call_soon(lambda: awake.wait(PATIENCE))
    for rank in ranks:
        eventually(lambda rank=rank: not rank.mesh.is_watched)
    awake.set()
    eventually(lambda: launcher.host._coordinator._state.name == "FORMING")
    assert launcher.told == ["formed"]
    ranks[0].send(b"on we go", 1)
    assert ranks[1].recv(0) == b"on we go"
    assert ranks[2].alive == (0, 1, 2)
    for rank in ranks:
        rank.close()
    for rank in launcher.world(3):
        rank.close()


def test_who_waits_for_a_rank_that_has_ended_is_told_at_once(launcher):
    early = launcher.join(0, 3)
    eventually(lambda: 0 in launcher.host._coordinator._roster.members)
    launcher.host.expect_never(2, "rank 2 ended (exit code 0) before it joined")
    late = launcher.join(1, 3)
    for joining in (early, late):
        error = joining.error()
        assert isinstance(error, RendezvousError)
        assert "rank 2 ended (exit code 0) before it joined" in error.reason
        assert (error.missing, error.root) == ([2], 2)
        assert joining.seconds < 5.0
    assert launcher.told == ["the world cannot form: rank 2 ended (exit code 0) before it joined"]


def test_who_ended_after_one_world_is_missed_in_the_next_and_expected_when_all_start_anew(launcher):
    for backend in launcher.world(3):
        backend.close()
    eventually(lambda: len(launcher.told) == 4)
    launcher.host.expect_never(1, "rank 1 ended (exit code 0) before it joined")
    assert launcher.join(0, 3).error().missing == [1]
    launcher.host.expect(job="hosted")
    for backend in launcher.world(3):
        backend.close()


def test_a_rank_that_ended_does_not_end_a_world_that_stands(launcher):
    zero, one, two = launcher.world(3)
    two.close()
    launcher.host.expect_never(2, "rank 2 ended (exit code 0) before it joined")
    zero.send(b"on we go", 1)
    assert one.recv(0) == b"on we go"
    zero.close()
    one.close()
    eventually(lambda: len(launcher.told) == 4)
    assert {told[0] for told in launcher.told[1:]} == {0, 1, 2}
