"""Worlds under attack: modes that do not fit, strangers, and somebody on the wire between ranks."""

import contextlib
import hmac
import itertools
import re
import socket
import ssl
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from headers import pack_header
from rankwire import Codec, RpcAgent, SubBackend, TcpBackend, Tls, all_gather_object
from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    ConfigurationError,
    NoConnectionError,
    PeerLostError,
    ProtocolError,
    RankwireError,
    RendezvousError,
)
from rankwire.launch.certificates import make_certificates
from rankwire.links.dialer import authenticate
from rankwire.transports.security import choose_policy, files_of
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp, listen_tcp
from rankwire.wire.frames import HEADER_NBYTES, SEAL_NBYTES, Channel
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    HELLO_NBYTES,
    PROOF_NBYTES,
    PROTOCOL_VERSION,
    VERDICT_NBYTES,
    Initiator,
    Purpose,
    handshake_key,
)
from rankwire.wire.keys import rank_key
from rankwire.wire.seals import Protection
from real_time import Deadline
from worlds import PATIENCE, SECRET, Running, address_of, bound_socket, free_port, tcp_world

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours", 3)


def say_hello(world):
    for sender, receiver in ((world[0], world[1]), (world[1], world[0])):
        sender.send(b"hello", receiver.rank)
        assert receiver.recv(sender.rank) == b"hello"


def other_interface():
    """Return an address of this host that is not loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no network interface besides loopback")
        return sock.getsockname()[0]


# -- modes


def options_of(mode, files):
    return {
        "auth": {"security": "auth"},
        "mac": {"security": "auth", "integrity": "mac"},
        "tls": {"tls": files},
    }[mode]


@pytest.mark.parametrize("mode", ["auth", "mac", "tls"])
def test_a_protected_world_does_all_that_others_do(mode, files):
    with tcp_world(3, transport="tcp", **options_of(mode, files)) as world:
        assert [rank.security for rank in world] == ["tls" if mode == "tls" else "auth"] * 3
        large = bytes(range(256)) * 20_000
        for src, dst in itertools.permutations(range(3), 2):
            sending = Running(world[src].send, large, dst)
            assert world[dst].recv(src) == large
            sending.result()
        with contextlib.ExitStack() as stack:
            agents = [stack.enter_context(RpcAgent(rank)) for rank in world]
            for agent in agents:
                agent.register("echo", lambda value: value)
            assert agents[0].rpc_sync(2, "echo", [1, "two", large]) == [1, "two", large]
            futures = [agents[1].rpc_async(2, "echo", number) for number in range(100)]
            assert [future.result(PATIENCE) for future in futures] == list(range(100))
        meeting = [Running(rank.barrier) for rank in world]
        for each in meeting:
            each.result()


@pytest.mark.parametrize("mode", ["auth", "tls"])
def test_leaving_in_good_order_is_seen_as_such(mode, files):
    with tcp_world(2, transport="tcp", **options_of(mode, files)) as world:
        say_hello(world)
        world[1].close()
        with pytest.raises(ChannelClosedError, match="left"):
            world[0].recv(1)


def connections_of(backend):
    for peer in backend.mesh.peers.values():
        yield from peer.connections()


@pytest.mark.parametrize("security", ["auto", "local"])
def test_on_loopback_frames_are_not_sealed(security):
    with tcp_world(2, transport="tcp", security=security) as world:
        say_hello(world)
        assert all(c.outbox._seal is None for rank in world for c in connections_of(rank))
        assert world[1].security == "local"


def test_off_loopback_all_frames_are_sealed_those_of_the_control_connection_too():
    host = other_interface()
    with tcp_world(2, host=host, transport="tcp", secret=SECRET) as world:
        say_hello(world)
        connections = [
            *connections_of(world[0]),
            *connections_of(world[1]),
            world[1].mesh.formation._membership._control,
            *world[0].mesh.formation._coordinator.watch.controls.values(),
        ]
        assert len(connections) >= 4
        assert all(connection.outbox._seal is not None for connection in connections)
        assert world[0].security == "auth"


def test_within_a_host_unix_sockets_stay_as_they_are(files):
    with tcp_world(2, tls=files) as world:
        say_hello(world)
        assert world[0].link_to(1).transport == "unix"
        assert all(c.outbox._seal is None for rank in world for c in connections_of(rank))


def test_insecure_runs_off_loopback_without_a_secret_and_warns_once_a_rank():
    host = other_interface()

    def run():
        with tcp_world(2, host=host, security="insecure", transport="tcp") as world:
            say_hello(world)
            assert world[0].security == "insecure"

    with pytest.warns(UserWarning, match="insecure") as caught:
        run()
    assert len([w for w in caught if "insecure" in str(w.message)]) == 2


@pytest.mark.filterwarnings("ignore:rankwire runs with security")
def test_insecure_refuses_pickle():
    with tcp_world(2, security="insecure") as world:
        pickling = Codec(allow_pickle=True)
        with pytest.raises(ConfigurationError, match="run code"):
            RpcAgent(world[0], codec=pickling)
        with pytest.raises(ConfigurationError, match="run code"):
            all_gather_object(world[0], 1, codec=pickling)
        groups = [Running(SubBackend, rank, [0, 1]) for rank in world]
        with groups[0].result() as group, groups[1].result():
            with pytest.raises(ConfigurationError, match="run code"):
                RpcAgent(group, codec=pickling)
        with RpcAgent(world[0]) as agent:
            assert agent.functions() == []


def test_the_old_way_to_say_insecure_is_gone():
    with pytest.raises(TypeError):
        TcpBackend(0, 1, "127.0.0.1:0", insecure=True)


# -- what a world listens on


def own_descriptors():
    """Return what the descriptors of this process refer to."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(path.readlink()))
    return found


