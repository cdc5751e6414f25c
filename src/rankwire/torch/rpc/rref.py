"""RRef: a handle of an object on some rank, which counts its handles (``owned_objects``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, OverloadedError
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc.autograd import backward_of
from rankwire.torch.rpc.call_results import CallFuture, translated
from rankwire.torch.rpc.options import UNSET_RPC_TIMEOUT
from rankwire.torch.rpc.owned_objects import ObjectId, OwnedObject
from rankwire.torch.rpc.session import Session, WorkerInfo, current, state
from rankwire.torch.rpc.verbs import BACKWARD, CALL, CHECK, FETCH, MAKE, MAKE_BY_METHOD, TYPE

_log = logging.getLogger("rankwire")

T = TypeVar("T")


class RRef(Generic[T]):
    """A handle of an object, which stays on its owner. Safe from any thread.

    A handle created from a value has this rank as its owner; ``remote`` returns handles of objects
    on other ranks. Handles may be arguments and results of calls. ``type_hint`` is not used.
    """

    _is_counted = False

    def __init__(self, value: T, type_hint: Any = None) -> None:
        session = state.session
        if session is None:
            raise RuntimeError(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)?"
            )
        owned = OwnedObject(session.owned.new_id())
        owned.resolve(value)
        self._set_up(session, session.me.id, owned.id, owned)

    def _set_up(
        self, session: Session, owner: int, id: ObjectId, owned: OwnedObject | None
    ) -> None:
        self._session = session
        self._owner = owner
        self._id = id
        self._owned = owned
        if owned is not None:
            session.owned.keep_own(owned)
        self._fork = id  # only for texts
        self._creation: RpcFuture[Any] | None = None
        self._creation_limit = 0.0
        self._giver = owner
        self._sent_back = 0
        self._type: torch.futures.Future[type] | None = None
        self._checked: set[str] = set()

    @classmethod
    def _of(
        cls,
        session: Session,
        owner: int,
        id: ObjectId,
        owned: OwnedObject | None = None,
        giver: int | None = None,
    ) -> RRef[Any]:
        rref: RRef[Any] = cls.__new__(cls)
        rref._set_up(session, owner, id, owned)
        if owned is None:
            rref._is_counted = True
            rref._giver = owner if giver is None else giver
            session.updates.start()
        return rref

    def __del__(self) -> None:
        if self._is_counted:
            self._session.updates.released(self._owner, self._id, self._giver, self._sent_back)

    def is_owner(self) -> bool:
        """Return whether the object is on this worker."""
        return self._owned is not None

    def owner(self) -> WorkerInfo:
        """Return the worker that has the object."""
        return self._session.workers[self._owner]

    def owner_name(self) -> str:
        """Return the name of the worker that has the object."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to have the object, or to be creating it."""
        return self._creation is None or (
            self._creation.done() and self._creation.exception() is None
        )

    def local_value(self) -> T:
        """Wait until the object is created and return it; only its owner can."""
        if self._owned is None:
            raise RuntimeError(
                f"For UserRRef(rref_id={_unique(self._id)}, fork_id={_unique(self._fork)}), can't "
                f"call localValue() on user {self._session.me}. Call it on owner {self.owner()}"
            )
        return _wait_here(self, self._session.limit(UNSET_RPC_TIMEOUT))  # type: ignore[no-any-return]

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return a copy of the object, or on the owner the object. A timeout of 0 is no limit."""
        session = self._usable("Cannot call to_here() on it after deletion.")
        limit = session.limit(timeout)
        if self._owned is not None:
            return _wait_here(self, limit)  # type: ignore[no-any-return]
        if self._creation is not None:
            _raise_if_not_made(self)
        try:
            return session.call(self._owner, FETCH, self._id, {}, limit)  # type: ignore[no-any-return]
        except Exception:
            _raise_if_not_made(self)  # its error says more, if it is known by now
            raise

    def _usable(self, otherwise: str) -> Session:
        session = self._session
        if state.session is not session:
            raise RuntimeError(f"{self} has been deleted. {otherwise}")
        return session

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the object, a scalar tensor, on its owner.

        Args:
            dist_autograd_ctx_id: The distributed autograd context that gets the gradients. Only the
                owner may leave it out; then they are added to ``.grad``.
            retain_graph: Whether to keep the graph for another pass.
        """
        if self._owned is not None:
            backward_of(self.local_value(), dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id == -1:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        else:
            session = self._usable("Cannot call backward() on it after deletion.")
            args = (*self._id, dist_autograd_ctx_id, retain_graph)
            session.call(self._owner, BACKWARD, args, {}, session.limit(UNSET_RPC_TIMEOUT))

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods call the object's and wait for the result."""
        return MethodProxy(self, _call_method, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods call the object's and return a future."""
        return MethodProxy(self, _start_method, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods call the object's and return handles of the results."""
        return MethodProxy(self, _make_by_method, timeout)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        if self._type is None:
            if self._owned is not None:
                known: torch.futures.Future[type] = torch.futures.Future()
                known.set_result(type(self.local_value()))
                self._type = known
            else:
                session = self._usable("Cannot ask for its type after deletion.")
                limit = session.limit(timeout)
                call = session.start(self._owner, TYPE, self._id, {}, limit)
                self._type = CallFuture(session, call, self._owner, limit)
        return self._type.wait() if blocking else self._type

    def _get_future(self) -> torch.futures.Future[Any]:
        if self._creation is None:
            raise RuntimeError("only the worker that called remote() has the future of that call")
        return CallFuture(self._session, self._creation, self._owner, self._creation_limit)

    def _serialize(self) -> Any:
        return self.__reduce__()

    def __reduce__(self) -> Any:
        if state.session is not self._session and self._owned is None:
            raise RuntimeError("Cannot call fork an UserRRef after deletion.")
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __str__(self) -> str:
        if self._owned is not None:
            return f"OwnerRRef({_unique(self._id)})"
        return f"UserRRef(RRefId = {_unique(self._id)}, ForkId = {_unique(self._fork)})"

    __repr__ = __str__


def _wait_here(rref: RRef[Any], limit: float) -> Any:
    owned = rref._owned
    assert owned is not None
    if owned.is_ready:
        return owned.get()
    ready = owned.when_ready()
    done = runtime.Event()
    ready.add_done_callback(lambda _: done.set())
    deadline = Deadline(limit, rref._session.agent.backend.clock)
    if not deadline.clock.wait(done, deadline.sleep_limit()):
        late = DeadlineExceededError(limit, waiting_for=[rref._owner])
        raise translated(late, rref._session, rref._owner, limit) from late
    return owned.get()


def _why_not_made(rref: RRef[Any]) -> Exception | None:
    creation = rref._creation
    error = creation.exception() if creation is not None and creation.done() else None
    if not isinstance(error, Exception):
        return None
    why: Exception = RuntimeError(
        "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the "
        "owner node does not exist."
    )
    if not isinstance(error, DeadlineExceededError):
        why = translated(error, rref._session, rref._owner, rref._creation_limit)
    why.__cause__ = error
    return why


def _raise_if_not_made(rref: RRef[Any]) -> None:
    why = _why_not_made(rref)
    if why is not None:
        raise why


def remote(
    to: Any,
    func: Callable[..., Any],
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run a function on a worker, which keeps the result; return a handle of it at once.

    Arguments are those of ``rpc_sync``; they may be changed after this returns. The timeout is for
    creating the object; the first use of the handle raises the error. Safe from any thread.
    """
    session = current()
    rank, limit = session.rank_of(to), session.limit(timeout)
    name = session.names.get(func) or session.named(func)
    return _make(session, rank, MAKE, (name, *(args or ())), kwargs or {}, limit)


def _make(
    session: Session,
    rank: int,
    how: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    limit: float,
) -> RRef[Any]:
    id = fork = session.owned.new_id()
    if rank == session.me.id:
        rref = RRef._of(session, rank, id, session.owned.expect(id, rank))
    else:
        fork = session.owned.new_id()
        rref = RRef._of(session, rank, id)
    rref._fork = fork
    try:
        rref._creation = session.start(rank, how, (*id, *args), kwargs, limit)
    except BaseException:
        rref._is_counted = False
        raise
    rref._creation_limit = limit
    if rank != session.me.id:
        session.updates.watch_making(rank, id, rref._creation)
    return rref


class MethodProxy:
    """The methods of an object, called in one of three ways."""

    __slots__ = ("_how", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], how: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._how, self._rref, self._timeout, name)


def _call_method(rref: RRef[Any], timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Any:
    session = rref._usable("Cannot call its methods after deletion.")
    limit = session.limit(timeout)
    if rref._creation is not None:
        _raise_if_not_made(rref)
    try:
        return session.call(rref._owner, CALL, (*rref._id, method, *args), kwargs, limit)
    except Exception:
        _raise_if_not_made(rref)  # its error says more, if it is known by now
        raise


def _start_method(
    rref: RRef[Any], timeout: float, method: str, /, *args: Any, **kwargs: Any
) -> torch.futures.Future[Any]:
    session = rref._usable("Cannot call its methods after deletion.")
    limit = session.limit(timeout)
    why_not = _why_not_made(rref)
    if why_not is not None:
        failed: torch.futures.Future[Any] = torch.futures.Future()
        failed.set_exception(why_not)
        return failed
    call = session.start(rref._owner, CALL, (*rref._id, method, *args), kwargs, limit)
    return CallFuture(session, call, rref._owner, limit)


def _make_by_method(
    rref: RRef[Any], timeout: float, method: str, /, *args: Any, **kwargs: Any
) -> RRef[Any]:
    # As with torch, a missing method raises at once.
    session = rref._usable("Cannot call its methods after deletion.")
    limit = session.limit(timeout)
    if method not in rref._checked:
        try:
            session.call(rref._owner, CHECK, (*rref._id, method), {}, limit)
            rref._checked.add(method)
        except RuntimeError as error:
            # The first use of the handle raises these.
            if not isinstance(error.__cause__, ConnectionError | TimeoutError | OverloadedError):
                raise
            _log.debug("rank %d was not asked for %r: %s", rref._owner, method, error)
    return _make(session, rref._owner, MAKE_BY_METHOD, (*rref._id, method, *args), kwargs, limit)


def _unique(id: ObjectId) -> str:
    return f"GloballyUniqueId(created_on={id.creator}, local_id={id.number})"
