"""The session: the RPC state of a process between ``init_rpc`` and ``shutdown``; at most one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.errors import FunctionNotFoundError, OverloadedError, PeerLostError, RankwireError
from rankwire.rpc.agent import Agent
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc import autograd
from rankwire.torch.rpc.autograd_contexts import CONTEXT, TrackedCall
from rankwire.torch.rpc.call_results import ReplyWatcher, UnsendableError, translated
from rankwire.torch.rpc.functions import answer_later, is_async, settle
from rankwire.torch.rpc.guards import guarded
from rankwire.torch.rpc.naming_rule import NameRefusedError, NamingRule, name_of
from rankwire.torch.rpc.object_requests import HandleUpdates, ObjectServer
from rankwire.torch.rpc.owned_objects import OwnedObjects
from rankwire.torch.rpc.verbs import APPLY, CALL_IN_CONTEXT, GATHER, register, sender

_MAX_NAME = 128
_NAME = re.compile(r"[\w:-]+", re.ASCII)


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A worker: its rank and its name of letters, digits, ``_``, ``:`` and ``-``. Immutable."""

    name: str
    id: int

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name:
            raise RuntimeError("Worker name must be non-empty text.")
        if len(name) >= _MAX_NAME:
            raise RuntimeError(f"Worker name must be shorter than {_MAX_NAME}, not {len(name)}.")
        if not _NAME.fullmatch(name):
            raise RuntimeError(f"Worker name must match ^[A-Za-z0-9-_:]*$, but got {name!r}")
        object.__setattr__(self, "id", int(self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


Names = tuple[str, ...]

_MAX_NAMES = 4096
_MOST_WAITING = 1024  # calls of one worker; as many as it can have in flight

NOT_INITIALIZED = (
    "RPC has not been initialized, or was shut down. Call torch.distributed.rpc.init_rpc first, or "
    "the init_rpc of rankwire.torch.rpc."
)


class Session:
    """This process among the workers; it owns the backend. Every method is safe from any thread."""

    def __init__(
        self,
        backend: Backend,
        workers: Iterable[WorkerInfo],
        *,
        rule: NamingRule,
        codec: Codec,
        timeout: float,
        threads: int,
    ) -> None:
        self.workers = list(workers)
        self.me = self.workers[backend.rank]
        self.ranks = {worker.name: worker.id for worker in self.workers}
        self.rule = rule
        self.timeout = timeout
        self.names: dict[Any, str] = {}  # of called functions
        self.agent = Agent(
            backend,
            name="rankwire.torch.rpc",
            timeout=math.inf,
            workers=threads,
            codec=codec,
            resolve=self.function_of,
        )
        register(self.agent, {APPLY: self._apply})
        self.owned = OwnedObjects(backend.rank)
        self.updates = HandleUpdates(self.agent)
        self.watcher = ReplyWatcher(backend.clock)
        self.object_server = ObjectServer(self, threads)
        self.gatherer = Gatherer(self)
        autograd.attach(self.agent, self._apply, lambda: self.timeout)

    def rank_of(self, to: Any) -> int:
        """Return the rank of a name, rank or ``WorkerInfo``, or raise torch's error."""
        if isinstance(to, WorkerInfo):
            to = to.id
        if isinstance(to, str):
            rank = self.ranks.get(to)
            if rank is None:
                raise RuntimeError(f"could not find destination {to}: no worker has that name")
            return rank
        if isinstance(to, int) and not isinstance(to, bool):
            if not 0 <= to < len(self.workers):
                raise RuntimeError(
                    f"could not find destination {to}: the ranks are 0 to {len(self.workers) - 1}"
                )
            return to
        raise ValueError(f"Cannot get WorkerInfo from name {to}")

    def limit(self, timeout: float) -> float:
        """Return the seconds for a call with torch's ``timeout`` argument."""
        if timeout < 0.0:
            timeout = self.timeout
        return timeout if timeout > 0.0 else math.inf

    def call(
        self, rank: int, name: str, args: Iterable[Any], kwargs: Mapping[str, Any], limit: float
    ) -> Any:
        """Call a name on a rank and return the result, or raise the error as torch would."""
        if CONTEXT.get() is not None or "timeout" in kwargs:
            name, args, kwargs = _wrapped(rank, name, args, kwargs)
        try:
            return self.agent.rpc_sync(rank, name, *args, timeout=limit, **kwargs)
        except RankwireError as error:
            raise translated(error, self, rank, limit) from error

    def start(
        self, rank: int, name: str, args: Iterable[Any], kwargs: Mapping[str, Any], limit: float
    ) -> RpcFuture[Any]:
        """Start a call of a name on a rank and return its future; raise only if encoding fails."""
        if CONTEXT.get() is not None or "timeout" in kwargs:
            name, args, kwargs = _wrapped(rank, name, args, kwargs)
        try:
            return self.agent.rpc_async(rank, name, *args, timeout=limit, **kwargs)
        except RankwireError as error:
            raise translated(error, self, rank, limit) from error

    def named(self, function: Any) -> Any:
        """Return the name under which a function travels, or the function if it is pickled."""
        if not callable(function):
            raise TypeError("function should be callable.")
        try:
            name = name_of(function)
        except NameRefusedError as error:
            if self.agent.codec.allows_pickle:
                return function
            raise UnsendableError(str(error)) from error
        if len(self.names) >= _MAX_NAMES:
            self.names.clear()
        self.names[function] = name
        return name

    def function_of(self, name: str) -> Callable[..., Any]:
        """Return the function of a name, or raise ``FunctionNotFoundError``."""
        try:
            return self.servable(self.rule.find(name))
        except NameRefusedError as error:
            raise FunctionNotFoundError(name, reason=error.message) from error

    def servable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function, or a wrapper that checks its arguments or waits for its future."""
        if is_async(function):
            return answer_later(function)
        return function if self.rule.anything else guarded(function)

    def _apply(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.runnable(function)(*args, **kwargs)

    def runnable(self, function: Any) -> Callable[..., Any]:
        """Return the function of a name or a pickled function."""
        if isinstance(function, str):
            return self.agent.lookup(function) or self.function_of(function)
        if not self.agent.codec.allows_pickle:
            # Not every object that may be sent may be called: torch.Tensor(9) shows old memory.
            raise FunctionNotFoundError(f"{function!r:.200}", reason="it did not come as a name")
        return self.servable(function)

    def activity(self) -> tuple[bool, int]:
        """Return whether any call or update is in progress here, and the number of calls made."""
        in_flight, in_service, count = self.agent.activity()
        return bool(in_flight or in_service) or not self.updates.is_quiet, count

    def lose(self, error: PeerLostError) -> None:
        """Release a lost rank's handles, and fail the calls that wait for it."""
        self.owned.lose(error.peer, error)
        self.gatherer.lose(error.peer, error)

    def close(self, grace: float) -> None:
        """Stop serving and leave the world."""
        autograd.detach()
        self.updates.close()
        self.object_server.threads.close()
        self.watcher.close()
        self.owned.clear()
        try:
            self.agent.close(grace)
        finally:
            self.agent.backend.close()


def _wrapped(
    rank: int, name: str, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[str, Iterable[Any], Mapping[str, Any]]:
    context = CONTEXT.get()
    if context is not None and context.enlist(rank):
        return CALL_IN_CONTEXT, (TrackedCall(context, name, list(args), dict(kwargs)),), {}
    if "timeout" in kwargs:  # the name of the agent's own argument
        return APPLY, (name, list(args), dict(kwargs)), {}
    return name, args, kwargs


@dataclass
class _Gather:
    given: dict[str, Any] = field(default_factory=dict)
    waiters: list[Future[Any]] = field(default_factory=list)


class Gatherer:
    """Gathers values of several workers at the first one by name. Safe from any thread.

    Replies wait until all workers have called or one is lost. No callback runs under ``_lock``.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = runtime.Lock()
        self._counts: Counter[Names] = Counter()
        self._waiting: Counter[int] = Counter()
        self._gathers: dict[tuple[Names, int], _Gather] = {}
        register(session.agent, {GATHER: self._join})

    def gather(self, value: Any, names: Names, limit: float) -> dict[str, Any]:
        """Contribute a value and return the values of all workers, by name."""
        with self._lock:
            number = self._counts[names]
            self._counts[names] += 1
        leader = self._session.ranks[names[0]]
        args = (list(names), number, value)
        return self._session.agent.rpc_sync(leader, GATHER, *args, timeout=limit)  # type: ignore[no-any-return]

    def lose(self, rank: int, error: PeerLostError) -> None:
        """Fail the gathers that wait for a lost worker."""
        name = self._session.workers[rank].name
        with self._lock:
            ended = [
                self._gathers.pop(key)
                for key, gather in list(self._gathers.items())
                if name in key[0] and name not in gather.given
            ]
        for gather in ended:
            for waiter in gather.waiters:
                with suppress(InvalidStateError):  # cancelled
                    waiter.set_exception(error.copy())

    def _join(self, names: list[str], number: int, value: Any) -> Future[Any]:
        src, key = sender(), (tuple(names), number)
        name, me = self._session.workers[src].name, self._session.me.name
        if name not in names or names[0] != me or not self._session.ranks.keys() >= set(names):
            raise PermissionError(f"{name} does not take part in a gathering of {names} on {me}")
        waiter: Future[Any] = Future()
        with self._lock:
            if self._waiting[src] >= _MOST_WAITING:
                raise OverloadedError(f"{name} waits in {_MOST_WAITING} gatherings here")
            self._waiting[src] += 1
            gather = self._gathers.setdefault(key, _Gather())
            gather.given[name] = value
            gather.waiters.append(waiter)
            is_complete = len(gather.given) == len(names)
            if is_complete:
                del self._gathers[key]
        waiter.add_done_callback(partial(self._leave, key, src))
        if is_complete:
            for each in gather.waiters:
                settle(each, lambda: gather.given)
        return waiter

    def _leave(self, key: tuple[Names, int], src: int, waiter: Future[Any]) -> None:
        with self._lock:
            self._waiting[src] -= 1
            gather = self._gathers.get(key)
            if gather is not None and all(each.cancelled() for each in gather.waiters):
                del self._gathers[key]


class _Current:
    session: Session | None = None
    at_end = ExitStack()  # closed when the session has ended


state = _Current()


def current() -> Session:
    """Return this process's session, or raise torch's error if RPC is not initialized."""
    session = state.session
    if session is None:
        raise RuntimeError(NOT_INITIALIZED)
    return session