def listening_addresses(port):
    """Return the addresses at which this process listens on a port, from the kernel.

    Another test's process may listen on the same port at another address.
    """
    found, own = set(), own_descriptors()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            host, number = local.split(":")
            if state == "0A" and int(number, 16) == port and f"socket:[{inode}]" in own:
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                found.add(socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)))
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "an interface", "a name"])
def test_every_rank_listens_on_exactly_the_address_asked_for(host):
    asked = {"an interface": other_interface, "a name": lambda: "localhost"}.get(
        host, lambda: host
    )()
    expected = {"a name": "127.0.0.1"}.get(host, asked)
    port = free_port()
    address = str(TcpAddress(asked, port))
    ranks = [
        Running(TcpBackend, rank, 2, address, secret=SECRET, join_timeout=PATIENCE)
        for rank in range(2)
    ]
    with ranks[0].result() as zero, ranks[1].result() as one:
        ports = [zero.mesh.peers[1].member.port, port]
        assert [listening_addresses(number) for number in ports] == [{expected}, {expected}]
        say_hello([zero, one])


@pytest.mark.parametrize("host", ["0", "0x0", "00.00.00.00"])
def test_all_interfaces_must_be_asked_for_literally(host):
    with pytest.raises(ConfigurationError, match="all interfaces"):
        listen_tcp(TcpAddress(host, 0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_interfaces_can_be_asked_for(host):
    with listen_tcp(TcpAddress(host, 0)) as sock:
        assert sock.getsockname()[0] == host


# -- ends that do not want the same


def join_error(zero, one):
    """Return why rank 1 with the options ``one`` cannot join rank 0, which has ``zero``."""
    listener = bound_socket()
    address = address_of(listener)
    options = {"secret": SECRET, "transport": "tcp"}
    first = Running(
        TcpBackend, 0, 2, address, listener=listener, join_timeout=3.0, **{**options, **zero}
    )
    second = Running(TcpBackend, 1, 2, address, join_timeout=2.5, **{**options, **one})
    error = second.error()
    assert isinstance(first.error(), RendezvousError)
    return error


@pytest.mark.parametrize(
    ("zero", "one", "text"),
    [
        ({"security": "auth"}, {}, "wants sealed frames .* offers frames without seals"),
        (
            {"security": "auth", "integrity": "mac"},
            {"security": "auth"},
            "with the MAC of bulk, this one offers .* a CRC",
        ),
    ],
    ids=["no seals", "no MAC of bulk"],
)
def test_too_little_protection_is_refused_with_both_sides_named(zero, one, text):
    error = join_error(zero, one)
    assert isinstance(error, RendezvousError)
    assert re.search(text, str(error))


def test_more_protection_than_demanded_is_taken():
    listener = bound_socket()
    address = address_of(listener)
    zero = Running(TcpBackend, 0, 2, address, listener=listener, secret=SECRET)
    one = Running(TcpBackend, 1, 2, address, secret=SECRET, security="auth")
    with zero.result(), one.result() as backend:
        assert backend.mesh.formation._membership._control.outbox._seal is not None


def test_a_plain_rank_is_told_that_the_world_is_inside_tls(files):
    error = join_error({"tls": files[0]}, {})
    assert isinstance(error, AuthenticationError)
    assert "wants TLS" in str(error)


def test_a_rank_inside_tls_does_not_join_a_plain_world(files):
    error = join_error({}, {"tls": files[1]})
    assert isinstance(error, (RendezvousError, AuthenticationError))
    assert "TLS" in str(error)


def test_a_rank_with_a_certificate_of_another_authority_does_not_join(files, tmp_path):
    (foreign,) = make_certificates(tmp_path / "theirs", 1)
    mixed = Tls(cert=foreign.cert, key=foreign.key, ca=files[0].ca)
    error = join_error({"tls": files[0]}, {"tls": mixed})
    assert isinstance(error, AuthenticationError)
    assert "unknown ca" in str(error)


def test_a_rank_with_the_certificate_of_another_rank_does_not_join(files):
    error = join_error({"tls": files[0]}, {"tls": files[2]})
    assert isinstance(error, AuthenticationError)
    assert "not that of rank 1" in str(error)


def test_a_coordinator_with_the_certificate_of_another_rank_is_not_believed(files):
    error = join_error({"tls": files[2]}, {"tls": files[1]})
    assert isinstance(error, AuthenticationError)
    assert "its certificate is of 'rank-2', and that of rank 0 is of 'rank-0'" in str(error)


def test_a_launchers_certificate_does_not_act_as_a_rank(files):
    launcher = files_of(Path(files[0].ca).parent, "launcher")
    error = join_error({"tls": files[0]}, {"tls": launcher})
    assert "not that of rank 1" in str(error)
    error = join_error({"tls": launcher}, {"tls": files[1]})
    assert "its certificate is of 'launcher'" in str(error)


def test_certificates_without_the_names_of_ranks_need_a_word_that_says_so(files):
    """As those of an authority that knows hosts only; all ranks may then show the same."""
    named = [replace(files[2], names="any")] * 2
    with tcp_world(2, transport="tcp", tls=named) as world:
        say_hello(world)


def test_names_of_ones_own_say_which_rank_a_certificate_is_for(files):
    error = join_error(
        {"tls": replace(files[0], names="worker-{rank}.example")},
        {"tls": replace(files[1], names="worker-{rank}.example")},
    )
    assert "is of 'rank-0', and that of rank 0 is of 'worker-0.example'" in str(error)


def test_a_certificate_alone_is_not_enough(files):
    error = join_error({"tls": files[0]}, {"tls": files[1], "secret": b"x" * 32})
    assert isinstance(error, AuthenticationError)


# -- somebody on the wire


class Wire:
    """A relay between two sockets that may alter what passes from the dialler to the listener.

    The handshake passes as it is; then ``alter(frames)`` gets the bytes of each read.
    """

    def __init__(self, target, alter):
        self._target = target
        self._alter = alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = TcpAddress(*self._listener.getsockname())
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._sockets = []
        self._threads[0].start()

    def _run(self):
        near, _ = self._listener.accept()
        far = socket.create_connection((self._target.host, self._target.port))
        self._sockets = [near, far]
        back = threading.Thread(target=self._pass, args=(far, near, lambda data: data), daemon=True)
        self._threads.append(back)
        back.start()
        far.sendall(near.recv(HELLO_NBYTES, socket.MSG_WAITALL))
        far.sendall(near.recv(PROOF_NBYTES, socket.MSG_WAITALL))
        self._pass(near, far, self._alter)

    def _pass(self, source, target, alter):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(alter(data))
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for sock in self._sockets:
            sock.close()


@contextlib.contextmanager
def wired_world(alter, **options):
    """Two ranks; what rank 1 sends to rank 0 passes a wire."""
    with tcp_world(2, transport="tcp", security="auth", **options) as world:
        peer = world[1].mesh.peers[0]
        wire = Wire(TcpAddress(peer.member.host, peer.member.port), alter)
        object.__setattr__(peer, "member", _moved(peer.member, wire.address))
        try:
            yield world
        finally:
            wire.close()


def _moved(member, address):
    import msgspec

    return msgspec.structs.replace(member, host=address.host, port=address.port)


def test_a_relay_that_alters_nothing_gains_nothing_and_harms_nothing():
    with wired_world(lambda data: data) as world:
        world[1].send(b"through the wire", 0)
        assert world[0].recv(1) == b"through the wire"


def flip(where):
    def alter(data):
        damaged = bytearray(data)
        damaged[where] ^= 1
        return bytes(damaged)

    return alter


FORGED = pack_header((0, Channel.MESSAGE, 0), 3, 0) + b"bad" + bytes(SEAL_NBYTES)
ATTACKS = {
    "a bit of the channel": flip(0),
    "a bit of the group": flip(8),
    "a bit of the tag": flip(16),
    "a bit of the payload": flip(HEADER_NBYTES),
    "a bit of the seal": flip(-1),
    "a frame in front": lambda data: FORGED + data,
    "the payload and seal removed": lambda data: data[:24] + bytes(8) + bytes(16),
    "the frame twice, renumbered": lambda data: data + data[:4] + b"\1" + data[5:],
    "the seal removed and more sent": lambda data: data[:-SEAL_NBYTES] + bytes(100),
}


@pytest.mark.parametrize("alter", ATTACKS.values(), ids=ATTACKS)
def test_what_was_altered_on_the_wire_is_refused_and_the_peer_named(alter):
    with wired_world(alter) as world:
        world[1].send(b"pay 100", 0)
        received = Running(lambda: [world[0].recv(1), world[0].recv(1)])
        error = received.error()
        assert isinstance(error, ProtocolError)
        assert error.peer == 1


def test_altered_bulk_is_found():
    def alter(data):
        return flip(-5)(data) if len(data) > 50_000 else data

    with wired_world(alter) as world:
        sending = Running(world[1].send, bytes(1 << 20), 0)
        with pytest.raises(ProtocolError, match="seal"):
            world[0].recv(1)
        with contextlib.suppress(RankwireError):
            sending.result()


def test_an_altered_call_is_never_run():
    calls = []
    with tcp_world(2, transport="tcp", security="auth") as world:
        peer = world[1].mesh.peers[0]
        wire = Wire(
            TcpAddress(peer.member.host, peer.member.port),
            lambda data: data.replace(b"harmless", b"harmfull"),
        )
        peer.member = _moved(peer.member, wire.address)
        with RpcAgent(world[0]) as callee, RpcAgent(world[1]) as caller:
            callee.register("harmless", lambda: calls.append("harmless"))
            callee.register("harmfull", lambda: calls.append("harmfull"))
            with pytest.raises((PeerLostError, ChannelClosedError)):
                caller.rpc_sync(0, "harmless")
        wire.close()
    assert calls == []


def test_inside_tls_a_rank_cannot_stand_between_two_others(files):
    """It has a good certificate of the job, and could relay the handshake that is inside TLS."""

    def relay(listener, target):
        near, _ = listener.accept()
        far = socket.create_connection(target)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        for context in (server, client):
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cafile=files[2].ca)
            context.load_cert_chain(files[2].cert, files[2].key)
        with (
            server.wrap_socket(near, server_side=True) as inner,
            client.wrap_socket(far) as outer,
            contextlib.suppress(OSError),
        ):
            outer.sendall(inner.recv(HELLO_NBYTES))
            inner.sendall(outer.recv(CHALLENGE_NBYTES))
            outer.sendall(inner.recv(PROOF_NBYTES))
            return outer.recv(VERDICT_NBYTES)

    with tcp_world(2, transport="tcp", tls=files) as world:
        member = world[1].mesh.peers[0].member
        with socket.create_server(("127.0.0.1", 0)) as listener:
            relaying = Running(relay, listener, (member.host, member.port))
            policy = choose_policy("tls", TcpAddress("127.0.0.1", 1), tls=files[1])
            deadline = Deadline(PATIENCE)
            sock = connect_tcp(TcpAddress(*listener.getsockname()), deadline)
            hello = world[1].mesh.formation.hello(Purpose.MESSAGES, 0)
            key = world[1].mesh.formation.keys.shared[0]
            with contextlib.closing(sock), pytest.raises(AuthenticationError):
                authenticate(sock, hello, key=key, deadline=deadline, policy=policy)
            assert not relaying.result(), "the listener has refused too"
        say_hello(world)


# -- strangers at the door: the list of attacks on a handshake


class Attacker:
    """Knows all but the secret, and may have overheard a good handshake."""

    def __init__(self, world):
        self.world = world
        self.genuine = world[1].mesh.formation.hello(Purpose.MESSAGES, 0)
        self.key = world[1].mesh.formation.keys.shared[0]
        member = world[1].mesh.peers[0].member
        self.address = TcpAddress(member.host, member.port)

    def connect(self):
        sock = connect_tcp(self.address, Deadline(PATIENCE))
        sock.settimeout(PATIENCE)
        return sock

    def refused(self, *, greeting=None, hello=None, key=None, proof=None):
        """Go through a handshake; return whether the listener refuses it and closes.

        It says nothing, or the constant bytes for a wrong proof: no reason and no MAC.
        """
        initiator = Initiator(hello or self.genuine, key=key or self.key, nonce=b"n" * 32)
        with self.connect() as sock:
            try:
                sock.sendall(greeting or initiator.hello())
                challenge = sock.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)
                if len(challenge) < CHALLENGE_NBYTES:
                    return True
                good = initiator.proof(challenge)
                sock.sendall(good if proof is None else proof(good, challenge))
                verdict = sock.recv(VERDICT_NBYTES, socket.MSG_WAITALL)
                return verdict == b"" or (verdict == WRONG_PROOF and sock.recv(1) == b"")
            except ConnectionError:
                return True


