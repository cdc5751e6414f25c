"""A member that was taken over: it has all that its rank has, and would act as another one."""

import contextlib

import pytest

from rankwire.deadline import Deadline
from rankwire.errors import PeerLostError
from rankwire.rendezvous.messages import Beat, Failed, Gone, Suspected, Waiting, World, pack
from rankwire.wire.frames import Channel
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
