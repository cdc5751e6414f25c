"""``Agent``: register functions, call those of other ranks by name, serve, and close."""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Self

from rankwire import runtime
from rankwire.backends.arguments import check_pickle, check_rank, check_ranks
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, ConfigurationError, PeerLostError, RankwireError
from rankwire.finalizers import close_at_exit
from rankwire.fork import guard, invalidate
from rankwire.mesh.calls import IncomingCall
from rankwire.rpc.agent_functions import AgentFunctions
from rankwire.rpc.agent_streams import AgentStreams
from rankwire.rpc.argument_streams import ITEMS
from rankwire.rpc.caller import Caller
from rankwire.rpc.pool import Limits
from rankwire.rpc.registry import Function, Registry, Resolve, Resolver, Vary
from rankwire.rpc.reservations import DEFAULT_QUEUED_NBYTES
from rankwire.rpc.server import Server

STOP = "\0stop"  # a request that the polling thread answers; no function can have this name

_EXIT_GRACE = 0.1  # seconds
_GRACE = 5.0
_RETURN_WITHIN = 60.0  # seconds; a launcher waits up to 30 before it restarts a rank
_CHECK_EVERY = 0.1  # seconds, to notice other ranks and signals; a stop wakes at once


class Activity(NamedTuple):
    """The calls of an agent at one moment."""

    in_flight: int  # calls that it has made and that have no reply yet
    in_service: int  # calls that it serves and has not answered yet
    steps: int  # grows by one with every call that it makes, and every time this is read


