"""What launchers say to each other, as bytes on a real socket."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError, InvalidMessageError, PeerLostError, RankwireError
from rankwire.rendezvous.launchers import (
    Asked,
    Ended,
    Finish,
    Here,
    Kill,
    LauncherLink,
    Over,
    Start,
    Stop,
)
from rankwire.wire.frames import Channel
from real_time import Deadline

MESSAGES = [
    Here(["trainer"] * 4, "host"),
    Start(8, 4, "run-1.0", 2),
    Ended(5, None, 9, True, True),
    Stop(15),
    Kill(),
    Over([4], [6], {5: ["Traceback", "ü"]}),
    Asked(2),
    Finish(137, "rank 5 failed"),
]


class Pair:
    def __init__(self) -> None:
        sockets = socket.socketpair()
        for sock in sockets:
            sock.setblocking(False)
        self.here, self.there = (LauncherLink(sock, 0, REAL_TIME, None) for sock in sockets)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.here.close()
        self.there.close()


def test_every_message_arrives_as_it_was():
    with Pair() as pair:
        for message in MESSAGES:
            pair.here.tell(message)
        heard = []
        while len(heard) < len(MESSAGES):
            heard += pair.there.receive()
        assert heard == MESSAGES
        assert pair.there.receive() == []


@given(st.binary(max_size=64))
def test_what_is_no_message_is_an_error_of_ours(data):
    with Pair() as pair:
        pair.here._connection.send((0, Channel.CONTROL, 0), ([data], len(data)), Deadline(1.0))
        try:
            heard = pair.there.receive()
        except InvalidMessageError:
            return
        assert len(heard) == 1  # by chance it is one


def test_an_end_is_found_by_the_next_look():
    with Pair() as pair:
        pair.here.close()
        with pytest.raises((PeerLostError, ChannelClosedError)):
            pair.there.receive()


def test_the_other_launcher_is_not_called_a_rank():
    with Pair() as pair:
        pair.here.tell(Kill())
        assert pair.there.receive() == [Kill()]
        pair.here.close()
        for _ in range(2):
            with pytest.raises(PeerLostError) as caught:
                pair.there.receive()
            assert str(caught.value) == "its connection ended"
    with Pair() as pair:
        pair.here._connection.farewell(Deadline(1.0))
        pair.there.receive()
        with pytest.raises(ChannelClosedError) as caught:
            pair.there.receive()
        assert str(caught.value) == "it has left"


def test_who_cannot_be_told_is_gone():
    with Pair() as pair:
        pair.there.close()
        pair.here.tell(Kill())
        with pytest.raises(RankwireError):
            pair.here.receive()


def test_texts_of_another_launcher_are_bounded_and_harmless_to_a_terminal():
    escape = "\x1b[2J"
    with Pair() as pair:
        pair.here.tell(Finish(1, escape + "x" * 200_000 + "\nend"))
        pair.here.tell(Over([], [], {5: [escape, *["    line"] * 500, "y" * 1000]}))
        pair.here.tell(Here(["trainer"] * 4, escape))
        heard = []
        while len(heard) < 3:
            heard += pair.there.receive()
    finish, over, here = heard
    assert finish.text.startswith("\\x1b[2Jxxx")
    assert finish.text.endswith("\nend")
    assert len(finish.text) <= 32_768
    assert over.errors[5][:-1] == ["    line"] * 99
    assert len(over.errors[5][-1]) == 500
    assert here.host == "\\x1b[2J"
