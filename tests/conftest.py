"""What holds for every test: a runtime folder of its own, and nothing left behind.

A test that leaves a thread, a file descriptor, a child process or a socket file is failed, by name.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from faults.sizes import examples
from nursery import Nursery, nursery
from rankwire.links.connection import Connection
from rankwire.rendezvous.runtime_dir import runtime_folder
from worlds import LEND_FROM

_GRACE = 10.0  # seconds for a thread that was told to end, or a killed process, to be gone

settings.register_profile(
    "rankwire", deadline=None, print_blob=True, max_examples=examples(settings.default.max_examples)
)
settings.load_profile("rankwire")

_PASSED = pytest.StashKey[bool]()

pytest_plugins = ["surroundings", "faults.plugin", "overview"]


class Belongings(NamedTuple):
    """What a process has at one moment, by name."""

    threads: dict[Any, str]
    descriptors: dict[Any, str]
    children: dict[Any, str]
    socket_files: dict[Any, str]

    def beyond(self, before: "Belongings") -> dict[str, list[str]]:
        """Return what is here and was not there before."""
        new = {}
        for kind, now, then in zip(self._fields, self, before, strict=True):
            if names := [name for key, name in now.items() if key not in then]:
                new[kind] = names
        return new


def belongings(folder: str) -> Belongings:
    return Belongings(_threads(), _descriptors(), _children(), _socket_files(folder))


def _threads() -> dict[Any, str]:
    return {thread: thread.name for thread in threading.enumerate()}


def _descriptors() -> dict[Any, str]:
    """By number and what is behind it: a number that was closed and taken again is a new one."""
    found: dict[Any, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the one that lists the folder
        if int(number) not in _descriptors_of_helpers():
            found[number, target] = f"{number} -> {target}"
    return found


def _children() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                pids = file.read().split()
        except OSError:
            continue  # a thread that has just ended, or a kernel without this file
        for pid in pids:
            if int(pid) not in _helpers():
                found[pid] = f"{pid} ({_command(pid)})"
    return found


def _helpers() -> set[int | None]:
    """Return the processes that live as long as the session once they are needed."""
    processes = {resource_tracker._resource_tracker._pid}
    if Nursery.current is not None and Nursery.current.process is not None:
        processes.add(Nursery.current.process.pid)
    return processes


def _descriptors_of_helpers() -> set[int | None]:
    descriptors = {resource_tracker._resource_tracker._fd}
    if Nursery.current is not None and Nursery.current.socket is not None:
        descriptors.add(Nursery.current.socket.fileno())
    return descriptors


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    except OSError:
        return "gone"


def _socket_files(folder: str) -> dict[Any, str]:
    try:
        return {name: name for name in os.listdir(folder) if name.endswith(".sock")}
    except FileNotFoundError:
        return {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder() -> Iterator[str]:
    """Keep tests away from the jobs of the user who runs them.

    A short path: socket files have at most 107 characters.
    """
    base = tempfile.mkdtemp(prefix="rw", dir="/tmp")
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = base
    yield str(runtime_folder())
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(base)


@pytest.fixture(scope="session", autouse=True)
def shared_nursery(own_runtime_folder: str) -> Iterator[None]:
    with nursery():
        yield


@pytest.fixture
def same_runtime_folder(own_runtime_folder: str) -> Iterator[None]:
    """Have the next test begin with the same folder.

    What ``monkeypatch`` sets back last may be a folder that another fixture has removed by then.
    """
    before = os.environ["XDG_RUNTIME_DIR"]
    yield
    os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(autouse=True)
def less_is_lent(same_runtime_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend messages that are an eighth as large as those of users, so that tests are quick."""
    monkeypatch.setattr(Connection, "lend_from", LEND_FROM)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, own_runtime_folder: str) -> Iterator[None]:
    before = belongings(own_runtime_folder)
    yield
    end = time.monotonic() + _GRACE
    while left := belongings(own_runtime_folder).beyond(before):
        if not request.node.stash.get(_PASSED, False):
            return  # a failed test is reported for its own reason
        if time.monotonic() > end:
            pytest.fail(f"left behind: {left}", pytrace=False)
        time.sleep(0.005)
