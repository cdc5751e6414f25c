"""Record what the ranks of a world report: where they wait, and what their agents do."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from msgspec.structs import replace

from rankwire.errors import ProtocolError
from rankwire.wire.control_messages import AgentSays, AgentState, Notice

Told = Iterator[tuple[int, Notice]]
Answers = list[tuple[int, int]]  # ranks, and the numbers of the messages to answer
_Key = tuple[int, tuple[int, ...]]

_MOST_GROUPS = 64  # in which one rank may wait at a time; beyond that, the oldest report is dropped
_MOST_NUMBERS = 16  # operations of a group with known descriptions
_MOST_FAILURES = 16  # failed operations of a group
_MOST_WAYS = 4  # descriptions of one operation
MAX_AGENTS = 4096  # of one rank; each has threads and a descriptor


class Roll:
    """Records which rank waits in which operation of which group. For one thread at a time.

    A rank reports once that it waits in an operation, may ask once which ranks are missing, and
    reports a failed operation. The roll answers only with news:

    - Two ranks describe an operation differently: all members get both descriptions. A report also
      lists earlier operations, to find a rank that continued because it had nothing to wait for.
    - An operation failed on one rank: all members are notified, once.
    - A rank waits in a failed operation, or missed an earlier failure: it is notified.
    - A rank asks for the missing ranks: it gets those not yet in this operation or a later one.

    So a late rank costs one message from each waiting rank, and two more near its deadline. The
    records are bounded for each rank, and dropped when the rank is gone.
    """

    def __init__(self, world_size: int) -> None:
        self._world = tuple(range(world_size))
        self._groups: dict[_Key, _GroupRoll] = {}
        self._of_rank: dict[int, OrderedDict[_Key, None]] = {}

    def hear(self, src: int, notice: Notice) -> Told:
        """Handle a rank's report, and yield the ranks to notify with their notices.

        A notice counts as sent when the caller requests the next one; interrupted reports are
        repeated.
        """
        members = notice.members or self._world
        notice = replace(notice, src=src, members=())
        key = notice.group, members
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _GroupRoll(members)
        group.last[src] = max(notice.sequence, group.last.get(src, notice.sequence))
        self._bound(src, key)
        yield from group.failed(notice) if notice.is_failure else group.waits(notice)

    def forget(self, rank: int) -> None:
        """Drop the reports of a lost rank."""
        for key in self._of_rank.pop(rank, ()):
            self._drop(rank, key)

    def _bound(self, rank: int, key: _Key) -> None:
        groups = self._of_rank.setdefault(rank, OrderedDict())
        groups[key] = None
        groups.move_to_end(key)
        if len(groups) > _MOST_GROUPS:
            self._drop(rank, groups.popitem(last=False)[0])

    def _drop(self, rank: int, key: _Key) -> None:
        group = self._groups[key]
        group.last.pop(rank, None)
        if not group.last:
            del self._groups[key]


class _GroupRoll:
    """The reports of one group; ``last`` has each rank's last reported operation."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self._members = members
        self.last: dict[int, int] = {}
        # Each description with its first report, by number.
        self._described: dict[int, dict[str, Notice]] = {}
        self._failed: dict[int, Notice] = {}

    def waits(self, notice: Notice) -> Told:
        is_told = False
        for told in self._compare(notice):
            is_told = True
            yield told
        if not is_told:
            for number, failure in sorted(self._failed.items()):
                if notice.epoch <= number <= notice.sequence:  # it began before the notice
                    is_told = True
                    yield notice.src, failure
        if notice.state == "asking" and not is_told:
            missing = tuple(
                place
                for place, rank in enumerate(self._members)
                if rank != notice.src and self.last.get(rank, -1) < notice.sequence
            )
            answer = Notice(notice.group, notice.sequence, "", "missing", missing=missing)
            yield notice.src, replace(answer, src=notice.src)

    def failed(self, notice: Notice) -> Told:
        if notice.sequence not in self._failed:
            yield from self._to_all_but(notice.src, notice)
            # The rank drops the messages of other ranks for that operation.
            for other in list(self._described.get(notice.sequence, {}).values()):
                if other.description != notice.description:
                    yield notice.src, other
            self._note_failure(notice)
        if notice.description and notice.state != "refused":
            yield from self._describe(notice)

    def _compare(self, notice: Notice) -> Told:
        """Compare a report with those of other ranks; notify all members of a contradiction."""
        earlier = [replace(notice, sequence=n, description=d, where="") for n, d in notice.before]
        for account in (*earlier, notice):
            first = next(iter(self._described.get(account.sequence, {}).values()), account)
            failure = self._contradiction(first, account)
            if failure is not None:
                yield from self._to_all_but(-1, failure)
                self._note_failure(failure)
            yield from self._describe(account)

    def _contradiction(self, first: Notice, second: Notice) -> Notice | None:
        """Return the failure of an operation that two ranks describe differently."""
        begin, number = min(first.epoch, second.epoch), first.sequence
        if any(begin <= failed <= number for failed in self._failed):
            return None  # the ranks are notified of that failure
        if first.epoch != second.epoch:
            knows, other = sorted((first, second), key=lambda each: -each.epoch)
            return self._unreported_failure(knows, other)
        return None if first.description == second.description else self._mismatch(first, second)

    def _describe(self, notice: Notice) -> Told:
        """Keep a description. If the operation has failed, all ranks drop messages under it."""
        ways = self._described.setdefault(notice.sequence, {})
        if notice.description in ways or len(ways) >= _MOST_WAYS:
            return
        account = replace(notice, state="waiting", text="", missing=(), before=())
        failure = self._failed.get(notice.sequence)
        known = () if failure is None else (failure.description, *failure.descriptions)
        if failure is not None and notice.description not in known:
            yield from self._to_all_but(notice.src, account)
        ways[notice.description] = account
        while len(self._described) > _MOST_NUMBERS:
            del self._described[min(self._described)]

    def _mismatch(self, first: Notice, second: Notice) -> Notice:
        one, other = self._members.index(first.src), self._members.index(second.src)
        number = first.sequence
        text = (
            f"collective number {number} of this group is {first.description} on rank {one} and "
            f"{second.description} on rank {other}; all ranks must call the same ones in the same "
            f"order{_lines((one, first.where), (other, second.where))}"
        )
        ways = (first.description, second.description)
        return replace(first, state="mismatch", text=text, culprit=other, descriptions=ways)

    def _unreported_failure(self, knows: Notice, other: Notice) -> Notice:
        one, two = self._members.index(knows.src), self._members.index(other.src)
        text = (
            f"collective number {knows.epoch - 1} of this group failed on rank {one}, and went "
            f"well on rank {two}"
        )
        return replace(knows, state="failed", text=text, culprit=one)

    def _note_failure(self, notice: Notice) -> None:
        self._failed[notice.sequence] = notice
        while len(self._failed) > _MOST_FAILURES:
            del self._failed[min(self._failed)]

    def _to_all_but(self, src: int, notice: Notice) -> Told:
        """Address all members, the culprit last, because it may leave then."""
        first = [r for place, r in enumerate(self._members) if place != notice.culprit]
        last = [r for place, r in enumerate(self._members) if place == notice.culprit]
        return ((rank, notice) for rank in (*first, *last) if rank != src)


