"""Serving: from a request that arrived to its one reply.

Every request gets exactly one terminal reply: a value, the function's error, no such function, a
malformed request, overloaded, cancelled, closed. Nothing that a function does (any exception,
``SystemExit`` included, an unsendable or oversized result) harms the thread that runs it.

Other ranks may also ask what became of calls that they made (``QUESTION``); the polling thread
answers that at once, whatever the functions do.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Any

from rankwire.backends.base import Backend
from rankwire.backends.calls import (
    OWN,
    CallCancelled,
    CallerGone,
    CallPort,
    IncomingCall,
    RepliesDue,
)
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import (
    CallCancelledError,
    DeadlineExceededError,
    InvalidMessageError,
    MessageTooLargeError,
    RankwireError,
)
from rankwire.rpc.accounts import QUESTION, give_account
from rankwire.rpc.circles import ActiveCall, Key, pack, unpack_keys
from rankwire.rpc.context import Call, describe_chain, serving
from rankwire.rpc.loopback import Loopback
from rankwire.rpc.messages import (
    Encoded,
    Outcome,
    Request,
    copied,
    decode_request,
    describe_error,
    encode_failure,
    encode_reply,
    encode_result,
)
from rankwire.rpc.registry import Function, Registry
from rankwire.rpc.room import ROOM, SMALL_NBYTES, Room, unpack_ask
from rankwire.rpc.serving import Job, Pool, Worker

if TYPE_CHECKING:
    from asyncio import Task

    from rankwire.rpc.event_loop import EventLoop

__all__ = ["Limits", "Server"]

_log = logging.getLogger("rankwire")

_SLOW = 0.001
_FAST = 0.0002
# A reply may be sent for at least this long, also when the caller's deadline is close.
_REPLY_PATIENCE = 1.0
_STOP_PATIENCE = 0.5
_SMALL_REPLY = 65536
_SHORT_TEXT = 200
# Kept for one rank that does not take them: twice what its calls in flight can have, a refusal or
# small result each. More are dropped, and who made those calls waits in vain.
_MOST_UNSENT_NBYTES = 128 << 20
_UNSENT_OVERHEAD = 1024
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
    """Serves the functions of a registry to other ranks and to this one."""

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
        self._port = port
        self._registry = registry
        self._codec = codec
        self._limits = limits
        self._draining = False
        self.is_stopping = False  # and so cancels what still runs
        self._loopback: Loopback | None = None
        self._active: dict[tuple[int, int], _Serving] = {}
        self.room = Room(limits.max_queued_nbytes, limits.max_queued)
        self._late: dict[Key, ActiveCall] = {}
        self._unsent: dict[Any, deque[tuple[IncomingCall, Encoded]]] = {}
        self._unsent_nbytes: Counter[int] = Counter()  # by rank
        self._unsent_lock = threading.Lock()
        self._event_loop: EventLoop | None = None
        self._event_loop_lock = threading.Lock()
        self._pool = Pool(
            poll=self._poll,
            wake=port.wake,
            on_look=on_look,
            on_end=on_end,
            workers=limits.workers,
            max_queued=limits.max_queued,
            max_nested=limits.max_nested,
        )

    def start(self, loopback: Loopback) -> None:
        """Begin to serve."""
        self._loopback = loopback
        self._pool.start()

    # -- requests ----------------------------------------------------------------------------------

    def _poll(self, deadline: Deadline) -> list[Job]:
        jobs: list[Job] = []
        for event in self._port.poll(deadline):
            if isinstance(event, IncomingCall):
                job = self._accept(event)
                if job is not None:
                    jobs.append(job)
            elif isinstance(event, CallCancelled):
                self._cancel(event.src, event.request_id)
            elif isinstance(event, CallerGone):
                self._caller_gone(event)
            elif isinstance(event, RepliesDue):
                jobs.append(_Errand(event.call_back))
        return jobs

    def serve_own(self, call: IncomingCall) -> None:
        """Take a call of this rank to itself."""
        job = self._accept(call)
        if job is not None:
            self._pool.add(job)

    def handle(self, call: IncomingCall) -> None:
        """Serve one request on the calling thread."""
        job = self._accept(call)
        if job is not None:
            job.run(None)

    def _accept(self, call: IncomingCall) -> _Serving | None:
        """Decode a request; answer at once if it cannot be served."""
        try:
            request = decode_request(self._codec, call.payload)
        except InvalidMessageError as error:
            self._free_room(call)
            self.answer_at_once(call, self.encode_refusal(Outcome.BAD_REQUEST, error.message))
            return None
        function = self._registry.find(request.name)
        refusal: Encoded | None
        if function is None and request.name == QUESTION:
            refusal = self._answer_question(request)
        elif self._draining:
            refusal = self.encode_closed(began=False)
        elif function is None and request.name == ROOM:
            refusal = self._make_room(call, request)
        elif function is None:
            refusal = self._encode_not_found(request.name)
        elif len(request.chain) > 2 * self._limits.max_depth:
            chain = describe_chain([*request.chain, self._backend.rank, request.name])
            reason = f"calls are nested more than {self._limits.max_depth} deep: {chain}"
            refusal = self.encode_refusal(Outcome.OVERLOADED, reason)
        elif len(call.payload) > SMALL_NBYTES and not self._has_room(call, request):
            reason = "too much of this rank's calls waits there, for which it has not asked"
            refusal = self.encode_refusal(Outcome.OVERLOADED, reason)
        else:
            job = _Serving(self, call, request, function)
            self._active[call.src, call.request_id] = job
            return job
        self._free_room(call)
        if refusal is not None:
            self.answer_at_once(call, refusal)
        return None

    def _has_room(self, call: IncomingCall, request: Request) -> bool:
        """Count a large call that may have to wait; a nested one never does."""
        return bool(request.chain) or self.room.admit(call.src, call.request_id, len(call.payload))

    def _free_room(self, call: IncomingCall) -> None:
        """A call is not served: what was kept for it is free, unless its number is in use."""
        if (call.src, call.request_id) not in self._active:
            self.room.release(call.src, call.request_id)

    def _make_room(self, call: IncomingCall, request: Request) -> Encoded | None:
        """Have a caller told when a large call of its may come; return why not, if not."""
        try:
            request_id, nbytes = unpack_ask(request.args, self._backend.max_message_nbytes)
        except InvalidMessageError as error:
            return self.encode_refusal(Outcome.BAD_REQUEST, error.message)

        def answer(is_granted: bool) -> None:
            granted, closed = encode_result(self._codec, None), self.encode_closed(began=False)
            self.answer_at_once(call, granted if is_granted else closed)

        if self.room.ask(call.src, request_id, nbytes, call.link, answer):
            return None
        return self.encode_refusal(Outcome.OVERLOADED, "too many callers wait for room")

    # -- replies -----------------------------------------------------------------------------------

    def answer(
        self,
        call: IncomingCall,
        encoded: Encoded,
        deadline: Deadline | None = None,
        worker: Worker | None = None,
    ) -> None:
        """Send the reply. A caller that is gone gets none, and needs none.

        A worker that has further short requests at hand sends their replies together: it polls
        right after them, and polling sends what was held back. If it loses the polling role
        meanwhile it does so itself.
        """
        hold = worker is not None and self._pool.has_more(worker)
        buffers, nbytes = encoded
        try:
            if call.origin is OWN:
                assert self._loopback is not None
                self._loopback.reply(call.request_id, buffers)
            else:
                if deadline is None or deadline.remaining() < _REPLY_PATIENCE:
                    if deadline is not None and deadline.expired:  # the caller's is too
                        self.answer_late(call, began=True)
                        return
                    deadline = Deadline(_REPLY_PATIENCE)
                self._port.reply(call, buffers, nbytes, deadline, hold=hold)
                if hold and worker is not None and not self._pool.is_poller(worker):
                    self._port.flush()
        except RankwireError as error:
            _log.debug("a reply to rank %d was not sent: %s", call.src, error)

    def answer_unwanted(self, call: IncomingCall) -> None:
        """End a call whose caller has given up: with a small reply, and without waiting."""
        refusal = self.encode_refusal(Outcome.CANCELLED, "not wanted any more")
        self.answer_at_once(call, refusal)

    def answer_late(self, call: IncomingCall, *, began: bool) -> None:
        """End a call whose deadline has passed; the same way, because its caller's has too."""
        self.answer_at_once(call, encode_reply(self._codec, Outcome.EXPIRED, began))

    def answer_at_once(self, call: IncomingCall, encoded: Encoded) -> None:
        """Send a reply from a thread that must not wait for one caller: poller or event loop.

        What the caller does not take now is left to one serving thread, in order.
        """
        if call.origin is OWN:
            self.answer(call, encoded)
            return
        with self._unsent_lock:
            if call.link in self._unsent:
                self._keep_unsent(call, encoded)
                return
        try:
            buffers, nbytes = encoded
            self._port.reply(call, buffers, nbytes, Deadline(0.0))
        except DeadlineExceededError:
            with self._unsent_lock:  # another thread may have failed at the same moment
                is_first = call.link not in self._unsent
                self._keep_unsent(call, encoded)
            if is_first:
                self.run_soon(lambda: self._send_unsent(call.link))
        except RankwireError as error:
            _log.debug("a reply to rank %d was not sent: %s", call.src, error)

    def _keep_unsent(self, call: IncomingCall, encoded: Encoded) -> None:
        """Keep a reply for later, unless its caller leaves too many of them; with the lock."""
        unsent = self._unsent.setdefault(call.link, deque())
        nbytes = encoded[1] + _UNSENT_OVERHEAD
        if self._unsent_nbytes[call.src] + nbytes <= _MOST_UNSENT_NBYTES:
            self._unsent_nbytes[call.src] += nbytes
            unsent.append((call, encoded))
        else:
            _log.debug("a reply to rank %d was dropped: it does not take them", call.src)

    def _send_unsent(self, link: Any) -> None:
        while True:
            with self._unsent_lock:
                if not self._unsent[link]:
                    del self._unsent[link]
                    return
                call, encoded = self._unsent[link].popleft()
                self._unsent_nbytes[call.src] -= encoded[1] + _UNSENT_OVERHEAD
            self.answer(call, encoded)

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Have something done by a serving thread, because it may take long."""
        self._pool.add(_Errand(errand))

    def encode_value(self, value: Any, *, copies: bool = False) -> Encoded:
        """Return the reply that carries a result, or the one that says why it cannot be sent.

        With ``copies``, nothing in it is memory of the function's.
        """
        try:
            encoded = encode_result(self._codec, value)
            self._check_size(encoded)
            if copies:
                encoded = copied(encoded)
        except BaseException as error:  # a value's own methods may raise anything
            return self.encode_error(error)
        return encoded

    def encode_error(self, error: BaseException) -> Encoded:
        """Return the reply for a function that raised, as long as a message may be."""
        for longest in (None, _SHORT_TEXT, 0):
            encoded = encode_failure(self._codec, error, longest)
            if encoded[1] <= self._backend.max_message_nbytes:
                break
        return encoded

    def encode_refusal(self, outcome: Outcome, reason: str) -> Encoded:
        """Return the reply for a call that will not run."""
        return encode_reply(self._codec, outcome, reason)

    def encode_closed(self, *, began: bool) -> Encoded:
        """Return the reply for a call that ends with this agent."""
        reason = f"the agent of rank {self._backend.rank} is closing"
        return encode_reply(self._codec, Outcome.CLOSED, [reason, began])

    def _encode_not_found(self, name: str) -> Encoded:
        encoded = encode_reply(self._codec, Outcome.NOT_FOUND, [name, self._registry.names()])
        if encoded[1] > self._backend.max_message_nbytes:
            encoded = encode_reply(self._codec, Outcome.NOT_FOUND, [name, []])
        return encoded

    def _check_size(self, encoded: Encoded) -> None:
        if encoded[1] > self._backend.max_message_nbytes:
            raise MessageTooLargeError(encoded[1], self._backend.max_message_nbytes)

    # -- cancelling --------------------------------------------------------------------------------

    def cancel_own(self, request_id: int) -> None:
        """A call of this rank to itself is not wanted any more."""
        self._cancel(self._backend.rank, request_id)

    def _cancel(self, src: int, request_id: int) -> None:
        job = self._active.get((src, request_id))
        if job is not None:
            self._unwanted(job)
        else:
            self.room.release(src, request_id)  # it may have asked for a call that will not come

    def _unwanted(self, job: _Serving) -> None:
        """The caller does not want the result any more."""
        if job.incoming.origin is OWN:
            job.incoming.is_wanted = False
        else:
            self._port.drop_reply(job.incoming)
        job.cancel()
        if job.call.outgoing:
            self.run_soon(job.call.give_up_nested)  # futures may have callbacks

    def _caller_gone(self, event: CallerGone) -> None:
        for job in list(self._active.values()):
            if job.call.src == event.src and event.link in (None, job.incoming.link):
                self._unwanted(job)
        self.room.caller_gone(event.src, event.link)

    def finished(self, job: _Serving) -> None:
        """Forget a job that has been answered."""
        job.leave_room()
        self._active.pop((job.incoming.src, job.incoming.request_id), None)

    # -- what others ask ---------------------------------------------------------------------------

    def _answer_question(self, request: Request) -> Encoded:
        try:
            keys = unpack_keys(request.args)
        except InvalidMessageError as error:
            return self.encode_refusal(Outcome.BAD_REQUEST, error.message)
        return encode_result(self._codec, pack(self.account(keys)))

    def account(self, keys: Iterable[Key]) -> dict[Key, ActiveCall]:
        """Tell of calls that are served here, and of those here that they need."""
        keys = list(keys)
        account = give_account(
            self._backend.rank,
            self._limits.workers,
            {Key(self._backend.rank, *key): job for key, job in list(self._active.items())},
            set(self._pool.queued()),
            keys,
        )
        late = {key: call for key in keys if (call := self._late.get(key)) is not None}
        return late | account

    def remember_late(self, job: _Serving, error: BaseException) -> None:
        """Keep why a call failed whose caller's time is up; it may be asking just now."""
        key = Key(self._backend.rank, job.incoming.src, job.incoming.request_id)
        text = f"failed too late with {describe_error(error)}"
        self._late[key] = ActiveCall(job.call.name, job.depth, job.call.deadline.waited, text)
        while len(self._late) > _LATE_CALLS:
            self._late.pop(next(iter(self._late)), None)

    def key_of(self, call: Call) -> Key | None:
        """Return the name of a call in the whole world, if it is served here."""
        for key, job in list(self._active.items()):
            if job.call is call:
                return Key(self._backend.rank, *key)
        return None

    def is_run_here(self, call: Call) -> bool:
        """Whether the calling thread is the one that runs the function of a call served here."""
        worker = call.worker
        if worker is not None:
            return worker.pool is self._pool and worker.ident == threading.get_ident()
        return self._event_loop is not None and self._event_loop.ident == threading.get_ident()

    # -- threads -----------------------------------------------------------------------------------

    @property
    def event_loop(self) -> EventLoop:
        """The event loop for ``async def`` functions, started by the first of them."""
        with self._event_loop_lock:
            if self._event_loop is None:
                # Here, because asyncio takes as long to load as all of this package.
                from rankwire.rpc.event_loop import EventLoop

                self._event_loop = EventLoop()
                if self.is_stopping:
                    self._event_loop.close()
            return self._event_loop

    def about_to_block(self, worker: Worker) -> None:
        """See ``Pool.about_to_block``."""
        self._pool.about_to_block(worker)

    def expect_work(self) -> None:
        """See ``Pool.expect_work``."""
        self._pool.expect_work()

    def drain(self, deadline: Deadline, is_quiet: Callable[[], bool]) -> None:
        """Refuse new calls, and wait until the running ones are done and ``is_quiet()``."""
        self._draining = True
        self.room.close()
        own = serving.get()  # a function may close the agent that serves it
        while not deadline.expired:
            if not any(job.call is not own for job in list(self._active.values())) and is_quiet():
                return
            sleep(min(0.002, deadline.sleep_limit()))

    def end(self, patience: float | None) -> None:
        """Cancel what runs, and stop the event loop; the other threads may be ending already."""
        self.is_stopping = True
        for job in list(self._active.values()):
            job.cancel()
            job.call.give_up_nested()
        with self._event_loop_lock:  # from now on a new one is closed as soon as it is made
            event_loop = self._event_loop
        if event_loop is not None:
            event_loop.close(*([] if patience is None else [patience]))

    def stop(self, patience: float | None = None) -> None:
        """Stop all threads; one that is inside a user's function ends when that does.

        Args:
            patience: Seconds to wait for the event loop, and for the others; None is the default.
        """
        self.end(patience)
        if not self._pool.close(Deadline.of(patience, _STOP_PATIENCE)):
            _log.warning("a function still runs while its agent is closed")


