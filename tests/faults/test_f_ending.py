"""Processes that fork, end, are interrupted, or close with work in flight (rows 29, 36, 37, 45)."""

import os
import random
import signal
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path

import pytest

from children import Child
from faults.sizes import trials
from rankwire import RpcAgent, TcpBackend, finalizers
from rankwire.errors import ChannelClosedError, PeerLostError, RankwireError
from rankwire.testing import simulated_world
from worlds import PATIENCE, Running, address_of, bound_socket, eventually, tcp_world

TESTS = Path(__file__).parent.parent


def start(program, *arguments):
    """Start a program that may use the helpers of the tests."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return Child(command, {**os.environ, "PYTHONPATH": path})


def run(program, *arguments, timeout=40.0):
    """Run a program to its end."""
    return start(program, *arguments).result(timeout)


# -- row 29: fork

FORKING = """
    import contextlib, multiprocessing, os, subprocess, sys, threading, time
    import numpy
    import rankwire
    from rankwire import ForkedProcessError, RpcAgent, SubBackend, TcpBackend, all_reduce
    from worlds import Running, eventually, tcp_world

    where, way = sys.argv[1:]

    def must_refuse(use):
        begin = time.monotonic()
        try:
            use()
        except ForkedProcessError:
            assert time.monotonic() - begin < 8
        else:
            raise AssertionError(f"{use} went through")

    def in_child():
        for use in uses:
            must_refuse(use)
        for thing in (agents[0], world[0], group):
            thing.close()
            assert thing.closed
            assert "parent" in repr(thing)
        with contextlib.suppress(ForkedProcessError), contextlib.ExitStack() as stack:
            stack.push(world[0])
            stack.push(agents[0])
        with TcpBackend(0, 1, "127.0.0.1:0") as own, RpcAgent(own) as agent:
            agent.register("one", lambda: 1)
            assert agent.rpc_sync(0, "one") == 1
        return 0

    def leave(code):
        if way == "os._exit":
            os._exit(code)
        sys.exit(code)

    def fork():
        if way == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=in_child)
            child.start()
            child.join(20)
            return child.exitcode
        if way == "subprocess":
            return subprocess.run([sys.executable, "-c", "pass"], preexec_fn=in_child).returncode
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = in_child()
            except BaseException:
                import traceback
                traceback.print_exc()
            leave(code)
        end = time.monotonic() + 20
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                return "stuck"
            time.sleep(0.002)

    def add_for_ever():
        count = 0
        while not stop.is_set():
            assert agents[0].rpc_sync(1, "add", count, 1) == count + 1
            count += 1
        return count

    def send_for_ever():
        count = 0
        while not stop.is_set():
            world[0].send(b"%d" % count, 1)
            assert world[1].recv(0) == b"%d" % count
            count += 1
        return count

    def call_for_ever():
        count = 0
        while not stop.is_set():
            futures = [agents[0].rpc_async(1, "add", number, 1) for number in range(20)]
            assert [future.result() for future in futures] == list(range(1, 21))
            count += 1
        return count

    stop, go_on = threading.Event(), threading.Event()
    with tcp_world(2) as world:
        agents = [RpcAgent(backend) for backend in world]
        agents[1].register("add", lambda a, b: a + b)
        agents[1].register("wait", lambda: go_on.wait(60))
        agents[1].register("fork", fork)

        @agents[1].register
        async def fork_in_loop():
            return fork()

        group, other = [m.result() for m in [Running(SubBackend, b, [0, 1]) for b in world]]
        waiting = agents[0].rpc_async(1, "wait")
        work = all_reduce(world[0], numpy.ones(3), async_op=True)
        uses = [
            lambda: world[0].send(b"x", 1), lambda: world[0].recv(1), world[0].barrier,
            lambda: world[1].link_to(0), lambda: group.send(b"x", 1), lambda: other.recv(0),
            lambda: agents[0].rpc_sync(1, "add", 1, 2), lambda: agents[0].rpc_async(1, "add"),
            lambda: agents[1].register("new", print), waiting.result, waiting.cancel, waiting.done,
            work.wait, work.done, lambda: all_reduce(world[0], numpy.ones(3)),
            lambda: RpcAgent(world[0], name="other"), lambda: SubBackend(world[0], [0, 1]),
            lambda: world[0].__enter__(),
        ]
        traffic = [Running(function) for function in (add_for_ever, send_for_ever, call_for_ever)]
        for _ in range(6):
            if where == "main":
                code = fork()
            elif where == "thread":
                code = Running(fork).result(30)
            else:
                code = agents[0].rpc_sync(1, where)
            assert code == 0, code
        stop.set()
        assert all(running.result() > 0 for running in traffic)
        second = all_reduce(world[1], numpy.ones(3))
        assert list(work.wait(10)) == [2, 2, 2]
        go_on.set()
        assert waiting.result(10) is True
        for number in range(100):
            group.send(b"%d" % number, 1)
            assert other.recv(0) == b"%d" % number
        assert all(os.path.exists(backend.mesh._me.unix_path) for backend in world)
        group.close()
        other.close()
        for agent in agents:
            agent.close()
    print("the parent is well")
