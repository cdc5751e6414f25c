"""Join and leave the workers: ``init_rpc`` and ``shutdown``.

A graceful ``shutdown`` waits until every worker has called it and no call is in progress anywhere,
because a call may have started others that no caller waits for. If a worker is lost, the others
shut down without it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

from rankwire import runtime
from rankwire.backends.base import Backend
from rankwire.backends.tcp import TcpBackend
from rankwire.codec.codec import Codec
from rankwire.collectives.objects import all_gather_object
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    CollectiveAbortedError,
    PeerLostError,
    RankwireError,
)
from rankwire.torch.rpc import replacements
from rankwire.torch.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT
from rankwire.torch.rpc.naming_rule import NamingRule
from rankwire.torch.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from rankwire.torch.rpc.session import Session, WorkerInfo, current, state
from rankwire.torch.rpc.torch_codec import register_hooks
from rankwire.torch.torch_rendezvous import form_world, register_launchers, take_formed

# For forming a world without a given timeout: that of a process group.
_LONGEST_JOIN = 1800.0

_times_initialized = itertools.count()
_lock = runtime.Lock()


class Defaults:
    """Defaults of ``init_rpc``'s arguments; ``install`` sets them for other libraries."""

    allow: Iterable[Any] | str = ()
    pickle = False


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    allow: Iterable[Any] | str | None = None,
    pickle: bool | None = None,
) -> None:
    """Join the workers and start serving their calls. All ranks call it.

    Args:
        name: This worker's unique name.
        backend: Ignored; there is only one.
        rank: This rank; from the launcher if not given.
        world_size: The number of ranks; from the launcher if not given.
        rpc_backend_options: Timeouts, threads and where the ranks meet.
        allow: What other workers may call besides functions in the program's own files: modules,
            functions or classes. ``"decorated"`` allows only what is ``@exposed``.
        pickle: Whether to send and accept pickles of values that have no other encoding. Then every
            worker can run code on this one. It must be the same on all ranks.

    Raises:
        RuntimeError: RPC is already initialized, the world did not form, a name is not unique, or
            the ranks do not agree on ``pickle``.
    """
    options = _check_options(backend, rpc_backend_options)
    _start(name, options, lambda: _form(options, rank, world_size), allow, pickle)


