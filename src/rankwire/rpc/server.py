"""Serving: requests that arrive become calls in service, or are refused at once.

Which threads run them is ``pool``, one call from its beginning to its reply ``served_call``, what
is answered ``answers``. Other ranks may also ask what became of calls that they made
(``QUESTION``); the polling thread answers that at once, whatever the functions do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    FunctionNotFoundError,
    InvalidMessageError,
    OverloadedError,
    RankwireError,
)
from rankwire.mesh.calls import (
    CallCancelled,
    CallerGone,
    CallPort,
    IncomingCall,
    RepliesDue,
    Serving,
)
from rankwire.rpc.accounts import QUESTION, Accounts
from rankwire.rpc.answers import Answers
from rankwire.rpc.call import Call, describe_chain, serving
from rankwire.rpc.circles import ActiveCall, Key, pack, unpack_keys
from rankwire.rpc.deferred import DeferredReplies
from rankwire.rpc.event_loop import EventLoop
from rankwire.rpc.messages import (
    Outcome,
    Request,
    decode_request,
    describe_error,
    encode_result,
)
from rankwire.rpc.pool import Pool
from rankwire.rpc.registry import Function, Registry
from rankwire.rpc.room import ROOM, SMALL_NBYTES, Room, unpack_ask
from rankwire.rpc.served_call import ServedCall
from rankwire.rpc.worker import Job, Worker
from rankwire.wire.frames import Message

_log = logging.getLogger("rankwire")

_STOP_PATIENCE = 0.5
_LATE_CALLS = 64  # of which is remembered why they failed


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes on at once; see ``RpcAgent``."""

    workers: int
    max_queued: int
    max_queued_nbytes: float
    max_nested: int
    max_depth: int