class Agent(AgentStreams, AgentFunctions):
    """What calls and serves; described at ``services.rpc_agent.RpcAgent``."""

    _variants: ClassVar[Mapping[str, Vary]] = {}  # of all served functions, by their names

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
        serve: Mapping[str, Any] | None = None,
    ) -> None:
        limits = (workers, max_in_flight, max_queued, max_queued_nbytes, max_nested)
        if not all(isinstance(limit, Real) and limit >= 1 for limit in limits):
            raise ConfigurationError(
                "workers and the limits of an agent must be numbers of at least 1"
            )
        self.backend = backend
        self._clock = backend.clock
        self.name = name
        service = _service_number(name)
        self.timeout = Deadline.of(timeout, backend.timeout, backend.clock).limit
        self.codec = codec if codec is not None else Codec()
        check_pickle(backend, self.codec.allows_pickle)
        self._registry = Registry(None if resolve is None else Resolver(resolve))
        self._registry.serve({} if serve is None else serve)
        self._stop_signal = StopSignal(backend, lambda: self._caller.closed)
        self._registry.own[STOP] = self._stop_signal.tell
        self._has_stopped: set[int] = set()  # world ranks that have confirmed our ``stop``
        self._close_lock = runtime.RLock()  # a callback that runs during close may close
        self._port = backend.open_calls(service)
        self._server = Server(
            backend,
            self._port,
            self._registry,
            self.codec,
            Limits(workers, max_queued, max_nested),
            max_queued_nbytes,
            variants=self._variants,
            on_check=lambda: self._caller.futures.check(),
            on_end=self._ended_by_itself,
        )
        self._caller = Caller(
            backend, self._port, self.codec, self._server, max_in_flight=max_in_flight
        )
        self._server.items_of = self._items_of
        self._registry.own[ITEMS] = Function(ITEMS, self._caller.offered.take)
        self._begin_services()
        try:
            # Before serving, so that a call that arrives now finds the functions registered next.
            self._port.presence.open()
        except BaseException:  # interrupted
            self._port.close()
            raise
        self._server.pool.start()
        guard(self, Agent._close_in_child)
        close_at_exit(self, Agent._leave_at_exit)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    # -- serving -----------------------------------------------------------------------------------

    def serve(self, *, until_lost: int | str | None = 0, timeout: float | None = None) -> bool:
        """Serve calls until a rank calls ``stop``, or the ranks to serve are gone.

        This returns at the first of these events: ``stop`` on any rank; SIGTERM, with which the
        launcher asks ranks to end (if the main thread calls this and the program does not handle
        it); the end of this agent or its backend; the end of the rank ``until_lost``; or the end of
        all other ranks. Calls are served from construction until ``close``. Ctrl-C raises
        ``KeyboardInterrupt``.

        Args:
            until_lost: The rank whose end ends serving, or its name, or None. It has no effect on
                that rank itself.
            timeout: Seconds to wait; None is no limit.

        Returns:
            True, or False if the timeout passed first; then you can call it again.

        Raises:
            PeerLostError: The rank ``until_lost`` is lost. If it closed its backend, this returns.
        """
        deadline = Deadline(math.inf if timeout is None else timeout, self._clock)
        try:
            if until_lost is not None:
                until_lost = check_rank(until_lost, self.world_size, self.backend.roles)
            if self.stopped:
                return True
            with self._port.presence.serving():
                return self._stop_signal.wait(deadline, until_lost)
        except RankwireError as error:
            peer = None if isinstance(until_lost, str) else until_lost
            raise self.backend.explained(error, "serve", deadline, peer) from error.__cause__

    def stop(self, *ranks: int | str, timeout: float | None = None) -> None:
        """Make ``serve`` return on some ranks; without arguments on all, this one included.

        Names of ranks and roles may stand for ranks. The effect is permanent, also on a rank that
        does not serve yet. This waits, ``timeout`` seconds at most, until these ranks have made
        their agent of this name and confirmed. Ranks that have left or are lost are skipped.

        Raises:
            ChannelClosedError: This agent is closed.
            DeadlineExceededError: A rank did not answer in time. The other ranks stop.
        """
        deadline = Deadline.of(timeout, self.timeout, self._clock)
        told = {*check_ranks(ranks or None, self.world_size, self.backend.roles)}
        if self.rank in told:
            self._stop_signal.tell()
        try:
            if self._caller.closed:
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
        """Whether a rank has called ``stop`` for this one; then ``serve`` returns at once."""
        return self._stop_signal.is_told

    def handle_request(self, call: IncomingCall) -> None:
        """Serve one request on the calling thread and send the reply, as serving threads do.

        If the function returns a future, the reply is sent when that is done. A call whose
        ``origin`` is ``OWN`` came from this rank.

        Raises:
            ConfigurationError: The call has no ``origin``, so there is no place to reply to.
        """
        if call.origin is None:
            raise ConfigurationError("an incoming call needs an origin, to which the reply is sent")
        self._server.handle(call)

    # -- ending ------------------------------------------------------------------------------------

    def _begin_services(self) -> None:
        """Register what services serve, before this agent serves."""

    def _end_services(self) -> None:
        """End the waits that services have here and elsewhere, before this agent closes."""

    def activity(self) -> Activity:
        """Return how many calls this agent has in flight and in service.

        If no agent of a world has any in two readings, and ``steps`` shows that none was made in
        between, then no message is on its way either.
        """
        in_flight, count = self._caller.activity()
        return Activity(in_flight, len(self._server.active), count)

    def close(self, grace: float = _GRACE) -> None:
        """Refuse new calls, give running ones ``grace`` seconds, and close. Idempotent.

        Calls in both directions that take longer fail.
        """
        self._close(grace)

    def _close(self, grace: float, patience: float | None = None) -> None:
        with self._close_lock:
            if self._caller.closed:
                return
            self._end_services()
            deadline = Deadline(grace, self._clock)
            self._caller.closed = True
            self._server.drain(deadline, lambda: not self._caller.activity()[0])
            try:
                self._server.stop(patience, quietly=grace <= 0.0)
            finally:
                self._port.close()
                self._caller.futures.fail_all()

    def _leave_at_exit(self, error: BaseException | None) -> None:
        # After an error the backend notifies the other ranks, and ends this agent too.
        if error is None:
            self._close(_EXIT_GRACE, _EXIT_GRACE)

    def _close_in_child(self) -> None:
        for mine in (*self._caller.futures.pending.values(), self):
            invalidate(mine)

    def _ended_by_itself(self) -> None:
        self._caller.ended = True
        self._server.end(patience=0.0)
        self._port.close()
        self._caller.futures.fail_all()

    def _serve_until_all_leave(self) -> None:
        if self._caller.closed or self._stop_signal.is_asked:
            return
        try:
            self._port.presence.leave(self._has_stopped)
        except BaseException:
            self.close(grace=0.0)
            raise

    def __enter__(self) -> Self:
        self._port.presence.open()  # the calling thread may not be the one that made the agent
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._serve_until_all_leave()
        # After an error other ranks should learn of it soon, and not wait for calls that run here.
        self.close(grace=_GRACE if error is None else 0.0)

    def __repr__(self) -> str:
        state = "closed" if self._caller.closed else f"{self._port.in_flight()} calls in flight"
        return (
            f"<RpcAgent {self.name!r} on rank {self.rank} of {self.world_size}, "
            f"{len(self.functions())} functions, {state}>"
        )


