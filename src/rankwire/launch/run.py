"""``rankwire run``: the ranks of a job on this host, from first start to last exit.

One thread and one selector for everything: output, signals, ends of processes. The rules:

- The first rank that fails ends the job: the others get SIGTERM, and SIGKILL after the grace.
- SIGINT, SIGTERM and SIGHUP to the launcher go to every rank once; a second one kills.
- Nothing is left behind: what a rank started and left in its process group is ended with the job,
  and a launcher that is killed itself leaves a keeper that does all this in its place.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from rankwire.errors import ConfigurationError, InvalidWorldSizeError
from rankwire.launch.child import Child, World, signal_name
from rankwire.launch.keeper import Keeper
from rankwire.launch.output import Output
from rankwire.launch.signals import SignalInbox, collected_signals
from rankwire.launch.summary import Failure, excerpt, first_failure, list_ranks

__all__ = ["DEFAULT_GRACE", "run"]

DEFAULT_GRACE = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After the first failure, others that fail by themselves are waited for: the one to blame may be
# among them (see summary.py). Above the time between a raise and the end of an interpreter.
_SETTLE = 0.3
# Wrappers pass on the SIGINT that the terminal sent to the launcher as well: that is one Ctrl-C.
_ECHO = 0.5
# What a launcher that was told to end still waits for those who read its output.
_LAST_WORDS = 1.0
_POLL = 0.02
# However long nothing happens, look at the processes themselves.
_MAX_SLEEP = 1.0
_SECRET_NBYTES = 32


def run(
    command: Sequence[str],
    *,
    ranks: int,
    grace: float = DEFAULT_GRACE,
    has_prefix: bool = True,
    log_dir: Path | None = None,
) -> int:
    """Start ``ranks`` processes of one Python program, wait for them, and return the exit code.

    That is 0 if all ranks ended well, else the code of the rank that failed first (128 + the signal
    that killed it), or 128 + the signal that stopped the launcher. Main thread only.

    Args:
        command: The interpreter's arguments: a script or ``-m module``, then the program's own.
        ranks: How many.
        grace: Seconds between the request to stop and SIGKILL.
        has_prefix: Whether to begin each line with its rank.
        log_dir: Where to write each rank's output as ``rank_N.log`` too.

    Raises:
        ConfigurationError: Nothing was started, because a setting cannot work.
    """
    if ranks < 1:
        raise InvalidWorldSizeError(ranks)
    if not 0 <= grace < math.inf:
        raise ConfigurationError(f"the grace is 0 or more seconds, not {grace!r}")
    _fill_standard_fds()
    with contextlib.ExitStack() as stack:
        # poll, not epoll: the launcher's own output may be a regular file.
        selector = stack.enter_context(selectors.PollSelector())
        output = Output(selector, has_prefix=has_prefix, log_dir=log_dir)
        stack.callback(output.close)
        inbox = stack.enter_context(collected_signals(selector, (*_STOPPING, signal.SIGCHLD)))
        keeper = stack.enter_context(Keeper(grace))
        job = stack.enter_context(contextlib.closing(_Job(selector, inbox, output, grace)))
        job.start(command, ranks, keeper)
        job.supervise()
        job.end_leftovers()
        job.report()
        return job.exit_code


class _Job:
    """The ranks of one job, and what happened to them."""

    def __init__(
        self, selector: selectors.BaseSelector, inbox: SignalInbox, output: Output, grace: float
    ) -> None:
        self._selector = selector
        self._inbox = inbox
        self._output = output
        self._grace = grace
        self._children: list[Child] = []
        self._failed: list[Child] = []
        self._stopped: list[int] = []
        self._killed: list[int] = []
        self._received: int | None = None  # the signal that ended the job
        self._received_at = -math.inf
        self._stop_at = math.inf  # when to ask the ranks to end
        self._kill_at = math.inf  # when to end them
        self._is_stopping = False
        self._is_impatient = False

    def start(self, command: Sequence[str], ranks: int, keeper: Keeper) -> None:
        """Start all ranks."""
        with _listen() as listener:
            world = World(
                size=ranks,
                listener=listener,
                job=f"run-{secrets.token_hex(4)}",
                secret=secrets.token_bytes(_SECRET_NBYTES),
            )
            for rank in range(ranks):
                try:
                    child = Child(rank, world, command)
                except OSError as error:
                    raise ConfigurationError(f"rank {rank} cannot be started: {error}") from error
                self._children.append(child)
                keeper.watch(child.pid)
                self._output.attach(rank, *child.pipes)

    def supervise(self) -> None:
        """Wait until all ranks have ended, and see to it that they do."""
        while any(child.ending is None for child in self._children):
            self._turn(min(self._stop_at, self._kill_at) - monotonic())
            if monotonic() >= self._stop_at:
                self._stop(signal.SIGTERM)
            if monotonic() >= self._kill_at:
                self._kill()
            if self._output.is_stdout_broken and not self._is_stopping:
                self._received = signal.SIGPIPE
                self._output.say("stdout cannot be written to any more: stopping", "bold red")
                self._stop(signal.SIGTERM)

    def end_leftovers(self) -> None:
        """End what ended ranks left in their process groups, and collect the ranks."""
        for child in self._children:
            child.send_group(signal.SIGKILL if self._killed else signal.SIGTERM)
            child.reap()
        end = monotonic() + self._grace
        left = [child for child in self._children if child.has_group()]
        while left and not self._is_impatient and monotonic() < end:
            self._turn(_POLL)
            left = [child for child in left if child.has_group()]
        for child in left:
            child.send_group(signal.SIGKILL)

    def report(self) -> None:
        """Write all output that is left, and what became of the job."""
        self._output.take_rest()
        if self._failed:
            first = first_failure(self._failures())
            self._output.say(f"rank {first.rank} failed first: {first.ending}", "bold red")
            if first.errors:
                self._output.say("the last lines of its stderr:")
                self._output.quote(excerpt(first.errors))
            others = [
                f"rank {child.rank} ({child.ending})"
                for child in self._failed
                if child.rank != first.rank
            ]
            if others:
                self._output.say(f"failed too: {', '.join(others)}")
        if self._stopped:
            self._output.say(f"stopped: {list_ranks(self._stopped)}")
        if self._killed:
            self._output.say(f"killed: {list_ranks(self._killed)}")
        # A reader that is slow may take its time, unless someone wants us to end.
        end = math.inf if self._received is None else monotonic() + _LAST_WORDS
        while not self._output.is_written and not self._is_impatient and monotonic() < end:
            self._turn(end - monotonic())

    @property
    def exit_code(self) -> int:
        """What the launcher exits with."""
        if self._received is not None and not self._failed:
            return 128 + self._received
        return first_failure(self._failures()).ending.exit_code if self._failed else 0

    def close(self) -> None:
        """Kill whoever is left. Idempotent."""
        for child in self._children:
            child.close()

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it."""
        limit = min(max(timeout, 0.0), _MAX_SLEEP)
        events = self._selector.select(limit)
        for key, _ in events:
            key.data()
        numbers = self._inbox.take()
        if signal.SIGCHLD in numbers or not events:
            self._check_children()
        for number in numbers:
            if number != signal.SIGCHLD:
                self._obey(number)

    def _check_children(self) -> None:
        for child in self._children:
            ending = child.check()
            if ending is not None and ending.is_failure and not self._is_stopping:
                self._failed.append(child)
                self._stop_at = min(self._stop_at, monotonic() + _SETTLE)

    def _obey(self, number: int) -> None:
        """Act on a signal that asks the launcher to end."""
        if monotonic() - self._received_at < _ECHO:
            return
        self._received_at = monotonic()
        self._received = number if self._received is None else self._received
        alive = [child.rank for child in self._children if child.ending is None]
        if not alive:
            self._is_impatient = True
        elif self._is_stopping:
            self._kill()
        else:
            hint = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
            self._output.say(f"{signal_name(number)}: stopping {list_ranks(alive)}{hint}")
            self._stop(number)

    def _stop(self, number: int) -> None:
        self._check_children()  # who ended before this ended by itself
        self._is_stopping = True
        self._stop_at = math.inf
        self._kill_at = monotonic() + self._grace
        for child in self._children:
            if child.ending is None:
                self._stopped.append(child.rank)
                child.send(number)

    def _kill(self) -> None:
        self._kill_at = math.inf
        for child in self._children:
            if child.ending is None:
                self._stopped.remove(child.rank)
                self._killed.append(child.rank)
                child.send_group(signal.SIGKILL)

    def _failures(self) -> list[Failure]:
        return [
            Failure(child.rank, child.ending, self._output.last_errors(child.rank))
            for child in self._failed
            if child.ending is not None
        ]


def _listen() -> socket.socket:
    """Return a socket that listens already: no rank comes too early, nobody takes the port."""
    try:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    except OSError as error:
        raise ConfigurationError(f"no port to listen at on 127.0.0.1: {error}") from error


def _fill_standard_fds() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr, before a pipe gets its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
