"""Calls of the functions themselves: type checkers know what they take and return.

A line whose end says ``# error`` is one that type checkers must refuse, mypy in these words.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed, wait
from typing import Any, assert_type

import numpy as np

import rankwire
from rankwire import RpcAgent, RpcFuture


def add(a: int, b: int = 2) -> int:
    return a + b


async def later(text: str) -> list[str]:
    return [text]


def deferred(text: str) -> Future[bytes]:
    return Future()


def patient(a: int, timeout: float) -> str:
    return f"{a} {timeout}"


class Server:
    def pull(self, name: str) -> float:
        return float(name)


def call(agent: RpcAgent, server: Server) -> None:
    assert_type(agent.rpc_sync(1, add, 1, 2), int)
    assert_type(agent.rpc_sync(1, add, 1, b=2), int)
    assert_type(agent.rpc_sync(1, later, "a"), list[str])
    assert_type(agent.rpc_sync(1, deferred, "a"), bytes)
    assert_type(agent.rpc_sync(1, server.pull, "a"), float)
    assert_type(agent.rpc_sync(1, "add", 1, 2, anything=3), Any)
    assert_type(agent.rpc_sync(1, "add", 1, timeout=5), Any)
    assert_type(agent.rpc_sync(1, add, 1, timeout=5), int)
    assert_type(agent.rpc_sync(1, later, "a", timeout=5), list[str])
    agent.rpc_sync(1, add, "a")  # error: No overload variant of "rpc_sync"
    agent.rpc_sync(1, add, 1, 2, 3)  # error: No overload variant of "rpc_sync"
    agent.rpc_sync(1, add, c=1)  # error: No overload variant of "rpc_sync"
    agent.rpc_sync(1, 5)  # error: No overload variant of "rpc_sync"
    assert_type(agent.rpc_sync("trainer/0", add, 1, 2), int)
    agent.rpc_sync(1.0, "add")  # error: No overload variant of "rpc_sync"


async def start(agent: RpcAgent) -> None:
    assert_type(agent.rpc_async(1, add, 1), RpcFuture[int])
    assert_type(agent.rpc_async(1, add, 1).result(), int)
    assert_type(await agent.rpc_async(1, add, 1), int)
    assert_type(agent.rpc_async(1, later, "a", timeout=5).result(5), list[str])
    assert_type(agent.rpc_async(1, deferred, "a"), RpcFuture[bytes])
    assert_type(agent.rpc_async(1, "add", 1), RpcFuture[Any])
    agent.rpc_async(1, add, "a")  # error: No overload variant of "rpc_async"
    add(agent.rpc_async(1, later, "a").result())  # error: Argument 1 to "add"


def futures(agent: RpcAgent, works: list[rankwire.Work[int]]) -> None:
    started = [agent.rpc_async(1, add, 1), agent.rpc_async(1, add, 2)]
    assert_type(as_completed(started), Iterator[Future[int]])
    assert_type(wait(started).done, set[Future[int]])
    assert_type([future.result() for future in as_completed(started, timeout=5)], list[int])
    assert_type(as_completed([agent.rpc_async(1, "add", 1)]), Iterator[Future[Any]])
    assert_type(as_completed(works), Iterator[Future[int]])


def pools(agent: RpcAgent) -> None:
    assert_type(next(agent.map(add, [1, 2])).value, int)
    assert_type(next(agent.map(later, ["a"], chunk=2)), rankwire.TaskOutcome[str, list[str]])
    assert_type([outcome.value for outcome in agent.map("add", [1])], list[Any])
    agent.map(add, ["a"])  # error: Argument 1 to "map"
    with agent.executor() as executor:
        assert_type(executor.submit(add, 1, b=2), Future[int])
        assert_type(executor.submit("add", 1, 2).result(), Any)
        executor.submit(add, "a")  # error: No overload variant of "submit"


def resolve(backend: rankwire.Backend) -> None:
    functions: dict[str, Callable[..., Any]] = {"add": add}
    with RpcAgent(backend, resolve=functions.get) as agent:
        assert_type(agent, RpcAgent)
    assert_type(backend.incarnation, int)
    stop = backend.on_peer_joined(lambda rank, incarnation: print(rank + incarnation))
    stop()
    backend.on_peer_joined(lambda rank: None)  # error: Argument 1 to "on_peer_joined"


def names_that_are_not_there(agent: RpcAgent, backend: rankwire.Backend) -> None:
    rankwire.all_reduced(backend)  # error: Module has no attribute "all_reduced"
    rankwire.RpcAgnet(backend)  # error: Module has no attribute "RpcAgnet"
    agent.rpc(1, "add")  # error: "RpcAgent" has no attribute "rpc"
    backend.sned(b"", 1)  # error: "Backend" has no attribute "sned"


def values(codec: rankwire.Codec) -> None:
    assert_type(codec.decode(codec.encode(5)), Any)
    assert_type(codec.decode(bytearray().join(codec.encode(5)[0])), Any)


def settings(agent: RpcAgent, server: Server) -> None:
    assert_type(agent.to(1, timeout=5)(add, 1, b=2), int)
    assert_type(agent.to(1)(later, "a"), list[str])
    assert_type(agent.to(1, timeout=5)(patient, 1, timeout=3), str)
    assert_type(agent.to(1)(server.pull, "a"), float)
    assert_type(agent.to(1).add(1, 2), Any)
    assert_type(agent.to(1).server.pull("a"), Any)
    assert_type(agent.to_async(1, timeout=5)(add, 1), RpcFuture[int])
    assert_type(agent.to_async(1)(later, "a"), RpcFuture[list[str]])
    assert_type(agent.to_async(1).add(1, 2), RpcFuture[Any])
    agent.to(1, timeout=5)(add, "a")  # error: No overload variant of "__call__"
    agent.to(1)(patient, 1)  # error: No overload variant of "__call__"
    agent.to(1, patience=5)  # error: Unexpected keyword argument "patience"


def register(agent: RpcAgent, server: Server) -> None:
    assert_type(agent.register(server), Server)
    assert_type(agent.register("server", server), Server)
    assert_type(agent.register("add", add)(1), int)

    @agent.register
    def half(a: int) -> float:
        return a / 2

    @agent.register("third", copy=True)
    def third(a: int) -> float:
        return a / 3

    assert_type(half(1) + third(1), float)

    @agent.register_error
    class AppError(Exception):
        code = 5

    assert_type(AppError("x").code, int)
    assert_type(agent.serve(timeout=5), bool)


def other(backend: rankwire.Backend, array: np.ndarray[Any, Any]) -> None:
    rankwire.all_reduce(backend, array, op="max")
    rankwire.all_reduce(backend, array, rankwire.PremulSum(2.0))
    rankwire.reduce_scatter(backend, array, op=("premul_sum", 2.0))
    rankwire.all_reduce_coalesced(backend, [array], op="mean")
    rankwire.all_reduce(backend, array, op="maximum")  # error: No overload variant of "all_reduce"
    rankwire.reduce(backend, array, op="avg")  # error: No overload variant of "reduce"
    try:
        backend.barrier()
    except rankwire.PeerLostError as error:
        assert_type(error.peer, int)
    except rankwire.RemoteError as error:
        assert_type(error.remote_bases, tuple[str, ...])
