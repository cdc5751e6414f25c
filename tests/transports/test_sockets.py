"""Sockets: addresses, options, listening and connecting."""

import contextlib
import errno
import os
import select
import socket
import stat
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire import runtime
from rankwire.errors import (
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    PeerLostError,
    ResourceError,
)
from rankwire.transports import sockets, stream_of
from rankwire.transports.byte_stream import wait_for
from rankwire.transports.sockets import wait_patiently
from rankwire.transports.tcp_stream import (
    TcpAddress,
    connect_tcp,
    expect_prompt_reading,
    listen_tcp,
    start_listening,
    tune_tcp,
)
from rankwire.transports.unix_stream import connect_unix, listen_unix, tune_unix, unix_peer
from real_time import Deadline
from worlds import PATIENCE

ANY_PORT = TcpAddress("127.0.0.1", 0)


def address_of(sock):
    return TcpAddress(*sock.getsockname()[:2])


# -- addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("node-7.cluster.local:1", "node-7.cluster.local", 1),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_an_address_is_read_and_written_as_users_write_it(text, host, port):
    address = TcpAddress.parse(text)
    assert address == TcpAddress(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":29500", "[]:1", "host:port", "host:-1", "host:+1", "host: 1"),
        *("host:65536", "host:1.5", "host:0x10", "::1:29500", "fe80::1", "http://host:80"),
    ],
)
def test_what_is_not_an_address_is_refused(text):
    with pytest.raises(ConfigurationError):
        TcpAddress.parse(text)


def test_an_ipv6_address_without_brackets_is_told_how_to_write_it():
    with pytest.raises(ConfigurationError, match=r"\[host\]:port"):
        TcpAddress.parse("::1:29500")


@given(st.ip_addresses(), st.integers(0, 65535))
def test_any_ip_address_is_read_back(ip, port):
    address = TcpAddress(str(ip), port)
    assert TcpAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("localhost", True), ("127.0.0.1", True), ("127.8.9.10", True), ("::1", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("fe80::1", False)),
        *(("example.com", False), ("localhost.example.com", False), ("127.0.0.1.nip.io", False)),
    ],
)
def test_loopback_is_what_only_this_host_can_reach(host, loopback):
    assert TcpAddress(host, 1).is_loopback is loopback


# -- options