def with_bytes(message, offset, new):
    return message[:offset] + new + message[offset + len(new) :]


def greeting_of(hello, offset, new):
    return with_bytes(hello.pack(b"n" * 32), offset, new)


WRONG_PROOF = b"\x0b" + bytes(VERDICT_NBYTES - 1)  # status 11, and zeros in place of a MAC
# After a proof for the genuine greeting, one that differs in a single field was sent.
FIELDS = {
    "magic": (0, b"R"),
    "version 0": (8, b"\0\0"),
    "the version before": (8, struct.pack("<H", PROTOCOL_VERSION - 1)),
    "the version after": (8, struct.pack("<H", PROTOCOL_VERSION + 1)),
    "purpose join": (10, b"\1"),
    "purpose calls": (10, b"\3"),
    "an unknown purpose": (10, b"\x09"),
    "another job": (12, bytes(16)),
    "the epoch before": (28, bytes(4)),
    "another world size": (32, b"\3"),
    "another rank": (36, b"\2"),
    "rank 0 itself": (36, b"\0"),
    "another peer": (40, b"\1"),
    "another service": (44, b"\1"),
    "another nonce": (52, b"m"),
    "a promise to seal": (84, b"\1"),
    "unknown protection": (84, b"\4"),
    "a MAC without seals": (84, b"\2"),
    "the first reserved byte": (88, b"\1"),
    "the last reserved byte": (127, b"\1"),
}
PROOFS = {
    "nothing but zeros": lambda good, challenge: bytes(32),
    "the first bit": lambda good, challenge: bytes([good[0] ^ 1]) + good[1:],
    "the last bit": lambda good, challenge: good[:-1] + bytes([good[-1] ^ 128]),
    "cut and filled": lambda good, challenge: good[:16] + bytes(16),
    "the challenge itself": lambda good, challenge: challenge[:32],
    "the nonce": lambda good, challenge: challenge[-32:],
    "the proof reversed": lambda good, challenge: good[::-1],
}
KEYS = {
    "of another secret": handshake_key(b"y" * 32),
    "an empty secret": handshake_key(b""),
    "no secret": handshake_key(b"rankwire without a secret"),
    "zeros": bytes(32),
    "the secret unhashed": SECRET,
    "that of the version before": hmac.digest(SECRET, b"rankwire v2 handshake", "sha256"),
    "of launchers": handshake_key(SECRET),
    "of the rank itself": rank_key(SECRET, 1),
}


