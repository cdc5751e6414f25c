"""The owner's side of handles: create objects, return their values, call their methods.

A request for an object that is still being created does not occupy a worker: its value is a
deferred reply, and a thread of this module runs its methods once it is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.errors import ChannelClosedError, ConfigurationError
from rankwire.torch.rpc.autograd import backward_of
from rankwire.torch.rpc.guards import find_method
from rankwire.torch.rpc.handle_updates import apply_updates
from rankwire.torch.rpc.owned_objects import ObjectId, OwnedObject
from rankwire.torch.rpc.verbs import (
    BACKWARD,
    CALL,
    CHECK,
    FETCH,
    MAKE,
    MAKE_BY_METHOD,
    TELL,
    TYPE,
    register,
    sender,
)

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session


class ObjectServer:
    """Serves the requests of other ranks' handles. Every method is safe from any thread."""

    def __init__(self, session: Session, threads: int) -> None:
        self._session = session
        self._owned = session.owned
        self.threads = MethodThreads(threads)
        ways: dict[str, Callable[..., Any]] = {
            MAKE: self.make,
            MAKE_BY_METHOD: self.make_by_method,
            FETCH: self.fetch,
            CALL: self.call,
            CHECK: self.check,
            TYPE: self.type_of,
            BACKWARD: self.backward,
            TELL: self.apply_updates,
        }
        for verb, function in ways.items():
            register(session.agent, verb, function)

    def close(self) -> None:
        """Run no more methods of objects that are still being created."""
        self.threads.close()

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
        """Raise the error that calling a method would, if it cannot be called."""
        owned = self._find(creator, number, key)

        def find() -> None:
            self._method(owned, method)

        return find() if owned.is_ready else self._once_ready(owned, find)

    def type_of(self, creator: int, number: int, key: int) -> Any:
        """Return the class of an object."""
        owned = self._find(creator, number, key)

        def find() -> type:
            return type(owned.get())

        return find() if owned.is_ready else self._once_ready(owned, find)

    def backward(
        self, creator: int, number: int, key: int, context_id: int, retain_graph: bool
    ) -> Any:
        """Run a backward pass from an object."""
        owned = self._find(creator, number, key)

        def run() -> None:
            backward_of(owned.get(), context_id, retain_graph)

        return run() if owned.is_ready else self._once_ready(owned, run)

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
        value.add_done_callback(partial(self._finish_later, owned, made))
        return made

    def _finish(self, owned: OwnedObject, value: Any, error: BaseException | None = None) -> None:
        owned.resolve(value, error)
        self._owned.tidy(owned)

    def _finish_later(self, owned: OwnedObject, made: Future[Any], promise: Future[Any]) -> None:
        try:
            value = promise.result()
        except BaseException as error:
            self._finish(owned, None, error)
            if not made.cancelled():
                made.set_exception(error)
        else:
            self._finish(owned, value)
            if not made.cancelled():
                made.set_result(None)

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

    def _once_ready(self, owned: OwnedObject, do: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        context = copy_context()  # its calls belong to the call that is served

        def run(_: object) -> None:
            try:
                self.threads.run(partial(context.run, do), done)
            except BaseException as error:
                _fail(done, error)

        self._wait_for(owned).add_done_callback(run)
        return done


class MethodThreads:
    """Threads for methods of objects that were still being created. They end when idle."""

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
        """Fail the methods that have not begun, and those that come later."""
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
        result.add_done_callback(partial(_copy_outcome, done))
    else:
        done.set_result(result)


def _copy_outcome(target: Future[Any], source: Future[Any]) -> None:
    try:
        target.set_result(source.result())
    except BaseException as error:
        target.set_exception(error)


def _id(creator: int, number: int, key: int) -> ObjectId:
    if not all(type(part) is int for part in (creator, number, key)):
        raise ConfigurationError("an object's id is three numbers")
    return ObjectId(creator, number, key)
