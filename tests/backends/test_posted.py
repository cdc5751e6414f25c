"""Whatever a rank waits for moves every operation that it has posted.

Rank 0 sends to rank 1 and goes on when that has taken the message. Rank 1 has posted the receive,
or not even that, and waits for something which only comes afterwards: for every way to receive,
every way to wait, sizes on both sides of every threshold, and every link. Ranks are threads of this
process. One world serves all scenes of a link; a deadlock ends after the time limit of one
operation.
"""

import collections
import contextlib
import itertools
import threading
import time
from functools import partial

import numpy as np
import pytest

from faults.sizes import QUICK
from rankwire import ANY_RANK, RpcAgent, SubBackend, all_gather, all_reduce, broadcast
from rankwire.launch.certificates import make_certificates
from rankwire.testing import simulated_world
from worlds import Running, eventually, greet_all, runtime_folder_of_its_own, tcp_world

KIB, MIB = 1 << 10, 1 << 20
# Ring records, frames that are joined, frames that fit the buffer, what is lent, what no kernel
# keeps for a reader.
SIZES = [8, 16 * KIB, 64 * KIB - 1, 64 * KIB + 1, 2 * MIB - 1, 2 * MIB, 16 * MIB]
if QUICK:
    SIZES = [8, 64 * KIB + 1, 2 * MIB]
LARGE = 3 * MIB
COUNT = LARGE // 8  # of elements
LIMIT = 10.0  # seconds for one operation; measured: milliseconds
ALL_OF_IT = 90.0  # seconds for the scenes of one test; measured: 2

LINKS = {
    "lent": partial(tcp_world, 3),
    "no segment": partial(tcp_world, 3, segment_nbytes=0),
    "unix": partial(tcp_world, 3, single_copy=False),
    "tcp": partial(tcp_world, 3, transport="tcp"),
    "sealed": partial(tcp_world, 3, transport="tcp", security="auth"),
    "tls": partial(tcp_world, 3, transport="tcp"),
    "memory": partial(simulated_world, 3, queue_nbytes=64 * KIB),
}
SLOW = ("no segment", "sealed", "tls")  # what they do differently, they do below all of this


class Scene:
    """One rank of a world, with what it needs to wait in every way."""

    def __init__(self, backend):
        self.backend, self.rank = backend, backend.rank
        self.pair = SubBackend(backend, [0, 1]) if backend.rank < 2 else None
        self.other_pair = SubBackend(backend, [1, 2]) if backend.rank > 0 else None
        self._connect()

    def _connect(self):
        """Open all connections: each test must leave as many as it has found."""
        greet_all(self.backend)
        for group in (self.backend, self.pair, self.other_pair):
            if group is not None:
                all_gather(group, np.zeros(LARGE, np.uint8))
                group.barrier()
        self.backend.barrier()


