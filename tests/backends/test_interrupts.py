"""Ctrl-C anywhere in an operation: whoever catches it and goes on has a world."""

import time
from contextlib import suppress

import numpy as np
import pytest

from interrupts import Interrupt, every_interrupt
from rankwire import DeadlineExceededError, RpcAgent, SubBackend
from rankwire.links import lender
from rankwire.links.connection import Connection
from rankwire.testing import simulated_world
from worlds import LEND_FROM, PATIENCE, Running, eventually, tcp_world

SOON = 8.0
# A socket that was just opened is closed by the interpreter, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_world(kind):
    return simulated_world(2) if kind == "simulated" else tcp_world(2, transport=kind)


@pytest.fixture(params=["auto", "tcp", "simulated"])
def pair(request):
    with make_world(request.param) as (near, far):
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


@pytest.mark.fault(37, "memory of an interrupted send is not read any more once it is changed")
@pytest.mark.parametrize("operation", ["send", "sendrecv", "sendrecv of a group"])
def test_an_interrupt_anywhere_in_lending_takes_the_loan_back(operation, monkeypatch):
    # Few steps while waiting, so that there are not too many places.
    monkeypatch.setattr(lender, "_LOOK_FOR", 0.0)
    monkeypatch.setattr(lender, "_SHORTEST_NAP", 1e-3)
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)
    numbers = iter(range(1 << 30))
    with tcp_world(2) as (near, far):
        making = Running(SubBackend, far, [0, 1])
        group = SubBackend(near, [0, 1])
        far_group = making.result()
        near.send(b"first", 1, tag=1 << 40)
        assert far.recv(0, tag=1 << 40) == b"first"

        def run(interrupting):
            tag = next(numbers)
            sender, receiver = (group, far_group) if "group" in operation else (near, far)
            sent = np.full(LEND_FROM // 8, 1)
            with suppress(Interrupt, DeadlineExceededError), interrupting:
                if operation == "send":
                    sender.send(sent, 1, tag=tag, timeout=0.002)
                else:
                    sender.sendrecv(sent, 1, tag=tag, timeout=0.002)
            sent[:] = 2
            sender.send(b"end", 1, tag=tag, timeout=SOON)
            assert take_until_the_end(receiver, tag) == []

        assert every_interrupt(run) >= 30


@pytest.mark.fault(37, "after a caught interrupt in a barrier the next one is entered")
@pytest.mark.parametrize("what", ["barrier", "group"])
def test_an_interrupt_anywhere_where_one_thread_at_a_time_is_let_in(pair, what):
    near, _ = pair

    def enter():
        if what == "barrier":
            near.barrier(timeout=0.0)
        else:
            SubBackend(near, [0, 1], timeout=0.0)

    def run(interrupting):
        with suppress(Interrupt, DeadlineExceededError), interrupting:
            enter()
        with pytest.raises(DeadlineExceededError) as caught:
            enter()
        assert "another thread" not in str(caught.value)

    assert every_interrupt(run) >= 20


def take_until_the_end(backend, tag):
    got = []
    while not got or got[-1] != b"end":
        got.append(bytes(backend.recv(0, tag=tag)))
    return got[:-1]


@pytest.mark.fault(37, "an interrupt in the first send to a rank does not lose that rank")
@pytest.mark.parametrize("transport", ["auto", "tcp", "simulated"])
def test_an_interrupt_anywhere_while_connecting(transport):
    def run(interrupting):
        with make_world(transport) as pair:
            near, far = pair
            with suppress(Interrupt), interrupting:
                near.send(b"first", 1, tag=1, timeout=SOON)
            still_talk(pair, 2)
            assert (near.alive, far.alive) == ((0, 1), (0, 1))

    # Every 13th place: a world takes 20 ms, and there are some hundred places.
    every_interrupt(run, step=1 if transport == "simulated" else 13)


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

    assert every_interrupt(run) >= 3  # more of them where the replies are not there yet


@pytest.mark.fault(37, "after a caught interrupt in cancelling nothing is kept of the call")
def test_an_interrupt_anywhere_in_cancelling_a_future_keeps_nothing_of_it(agents):
    near, far = agents
    far.register("nap", lambda: time.sleep(0.05))  # or it might be done before it is cancelled

    def run(interrupting):
        future = near.rpc_async(1, "nap", timeout=PATIENCE)
        with suppress(Interrupt), interrupting:
            future.cancel()
        assert near.rpc_sync(1, "echo", 2, timeout=SOON) == 2
        eventually(lambda: not near.activity().in_flight, SOON)

    assert every_interrupt(run) >= 20


@pytest.mark.fault(37, "after two caught interrupts in making a call nothing is kept of it")
@pytest.mark.parametrize("gap", [1, 2, 3, 5, 8])
def test_two_interrupts_in_making_a_call_keep_nothing_of_it(agents, gap):
    near, _ = agents

    def run(interrupting):
        with suppress(Interrupt), interrupting:
            near.rpc_sync(1, "echo", 1, timeout=PATIENCE)
        assert near.rpc_sync(1, "echo", 2, timeout=SOON) == 2
        eventually(lambda: not near.activity().in_flight, SOON)

    every_interrupt(run, second_after=gap)


@pytest.mark.fault(37, "after a caught interrupt in making a future nothing is kept of it")
def test_an_interrupt_anywhere_in_making_a_future_keeps_nothing_of_it(agents):
    near, _ = agents

    def run(interrupting):
        with suppress(Interrupt), interrupting:
            near.rpc_async(1, "echo", 1, timeout=PATIENCE).result()
        assert near.rpc_sync(1, "echo", 2, timeout=SOON) == 2
        eventually(lambda: not near.activity().in_flight, SOON)

    assert every_interrupt(run) >= 50
