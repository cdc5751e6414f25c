"""The called rank of the tests of short calls: an agent whose functions note what they do.

It lives in a thread of the test's process or in a process of its own, where it is the caller's only
peer; tests talk to it in the same words (``pair``).
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from rankwire import RpcAgent, SimulatedBackend, current_call
from rankwire.backends.tcp import TcpBackend
from worlds import PATIENCE, RankProcess, address_of, eventually, nursery

SOON = 8.0  # seconds for what takes milliseconds, also on a busy machine

WORLDS = ("unix", "tcp", "simulated")


class Callee:
    """Rank 1. Its functions are what ``_FUNCTIONS`` says; the other methods are for the test."""

    _FUNCTIONS = (
        "echo", "note", "meet", "nap", "hold", "watch", "wait_for", "outer", "ask", "fail", "leave",
        "unsendable", "defer", "settle",
    )  # fmt: skip

    def __init__(self, backend: Any, **limits: Any) -> None:
        self.agent = RpcAgent(backend, **limits)
        self._lock = threading.Lock()
        self._running = self._most = self._held = 0
        self._notes: list[Any] = []
        self._cancelled: list[Any] = []
        self._released = threading.Event()
        self._gates: dict[int, threading.Event] = {}
        self._barriers: dict[int, threading.Barrier] = {}
        self._own: list[Any] = []
        self._deferred: dict[Any, Future[Any]] = {}
        for name in self._FUNCTIONS:
            self.agent.register(name, getattr(self, f"_{name}"))

    # -- for the test ------------------------------------------------------------------------------

    def notes(self) -> list[Any]:
        """Return what was noted, in order."""
        return list(self._notes)

    def cancelled(self) -> list[Any]:
        """Return which of ``watch`` saw that they were cancelled."""
        return list(self._cancelled)

    def most(self) -> int:
        """Return how many functions ran at once at most."""
        return self._most

    def wait_until_held(self, count: int) -> None:
        """Wait until so many calls of ``hold`` run."""
        eventually(lambda: self._held >= count)

    def release(self) -> None:
        """Let all calls of ``hold`` end, and forget how many there were."""
        self._released.set()
        eventually(lambda: not self._held)
        self._released.clear()

    def waiting(self) -> list[Any]:
        """Return the first arguments of the calls that wait for a worker and may still run.

        One that is late at its caller is late here only later, or once this rank has been told.
        """
        queued = self.agent._server.pool.queue.jobs()
        return [
            call._request.args[0]
            for call in queued
            if not (call.cancelled or call.deadline.expired)
        ]

    def open(self, gate: int) -> None:
        """Let ``wait_for(gate)`` end."""
        self._gate(gate).set()

    def deferred(self) -> list[Any]:
        """Return the names of the calls of ``defer`` whose futures are not done."""
        return [name for name, future in list(self._deferred.items()) if not future.done()]

    def abandoned(self) -> list[Any]:
        """Return the names of the calls of ``defer`` whose futures were cancelled."""
        return [name for name, future in list(self._deferred.items()) if future.cancelled()]

    def call_itself(self, name: str, *args: Any) -> None:
        """Call a function of this very rank."""
        self._own.append(self.agent.rpc_async(self.agent.rank, name, *args))

    def own_results(self) -> list[Any]:
        """Return what ``call_itself`` got."""
        return [future.result(PATIENCE) for future in self._own]

    def close(self) -> None:
        """Close the agent, whatever still runs."""
        self._released.set()
        for gate in list(self._gates.values()):
            gate.set()
        self.agent.close(grace=0.0)

    # -- its functions -----------------------------------------------------------------------------

    def _echo(self, value: Any) -> Any:
        return value

    def _note(self, value: Any) -> Any:
        self._notes.append(value)
        return value

    def _meet(self, count: int) -> int:
        """Wait for so many calls of this that run at once."""
        with self._lock:
            barrier = self._barriers.setdefault(count, threading.Barrier(count))
        return count if barrier.wait(PATIENCE) is not None else 0

    def _nap(self, seconds: float) -> None:
        """Run for a while, and be counted."""
        with self._lock:
            self._running += 1
            self._most = max(self._most, self._running)
        try:
            if seconds:
                time.sleep(seconds)
        finally:
            with self._lock:
                self._running -= 1

    def _hold(self) -> str:
        with self._lock:
            self._held += 1
        try:
            return "released" if self._released.wait(PATIENCE) else "forgotten"
        finally:
            with self._lock:
                self._held -= 1

    def _watch(self, name: Any, seconds: float = SOON, flag: str | None = None) -> str:
        """Look whether the call was cancelled; first make a file that says that this has begun."""
        call = current_call()
        self._notes.append(name)
        if flag is not None:
            Path(flag).touch()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if call.cancelled:
                self._cancelled.append(name)
                return "cancelled"
            time.sleep(0.0005)
        return "not cancelled"

    def _wait_for(self, gate: int) -> int:
        return gate if self._gate(gate).wait(PATIENCE) else -1

    def _gate(self, number: int) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(number, threading.Event())

    def _outer(self, name: str, *args: Any) -> Any:
        """Call a function of the caller's."""
        return self.agent.rpc_sync(0, name, *args)

    def _ask(self, name: str) -> str:
        """Begin a call of the caller's, and go on whatever becomes of it."""
        self.agent.rpc_async(0, name)
        return self._hold()

    def _fail(self, value: Any) -> None:
        try:
            raise KeyError("the reason")
        except KeyError as error:
            raise ValueError(f"cannot take {value!r}") from error

    def _leave(self) -> None:
        raise SystemExit("a function that wants to end its process")

    def _defer(self, name: Any) -> Future[Any]:
        """Return a future that ``settle`` ends."""
        future: Future[Any] = Future()
        self._deferred[name] = future
        return future

    def _settle(self, value: Any) -> int:
        """End all futures of ``defer`` that wait; return how many those were."""
        waiting = self.deferred()
        for name in waiting:
            with contextlib.suppress(InvalidStateError):  # its caller has just cancelled it
                self._deferred[name].set_result(value)
        return len(waiting)

    def _unsendable(self) -> Any:
        return {"inside": threading.Lock()}


