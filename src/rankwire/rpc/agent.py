"""RpcAgent: call functions of other ranks by name, and serve them.

This module is what users see: serving and closing; registering is ``agent_functions``, calling
``agent_calls``. How a call is made is ``caller``, how one is served ``server``, what travels
``messages``. The agent knows ``Backend`` and ``CallPort``, and no concrete one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from numbers import Real
from typing import NamedTuple, Self

from rankwire.backends.arguments import check_pickle, check_rank
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, ConfigurationError, PeerLostError, RankwireError
from rankwire.fork import guard, invalidate
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc.agent_calls import AgentCalls
from rankwire.rpc.agent_functions import AgentFunctions
from rankwire.rpc.caller import Caller
from rankwire.rpc.registry import Registry
from rankwire.rpc.resolver import Resolve, Resolver
from rankwire.rpc.room import DEFAULT_QUEUED_NBYTES
from rankwire.rpc.server import Limits, Server
from rankwire.rpc.stopping import STOP, Stopping
from rankwire.shutdown import close_at_exit

MAX_DEPTH = 32
_EXIT_GRACE = 0.1  # seconds
_GRACE = 5.0


class Activity(NamedTuple):
    """What an agent has to do with other ranks at one moment.

    Attributes:
        in_flight: Calls that it has made, and that are not answered yet.
        in_service: Calls that it is asked to serve, and has not answered yet.
        steps: Grows by one with every call that it makes, and with every look at this.
    """

    in_flight: int
    in_service: int
    steps: int


class RpcAgent(AgentCalls, AgentFunctions):
    """Registers functions and calls them on any rank. Serves from construction on.

    Every method is safe from any thread. A call runs at most once; nothing is retried. Calls from
    one thread to one rank are delivered in order, and may finish in any order.

    As a context manager, it serves until the agents of its name on other ranks have left their
    blocks too, only serve (``serve``), or are lost; no time limit ends that. An exception or
    Ctrl-C closes it at once.

    Args:
        backend: Any backend; the agent does not close it.
        name: Agents of different names on one backend are independent; those of one name call each
            other.
        timeout: Seconds for calls without a limit of their own; None is the backend's.
        workers: Calls that run at once (nested ones apart).
        max_in_flight: Calls to one rank that wait for a reply; further ones wait, then fail with
            ``OverloadedError``. Threads that call at the same moment may pass it together.
        max_queued: Incoming calls that wait for a worker; further ones are refused.
        max_queued_nbytes: Bytes of incoming calls of more than 64 KiB that wait for a worker.
            Callers of further ones wait before they send them, until their deadline. One call of
            any size always has room, and each rank may have 8 MiB more in flight. Nested calls and
            those of ``async def`` functions do not wait for workers, so they do not count.
        max_nested: Calls made by functions being served here that run at once.
        codec: How values travel; register your dataclasses, enums and Structs on it.
        resolve: Finds functions that are not registered, by a rule of the program's. It is given
            the name and returns the function, or None if there is none; or it raises
            ``FunctionNotFoundError(name, reason=...)``, and the caller reads why. Another
            ``RankwireError`` reaches the caller as ``RemoteError``, and ``OverloadedError`` as it
            is; whatever else it raises is logged, and the caller gets ``FunctionNotFoundError``.
            Registered names come first. It is asked at every call, by the thread that polls: it
            must be quick, and must not call other ranks. Two calls of ``handle_request`` may ask at
            once. What it finds is let go after the call.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str = "rpc",
        timeout: float | None = None,
        workers: int = 16,
        max_in_flight: int = 1024,
        max_queued: int = 4096,
        max_queued_nbytes: float = DEFAULT_QUEUED_NBYTES,
        max_nested: int = 256,
        codec: Codec | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        _check_limits(workers, max_in_flight, max_queued, max_queued_nbytes, max_nested)
        self.backend = backend
        self._clock = backend.clock
        self.name = name
        service = _service_number(name)
        self.timeout = (
            backend.timeout if timeout is None else Deadline(timeout, backend.clock).limit
        )
        self.codec = codec if codec is not None else Codec()
        check_pickle(backend, self.codec.allows_pickle)
        self._registry = Registry(None if resolve is None else Resolver(resolve))
        self._closed = False
        self._stopping = Stopping(backend, lambda: self._closed)
        self._registry.own[STOP] = self._stopping.tell
        self._has_stopped: set[int] = set()  # ranks of the world that know of it
        self._close_lock = threading.RLock()  # a callback of closing may close
        self._port = backend.open_calls(service)
        self._server = Server(
            backend,
            self._port,
            self._registry,
            self.codec,
            Limits(workers, max_queued, max_queued_nbytes, max_nested, MAX_DEPTH),
            on_look=lambda: self._caller.look(),
            on_end=self._ended_by_itself,
        )
        self._caller = Caller(
            backend, self._port, self.codec, self._server, max_in_flight=max_in_flight
        )
        try:
            # Before serving: a call that comes meanwhile would not find what is registered next.
            self._port.presence.open()
        except BaseException:  # interrupted
            self._port.close()
            raise
        self._server.pool.start()
        guard(self, RpcAgent._close_in_child)
        close_at_exit(self, RpcAgent._leave_at_exit)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    # -- serving -----------------------------------------------------------------------------------

    def serve(self, *, until_lost: int | None = 0, timeout: float | None = None) -> bool:
        """Serve, and do nothing else, until it is time to stop.

        An agent serves from construction on; this waits for the end of that, which is whatever
        comes first: ``stop`` of any rank; SIGTERM, by which the launcher asks ranks to end (if this
        is called by the main thread, and the program does not handle it); the end of this agent or
        its backend; the end of the rank ``until_lost``; or all other ranks have left. Calls are
        served afterwards too, until ``close``. Ctrl-C raises ``KeyboardInterrupt`` as anywhere.

        Args:
            until_lost: The rank without which there is nothing to serve for; None if there is no
                such rank. On that rank itself it means nothing.
            timeout: Seconds to wait at most; None is for ever.

        Returns:
            True, or False if the time passed first; then it can be called again.

        Raises:
            PeerLostError: The rank ``until_lost`` has died. If it has left in good order, this
                returns.
        """
        deadline = Deadline(math.inf if timeout is None else timeout, self._clock)
        try:
            if until_lost is not None:
                until_lost = check_rank(until_lost, self.world_size)
            if self.stopped:
                return True
            with self._port.presence.serving():
                return self._stopping.wait(deadline, until_lost)
        except RankwireError as error:
            raise self.backend.explained(error, "serve", deadline, until_lost) from error.__cause__

    def stop(self, *ranks: int, timeout: float | None = None) -> None:
        """Have ``serve`` of some ranks return; of all, this one too, if none is given.

        It is for good, and counts for a rank that does not serve yet. Returns when all of them know
        of it; ranks that have left or are lost need not. An agent of the same name that is still to
        be made there is waited for.

        Args:
            *ranks: Which ranks.
            timeout: Seconds for all of it; None is the agent's.

        Raises:
            ChannelClosedError: This agent is closed.
            DeadlineExceededError: A rank did not answer in time. The others know of it.
        """
        deadline = Deadline.of(timeout, self.timeout, self._clock)
        told = {check_rank(rank, self.world_size) for rank in ranks or range(self.world_size)}
        if self.rank in told:
            self._stopping.tell()
        try:
            if self._closed:
                raise ChannelClosedError("this agent is closed")
            answers = {
                rank: self._caller.start(rank, STOP, deadline, None, (), {})
                for rank in sorted(told - {self.rank})
            }
            errors = {rank: answer.exception() for rank, answer in answers.items()}
            know = (rank for rank, error in errors.items() if error is None)
            self._has_stopped.update(map(self.backend.world_rank_of, know))
            for error in errors.values():
                if error is not None and not isinstance(error, (PeerLostError, ChannelClosedError)):
                    raise error
        except RankwireError as error:
            error.op = "stop"
            raise

    @property
    def stopped(self) -> bool:
        """Whether this rank was told to stop serving: ``serve`` returns at once from then on."""
        return self._stopping.is_told

    def handle_request(self, call: IncomingCall) -> None:
        """Serve one request on the calling thread and send the reply.

        The serving threads do this by themselves. If the function returns a future, the reply is
        sent when that is done.

        Args:
            call: As a port has given it. One whose ``origin`` is ``OWN`` is a call to oneself.

        Raises:
            ConfigurationError: It does not say where the reply goes.
        """
        if call.origin is None:
            raise ConfigurationError("an incoming call says where its reply goes (origin)")
        self._server.handle(call)

    # -- ending ------------------------------------------------------------------------------------

    def activity(self) -> Activity:
        """Return what is under way here.

        If no agent of a world has a call in flight or in service, and at a second look none has and
        ``steps`` says that none was made meanwhile, then nothing is on its way either.
        """
        in_flight, count = self._caller.activity()
        return Activity(in_flight, len(self._server.active), count)

    def close(self, grace: float = _GRACE) -> None:
        """Stop.

        New calls are refused; running ones, in both directions, have ``grace`` seconds to finish;
        the rest fails. Idempotent.
        """
        self._close(grace)

    def _close(self, grace: float, patience: float | None = None) -> None:
        with self._close_lock:
            if self._closed:
                return
            deadline = Deadline(grace, self._clock)
            self._closed = self._caller.closed = True
            self._server.drain(deadline, lambda: not self._caller.is_waiting)
            try:
                self._server.stop(patience, quietly=grace <= 0.0)
            finally:
                self._port.close()
                self._caller.end_all()

    def _leave_at_exit(self, error: BaseException | None) -> None:
        """Close when the interpreter ends. Functions that still run are not waited for.

        After an error the backend tells the others, and ends this agent too: a farewell would come
        before the reason.
        """
        if error is None:
            self._close(_EXIT_GRACE, _EXIT_GRACE)

    def _close_in_child(self) -> None:
        """Let a forked child refuse to use it."""
        self._caller.close_in_child()
        invalidate(self)

    def _ended_by_itself(self) -> None:
        """The backend is closed, or this rank was given up, and nobody has closed this agent."""
        self._server.end(patience=0.0)
        self._port.close()
        self._caller.end_all()

    def _serve_until_all_leave(self) -> None:
        """Serve until no other agent of this name is in use, or the launcher asks this rank to end.

        An interrupt ends it at once.
        """
        if self._closed or self._stopping.is_asked:
            return
        try:
            self._port.presence.leave(self._has_stopped)
        except BaseException:
            self.close(grace=0.0)
            raise

    def __enter__(self) -> Self:
        self._port.presence.open()  # if another thread uses it now than the one that made it
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._serve_until_all_leave()
        # By an error: others are told soon, and should not wait for calls that run here.
        self.close(grace=_GRACE if error is None else 0.0)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._port.in_flight()} calls in flight"
        return (
            f"<RpcAgent {self.name!r} on rank {self.rank} of {self.world_size}, "
            f"{len(self.functions())} functions, {state}>"
        )


def _check_limits(*limits: float) -> None:
    if not all(isinstance(limit, Real) and limit >= 1 for limit in limits):
        raise ConfigurationError("workers and limits are numbers, 1 or more")


def _service_number(name: str) -> int:
    """Return the number by which agents of one name find each other.

    Raises:
        ConfigurationError: The name is no text, or none that can be encoded.
    """
    try:
        encoded = str.encode(name)
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigurationError(f"an agent's name is text, not {name!r}: {error}") from error
    return int.from_bytes(hashlib.sha256(b"rankwire agent " + encoded).digest()[:8], "little")
