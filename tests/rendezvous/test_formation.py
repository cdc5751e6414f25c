"""How a world forms: any order, any stranger, and never half."""

import contextlib
import itertools
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rankwire import runtime
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    NoConnectionError,
    RankwireError,
    RendezvousError,
)
from rankwire.links.connection import Connection
from rankwire.links.dialer import authenticate
from rankwire.rendezvous import secret as secret_module
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.rendezvous.secret import AgreedSecret
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp
from rankwire.wire.control_messages import Join, Member, pack
from rankwire.wire.frames import Channel
from rankwire.wire.handshake import HELLO_NBYTES, Hello, Purpose, job_id
from rankwire.wire.keys import rank_key
from real_time import Deadline
from worlds import (
    PATIENCE,
    SECRET,
    Running,
    address_of,
    bound_socket,
    deaf,
    eventually,
    free_port,
    joined_ranks,
    process_world,
    raw_peer,
    runtime_folder_of_its_own,
    spawn_ranks,
    tcp_world,
)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.delenv("RANKWIRE_SECRET", raising=False)
    monkeypatch.delenv("RANKWIRE_SECRET_FILE", raising=False)
    monkeypatch.setattr(secret_module, "_from_environment", None)
    with runtime_folder_of_its_own() as path:
        yield path


class Forming:
    """A world that forms rank by rank, at an address that is known beforehand.

    ``with`` closes what has formed.
    """

    def __init__(self, world_size: int, **options) -> None:
        self.world_size = world_size
        self._options = {"join_timeout": PATIENCE, "timeout": PATIENCE, **options}
        self._listener = bound_socket()
        self.address = address_of(self._listener)
        self.port = self._listener.getsockname()[1]
        self._started: list[Running] = []

    def start(self, rank: int, **options) -> Running:
        """Construct a rank in a thread of its own."""
        options = {"world_size": self.world_size, **self._options, **options}
        if rank == 0:
            options["listener"] = self._listener
        running = Running(TcpBackend, rank, address=self.address, **options)
        self._started.append(running)
        return running

    def __enter__(self) -> "Forming":
        return self

    def __exit__(self, *_) -> None:
        for running in self._started:
            with contextlib.suppress(RankwireError):
                running.result().close()
        self._listener.close()  # rank 0's, if it was started: not while that accepts on it


def until_listening(address: str) -> None:
    """Wait until rank 0 takes connections."""
    parsed = TcpAddress.parse(address)

    def connects() -> bool:
        with contextlib.suppress(NoConnectionError):
            connect_tcp(parsed, Deadline(PATIENCE)).close()
            return True
        return False

    eventually(connects)


