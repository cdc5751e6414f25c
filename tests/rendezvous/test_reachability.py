"""Which of several addresses is rank 0's."""

import socket
import threading

import pytest

from rankwire.errors import RendezvousError
from rankwire.rendezvous import reachability
from rankwire.rendezvous.reachability import find_rank_0, own_address
from real_time import Deadline
from worlds import bound_socket


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


def test_the_address_at_which_someone_listens_is_found_when_they_do():
    with bound_socket() as never, bound_socket("127.0.0.2") as later:
        timer = threading.Timer(0.15, later.listen)
        timer.start()
        addresses = [address_of(never), "no-such-host.invalid:5", address_of(later)]
        assert find_rank_0(addresses, Deadline(20.0)) == address_of(later)
        timer.join()


def test_all_addresses_are_named_when_nobody_listens():
    with bound_socket() as one, bound_socket() as other:
        addresses = [address_of(one), address_of(other)]
        with pytest.raises(RendezvousError, match=", ".join(addresses)) as caught:
            find_rank_0(addresses, Deadline(0.15))
        assert caught.value.missing == [0]


def test_rank_0_takes_its_own_address_that_others_can_reach(monkeypatch):
    monkeypatch.setattr(reachability, "_is_here", lambda host: host == "10.1.2.3")
    found = own_address(["127.0.1.1:5", "no-such-host.invalid:5", "10.9.9.9:5", "10.1.2.3:5"])
    assert found == "10.1.2.3:5"
    assert own_address(["127.0.1.1:5", "10.9.9.9:5"]) == "127.0.1.1:5"
