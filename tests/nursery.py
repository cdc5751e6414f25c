"""A process that has imported everything and forks: rank processes, and programs in Python.

A fork costs 10 ms, a new interpreter with the imports of rankwire 160, of its launcher 230.
A forked program has the arguments, the environment, the folder and the output of its own, but what
``/proc`` tells of its command line and environment is the nursery's: tests that look there, or that
are about the start of an interpreter, start one.

Run as a script, this module is the nursery. It has one thread, so that its forks are safe.
"""

import contextlib
import ctypes
import functools
import json
import multiprocessing.connection
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from rankwire.launch.process import Ending, Process

_LONGEST_REQUEST = 1 << 18


class Nursery:
    """The tests' end of it. The process is started with the first fork."""

    current: "Nursery | None" = None

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None

    def fork_rank(
        self, pipe: multiprocessing.connection.Connection, network: str = ""
    ) -> "ForkedProcess":
        """Start a rank process that obeys the pipe.

        ``network`` is the file of a network namespace that it is to be in.
        """
        folder = os.environ.get("XDG_RUNTIME_DIR", "")
        request = {"kind": "rank", "folder": folder, "network": network}
        return ForkedProcess(self, request, [pipe.fileno()])

    def fork_program(self, arguments: list[str], env: dict[str, str], cwd: str) -> "ForkedProcess":
        """Start a program.

        Args:
            arguments: As after ``python``: ``-c``, ``-m`` or a script first.
            env: All of its environment.
            cwd: The folder that it is in.
        """
        request = {"kind": "program", "arguments": arguments, "env": env, "cwd": cwd}
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), their_out, their_err]
            forked = ForkedProcess(self, request, streams, (out, err))
        os.close(their_out)
        os.close(their_err)
        return forked

    def request(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Have it fork; return the process id."""
        if self.socket is None:
            self._start()
        assert self.socket is not None
        socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)
        answer = self.socket.recv(64)
        assert answer, "the nursery has ended"
        return int(answer)

    def _start(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def close(self) -> None:
        if self.socket is not None and self.process is not None:
            self.socket.close()
            self.process.wait()


class ForkedProcess(Process):
    """A fork of the nursery, which reaps it and writes its wait status into a pipe."""

    def __init__(
        self,
        nursery: Nursery,
        request: dict[str, Any],
        descriptors: list[int],
        pipes: tuple[int, ...] = (),
    ) -> None:
        status, theirs = os.pipe()
        try:
            pid = nursery.request(request, [*descriptors, theirs])
        finally:
            os.close(theirs)
        self._watch(pid, *(open(number, "rb", buffering=0) for number in pipes))
        self._descriptor = status

    def _find_ending(self) -> Ending | None:
        if not select.select([self._descriptor], (), (), 0)[0]:
            return None
        return Ending.of_status(int(os.read(self._descriptor, 64)))

    def send(self, number: int) -> None:
        self.check()
        if self.ending is None:
            super().send(number)

    def reap(self) -> None:
        assert wait(self, 60.0), f"process {self.pid} does not end"

    def is_reaped(self) -> bool:
        return self.check() is not None or self.ending is not None


def wait(process: Process, timeout: float) -> Ending | None:
    """Return how a process ended; None if it still runs after ``timeout`` seconds."""
    if process.check() is None and process.ending is None:
        select.select([process.open_descriptor()], (), (), timeout)
        process.check()
    return process.ending


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """Share one nursery among all that is forked in this block."""
    if Nursery.current is not None:
        yield Nursery.current
        return
    Nursery.current = mine = Nursery()
    try:
        yield mine
    finally:
        Nursery.current = None
        mine.close()


# -- in the nursery


class _Requests:
    """Forks on request until the other end is closed. A fork gets what it is to become."""

    def __init__(self, requests: socket.socket) -> None:
        self._socket = requests
        self._statuses: dict[int, int] = {}  # by process id, where to write
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> Callable[[], None]:
        """Return in a fork with what it is to become, and in the nursery at the end."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._woken in ready:
                self._reap()
            if self._socket.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST_REQUEST, 4)
                if not message:
                    return lambda: None
                become = self._fork(json.loads(message), descriptors)
                if become is not None:
                    return become

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Callable[[], None] | None:
        begun, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(begun)
            os.close(theirs)
            self._forget_the_nursery()
            os.close(descriptors.pop())
            if request["kind"] == "rank":
                return functools.partial(_become_a_rank, request, *descriptors)
            return functools.partial(_become_a_program, request, descriptors)
        os.close(theirs)
        os.read(begun, 1)  # until it has its group: a signal to that would not find it before
        os.close(begun)
        self._statuses[pid] = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        self._socket.send(str(pid).encode())
        return None

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                descriptor = self._statuses.pop(ended[0])
                with contextlib.suppress(BrokenPipeError):  # the test has ended
                    os.write(descriptor, str(ended[1]).encode())
                os.close(descriptor)

    def _forget_the_nursery(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._socket.close()
        for descriptor in (self._woken, self._wake, *self._statuses.values()):
            os.close(descriptor)


def _become_a_rank(request: dict[str, Any], pipe: int) -> None:
    import worlds

    os.environ["XDG_RUNTIME_DIR"] = request["folder"]
    if request["network"]:
        _enter(request["network"])
    worlds.serve_commands(multiprocessing.connection.Connection(pipe))


def _enter(network: str) -> None:
    with open(network) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def _become_a_program(request: dict[str, Any], streams: list[int]) -> None:
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
    os.closerange(3, max(streams[-1], 64) + 8)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    way, *rest = request["arguments"]
    if way == "-m":
        sys.argv = [way, *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif way == "-c":
        sys.argv = [way, *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [way, *rest]
        sys.path[0] = os.path.dirname(way)
        runpy.run_path(way, run_name="__main__")


def _import_all() -> None:
    import rankwire.cli
    import rankwire.launch.run
    import worlds

    assert rankwire.launch.run
    assert worlds


if __name__ == "__main__":
    _import_all()
    _Requests(socket.socket(fileno=int(sys.argv[1]))).serve()()
