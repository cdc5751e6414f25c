"""A member that was taken over: it has all that its rank has, and would act as another one."""

import contextlib
import itertools
import os
import socket
import ssl
import struct
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from headers import pack_header
from rankwire import RpcAgent
from rankwire.backends.tcp import TcpBackend
from rankwire.clock import REAL_TIME
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    OverloadedError,
    PeerLostError,
)
from rankwire.launch.certificates import make_certificates
from rankwire.links.dialer import authenticate
from rankwire.mesh.peers import MAX_CONNECTIONS_OF_A_RANK
from rankwire.rendezvous.coordinator_host import CoordinatorHost
from rankwire.rendezvous.launchers import LAUNCH_JOB
from rankwire.transports.security import UNPROTECTED, choose_policy, files_of
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp
from rankwire.wire.control_messages import (
    Beat,
    Failed,
    Fallen,
    Gone,
    Suspected,
    Waiting,
    World,
    pack,
)
from rankwire.wire.frames import Channel
from rankwire.wire.handshake import (
    HELLO_NBYTES,
    LAUNCHER,
    PROOF_NBYTES,
    Hello,
    Purpose,
    Responder,
    Status,
    handshake_key,
    job_id,
)
from rankwire.wire.keys import rank_key
from real_time import Deadline
from worlds import PATIENCE, SECRET, Running, address_of, bound_socket, deaf, eventually, tcp_world

HOSTILE = 2


def say_on_control(rank, message):
    """Send a control message on a rank's own connection to the coordinator."""
    payload = pack(message)
    control = rank.mesh.formation._membership._control
    control.send((0, Channel.CONTROL, 0), ([payload], len(payload)), Deadline(PATIENCE))


def say_hello(*ranks):
    for sender in ranks:
        for receiver in ranks:
            if sender is not receiver:
                sender.send(b"hello", receiver.rank)
                assert receiver.recv(sender.rank) == b"hello"


# -- the control plane