@pytest.fixture
def attacker():
    """Attacks a world, which afterwards still lets a genuine rank in."""
    with tcp_world(2, transport="tcp", secret=SECRET) as world:
        yield Attacker(world)
        say_hello(world)


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_a_greeting_altered_on_the_way_is_refused(attacker, field):
    assert attacker.refused(greeting=greeting_of(attacker.genuine, *field))


@pytest.mark.parametrize("proof", PROOFS.values(), ids=PROOFS)
def test_a_wrong_proof_is_refused(attacker, proof):
    assert attacker.refused(proof=proof)


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_wrong_secret_is_refused(attacker, key):
    assert attacker.refused(key=key)


def test_a_replayed_proof_is_refused(attacker):
    overheard = []
    assert not attacker.refused(proof=lambda good, _: overheard.append(good) or good)
    assert attacker.refused(proof=lambda good, _: overheard[0])


def test_a_proof_reflected_from_the_listeners_own_is_refused(attacker):
    """Asked to dial somebody, a rank would make proofs; those of its own role are of no use."""

    def as_listener(good, challenge):
        said = attacker.genuine.pack(b"n" * 32) + challenge
        return hmac.digest(attacker.key, b"R" + said, "sha256")

    assert attacker.refused(proof=as_listener)


def test_frames_before_the_proof_are_refused(attacker):
    frame = pack_header((0, Channel.MESSAGE, 0), 4, 0) + b"evil"
    assert attacker.refused(proof=lambda good, _: frame[:PROOF_NBYTES])
    assert attacker.refused(greeting=(frame * 4)[:HELLO_NBYTES])


