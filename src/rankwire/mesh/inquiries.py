"""What this rank does and waits for: shown by ``status``, answered to and asked of other ranks.

A question goes over the control connections: the coordinator forwards it to the asked rank, and the
answer back. If the coordinator is lost, has missed a beat or does not answer, the asking thread
dials the asked rank and sends it the same question.

In a world of processes the acceptor thread answers at once, whatever the user's threads do, unless
the process is stopped or holds the interpreter lock in native code. It takes only locks that are
never held while blocking, and waits for nothing.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, DeadlineExceededError, ProtocolError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.inbox import Inbox
from rankwire.observe.inquiry import describe_calls, fit, list_calls, text_of
from rankwire.observe.stacks import methods_entered, places, stacks
from rankwire.observe.status import PeerStatus
from rankwire.override import override
from rankwire.rendezvous.control_protocol import tell
from rankwire.rendezvous.formation import Formation
from rankwire.wire.control_messages import MAX_MEMBER_NBYTES, Answer, Key, Question, unpack
from rankwire.wire.frames import Channel, Frame, whole_of
from rankwire.wire.handshake import Purpose

if TYPE_CHECKING:
    from rankwire.mesh.mesh import Mesh
    from rankwire.transports.byte_stream import ByteStream
    from rankwire.wire.seals import Seals

_log = logging.getLogger("rankwire")

_RECEIVING = (Inbox.take.__code__, Inbox.drive.__code__)  # a waiting thread is in one of these
_MOST_ASKING = 16  # connections of one rank


class Inquiries(ABC):
    """Describes what a rank waits for and serves, and asks other ranks. Safe from any thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asking: dict[object, int] = {}  # the ranks that threads ask after a wait in vain

    # -- this rank ---------------------------------------------------------------------------------

    def status_of(self, rank: int) -> PeerStatus:
        """Return the status of a peer."""
        ports = self._mesh.ports.all()
        status = self._mesh.peers[rank].status()
        return replace(
            status,
            in_flight=sum(len(port.calls_to_world_rank(rank)) for port in ports),
            serving=tuple(
                call.name
                for port in ports
                for call in port.describe(())
                if call.key.src == rank and not call.workers
            ),
            silent_for=self._count_silences().get(rank, status.silent_for),
        )

    def silences(self) -> dict[int, float]:
        """Return the seconds of silence of each rank that missed beats."""
        counted = self._count_silences()
        seconds = {
            rank: counted.get(rank, peer.silent_for)
            for rank, peer in list(self._mesh.peers.items())
            if peer.failure is None
        }
        return {rank: silence for rank, silence in seconds.items() if silence}

    def unreceived(self, src: int, group: int) -> dict[int, int]:
        """Return how many messages of a rank were read but not received, by tag."""
        arrived = self._mesh.peers[src].inbox.unreceived()
        message = int(Channel.MESSAGE)
        return {
            tag: n for (g, channel, tag), n in arrived.items() if (g, channel) == (group, message)
        }

    def answer(self, question: Question) -> Answer:
        """Return what this rank is doing. Neither waits nor raises."""
        try:
            answer = fit(self._answer(question))
        except Exception:  # a defect must not fail the acceptor
            _log.exception("rank %d could not be told what this one is doing", question.asker)
            answer = Answer()
        return msgspec.structs.replace(answer, number=question.number, asker=question.asker)

    def _answer(self, question: Question) -> Answer:
        ports = self._mesh.ports.all()
        if question.calls:
            served = [port for port in ports if port.service == question.service]
            return describe_calls([c for port in served for c in port.describe(question.calls)])
        return msgspec.structs.replace(
            list_calls([port.describe(()) for port in ports]),
            places=tuple(self._places()),
            stacks=stacks() if question.wants_stacks else "",
            waits_for=self._waits_for(),
            blocked_on=self._blocked_on(),
        )

    def _waits_for(self) -> list[int]:
        ports = self._mesh.ports.all()
        return [
            rank
            for rank, peer in list(self._mesh.peers.items())
            if peer.inbox.wanted() or any(port.calls_to_world_rank(rank) for port in ports)
        ]

    def _blocked_on(self) -> list[int]:
        """Return the ranks whose messages a thread waits for or just did; posts do not count."""
        inboxes = methods_entered(_RECEIVING)
        asking = list(self._asking.values())
        return [
            rank
            for rank, peer in list(self._mesh.peers.items())
            if rank in asking or any(each is peer.inbox for each in inboxes)
        ]

    # -- other ranks -------------------------------------------------------------------------------

    def doing_of(self, rank: int, deadline: Deadline) -> str | None:
        """Ask a rank that a thread waits for what it is doing.

        Returns an empty text if it does not answer in time, None if it has nothing to report.
        """
        visit = object()
        try:
            self._asking[visit] = rank
            return text_of(self.ask(rank, deadline), self._mesh.rank)
        finally:
            self._asking.pop(visit, None)

    def ask(
        self, rank: int, deadline: Deadline, service: int = 0, calls: Iterable[Key] = ()
    ) -> Answer | None:
        """Ask a rank what it is doing, or what the calls of a service are doing.

        Returns an empty answer if the rank is gone or is this one; None if it does not answer in
        time.
        """
        if rank == self._mesh.rank or self._mesh.failure_of(rank) is not None:
            return Answer()
        question = Question(0, rank, self._mesh.rank, service, tuple(calls))
        try:
            return self._put(question, deadline)
        except RankwireError as error:
            _log.debug("rank %d did not say what it is doing: %s", rank, error)
            return Answer() if isinstance(error, ChannelClosedError) else None

    # -- what differs ------------------------------------------------------------------------------

    @abstractmethod
    def _put(self, question: Question, deadline: Deadline) -> Answer | None:
        """Send a question to a rank; return None or raise if it does not answer in time."""

    def _places(self) -> list[str]:
        return places()

    def _count_silences(self) -> dict[int, float]:
        return {}


