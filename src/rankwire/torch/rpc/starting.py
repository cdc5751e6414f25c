"""Starting: ``init_rpc``. How it ends is in ``ending``.

The ranks meet in a store of torch's, as those of a process group do, at the same place if the
program says so, under a prefix of their own: rank 0 listens on a port of its own and publishes it
there (``forming``). Under a launcher of rankwire's there is no need of a store.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

from rankwire.backends.tcp import TcpBackend
from rankwire.codec.codec import Codec
from rankwire.collectives.objects import all_gather_object
from rankwire.errors import RankwireError
from rankwire.torch.forming import form_world
from rankwire.torch.launching import register_launchers, take_formed
from rankwire.torch.rpc import companions
from rankwire.torch.rpc.carried import register_carried
from rankwire.torch.rpc.naming import NamingRule
from rankwire.torch.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from rankwire.torch.rpc.session import Session, state
from rankwire.torch.rpc.workers import WorkerInfo

# For forming a world of a program without a limit of its own: as long as a process group has.
_LONGEST_JOIN = 1800.0

_times_initialized = itertools.count()
_lock = threading.Lock()


class Defaults:
    """What ``init_rpc`` goes by where it is not told; ``install`` sets it for other libraries."""

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
    """Join the workers, and serve their calls from now on. All ranks call it alike.

    Args:
        name: This worker's, which no other has.
        backend: Any; there is one.
        rank: This rank; as the launcher says if not given.
        world_size: The number of ranks; as the launcher says if not given.
        rpc_backend_options: Time limits, threads and where to meet.
        allow: What other workers may call beyond the functions of the program's own files: names of
            modules, functions or classes. ``"decorated"`` is the strict way: only what is
            ``@exposed``.
        pickle: Whether to send and accept as pickles what has no other form. Then every worker can
            run code on this one. All ranks must say the same.

    Raises:
        RuntimeError: RPC is initialized already, the world did not form, a name is taken, or the
            ranks do not agree on ``pickle``.
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
        raise RuntimeError("the number of workers has to be known: world_size")
    size = world_size
    _start(name, options, lambda: _form_in(store, rank, size, _patience(options)), None, None)


def _start(
    name: str,
    options: TensorPipeRpcBackendOptions,
    form: Callable[[], TcpBackend],
    allow: Iterable[Any] | str | None,
    pickle: bool | None,
) -> None:
    """Form a world and begin the session of this process in it."""
    allow = Defaults.allow if allow is None else allow
    pickle = Defaults.pickle if pickle is None else pickle
    me = WorkerInfo(name, 0)  # for its checks
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
            companions.put_back()
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
    """Return a world of the ranks that RPC is for."""
    register_launchers()
    timeout = _patience(options)
    size = -1 if world_size is None else world_size
    # As an attribute of its package it is a function of the same name.
    rendezvous = import_module("torch.distributed.rendezvous").rendezvous
    store, rank, size = next(rendezvous(options.init_method, rank, size, timeout=timeout))
    return take_formed(rank, size) or _form_in(store, rank, size, timeout)


def _form_in(store: Any, rank: int, size: int, timeout: timedelta) -> TcpBackend:
    """Return a world of ranks that share a store."""
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
    """Get to know the workers, and serve."""
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
    register_carried(codec, rule)
    world.on_peer_lost(session.lose)
    companions.put_in_place()
    state.session = session  # before others may call what asks for it
    world.barrier()


def is_available() -> bool:
    """Whether RPC can be used: always."""
    return True
