"""Ctrl-C anywhere in an operation: whoever catches it and goes on has a world."""

from contextlib import suppress

import numpy as np
import pytest

from interrupts import Interrupt, every_interrupt
from rankwire import RpcAgent
from worlds import PATIENCE, Running, tcp_world

SOON = 3.0


@pytest.fixture(params=["auto", "tcp"])
def pair(request):
    with tcp_world(2, transport=request.param) as (near, far):
        yield near, far


@pytest.fixture
def agents(pair):
    near, far = (RpcAgent(backend) for backend in pair)
    far.register("echo", lambda value: value)
    with near, far:
        # What is made once for all loans of a process takes thousands of steps.
        near.rpc_sync(1, "echo", np.zeros(125_000), timeout=PATIENCE)
        yield near, far


def still_talk(pair, tag):
    """Both send to each other and get what was sent."""
    near, far = pair
    near.send(b"there", 1, tag=tag, timeout=SOON)
    assert far.recv(0, tag=tag, timeout=SOON) == b"there"
    far.send(b"back", 0, tag=tag, timeout=SOON)
    assert near.recv(1, tag=tag, timeout=SOON) == b"back"


@pytest.mark.fault(37, "after a caught interrupt in a send the world goes on")
@pytest.mark.parametrize("nbytes", [8, 1_000_000])
def test_an_interrupt_anywhere_in_a_send(pair, nbytes):
    near, far = pair
    numbers = iter(range(1 << 30))

    def run(interrupting):
        number = next(numbers)
        receiving = Running(take_until_the_end, far, number)
        sent = np.full(nbytes // 8, number)
        with suppress(Interrupt), interrupting:
            near.send(sent, 1, tag=number)
        still_talk(pair, number + (1 << 32))
        near.send(b"end", 1, tag=number, timeout=SOON)
        got = receiving.result(SOON)
        assert got in ([], [sent.tobytes()])
        assert interrupting.happened or got

    assert every_interrupt(run) >= 20


def take_until_the_end(backend, tag):
    got = []
    while not got or got[-1] != b"end":
        got.append(bytes(backend.recv(0, tag=tag)))
    return got[:-1]


@pytest.mark.fault(37, "an interrupt in the first send to a rank does not lose that rank")
# A socket that was just opened is closed by the interpreter, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_interrupt_anywhere_while_connecting(transport):
    def run(interrupting):
        with tcp_world(2, transport=transport) as pair:
            near, far = pair
            with suppress(Interrupt), interrupting:
                near.send(b"first", 1, tag=1, timeout=SOON)
            still_talk(pair, 2)
            assert (near.alive, far.alive) == ((0, 1), (0, 1))

    # Every 13th place: a world takes 20 ms, and there are some hundred places.
    every_interrupt(run, step=13)


@pytest.mark.fault(37, "after a caught interrupt in a receive the world goes on, in order")
@pytest.mark.parametrize("nbytes", [8, 1_000_000])
def test_an_interrupt_anywhere_in_a_receive(pair, nbytes):
    near, far = pair
    numbers = iter(range(1 << 30))

    def run(interrupting):
        tag = next(numbers)
        sent = [np.full(nbytes // 8, number).tobytes() for number in range(3)]
        sending = Running(lambda: [far.send(each, 0, tag=tag) for each in sent])
        got = []
        with suppress(Interrupt), interrupting:
            got.append(bytes(near.recv(1, tag=tag)))
        while len(got) < 3 and got[-1:] != sent[-1:]:
            got.append(bytes(near.recv(1, tag=tag, timeout=SOON)))
        # One that was about to be returned may be gone with the frames of the interrupted thread.
        assert got in (sent, sent[1:])
        assert interrupting.happened or got == sent
        sending.result(SOON)
        still_talk(pair, tag + (1 << 32))

    assert every_interrupt(run) >= 20


@pytest.mark.fault(37, "after a caught interrupt in a call the world goes on")
@pytest.mark.parametrize("nbytes", [8, 1_000_000])
def test_an_interrupt_anywhere_in_a_call(pair, agents, nbytes):
    near, _ = agents
    value = np.arange(nbytes // 8)
    numbers = iter(range(1 << 30))

    def run(interrupting):
        with suppress(Interrupt), interrupting:
            near.rpc_sync(1, "echo", value)
        number = next(numbers)
        assert near.rpc_sync(1, "echo", number, timeout=SOON) == number
        futures = [near.rpc_async(1, "echo", n, timeout=SOON) for n in range(3)]
        assert [future.result() for future in futures] == [0, 1, 2]
        still_talk(pair, number)

    assert every_interrupt(run) >= 50


@pytest.mark.fault(37, "after a caught interrupt the futures that were made before still end")
def test_an_interrupt_anywhere_in_waiting_for_a_future(agents):
    near, _ = agents

    def run(interrupting):
        futures = [near.rpc_async(1, "echo", n, timeout=PATIENCE) for n in range(3)]
        with suppress(Interrupt), interrupting:
            futures[1].result()
        assert [future.result(SOON) for future in futures] == [0, 1, 2]

    assert every_interrupt(run) >= 20