def _lines(*places: tuple[int, str]) -> str:
    known = [f"rank {rank} at {where}" for rank, where in places if where]
    if len(known) > 1 and len({where for _, where in places}) == 1:
        return f" (both are at {places[0][1]})"
    return f" ({', '.join(known)})" if known else ""


class Attendance:
    """Tracks the agents of each name, and which wait for the others to leave. For one thread.

    A leaving agent keeps serving until each other agent of its name has left, only serves, or is on
    a lost rank. It does not wait for agents of its own thread, so ``with RpcAgent(a),
    RpcAgent(b):`` can leave them in turn.
    """

    def __init__(self) -> None:
        self._services: defaultdict[int, _Service] = defaultdict(_Service)
        self._services_of: defaultdict[int, set[int]] = defaultdict(set)

    def hear(self, rank: int, says: AgentSays) -> Answers:
        """Handle an agent's message; return the messages to answer, or raise ProtocolError."""
        services = self._services_of[rank]
        if len(services) >= MAX_AGENTS and says.service not in services:
            raise ProtocolError(f"it said to the coordinator that it has over {MAX_AGENTS} agents")
        services.add(says.service)
        return self._services[says.service].hear(rank, says) + self._settle(says.service, rank)

    def forget(self, rank: int) -> Answers:
        """Drop the agents of a lost rank; return the messages to answer."""
        answers: Answers = []
        for number in [*self._services_of.get(rank, ())]:
            self._services[number].drop(rank)
            answers += self._settle(number, rank)
        return answers

    def _settle(self, number: int, rank: int) -> Answers:
        service = self._services[number]
        due = service.due()
        for out in {rank, *(out for out, _ in due)}:
            if not service.has(out):
                self._services_of[out].discard(number)
                if not self._services_of[out]:
                    del self._services_of[out]
        if service.is_empty:
            del self._services[number]
        return due


class _Service:
    """The agents of one name: for each rank, the thread that uses its agent."""

    def __init__(self) -> None:
        self._in_use: dict[int, int] = {}
        self._serving: dict[int, int] = {}
        self._leaving: dict[int, tuple[int, int]] = {}  # the owner, and the number to answer
        # A leaving agent made these stop serving; they count as in use.
        self._stopped: set[int] = set()

    def hear(self, rank: int, says: AgentSays) -> Answers:
        was_stopped = rank in self._stopped
        self.drop(rank)
        match says.state:
            case AgentState.OPEN:
                self._in_use[rank] = says.owner
                return [(rank, says.number)]
            case AgentState.SERVING if not was_stopped:
                self._serving[rank] = says.owner
            case AgentState.SERVING:
                self._in_use[rank] = says.owner
            case AgentState.LEAVING:
                for other in says.stopped:
                    self._stop(other)
                self._leaving[rank] = (says.owner, says.number)
        return []

    def _stop(self, rank: int) -> None:
        if rank in self._serving:
            self._in_use[rank] = self._serving.pop(rank)
        elif rank in self._in_use:  # its last message may not have arrived yet
            self._stopped.add(rank)

    def drop(self, rank: int) -> None:
        self._in_use.pop(rank, None)
        self._serving.pop(rank, None)
        self._leaving.pop(rank, None)
        self._stopped.discard(rank)

    def has(self, rank: int) -> bool:
        return rank in self._in_use or rank in self._serving or rank in self._leaving

    @property
    def is_empty(self) -> bool:
        return not (self._in_use or self._serving or self._leaving)

    def due(self) -> Answers:
        """Remove and return the agents that need not wait any more."""
        owners: set[int] = set()
        for owner in self._in_use.values():
            owners.add(owner)
            if len(owners) > 1:
                return []  # stop early: this runs whenever an agent leaves
        due = [
            (rank, number) for rank, (owner, number) in self._leaving.items() if owners <= {owner}
        ]
        for rank, _ in due:
            del self._leaving[rank]
        return due