@pytest.fixture(
    scope="module",
    params=[pytest.param(link, marks=[pytest.mark.slow] * (link in SLOW)) for link in LINKS],
)
def scenes(request, tmp_path_factory):
    options = {"timeout": LIMIT}
    if request.param in ("sealed", "tls"):
        pytest.importorskip("cryptography")
    if request.param == "tls":
        options["tls"] = make_certificates(tmp_path_factory.mktemp("tls") / "ours", 3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(runtime_folder_of_its_own())
        world = stack.enter_context(LINKS[request.param](**options))
        making = [Running(Scene, backend) for backend in world]
        scenes = [running.result() for running in making]
        if request.param == "lent" and not world[0].link_to(1).single_copy:
            pytest.skip(world[0].link_to(1).reason)
        yield scenes


@pytest.fixture
def agents(scenes):
    """Give every rank an agent, which serves ``await``: that returns once an event is set."""
    events = collections.defaultdict(threading.Event)
    with contextlib.ExitStack() as stack:
        for scene in scenes:
            scene.events = events
            scene.agent = stack.enter_context(contextlib.closing(RpcAgent(scene.backend)))
            scene.agent.register("await", lambda tag: events[tag].wait(LIMIT))
        yield


tags = itertools.count(1000, 10)


def play(scenes, parts):
    """Have every rank play its part of all scenes, in order."""

    def play_all(scene):
        for tag, part in parts:
            try:
                part(scene, tag)
            except Exception as error:
                error.add_note(f"rank {scene.rank}, {part}")
                raise

    playing = [Running(play_all, scene) for scene in scenes]
    eventually(lambda: all(running.done for running in playing), ALL_OF_IT)
    for running in sorted(playing, key=lambda running: running.ended):
        running.result()  # of several that failed, the first one says why


def content(tag, nbytes):
    return bytes([tag // 10 % 251]) * nbytes


# -- ways to receive; rank 0 sends two messages, because the kernel may keep the first


def send_two(scene, nbytes, tag):
    for more in (0, 1):
        scene.backend.send(content(tag, nbytes), 1, tag + more)


def send_two_arrays(scene, nbytes, tag):
    for more in (0, 1):
        scene.backend.send_array(np.frombuffer(content(tag, nbytes), np.uint8), 1, tag + more)


def nothing(scene, nbytes, tag):
    def finish():
        for more in (0, 1):
            assert scene.backend.recv(0, tag + more) == content(tag, nbytes)

    return finish


def irecv(scene, nbytes, tag, *, src=0, in_order=True):
    handles = [scene.backend.irecv(src, tag + more) for more in (0, 1)]

    def finish():
        for handle in handles if in_order else reversed(handles):
            assert handle.wait() == content(tag, nbytes)

    return finish


def irecv_into(scene, nbytes, tag, *, src=0):
    buffers = [bytearray(nbytes) for _ in (0, 1)]
    into = scene.backend.irecv_into
    handles = [into(buffer, src, tag + more) for more, buffer in enumerate(buffers)]

    def finish():
        for handle, buffer in zip(handles, buffers, strict=True):
            assert (handle.wait(), buffer) == (nbytes, content(tag, nbytes))

    return finish


def irecv_array(scene, nbytes, tag):
    outs = [np.empty(nbytes, np.uint8), None]
    handles = [scene.backend.irecv_array(0, tag + more, out=out) for more, out in enumerate(outs)]

    def finish():
        for handle in handles:
            assert handle.wait().tobytes() == content(tag, nbytes)

    return finish


RECEIVES = {
    "nothing": (send_two, nothing),
    "irecv": (send_two, irecv),
    "irecv in reverse": (send_two, partial(irecv, in_order=False)),
    "irecv from any": (send_two, partial(irecv, src=ANY_RANK)),
    "irecv_into": (send_two, irecv_into),
    "irecv_into from any": (send_two, partial(irecv_into, src=ANY_RANK)),
    "irecv_array": (send_two_arrays, irecv_array),
}


# -- ways to wait: what each rank does after rank 0's message was taken


def recv(scene, tag, *, src=0):
    if scene.rank == 0:
        scene.backend.send(b"go", 1, tag)
    elif scene.rank == 1:
        assert scene.backend.recv(src, tag) == b"go"


def recv_into(scene, tag):
    if scene.rank == 0:
        scene.backend.send_array(np.arange(COUNT), 1, tag)
    elif scene.rank == 1:
        out = np.empty(COUNT, np.int64)
        assert scene.backend.recv_array(0, tag, out=out)[-1] == COUNT - 1


def wait_for_irecv(scene, tag):
    if scene.rank == 0:
        scene.backend.isend(b"go", 1, tag).wait()
    elif scene.rank == 1:
        assert scene.backend.irecv(0, tag).wait() == b"go"


def ask_done(scene, tag):
    if scene.rank == 0:
        scene.backend.send(bytes(LARGE), 1, tag)
        scene.backend.send(b"go", 1, tag + 1)
    elif scene.rank == 1:
        handle = scene.backend.irecv(0, tag)
        end = time.monotonic() + LIMIT
        while not handle.done():
            assert time.monotonic() < end, "not within the time limit"
        assert scene.backend.recv(0, tag + 1) == b"go"
        assert handle.wait() == bytes(LARGE)


def recv_from_third(scene, tag):
    if scene.rank == 0:
        scene.backend.send(b"go", 2, tag)
    elif scene.rank == 2:
        scene.backend.send(scene.backend.recv(0, tag), 1, tag)
    else:
        assert scene.backend.recv(2, tag) == b"go"


def recv_from_any_of_a_group(scene, tag):
    if scene.rank == 0:
        scene.backend.send(b"go", 2, tag)
    elif scene.rank == 2:
        scene.other_pair.send(scene.backend.recv(0, tag), 0, tag)
    else:
        assert scene.other_pair.recv_any(tag) == (1, b"go")


def ask_whether_sent(scene, tag):
    """Rank 0 takes it only after the messages of rank 1 were taken."""
    if scene.rank == 0:
        assert scene.backend.recv(1, tag) == bytes(LARGE)
    elif scene.rank == 1:
        handle = scene.backend.isend(bytes(LARGE), 0, tag)
        end = time.monotonic() + LIMIT
        while not handle.done():
            assert time.monotonic() < end, "not within the time limit"
        handle.wait()


def ask_for_third(scene, tag):
    if scene.rank == 0:
        scene.backend.send(b"go", 2, tag)
    elif scene.rank == 2:
        scene.backend.send(scene.backend.recv(0, tag), 1, tag)
    else:
        handle = scene.backend.irecv(2, tag)
        end = time.monotonic() + LIMIT
        while not handle.done():
            assert time.monotonic() < end, "not within the time limit"
        assert handle.wait() == b"go"


def send(scene, tag):
    if scene.rank == 0:
        assert len(scene.backend.recv(1, tag)) == LARGE
    elif scene.rank == 1:
        scene.backend.send(bytes(LARGE), 0, tag)


def wait_for_isend(scene, tag):
    if scene.rank == 0:
        assert len(scene.backend.recv_array(1, tag)) == COUNT
    elif scene.rank == 1:
        scene.backend.isend_array(np.arange(COUNT), 0, tag).wait()


def send_to_third(scene, tag):
    if scene.rank == 0:
        scene.backend.send(b"go", 2, tag)
    elif scene.rank == 1:
        scene.backend.send(bytes(LARGE), 2, tag)
    else:
        scene.backend.recv(0, tag)
        assert len(scene.backend.recv(1, tag)) == LARGE


def sendrecv(scene, tag):
    if scene.rank < 2:
        other = 1 - scene.rank
        assert scene.backend.sendrecv(np.full(COUNT, scene.rank), other, tag=tag)[0] == other


def barrier(scene, tag):
    scene.backend.barrier()


def barrier_of_a_group(scene, tag):
    if scene.pair is not None:
        scene.pair.barrier()


def barrier_of_others(scene, tag):
    """Rank 2 comes to it once rank 0 has sent; that one is not of the group."""
    if scene.rank == 0:
        scene.backend.send(b"go", 2, tag)
    if scene.rank == 2:
        scene.backend.recv(0, tag)
    if scene.other_pair is not None:
        scene.other_pair.barrier()


def reduce(scene, tag, *, count=1):
    array = np.full(count, scene.rank)
    all_reduce(scene.backend, array)
    assert array[0] == array[-1] == 3


def reduce_in_the_background(scene, tag):
    array = np.full(COUNT, scene.rank)
    all_reduce(scene.backend, array, async_op=True).wait()
    assert array[0] == 3


def share(scene, tag):
    array = np.full(COUNT, scene.rank)
    broadcast(scene.backend, array, 0)
    assert not array.any()
    assert all_gather(scene.backend, array).size == 3 * COUNT


def call(scene, tag, *, dst=0):
    if scene.rank == 0:
        scene.events[tag].set()
    elif scene.rank == 1:
        assert scene.agent.rpc_sync(dst, "await", tag)


def call_in_the_background(scene, tag):
    if scene.rank == 0:
        scene.events[tag].set()
    elif scene.rank == 1:
        assert scene.agent.rpc_async(0, "await", tag).result()


WAITS = [
    recv, partial(recv, src=ANY_RANK), recv_into, wait_for_irecv, ask_done, recv_from_third,
    recv_from_any_of_a_group, send, wait_for_isend, send_to_third, sendrecv, barrier,
    barrier_of_a_group, barrier_of_others, reduce, partial(reduce, count=COUNT),
    reduce_in_the_background, share, ask_whether_sent, ask_for_third,
]  # fmt: skip
CALLS = [call, partial(call, dst=1), call_in_the_background]


def waiting_first(way, nbytes, wait):
    """Return the part of every rank in a scene."""
    start, post = RECEIVES[way]

    def part(scene, tag):
        finish = None
        if scene.rank == 0:
            start(scene, nbytes, tag)
        elif scene.rank == 1:
            finish = post(scene, nbytes, tag)
        wait(scene, tag + 2)
        if finish is not None:
            finish()

    part.__qualname__ = f"{way}, {nbytes} bytes"
    return part


def name_of(wait):
    if isinstance(wait, partial):
        options = (f"{key}={value!r}" for key, value in wait.keywords.items())
        return f"{wait.func.__name__}, {', '.join(options)}"
    return wait.__name__


def take_whatever_it_waits_for(scenes, wait):
    parts = [waiting_first(way, nbytes, wait) for way in RECEIVES for nbytes in SIZES]
    play(scenes, [(next(tags), part) for part in parts])


@pytest.mark.parametrize("wait", WAITS, ids=name_of)
def test_a_rank_takes_messages_whatever_it_waits_for(scenes, wait):
    take_whatever_it_waits_for(scenes, wait)


@pytest.mark.parametrize("wait", CALLS, ids=name_of)
def test_a_rank_takes_messages_while_it_waits_for_a_call(scenes, agents, wait):
    take_whatever_it_waits_for(scenes, wait)


@pytest.mark.parametrize("way", RECEIVES)
def test_a_rank_takes_messages_while_it_only_serves(scenes, agents, way):
    def stopped(scene, tag):
        if scene.rank == 0:
            scene.agent.stop(1)
        elif scene.rank == 1:
            assert scene.agent.serve(timeout=LIMIT)

    play(scenes, [(next(tags), waiting_first(way, 16 * MIB, stopped))])


@pytest.mark.parametrize("way", RECEIVES)
def test_a_rank_takes_messages_while_it_waits_for_others_to_leave_their_agents(scenes, agents, way):
    def leave(scene, tag):
        with scene.agent:
            pass

    play(scenes, [(next(tags), waiting_first(way, 16 * MIB, leave))])


# -- operations that are posted on both sides, waited for in every order


def posts(scene, tag, nbytes, dst, src):
    """Post a send and two receives; return how to wait for each."""
    data = content(tag, nbytes)
    out = np.empty(nbytes, np.uint8)
    sends = [
        scene.backend.isend(data, dst, tag),
        scene.backend.isend_array(np.frombuffer(data, np.uint8), dst, tag + 1),
    ]
    receives = [scene.backend.irecv(src, tag), scene.backend.irecv_array(src, tag + 1, out=out)]

    def check(handle):
        assert bytes(handle.wait()) == data

    return [*(send.wait for send in sends), *(partial(check, each) for each in receives)]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("nbytes", SIZES)
def test_ranks_that_post_all_they_do_may_wait_for_it_in_any_order(scenes, count, nbytes):
    def part(scene, tag, order):
        if scene.rank < count:
            nexts, before = (scene.rank + 1) % count, (scene.rank - 1) % count
            waits = posts(scene, tag, nbytes, nexts, before)
            for number in order:
                waits[number]()

    orders = itertools.permutations(range(4))
    play(scenes, [(next(tags), partial(part, order=order)) for order in orders])


@pytest.mark.parametrize("nbytes", SIZES)
def test_ranks_that_all_send_first_do_not_wait_for_each_other(scenes, nbytes):
    def part(scene, tag):
        backend = scene.backend
        others = [rank for rank in range(3) if rank != scene.rank]
        receives = [backend.irecv(src, tag) for src in others]
        for dst in others:
            backend.send(content(tag, nbytes), dst, tag)
        for receive in receives:
            assert receive.wait() == content(tag, nbytes)

    play(scenes, [(next(tags), part)])
