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

from rankwire.deadline import Deadline
from rankwire.errors import AuthenticationError, PeerLostError
from rankwire.launch.certificates import make_certificates
from rankwire.links.dialing import authenticate
from rankwire.links.protection import choose_policy
from rankwire.links.sockets import TcpAddress, connect_tcp
from rankwire.rendezvous.messages import Beat, Failed, Gone, Suspected, Waiting, World, pack
from rankwire.wire.frames import Channel, pack_header
from rankwire.wire.handshake import (
    HELLO_NBYTES,
    PROOF_NBYTES,
    Purpose,
    Responder,
    Status,
)
from worlds import PATIENCE, SECRET, Running, eventually, tcp_world

HOSTILE = 2


def say_on_control(rank, message):
    """Send a control message on a rank's own connection to the coordinator."""
    payload = pack(message)
    control = rank._formation._attendance._control
    control.send(Channel.CONTROL, 0, 0, [payload], len(payload), Deadline(PATIENCE))


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
    "a beat that tells of others": Beat({1: 9.0}),
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
        assert world[1]._is_watched
        assert world[3]._is_watched
        # The control plane still tells of deaths.
        with contextlib.suppress(OSError):
            world[3]._formation._attendance._control._sock.shutdown(2)
        eventually(lambda: 3 not in world[1].alive)


def test_the_hostile_rank_itself_learns_that_it_is_out():
    with tcp_world(3, secret=SECRET) as world:
        waiting = Running(world[HOSTILE].recv, 1)
        say_on_control(world[HOSTILE], LIES["another rank is gone"])
        assert isinstance(waiting.error(), PeerLostError)


# -- inside TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    pytest.importorskip("cryptography")
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours", 3)


def keys_of(rank):
    """Return every key that a rank has, or can make of what it has."""
    return [rank._formation.key]


class Between:
    """A member that stands between rank 1 and rank 0 with its own certificate, or with another.

    It takes what rank 1 sends, and sends rank 0 something else in rank 1's name.
    """

    def __init__(self, world, files):
        self._world = world
        self._files = files
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._genuine = world[1]._peers[0].member
        host, port = self._listener.getsockname()
        world[1]._peers[0].member = msgspec.structs.replace(self._genuine, host=host, port=port)
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
                    stream.sendall(pack_header(Channel.GREETING, 0, 0, 0, 0))
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


@pytest.mark.parametrize("purpose", [Purpose.MESSAGES, Purpose.CALLS, Purpose.JOIN])
def test_inside_tls_the_certificate_of_one_rank_does_not_open_a_connection_as_another(
    files, purpose, caplog
):
    with tcp_world(3, secret=SECRET, transport="tcp", tls=files) as world:
        policy = choose_policy("tls", TcpAddress("127.0.0.1", 1), tls=files[HOSTILE])
        hello = replace(world[HOSTILE]._formation.hello(purpose, 0), rank=1)
        # The pair's key is assumed to be known: the certificate alone is enough.
        key = keys_of(world[1])[0]
        member = world[HOSTILE]._peers[0].member
        deadline = Deadline(PATIENCE)
        with (
            contextlib.closing(connect_tcp(TcpAddress(member.host, member.port), deadline)) as sock,
            pytest.raises(AuthenticationError, match="not that of rank 1"),
        ):
            authenticate(sock, hello, key=key, deadline=deadline, policy=policy)
        assert "as rank 1: its certificate is of 'rank-2'" in caplog.text
        say_hello(*world)