def listening() -> set[tuple[str, int]]:
    """Return the TCP addresses at which this process listens, from the kernel."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                words = [host[start : start + 8] for start in range(0, len(host), 8)]
                packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def say_hello(world: list) -> None:
    """Show that every rank reaches every other."""
    for src, dst in itertools.permutations(range(len(world)), 2):
        world[src].send(f"{src} to {dst}".encode(), dst)
    for src, dst in itertools.permutations(range(len(world)), 2):
        assert world[dst].recv(src) == f"{src} to {dst}".encode()


# -- any order


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_ranks_start_in_any_order(order):
    with Forming(3) as forming:
        ranks = {}
        for rank in order:
            ranks[rank] = forming.start(rank)
            time.sleep(0.01)  # long enough to be refused, or to join
        say_hello([ranks[rank].result() for rank in range(3)])


def test_workers_that_find_the_launchers_socket_before_rank_0_exists_wait_for_it():
    """A launcher binds and listens, then starts the ranks; rank 0 may be the last to come up."""
    with Forming(2) as forming:
        forming._listener.listen()
        worker = forming.start(1)
        time.sleep(0.3)
        assert not worker.done
        zero = forming.start(0)
        say_hello([zero.result(), worker.result()])


def test_all_ranks_are_ready_together():
    """Nobody goes on before the last one has come."""
    with Forming(4) as forming:
        early = [forming.start(rank) for rank in (0, 1, 3)]
        eventually(lambda: joined_ranks() == {0, 1, 3})
        assert not any(rank.done for rank in early)
        forming.start(2).result()
        for rank in early:
            rank.result()


def test_32_ranks_at_once():
    began = time.monotonic()
    with tcp_world(32) as world:
        assert time.monotonic() - began < 10.0
        world[31].send(b"x", 17)
        assert world[17].recv(31) == b"x"


# -- missing ranks


def test_missing_ranks_are_named_on_all_that_are_there():
    with Forming(5, join_timeout=1.5) as forming:
        present = [forming.start(rank) for rank in (0, 1, 3)]
        for rank in present:
            error = rank.error()
            assert isinstance(error, RendezvousError)
            assert error.missing == [2, 4]
            assert "missing ranks 2, 4" in str(error)
            assert rank.seconds < 8.0


@pytest.mark.parametrize("first", ["rank 0", "rank 1"])
def test_missing_ranks_are_named_by_everybody_whoever_gives_up_first(first):
    with Forming(3) as forming:
        zero = forming.start(0, join_timeout=1.0 if first == "rank 0" else 2.5)
        until_listening(forming.address)
        one = forming.start(1, join_timeout=2.5 if first == "rank 0" else 1.0)
        assert one.error().missing == [2]
        # Rank 1 has given up by then, or was there until the end.
        assert zero.error().missing == ([2] if first == "rank 0" else [1, 2])


def test_a_rank_that_left_while_forming_is_named_as_missing():
    with Forming(4) as forming:
        zero = forming.start(0, join_timeout=4.0)
        one = forming.start(1, join_timeout=3.8)
        eventually(lambda: joined_ranks() == {0, 1})
        two = forming.start(2, join_timeout=1.0)
        assert two.error().missing == [3]
        assert one.error().missing == [2, 3]
        assert set(zero.error().missing) >= {2, 3}


def test_a_world_that_did_not_form_leaves_nothing_behind(folder):
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Forming(3, join_timeout=0.1) as forming:
        for rank in [forming.start(rank) for rank in (0, 1)]:
            rank.error()
        forming._listener.close()
        assert list(folder.iterdir()) == []
        eventually(lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before)
        with socket.create_server(("127.0.0.1", forming.port)):
            pass  # the port is free again


# -- addresses


@pytest.mark.fault(57, "a port of the system's choice is bound before it is told")
def test_port_0_takes_a_free_port_and_says_which():
    before = listening()
    zero = Running(TcpBackend, 0, 2, "127.0.0.1:0", transport="tcp", join_timeout=PATIENCE)
    (address,) = eventually(lambda: listening() - before)
    with TcpBackend(1, 2, f"127.0.0.1:{address[1]}", transport="tcp") as one, zero.result() as two:
        assert two.address == one.address == f"127.0.0.1:{address[1]}"


@pytest.mark.fault(58, "ranks listen on the address asked for, and on no other")
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_ranks_listen_on_the_asked_address_and_no_other(transport):
    before = listening()
    with tcp_world(3, transport=transport) as world:
        opened = listening() - before
        assert {host for host, _ in opened} == {"127.0.0.1"}
        assert len(opened) == 3, "one port a rank"
        assert TcpAddress.parse(world[0].address) in {TcpAddress(*pair) for pair in opened}
    assert listening() == before


def test_rank_0_listens_on_the_one_loopback_address_it_was_given():
    before = listening()
    port = free_port()
    joining = [
        Running(TcpBackend, rank, 2, f"127.0.0.2:{port}", join_timeout=PATIENCE) for rank in (0, 1)
    ]
    with joining[0].result(), joining[1].result():
        opened = listening() - before
        assert ("127.0.0.2", port) in opened
        assert all(host.startswith("127.0.0.") for host, _ in opened)


@pytest.mark.fault(58, "a world forms over IPv6")
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_world_forms_on_ipv6(transport):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    before = listening()
    with tcp_world(3, host="::1", transport=transport) as world:
        assert world[0].address.startswith("[::1]:")
        assert {host for host, _ in listening() - before} == {"::1"}
        say_hello(world)


def test_a_world_forms_on_localhost():
    address = f"localhost:{free_port()}"
    joining = [Running(TcpBackend, rank, 2, address, transport="tcp") for rank in (1, 0)]
    with joining[0].result() as one, joining[1].result() as zero:
        say_hello([zero, one])


@pytest.mark.fault(57, "a port that is taken is an error at once that names it")
def test_a_port_in_use_is_an_error_at_once_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigurationError, match="in use") as caught:
            TcpBackend(0, 2, address_of(taken))
        assert address_of(taken) in str(caught.value)


def test_a_second_rank_0_is_refused_and_the_first_goes_on():
    address = f"127.0.0.1:{free_port()}"
    zero = Running(TcpBackend, 0, 2, address, join_timeout=PATIENCE)
    until_listening(address)
    with pytest.raises(ConfigurationError, match="in use"):
        TcpBackend(0, 2, address)
    with TcpBackend(1, 2, address) as one, zero.result() as first:
        say_hello([first, one])


def test_a_name_that_does_not_resolve_is_an_error_that_names_it(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(runtime, "getaddrinfo", unknown)
    with pytest.raises(RankwireError, match=r"nowhere\.invalid"):
        TcpBackend(0, 2, "nowhere.invalid:1", secret=SECRET, join_timeout=0.1)
    with pytest.raises(RendezvousError, match=r"nowhere\.invalid"):
        TcpBackend(1, 2, "nowhere.invalid:1", secret=SECRET, join_timeout=0.1)


def test_only_rank_0_takes_a_listener():
    with bound_socket() as listener, pytest.raises(ConfigurationError, match="rank 0"):
        TcpBackend(1, 2, address_of(listener), listener=listener)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("listens", [True, False])
def test_any_bound_socket_serves_as_listener(blocking, listens):
    """Blocking or not, listening already or not: what a launcher hands down."""
    listener = bound_socket()
    listener.setblocking(blocking)
    if listens:
        listener.listen()
    address = address_of(listener)
    zero = Running(TcpBackend, 0, 2, address, secret=SECRET, listener=listener)
    with TcpBackend(1, 2, address, secret=SECRET, join_timeout=5.0) as one, zero.result() as first:
        say_hello([first, one])
    assert listener.fileno() == -1, "it is the backend's"


def test_a_rank_may_be_a_numpy_integer():
    with Forming(2) as forming:
        ranks = [forming.start(0), forming.start(np.int64(1))]
        say_hello([rank.result() for rank in ranks])


# -- strangers


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: probe\r\n\r\n" + bytes(128),
    "tls": bytes.fromhex("16030100c8010000c40303") + os.urandom(197),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(128),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "noise": os.urandom(4096),
    "a greeting and noise": Hello(Purpose.JOIN, job_id("default"), 0, 2, 1, 0).pack(bytes(32))
    + os.urandom(4096),
    "half a greeting": Hello(Purpose.JOIN, job_id("default"), 0, 2, 1, 0).pack(bytes(32))[:60],
    "a greeting of another version": b"rankwire\x63\x00" + bytes(HELLO_NBYTES + 22),
    "a newline": b"\r\n",
}


def dial(address: str) -> socket.socket:
    parsed = TcpAddress.parse(address)
    return socket.create_connection((parsed.host, parsed.port), timeout=PATIENCE)


@pytest.mark.fault(17, "strangers that talk garbage while a world forms do not stop it")
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "hangs up"])
@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_client_that_talks_garbage_does_not_stop_the_job(words, stays):
    with Forming(2) as forming, contextlib.ExitStack() as stack:
        zero = forming.start(0)
        until_listening(forming.address)
        for _ in range(3):
            client = stack.enter_context(dial(forming.address))
            with contextlib.suppress(OSError):
                client.sendall(words)
            if not stays:
                client.close()
        one = forming.start(1)
        say_hello([zero.result(5.0), one.result(5.0)])


def test_more_silent_clients_than_there_are_slots_do_not_stop_the_job():
    with Forming(3) as forming, contextlib.ExitStack() as stack:
        zero = forming.start(0)
        until_listening(forming.address)
        for _ in range(300):
            stack.enter_context(dial(forming.address))
        workers = [forming.start(rank) for rank in (1, 2)]
        say_hello([rank.result() for rank in (zero, *workers)])


@pytest.mark.fault(19, "a port scan while a world forms does not stop it")
def test_a_port_scan_does_not_stop_the_job():
    with Forming(2) as forming:
        zero = forming.start(0)
        until_listening(forming.address)
        stop = threading.Event()

        def scan():
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    dial(forming.address).close()

        scanning = [Running(scan) for _ in range(2)]
        try:
            one = forming.start(1)
            say_hello([zero.result(), one.result()])
        finally:
            stop.set()
            for thread in scanning:
                thread.result()


def test_strangers_that_talk_while_newer_ones_take_their_slots_do_not_stop_the_job(monkeypatch):
    """They are dropped, and their descriptors taken again, before what they said is looked at."""
    monkeypatch.setattr("rankwire.links.acceptor._LEAST_ROOM", 4)
    with tcp_world(2, transport="tcp") as world, contextlib.ExitStack() as stack:
        acceptor = world[0].mesh.formation.acceptor
        old = [stack.enter_context(dial(world[0].address)) for _ in range(4)]
        eventually(lambda: len(acceptor._strangers) == 4)
        with deaf(world[0]):
            for _ in range(8):
                stack.enter_context(dial(world[0].address))
            for client in old:
                client.sendall(b"x")
        world[1].send(b"is somebody at the door?", 0, timeout=3.0)
        assert world[0].recv(1) == b"is somebody at the door?"


@pytest.mark.fault(18, "a connection that says nothing is dropped after its time")
def test_a_silent_client_is_dropped_after_its_time(monkeypatch):
    monkeypatch.setattr("rankwire.links.acceptor.HANDSHAKE_LIMIT", 0.1)
    with Forming(2) as forming:
        zero = forming.start(0)
        until_listening(forming.address)
        with dial(forming.address) as silent:
            assert silent.recv(1) == b"", "closed, without a word"
        forming.start(1).result()
        zero.result()


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_stranger_is_not_told_anything_that_depends_on_the_secret(words):
    """At most a challenge, which is a constant and a nonce, and that a proof is wrong."""
    with Forming(2) as forming:
        zero = forming.start(0)
        until_listening(forming.address)
        with dial(forming.address) as client:
            answer = b""
            with contextlib.suppress(OSError):  # it may be dropped at the first bytes
                client.sendall(words)
                client.shutdown(socket.SHUT_WR)
                while piece := client.recv(4096):
                    answer += piece
        assert len(answer) in (0, 64, 104)
        assert not answer or answer.startswith(b"rankwire")
        assert answer[64:] in (b"", b"\x0b" + bytes(39))
        forming.start(1).result()
        zero.result()


# -- who is refused


@pytest.mark.fault(
    20, "the second process of a rank is refused and told of the first, which goes on"
)
def test_a_duplicate_rank_is_refused_and_the_first_keeps_its_place():
    with Forming(3) as forming:
        zero, first = forming.start(0), forming.start(1)
        eventually(lambda: joined_ranks() == {0, 1})
        duplicate = forming.start(1)
        error = duplicate.error()
        assert isinstance(error, RendezvousError)
        assert f"pid {os.getpid()}" in str(error)
        assert duplicate.seconds < 8.0
        assert not first.done
        two = forming.start(2)
        say_hello([zero.result(), first.result(), two.result()])


def test_a_surplus_worker_learns_that_it_is_one():
    with tcp_world(2) as world:
        for rank, world_size, text in ((1, 2, "is taken"), (2, 3, "world size of 2")):
            began = time.monotonic()
            with pytest.raises(RendezvousError, match=text):
                TcpBackend(rank, world_size, world[0].address, join_timeout=PATIENCE)
            assert time.monotonic() - began < 8.0
        say_hello(world)


def test_the_place_of_a_rank_that_died_is_not_given_to_another_once_formed():
    """Its peers have messages in flight to the first one."""
    with process_world(3) as ranks:
        address = ranks[0].call("eval", "backend.address")
        ranks[2].kill()
        eventually(lambda: "gone: [2]" in ranks[0].call("eval", "repr(backend)"))
        with pytest.raises(RendezvousError, match="formed already"):
            TcpBackend(2, 3, address, join_timeout=PATIENCE)


@pytest.mark.fault(
    21, "a rank with another world size or job is refused with the reason; the world forms"
)
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ({"world_size": 5}, "world size of 3, this rank was told 5"),
        ({"world_size": 2}, "world size of 3, this rank was told 2"),
        ({"job": "another"}, "another job"),
    ],
    ids=["larger world", "smaller world", "other job"],
)
def test_a_rank_that_disagrees_is_refused_with_the_reason_and_the_world_forms_without_it(
    mistake, text
):
    with Forming(3) as forming:
        zero = forming.start(0)
        wrong = forming.start(1, **mistake)
        error = wrong.error()
        assert isinstance(error, RendezvousError)
        assert text in str(error)
        assert wrong.seconds < 8.0
        assert not zero.done
        workers = [forming.start(rank) for rank in (1, 2)]
        say_hello([rank.result() for rank in (zero, *workers)])


@pytest.mark.fault(21, "a rank with another secret is refused without a reason; the world forms")
@pytest.mark.parametrize("right", [SECRET, None], ids=["given", "agreed"])
def test_a_rank_with_another_secret_is_refused_and_the_world_forms_without_it(right):
    with Forming(2, secret=right) as forming:
        zero = forming.start(0)
        until_listening(forming.address)
        wrong = forming.start(1, secret=b"another secret altogether")
        error = wrong.error()
        assert isinstance(error, AuthenticationError)
        assert "secret" in str(error)
        assert wrong.seconds < 8.0
        assert not zero.done
        one = forming.start(1)
        say_hello([zero.result(), one.result()])


def test_a_rank_of_another_user_finds_no_secret_and_says_so(folder):
    """Another user has another runtime folder; here, the file is taken away."""
    with Forming(2) as forming:
        zero = forming.start(0)
        until_listening(forming.address)
        (path,) = folder.glob("secret-*")
        hidden = path.rename(path.with_name("hidden"))
        with pytest.raises(AuthenticationError, match="no secret"):
            TcpBackend(1, 2, forming.address, join_timeout=PATIENCE)
        hidden.rename(path)
        one = forming.start(1)
        say_hello([zero.result(), one.result()])


@pytest.mark.fault(24, "a connection of an earlier incarnation is refused")
def test_a_connection_of_another_incarnation_is_refused():
    with tcp_world(2, transport="tcp") as world:
        world[1].mesh.formation._epoch ^= 1
        with pytest.raises(NoConnectionError, match="another incarnation"):
            raw_peer(world[1], world[0])
        world[1].mesh.formation._epoch ^= 1
        say_hello(world)


@pytest.mark.parametrize(
    ("rank", "peer"), [(0, 0), (2, 0), (2**32 - 1, 0), (1, 1), (1, 2)], ids=str
)
def test_a_connection_of_a_rank_that_cannot_be_is_refused(rank, peer):
    with tcp_world(2, transport="tcp") as world:
        genuine = world[1].mesh.formation.hello(Purpose.MESSAGES, 0)
        hello = Hello(Purpose.MESSAGES, genuine.job, genuine.epoch, 2, rank, peer)
        member = world[1].mesh.peers[0].member
        deadline = Deadline(PATIENCE)
        with connect_tcp(TcpAddress(member.host, member.port), deadline) as sock:
            # Who is nobody has no key. With that of rank 1, it is told where it is not.
            with pytest.raises((NoConnectionError, AuthenticationError)):
                authenticate(
                    sock, hello, key=world[1].mesh.formation.keys.shared[0], deadline=deadline
                )
        say_hello(world)


def test_a_second_message_connection_of_a_rank_is_refused():
    """Two streams of one rank would have no order."""
    with tcp_world(2, transport="tcp") as world:
        world[1].send(b"x", 0)
        assert world[0].recv(1) == b"x"
        with pytest.raises(NoConnectionError):
            raw_peer(world[1], world[0])
        say_hello(world)


def test_nobody_joins_through_a_rank_that_does_not_coordinate():
    with tcp_world(2, transport="tcp") as world:
        member = world[0].mesh.peers[1].member
        hello = Hello(Purpose.JOIN, job_id("default"), 0, 2, 1, 0)
        deadline = Deadline(PATIENCE)
        with connect_tcp(TcpAddress(member.host, member.port), deadline) as sock:
            with pytest.raises(AuthenticationError):
                authenticate(sock, hello, key=world[1].mesh.formation.keys.own, deadline=deadline)
        say_hello(world)


@pytest.mark.parametrize("pid", [2**60, -1, 2**63])
def test_a_member_that_lies_about_its_process_does_not_stop_the_job(pid):
    """The number goes into the refusal of a duplicate."""
    with Forming(3, secret=SECRET) as forming:
        zero = forming.start(0)
        until_listening(forming.address)
        deadline = Deadline(PATIENCE)
        sock = connect_tcp(TcpAddress.parse(forming.address), deadline)
        hello = Hello(Purpose.JOIN, job_id("default"), 0, 3, 1, 0)
        authenticate(sock, hello, key=rank_key(SECRET, 1), deadline=deadline)
        with contextlib.closing(
            Connection(sock, peer=0, max_nbytes=1 << 20, clock=REAL_TIME)
        ) as liar:
            payload = pack(Join(Member(1, pid, "127.0.0.1", 9, "", host_id())))
            liar.send((0, Channel.CONTROL, 0), ([payload], len(payload)), deadline)
            liar.read(deadline)  # who is missing: it has joined
            with pytest.raises(RendezvousError, match="is taken"):
                TcpBackend(1, 3, forming.address, secret=SECRET, join_timeout=PATIENCE)
        workers = [forming.start(rank) for rank in (1, 2)]
        say_hello([rank.result() for rank in (zero, *workers)])


# -- addresses


@pytest.fixture
def elsewhere(monkeypatch):
    """Ranks that seem to be on another host than the coordinator."""
    monkeypatch.setattr("rankwire.rendezvous.formation.host_id", lambda: "elsewhere")


def free_range(count: int) -> int:
    """Return the first of some consecutive ports that nobody has."""
    while True:
        low = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(low, low + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return low


def test_ranks_listen_in_the_range_that_they_are_given(elsewhere):
    low = free_range(3)
    with Forming(4, listen=f":{low}-{low + 2}", transport="tcp") as forming:
        zero = forming.start(0, listen=None)
        world = [zero.result, *(forming.start(rank).result for rank in (1, 2, 3))]
        say_hello([result() for result in world])
        assert {port for _, port in listening()} >= {low, low + 1, low + 2}


def test_a_range_without_a_free_port_is_an_error_that_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Forming(2, secret=SECRET) as forming:
            forming.start(0, join_timeout=2.0)
            error = forming.start(1, listen=f"127.0.0.1:{port}").error()
            assert isinstance(error, ConfigurationError)
            assert str(port) in str(error)


def test_f58_a_rank_that_cannot_be_called_back_is_told_at_once_and_the_others_at_the_end(elsewhere):
    with Forming(2, secret=SECRET, transport="tcp") as forming:
        zero = forming.start(0, join_timeout=3.0)
        one = forming.start(1, advertise="127.0.0.99")
        error = one.error()
        assert isinstance(error, RendezvousError)
        assert "rank 1 cannot be reached at 127.0.0.99:" in str(error)
        assert "advertise=" in str(error)
        assert not zero.done
        error = zero.error()
        assert error.missing == [1]
        assert "cannot be reached at 127.0.0.99:" in str(error)


def test_f58_an_advertised_address_that_can_be_called_back_is_used(elsewhere):
    with Forming(2, secret=SECRET, transport="tcp") as forming:
        zero = forming.start(0)
        one = forming.start(1, listen="0.0.0.0", advertise="127.0.0.1")
        world = [zero.result(), one.result()]
        say_hello(world)
        assert world[0].mesh.peers[1].member.host == "127.0.0.1"


def test_rank_0_may_listen_elsewhere_than_at_its_address(elsewhere):
    """Its name may stand for an address that is translated on the way."""
    port = free_port()
    options = {"secret": SECRET, "join_timeout": PATIENCE}
    zero = Running(TcpBackend, 0, 2, f"localhost:{port}", listen="0.0.0.0", **options)
    one = Running(TcpBackend, 1, 2, f"127.0.0.1:{port}", **options)
    with zero.result() as zero, one.result() as one:
        assert ("0.0.0.0", port) in listening()
        zero.send(b"x", 1)
        assert one.recv(0) == b"x"


def test_f58_a_name_with_several_addresses_is_reached_at_the_one_that_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
            for host in ("127.0.0.98", "127.0.0.99", "127.0.0.1")
        ]
        monkeypatch.setattr(runtime, "getaddrinfo", lambda *_, **__: found)
        connect_tcp(TcpAddress("some.host", port), Deadline(PATIENCE)).close()
        server.close()
        with pytest.raises(NoConnectionError) as caught:
            connect_tcp(TcpAddress("some.host", port), Deadline(PATIENCE))
        for host in ("127.0.0.98", "127.0.0.99", "127.0.0.1"):
            assert f"{host}:{port}" in str(caught.value)


# -- the secret


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "[::]", "[2001:db8::1]", "some.host"])
@pytest.mark.parametrize("rank", [0, 1])
def test_off_loopback_a_missing_secret_is_an_error_before_any_io(host, rank, folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("it opened a socket, or asked for a name")

    monkeypatch.setattr(runtime, "Socket", refuse)
    monkeypatch.setattr(runtime, "getaddrinfo", refuse)
    with pytest.raises(ConfigurationError, match="secret"):
        TcpBackend(rank, 2, f"{host}:29500")
    with pytest.raises(ConfigurationError, match="15 bytes"):
        TcpBackend(rank, 2, f"{host}:29500", secret="fifteen bytes..")
    assert not folder.exists()


def test_without_a_secret_on_purpose_a_world_forms_and_warns():
    def form() -> None:
        with tcp_world(2, security="insecure") as world:
            say_hello(world)

    with pytest.warns(UserWarning, match="insecure"):
        form()


def test_the_agreed_secret_is_closed_to_others_and_removed_on_close(folder):
    with tcp_world(2) as world:
        port = TcpAddress.parse(world[0].address).port
        (path,) = folder.glob("secret-*")
        assert path.name.endswith(f"-{port}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        world[1].close()
        assert path.exists(), "it is rank 0's to remove"
    assert list(folder.iterdir()) == []


def test_no_secret_is_laid_out_when_one_was_given(folder):
    with tcp_world(2, secret=SECRET):
        assert list(folder.glob("secret-*")) == []


def test_a_stale_secret_of_an_earlier_job_does_no_harm():
    with Forming(2) as forming:
        stale = AgreedSecret(forming.port).publish()
        worker = forming.start(1)
        time.sleep(0.05)
        zero = forming.start(0)
        say_hello([zero.result(), worker.result()])
        assert AgreedSecret(forming.port).read() != stale


def test_ranks_share_the_secret_of_a_file(tmp_path, monkeypatch, folder):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("RANKWIRE_SECRET_FILE", str(path))
    with tcp_world(2) as world:
        assert list(folder.glob("secret-*")) == []
        say_hello(world)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0600"):
        TcpBackend(0, 2, "127.0.0.1:0")


def test_ranks_share_the_secret_of_the_environment_which_is_removed(monkeypatch, folder):
    monkeypatch.setenv("RANKWIRE_SECRET", SECRET.decode())
    with tcp_world(2) as world:
        assert "RANKWIRE_SECRET" not in os.environ
        assert list(folder.glob("secret-*")) == []
        assert world[0].mesh.formation.keys.own == rank_key(SECRET, 0)
        say_hello(world)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["given", "agreed"])
def test_no_secret_is_ever_logged_or_printed(secret, caplog):
    caplog.set_level(logging.DEBUG)
    with Forming(3, secret=secret) as forming, contextlib.ExitStack() as stack:
        zero = forming.start(0)
        until_listening(forming.address)
        mistakes = ({"secret": b"wrong " + SECRET}, {"world_size": 9}, {"job": "other"})
        shown = [forming.start(1, **mistake).error() for mistake in mistakes]
        stack.enter_context(dial(forming.address)).sendall(GARBAGE["noise"])
        world = [forming.start(rank) for rank in (1, 2)]
        backends = [rank.result() for rank in (zero, *world)]
        say_hello(backends)
        formation = backends[0].mesh.formation
        known = {formation.keys.own, rank_key(b"wrong " + SECRET, 1), b"wrong " + SECRET, SECRET}
        known |= {rank_key(SECRET, 1), *formation.keys.shared.values()}
        known.add(AgreedSecret(forming.port).read() or SECRET)
        backends[2].close()
        shown += [*backends, formation, formation.acceptor, *vars(formation).values()]
        shown = [value for value in shown if not isinstance(value, bytes)]
        text = caplog.text + "".join(f"{value!r} {value!s}" for value in shown)
        assert "dropped a connection" in caplog.text, "nothing was logged: this shows nothing"
    for secret_bytes in known:
        assert secret_bytes.hex() not in text
        assert repr(bytes(secret_bytes))[2:-1] not in text
        assert secret_bytes.decode("latin-1") not in text


# -- restarts


@pytest.mark.fault(24, "a rank that dies while a world forms can be started again")
def test_a_rank_that_dies_while_forming_frees_its_place_and_can_be_started_again():
    with spawn_ranks(2) as (zero, first), spawn_ranks(2) as (_, second):
        address = f"127.0.0.1:{free_port()}"
        forming = zero.form(3, address)
        first.form(3, address)
        eventually(lambda: zero.call("eval", "joined_ranks()") == {0, 1})
        first.kill()
        again = second.form(3, address)
        with TcpBackend(2, 3, address, join_timeout=PATIENCE) as two:
            forming.result()
            again.result()
            zero.call("send", b"hello again", 1)
            assert second.call("recv", 0) == b"hello again"
            second.call("send", b"hello", 2)
            assert two.recv(1) == b"hello"


@pytest.mark.parametrize("secret", [SECRET, None], ids=["given", "agreed"])
def test_rank_0_can_be_restarted_while_the_others_dial(secret):
    """With an agreed secret, the new rank 0 has a new one."""
    with spawn_ranks(3) as (first, one, two), spawn_ranks(1) as (second,):
        address = f"127.0.0.1:{free_port()}"
        first.form(3, address, secret=secret)
        joining = one.form(3, address, secret=secret)
        eventually(lambda: first.call("eval", "joined_ranks()") == {0, 1})
        first.kill()
        forming = second.form(3, address, secret=secret)
        last = two.form(3, address, secret=secret)
        for command in (joining, forming, last):
            command.result()
        one.call("send", b"still here", 2)
        assert two.call("recv", 1) == b"still here"


# -- socket files


def test_socket_files_are_closed_to_others_and_removed_on_close(folder):
    with tcp_world(3):
        files = list(folder.glob("*.sock"))
        assert len(files) == 3
        for path in files:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == []


def test_without_unix_sockets_there_are_no_socket_files(folder):
    with tcp_world(2, transport="tcp"):
        assert list(folder.glob("*.sock")) == []


def test_socket_files_of_dead_processes_are_swept_when_a_world_forms(folder):
    with process_world(2) as ranks:
        for rank in ranks:
            rank.signal(9)
    assert len(list(folder.glob("*.sock"))) == 2, "killed together, they could not tidy up"
    with tcp_world(2):
        assert len(list(folder.glob("*.sock"))) == 2
    assert list(folder.glob("*.sock")) == []


def test_the_socket_file_of_a_killed_rank_is_removed_by_the_survivors(folder):
    with process_world(3) as ranks:
        files = {rank.rank: list(folder.glob(f"*-{rank.pid}-*.sock")) for rank in ranks}
        assert all(len(paths) == 1 for paths in files.values())
        ranks[1].kill()
        eventually(lambda: not files[1][0].exists())
        assert files[0][0].exists()
        assert files[2][0].exists()


def test_a_runtime_folder_with_a_path_too_long_for_sockets_is_no_riddle(folder):
    """Either TCP is used instead, or the error says what is wrong."""
    long = folder.with_name("x" * 100)
    long.mkdir(mode=0o700)
    # Undone before ``folder`` is, which sets the same variable back.
    with (
        pytest.MonkeyPatch.context() as patch,
        Forming(2, secret=SECRET, join_timeout=5.0) as forming,
    ):
        patch.setenv("XDG_RUNTIME_DIR", str(long))
        zero, one = (forming.start(rank) for rank in (0, 1))
        with contextlib.suppress(RankwireError):
            say_hello([zero.result(), one.result()])
            return
        assert "too long" in str(zero.error())


def test_the_default_join_timeout_is_finite():
    defaults = TcpBackend.__init__.__kwdefaults__
    assert 0 < defaults["join_timeout"] <= 600
