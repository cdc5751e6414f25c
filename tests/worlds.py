"""Worlds for tests: ranks in threads of this process, ranks in processes of their own, raw peers.

Nothing here outlives its ``with`` block: threads are joined, backends closed, processes reaped.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import select  # noqa: F401  (for what tests evaluate in a rank process)
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nursery import Nursery, nursery, wait
from rankwire.backends.tcp import TcpBackend
from rankwire.links.connection import Connection
from rankwire.links.dialer import authenticate
from rankwire.rendezvous.coordinator import Coordinator
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp
from rankwire.transports.unix_stream import connect_unix
from rankwire.wire.handshake import Purpose
from real_time import Deadline

SECRET = b"a secret that only these tests know"
LEND_FROM = 256 << 10  # bytes; for tests, also in rank processes
_CHANCE = random.SystemRandom()  # tests seed the other one, and would all draw the same
_NEVER_GIVEN = range(10_000, 20_000)  # ports, below those for outgoing connections
PATIENCE = 20.0  # seconds until a test gives up on what should take milliseconds


class Running:
    """A function that runs in a thread of its own.

    ``started`` and ``ended`` are points in monotonic time.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.started = self.ended = 0.0
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            self.started = time.monotonic()
            try:
                self._value = function(*args, **kwargs)
            except BaseException as error:
                self._error = error
            finally:
                self.ended = time.monotonic()

        self._thread = threading.Thread(target=run, name="test", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def result(self, timeout: float = PATIENCE) -> Any:
        """Return the function's value, or raise its error."""
        self._join(timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def error(self, timeout: float = PATIENCE) -> BaseException:
        """Return the error that the function must have raised."""
        self._join(timeout)
        assert self._error is not None, f"no error but the value {self._value!r}"
        return self._error

    def _join(self, timeout: float) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"still blocked after {timeout} s"


def noting(causes: list) -> Callable[[Any], Any]:
    """Return an ``on_lost`` of a connection that notes the causes and lets them stand."""

    def note(cause: Any) -> Any:
        causes.append(cause)
        return cause

    return note


def eventually(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Return ``condition()`` as soon as it is true."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.001)
    return value


@contextlib.contextmanager
def runtime_folder_of_its_own() -> Iterator[Path]:
    """Give this process, and those it starts, an empty runtime folder.

    A short path: socket files have at most 107 characters.
    """
    base = tempfile.mkdtemp(prefix="rw", dir="/tmp")
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = base
    try:
        yield Path(base, "rankwire")
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(base)


def bound_socket(host: str = "127.0.0.1") -> socket.socket:
    """Return a socket for rank 0: its port is known, and nobody else can take it.

    It does not listen yet, so that ranks which start first are refused, as with a port of rank 0's
    own choice.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.bind((host, 0))
    # As the backend's own: connections that have ended must not keep the port from being taken
    # again. After binding, so that nobody shares it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- ranks in threads


@contextlib.contextmanager
def tcp_world(world_size: int, *, host: str = "127.0.0.1", **options: Any) -> Iterator[list]:
    """All ranks of a world in this process; ``tls`` has the files of each rank."""
    files = options.pop("tls", None)
    listener = bound_socket(host)
    address = address_of(listener)
    joining = [
        Running(
            TcpBackend,
            rank,
            world_size,
            address,
            listener=listener if rank == 0 else None,
            tls=None if files is None else files[rank],
            **{"join_timeout": PATIENCE, "timeout": PATIENCE, **options},
        )
        for rank in range(world_size)
    ]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(rank.result(2 * PATIENCE)) for rank in joining]


def raw_peer(
    impostor: TcpBackend, victim: TcpBackend, *, unix: bool = False, purpose: Any = Purpose.MESSAGES
) -> socket.socket:
    """Return an authenticated connection from one rank to another, to send anything on.

    The impostor must not have sent a message to the victim. The socket is blocking.
    """
    member = impostor.mesh.peers[victim.rank].member
    deadline = Deadline(PATIENCE)
    if unix:
        sock = connect_unix(member.unix_path, deadline)
    else:
        sock = connect_tcp(TcpAddress(member.host, member.port), deadline)
    try:
        hello = impostor.mesh.formation.hello(purpose, victim.rank)
        key = impostor.mesh.formation.keys.shared[victim.rank]
        authenticate(sock, hello, key=key, deadline=deadline)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(True)
    sock.settimeout(PATIENCE)
    return sock


@contextlib.contextmanager
def deaf(backend: TcpBackend) -> Iterator[None]:
    """Keep a rank from answering the door."""
    awake = threading.Event()
    asleep = threading.Event()
    backend.mesh.formation.acceptor.call_soon(lambda: (asleep.set(), awake.wait(PATIENCE)))
    assert asleep.wait(PATIENCE)
    try:
        yield
    finally:
        awake.set()


def greet_all(backend: Any, tag: int = (1 << 63) - 1) -> None:
    """Send something to every other rank, and receive what they send."""
    others = [rank for rank in range(backend.world_size) if rank != backend.rank]
    for rank in others:
        backend.send(b"", rank, tag)
    for rank in others:
        backend.recv(rank, tag)


def introduce(*ranks: "RankProcess", timeout: float = PATIENCE) -> None:
    """Have every rank connected to every other."""
    for greeting in [rank.start("eval", "greet_all(backend)") for rank in ranks]:
        greeting.result(timeout)


def until_in_a_barrier(rank: "RankProcess") -> None:
    """Wait until a rank is in a barrier."""
    eventually(lambda: rank.call("eval", "backend.status().operation") == "barrier()")


def joined_ranks() -> set[int]:
    """Return the ranks that have joined the world that is forming around this process's rank 0.

    Its constructor has not returned, so there is no other way to its coordinator.
    """
    return {
        rank
        for thing in gc.get_objects()
        if type(thing) is Coordinator and hasattr(thing, "_changed")  # else it is being made
        if thing._state.name == "FORMING"
        for rank in list(thing._roster.members)  # in one step: others join meanwhile
    }


# -- ranks in processes


class RankProcess:
    """A process that does what it is told: each command in a thread of its own.

    A command is a method of its backend, or ``"form"`` (construct the backend), or ``"eval"``
    (with ``backend`` and this module's names).
    """

    def __init__(self, rank: int, nursery: Nursery, *, network: str = "") -> None:
        self.rank = rank
        self._pipe, theirs = multiprocessing.Pipe()
        self._commands = 0
        self._answers: dict[int, tuple[Any, BaseException | None, float]] = {}
        with theirs:
            self._process = nursery.fork_rank(theirs, network)
        self.pid = self._process.pid

    def start(self, method: str, *args: Any, **kwargs: Any) -> "Command":
        """Begin a command; it may block there."""
        self._commands += 1
        self._pipe.send((self._commands, method, args, kwargs))
        return Command(self, self._commands)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a command to its end."""
        return self.start(method, *args, **kwargs).result()

    def form(self, world_size: int, address: str, **options: Any) -> "Command":
        """Begin to construct its backend."""
        options = {"join_timeout": PATIENCE, "timeout": PATIENCE, **options}
        return self.start("form", self.rank, world_size, address, **options)

    def signal(self, number: int) -> float:
        """Send a signal; return when that was."""
        self._process.send(number)
        return time.monotonic()

    def stop(self) -> float:
        """Stop it, and return when that was, once all its threads stand still."""
        now = self.signal(signal.SIGSTOP)
        eventually(lambda: state_of(self.pid) == "T")
        return now

    def kill(self) -> float:
        """Kill it, and return when that was, once it is dead."""
        now = self.signal(signal.SIGKILL)
        self.wait()
        return now

    def wait(self) -> None:
        """Wait until it has ended."""
        assert wait(self._process, PATIENCE), f"process {self.pid} does not end"

    def answer(self, number: int, timeout: float) -> tuple[Any, BaseException | None, float]:
        end = time.monotonic() + timeout
        while number not in self._answers:
            left = max(0.0, end - time.monotonic())
            assert self._pipe.poll(left), f"rank {self.rank} is still busy after {timeout} s"
            answered, *answer = self._pipe.recv()
            self._answers[answered] = tuple(answer)
        return self._answers[number]

    def close(self) -> None:
        self._process.close()
        self._pipe.close()


class Command:
    """A command that a rank process was given."""

    def __init__(self, process: RankProcess, number: int) -> None:
        self._process = process
        self._number = number

    def result(self, timeout: float = PATIENCE) -> Any:
        value, error, _ = self._process.answer(self._number, timeout)
        if error is not None:
            raise error
        return value

    def error(self, timeout: float = PATIENCE) -> BaseException:
        value, error, _ = self._process.answer(self._number, timeout)
        assert error is not None, f"no error but the value {value!r}"
        return error

    @property
    def ended(self) -> float:
        """When it ended, in the monotonic time that all processes of a host share."""
        return self._process.answer(self._number, PATIENCE)[2]


@contextlib.contextmanager
def spawn_ranks(world_size: int) -> Iterator[list[RankProcess]]:
    """Processes that have not formed a world yet."""
    with nursery() as shared, contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(RankProcess(rank, shared)))
            for rank in range(world_size)
        ]


def state_of(pid: int) -> str:
    """Return the letter that Linux has for what all threads of a process do; or an empty text."""
    states = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states.pop() if len(states) == 1 else ""


def free_port() -> int:
    """Return a port that nobody has, nor gets by chance before it is used.

    One of the system's choice might be given to an outgoing connection of a test beside this one.
    """
    while True:
        port = _CHANCE.choice(_NEVER_GIVEN)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def process_world(world_size: int, **options: Any) -> Iterator[list[RankProcess]]:
    """A world of processes."""
    with spawn_ranks(world_size) as ranks:
        address = f"127.0.0.1:{free_port()}"
        forming = [rank.form(world_size, address, **options) for rank in ranks]
        for rank in forming:
            rank.result()
        yield ranks


def limit_descriptors(spare: int) -> None:
    """Leave this process so many more descriptors to open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 0  # the system limits the number of a new descriptor, and those in use have gaps
    while spare or _is_open(limit):
        spare -= not _is_open(limit)
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def serve_commands(pipe: multiprocessing.connection.Connection) -> None:
    """In a fork of the nursery, do what the pipe says until its other end is closed."""
    Connection.lend_from = LEND_FROM
    names: dict[str, Any] = {**globals(), "backend": None}
    lock = threading.Lock()

    def run(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value, error = None, None
        try:
            if method == "form":
                names["backend"] = TcpBackend(*args, **kwargs)
            elif method == "eval":
                value = eval(args[0], names, kwargs)
            else:
                value = getattr(names["backend"], method)(*args, **kwargs)
        except BaseException as raised:
            error = raised
        ended = time.monotonic()
        with lock:
            pipe.send((number, value, error, ended))

    with contextlib.suppress(EOFError):
        while True:
            threading.Thread(target=run, args=pipe.recv(), daemon=True).start()
    os._exit(0)