def test_a_session_truncated_at_any_offset_harms_nobody(attacker):
    initiator = Initiator(attacker.genuine, key=attacker.key, nonce=b"n" * 32)
    for offset in range(HELLO_NBYTES + PROOF_NBYTES):
        with attacker.connect() as sock:
            sock.sendall(initiator.hello()[:offset])
            if offset >= HELLO_NBYTES:
                challenge = sock.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)
                sock.sendall(initiator.proof(challenge)[: offset - HELLO_NBYTES])
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b"", "no verdict"


def test_a_message_that_is_too_large_is_refused_from_its_header():
    with tcp_world(2, transport="tcp", max_message_nbytes=1 << 20) as world:
        formation = world[1].mesh.formation
        member = world[1].mesh.peers[0].member
        deadline = Deadline(PATIENCE)
        with connect_tcp(TcpAddress(member.host, member.port), deadline) as sock:
            hello = formation.hello(Purpose.MESSAGES, 0)
            authenticate(sock, hello, key=formation.keys.shared[0], deadline=deadline)
            sock.sendall(pack_header((0, Channel.MESSAGE, 0), (1 << 20) + 1, 0))
            with pytest.raises(ProtocolError, match="1048577 bytes, the limit is 1048576"):
                world[0].recv(1)


def test_a_dialler_that_leaves_seals_out_is_refused_by_its_own_words():
    """The greeting says how frames are protected, and is under the MAC: no one can lower it."""
    with tcp_world(2, transport="tcp", security="auth") as world:
        formation = world[1].mesh.formation
        member = world[1].mesh.peers[0].member
        deadline = Deadline(PATIENCE)
        with connect_tcp(TcpAddress(member.host, member.port), deadline) as sock:
            hello = formation.hello(Purpose.MESSAGES, 0)
            assert hello.protection == Protection.NONE
            with pytest.raises(NoConnectionError, match="wants sealed frames"):
                authenticate(sock, hello, key=formation.keys.shared[0], deadline=deadline)
        say_hello(world)
