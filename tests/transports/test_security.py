"""What the user's settings amount to, and what each end then demands."""

import socket

import pytest

from rankwire.errors import ConfigurationError
from rankwire.transports import stream_of
from rankwire.transports.security import Tls, choose_policy
from rankwire.transports.tcp_stream import TcpAddress
from rankwire.wire.seals import Protection

LOOPBACK = [TcpAddress("127.0.0.1", 1), TcpAddress("::1", 1), TcpAddress("localhost", 1)]
ELSEWHERE = [TcpAddress("10.0.0.1", 1), TcpAddress("0.0.0.0", 1), TcpAddress("some.host", 1)]


class Sock:
    """A connected socket, as far as its addresses go."""

    def __init__(self, here, there, family=socket.AF_INET):
        self.family = family
        self.getsockname, self.getpeername = lambda: (here, 1), lambda: (there, 2)
        self.fileno = lambda: -1
        self.close = self.recv_into = self.send = None


def stream(here, there, family=socket.AF_INET):
    return stream_of(Sock(here, there, family))


WITHIN = [
    stream("127.0.0.1", "127.0.0.1"),
    stream("127.0.0.1", "127.3.2.1"),
    stream("::1", "::1", socket.AF_INET6),
    stream("::ffff:127.0.0.1", "::ffff:127.0.0.1", socket.AF_INET6),
]
BETWEEN = [
    stream("10.0.0.1", "10.0.0.2"),
    stream("10.0.0.1", "10.0.0.1"),
    stream("127.0.0.1", "10.0.0.2"),
    stream("10.0.0.1", "127.0.0.1"),
    stream("::ffff:10.0.0.1", "::ffff:127.0.0.1", socket.AF_INET6),
    stream("fe80::1%eth0", "fe80::2%eth0", socket.AF_INET6),
]
SEALED = Protection.SEALED


@pytest.mark.parametrize("address", LOOPBACK, ids=str)
def test_on_loopback_auto_is_local(address):
    assert choose_policy("auto", address).mode == "local"


@pytest.mark.parametrize("address", ELSEWHERE, ids=str)
def test_elsewhere_auto_is_auth(address):
    assert choose_policy("auto", address).mode == "auth"


@pytest.mark.parametrize("address", ELSEWHERE, ids=str)
def test_local_is_refused_elsewhere(address):
    with pytest.raises(ConfigurationError, match="loopback"):
        choose_policy("local", address)


@pytest.mark.parametrize("address", [*LOOPBACK, *ELSEWHERE], ids=str)
def test_frames_are_sealed_wherever_a_connection_leaves_loopback(address):
    policy = choose_policy("auto", address)
    assert [policy.protection_of(sock) for sock in WITHIN] == [Protection.NONE] * len(WITHIN)
    assert [policy.protection_of(sock) for sock in BETWEEN] == [SEALED] * len(BETWEEN)


def test_spelled_out_auth_seals_loopback_too():
    policy = choose_policy("auth", LOOPBACK[0])
    assert all(policy.protection_of(sock) == SEALED for sock in (*WITHIN, *BETWEEN))


def test_unix_sockets_are_never_sealed():
    sock = stream("", "", socket.AF_UNIX)
    for security in ("auto", "auth", "local"):
        assert choose_policy(security, LOOPBACK[0]).protection_of(sock) == Protection.NONE


def test_insecure_seals_nothing():
    policy = choose_policy("insecure", ELSEWHERE[0])
    assert all(policy.protection_of(sock) == Protection.NONE for sock in (*WITHIN, *BETWEEN))


def test_the_mac_of_bulk_must_be_asked_for():
    for integrity, expected in (("crc", SEALED), ("mac", SEALED | Protection.FULL_MAC)):
        policy = choose_policy("auto", ELSEWHERE[0], integrity=integrity)
        assert policy.protection_of(BETWEEN[0]) == expected


@pytest.mark.parametrize("security", ["", "Auth", "none", "ssl", None, True])
def test_an_unknown_mode_is_refused(security):
    with pytest.raises(ConfigurationError, match="security is one of"):
        choose_policy(security, LOOPBACK[0])


@pytest.mark.parametrize("integrity", ["", "CRC", "sha", None])
def test_an_unknown_integrity_is_refused(integrity):
    with pytest.raises(ConfigurationError, match="integrity"):
        choose_policy("auto", LOOPBACK[0], integrity=integrity)


def test_tls_without_files_is_refused():
    with pytest.raises(ConfigurationError, match="Tls"):
        choose_policy("tls", LOOPBACK[0])


@pytest.mark.parametrize("security", ["local", "auth", "insecure"])
def test_files_for_tls_that_would_not_be_used_are_refused(security):
    with pytest.raises(ConfigurationError, match="does not use"):
        choose_policy(security, LOOPBACK[0], tls=Tls("c", "k", "a"))


def test_files_that_are_not_there_are_named():
    with pytest.raises(ConfigurationError, match="cert=/no/cert"):
        choose_policy("tls", LOOPBACK[0], tls=Tls("/no/cert", "/no/key", "/no/ca"))
