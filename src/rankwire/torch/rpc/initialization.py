"""Join the workers (``init_rpc``), and put rankwire's names in place of torch's (``install``).

torch's distributed autograd, optimizer and remote modules work on torch's RPC only, so ``init_rpc``
replaces them until ``shutdown``. ``install`` replaces all of RPC for libraries that import torch's,
but not names imported before (``from torch.distributed.rpc import rpc_sync``).
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist

from rankwire import runtime
from rankwire.backends.tcp import TcpBackend
from rankwire.codec.codec import Codec
from rankwire.collectives.objects import all_gather_object
from rankwire.errors import RankwireError
from rankwire.torch.rpc import api, autograd, functions
from rankwire.torch.rpc.naming_rule import NamingRule
from rankwire.torch.rpc.optimizer import DistributedOptimizer
from rankwire.torch.rpc.options import (
    BackendType,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    construct_rpc_backend_options,
)
from rankwire.torch.rpc.remote_module import RemoteModule
from rankwire.torch.rpc.rref import RRef
from rankwire.torch.rpc.session import Session, WorkerInfo, state
from rankwire.torch.rpc.torch_codec import register_hooks
from rankwire.torch.torch_rendezvous import form_world, register_launchers, take_formed

# For forming a world without a given timeout: that of a process group.
_LONGEST_JOIN = 1800.0

_times_initialized = itertools.count()
_lock = runtime.Lock()

_PACKAGE = "torch.distributed.rpc"
_EXTENSION = "torch._C._distributed_rpc"
# What programs import from torch beside RPC, by module.
_BESIDE_RPC: dict[str, dict[str, Any]] = {
    "torch.distributed.autograd": autograd.NAMES,
    "torch.distributed.optim.optimizer": {"DistributedOptimizer": DistributedOptimizer},
    "torch.distributed.optim": {"DistributedOptimizer": DistributedOptimizer},
    "torch.distributed.nn.api.remote_module": {"RemoteModule": RemoteModule},
    "torch.distributed.nn": {"RemoteModule": RemoteModule},
}


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
    """Join the workers and start serving their calls. All ranks must call it.

    Args:
        name: This worker's unique name.
        backend: Ignored; there is only one.
        rank: From the launcher if not given.
        world_size: From the launcher if not given.
        rpc_backend_options: Timeouts, threads and where the ranks meet.
        allow: What other workers may call besides functions in the program's own files: modules,
            functions or classes. ``"decorated"`` allows only ``@exposed`` functions and classes.
        pickle: Whether to send and accept pickles of values that have no other encoding. If so,
            every worker can run code on this one. It must be the same on all ranks.

    Raises:
        RuntimeError: RPC is already initialized, the world did not form, a name is not unique, or
            the ranks do not agree on ``pickle``.
    """
    options = _check_options(backend, rpc_backend_options)
    _start(name, options, lambda: _form(options, rank, world_size), allow, pickle)


def _init_rpc_backend(
    backend: BackendType | None = None,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
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
            state.at_end.close()
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
    rendezvous = importlib.import_module("torch.distributed.rendezvous").rendezvous
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
    state.at_end.callback(put_back)
    put_in_place(_BESIDE_RPC)
    state.session = session  # before others can call functions that need it
    world.barrier()


def is_available() -> bool:
    """Return True: RPC can always be used."""
    return True


_MISSING = object()

Names = Mapping[str, Mapping[str, Any]]  # the new values, by module and name
Replaced = list[tuple[ModuleType, str, Any]]

_replaced: Replaced = []


def put_in_place(names: Names) -> None:
    """Replace torch's names until ``put_back``, unless torch's own RPC is initialized."""
    is_torchs_set = getattr(sys.modules.get(_EXTENSION), "_is_current_rpc_agent_set", None)
    if is_torchs_set is None or not is_torchs_set():
        _replaced.extend(_replace(names, everywhere=True))


def put_back() -> None:
    """Restore torch's names. Idempotent."""
    _restore(_replaced)


def _replace(names: Names, *, everywhere: bool) -> Replaced:
    """Replace names in all modules that imported them, or in torch's only; return the old ones."""
    replaced: Replaced = []
    new: dict[int, Any] = {}
    for module_name, values in names.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        for name, ours in values.items():
            theirs = vars(module).get(name, _MISSING)
            if theirs is ours:
                continue
            replaced.append((module, name, theirs))
            if theirs is not _MISSING:
                new[id(theirs)] = ours
            setattr(module, name, ours)
    found = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and (everywhere or module_name.startswith("torch.distributed."))
        for name, value in list(vars(module).items())
        if id(value) in new
    ]
    for module, name, value in found:
        setattr(module, name, new[id(value)])
    return replaced + found


def _restore(replaced: Replaced) -> None:
    while replaced:
        module, name, theirs = replaced.pop()
        if theirs is _MISSING:
            vars(module).pop(name, None)
        else:
            setattr(module, name, theirs)


_CALLS: dict[str, Any] = {
    "PyRRef": RRef,
    "_get_current_rpc_agent": api.current_agent,
    "_rref_context_get_debug_info": api.rref_debug_info,
    **{name: getattr(api, name) for name in api.__all__},
}
_IN_EXTENSION = (
    *("PyRRef", "WorkerInfo", "get_rpc_timeout", "_get_current_rpc_agent"),
    *("_is_current_rpc_agent_set", "_rref_context_get_debug_info", "_set_rpc_timeout"),
)
_OPTIONS: dict[str, Any] = {
    "BackendType": BackendType,
    "RpcBackendOptions": RpcBackendOptions,
    "TensorPipeRpcBackendOptions": TensorPipeRpcBackendOptions,
}
_ALL_OF_RPC: dict[str, dict[str, Any]] = {
    _PACKAGE: {
        **_CALLS,
        **_OPTIONS,
        "TensorPipeAgent": api.AgentView,
        "exposed": functions.exposed,
        "init_rpc": init_rpc,
        "_init_rpc_backend": _init_rpc_backend,
        "is_available": is_available,
    },
    f"{_PACKAGE}.api": _CALLS,
    f"{_PACKAGE}.functions": {"async_execution": functions.async_execution},
    f"{_PACKAGE}.options": _OPTIONS,
    f"{_PACKAGE}.backend_registry": {
        **_OPTIONS,
        "construct_rpc_backend_options": construct_rpc_backend_options,
    },
    # Libraries ask torch's extension for the class of references and whether RPC is initialized.
    _EXTENSION: {name: _CALLS[name] for name in _IN_EXTENSION},
    # Imported, and its TorchScript compiled, before torch's names are replaced.
    **_BESIDE_RPC,
}


def install(*, allow: Iterable[Any] | str = (), pickle: bool = False) -> Callable[[], None]:
    """Replace ``torch.distributed.rpc`` by rankwire's RPC; return a function that undoes it.

    Call it before ``init_rpc`` and before importing libraries that use RPC. The arguments become
    the defaults of ``init_rpc``. Not thread-safe.
    """
    put_back()  # ``init_rpc`` may have been called first
    for module_name in _ALL_OF_RPC:
        importlib.import_module(module_name)
    replaced = _replace(_ALL_OF_RPC, everywhere=False)
    defaults = Defaults.allow, Defaults.pickle
    Defaults.allow, Defaults.pickle = allow, pickle

    def uninstall() -> None:
        _restore(replaced)
        Defaults.allow, Defaults.pickle = defaults

    return uninstall
