"""A coordinator that is no rank: worlds one after another, and who else is let in."""

import contextlib

import pytest

from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError, RendezvousError
from rankwire.rendezvous.coordinator_host import CoordinatorHost, bind
from rankwire.rendezvous.launchers import Here, dial_launcher
from rankwire.rendezvous.reports import Told
from rankwire.transports.security import UNPROTECTED
from real_time import Deadline
from worlds import PATIENCE, Running, address_of, eventually

SECRET = b"s" * 32


class Hosted:
    """A host, and what it has reported."""

    def __init__(self, world_size: int, **options) -> None:
        listener = bind("127.0.0.1:0")
        self.address = address_of(listener)
        self.formed: list[int] = []
        self.gone: list[tuple[int, bool]] = []
        self.launchers: list = []
        self.host = CoordinatorHost(
            listener,
            world_size,
            secret=SECRET,
            job="job",
            told=Told(
                on_formed=lambda world: self.formed.append(len(world.members)),
                on_gone=lambda gone: self.gone.append((gone.rank, gone.orderly)),
            ),
            clock=REAL_TIME,
            policy=UNPROTECTED,
            on_launcher=lambda node, link: self.launchers.append((node, link)),
            **options,
        )

    def join(self, world_size: int, *, job: str = "job") -> list[TcpBackend]:
        joining = [
            Running(
                TcpBackend, rank, world_size, self.address,
                secret=SECRET, job=job, has_coordinator=True, join_timeout=PATIENCE,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        return [rank.result(PATIENCE) for rank in joining]

    def dial(self, node: int, nodes: int):
        return dial_launcher(
            self.address,
            secret=SECRET,
            node=node,
            nodes=nodes,
            policy=UNPROTECTED,
            deadline=Deadline(PATIENCE),
            check=lambda: None,
        )

    def close(self) -> None:
        self.host.close()
        for _, link in self.launchers:
            link.close()


@pytest.fixture
def hosted():
    with contextlib.ExitStack() as stack:

        def make(world_size: int, **options) -> Hosted:
            return stack.enter_context(contextlib.closing(Hosted(world_size, **options)))

        yield make


def close_all(backends) -> None:
    for backend in backends:
        backend.close()


def test_one_world_after_another(hosted):
    meeting = hosted(2)
    for count in (1, 2):
        close_all(meeting.join(2))
        eventually(lambda count=count: len(meeting.gone) == 2 * count)
    assert meeting.formed == [2, 2]
    assert all(orderly for _, orderly in meeting.gone)


def test_the_next_world_may_have_another_size_and_name(hosted):
    meeting = hosted(2)
    meeting.host.expect(world_size=3, job="next")
    close_all(meeting.join(3, job="next"))
    assert meeting.formed == [3]
    with pytest.raises(RendezvousError, match="another job"):
        TcpBackend(0, 3, meeting.address, secret=SECRET, job="job", has_coordinator=True)


def test_launchers_are_let_in_by_their_numbers(hosted):
    meeting = hosted(2, nodes=3)
    link = meeting.dial(2, 3)
    eventually(lambda: meeting.launchers)
    node, other_end = meeting.launchers[0]
    link.tell(Here(4, "host"))
    heard = []
    eventually(lambda: heard.extend(other_end.receive()) or heard)
    assert (node, heard) == (2, [Here(4, "host")])
    link.close()
    for number, nodes, words in ((1, 2, "--nnodes 3"), (3, 3, "not one of"), (0, 3, "not one of")):
        with pytest.raises(RendezvousError, match=words):
            meeting.dial(number, nodes)


def test_a_port_that_is_taken(hosted):
    with pytest.raises(ConfigurationError, match="Address already in use"):
        bind(hosted(1).address)
