"""A soak: ranks that call and reduce all the time, one killed and started again every few seconds.

Eight processes do calls and collectives. Every round one of them is killed; when all survivors have
noticed they close, and all form a world anew at the same address, with the successor of the killed
one. Each rank writes down every call it makes and how it ended, and counts every call that it
serves. In the end:

* each call has ended once, by its value or by a typed error;
* each callee has run as many calls as were answered, and at most those more that may have run;
* memory, descriptors and threads of those that live through all rounds stay flat.

``work`` and ``leave`` run inside the rank processes, ``Soak`` in the test.
"""

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rankwire import (
    ChannelClosedError,
    PeerLostError,
    RankwireError,
    RpcAgent,
    TcpBackend,
    all_reduce,
)
from worlds import PATIENCE, RankProcess, eventually, free_port, nursery

WORLD_SIZE = 8


class History:
    """What one rank did, over all rounds: the calls it made by callee, and those it served."""

    def __init__(self) -> None:
        self.answered = [0] * WORLD_SIZE
        self.may_have_run = [0] * WORLD_SIZE
        self.served = [0] * WORLD_SIZE  # by caller
        self.sums = 0
        self.strange: list[str] = []
        self.lock = threading.Lock()


history = History()
_leaving: list[Callable[[], None]] = []


def work(address: str, rank: int) -> str:
    """Form a world and work until something ends it; return the error that did."""
    backend = TcpBackend(rank, WORLD_SIZE, address, timeout=PATIENCE, join_timeout=PATIENCE)
    agent = RpcAgent(backend)

    def serve(caller: int, number: int, array: Any) -> tuple[int, float]:
        with history.lock:
            history.served[caller] += 1
        return number, float(array.sum())

    agent.register("serve", serve)
    calling = threading.Thread(target=_call_on, args=(agent, rank), daemon=True)
    calling.start()

    def close() -> None:
        agent.close(grace=0.5)
        backend.close()
        calling.join(PATIENCE)
        if calling.is_alive():
            history.strange.append("a call hangs")

    _leaving.append(close)
    try:
        _reduce_on(backend, rank)
    except RankwireError as error:
        return f"{type(error).__name__} {error.peer}"
    return "there was nothing left to do"


def leave() -> None:
    """Close the world in which this rank worked."""
    _leaving.pop()()


def _reduce_on(backend: TcpBackend, rank: int) -> None:
    for number in range(1_000_000):
        array = np.full(1 + number * 997 % 20_000, float(rank + number))
        all_reduce(backend, array)
        if array[0] != sum(other + number for other in range(WORLD_SIZE)):
            history.strange.append(f"a sum is wrong in round {number}")
        history.sums += 1


def _call_on(agent: RpcAgent, rank: int) -> None:
    chance = random.Random(time.monotonic_ns())
    for number in range(1_000_000):
        callee = chance.choice([other for other in range(WORLD_SIZE) if other != rank])
        array = np.full(chance.choice((1, 100, 50_000)), 1.0)
        try:
            value = agent.rpc_sync(callee, "serve", rank, number, array)
        except RankwireError as error:
            if getattr(error, "may_have_run", False):
                history.may_have_run[callee] += 1
            if agent.backend.closed:
                return
            # A call that only ran out of time is not among them: nobody is slow here.
            if isinstance(error, (PeerLostError, ChannelClosedError)) and error.peer == callee:
                continue
            history.strange.append(f"{type(error).__name__}: {error}")
        except BaseException as error:
            history.strange.append(f"{type(error).__name__}: {error}")
            return
        else:
            history.answered[callee] += 1
            if value != (number, float(len(array))):
                history.strange.append(f"call {number} got the answer {value}")


def belongings() -> tuple[int, int, int]:
    """Return the memory, the open descriptors and the threads of this process.

    After a collection: what is in reference cycles waits for one, and makes the memory a sawtooth.
    """
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count()


_WORK = "__import__('faults.soak').soak.work({address!r}, {rank})"
_LEAVE = "__import__('faults.soak').soak.leave()"
_HISTORY = "vars(__import__('faults.soak').soak.history) | {'lock': None}"
_BELONGINGS = "__import__('faults.soak').soak.belongings()"


class Soak:
    """Runs rounds and adds up what happened."""

    def __init__(self, measured: Any) -> None:
        self._measured = measured
        self._address = f"127.0.0.1:{free_port()}"
        self._stack = contextlib.ExitStack()
        self._nursery = self._stack.enter_context(nursery())
        self.ranks = [self._spawn(rank) for rank in range(WORLD_SIZE)]
        self.killed: set[int] = set()  # whose histories are incomplete
        self.belongings: list[list[tuple[int, int, int]]] = []

    def _spawn(self, rank: int) -> RankProcess:
        return self._stack.enter_context(contextlib.closing(RankProcess(rank, self._nursery)))

    def round(self, victim: int, seconds: float) -> None:
        """Work for a while, kill one, and see all others end because of it."""
        working = [
            rank.start("eval", _WORK.format(address=self._address, rank=rank.rank))
            for rank in self.ranks
        ]
        before = self._sums(0)
        eventually(lambda: self._sums(0) > before)
        time.sleep(seconds)
        died = self.ranks[victim].kill()
        for rank, command in zip(self.ranks, working, strict=True):
            if rank.rank != victim:
                ended = command.result()
                assert ended == f"PeerLostError {victim}", f"rank {rank.rank}: {ended}"
                self._measured("killed in full work: named by a sum", command.ended - died)
        survivors = [rank for rank in self.ranks if rank.rank != victim]
        leaving = [rank.start("eval", _LEAVE) for rank in survivors]
        for command in leaving:
            command.result()
        self.killed.add(victim)
        self.ranks[victim] = self._spawn(victim)
        old = [rank for rank in self.ranks if rank.rank not in self.killed]
        self.belongings.append([rank.call("eval", _BELONGINGS) for rank in old])

    def _sums(self, rank: int) -> int:
        return self.ranks[rank].call("eval", _HISTORY)["sums"]

    def check(self) -> int:
        """Check the history of the ranks that lived all the time; return the calls answered."""
        histories = {
            rank.rank: rank.call("eval", _HISTORY)
            for rank in self.ranks
            if rank.rank not in self.killed
        }
        for history in histories.values():
            assert history["strange"] == []
        for caller, made in histories.items():
            for callee, served in histories.items():
                ran, least = served["served"][caller], made["answered"][callee]
                most = least + made["may_have_run"][callee]
                assert least <= ran <= most, f"{caller} to {callee}: {least} <= {ran} <= {most}"
        return sum(sum(history["answered"]) for history in histories.values())

    def close(self) -> None:
        self._stack.close()