"""


@pytest.mark.fault(29, "a forked child that uses its parent's backend gets an error that says so")
@pytest.mark.fault(29, "a forked child that ends leaves its parent's world as it was")
@pytest.mark.fault(29, "a forked child gets ForkedProcessError at once and cannot harm its parent")
@pytest.mark.parametrize(
    ("where", "way"),
    [
        pytest.param("main", "os._exit", marks=pytest.mark.slow),
        ("main", "sys.exit"),
        ("main", "multiprocessing"),
        ("main", "subprocess"),
        ("thread", "os._exit"),
        pytest.param("thread", "sys.exit", marks=pytest.mark.slow),
        pytest.param("thread", "multiprocessing", marks=pytest.mark.slow),
        pytest.param("fork", "os._exit", marks=pytest.mark.slow),
        ("fork", "sys.exit"),
        ("fork_in_loop", "os._exit"),
    ],
)
def test_f29_a_child_is_refused_and_its_parent_goes_on(where, way):
    ended = run(FORKING, where, way)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "the parent is well\n"
    assert "Traceback" not in ended.stderr, ended.stderr


LEAVING_A_CHILD = """
    import os, sys, time
    from rankwire import RpcAgent, TcpBackend

    backend = TcpBackend(1, 2, sys.argv[1])
    agent = RpcAgent(backend)
    backend.send(b"hello", 0)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


@pytest.mark.fault(29, "a child does not keep the connections of a parent that died")
def test_f29_a_dead_parent_is_noticed_although_its_child_lives():
    listener = bound_socket()
    process = start(LEAVING_A_CHILD, address_of(listener))
    with process, TcpBackend(0, 2, address_of(listener), listener=listener) as backend:
        assert backend.recv(1) == b"hello"
        child = int(process.stdout.readline())
        try:
            process.kill()
            with pytest.raises(PeerLostError):
                backend.recv(1, timeout=PATIENCE)
            os.kill(child, 0)  # it is still there
            # Rank 0 removes the file that the dead one could not, when it hears of that too.
            eventually(lambda: not os.path.exists(backend.mesh.peers[1].member.unix_path))
        finally:
            os.kill(child, signal.SIGKILL)


# -- row 36: the end of the interpreter

LEAVING = """
    import os, signal, sys, threading, time
    from rankwire import RpcAgent, TcpBackend

    way, address = sys.argv[1:]
    backend = TcpBackend(1, 2, address)
    agent = RpcAgent(backend)
    agent.register("wait", lambda: time.sleep(60))

    @agent.register
    async def wait_async():
        time.sleep(60)

    backend.send(b"hello", 0)
    for _ in range(3):
        threading.Thread(target=agent.rpc_sync, args=(0, "wait"), daemon=True).start()
        threading.Thread(target=backend.recv, args=(0, 7), daemon=True).start()
    pending = agent.rpc_async(0, "wait")
    backend.recv(0)  # rank 0 waits for functions of ours
    if way == "sys.exit":
        sys.exit(3)
    elif way == "exception":
        raise ValueError("the program's own")
    elif way == "os._exit":
        os._exit(3)
    elif way == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif way == "closed backend":
        backend.close()
"""
ORDERLY = {"end of main": 0, "sys.exit": 3, "closed backend": 0}
SUDDEN = {"exception": 1, "os._exit": 3, "SIGTERM": -signal.SIGTERM}


