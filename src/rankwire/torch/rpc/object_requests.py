"""The requests between the owner of an object and the ranks that have handles of it.

The owner creates objects, returns their values and calls their methods (``ObjectServer``). A
request for an object that is still being created does not occupy a worker: its value is a deferred
reply, and a thread of this module runs its methods when it is ready.

A holder notifies the owner of handles that it passed on or released (``HandleUpdates``). As a
handle may become garbage in any thread at any moment, updates go into a queue. A thread sends them
to each owner, one message at a time and in order, on which the owner relies.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidMessageError,
    OverloadedError,
    PeerLostError,
    RemoteError,
)
from rankwire.rpc.agent import Agent
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc import verbs
from rankwire.torch.rpc.autograd import backward_of
from rankwire.torch.rpc.functions import settle
from rankwire.torch.rpc.guards import find_method
from rankwire.torch.rpc.owned_objects import ObjectId, OwnedObject, OwnedObjects
from rankwire.torch.rpc.verbs import sender

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session

_log = logging.getLogger("rankwire")

_RELEASED, _PASSED_ON, _NOT_MADE = 0, 1, 2

# One update: its kind, the object's id, and two more numbers.
Update = tuple[int, int, int, int, int, int]
_STOP = -1

_GONE = (PeerLostError, ChannelClosedError)
# A call that ends with one of these may not have begun. If it has, the owner ignores the update.
_REFUSALS = (InvalidMessageError, OverloadedError, DeadlineExceededError, CallCancelledError)


class ObjectServer:
    """Serves the requests of other ranks' handles. Every method is safe from any thread."""

    def __init__(self, session: Session, threads: int) -> None:
        self._session = session
        self._owned = session.owned
        self.threads = MethodThreads(threads)
        verbs.register(
            session.agent,
            {
                verbs.MAKE: self.make,
                verbs.MAKE_BY_METHOD: self.make_by_method,
                verbs.FETCH: self.fetch,
                verbs.CALL: self.call,
                verbs.CHECK: self.check,
                verbs.TYPE: self.type_of,
                verbs.BACKWARD: self.backward,
                verbs.TELL: self.apply_updates,
            },
        )

    def make(
        self, creator: int, number: int, key: int, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Create an object: the result of a function."""
        owned = self._begin(creator, number, key)
        return self._make(owned, lambda: self._session.runnable(function)(*args, **kwargs))

    def make_by_method(
        self, creator: int, number: int, key: int, /, *call: Any, **kwargs: Any
    ) -> Any:
        """Create an object: the result of another object's method, called as by ``call``."""
        owned = self._begin(creator, number, key)
        return self._make(owned, lambda: self.call(*call, **kwargs))

    def fetch(self, creator: int, number: int, key: int) -> Any:
        """Return the value of an object."""
        owned = self._find(creator, number, key)
        return owned.get() if owned.is_ready else self._wait_for(owned)

    def call(
        self, creator: int, number: int, key: int, method: str, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of an object."""
        owned = self._find(creator, number, key)
        if owned.is_ready:
            return self._method(owned, method)(*args, **kwargs)
        return self._once_ready(owned, lambda: self._method(owned, method)(*args, **kwargs))

    def check(self, creator: int, number: int, key: int, method: str) -> Any:
        """Raise the error of calling a method, if it cannot be called."""
        owned = self._find(creator, number, key)

        def find() -> None:
            self._method(owned, method)

        return self._once_ready(owned, find)

    def type_of(self, creator: int, number: int, key: int) -> Any:
        """Return the class of an object."""
        owned = self._find(creator, number, key)
        return self._once_ready(owned, lambda: type(owned.get()))

    def backward(
        self, creator: int, number: int, key: int, context_id: int, retain_graph: bool
    ) -> Any:
        """Run a backward pass from an object."""
        owned = self._find(creator, number, key)
        return self._once_ready(owned, lambda: backward_of(owned.get(), context_id, retain_graph))

    def apply_updates(self, updates: list[Any]) -> None:
        """Apply the sender's updates of handles."""
        apply_updates(self._owned, sender(), len(self._session.workers), updates)

    def _find(self, creator: int, number: int, key: int) -> OwnedObject:
        return self._owned.expect(_id(creator, number, key), sender())

    def _begin(self, creator: int, number: int, key: int) -> OwnedObject:
        src = sender()
        if creator != src:
            raise PermissionError(f"rank {src} cannot create objects of rank {creator}")
        return self._owned.begin(_id(creator, number, key))

    def _make(self, owned: OwnedObject, make: Callable[[], Any]) -> Future[Any] | None:
        try:
            value = make()
        except BaseException as error:
            self._finish(owned, None, error)
            raise
        if not isinstance(value, Future):
            self._finish(owned, value)
            return None
        made: Future[Any] = Future()
        value.add_done_callback(
            lambda promise: settle(made, partial(self._make, owned, promise.result))
        )
        return made

    def _finish(self, owned: OwnedObject, value: Any, error: BaseException | None = None) -> None:
        owned.resolve(value, error)
        self._owned.tidy(owned)

    def _method(self, owned: OwnedObject, name: str) -> Callable[..., Any]:
        return self._session.servable(find_method(self._session.rule, owned.get(), name))

    def _wait_for(self, owned: OwnedObject) -> Future[Any]:
        src = sender()
        self._owned.claims.charge(src)
        waiter = owned.when_ready()
        waiter.add_done_callback(partial(self._stop_waiting, owned, src))
        return waiter

    def _stop_waiting(self, owned: OwnedObject, src: int, waiter: Future[Any]) -> None:
        self._owned.claims.discharge(src)
        if waiter.cancelled():
            self._owned.abandon(owned)

    def _once_ready(self, owned: OwnedObject, do: Callable[[], Any]) -> Any:
        """Use an object: at once if it is ready, else later on another thread."""
        if owned.is_ready:
            return do()
        done: Future[Any] = Future()
        context = copy_context()  # its calls belong to the served call

        def run(_: object) -> None:
            try:
                self.threads.run(partial(context.run, do), done)
            except BaseException as error:
                _fail(done, error)

        self._wait_for(owned).add_done_callback(run)
        return done


class MethodThreads:
    """Threads for methods of objects that are still being created. They end when idle."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = runtime.Lock()
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = 0
        self._closed = False

    def run(self, method: Callable[[], Any], done: Future[Any]) -> None:
        """Run a method into ``done`` on a thread; after ``close``, raise an error."""
        with self._lock:
            if self._closed:
                raise _closed_error()
            self._waiting.append((method, done))
            if self._running >= self.most:
                return
            self._running += 1
        runtime.Thread(target=self._run, name="rankwire methods", daemon=True).start()

    def close(self) -> None:
        """Fail the methods that have not begun, and later ones."""
        with self._lock:
            self._closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
        for _, done in dropped:
            _fail(done, _closed_error())

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                method, done = self._waiting.popleft()
            _run_into(done, method)


def _closed_error() -> ChannelClosedError:
    return ChannelClosedError("RPC was shut down before the object's method ran")


def _fail(done: Future[Any], error: BaseException) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error)


def _run_into(done: Future[Any], method: Callable[[], Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return  # the caller has cancelled it
    try:
        result = method()
    except BaseException as error:
        done.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda ended: settle(done, ended.result))
    else:
        done.set_result(result)


def _id(creator: int, number: int, key: int) -> ObjectId:
    if not all(type(part) is int for part in (creator, number, key)):
        raise ConfigurationError("an object's id is three numbers")
    return ObjectId(creator, number, key)


def apply_updates(objects: OwnedObjects, src: int, world_size: int, updates: list[Any]) -> None:
    """Apply another rank's updates; a refused one does not stop the others, and is raised last."""
    refusal: Exception | None = None
    for kind, creator, number, key, first, second in updates:
        if not all(type(part) is int for part in (creator, number, key, first, second)):
            raise ValueError("updates of handles are numbers")
        if kind == _PASSED_ON and not 0 <= first < world_size:
            raise ValueError(f"a handle cannot be passed on to rank {first}")
        try:
            _apply(objects, src, kind, ObjectId(creator, number, key), first, second)
        except (PermissionError, OverloadedError) as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def _apply(
    objects: OwnedObjects, src: int, kind: int, id: ObjectId, first: int, second: int
) -> None:
    if kind == _RELEASED and second >= 0:
        objects.release(id, src, first, second)
    elif kind == _PASSED_ON and second in (-1, 1):
        objects.pass_on(id, src, first, second)
    elif kind == _NOT_MADE and id.creator == src:
        objects.not_made(id)
    else:
        raise ValueError(f"invalid update of a handle: {kind!r}")


class HandleUpdates:
    """Notifies owners of the handles of this rank. Every method is safe from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._queue: runtime.SimpleQueue[tuple[int, Update | None]] = runtime.SimpleQueue()
        self._unsent: dict[int, list[Update]] = defaultdict(list)
        self._in_flight: set[int] = set()
        self._thread: runtime.Thread | None = None
        self._start_lock = runtime.Lock()
        self.is_closed = False

    @property
    def is_quiet(self) -> bool:
        """Whether all updates have been delivered."""
        return self._queue.empty() and not self._in_flight and not any(self._unsent.values())

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            with self._start_lock:
                if self._thread is None:
                    self._thread = runtime.Thread(
                        target=self._run, name="rankwire handles", daemon=True
                    )
                    self._thread.start()

    def released(self, owner: int, id: ObjectId, giver: int, sent_back: int) -> None:
        """Queue that a handle is garbage; it was sent back to its owner ``sent_back`` times."""
        # The garbage collector calls this, at any point of the program.
        if not self.is_closed:
            self._queue.put((owner, (_RELEASED, *id, giver, sent_back)))

    def passed_on(self, owner: int, id: ObjectId, rank: int, count: int = 1) -> None:
        """Queue that a handle was sent to a third rank; a count of -1 undoes that."""
        self._queue.put((owner, (_PASSED_ON, *id, rank, count)))

    def watch_making(self, owner: int, id: ObjectId, creation: RpcFuture[Any]) -> None:
        """Notify the owner if an object's creation does not begin, so that no rank waits for it."""
        creation.when_ended(partial(self._making_ended, owner, id, [True]))

    def _making_ended(
        self, owner: int, id: ObjectId, untold: list[bool], creation: RpcFuture[Any]
    ) -> None:
        if isinstance(creation.failure, _GONE):
            creation.disregard()
        elif isinstance(creation.failure, _REFUSALS):
            with suppress(IndexError):  # the owner was already notified
                untold.pop()
                self._queue.put((owner, (_NOT_MADE, *id, 0, 0)))

    def close(self) -> None:
        """Send no more updates."""
        self.is_closed = True
        self._queue.put((_STOP, None))

    def _run(self) -> None:
        while True:
            owner, update = self._queue.get()
            if owner == _STOP:
                return
            if update is None:
                self._in_flight.discard(owner)
            else:
                self._unsent[owner].append(update)
            if self._queue.empty():  # send all updates in one message
                self._send()

    def _send(self) -> None:
        for owner in [owner for owner in self._unsent if owner not in self._in_flight]:
            updates = self._unsent.pop(owner)
            self._in_flight.add(owner)
            told = self._agent.rpc_async(owner, verbs.TELL, updates, timeout=math.inf)
            told.add_done_callback(partial(self._told, owner))

    def _told(self, owner: int, call: Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if isinstance(error, RemoteError):
            _log.warning("rank %d refused updates of handles: %s", owner, error)
        elif error is not None:  # the owner is lost, or this rank is closed
            _log.debug("rank %d did not get updates of handles: %s", owner, error)
        self._queue.put((owner, None))
