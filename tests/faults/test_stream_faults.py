"""Faults of the byte stream between two ranks: cut, sliced, silent, repeated, altered."""

import contextlib
import random
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from faults import netns
from faults.proxy import between, drop, flip_bit, hold_after, latency, limit_data, replay, slicer
from faults.sizes import time_limit, trials
from rankwire import DeadlineExceededError, PeerLostError, ProtocolError, RpcAgent, all_reduce
from rankwire.testing.ranks import in_parallel
from worlds import PATIENCE, Running, eventually, tcp_world

pytestmark = pytest.mark.timeout(time_limit(60, 1200))

MESSAGE = bytes(range(256)) * 8


def frame_sizes():
    """Return where the first message begins in its stream, and how long it is."""
    with tcp_world(2, transport="tcp") as world, between(world[0], 1) as proxy:
        passed = []
        for _ in range(2):
            world[0].send(MESSAGE, 1)
            world[1].recv(0)
            passed.append(proxy.passed()[0])
        frame = passed[1] - passed[0]
        return passed[0] - frame, frame


def resident():
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


@pytest.mark.fault(
    13, "a message that was announced and does not come takes no memory before it comes"
)
@pytest.mark.fault(
    13, "whoever waits for it ends at its deadline, and gets it whole if it comes later"
)
def test_f13_a_large_message_is_announced_and_does_not_come(measured):
    start, _ = frame_sizes()
    data = np.arange((64 << 20) // 8)
    rest_comes = threading.Event()
    some = 1 << 20
    with tcp_world(2, transport="tcp") as world:
        with between(world[0], 1, up=[hold_after(start + some, rest_comes)]) as proxy:
            sending = Running(world[0].send, data, 1)
            eventually(lambda: proxy.flows and proxy.passed()[0] == start + some)
            before = resident()
            with pytest.raises(DeadlineExceededError):
                world[1].recv(0, timeout=0.3)
            measured(
                "memory for 64 MiB of which 1 MiB came", resident() - before, unit="MiB", limit=8
            )
            rest_comes.set()
            assert bytes(world[1].recv(0)) == data.tobytes()
            sending.result()


@pytest.mark.fault(
    14, "of a frame whose stream ends half-way nothing is delivered; its sender is lost"
)
def test_f14_the_stream_ends_in_the_middle_of_a_frame():
    """Each of several ranks is cut off at another place."""
    start, frame = frame_sizes()
    offsets = sorted({*range(1, 65), *range(65, frame, frame // 20), frame - 1})
    in_a_world = 15
    for first in range(0, len(offsets), in_a_world):
        some = offsets[first : first + in_a_world]
        with tcp_world(len(some) + 1, transport="tcp") as world, contextlib.ExitStack() as stack:
            for dialler, offset in zip(world[1:], some, strict=True):
                toxic = limit_data(start + frame + offset)
                stack.enter_context(between(dialler, 0, up=[toxic]))
                dialler.send(MESSAGE, 0)
                with contextlib.suppress(PeerLostError):  # it may notice before it has sent
                    dialler.send(MESSAGE, 0)
                assert world[0].recv(dialler.rank) == MESSAGE
                with pytest.raises(PeerLostError, match="middle of a message") as info:
                    world[0].recv(dialler.rank)
                assert info.value.peer == dialler.rank


@pytest.mark.fault(
    16, "messages, calls and collectives are the same however the stream is cut to pieces"
)
@pytest.mark.parametrize("nbytes", [1, 7, 1000])
def test_f16_the_stream_comes_in_small_pieces(nbytes):
    with tcp_world(2, transport="tcp") as world, contextlib.ExitStack() as stack:
        for rank in world:
            toxics = {"up": [slicer(nbytes)], "down": [slicer(nbytes)]}
            stack.enter_context(between(rank, 1 - rank.rank, **toxics))
        agents = [stack.enter_context(contextlib.closing(RpcAgent(rank))) for rank in world]
        agents[1].register("twice", lambda array: array * 2)

        def work(rank):
            array = np.arange(2000) + rank.rank
            assert all_reduce(rank, array).tolist() == (np.arange(2000) * 2 + 1).tolist()
            rank.send(MESSAGE, 1 - rank.rank)
            assert rank.recv(1 - rank.rank) == MESSAGE

        in_parallel([lambda rank=rank: work(rank) for rank in world])
        called = agents[0].rpc_sync(1, "twice", np.arange(100))
        assert called.tolist() == list(range(0, 200, 2))


@pytest.mark.fault(
    42, "a frame that is repeated or missing ends the link; nothing after it is delivered"
)
@pytest.mark.parametrize("kind", [replay, drop], ids=["repeated", "lost"])
def test_f42_a_frame_is_repeated_or_lost(kind):
    start, frame = frame_sizes()
    second = (start + frame, start + 2 * frame)
    with tcp_world(2, transport="tcp") as world:
        with between(world[0], 1, up=[kind(*second)]):
            with contextlib.suppress(PeerLostError):
                for number in range(4):
                    world[0].send(bytes([number]) * len(MESSAGE), 1)
            received = []
            with pytest.raises((ProtocolError, PeerLostError)) as info:
                received.extend(message[0] for message in iter(lambda: world[1].recv(0), None))
            assert received in ([0], [0, 1]), "each at most once, and none after the gap"
            assert info.value.peer == 0


def run_errand(name, *args):
    """Do something in a process of a host whose address is not loopback."""
    with netns.network(1) as hosts:
        call = f"__import__('faults.errands').errands.{name}('{hosts.address(0)}', *{args!r})"
        return hosts.rank(0).start("eval", call).result(55.0)


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.fault(15, "between hosts an altered frame is never delivered, and ends the link")
def test_f15_bits_flip_on_the_way(measured):
    chance = random.Random(15)
    places = [(byte, chance.randrange(8)) for byte in range(0, 32)]
    places += [(chance.randrange(32, 2000), chance.randrange(8)) for _ in range(trials(18, 1000))]
    outcomes = run_errand("tampered", places)
    measured("flipped bits, each noticed", len(places), unit="bits")
    for (byte, bit), outcome in zip(places, outcomes, strict=True):
        # The seal is behind the payload: one that is a little longer is waited for until then.
        is_longer = byte in (24, 25)
        assert outcome == "ProtocolError" or (is_longer and outcome == "nothing came"), (byte, bit)


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.fault(42, "between hosts a frame that somebody else made is never delivered")
def test_f42_a_frame_is_forged():
    assert run_errand("forged") in ("ProtocolError", "AuthenticationError", "PeerLostError")


@pytest.mark.fault(15, "a corrupted header is noticed")
def test_f15_a_header_is_corrupted():
    """Channel, flags, sequence number and length: what the parser can know by itself."""
    start, frame = frame_sizes()
    for byte in (0, 1, 2, 3, 4, 5, 6, 7, 31):
        with tcp_world(2, transport="tcp") as world:
            with between(world[0], 1, up=[flip_bit(start + frame + byte, 6)]):
                with contextlib.suppress(PeerLostError):
                    world[0].send(MESSAGE, 1)
                    world[0].send(MESSAGE, 1)
                assert world[1].recv(0) == MESSAGE
                with pytest.raises((ProtocolError, PeerLostError)):
                    world[1].recv(0)


@pytest.mark.fault(43, "a call whose reply is lost says that it may have run, and ran once")
@pytest.mark.parametrize("lost", ["request", "in the function", "reply"])
def test_f43_the_connection_is_lost_around_a_call(lost):
    with tcp_world(2, transport="tcp") as world, contextlib.ExitStack() as stack:
        proxy = stack.enter_context(between(world[0], 1))
        agents = [stack.enter_context(contextlib.closing(RpcAgent(rank))) for rank in world]
        ran = []

        def function(number):
            ran.append(number)
            if number and lost == "in the function":
                proxy.reset()
            return number

        agents[1].register("run", function)
        assert agents[0].rpc_sync(1, "run", 0) == 0
        if lost != "in the function":
            proxy.silence(up=lost == "request", down=lost == "reply")
        call = Running(agents[0].rpc_sync, 1, "run", 1)
        if lost != "in the function":
            while lost == "reply" and ran != [0, 1]:
                time.sleep(0.001)
            time.sleep(0.05)
            proxy.reset()
        error = call.error()
        assert isinstance(error, PeerLostError), repr(error)
        assert error.may_have_run
        assert ran == ([0] if lost == "request" else [0, 1])


@pytest.mark.fault(9, "a slow network changes nothing but the time")
def test_f09_every_piece_comes_late():
    with tcp_world(2, transport="tcp") as world, contextlib.ExitStack() as stack:
        for rank in world:
            stack.enter_context(between(rank, 1 - rank.rank, up=[latency(0.02)]))

        def work(rank):
            for number in range(10):
                array = np.full(1000, number + rank.rank)
                assert set(all_reduce(rank, array, timeout=PATIENCE).tolist()) == {2 * number + 1}

        in_parallel([lambda rank=rank: work(rank) for rank in world])
