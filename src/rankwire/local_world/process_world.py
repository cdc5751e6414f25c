"""A world of processes that this process started, and the one thread that reads from all of them.

The reader thread ends with the last process. Other threads send orders to a rank through
``rank_process``.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from multiprocessing.connection import wait
from typing import Any

from rankwire.backends.arguments import check_world
from rankwire.clock import REAL_TIME
from rankwire.local_world.function_run import values_of
from rankwire.local_world.printer import Printer
from rankwire.local_world.rank_process import RankProcess
from rankwire.rendezvous.runtime_dir import sweep_socket_files

_log = logging.getLogger("rankwire")

_LEAVE_PATIENCE = 5.0  # seconds for processes to leave before they are killed
_END_PATIENCE = 5.0  # seconds for killed processes to be gone


class ProcessWorld:
    """Start ranks as processes, with options for their backends. Thread-safe.

    Raises:
        RankFailedError: A rank did not join the world.
    """

    def __init__(self, world_size: int, options: dict[str, Any]) -> None:
        check_world(0, world_size)
        self.printer = Printer()
        self.ranks: list[RankProcess] = []
        self._is_over = threading.Event()  # all processes have ended
        self._reader = threading.Thread(target=self._read, name="rankwire-local", daemon=True)
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
                port = listener.getsockname()[1]
                for rank in range(world_size):
                    mine = listener if rank == 0 else None
                    self.ranks.append(RankProcess(rank, mine, self.printer))
            self._reader.start()
            options = {
                "address": f"127.0.0.1:{port}",
                "secret": secrets.token_bytes(32),
                **options,
            }
            joining = [rank.enter(world_size, options) for rank in self.ranks]
            self.printer.print_until(lambda: all(each.done() for each in joining))
            values_of([each.result() for each in joining])
        except BaseException:
            self.close(patience=0.0)
            raise

    def close(self, *, patience: float = _LEAVE_PATIENCE) -> None:
        """Interrupt all ranks and have them leave; kill those that do not in time. Idempotent."""
        for rank in self.ranks:
            rank.interrupt()
            rank.leave()
        if self._reader.ident is None:  # it was not started, because of an error or an interrupt
            self._reader.start()
        self.printer.print_until(self._is_over.is_set, patience)
        for rank in self.ranks:
            rank.kill()
        if not self.printer.print_until(self._is_over.is_set, _END_PATIENCE):
            _log.warning(
                "processes did not end after SIGKILL: %s", [rank.pid for rank in self.ranks]
            )
        REAL_TIME.join(self._reader, _END_PATIENCE)
        sweep_socket_files()  # of killed ranks

    def _read(self) -> None:
        while descriptors := [number for rank in self.ranks for number in rank.descriptors()]:
            ready = {number for number in wait(descriptors) if isinstance(number, int)}
            for rank in self.ranks:
                rank.read(ready)
        self._is_over.set()
        self.printer.wake()
