"""Run a job on several hosts: remote ranks as node 0 sees them, and the other launchers."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

from rankwire import runtime
from rankwire.backends.roles import Roles
from rankwire.clock import REAL_TIME
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    RankwireError,
    RendezvousError,
)
from rankwire.launch.host_ranks import HostRanks
from rankwire.launch.output import Loop
from rankwire.launch.process import Ending, signal_name
from rankwire.launch.run_options import RunOptions
from rankwire.rendezvous.launchers import (
    Asked,
    Ended,
    Finish,
    Here,
    LauncherLink,
    Message,
    Order,
    Over,
    Restart,
    Start,
    Trouble,
    dial_launcher,
)
from rankwire.transports.security import Policy

GATHER_LIMIT = 300.0  # seconds that the launchers of a job wait for each other
LAST_WORDS = 1.0  # seconds that a stopped launcher gives the readers of its output
_PAUSE = 0.25
_LOST_EXIT_CODE = 1


@dataclass
class LauncherEvents:
    """The callbacks of node 0 for events of another launcher and its ranks."""

    on_ended: Callable[[int, Ending, bool], None] = lambda rank, ending, by_itself: None
    on_asked: Callable[[int], None] = lambda number: None
    on_trouble: Callable[[str, int], None] = lambda text, code: None
    on_lost: Callable[[RankwireError], None] = lambda error: None


class RemoteRanks:
    """The ranks of another host, through the connection to its launcher. For one thread."""

    wake_in = math.inf  # the other launcher watches its ranks

    def __init__(self, node: int, loop: Loop, link: LauncherLink) -> None:
        self.node = node
        self.host = ""
        self.roles: list[str] = []  # of its ranks
        self.ranks = range(0)
        self.alive: list[int] = []
        self.stopped: list[int] = []
        self.killed: list[int] = []
        self.is_over = True
        self.events = LauncherEvents()
        self._errors: dict[int, list[str]] = {}
        self._link = link
        self.close = _listen(loop, link, self._handle, self._lose)

    @property
    def count(self) -> int:
        """The number of its ranks; 0 until its launcher has reported them."""
        return len(self.roles)

    def obey(self, order: Order) -> None:
        """Send an order to the launcher."""
        match order:
            case Start(first_rank=first_rank):
                self.ranks = range(first_rank, first_rank + self.count)
                self.alive = list(self.ranks)
                self.stopped, self.killed, self._errors = [], [], {}
                self.is_over = False
            case Restart(rank):
                self.alive.append(rank)
        self._link.tell(order)

    def look(self) -> None:
        """Do nothing: the other launcher watches its ranks."""

    def errors_of(self, rank: int) -> list[str]:
        """Return the last lines that a rank wrote to stderr, after all its ranks have ended."""
        return self._errors.get(rank, [])

    def finish(self, code: int, text: str, *, was_asked: bool) -> None:
        """Notify the launcher that the job is over; ignore its later messages and its loss."""
        self.events = LauncherEvents()
        self._link.tell(Finish(code, text, was_asked))

    def _lose(self, error: RankwireError) -> None:
        self.is_over = True
        self.events.on_lost(error)

    def _handle(self, message: Message) -> None:
        match message:
            case Here(roles, host):
                self.roles, self.host = roles, host
            case Ended(rank, code, number, is_oom, by_itself) if rank in self.alive:
                self.alive.remove(rank)
                self.events.on_ended(rank, Ending(code, number, is_oom), by_itself)
            case Over(stopped, killed, errors):
                self.stopped, self.killed, self._errors = stopped, killed, errors
                self.is_over = True
            case Asked(number):
                self.events.on_asked(number)
            case Trouble(text, code):
                self.events.on_trouble(text, code)


class Parts:
    """The ranks of each host of a job, in the order of nodes."""

    def __init__(self, local: HostRanks, nodes: int) -> None:
        self.local = local
        self.remote: dict[int, RemoteRanks] = {}
        self.nodes = nodes
        self.names = Roles()

    def __iter__(self) -> Iterator[HostRanks | RemoteRanks]:
        yield self.local
        yield from (self.remote[node] for node in sorted(self.remote))

    def obey(self, order: Order) -> None:
        """Send an order to the ranks of all hosts."""
        for part in self:
            part.obey(order)

    @property
    def have_started(self) -> bool:
        """Whether ranks were started at least once."""
        return bool(self.local.ranks)

    @property
    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for part in self for rank in part.alive]

    def missing_nodes(self) -> list[int]:
        """Return the nodes whose launchers have not connected."""
        here = {node for node, part in self.remote.items() if part.count}
        return [node for node in range(1, self.nodes) if node not in here]

    def part_of(self, rank: int) -> HostRanks | RemoteRanks:
        """Return the part of a rank."""
        return next(part for part in self if rank in part.ranks)

    def who(self, rank: int) -> str:
        """Return a rank for a message, with its name if there are several roles."""
        return (
            f"rank {rank} ({self.names.name_of(rank)})" if len(self.names) > 1 else f"rank {rank}"
        )

    def where(self, rank: int) -> str:
        """Return the host of a rank for the end of a sentence; "" with one host."""
        for part in self.remote.values():
            if rank in part.ranks:
                return f", on node {part.node} ({part.host})"
        return ", on node 0" if self.nodes > 1 else ""


def _listen(
    loop: Loop,
    link: LauncherLink,
    obey: Callable[[Message], None],
    lose: Callable[[RankwireError], None],
) -> Callable[[], None]:
    """Handle the messages and the loss of a launcher; return a function that disconnects."""
    hanging_up = ExitStack()
    hanging_up.callback(link.close)

    def receive() -> None:
        try:
            messages = link.receive()
        except RankwireError as error:
            hanging_up.close()
            lose(error)
            return
        for message in messages:
            obey(message)

    loop.selector.register(link, runtime.EVENT_READ, receive)
    hanging_up.callback(loop.selector.unregister, link)
    return hanging_up.close


class _InterruptedError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def follow(
    loop: Loop, ranks: HostRanks, options: RunOptions, *, secret: bytes, policy: Policy
) -> int:
    """Run the launcher of a host other than node 0; return the exit code."""
    address, node = options.hosts.master, options.hosts.node
    assert address is not None
    dial = partial(
        dial_launcher, address, secret=secret, node=node, nodes=options.hosts.nodes, policy=policy
    )
    try:
        link = _find_node_0(loop, dial, address, node)
    except _InterruptedError as interrupted:
        return loop.write_rest(128 + interrupted.number, patience=LAST_WORDS)
    with closing(_Follower(loop, ranks, link, node)) as follower:
        code = follower.run()
    return loop.write_rest(code, patience=LAST_WORDS if follower.was_asked else math.inf)


def _find_node_0(
    loop: Loop, dial: Callable[..., LauncherLink], address: str, node: int
) -> LauncherLink:
    deadline = Deadline(GATHER_LIMIT, REAL_TIME)

    def look_at_signals(patience: float = 0.0) -> None:
        for number in loop.turn(patience):
            raise _InterruptedError(number)

    while True:
        try:
            return dial(deadline=deadline, check=look_at_signals)
        except (RendezvousError, AuthenticationError) as error:
            raise ConfigurationError(
                f"the launcher of node 0 at {address} refused node {node}: {error.message}"
            ) from error
        except (NoConnectionError, DeadlineExceededError) as error:
            if deadline.expired:
                raise ConfigurationError(
                    f"the launcher of node 0 was not found at {address} within"
                    f" {deadline.limit:g} s: {error.message}"
                ) from error
            trouble = error.message
        loop.output.show_status(f"rankwire: looking for node 0 at {address} ({trouble})")
        loop.output.remind(f"looking for the launcher of node 0 at {address} ({trouble})")
        look_at_signals(_PAUSE)


@dataclass(eq=False)
class _Follower:
    loop: Loop
    ranks: HostRanks
    link: LauncherLink
    node: int
    was_asked: bool = False
    failed: list[int] = field(default_factory=list)
    has_reported: bool = True
    code: int | None = None
    asked: int | None = None
    is_lost: bool = False

    def __post_init__(self) -> None:
        self.ranks.on_ended = self._rank_ended
        self.close = _listen(self.loop, self.link, self._obey, self._lose)

    def run(self) -> int:
        self.link.tell(Here(self.ranks.roles, os.uname().nodename))
        while self.code is None or not self.ranks.is_over:
            for number in self.loop.turn(self.ranks.wake_in):
                self._pass_on(number)
            self.ranks.look()
            if not self.ranks.ranks:
                self.loop.output.remind("waiting for node 0 to start the ranks")
            if self.ranks.is_over and not self.has_reported:
                self._report()
            if (trouble := self.loop.new_stdout_trouble(f" of node {self.node}")) is not None:
                self.link.tell(Trouble(*trouble))
            if self.asked is not None and self.is_lost and self.ranks.is_over:
                return 128 + self.asked
        return self.code

    def _obey(self, message: Message) -> None:
        match message:
            case Start(attempt=attempt):
                self.failed, self.has_reported = [], False
                if attempt:
                    self.loop.output.say(f"starting the ranks here again, restart {attempt}")
            case Restart(rank):
                self.failed = [other for other in self.failed if other != rank]
            case Finish(code, text, was_asked):
                self.code = code
                self.was_asked |= was_asked
                if text:
                    self.loop.output.say(text)
        try:
            if isinstance(message, Order):
                self.ranks.obey(message)
        except ConfigurationError as error:
            reason = f"the launcher of node {self.node} cannot start: {error.message}"
            self.link.tell(Trouble(reason, _LOST_EXIT_CODE))
            raise

    def _lose(self, error: RankwireError) -> None:
        self.is_lost = True
        if self.code is None:
            reason = f"the launcher of node 0 is gone ({error.message}): stopping the ranks here"
            self.loop.output.say(reason, "bold red")
            self.code = _LOST_EXIT_CODE if self.asked is None else 128 + self.asked
            self.ranks.stop(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        self.link.tell(Asked(number))  # forward a second signal too: node 0 then kills on all hosts
        if self.asked is not None:
            self.ranks.kill()
            return
        self.asked = number
        self.was_asked = True
        hint = "; Ctrl-C again kills it" if number == signal.SIGINT else ""
        self.loop.output.say(f"{signal_name(number)}: stopping the job on all nodes{hint}")
        self.ranks.stop(number)

    def _rank_ended(self, rank: int, ending: Ending, by_itself: bool) -> None:
        if ending.is_failure and by_itself:
            self.failed.append(rank)
        self.link.tell(Ended(rank, ending.code, ending.signal, ending.is_oom, by_itself))

    def _report(self) -> None:
        self.has_reported = True
        errors = {rank: self.ranks.errors_of(rank) for rank in self.failed}
        self.link.tell(Over(self.ranks.stopped, self.ranks.killed, errors))
