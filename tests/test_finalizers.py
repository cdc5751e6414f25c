"""No finalizer takes a lock: a thread does what is left to do."""

import ast
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import rankwire
from rankwire import finalizers
from rankwire.finalizers import hand_over
from rankwire.rpc.future import UnretrievedError
from worlds import PATIENCE, eventually

SOURCE = Path(rankwire.__file__).parent
LIMIT = 60.0  # seconds for a program that hangs for ever if a finalizer takes a lock

# What finalizers call besides ``hand_over``, and why that takes no lock.
CALLED = {
    ("backends/handles.py", "getattr"): "a function of C",
    ("backends/handles.py", "suppress"): "the context manager has no lock",
    ("backends/handles.py", "append"): "of a list; the next receive does the rest, in order",
    ("torch/rpc/rref.py", "released"): "puts into a SimpleQueue, which a thread empties",
    ("transports/shared_memory.py", "close"): "os.close, and methods of a list",
    ("transports/shared_memory.py", "unmap"): "munmap, a system call",
}
WITH_CALLBACK = {"finalize", "ref", "proxy", "WeakMethod"}


def name_of(node):
    """Return the last name of an expression."""
    return getattr(node, "attr", getattr(node, "id", ast.unparse(node)))


def called_by_finalizers(tree):
    """Yield the name of every function that the collector may have called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            for call in ast.walk(node):
                if isinstance(call, ast.Call):
                    yield name_of(call.func)
                elif isinstance(call, ast.AsyncWith | ast.With):
                    for item in call.items:
                        if not isinstance(item.context_expr, ast.Call):
                            yield f"with {name_of(item.context_expr)}"
        elif isinstance(node, ast.Assign) and "__del__" in map(name_of, node.targets):
            yield name_of(node.value)
        elif isinstance(node, ast.Call) and name_of(node.func) in WITH_CALLBACK:
            yield from (name_of(callback) for callback in node.args[1:2])
            yield from (name_of(each.value) for each in node.keywords if each.arg == "callback")


def test_finalizers_call_nothing_but_what_takes_no_lock():
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        found |= {(name, called) for called in called_by_finalizers(ast.parse(path.read_text()))}
    found = {each for each in found if each[1] != "hand_over"}
    assert found - CALLED.keys() == set(), "have it handed over: rankwire.finalizers"
    assert CALLED.keys() - found == set(), "it is not there any more"


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("def __del__(self): self.close()", "close"),
        ("def __del__(self):\n if x:\n  log.error('x')", "error"),
        ("def __del__(self):\n with self._lock: pass", "with _lock"),
        ("class A:\n __del__ = close", "close"),
        ("weakref.finalize(group, ranks.close)", "close"),
        ("finalize(group, lambda: None)", "lambda: None"),
        ("weakref.ref(group, forget)", "forget"),
        ("ref(group, callback=self.forget)", "forget"),
    ],
)
def test_what_a_finalizer_calls_is_found_however_it_is_written(source, called):
    assert list(called_by_finalizers(ast.parse(source))) == [called]


def test_a_weak_reference_without_a_callback_calls_nothing():
    assert not list(called_by_finalizers(ast.parse("weakref.ref(group)")))


# -- handing over ----------------------------------------------------------------------------------


def finalizer_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rankwire finalizers"]


def test_what_is_handed_over_is_done_in_order_by_another_thread():
    done = []
    for number in range(1000):
        hand_over(lambda each: done.append((each, threading.current_thread().name)), number)
    eventually(lambda: len(done) == 1000)
    assert done == [(number, "rankwire finalizers") for number in range(1000)]


def test_the_thread_ends_and_another_is_started():
    for _ in range(3):
        done = threading.Event()
        hand_over(done.set)
        assert done.wait(PATIENCE)
        assert len(finalizer_threads()) == 1
        eventually(lambda: not finalizer_threads())


def test_threads_that_hand_over_at_the_moment_when_the_thread_ends_lose_nothing(monkeypatch):
    monkeypatch.setattr(finalizers, "_LINGER", 0.0)
    done = []

    def give(first):
        for number in range(first, first + 500):
            hand_over(done.append, number)

    threads = [threading.Thread(target=give, args=(first,)) for first in range(0, 2000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(done) == 2000)
    assert sorted(done) == list(range(2000))


def test_an_error_is_logged_and_the_rest_is_done(caplog):
    done = threading.Event()
    hand_over(lambda: 1 / 0)
    hand_over(done.set)
    assert done.wait(PATIENCE)
    assert "division by zero" in caplog.text


def test_it_goes_on_after_a_moment_without_threads(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    first, second = threading.Event(), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(finalizers.runtime, "start_new_thread", refuse)
        hand_over(first.set)
    assert not first.is_set()
    hand_over(second.set)
    assert first.wait(PATIENCE)
    assert second.wait(PATIENCE)


def test_a_finalizer_that_hands_over_may_run_inside_any_lock():
    """Here inside the lock that the work itself takes."""
    lock, done = threading.Lock(), threading.Event()

    class Thing:
        pass

    def work():
        with lock:
            done.set()

    thing = Thing()
    thing.itself = thing
    weakref.finalize(thing, hand_over, work)
    with lock:
        del thing
        gc.collect()
        assert not done.is_set()
    assert done.wait(PATIENCE)


def test_a_forked_child_hands_over_to_a_thread_of_its_own():
    blocked, go_on = threading.Event(), threading.Event()
    hand_over(lambda: (blocked.set(), go_on.wait(PATIENCE)))
    assert blocked.wait(PATIENCE)
    child = os.fork()
    if not child:
        done = threading.Event()
        hand_over(done.set)
        os._exit(0 if done.wait(PATIENCE) else 1)
    go_on.set()
    assert os.waitpid(child, 0)[1] == 0


def run(program):
    """Run a program in a process of its own; return what it prints."""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # with the stacks of its threads
        printed, _ = child.communicate()
        pytest.fail(f"it hangs:\n{printed}")
    assert child.returncode == 0, printed
    return printed


def test_what_is_handed_over_last_of_all_is_done_before_the_process_ends():
    program = """