class _Waiting:
    def __init__(self) -> None:
        self.has_come = runtime.Event()
        self.answer: Answer | None = None


class ControlInquiries(Inquiries):
    """Asks over the control connections, or over connections of its own."""

    def __init__(self, mesh: Mesh, formation: Formation) -> None:
        super().__init__(mesh)
        self._formation = formation
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._connections: dict[int, list[Connection]] = {}  # of asking ranks; for the acceptor

    @override
    def _put(self, question: Question, deadline: Deadline) -> Answer | None:
        number = next(self._numbers)
        waiting = self._waiting[number] = _Waiting()
        question = msgspec.structs.replace(question, number=number)
        try:
            roll = self._mesh.roll
            is_heard = roll.is_kept and roll.keeper not in self._count_silences()
            if is_heard and self._formation.report(question):
                # Half of the time: a coordinator that has just been stopped has missed no beat yet.
                self._mesh.clock.wait(waiting.has_come, deadline.remaining() / 2)
            return waiting.answer or self._put_directly(question, deadline)
        except RankwireError:
            if waiting.answer is None:
                raise
            return waiting.answer  # it arrived from the coordinator meanwhile
        finally:
            self._waiting.pop(number, None)

    def on_answer(self, answer: Answer) -> None:
        """Take an answer; drop it if no thread waits for it any more."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None:
            waiting.answer = answer
            waiting.has_come.set()

    def _put_directly(self, question: Question, deadline: Deadline) -> Answer | None:
        peer = self._mesh.peers[question.rank]
        connection = self._wrap(
            question.rank, *self._mesh.connections.open_stream(peer, Purpose.INQUIRY, 0, deadline)
        )
        try:
            tell(connection, question)
            while not (frames := connection.read(deadline)):
                if deadline.expired:
                    raise DeadlineExceededError(deadline.limit, waiting_for=[question.rank])
            message = unpack(whole_of(frames[0].payload))
            return message if isinstance(message, Answer) else None
        finally:
            connection.close()

    def take(self, rank: int, stream: ByteStream, seals: Seals | None) -> None:
        """Answer on a connection that a rank has dialled to ask. On the acceptor's thread."""
        acceptor = self._formation.acceptor
        assert acceptor is not None  # the acceptor calls this
        connection = self._wrap(rank, stream, seals)
        standing = self._connections.setdefault(rank, [])

        def end(old: Connection) -> None:
            acceptor.unwatch(old)
            old.close()
            standing.remove(old)

        def heard(frames: list[Frame]) -> None:
            for frame in frames:
                message = unpack(whole_of(frame.payload))
                if not isinstance(message, Question):
                    raise ProtocolError("it does not ask")
                tell(connection, self.answer(msgspec.structs.replace(message, asker=rank)))

        while len(standing) >= _MOST_ASKING:
            end(standing[0])
        standing.append(connection)
        acceptor.watch(connection, heard, lambda error: end(connection))

    def _wrap(self, rank: int, stream: ByteStream, seals: Seals | None) -> Connection:
        """Return a connection whose end does not mean that its peer is lost."""
        return Connection(
            stream,
            peer=rank,
            max_nbytes=MAX_MEMBER_NBYTES,
            clock=self._mesh.clock,
            single_copy=False,
            seals=seals,
        )

    @override
    def _count_silences(self) -> dict[int, float]:
        return self._formation.silences()

    def close(self) -> None:
        """Close the connections of asking ranks, after the acceptor has stopped."""
        for connection in itertools.chain(*self._connections.values()):
            connection.close()
