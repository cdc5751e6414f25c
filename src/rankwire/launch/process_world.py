"""Start the processes of a local world, send them orders, and read their replies and output.

``rank_program`` is the other side. One thread reads from all processes and ends with the last one.
A process exits when its pipe is closed, and so also when the starter dies.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from rankwire import runtime
from rankwire.backends.arguments import check_world
from rankwire.clock import REAL_TIME
from rankwire.errors import ConfigurationError
from rankwire.launch.function_run import Printer, Rank, RankOutcome, StreamName, values_of
from rankwire.launch.lines import StreamLines
from rankwire.launch.process import Process, signal_name
from rankwire.launch.rank_program import pack, unpack
from rankwire.override import override
from rankwire.rendezvous.runtime_dir import sweep_socket_files
from rankwire.texts import text_of

_log = logging.getLogger("rankwire")

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from rankwire.launch.rank_program import main; main({args})"
)
_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
_READ_NBYTES = 65536
LEAVE_PATIENCE = 5.0  # seconds for processes to leave before they are killed
_END_PATIENCE = 5.0  # seconds for killed processes to be gone


class ProcessWorld:
    """Starts ranks as processes, or raises the RankFailedError of one. Thread-safe."""

    def __init__(self, world_size: int, options: dict[str, Any]) -> None:
        check_world(0, world_size)
        self.printer = Printer()
        self.ranks: list[_RankProcess] = []
        self._is_over = runtime.Event()  # all processes have ended
        self._reader = runtime.Thread(target=self._read, name="rankwire-local", daemon=True)
        try:
            with runtime.create_server(("127.0.0.1", 0), backlog=128) as listener:
                port = listener.getsockname()[1]
                for rank in range(world_size):
                    mine = listener if rank == 0 else None
                    self.ranks.append(_RankProcess(rank, mine, self.printer))
            self._reader.start()
            place = {"address": f"127.0.0.1:{port}", "secret": runtime.token_bytes(32)}
            options = place | options
            joining = [rank.enter(world_size, options) for rank in self.ranks]
            self.printer.print_until(lambda: all(each.done() for each in joining))
            values_of([each.result() for each in joining])
        except BaseException:
            self.close(patience=0.0)
            raise

    def close(self, *, patience: float = LEAVE_PATIENCE) -> None:
        """Interrupt all ranks and let them leave; kill those that do not in time. Idempotent."""
        for rank in self.ranks:
            rank.interrupt()
            rank.leave()
        if self._reader.ident is None:  # an error or interrupt came before it was started
            self._reader.start()
        self.printer.print_until(self._is_over.is_set, patience)
        for rank in self.ranks:
            rank.kill()
        if not self.printer.print_until(self._is_over.is_set, _END_PATIENCE):
            _log.warning(
                "processes did not end after SIGKILL: %s", [rank.pid for rank in self.ranks]
            )
        REAL_TIME.join(self._reader, _END_PATIENCE)
        sweep_socket_files()  # those of killed ranks

    def _read(self) -> None:
        while descriptors := [number for rank in self.ranks for number in rank.descriptors()]:
            ready = {number for number in wait(descriptors) if isinstance(number, int)}
            for rank in self.ranks:
                rank.read(ready)
        self._is_over.set()
        self.printer.wake()


class _RankProcess(Rank):
    """Runs a rank in its own process. Thread-safe except ``read``."""

    def __init__(self, rank: int, listener: runtime.Socket | None, printer: Printer) -> None:
        super().__init__(rank)
        self._printer = printer
        self._orders: runtime.SimpleQueue[tuple[Any, ...] | None] = runtime.SimpleQueue()
        self._stacks: Future[str] | None = None  # the pending request
        ours, theirs = runtime.socketpair()
        passed = [theirs.fileno()] + ([] if listener is None else [listener.fileno()])
        program = _PROGRAM.format(path=sys.path, args=", ".join(map(str, [rank, *passed])))
        try:
            with theirs:
                self._process = Process([sys.executable, "-u", "-c", program], pass_fds=passed)
        except BaseException:
            ours.close()  # if a process was started, this ends it
            raise
        self._control = Connection(ours.detach())
        self._outputs: dict[int, tuple[StreamName, StreamLines]] = {}
        for name, pipe in zip(_STREAMS, self._process.pipes, strict=True):
            os.set_blocking(pipe.fileno(), False)
            self._outputs[pipe.fileno()] = name, StreamLines()
        self._process.open_descriptor()
        self._sender = runtime.Thread(
            target=self._send_orders, name=f"rankwire-local-{rank}", daemon=True
        )
        self._sender.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def enter(self, world_size: int, options: dict[str, Any]) -> Future[RankOutcome[Any]]:
        return self._order("join", "join", pack((sys.path, world_size, options)))

    @override
    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, leaves: bool = False
    ) -> Future[RankOutcome[Any]]:
        name = getattr(function, "__name__", repr(function))
        try:
            pickled = pack((function, args))
        except Exception as error:  # a user's class may raise anything
            raise ConfigurationError(
                f"{name!r}, its arguments or what it names cannot be sent to another process: "
                f"{text_of(error)}"
            ) from error
        return self._order(name, "run", pickled, leaves)

    def _order(self, name: str, verb: str, *words: Any) -> Future[RankOutcome[Any]]:
        running = self._begin(name)
        if not self._ended:
            self._orders.put((verb, self._number, *words))
        return running

    @override
    def ask_for_stacks(self) -> Future[str]:
        self._stacks = asked = Future[str]()
        self._orders.put(("stacks",))
        return asked

    @override
    def interrupt(self) -> bool:
        with self._lock:
            if self._running is None or self._ended is not None:
                return False
            number = self._number
        self._orders.put(("interrupt", number))
        return True

    def leave(self) -> None:
        self._orders.put(("leave",))

    def kill(self) -> None:
        with self._lock:
            if self._ended is None:
                self._process.send_group(signal.SIGKILL)

    def _send_orders(self) -> None:
        """Send queued orders, in a thread that no interrupt reaches."""
        with suppress(OSError):  # the process died; the reader thread handles that
            while (words := self._orders.get()) is not None:
                self._control.send(words)

    def descriptors(self) -> list[int]:
        if self._ended is not None:
            return []
        return [self._control.fileno(), self._process.open_descriptor(), *self._outputs]

    def read(self, ready: Collection[int]) -> None:
        if not set(self.descriptors()) & set(ready):
            return
        is_dead = self._process.open_descriptor() in ready  # first: nothing is written after it
        for output in list(self._outputs):
            self._read_output(output)
        if self._control.fileno() in ready or is_dead:
            self._read_words()
        if is_dead:
            self._handle_death()

    def _read_output(self, number: int) -> None:
        with suppress(BlockingIOError):
            while data := os.read(number, _READ_NBYTES):
                self._print(*self._outputs[number], data)
            self._print(*self._outputs.pop(number), b"")  # the process closed it

    def _print(self, name: StreamName, lines: StreamLines, data: bytes) -> None:
        new = lines.feed(data) + lines.due(REAL_TIME.now())
        texts = [f"[rank {self.rank}] {line.decode(errors='replace')}\n" for line in new]
        if texts:
            self._printer.put(name, "".join(texts))

    def _read_words(self) -> None:
        try:
            while self._control.poll():
                verb, word = self._control.recv()
                for output in list(self._outputs):  # print what it wrote before this reply
                    self._read_output(output)
                if verb == "ended":
                    self._finish(_outcome(self.rank, word))
                    self._printer.wake()
                elif self._stacks is not None:
                    self._stacks.set_result(word)
                    self._printer.wake()
        except (EOFError, OSError):
            return  # the pidfd reports its end

    def _handle_death(self) -> None:
        ending = self._process.check()
        assert ending is not None
        for output in self._outputs.values():
            self._print(*output, b"")
        if ending.signal is not None:
            reason = f"its process was killed by {signal_name(ending.signal)}"
        else:
            reason = f"its process ended with exit code {ending.code} and sent no result"
        with self._lock:
            self._ended = RankOutcome(self.rank, killed=ending.signal is not None, reason=reason)
        self._process.close()  # also ends its children
        self._orders.put(None)
        REAL_TIME.join(self._sender)  # soon: its writes fail now
        self._control.close()
        if self._stacks is not None and not self._stacks.done():
            self._stacks.set_result(f"({reason})")
        self._finish(self._ended)
        self._printer.wake()


def _outcome(rank: int, pickled: bytes) -> RankOutcome[Any]:
    try:
        outcome: RankOutcome[Any] = unpack(pickled)
        return outcome
    except Exception as trouble:  # a user's class may raise anything
        what = f"its result cannot be loaded here: {text_of(trouble)}"
        return RankOutcome(rank, error=TypeError(what))