class Server:
    """Serves the functions of a registry to other ranks and to this one.

    Attributes:
        active: The calls in service, by rank and request id.
        pool: The threads that run them.
        answers: What is answered, and how it gets to the caller.
        room: For large calls that wait for a worker.
        deferred: The replies that wait for a future.
        event_loop: For ``async def`` functions.
        is_stopping: Whether what still runs is cancelled.
        clock: By which its threads wait.
    """

    def __init__(
        self,
        backend: Backend,
        port: CallPort,
        registry: Registry,
        codec: Codec,
        limits: Limits,
        *,
        on_look: Callable[[], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._backend = backend
        self.clock = backend.clock
        self._port = port
        self._registry = registry
        self._codec = codec
        self._limits = limits
        self._draining = False
        self.is_stopping = False
        self.active: dict[tuple[int, int], ServedCall] = {}
        self.room = Room(limits.max_queued_nbytes, limits.max_queued)
        self._late: dict[Key, ActiveCall] = {}
        self.answers = Answers(backend, port, codec, names=registry.names, run_soon=self.run_soon)
        self.event_loop = EventLoop(backend.clock)
        self.pool = Pool(
            poll=self._poll,
            wake=port.wake,
            on_look=lambda: self.deferred.look() | on_look(),
            on_end=on_end,
            clock=backend.clock,
            workers=limits.workers,
            max_queued=limits.max_queued,
            max_nested=limits.max_nested,
        )
        self.deferred = DeferredReplies(
            backend.clock, run_soon=self.run_soon, expect_work=self.pool.expect_work
        )
        port.tell_serving(self.serving)

    @property
    def workers(self) -> int:
        """How many calls run at once, nested ones apart."""
        return self._limits.workers

    # -- requests ----------------------------------------------------------------------------------

    def _poll(self) -> list[Job]:
        jobs: list[Job] = []
        for event in self._port.poll():
            if event.__class__ is IncomingCall:
                try:
                    job = self._accept(event)
                except Exception as error:  # a defect must not lose the other calls of this poll
                    _log.exception("a call from rank %d could not be accepted", event.src)
                    self._free_room(event)
                    self.answers.send_at_once(event, self.answers.error(error))
                    continue
                if job is not None:
                    jobs.append(job)
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
        """Decode a request; answer at once if it cannot be served."""
        try:
            request = decode_request(self._codec, call.payload, call.src)
        except InvalidMessageError as error:
            self._free_room(call)
            self.answers.send_at_once(
                call, self.answers.refusal(Outcome.BAD_REQUEST, error.message)
            )
            return None
        function = self._registry.functions.get(request.name)
        is_large = len(call.payload) > SMALL_NBYTES
        if function is not None and not (self._draining or request.chain or is_large):
            return ServedCall(self, call, request, function)
        refusal: Message | None
        if function is None and request.name == QUESTION:
            refusal = self._answer_question(request)
        elif self._draining:
            refusal = self.answers.closed(began=False)
        elif function is None and request.name == ROOM:
            refusal = self._make_room(call, request)
        elif function is None and (errand := self._registry.own.get(request.name)) is not None:
            errand()
            refusal = encode_result(self._codec, None)
        else:
            refusal = None
            if function is None:
                function, refusal = self._resolve(request.name)
            if function is not None:
                refusal = self._beyond_limits(call, request, is_large)
                if refusal is None:
                    return ServedCall(self, call, request, function)
        self._free_room(call)
        if refusal is not None:
            self.answers.send_at_once(call, refusal)
        return None

    def _resolve(self, name: str) -> tuple[Function | None, Message | None]:
        """Return the function of a name that is not registered, or why there is none."""
        try:
            function = self._registry.resolve(name)
        except FunctionNotFoundError as error:
            return None, self.answers.not_found(name, error.reason)
        except OverloadedError as error:
            return None, self.answers.refusal(Outcome.OVERLOADED, error.message)
        except RankwireError as error:
            return None, self.answers.error(error)
        except BaseException as error:  # a mistake of the program's must not end this thread
            _log.warning("resolving %r raised", name, exc_info=True)
            reason = f"resolving it raised {describe_error(error)}"
            return None, self.answers.not_found(name, reason)
        return function, self.answers.not_found(name) if function is None else None

    def _beyond_limits(
        self, call: IncomingCall, request: Request, is_large: bool
    ) -> Message | None:
        """Return why a call is refused that is nested or large, if it is."""
        if len(request.chain) > 2 * self._limits.max_depth:
            chain = describe_chain([*request.chain, self._backend.rank, request.name])
            reason = f"calls are nested more than {self._limits.max_depth} deep: {chain}"
            return self.answers.refusal(Outcome.OVERLOADED, reason)
        if is_large and not self._has_room(call, request):
            reason = "too much of this rank's calls waits there, for which it has not asked"
            return self.answers.refusal(Outcome.OVERLOADED, reason)
        return None

    def _has_room(self, call: IncomingCall, request: Request) -> bool:
        """Count a large call that may have to wait; a nested one never does."""
        return bool(request.chain) or self.room.admit(call.src, call.request_id, len(call.payload))

    def _free_room(self, call: IncomingCall) -> None:
        """A call is not served: what was kept for it is free, unless its number is in use."""
        if (call.src, call.request_id) not in self.active:
            self.room.release(call.src, call.request_id)

    def _make_room(self, call: IncomingCall, request: Request) -> Message | None:
        """Have a caller told when a large call of its may come; return why not, if not."""
        try:
            request_id, nbytes = unpack_ask(request.args, self._backend.max_message_nbytes)
        except InvalidMessageError as error:
            return self.answers.refusal(Outcome.BAD_REQUEST, error.message)

        def answer(is_granted: bool) -> None:
            granted, closed = encode_result(self._codec, None), self.answers.closed(began=False)
            self.answers.send_at_once(call, granted if is_granted else closed)

        if self.room.ask(call.src, request_id, nbytes, call.origin, answer):
            return None
        return self.answers.refusal(Outcome.OVERLOADED, "too many callers wait for room")

    def flush(self) -> None:
        """Send the replies that were held back."""
        self._port.flush()

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Have something done by a serving thread, because it may take long."""
        self.pool.add(_Errand(errand))

    # -- cancelling --------------------------------------------------------------------------------

    def _cancel(self, event: CallCancelled) -> None:
        job = self.active.get((event.src, event.request_id))
        if job is not None:
            self._unwanted(job, expired=event.expired)
        else:  # it may have asked for a call that will not come
            self.room.release(event.src, event.request_id)

    def _unwanted(self, job: ServedCall, *, expired: bool = False) -> None:
        """The caller does not want the result any more."""
        self._port.drop_reply(job.incoming)
        job.cancel(expired=expired)
        if self.pool.take_back(job):  # its place is for calls that somebody waits for
            job.run(None)  # which answers it
        if job.has_ties:
            self.run_soon(job.let_go)  # futures may have callbacks

    def _caller_gone(self, event: CallerGone) -> None:
        for job in list(self.active.values()):
            if job.incoming.origin is event.origin:
                self._unwanted(job)
        self.room.caller_gone(event.src, event.origin)

    # -- what others ask ---------------------------------------------------------------------------

    def _answer_question(self, request: Request) -> Message:
        try:
            keys = unpack_keys(request.args)
        except InvalidMessageError as error:
            return self.answers.refusal(Outcome.BAD_REQUEST, error.message)
        return encode_result(self._codec, pack(self.account(keys)))

    def account(self, keys: Iterable[Key]) -> dict[Key, ActiveCall]:
        """Tell of calls that are served here, and of those here that they need."""
        keys = list(keys)
        rank = self._backend.rank
        jobs = {Key(rank, *key): job for key, job in list(self.active.items())}
        accounts = Accounts(rank, self.workers, jobs, set(self.pool.queued()))
        late = {key: call for key in keys if (call := self._late.get(key)) is not None}
        return late | accounts.of(keys)

    def serving(self) -> list[Serving]:
        """Return the calls in service, the oldest first."""
        queued = set(self.pool.queued())
        return [
            Serving(job.src, job.name, job.seconds, self.workers if job in queued else 0)
            for job in list(self.active.values())
        ]

    def remember_late(self, job: ServedCall, error: BaseException) -> None:
        """Keep why a call failed whose caller's time is up; it may be asking just now."""
        key = Key(self._backend.rank, job.src, job.incoming.request_id)
        text = f"failed too late with {describe_error(error)}"
        self._late[key] = ActiveCall(job.name, job.depth, job.deadline.waited, text)
        while len(self._late) > _LATE_CALLS:
            self._late.pop(next(iter(self._late)), None)

    def key_of(self, call: Call) -> Key | None:
        """Return the name of a call in the whole world, if it is served here."""
        for key, job in list(self.active.items()):
            if job is call:
                return Key(self._backend.rank, *key)
        return None

    def is_run_here(self, call: Call) -> bool:
        """Whether the calling thread is the one that runs the function of a call served here."""
        worker = call.worker
        if worker is not None:
            return worker.pool is self.pool and worker.ident == threading.get_ident()
        return self.event_loop.ident == threading.get_ident()

    # -- threads -----------------------------------------------------------------------------------

    def drain(self, deadline: Deadline, is_quiet: Callable[[], bool]) -> None:
        """Refuse new calls, and wait until the running ones are done and ``is_quiet()``."""
        self._draining = True
        self.room.close()
        own = serving.get()  # a function may close the agent that serves it
        while not deadline.expired:
            if not any(job is not own for job in list(self.active.values())) and is_quiet():
                return
            self.clock.sleep(min(0.002, deadline.sleep_limit()))
            self._backend.read_others()

    def end(self, patience: float | None) -> None:
        """Cancel what runs, and stop the event loop; the other threads may be ending already."""
        self.is_stopping = True
        for job in list(self.active.values()):
            job.cancel()
            job.let_go()
        self.event_loop.close(*([] if patience is None else [patience]))

    def stop(self, patience: float | None = None, *, quietly: bool = False) -> None:
        """Stop all threads; one that is inside a user's function ends when that does.

        Args:
            patience: Seconds to wait for the event loop, and for the others; None is the default.
            quietly: Whether functions that still run are no surprise: they had no time to end.
        """
        self.end(patience)
        if not self.pool.close(Deadline.of(patience, _STOP_PATIENCE, self.clock)):
            names = sorted({repr(job.name) for job in list(self.active.values())})
            what = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "a callback"
            verb = "run" if len(names) > 1 else "runs"
            level = logging.DEBUG if quietly else logging.WARNING
            _log.log(level, "%s still %s while its agent is closed", what, verb)


class _Quick:
    """The pace of errands: most take no time, and of a slow one nothing is learned for the next."""

    is_slow = False


class _Errand:
    """Something that is not a call and may take long, such as users' callbacks."""

    __slots__ = ("_do",)

    depth = 1  # it has nothing to do with the limit on calls
    function = _Quick()

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def run(self, worker: Worker | None) -> None:
        """Do it; what it raises is logged."""
        try:
            self._do()
        except BaseException:  # a user's callback may raise anything
            _log.exception("a callback raised")

    def refuse(self, reason: str) -> None:
        """Do it all the same, if need be by the polling thread."""
        self.run(None)

    def finished(self, seconds: float) -> None:
        """Learn nothing from it."""