LIES = {
    "the coordinator is gone": Gone(0, "it was silent", silent=True),
    "the coordinator has left": Gone(0, "", orderly=True),
    "another rank is gone": Gone(1, "its connection ended"),
    "another rank has left": Gone(1, "", orderly=True),
    "a rank that does not exist is gone": Gone(77, "who?"),
    "another rank is silent": Suspected(1, 9.0),
    "a beat that tells of others": Beat([(1, 9.0)]),
    "the world will not form": Failed("because I say so", [1]),
    "a world": World(7, []),
    "ranks are missing": Waiting([1]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_rank_that_speaks_for_others_is_given_up_by_name_and_nobody_else_is(lie):
    with tcp_world(4, secret=SECRET) as world:
        say_hello(world[0], world[1], world[3])
        say_on_control(world[HOSTILE], lie)
        for rank in (0, 1, 3):
            with pytest.raises(PeerLostError, match="it said to the coordinator") as caught:
                world[rank].recv(HOSTILE)
            assert caught.value.peer == HOSTILE
        say_hello(world[0], world[1], world[3])
        assert world[1].mesh.is_watched
        assert world[3].mesh.is_watched
        # The control plane still tells of deaths.
        with contextlib.suppress(OSError):
            world[3].mesh.formation._membership._control.stream.shut_down()
        eventually(lambda: 3 not in world[1].alive)


def test_the_hostile_rank_itself_learns_that_it_is_out():
    with tcp_world(3, secret=SECRET) as world:
        waiting = Running(world[HOSTILE].recv, 1)
        say_on_control(world[HOSTILE], LIES["another rank is gone"])
        assert isinstance(waiting.error(), PeerLostError)


def test_a_rank_that_falls_again_and_again_is_told_of_once_and_costs_no_other_its_place(caplog):
    """All are told of a fall at once: who is busy for a moment would not take thousands of them."""
    with tcp_world(4, secret=SECRET) as world:
        with deaf(world[3]), contextlib.suppress(OSError):
            for _ in range(1000):
                say_on_control(world[HOSTILE], Fallen("I fall", "x" * 32_000, 77))
        eventually(lambda: "twice that it falls" in caplog.text)
        for rank in (0, 1, 3):
            with pytest.raises(PeerLostError, match="I fall") as caught:
                world[rank].recv(HOSTILE)
            assert caught.value.root == HOSTILE, "rank 77 does not exist"
        say_hello(world[0], world[1], world[3])
        assert world[3].mesh.is_watched


# -- connections between two others


def keys_of(rank):
    """Return every key that a rank has, or can make of what it has; it was given the secret."""
    formation = rank.mesh.formation
    keys = [formation.keys.own, handshake_key(SECRET), SECRET]
    keys += [rank_key(SECRET, other) for other in range(rank.world_size)]
    others = set(range(rank.world_size)) - {rank.rank}
    return keys + [formation.keys.shared[other] for other in others]


def connect_as_another(hostile, to, purpose, key, **claims):
    """Return a connection that a member opens as another rank, if it is let in."""
    member = hostile.mesh.peers[to].member
    hello = replace(hostile.mesh.formation.hello(purpose, to), **claims)
    deadline = Deadline(PATIENCE)
    sock = connect_tcp(TcpAddress(member.host, member.port), deadline)
    try:
        policy = hostile.mesh.formation.policy
        authenticate(sock, hello, key=key, deadline=deadline, policy=policy)
    except BaseException:
        sock.close()
        raise
    return sock


@pytest.mark.parametrize("security", ["local", "auth"])
@pytest.mark.parametrize("purpose", [Purpose.MESSAGES, Purpose.CALLS])
def test_a_member_cannot_open_a_connection_as_another_rank(security, purpose):
    """So it cannot forge messages or calls of another one, nor hang up in its name."""
    with tcp_world(3, secret=SECRET, security=security, transport="tcp") as world:
        for key in keys_of(world[HOSTILE]):
            with pytest.raises(AuthenticationError, match="not rank 0 of this world"):
                connect_as_another(world[HOSTILE], 0, purpose, key, rank=1)
        say_hello(*world)
        assert [rank.alive for rank in world] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_whatever_a_member_says_with_whatever_key_it_comes_in_as_itself(victim):
    with tcp_world(3, secret=SECRET, transport="tcp") as world:
        entered = []
        for purpose, rank, peer in itertools.product(Purpose, [0, 1, 2, 3, LAUNCHER], range(3)):
            for key in keys_of(world[HOSTILE]):
                claims = {"rank": rank, "peer": peer, "service": 7}
                with contextlib.suppress(OSError):  # all that a refusal can be
                    connect_as_another(world[HOSTILE], victim, purpose, key, **claims).close()
                    entered.append((purpose, rank, peer))
        assert set(entered) == {
            (Purpose.MESSAGES, HOSTILE, victim),
            (Purpose.CALLS, HOSTILE, victim),
            (Purpose.INQUIRY, HOSTILE, victim),
        }
        assert [rank.alive for rank in world] == [(0, 1, 2)] * 3
        say_hello(world[0], world[1])


def test_a_member_cannot_answer_in_the_place_of_another_rank():
    with tcp_world(3, secret=SECRET, transport="tcp") as world:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            peer = world[1].mesh.peers[0]
            peer.member = msgspec.structs.replace(peer.member, host=host, port=port)
            sending = Running(world[1].send, b"for rank 0 alone", 0)
            while not sending.done:
                for key in keys_of(world[HOSTILE]):
                    listener.settimeout(0.1)
                    with contextlib.suppress(OSError):
                        sock, _ = listener.accept()
                        with sock:
                            responder = Responder(key=key, nonce=bytes(32))
                            sock.sendall(responder.challenge(sock.recv(HELLO_NBYTES)))
                            sock.recv(PROOF_NBYTES)  # whatever it is: all are welcome here
                            sock.sendall(responder.verdict(Status.WELCOME))
                            assert not sock.recv(1), "it takes this for rank 0"
            error = sending.error()
        assert isinstance(error, PeerLostError)
        assert "not rank 0 of this world" in str(error)


def test_every_pair_has_a_key_of_its_own_and_nobody_else_has_it():
    with tcp_world(4, secret=SECRET) as world:
        keys = {
            frozenset((a.rank, b.rank)): {
                a.mesh.formation.keys.shared[b.rank],
                b.mesh.formation.keys.shared[a.rank],
            }
            for a, b in itertools.combinations(world, 2)
        }
        assert all(len(key) == 1 for key in keys.values()), "both ends have the same"
        assert len(set().union(*keys.values())) == 6
        others = {
            rank: {key for pair, (key,) in keys.items() if rank not in pair} for rank in range(4)
        }
        assert all(not others[rank.rank] & set(keys_of(rank)) for rank in world)


def test_a_new_world_has_new_keys():
    seen = []
    for _ in range(2):
        with tcp_world(2, secret=SECRET) as world:
            seen.append(world[0].mesh.formation.keys.shared[1])
    assert seen[0] != seen[1]


def test_keys_do_not_travel_for_all_to_read():
    """In "auth" nothing is encrypted, but keys are: who reads the network must not have them."""
    passed = []
    listener = socket.create_server(("127.0.0.1", 0))
    where = address_of(listener)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        options = {"secret": SECRET, "security": "auth", "transport": "tcp"}

        def overhear():
            near, _ = relay.accept()
            with near, socket.create_connection(listener.getsockname()) as far:
                there, back = Running(pump, near, far), Running(pump, far, near)
                there.result()
                back.result()

        def pump(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    passed.append(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        zero = Running(TcpBackend, 0, 2, where, listener=listener, **options)
        overhearing = Running(overhear)
        one = Running(TcpBackend, 1, 2, address_of(relay), **options)
        with zero.result() as first, one.result() as second:
            key = first.mesh.formation.keys.shared[1]
            assert key == second.mesh.formation.keys.shared[0]
        overhearing.result()
    heard = b"".join(passed)
    assert len(heard) > 500
    assert key not in heard


# -- joining


@pytest.fixture
def launched():
    """A coordinator of three ranks, as a launcher has it."""
    listener = bound_socket()
    address = address_of(listener)
    host = CoordinatorHost(
        listener, 3, secret=SECRET, job="default", clock=REAL_TIME, policy=UNPROTECTED
    )
    with contextlib.closing(host):
        yield lambda rank, **options: Running(
            TcpBackend,
            rank,
            3,
            address,
            has_coordinator=True,
            **{"join_timeout": PATIENCE, "timeout": PATIENCE} | options,
        )


def test_a_rank_that_a_launcher_started_can_join_as_itself_alone(launched):
    """It has a key of its own, and not the secret."""
    own = [rank_key(SECRET, rank) for rank in range(3)]
    for rank in (0, 1):
        error = launched(rank, secret=own[HOSTILE]).error()
        assert isinstance(error, AuthenticationError)
    world = [each.result() for each in [launched(rank, secret=own[rank]) for rank in range(3)]]
    with contextlib.ExitStack() as stack:
        for rank in world:
            stack.enter_context(rank)
        say_hello(*world)
        assert SECRET not in vars(world[HOSTILE].mesh.formation).values()


def test_a_rank_that_a_launcher_started_cannot_pass_for_the_coordinator(launched):
    """Nor can it, so, read the keys that others are handed."""
    own = rank_key(SECRET, HOSTILE)
    listener = bound_socket()
    impostor = CoordinatorHost(
        listener, 3, secret=own, job="default", clock=REAL_TIME, policy=UNPROTECTED
    )
    with contextlib.closing(impostor):
        address = address_of(listener)
        with pytest.raises(AuthenticationError):
            TcpBackend(1, 3, address, secret=rank_key(SECRET, 1), has_coordinator=True)


def test_a_rank_that_a_launcher_started_cannot_pass_for_a_launcher():
    """Which could end the job by a word."""
    came = []
    listener = bound_socket()
    address = address_of(listener)
    host = CoordinatorHost(
        listener,
        3,
        secret=SECRET,
        job="default",
        clock=REAL_TIME,
        policy=UNPROTECTED,
        nodes=2,
        on_launcher=lambda node, link: came.append(link),
    )
    own = rank_key(SECRET, HOSTILE)
    with contextlib.closing(host):
        where = TcpAddress.parse(address)
        for key in (own, handshake_key(own)):
            deadline = Deadline(PATIENCE)
            hello = Hello(Purpose.LAUNCH, job_id(LAUNCH_JOB), 0, 2, 1, 0)
            with connect_tcp(where, deadline) as sock, pytest.raises(AuthenticationError):
                authenticate(sock, hello, key=key, deadline=deadline)
    assert came == []


def test_the_key_of_one_rank_is_no_secret_to_coordinate_with():
    with pytest.raises(ConfigurationError, match="secret that all ranks have"):
        TcpBackend(0, 2, "127.0.0.1:0", secret=rank_key(SECRET, 0))


# -- inside TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    pytest.importorskip("cryptography")
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours", 3)


class Between:
    """A member that stands between rank 1 and rank 0 with its own certificate, or with another.

    It takes what rank 1 sends, and sends rank 0 something else in rank 1's name.
    """

    def __init__(self, world, files):
        self._world = world
        self._files = files
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._genuine = world[1].mesh.peers[0].member
        host, port = self._listener.getsockname()
        world[1].mesh.peers[0].member = msgspec.structs.replace(self._genuine, host=host, port=port)
        self.errors = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for key in itertools.cycle(keys_of(self._world[HOSTILE])):
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                with near:
                    self._stand_between(near, key)
            except (OSError, struct.error) as error:  # ours too, and victims that hang up
                self.errors.append(error)

    def _stand_between(self, near, key):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.cert, self._files.key)
        context.load_verify_locations(cafile=self._files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        near.settimeout(PATIENCE)
        with context.wrap_socket(near, server_side=True) as inner:
            der = ssl.PEM_cert_to_DER_cert(
                "-----BEGIN" + Path(self._files.cert).read_text().split("-----BEGIN", 1)[1]
            )
            responder = Responder(key=key, nonce=os.urandom(32), binding=sha256(der).digest())
            inner.sendall(responder.challenge(inner.recv(HELLO_NBYTES)))
            hello = responder.verify(inner.recv(PROOF_NBYTES))
            policy = choose_policy("tls", TcpAddress("127.0.0.1", 1), tls=self._files)
            where = TcpAddress(self._genuine.host, self._genuine.port)
            deadline = Deadline(PATIENCE)
            with contextlib.closing(connect_tcp(where, deadline)) as sock:
                outer, _ = authenticate(sock, hello, key=key, deadline=deadline, policy=policy)
                inner.sendall(responder.verdict(Status.WELCOME))
                for stream in (outer, inner):  # both ends introduce themselves
                    stream.sendall(pack_header((0, Channel.GREETING, 0), 0, 0))
                while data := inner.recv(1 << 16):
                    outer.sendall(data.replace(b"pay 100", b"pay 999"))

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)


def test_inside_tls_a_member_cannot_stand_between_two_others(files):
    with tcp_world(3, secret=SECRET, transport="tcp", tls=files) as world:
        between = Between(world, files[HOSTILE])
        try:
            with pytest.raises(PeerLostError, match=r"certificate is of 'rank-2'.* of 'rank-0'"):
                world[1].send(b"pay 100", 0)
        finally:
            between.close()
        assert between.errors
        world[HOSTILE].send(b"as myself", 0)
        assert world[0].recv(HOSTILE) == b"as myself"


def test_inside_tls_the_certificate_of_a_launcher_does_not_open_a_connection_as_a_rank(files):
    with tcp_world(3, secret=SECRET, transport="tcp", tls=files) as world:
        launcher = files_of(Path(files[0].ca).parent, "launcher")
        policy = choose_policy(
            "tls", TcpAddress("127.0.0.1", 1), tls=replace(launcher, names="any")
        )
        member = world[HOSTILE].mesh.peers[0].member
        for purpose in Purpose:
            hello = replace(world[HOSTILE].mesh.formation.hello(purpose, 0), service=7)
            formation = world[HOSTILE].mesh.formation
            key = formation.keys.own if purpose is Purpose.JOIN else formation.keys.shared[0]
            deadline = Deadline(PATIENCE)
            with (
                contextlib.closing(
                    connect_tcp(TcpAddress(member.host, member.port), deadline)
                ) as sock,
                pytest.raises(AuthenticationError),
            ):
                authenticate(sock, hello, key=key, deadline=deadline, policy=policy)
        say_hello(*world)


@pytest.mark.parametrize("purpose", [Purpose.MESSAGES, Purpose.CALLS, Purpose.JOIN])
def test_inside_tls_the_certificate_of_one_rank_does_not_open_a_connection_as_another(
    files, purpose, caplog
):
    with tcp_world(3, secret=SECRET, transport="tcp", tls=files) as world:
        policy = choose_policy("tls", TcpAddress("127.0.0.1", 1), tls=files[HOSTILE])
        hello = replace(world[HOSTILE].mesh.formation.hello(purpose, 0), rank=1)
        # As if it had learnt the right key: the certificate alone keeps it out.
        formation = world[1].mesh.formation
        key = formation.keys.own if purpose is Purpose.JOIN else formation.keys.shared[0]
        member = world[HOSTILE].mesh.peers[0].member
        deadline = Deadline(PATIENCE)
        with (
            contextlib.closing(connect_tcp(TcpAddress(member.host, member.port), deadline)) as sock,
            pytest.raises(AuthenticationError, match="not that of rank 1"),
        ):
            authenticate(sock, hello, key=key, deadline=deadline, policy=policy)
        assert "as rank 1: its certificate is of 'rank-2'" in caplog.text
        say_hello(*world)


# -- connections without end


def test_connections_of_one_member_are_bounded_and_it_is_named(caplog):
    with tcp_world(3, secret=SECRET, transport="tcp") as world:
        say_hello(*world)
        key = world[HOSTILE].mesh.formation.keys.shared[0]
        with contextlib.ExitStack() as stack:

            def connect(service):
                sock = connect_as_another(world[HOSTILE], 0, Purpose.CALLS, key, service=service)
                return stack.enter_context(sock)

            # One for messages, as everyone has, and one for each agent.
            for service in range(1, MAX_CONNECTIONS_OF_A_RANK):
                connect(service)
            for _ in range(3):
                with pytest.raises(OverloadedError, match=r"rank 0 has 128 connections of rank 2"):
                    connect(MAX_CONNECTIONS_OF_A_RANK)
            assert len(world[0].mesh.peers[HOSTILE].connections()) <= MAX_CONNECTIONS_OF_A_RANK + 1
            warnings = [record.getMessage() for record in caplog.records]
            assert len([text for text in warnings if "rank 2 has 128 connections" in text]) == 1
            say_hello(*world)
            with RpcAgent(world[0]) as callee, RpcAgent(world[1]) as caller:
                callee.register("add", lambda a, b: a + b)
                assert caller.rpc_sync(0, "add", 1, 2) == 3


def incoming_count(peer):
    """Return how many connections stand that a peer has opened."""
    connections = list(peer._connections.items())
    return sum(incoming and connection.failure is None for connection, incoming in connections)


def test_many_connections_for_one_agent_are_bounded_too():
    with tcp_world(2, secret=SECRET, transport="tcp") as world:
        key = world[1].mesh.formation.keys.shared[0]
        with RpcAgent(world[0]), contextlib.ExitStack() as stack:
            (port,) = world[0].mesh.ports.all()
            service = port.service

            def connect():
                sock = connect_as_another(world[1], 0, Purpose.CALLS, key, service=service)
                stack.enter_context(sock)

            for _ in range(MAX_CONNECTIONS_OF_A_RANK):
                connect()
            with pytest.raises(OverloadedError):
                connect()
            # Those that end make room.
            stack.close()
            eventually(lambda: incoming_count(world[0].mesh.peers[1]) == 0)
        say_hello(*world)


def test_of_connections_to_an_agent_that_is_not_there_only_the_last_waits():
    """An agent has one; those before it are of agents that were closed since."""
    with tcp_world(2, secret=SECRET, transport="tcp") as world:
        for _ in range(5):
            with RpcAgent(world[1]) as caller, pytest.raises(DeadlineExceededError):
                caller.rpc_sync(0, "add", 1, 2, timeout=0.05)
        assert incoming_count(world[0].mesh.peers[1]) == 1
        with RpcAgent(world[0]) as callee, RpcAgent(world[1]) as caller:
            callee.register("add", lambda a, b: a + b)
            assert caller.rpc_sync(0, "add", 1, 2) == 3