class StopSignal:
    """Whether an agent must stop serving; permanent. Every method is safe from any thread.

    The signal handler only sets a flag: it may run while the main thread holds the event's lock.
    """

    def __init__(self, backend: Backend, is_closed: Callable[[], bool]) -> None:
        self._backend = backend
        self._is_closed = is_closed
        self._told = runtime.Event()
        self.is_asked = False  # by the launcher
        self._alone: Deadline | None = None  # for lost ranks to return

    @property
    def is_told(self) -> bool:
        """Whether a rank or the launcher has asked this rank to stop."""
        return self.is_asked or self._told.is_set()

    def tell(self) -> None:
        """Stop serving, permanently."""
        self._told.set()

    def wait(self, deadline: Deadline, watched: int | None) -> bool:
        """Wait until serving ends; return False if the deadline passes first.

        The end of the rank ``watched`` ends serving. Raises if that rank, or every other, is lost.
        """
        with self._sigterm_noted():
            while not self._is_over(watched):
                if deadline.expired:
                    return False
                patience = min(_CHECK_EVERY, deadline.sleep_limit())
                self._backend.clock.wait(self._told, patience)
                self._backend.mesh.lookout.read()
            return True

    def _is_over(self, watched: int | None) -> bool:
        backend = self._backend
        if self.is_told or self._is_closed() or backend.closed:
            return True
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        failures = {rank: backend.failure_of(rank) for rank in others}
        failure = None if watched is None else failures.get(watched)
        if failure is not None:
            if isinstance(failure, ChannelClosedError):
                return True
            raise failure.copy()
        if not others or None in failures.values():
            self._alone = None
            return False
        return self._all_have_left([each for each in failures.values() if each is not None])

    def _all_have_left(self, failures: Iterable[RankwireError]) -> bool:
        backend = self._backend
        lost = [each for each in failures if not isinstance(each, ChannelClosedError)]
        if not lost:
            return True
        # No rank is left to serve; but if a launcher restarts ranks, they may return.
        if self._alone is None:
            patience = _RETURN_WITHIN if backend.mesh.ranks_return else 0.0
            self._alone = Deadline(patience, backend.clock)
        if self._alone.expired:
            raise lost[0].copy()
        return False

    @contextmanager
    def _sigterm_noted(self) -> Iterator[None]:
        is_main = runtime.current_thread() is runtime.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.is_asked = True

        try:
            signal.signal(signal.SIGTERM, note)
            yield
        finally:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            finally:  # an interrupt may have ended the first
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _service_number(name: str) -> int:
    try:
        encoded = str.encode(name)
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"the name of an agent must be text, not {name!r}: {error}"
        ) from error
    return int.from_bytes(hashlib.sha256(b"rankwire agent " + encoded).digest()[:8], "little")