def test_a_tcp_connection_has_no_delay_and_notices_a_vanished_host(cleanup):
    sock = cleanup.enter_context(socket.socket())
    tune_tcp(sock)
    assert sock.getblocking() is False
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, probes = (
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + interval * probes <= 5
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0, "a peer may be busy"
    expect_prompt_reading(stream_of(sock))
    assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 5000


def test_a_unix_connection_is_non_blocking_and_has_room_for_a_burst(cleanup):
    sock, other = socket.socketpair()
    cleanup.enter_context(sock)
    cleanup.enter_context(other)
    tune_unix(sock)
    assert sock.getblocking() is False
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 1 << 17


# -- listening and connecting


def test_port_zero_takes_a_free_port_of_the_address_asked_for(cleanup):
    listener = cleanup.enter_context(listen_tcp(ANY_PORT))
    host, port = listener.getsockname()
    assert (host, port != 0, listener.getblocking()) == ("127.0.0.1", True, False)


def test_nobody_gets_in_before_listening_starts(cleanup):
    listener = cleanup.enter_context(listen_tcp(ANY_PORT))
    with pytest.raises(NoConnectionError, match="refused"):
        connect_tcp(address_of(listener), Deadline(PATIENCE))
    start_listening(listener)
    sock = cleanup.enter_context(connect_tcp(address_of(listener), Deadline(PATIENCE)))
    assert sock.getblocking() is False
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_listener_is_reached_by_the_name_it_was_given(cleanup, host):
    if host == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    listener = cleanup.enter_context(listen_tcp(TcpAddress(host, 0)))
    start_listening(listener)
    port = listener.getsockname()[1]
    cleanup.enter_context(connect_tcp(TcpAddress(host, port), Deadline(PATIENCE)))


def test_a_port_that_is_taken_is_a_configuration_error_that_names_it(cleanup):
    listener = cleanup.enter_context(listen_tcp(ANY_PORT))
    start_listening(listener)
    address = address_of(listener)
    with pytest.raises(ConfigurationError, match=f"{address}.*in use"):
        listen_tcp(address)


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:0"):
        listen_tcp(TcpAddress("192.0.2.1", 0))


def test_a_port_can_be_taken_again_at_once(cleanup):
    listener = listen_tcp(ANY_PORT)
    start_listening(listener)
    address = address_of(listener)
    client = cleanup.enter_context(connect_tcp(address, Deadline(PATIENCE)))
    server, _ = listener.accept()
    server.close()  # this end is in TIME_WAIT, or FIN_WAIT, from now on
    listener.close()
    cleanup.enter_context(listen_tcp(address))
    client.close()


def test_a_name_that_does_not_resolve_is_no_connection(monkeypatch):
    def fail(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(runtime, "getaddrinfo", fail)
    for use in (listen_tcp, lambda address: connect_tcp(address, Deadline(PATIENCE))):
        with pytest.raises(NoConnectionError, match=r"'no\.such\.host'.*not known"):
            use(TcpAddress("no.such.host", 29500))


@pytest.mark.parametrize("host", ["x" * 64, "a..b"])
@pytest.mark.parametrize("use", [listen_tcp, lambda a: connect_tcp(a, Deadline(PATIENCE))])
def test_a_name_that_cannot_be_one_is_an_error_of_this_package(host, use):
    with pytest.raises((NoConnectionError, ConfigurationError)):
        use(TcpAddress(host, 29500))


def test_a_listener_that_does_not_answer_is_given_up_at_the_deadline(cleanup):
    # A full backlog: the kernel drops further SYNs, as a firewall would.
    listener = cleanup.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(4):
        waiting = cleanup.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    deadline = Deadline(0.2)
    with pytest.raises(DeadlineExceededError, match=r"no answer from 127\.0\.0\.1") as caught:
        connect_tcp(address_of(listener), deadline)
    assert caught.value.limit == 0.2
    assert 0.19 <= deadline.waited < 5.0


def test_a_check_that_raises_ends_the_wait_for_an_answer(cleanup):
    listener = cleanup.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(4):
        waiting = cleanup.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())

    def check():
        raise PeerLostError(1, "the coordinator says so")

    deadline = Deadline(PATIENCE)
    with pytest.raises(PeerLostError):
        connect_tcp(address_of(listener), deadline, check=check)
    assert deadline.waited < 5.0


def test_being_out_of_descriptors_is_told_as_such(monkeypatch, own_runtime_folder):
    def fail(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(runtime, "Socket", fail)
    path = f"{own_runtime_folder}/nobody"
    for use in (
        lambda: listen_tcp(ANY_PORT),
        lambda: listen_unix(path),
        lambda: connect_tcp(TcpAddress("127.0.0.1", 1), Deadline(PATIENCE)),
        lambda: connect_unix(path, Deadline(PATIENCE)),
    ):
        with pytest.raises(ResourceError, match="Too many open files"):
            use()


def test_a_socket_that_has_connected_to_itself_has_reached_nobody():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    with pytest.raises(NoConnectionError, match="no process listens"):
        sockets.connect(sock, sock.getsockname(), "itself", Deadline(PATIENCE), lambda: None)
    assert sock.fileno() == -1, "and it is closed"


# -- Unix sockets


@pytest.fixture
def path(own_runtime_folder):
    path = f"{own_runtime_folder}/listener"
    yield path
    if os.path.exists(path):
        os.unlink(path)


def test_a_socket_file_is_for_this_user_only_and_names_the_peer(cleanup, path):
    listener = cleanup.enter_context(listen_unix(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert listener.getblocking() is False
    near = cleanup.enter_context(connect_unix(path, Deadline(PATIENCE)))
    far, _ = listener.accept()
    cleanup.enter_context(far)
    assert near.getblocking() is False
    assert unix_peer(near) == unix_peer(far) == (os.getpid(), os.geteuid())


def test_a_path_that_is_taken_is_a_configuration_error(cleanup, path):
    cleanup.enter_context(listen_unix(path))
    with pytest.raises(ConfigurationError, match="in use"):
        listen_unix(path)


def test_a_path_where_nobody_listens_is_no_connection(cleanup, path):
    with pytest.raises(NoConnectionError, match="No such file"):
        connect_unix(path, Deadline(PATIENCE))
    listen_unix(path).close()
    with pytest.raises(NoConnectionError, match="refused"):
        connect_unix(path, Deadline(PATIENCE))


def test_a_full_backlog_of_a_unix_listener_is_no_connection(cleanup, path):
    listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(0)
    cleanup.enter_context(connect_unix(path, Deadline(PATIENCE)))
    with pytest.raises(NoConnectionError, match="too many"):
        connect_unix(path, Deadline(PATIENCE))


def test_a_path_too_long_to_listen_on_says_so(own_runtime_folder):
    with pytest.raises(ConfigurationError, match="too long"):
        listen_unix(f"{own_runtime_folder}/{'x' * 120}")


def test_a_path_too_long_to_connect_to_is_no_connection(own_runtime_folder):
    with pytest.raises(NoConnectionError, match="too long"):
        connect_unix(f"{own_runtime_folder}/{'x' * 120}", Deadline(PATIENCE))


# -- waiting


def test_waiting_tells_which_events_have_come(cleanup):
    near, far = socket.socketpair()
    cleanup.enter_context(near)
    cleanup.enter_context(far)
    assert wait_for(near, select.POLLIN, 0.0) == 0
    assert wait_for(near, select.POLLIN | select.POLLOUT, PATIENCE) == select.POLLOUT
    far.send(b"x")
    assert wait_for(near, select.POLLIN, PATIENCE) & select.POLLIN
    far.close()
    assert wait_for(near, select.POLLIN, PATIENCE) & select.POLLHUP


@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.05])
def test_waiting_is_not_shorter_than_asked_for_and_ends(cleanup, seconds):
    near, far = socket.socketpair()
    cleanup.enter_context(near)
    cleanup.enter_context(far)
    before = time.monotonic()
    assert wait_for(near, select.POLLIN, seconds) == 0
    assert seconds <= time.monotonic() - before < 5.0


def test_waiting_patiently_looks_up_now_and_then_and_keeps_the_deadline(cleanup):
    near, far = socket.socketpair()
    cleanup.enter_context(near)
    cleanup.enter_context(far)
    checks = []
    deadline = Deadline(0.25)
    assert not wait_patiently(near, select.POLLIN, deadline, lambda: checks.append(1))
    assert 0.24 <= deadline.waited < 5.0
    assert len(checks) >= 2
    far.send(b"x")
    assert wait_patiently(near, select.POLLIN, Deadline(0.0), lambda: None)


def test_waiting_ends_when_another_descriptor_is_readable_and_says_that_it_was_not_this_one(
    cleanup,
):
    near, far, other, writer = *socket.socketpair(), *socket.socketpair()
    for sock in (near, far, other, writer):
        cleanup.enter_context(sock)
    before = time.monotonic()
    assert wait_for(near, select.POLLIN, 0.05, [other.fileno()]) == 0
    assert time.monotonic() - before >= 0.05
    writer.send(b"x")
    before = time.monotonic()
    assert wait_for(near, select.POLLIN, PATIENCE, [other.fileno()]) == 0
    assert time.monotonic() - before < 5.0
    far.send(b"x")
    assert wait_for(near, select.POLLIN, PATIENCE, [other.fileno()]) == select.POLLIN
    assert wait_for(near, select.POLLOUT, PATIENCE, [other.fileno()]) == select.POLLOUT


def test_waiting_to_send_and_to_read_the_same_socket_tells_only_whether_it_can_send(cleanup):
    near, far = socket.socketpair()
    cleanup.enter_context(near)
    cleanup.enter_context(far)
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(65536))
    assert wait_for(near, select.POLLOUT, 0.05, [near.fileno()]) == 0
    far.send(b"x")
    before = time.monotonic()
    assert wait_for(near, select.POLLOUT, PATIENCE, [near.fileno()]) == 0
    assert time.monotonic() - before < 5.0
    far.close()
    assert wait_for(near, select.POLLOUT, PATIENCE, [near.fileno()])


def test_waiting_for_a_socket_that_is_closed_ends_at_once():
    near, far = socket.socketpair()
    with near, far:
        pass
    assert wait_for(near, select.POLLIN, PATIENCE) == select.POLLIN
    assert wait_for(near, select.POLLOUT, PATIENCE) == select.POLLOUT