def init_rpc_in(
    backend: BackendType | None = None,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the workers that share a store of torch's; otherwise as ``init_rpc``."""
    options = _check_options(backend, rpc_backend_options)
    if not world_size:
        raise RuntimeError("world_size is required")
    size = world_size
    _start(name, options, lambda: _form_in(store, rank, size, _patience(options)), None, None)


def _start(
    name: str,
    options: TensorPipeRpcBackendOptions,
    form: Callable[[], TcpBackend],
    allow: Iterable[Any] | str | None,
    pickle: bool | None,
) -> None:
    allow = Defaults.allow if allow is None else allow
    pickle = Defaults.pickle if pickle is None else pickle
    me = WorkerInfo(name, 0)  # checks the name
    with _lock:
        if state.session is not None:
            raise RuntimeError("RPC is already initialized")
        rule = NamingRule(allow, anything=pickle)
        try:
            world = form()
        except RankwireError as error:
            raise RuntimeError(str(error)) from error
        try:
            _begin(world, me.name, rule, options, pickle=pickle)
        except BaseException as error:
            state.session = None
            replacements.put_back()
            world.close(error=error)
            if isinstance(error, RankwireError):
                raise RuntimeError(str(error)) from error
            raise


def _check_options(backend: Any, options: Any) -> TensorPipeRpcBackendOptions:
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if options is None:
        return TensorPipeRpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if not isinstance(options, TensorPipeRpcBackendOptions):
        if backend is None:
            raise TypeError(f"Could not infer backend for options {options}")
        raise TypeError("`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`")
    return options


def _form(options: RpcBackendOptions, rank: int, world_size: int | None) -> TcpBackend:
    register_launchers()
    timeout = _patience(options)
    size = -1 if world_size is None else world_size
    # Not by attribute: ``torch.distributed.rendezvous`` is a function of the same name.
    rendezvous = import_module("torch.distributed.rendezvous").rendezvous
    store, rank, size = next(rendezvous(options.init_method, rank, size, timeout=timeout))
    return take_formed(rank, size) or _form_in(store, rank, size, timeout)


def _form_in(store: Any, rank: int, size: int, timeout: timedelta) -> TcpBackend:
    store.set_timeout(timeout)
    own = dist.PrefixStore(f"rankwire_rpc_{next(_times_initialized)}", store)
    return form_world(own, rank, size, timeout)


def _patience(options: RpcBackendOptions) -> timedelta:
    seconds = options.rpc_timeout if 0.0 < options.rpc_timeout < _LONGEST_JOIN else _LONGEST_JOIN
    return timedelta(seconds=seconds)


def _begin(
    world: TcpBackend,
    name: str,
    rule: NamingRule,
    options: TensorPipeRpcBackendOptions,
    *,
    pickle: bool,
) -> None:
    """Exchange names with the other workers, and start serving."""
    told = all_gather_object(world, (name, pickle))
    names = [told_name for told_name, _ in told]
    for other, (told_name, told_pickle) in enumerate(told):
        if names.index(told_name) != other:
            raise RuntimeError(
                f"RPC worker name {told_name!r} is not unique: ranks {names.index(told_name)} and "
                f"{other} have it"
            )
        if told_pickle != pickle:
            raise RuntimeError(
                f"init_rpc(pickle=...) differs: {pickle} on rank {world.rank}, {told_pickle} on "
                f"rank {other}"
            )
    codec = Codec(allow_pickle=pickle)
    codec.how_to_pickle = "pass pickle=True to init_rpc on all ranks"
    session = Session(
        world,
        [WorkerInfo(name, rank) for rank, name in enumerate(names)],
        rule=rule,
        codec=codec,
        timeout=options.rpc_timeout,
        threads=options.num_worker_threads,
    )
    register_hooks(codec, rule)
    world.on_peer_lost(session.lose)
    replacements.put_in_place()
    state.session = session  # before others can call functions that need it
    world.barrier()


def is_available() -> bool:
    """Return True: RPC can always be used."""
    return True


_log = logging.getLogger("rankwire")

_GRACE = 5.0
_LOOK_EVERY = 0.002
_GONE = (PeerLostError, ChannelClosedError)

# By rank: whether anything is in progress there, and its number of calls.
Told = dict[int, tuple[bool, int]]

_codec = Codec()


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the workers.

    Args:
        graceful: Whether to wait until every worker has called this or is lost, and no call is in
            progress anywhere. Calls are served until then. Lost workers are logged.
        timeout: Seconds for that; 0 is no limit.

    Raises:
        RuntimeError: RPC is not initialized, or other workers did not call it in time. In that case
            this worker has left nevertheless.
    """
    session = current()
    try:
        if graceful:
            wait_for_all(session, timeout)
    finally:
        end(session)


def wait_for_all(session: Session, timeout: float) -> None:
    """Return once every rank has called this or is lost, and no call is in progress anywhere.

    That is the case when no rank had a call in progress in two rounds in a row, and none made or
    served one in between.
    """
    limit = timeout if timeout > 0.0 else math.inf
    deadline = Deadline(limit, session.backend.clock)
    farewell = _Farewell(session.backend, deadline)
    last: Told = {}
    try:
        for look in itertools.count():
            is_busy, count = session.activity()
            told = farewell.tell(is_busy, count - look)
            is_quiet = bool(told) and not any(is_busy for is_busy, _ in told.values())
            if is_quiet and told == last:
                break
            last = told
            if told and not is_quiet:
                deadline.clock.sleep(min(_LOOK_EVERY, deadline.sleep_limit()))
    except RankwireError as error:
        raise RuntimeError(f"not all workers came to shutdown: {error}") from error
    _log_lost_workers(session)


def _log_lost_workers(session: Session) -> None:
    for worker in session.workers:
        failure = session.backend.failure_of(worker.id) if worker != session.me else None
        if isinstance(failure, PeerLostError):
            _log.warning("the workers shut down without %s: %s", worker, failure)


class _Farewell:
    """Exchanges the ranks' activity. For one thread.

    While all ranks are there, this is a collective. When a rank is lost, all collectives of the
    world fail; then each rank reports to the lowest remaining one, which distributes all reports.
    """

    def __init__(self, backend: Backend, deadline: Deadline) -> None:
        self._backend = backend
        self._deadline = deadline
        self._is_complete = True
        self._gone: set[int] = set()

    def tell(self, is_busy: bool, count: int) -> Told:
        """Return the reports of all remaining ranks; empty if the round must be repeated."""
        own = is_busy, count
        if self._is_complete:
            try:
                told = all_gather_object(self._backend, own, timeout=self._deadline.remaining())
            except (*_GONE, CollectiveAbortedError):
                self._is_complete = False
                return {}
            return dict(enumerate(told))
        lowest = min(set(range(self._backend.world_size)) - self._gone)
        return self._lead(own) if lowest == self._backend.rank else self._follow(lowest, own)

    # Two ranks exchange one sequence of messages, led by the lower rank. When a leader is lost, all
    # start again with the next one. So both sides are in the same round.

    def _follow(self, leader: int, own: tuple[bool, int]) -> Told:
        try:
            self._send(own, leader)
            told: Told = self._receive(leader)
        except _GONE:
            self._gone.add(leader)
            return {}
        return told

    def _lead(self, own: tuple[bool, int]) -> Told:
        told = {self._backend.rank: own}
        others = set(range(self._backend.rank + 1, self._backend.world_size))
        for rank in sorted(others - self._gone):
            try:
                told[rank] = self._receive(rank)
            except _GONE:
                self._gone.add(rank)
        for rank in sorted(others - self._gone):
            try:
                self._send(told, rank)
            except _GONE:
                self._gone.add(rank)
        return told

    def _send(self, value: Any, rank: int) -> None:
        buffers, _ = _codec.encode(value)
        self._backend.send(buffers, rank, timeout=self._deadline.remaining())

    def _receive(self, rank: int) -> Any:
        return _codec.decode(self._backend.recv(rank, timeout=self._deadline.remaining()))


def end(session: Session) -> None:
    """Close the session of this process."""
    try:
        session.close(_GRACE)
    finally:
        replacements.put_back()
        state.session = None