class _Serving:
    """One call in service: the job of a serving thread, or of the event loop."""

    __slots__ = (
        "_function",
        "_has_result",
        "_is_in_room",
        "_request",
        "_server",
        "call",
        "depth",
        "incoming",
        "task",
    )

    def __init__(
        self, server: Server, incoming: IncomingCall, request: Request, function: Function
    ) -> None:
        self._server = server
        self._request: Request | None = request
        self._is_in_room = len(incoming.payload) > SMALL_NBYTES and not request.chain
        self._function = function
        self.incoming = incoming
        self.depth = len(request.chain) // 2
        self.call = Call(incoming.src, request.name, Deadline(request.timeout), request.chain)
        self.task: Task[None] | None = None
        self._has_result = False

    @property
    def needs_event_loop(self) -> bool:
        """See ``Servable``."""
        return self._function.is_async and not self._has_result

    @property
    def is_slow(self) -> bool:
        """See ``Job``."""
        return self._function.is_slow

    def run(self, worker: Worker | None) -> None:
        """See ``Job``."""
        request = self._request  # before the look: whoever cancels lets go of it afterwards
        if self._is_in_room:
            self.leave_room()
        if request is None or self.call.cancelled:
            self._server.answer_at_once(self.incoming, self._encode_cut_short(began=False))
            self._server.finished(self)
        elif self.call.deadline.expired:
            self._server.answer_late(self.incoming, began=False)
            self._server.finished(self)
        elif self._function.is_async:
            if not self._server.event_loop.run(partial(self.run_async, request), self):
                self._server.answer_at_once(self.incoming, self._server.encode_closed(began=False))
                self._server.finished(self)
        else:
            self.call.worker = worker
            token = serving.set(self.call)
            try:
                encoded = self._run_function(request)
            finally:
                serving.reset(token)
                # Whoever still holds the context of this call is not this thread's function.
                self.call.worker = None
            self._reply(encoded, worker)

    def leave_room(self) -> None:
        """Do not wait any more: a worker has it, or nobody wants it. Idempotent."""
        if self._is_in_room:
            self._is_in_room = False
            self._server.room.release(self.incoming.src, self.incoming.request_id)

    def _run_function(self, request: Request) -> Encoded:
        try:
            value = self._function.target(*request.args, **request.kwargs)
        except BaseException as error:
            # Whatever it raises is the caller's business, and must not end the serving thread.
            if self.call.deadline.expired:
                self._server.remember_late(self, error)
            if isinstance(error, CallCancelledError) and self._server.is_stopping:
                return self._encode_cut_short(began=True)
            return self._server.encode_error(error)
        return self._server.encode_value(value, copies=self._function.copies)

    def _encode_cut_short(self, *, began: bool) -> Encoded:
        """Return the reply for a function that was cancelled: by the agent's end or the caller."""
        if self._server.is_stopping:
            return self._server.encode_closed(began=began)
        return self._server.encode_refusal(Outcome.CANCELLED, "not wanted any more")

    async def run_async(self, request: Request) -> None:
        """Run on the event loop."""
        serving.set(self.call)
        encoded = await self._run_coroutine(request)
        self._has_result = True
        if encoded[1] <= _SMALL_REPLY:
            self._server.answer_at_once(self.incoming, encoded)
            self._server.finished(self)
        else:  # sending may wait for the caller, and the event loop must not
            self._server.run_soon(partial(self._reply, encoded))

    async def _run_coroutine(self, request: Request) -> Encoded:
        if self.call.cancelled:  # before there was a task to cancel
            return self._encode_cut_short(began=False)
        try:
            value = await self._function.target(*request.args, **request.kwargs)
        except self._server.event_loop.cancelled:
            return self._encode_cut_short(began=True)
        except BaseException as error:  # as in _run_function
            if isinstance(error, CallCancelledError) and self._server.is_stopping:
                return self._encode_cut_short(began=True)
            return self._server.encode_error(error)
        return self._server.encode_value(value, copies=self._function.copies)

    def refuse(self, reason: str) -> None:
        """See ``Job``."""
        refusal = self._server.encode_refusal(Outcome.OVERLOADED, reason)
        self._server.answer_at_once(self.incoming, refusal)
        self._server.finished(self)

    def finished(self, seconds: float) -> None:
        """See ``Job``."""
        if seconds > _SLOW:
            self._function.is_slow = True
        elif seconds < _FAST:
            self._function.is_slow = False

    def cancel(self) -> None:
        """Let the function know that it need not go on."""
        self.call.cancelled = True
        if self._is_in_room:  # it has not begun, and its arguments need not wait
            self._request = None
            self.incoming.payload = bytearray()
            self.leave_room()
        if self.task is not None:
            with suppress(RuntimeError):  # the event loop has ended, and all tasks with it
                self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def _reply(self, encoded: Encoded, worker: Worker | None = None) -> None:
        try:
            if self.incoming.is_wanted:
                self._server.answer(self.incoming, encoded, self.call.deadline, worker)
            else:
                self._server.answer_unwanted(self.incoming)
        finally:
            self._server.finished(self)


class _Errand:
    """Something that is not a call and may take long, such as users' callbacks."""

    __slots__ = ("_do",)

    depth = 1  # it has nothing to do with the limit on calls
    is_slow = False

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def run(self, worker: Worker | None) -> None:
        """See ``Job``."""
        try:
            self._do()
        except BaseException:  # a user's callback may raise anything
            _log.exception("a callback raised")

    def refuse(self, reason: str) -> None:
        """See ``Job``. It is done all the same, if need be by the polling thread."""
        self.run(None)

    def finished(self, seconds: float) -> None:
        """See ``Job``. Nothing is learnt from it."""