class _Remote:
    """A ``Callee`` in another process, to be talked to as if it were here."""

    def __init__(self, rank: Any, limits: dict[str, Any]) -> None:
        self.rank = rank
        rank.call(
            "eval",
            "globals().update(callee=__import__('rpc.callee').callee.Callee(backend, **limits))",
            limits=limits,
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.rank.call("eval", f"callee.{name}(*args)", args=args)


@contextlib.contextmanager
def world_of_two(transport: str, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Rank 0, which is here, and the process that is rank 1."""
    # It listens before the other one dials, which would have to try again.
    with nursery() as shared, socket.create_server(("127.0.0.1", 0)) as listener:
        with contextlib.closing(RankProcess(1, shared)) as far:
            address = address_of(listener)
            forming = far.form(2, address, transport=transport, **options)
            options = {"join_timeout": PATIENCE, "timeout": PATIENCE, **options}
            with TcpBackend(
                0, 2, address, transport=transport, listener=listener, **options
            ) as near:
                forming.result()
                yield near, far


@contextlib.contextmanager
def pair(
    world: str, *, max_in_flight: int = 1024, backend: dict[str, Any] | None = None, **limits: Any
) -> Iterator[tuple[RpcAgent, Any]]:
    """The agent of rank 0, which is here, and the ``Callee`` that is rank 1.

    Args:
        world: One of ``WORLDS``; the first two are of processes.
        max_in_flight: Of rank 0.
        backend: Options of both backends.
        **limits: Of the callee's agent.
    """
    if world == "simulated":
        near, far = SimulatedBackend.create_group(2, timeout=PATIENCE)
        with near, far:
            callee = Callee(far, **limits)
            with RpcAgent(near, max_in_flight=max_in_flight) as caller:
                try:
                    yield caller, callee
                finally:
                    callee.close()
        return
    with world_of_two(world, **(backend or {})) as (near, far):
        # Closed, not left: leaving would wait for the callee, which ends after the caller.
        with contextlib.closing(RpcAgent(near, max_in_flight=max_in_flight)) as caller:
            yield caller, _Remote(far, limits)


def in_flight(agent: RpcAgent) -> int:
    """Return how many calls of an agent wait for a reply, as it says."""
    return int(repr(agent).split(" calls in flight")[0].rsplit(", ", 1)[1])