@pytest.mark.fault(36, "a process ends within 2 s, and its peers see an orderly end or a loss")
@pytest.mark.parametrize("way", [*ORDERLY, *SUDDEN])
def test_f36_a_process_with_calls_in_flight_ends_soon_and_quietly(way, measured):
    for _ in range(trials(4, 4, quick=1)):
        listener = bound_socket()
        process = start(LEAVING, way, address_of(listener))
        with TcpBackend(0, 2, address_of(listener), listener=listener) as backend:
            with RpcAgent(backend) as agent:
                go_on = threading.Event()
                agent.register("wait", lambda go_on=go_on: go_on.wait(PATIENCE))
                assert backend.recv(1, timeout=PATIENCE) == b"hello"
                futures = [agent.rpc_async(1, name) for name in ("wait", "wait_async")]
                eventually(lambda agent=agent: agent.activity().in_service == 4)
                backend.send(b"go", 1)
                begin = time.monotonic()
                _, err = process.communicate(timeout=PATIENCE)
                measured("the process has ended", time.monotonic() - begin, limit=2.0)
                assert process.returncode == {**ORDERLY, **SUDDEN}[way]
                if way != "closed backend":  # that one ended its own threads' calls
                    assert err.count("Traceback") == (way == "exception"), err
                expected = ChannelClosedError if way in ORDERLY else PeerLostError
                for future in futures:
                    assert type(future.exception(PATIENCE)) is expected
                with pytest.raises(expected):
                    backend.recv(1, timeout=PATIENCE)
                go_on.set()


def test_an_object_that_cannot_leave_at_exit_does_not_keep_others_from_leaving():
    program = """
        from rankwire import TcpBackend
        from rankwire.finalizers import close_at_exit

        class Stuck:
            def leave_at_exit(self, error):
                raise RuntimeError("stuck")

        class Last:
            def leave_at_exit(self, error):
                print("left", error)

        last, stuck = Last(), Stuck()
        close_at_exit(last)
        close_at_exit(stuck)
    """
    ended = run(program)
    assert (ended.returncode, ended.stdout) == (0, "left None\n")
    assert "stuck" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_is_closed_or_gone_is_not_closed_again():
    with tcp_world(1) as (backend,):
        assert backend in finalizers._leaving
    backend.leave_at_exit(None)
    del backend
    assert all(thing.closed for thing in finalizers._leaving if isinstance(thing, TcpBackend))


# -- row 37: Ctrl-C

INTERRUPTED = """
    import os, random, signal, sys, threading, time
    import numpy
    from rankwire import RpcAgent, TcpBackend

    kind, address, seed, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    source = random.Random(seed)
    backend = TcpBackend(1, 2, address)
    agent = RpcAgent(backend)
    numbers = iter(range(1 << 60))
    expected = 0
    big = bytes(300_000)

    def send():
        backend.send([b"%020d" % next(numbers), source.choice([b"", big])], 0)

    def recv():
        global expected
        number = int(backend.recv(0)[:20])
        # One that was received at the moment of an interrupt may be gone with the frame of Python
        # that was about to return it.
        assert expected <= number <= expected + interrupts_since, (expected, number)
        expected = number + 1

    def rpc_sync():
        number = next(numbers)
        assert agent.rpc_sync(0, "echo", number, source.choice([b"", big])) == number

    def result():
        futures = [agent.rpc_async(0, "echo", number, b"") for number in range(10)]
        assert [future.result() for future in futures] == list(range(10))

    def interrupt_after(seconds):
        time.sleep(seconds)
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    operation = globals()[kind]
    slowest, done, interrupts_since = 0.0, 0, 0
    for run in range(runs):
        times = []
        killer = threading.Thread(target=interrupt_after, args=(source.uniform(0, 0.004),))
        try:
            killer.start()
            while True:
                operation()
                interrupts_since = 0
        except KeyboardInterrupt:
            slowest = max(slowest, time.monotonic() - times[0])
            interrupts_since += 1
        killer.join()
        done += 1
    print("done", done, "slowest", slowest)
    agent.close(grace=0)
    backend.close()
"""


