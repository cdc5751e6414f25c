"""Where a rank listens: what users write, and what follows."""

import contextlib
import socket

import pytest

from rankwire.errors import ConfigurationError
from rankwire.transports.tcp_stream import ListeningPlace, listen_somewhere
from worlds import free_port


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.5", ("10.0.0.5", 0, 0)),
        ("10.0.0.5:29600", ("10.0.0.5", 29600, 29600)),
        ("10.0.0.5:29600-29700", ("10.0.0.5", 29600, 29700)),
        (":29600-29700", ("", 29600, 29700)),
        (":29600", ("", 29600, 29600)),
        ("node7:1-2", ("node7", 1, 2)),
        ("[::1]:5", ("::1", 5, 5)),
        ("[::1]", ("::1", 0, 0)),
        ("::1", ("::1", 0, 0)),
        ("fd00::7", ("fd00::7", 0, 0)),
        ("lo", ("127.0.0.1", 0, 0)),
        ("lo:7-9", ("127.0.0.1", 7, 9)),
    ],
)
def test_what_users_write(text, place):
    parsed = ListeningPlace.parse(text)
    assert (parsed.host, parsed.low, parsed.high) == place


@pytest.mark.parametrize("text", ["host:", "host:x", "host:1-", "host:9-7", "host:70000", "h:-1"])
def test_what_is_no_place_is_refused_with_the_text(text):
    with pytest.raises(ConfigurationError, match=r"place to listen|are none"):
        ListeningPlace.parse(text)


def two_free_ports():
    """Return two consecutive ports that nobody has."""
    while True:
        low = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", low + 1)):
            return low


def test_the_first_free_port_of_a_range_is_taken_and_then_the_next_and_then_none():
    low = two_free_ports()
    place = ListeningPlace("127.0.0.1", low, low + 1)
    with listen_somewhere(place, "") as first, listen_somewhere(place, "") as second:
        assert [sock.getsockname()[1] for sock in (first, second)] == [low, low + 1]
        with pytest.raises(ConfigurationError, match=f"no port from {low} to {low + 1}"):
            listen_somewhere(place, "")


def test_without_a_host_it_listens_where_it_was_seen():
    with listen_somewhere(ListeningPlace(), "127.0.0.1") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_host_is_refused():
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        listen_somewhere(ListeningPlace("192.0.2.1"), "")
