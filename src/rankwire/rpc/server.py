"""The serving side of an agent: requests become calls in service, or are refused at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    FunctionNotFoundError,
    InvalidMessageError,
    OverloadedError,
    RankwireError,
)
from rankwire.mesh.call_port import CallPort
from rankwire.mesh.calls import (
    CallCancelled,
    CallerGone,
    CreditGiven,
    IncomingCall,
    RepliesDue,
)
from rankwire.rpc.call import Call, describe_chain, serving
from rankwire.rpc.call_inquiries import ServedCalls
from rankwire.rpc.messages import (
    Outcome,
    Request,
    decode_request,
    describe_error,
    encode_result,
)
from rankwire.rpc.pool import Job, JobSource, Limits, Pool, Worker
from rankwire.rpc.registry import VARIANT, Function, Registry, Vary
from rankwire.rpc.replies import Replies
from rankwire.rpc.reservations import RESERVE, SMALL_NBYTES, Reservations, unpack_reservation
from rankwire.rpc.served_call import EventLoop, ServedCall
from rankwire.rpc.served_stream import ServedStream, ServedStreams
from rankwire.wire.frames import Message

if TYPE_CHECKING:
    from rankwire.rpc.stream import Stream

_log = logging.getLogger("rankwire")

_STOP_PATIENCE = 0.5
_STREAM_PATIENCE = 1.0  # seconds for suspended generators to end
MAX_DEPTH = 32  # of nested calls


class Server:
    """Serves the functions of a registry to other ranks and to this one."""

    def __init__(
        self,
        backend: Backend,
        port: CallPort,
        registry: Registry,
        codec: Codec,
        limits: Limits,
        max_queued_nbytes: float,
        *,
        variants: Mapping[str, Vary],
        on_check: Callable[[], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._backend = backend
        self.clock = backend.clock
        self.port = port
        self.registry = registry
        self._codec = codec
        self._variants = variants
        self._draining = False
        self.is_stopping = False  # running calls are being cancelled
        self.items_of: Callable[[Call, int, tuple[int, int]], Stream[Any]]  # set by the agent

        def check() -> bool:
            return (
                self.replies.deferred.check()
                | self.streams.check()
                | port.flush_held()
                | on_check()
            )

        self.pool = Pool(JobSource(self._poll, port.wake, check, on_end), limits, backend.clock)
        self.active = ServedCalls(backend.world, backend.rank, limits.workers, self.pool.queue)
        self.reservations = Reservations(max_queued_nbytes, limits.max_queued)
        self.replies = Replies(
            backend,
            port,
            codec,
            names=registry.names,
            run_soon=self.run_soon,
            expect_work=self.pool.expect_work,
        )
        self.streams = ServedStreams(backend.clock, self.run_soon, self.pool.expect_work)
        self.event_loop = EventLoop(backend.clock)
        port.describe = self.active.describe

    # -- requests ----------------------------------------------------------------------------------

    def _poll(self) -> list[Job]:
        jobs: list[Job] = []
        for event in self.port.poll():
            if event.__class__ is IncomingCall:
                try:
                    job = self._accept(event)
                except Exception as error:  # a defect must not lose the other calls of this poll
                    _log.exception("a call from rank %d could not be accepted", event.src)
                    self._refuse(event, self.replies.error(error))
                    continue
                if job is not None:
                    jobs.append(job)
            elif isinstance(event, CreditGiven):
                stream = self.active.get((event.src, event.request_id))
                if isinstance(stream, ServedStream) and stream.grant(event.credit):
                    jobs.append(stream)
            elif isinstance(event, CallCancelled):
                self._cancel(event)
            elif isinstance(event, CallerGone):
                self._caller_gone(event)
            elif isinstance(event, RepliesDue):
                jobs.append(_Errand(event.call_back))
        return jobs

    def handle(self, call: IncomingCall) -> None:
        """Serve one request on the calling thread."""
        job = self._accept(call)
        if job is not None:
            job.run(None)

    def _accept(self, call: IncomingCall) -> ServedCall | None:
        try:
            request = decode_request(self._codec, call.payload, call.src)
        except InvalidMessageError as error:
            self._refuse(call, self.replies.refusal(Outcome.BAD_REQUEST, error.message))
            return None
        function = self.registry.functions.get(request.name)
        is_large = len(call.payload) > SMALL_NBYTES
        is_special = self._draining or request.chain or is_large or call.is_stream
        if function is not None and not is_special:
            return ServedCall(self, call, request, function)
        refusal: Message | None = None
        if function is None or self._draining:
            function, refusal = self._answer_or_resolve(call, request, function)
        if function is not None:
            refusal = self._beyond_limits(call, request, is_large)
            if refusal is None and not call.is_stream:
                job = ServedCall(self, call, request, function)
                if not function.needs_worker:
                    job.depth = max(job.depth, 1)
                return job
            if refusal is None:
                ServedStream(self, call, request, function)  # a grant has it begin
                return None
        self._refuse(call, refusal)
        return None

    def _refuse(self, call: IncomingCall, reply: Message | None) -> None:
        if (call.src, call.request_id) not in self.active:  # its id is not in use
            self.reservations.release(call.src, call.request_id)
        if reply is not None:
            self.replies.send_at_once(call, reply)

    def _answer_or_resolve(
        self, call: IncomingCall, request: Request, function: Function | None
    ) -> tuple[Function | None, Message | None]:
        if self._draining:
            return None, self.replies.closed(began=False)
        if request.name == RESERVE:
            return None, self._reserve(call, request)
        own = self.registry.own.get(request.name)
        if isinstance(own, Function):
            return own, None
        if own is not None:
            own()
            return None, encode_result(self._codec, None)
        if VARIANT in request.name:
            return self._find_variant(request)
        return self.resolve(request.name)

    def _find_variant(self, request: Request) -> tuple[Function | None, Message | None]:
        request.name, _, variant = request.name.partition(VARIANT)  # as a call in service is shown
        function, refusal = self.registry.functions.get(request.name), None
        if function is None:
            function, refusal = self.resolve(request.name)
        if function is None:
            return None, refusal
        make = self._variants.get(variant)
        if make is None:
            return None, self.replies.not_found(request.name, f"it has no variant {variant!r}")
        return self.registry.variant(function, make, self._codec), None

    def resolve(self, name: str) -> tuple[Function | None, Message | None]:
        """Return the function that the program's ``resolve`` finds, or a refusal."""
        try:
            function = self.registry.resolve(name)
        except FunctionNotFoundError as error:
            return None, self.replies.not_found(name, error.reason)
        except OverloadedError as error:
            return None, self.replies.refusal(Outcome.OVERLOADED, error.message)
        except RankwireError as error:
            return None, self.replies.error(error)
        except BaseException as error:  # ``resolve`` must not end this thread
            _log.warning("resolving %r raised", name, exc_info=True)
            reason = f"resolving it raised {describe_error(error)}"
            return None, self.replies.not_found(name, reason)
        return function, self.replies.not_found(name) if function is None else None

    def _beyond_limits(
        self, call: IncomingCall, request: Request, is_large: bool
    ) -> Message | None:
        if len(request.chain) > 2 * MAX_DEPTH:
            chain = describe_chain([*request.chain, self._backend.rank, request.name])
            reason = f"calls are nested more than {MAX_DEPTH} deep: {chain}"
            return self.replies.refusal(Outcome.OVERLOADED, reason)
        if call.is_stream and (call.src, call.request_id) in self.active:
            reason = f"a call of rank {call.src} with this number is in service"
            return self.replies.refusal(Outcome.BAD_REQUEST, reason)
        if call.is_stream and not self.streams.has_room(call.src):
            reason = f"rank {call.src} has {self.streams.MOST} streams open here"
            return self.replies.refusal(Outcome.OVERLOADED, reason)
        # A nested call does not wait for a worker, so it needs no space.
        if is_large and not request.chain:
            if not self.reservations.admit(call.src, call.request_id, len(call.payload)):
                reason = "too many bytes of calls wait at the callee without a reservation"
                return self.replies.refusal(Outcome.OVERLOADED, reason)
        return None

    def _reserve(self, call: IncomingCall, request: Request) -> Message | None:
        try:
            request_id, nbytes = unpack_reservation(request.args, self._backend.max_message_nbytes)
        except InvalidMessageError as error:
            return self.replies.refusal(Outcome.BAD_REQUEST, error.message)

        def answer(is_granted: bool) -> None:
            granted, closed = encode_result(self._codec, None), self.replies.closed(began=False)
            self.replies.send_at_once(call, granted if is_granted else closed)

        if self.reservations.request(call.src, request_id, nbytes, call.origin, answer):
            return None
        return self.replies.refusal(Outcome.OVERLOADED, "too many callers wait for queue space")

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Run a function on a serving thread, because it may take long."""
        self.pool.add(_Errand(errand))

    # -- cancelling --------------------------------------------------------------------------------

    def _cancel(self, event: CallCancelled) -> None:
        job = self.active.get((event.src, event.request_id))
        if job is not None:
            self.cancel_job(job, expired=event.expired)
        else:  # it may have reserved space for a call that will not come
            self.reservations.release(event.src, event.request_id)

    def cancel_job(self, job: ServedCall, *, expired: bool = False) -> None:
        """Cancel a call in service, and the calls that it made."""
        self.port.drop_reply(job.incoming)
        job.cancel(expired=expired)
        if self.pool.queue.take_back(job):  # free its place for other calls
            job.run(None)  # which only replies
        if job.outgoing or job.deferred is not None or job.is_suspended:
            self.run_soon(job.cancel_pending)  # futures may have callbacks

    def _caller_gone(self, event: CallerGone) -> None:
        for job in list(self.active.values()):
            if job.incoming.origin is event.origin:
                job.lost_caller = True
                self.cancel_job(job)
        self.reservations.caller_gone(event.src, event.origin)

    # -- threads -----------------------------------------------------------------------------------

    def is_run_here(self, call: Call) -> bool:
        """Return whether the calling thread runs the function of this call."""
        worker = call.worker
        if worker is not None:
            return worker.pool is self.pool and worker.ident == runtime.get_ident()
        return self.event_loop.ident == runtime.get_ident()

    def drain(self, deadline: Deadline, is_quiet: Callable[[], bool]) -> None:
        """Refuse new calls, and wait until running ones are done and ``is_quiet()``."""
        self._draining = True
        self.reservations.close()
        own = serving.get()  # a function may close its own agent
        while not deadline.expired:
            if not any(job is not own for job in list(self.active.values())) and is_quiet():
                return
            self.clock.sleep(min(0.002, deadline.sleep_limit()))
            self._backend.mesh.lookout.read()

    def end(self, patience: float | None) -> None:
        """Cancel running calls and stop the event loop."""
        self.is_stopping = True
        suspended = []
        for job in list(self.active.values()):
            job.cancel()
            if isinstance(job, ServedStream):
                suspended.append(job)
            else:
                job.cancel_pending()
        self.streams.end(suspended, _STREAM_PATIENCE if patience is None else patience)
        self.event_loop.close(*([] if patience is None else [patience]))

    def stop(self, patience: float | None = None, *, quietly: bool = False) -> None:
        """Stop all threads; a thread inside a user's function ends when that returns.

        ``patience`` limits the wait for the event loop, and again that for the other threads.
        ``quietly`` logs functions that still run at debug level: they had no time to end.
        """
        self.end(patience)
        if not self.pool.close(Deadline.of(patience, _STOP_PATIENCE, self.clock)):
            names = sorted({repr(job.name) for job in list(self.active.values())})
            what = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "a callback"
            verb = "run" if len(names) > 1 else "runs"
            level = logging.DEBUG if quietly else logging.WARNING
            _log.log(level, "%s still %s while its agent is closed", what, verb)


class _Errand:
    """A job that is not a call and may take long, such as users' callbacks."""

    __slots__ = ("_do",)

    depth = 1  # so that it does not count as a worker's call
    function = SimpleNamespace(is_slow=False)  # it does not repeat

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def run(self, worker: Worker | None) -> None:
        try:
            self._do()
        except BaseException:  # a user's callback may raise anything
            _log.exception("a callback raised")

    def refuse(self, reason: str) -> None:
        """Run it all the same, on the polling thread."""
        self.run(None)

    def note_pace(self, seconds: float) -> None:
        pass