@pytest.mark.fault(37, "Ctrl-C raises within 0.2 s, and whoever catches it has the same links")
@pytest.mark.parametrize("kind", ["send", "recv", "rpc_sync", "result"])
def test_f37_an_interrupt_leaves_the_link_as_it_was(kind, measured):
    interrupts, seeds = 0, trials(2, 2, quick=1)
    for seed in range(seeds):
        listener = bound_socket()
        arguments = (kind, address_of(listener), str(seed), "60")
        process = start(INTERRUPTED, *arguments)
        with TcpBackend(0, 2, address_of(listener), listener=listener) as backend:
            with RpcAgent(backend) as agent:
                agent.register("echo", lambda number, ballast: number)
                echoing = Running(
                    {"send": _receive_all, "recv": _send_all}.get(kind, repr), backend
                )
                out, err = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, err
                assert "Traceback" not in err, err
                done, slowest = out.split()[-3], out.split()[-1]
                measured("the slowest interrupt", float(slowest), limit=0.2)
                interrupts += int(done)
                assert echoing.result() is not None
    assert interrupts == 60 * seeds


def _receive_all(backend):
    """Check that what comes is in order; the other end may leave at any time."""
    last = -1
    try:
        while True:
            message = backend.recv(1)
            assert len(message) in (20, 300_020)
            assert int(message[:20]) > last
            last = int(message[:20])
    except (PeerLostError, ChannelClosedError):
        return last


def _send_all(backend):
    source = random.Random(1)
    number = 0
    try:
        while True:
            ballast = bytes(source.choice([0, 300_000]))
            backend.send([b"%020d" % number, ballast], 1)
            number += 1
    except (PeerLostError, ChannelClosedError):
        return number


# -- rows 45 and 46: closing with work in flight


@pytest.mark.fault(45, "closing ends every call in flight; a second close does nothing")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make_world", [simulated_world, tcp_world], ids=["simulated", "tcp"])
def test_f45_closing_ends_all_that_is_in_flight(make_world, seed):
    source = random.Random(seed)
    with make_world(2) as world:
        agents = [RpcAgent(backend, workers=4) for backend in world]
        go_on = threading.Event()
        for agent in agents:
            agent.register("short", lambda: "done")
            agent.register("wait", lambda: go_on.wait(PATIENCE))
            agent.register("nested", partial(agent.rpc_sync, 1 - agent.rank, "wait"))
        futures = []
        calling = []
        for _ in range(60):
            agent = source.choice(agents)
            name = source.choice(["short", "short", "wait", "nested"])
            if source.random() < 0.2:
                calling.append(Running(agent.rpc_sync, source.randrange(2), name))
            else:
                futures.append(agent.rpc_async(source.randrange(2), name))
            if source.random() < 0.1:
                source.choice(futures or [agent.rpc_async(0, "short")]).cancel()
        closers = [agents[0].close, agents[1].close, agents[0].close, world[0].close]
        source.shuffle(closers)
        grace = source.choice([0.0, 0.2])
        closing = [
            Running(partial(close, grace=grace) if close != world[0].close else close)
            for close in closers
        ]
        for closed in closing:
            closed.result()
        for agent in agents:
            agent.close(grace=0)
        world[0].close()
        go_on.set()
        for future in futures:
            try:
                assert future.result(PATIENCE) in ("done", True)
            except (RankwireError, CancelledError):
                continue
        for call in calling:
            try:
                call.result()
            except RankwireError:
                continue


@pytest.mark.fault(46, "a rank that closes has left; it is not reported as dead")
def test_f46_callers_of_a_rank_that_closes_learn_that_it_has_left():
    with tcp_world(3) as world:
        agents = [RpcAgent(backend) for backend in world]
        started = threading.Semaphore(0)
        go_on = threading.Event()

        def wait():
            started.release()
            go_on.wait(PATIENCE)

        agents[0].register("wait", wait)
        callers = [Running(agents[rank].rpc_sync, 0, "wait") for rank in (1, 2, 1, 2)]
        for _ in callers:
            assert started.acquire(timeout=PATIENCE)
        agents[0].close(grace=0)
        for caller in callers:
            error = caller.error()
            assert type(error) is ChannelClosedError
            assert (error.peer, error.may_have_run) == (0, True)
        go_on.set()
        world[1].send(b"the backend is still there", 0)
        assert world[0].recv(1) == b"the backend is still there"
        for agent in agents:
            agent.close()
