"""Stacks: what the threads of this process are doing, as text."""

import contextlib
import copy
import json
import queue
import re
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rankwire
from rankwire import SimulatedBackend
from rankwire.observe.stacks import is_ours, is_users, methods_entered, place_of, places, stacks
from rankwire.testing.conformance.tools import until


def wait_here(event):
    event.wait(60)


@pytest.fixture
def waiting():
    event = threading.Event()
    thread = threading.Thread(target=wait_here, args=(event,), name="one that waits")
    thread.start()
    until(lambda: "of threading]" in stacks(only=[thread.ident]))
    yield thread
    event.set()
    thread.join()


def test_a_thread_is_shown_with_its_name_from_the_first_line_of_the_program_on(waiting):
    text = stacks(only=[waiting.ident])
    assert text.startswith("one that waits:\n  File ")
    assert "in wait_here\n    event.wait(60)\n" in text
    assert "_bootstrap" not in text


def test_the_line_of_the_program_is_shown_however_deep_the_library_is_below_it():
    waiting = queue.SimpleQueue()
    value = types.SimpleNamespace(__deepcopy__=waiting.get)
    for _ in range(20):
        value = [value]
    thread = threading.Thread(target=lambda: copy.deepcopy(value), name="copier")
    thread.start()
    try:
        until(lambda: "[41 frames of copy]" in stacks(only=[thread.ident]))
        lines = stacks(only=[thread.ident]).splitlines()
        assert lines[0] == "copier:"
        assert "copy.deepcopy(value)" in lines[2]
        assert len(lines) == 4
    finally:
        waiting.put(None)
        thread.join()


def test_threads_can_be_left_out(waiting):
    title = f"{waiting.name}:\n"
    assert title in stacks()
    assert title not in stacks(but=[waiting.ident])


def test_frames_of_rankwire_are_folded():
    backend, other = SimulatedBackend.create_group(2)
    thread = threading.Thread(target=lambda: backend.recv(1), name="receiver")
    thread.start()
    try:
        until(lambda: "frames of rankwire]" in stacks(only=[thread.ident]))
        lines = stacks(only=[thread.ident]).splitlines()
        assert lines[0] == "receiver:"
        assert "backend.recv(1)" in lines[2]
        assert re.fullmatch(r"  \[\d+ frames of rankwire\]", lines[3])
        assert len(lines) == 4
    finally:
        other.send(b"", 0)
        thread.join()
        backend.close()
        other.close()


def test_threads_that_are_not_in_the_program_are_left_out():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="of the library alone")
    thread.start()
    try:
        assert thread.name not in stacks()
        assert not re.search(r"and \d+ more", stacks())
    finally:
        event.set()
        thread.join()


