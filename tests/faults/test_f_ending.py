"""Processes that fork, end, are interrupted, or close with work in flight (rows 29, 36, 37, 45)."""

import os
import signal
import sys
import threading
import time

import pytest

sys.path.insert(0, os.path.dirname(__file__))

import scripts

from rankwire import RpcAgent, TcpBackend
from rankwire.backends import ending
from rankwire.errors import ChannelClosedError, PeerLostError
from worlds import PATIENCE, address_of, bound_socket, eventually, tcp_world

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
            assert time.monotonic() - begin < 1
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
        assert all(os.path.exists(backend._me.unix_path) for backend in world)
        group.close()
        other.close()
        for agent in agents:
            agent.close()
    print("the parent is well")
"""


@pytest.mark.fault(29, "a forked child gets ForkedProcessError at once and cannot harm its parent")
@pytest.mark.parametrize(
    ("where", "way"),
    [
        ("main", "os._exit"),
        ("main", "sys.exit"),
        ("main", "multiprocessing"),
        ("main", "subprocess"),
        ("thread", "os._exit"),
        ("thread", "sys.exit"),
        ("thread", "multiprocessing"),
        ("fork", "os._exit"),
        ("fork", "sys.exit"),
        ("fork_in_loop", "os._exit"),
    ],
)
def test_f29_a_child_is_refused_and_its_parent_goes_on(where, way):
    ended = scripts.run(FORKING, where, way)
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
    process = scripts.start(LEAVING_A_CHILD, address_of(listener))
    try:
        with process, TcpBackend(0, 2, address_of(listener), listener=listener) as backend:
            assert backend.recv(1) == b"hello"
            child = int(process.stdout.readline())
            try:
                process.kill()
                with pytest.raises(PeerLostError):
                    backend.recv(1, timeout=PATIENCE)
                os.kill(child, 0)  # it is still there
            finally:
                os.kill(child, signal.SIGKILL)
    finally:
        process.kill()


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
def test_f36_a_process_with_calls_in_flight_ends_soon_and_quietly(way):
    for _ in range(4):
        listener = bound_socket()
        process = scripts.start(LEAVING, way, address_of(listener))
        with TcpBackend(0, 2, address_of(listener), listener=listener) as backend:
            with RpcAgent(backend) as agent:
                go_on = threading.Event()
                agent.register("wait", lambda go_on=go_on: go_on.wait(PATIENCE))
                assert backend.recv(1, timeout=PATIENCE) == b"hello"
                futures = [agent.rpc_async(1, name) for name in ("wait", "wait_async")]
                eventually(lambda agent=agent: len(agent._server._active) == 4)
                backend.send(b"go", 1)
                begin = time.monotonic()
                _, err = process.communicate(timeout=PATIENCE)
                assert time.monotonic() - begin < 2
                assert process.returncode == {**ORDERLY, **SUDDEN}[way]
                if way != "closed backend":  # that one ended its own threads' calls
                    assert err.count("Traceback") == (way == "exception"), err
                expected = ChannelClosedError if way in ORDERLY else PeerLostError
                for future in futures:
                    assert type(future.exception(PATIENCE)) is expected
                with pytest.raises(expected):
                    backend.recv(1, timeout=PATIENCE)
                go_on.set()


def test_what_is_to_be_done_before_leaving_finds_all_open():
    program = """
        from rankwire import RpcAgent, TcpBackend
        from rankwire.backends.ending import before_leaving

        backend = TcpBackend(0, 1, "127.0.0.1:0")
        agent = RpcAgent(backend)
        agent.register("one", lambda: 1)
        before_leaving(lambda: print("open", agent.rpc_sync(0, "one")))
        before_leaving(lambda: 1 / 0)
    """
    ended = scripts.run(program)
    assert (ended.returncode, ended.stdout) == (0, "open 1\n")
    assert "division by zero" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_is_closed_or_gone_is_not_closed_again():
    with tcp_world(1) as (backend,):
        assert backend in ending._leaving
    backend.leave_at_exit(None)
    del backend
    assert all(thing.closed for thing in ending._leaving if isinstance(thing, TcpBackend))
