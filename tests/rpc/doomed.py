"""A world of three whose rank 1 is killed while the others wait for it in every kind of call.

Run in rank processes, which import this module by name.
"""

import os
import signal
import threading
import time
from typing import Any

from rankwire import PeerLostError, RankwireError, RpcAgent
from worlds import PATIENCE, Running, eventually

WAITING = 6  # calls of each survivor, one of them asynchronous


def be_called_to_death(backend: Any) -> None:
    """Serve until somebody calls ``die``."""
    agent = RpcAgent(backend)
    begun: list[int] = []
    lock = threading.Lock()

    def nap() -> None:
        with lock:
            begun.append(1)
        time.sleep(PATIENCE)

    agent.register("nap", nap)
    agent.register("begun", lambda: len(begun))
    agent.register("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
    backend.barrier()
    time.sleep(PATIENCE)


def survive(backend: Any) -> tuple[list[BaseException], Any]:
    """Wait for rank 1, let it die; return how the calls ended, and what the other one says."""
    agent = RpcAgent(backend)
    agent.register("fine", lambda: "fine")
    backend.barrier()
    other = 2 - backend.rank
    waiting = [Running(agent.rpc_sync, 1, "nap", timeout=PATIENCE) for _ in range(WAITING - 1)]
    future = agent.rpc_async(1, "nap", timeout=PATIENCE)
    if backend.rank == 0:
        eventually(lambda: agent.rpc_sync(1, "begun") == 2 * WAITING)
        try:
            agent.rpc_sync(1, "die")
        except PeerLostError:
            pass
    errors = [call.error() for call in waiting]
    try:
        future.result(PATIENCE)
    except RankwireError as error:
        errors.append(error)
    answer = agent.rpc_sync(other, "fine")
    backend.send(b"done", other)
    backend.recv(other)
    agent.close()
    return errors, answer