def test_threads_of_the_program_beyond_the_first_eight_are_counted():
    event = threading.Event()
    threads = [threading.Thread(target=wait_here, args=(event,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    try:
        idents = [thread.ident for thread in threads]
        until(lambda: stacks(only=idents).count("of threading]") == 8)
        assert stacks(only=idents).endswith("and 2 more threads\n")
    finally:
        event.set()
        for thread in threads:
            thread.join()


def test_files_are_attributed_to_rankwire_or_the_program():
    assert is_ours(stacks.__code__.co_filename)
    assert not is_users(stacks.__code__.co_filename)
    assert not is_users(json.__file__)
    assert is_users(pytest.__file__)
    assert is_users(__file__)


# -- the innermost line ----------------------------------------------------------------------------


def acquire(lock):
    lock.acquire()


def acquire_in_several_lines(lock):
    max(
        1,
        lock.acquire(
            timeout=60,
        ),
    )


def enter(lock):
    with lock:
        pass


def join(lock):
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()


def wait_for_a_call(lock):
    with ThreadPoolExecutor() as pool:
        pool.submit(lock.acquire).result()


def nap(lock):
    while not lock.acquire(blocking=False):
        time.sleep(0.05)


def compute(lock):
    while lock.locked():
        sum(range(100))


@pytest.mark.parametrize(
    ("function", "doing"),
    [
        (acquire, "waits for a lock"),
        (acquire_in_several_lines, "waits for a lock"),
        (enter, "waits for a lock"),
        (join, "waits"),
        (wait_for_a_call, "waits for a lock"),
        (nap, "sleeps"),
        (compute, "runs"),
    ],
)
def test_the_state_of_a_thread_is_found_from_its_current_call(function, doing):
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=function, args=(lock,), name="under test")
    thread.start()
    try:
        place = re.compile(rf"{doing}.* in {function.__name__} \(.*test_stacks.py:\d+\)")
        until(lambda: place.fullmatch(place_of(thread.ident)))
        assert any(place.startswith("under test ") for place in places(only=["under test"]))
    finally:
        lock.release()
        thread.join()


def test_the_main_thread_comes_first_and_threads_outside_the_program_are_left_out(waiting):
    assert places()[0].startswith("MainThread ")
    assert places(only=["no such thread"]) == []
    assert place_of(-1) == ""


class Waiter:
    def outer(self, other, event):
        other.inner(event)

    def inner(self, event):
        event.wait()


def test_a_thread_is_in_the_outermost_of_the_methods_that_it_has_entered():
    event, first, second = threading.Event(), Waiter(), Waiter()
    methods = Waiter.outer.__code__, Waiter.inner.__code__
    thread = threading.Thread(target=first.outer, args=(second, event))
    thread.start()
    until(lambda: methods_entered(methods[1:]) == [second])
    assert methods_entered(methods) == [first]
    event.set()
    thread.join()
    assert methods_entered(methods) == []


HAMMERED = """
import gc, threading, time
from rankwire.observe.stacks import place_of, places

gc.callbacks.append(lambda phase, info: time.sleep(0))  # lets another thread run
gc.set_threshold(5)
end = time.monotonic() + 2.0

def come_and_go():
    while time.monotonic() < end:
        threading.Thread(target=lambda: None).start()

def nap():
    time.sleep(0.001)

def run_on():
    while time.monotonic() < end:
        nap()  # in a frame that nobody has looked at

threads = [threading.Thread(target=come_and_go) for _ in range(3)]
threads += [threading.Thread(target=run_on) for _ in range(40)]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    places()
    place_of(threading.get_ident())
for thread in threads:
    thread.join()
"""


def test_threads_may_come_and_go_and_garbage_be_collected_meanwhile():
    """While the interpreter lists its threads it must not run Python: it holds their lock."""
    subprocess.run([sys.executable, "-c", HAMMERED], check=True, timeout=30)


def wait_in_a_constructor(backend):
    rankwire.SubBackend(backend, [0, 1])


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda backend: rankwire.barrier(backend), "barrier"),
        (lambda backend: backend.barrier(), "barrier"),
        (lambda backend: rankwire.all_gather_object(backend, 1), "all_gather_object"),
        (lambda backend: rankwire.all_reduce(backend, np.ones(1)), "all_reduce"),
        (lambda backend: backend.recv(1), "recv"),
        (lambda backend: wait_in_a_constructor(backend), "SubBackend"),
        (lambda backend: rankwire.RpcAgent(backend).rpc_sync(1, "f"), "rpc_sync"),
        (lambda backend: rankwire.RpcAgent(backend).to(1).f(), "rpc_sync"),
        (lambda backend: rankwire.RpcAgent(backend).to(1)("f"), "rpc_sync"),
        (lambda backend: rankwire.RpcAgent(backend).rpc_async(1, "f").result(), "result"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_thread_in_rankwire_is_in_the_operation_that_the_program_has_called(call, operation):
    backend, other = SimulatedBackend.create_group(2)

    def run():
        with contextlib.suppress(rankwire.RankwireError):
            call(backend)

    thread = threading.Thread(target=run, name="caller")
    thread.start()
    try:
        until(lambda: f"is in {operation}(), called in " in place_of(thread.ident))
    finally:
        other.close()
        backend.close()
        thread.join()