import atexit, rankwire
from rankwire.finalizers import hand_over
for number in range(3):
    hand_over(print, number)
atexit.register(hand_over, print, "at exit")
"""
    assert run(program).split("\n") == ["0", "1", "2", "at exit", ""]


# At every collection, one more piece of garbage of each kind, for the next collection to find: it
# comes at the next allocation, wherever that is. Errors go to a log with a lock of its own.
COLLECTING = """
import faulthandler, gc, logging, logging.handlers, queue, threading
import numpy as np
import rankwire
from rankwire.backends.simulated import SimulatedBackend
from rankwire.transports.shared_memory import SharedMemory
from rankwire.rpc.future import UnretrievedError

faulthandler.enable()
log = logging.getLogger("rankwire")
log.addHandler(logging.handlers.QueueHandler(queue.Queue()))
log.setLevel(logging.DEBUG)
ROUNDS = 30


class Cycle:
    def __init__(self, content):
        self.content, self.itself = content, self


def be_rank(backend):
    other = 1 - backend.rank
    with rankwire.RpcAgent(backend, resolve={"double": lambda x: 2 * x}.get) as agent:
        backend.barrier()
        for number in range(ROUNDS):
            handle = backend.isend(b"x" * number, other)
            assert len(backend.recv(other)) == number
            handle.wait()
            assert agent.rpc_sync(other, "double", number) == 2 * number
            future = agent.rpc_async(other, "double", "a")
            future.add_done_callback(lambda _: None)
            assert future.result() == "aa"
            work = rankwire.all_reduce(backend, np.ones(3), async_op=True)
            assert rankwire.all_reduce(backend, np.ones(3))[0] == 2
            work.wait()
            group = rankwire.SubBackend(backend, range(2))
            group.barrier()
            group.close()
            log.warning("round %d", number)
        backend.barrier()


world = SimulatedBackend.create_group(2, timeout=30)
handles = [backend.irecv(1 - backend.rank, tag=99) for backend in world for _ in range(300)]
memory = [SharedMemory(4096) for _ in range(50)]
dropped = 0


def litter(phase, info):
    global dropped
    if phase == "stop":
        dropped += 1
        Cycle(UnretrievedError(ValueError("dropped")))
        for pool in (handles, memory):
            if pool:
                Cycle(pool.pop())


ranks = [threading.Thread(target=be_rank, args=(backend,)) for backend in world]
gc.callbacks.append(litter)
gc.set_threshold(1, 100, 1000)
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
gc.callbacks.remove(litter)
gc.set_threshold(700, 10, 10)
for backend in world:
    backend.close()
assert not handles and not memory
print("collections:", dropped > 1000)
"""


def test_the_collector_may_run_at_every_allocation_inside_every_lock():
    assert "collections: True" in run(COLLECTING)


def test_a_thread_that_drops_a_failed_future_does_not_wait_for_the_log():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, record):
            begun.set()
            assert go_on.wait(PATIENCE)

    handler = Slow()
    logging.getLogger("rankwire").addHandler(handler)
    try:
        UnretrievedError(ValueError("dropped"))  # garbage at once
        assert begun.wait(PATIENCE)
    finally:
        go_on.set()
        logging.getLogger("rankwire").removeHandler(handler)
    eventually(lambda: not finalizer_threads())
