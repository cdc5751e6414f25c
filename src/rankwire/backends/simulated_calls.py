"""Call ports of a simulated world: requests and replies between agents in one process.

A request lands in the port of the same service at its destination, even before an agent has opened
it there; the thread in ``poll`` takes it. A reply lands in an inbox of the port that called, one
for each rank it called. Requests and replies travel in lanes of their own (``simulated_network``),
so a full queue of messages does not hold up calls, and faults meet them as they meet messages.

A port is made once and closed once; a service that is opened again gets a new port, so nothing of
the old agent reaches the new one. The switchboard has all ports of the world. It does not know
backends, functions or futures.

Lock: the network's; *lock held* means inside ``Network.changing()``. Callbacks run without it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from rankwire.backends.arguments import check_rank
from rankwire.backends.calls import CallCancelled, CallerGone, CallPort, IncomingCall, PortEvent
from rankwire.backends.simulated_lanes import Inbox, Lane, Wanted
from rankwire.backends.simulated_network import Network
from rankwire.deadline import Deadline
from rankwire.errors import (
    ChannelClosedError,
    ConfigurationError,
    MessageTooLargeError,
    RankwireError,
    SelfSendError,
)
from rankwire.wire.frames import WORLD_GROUP, Buffer, Channel
from rankwire.wire.mailbox import Mailbox, Receive

__all__ = ["SimulatedCallPort", "Switchboard"]


class Switchboard:
    """All call ports of one simulated world. Everything needs the network's lock held.

    Args:
        network: What requests and replies travel on.
        max_message_nbytes: Largest request or reply.
    """

    def __init__(self, network: Network, *, max_message_nbytes: int) -> None:
        self.network = network
        self.max_message_nbytes = max_message_nbytes
        self._ports: dict[int, dict[int, SimulatedCallPort]] = {}  # by service, then rank

    def open(self, rank: int, service: int) -> SimulatedCallPort:
        """Return the port for the agent of a rank, with the requests that have come before it."""
        ports = self._ports.setdefault(service, {})
        port = ports.get(rank)
        if port is None or port.failure is not None:
            port = ports[rank] = SimulatedCallPort(self, rank, service)
        elif port.opened:
            raise ConfigurationError(f"service {service} has an open port on rank {rank} already")
        port.opened = True
        return port

    def port_for(self, rank: int, service: int) -> SimulatedCallPort:
        """Return the port where requests to a rank land, opened or not.

        Raises:
            ChannelClosedError: It was open, and is closed.
        """
        ports = self._ports.setdefault(service, {})
        port = ports.get(rank)
        if port is None:
            port = ports[rank] = SimulatedCallPort(self, rank, service)
        elif port.failure is not None:
            raise _closed_at(rank)
        return port

    def close(self, port: SimulatedCallPort) -> None:
        """End a port in good order."""
        if port.failure is None:
            port.end(ChannelClosedError("this port is closed"))
            self._part(port, _closed_at(port.rank))

    def leave(self, rank: int) -> None:
        """End all ports of a rank in good order, because the rank leaves."""
        for port in self._ports_of(rank):
            if port.failure is None:
                port.end(ChannelClosedError("this backend is closed"))
                self._part(port, ChannelClosedError(f"rank {rank} has left").during(peer=rank))

    def end(self, rank: int, error: RankwireError) -> None:
        """A rank is dead: its ports end without a word."""
        for port in self._ports_of(rank):
            port.end(error)

    def lose(self, rank: int, peer: int, error: RankwireError) -> None:
        """A rank has lost a peer: no reply comes from there, and none gets there."""
        for port in self._ports_of(rank):
            port.lose(peer, error)

    def in_flight(self, rank: int, peer: int) -> int:
        """Return how many calls of a rank wait for a reply of a peer. Lock held."""
        return sum(port.in_flight_to(peer) for port in self._ports_of(rank))

    def _ports_of(self, rank: int) -> list[SimulatedCallPort]:
        return [ports[rank] for ports in self._ports.values() if rank in ports]

    def _part(self, port: SimulatedCallPort, news: RankwireError) -> None:
        """Let the peers of a port hear the news, after what it has sent; what they sent is lost."""
        network, rank, service = self.network, port.rank, port.service
        for other in self._ports[service].values():
            if other is port:
                continue
            if other.has_heard_from(rank):
                network.farewell(other.requests_from(rank), partial(other.caller_gone, rank))
            replies = other.retire(rank)
            if replies is not None:
                network.farewell(replies.lane, partial(other.end_replies, replies, news))
            network.close_lane(other.rank, rank, f"requests {service}", news)
            network.close_lane(other.rank, rank, f"replies {service}", news)


class SimulatedCallPort(CallPort):
    """See ``CallPort``. Safe from any thread; payloads are copied, so buffers are free on return.

    Args:
        board: Knows the other ports.
        rank: Whose port this is.
        service: Which agent it is for.

    Attributes:
        opened: Whether an agent has it; before that it only collects requests.
        failure: Why it is closed, if it is.
    """

    def __init__(self, board: Switchboard, rank: int, service: int) -> None:
        self.rank = rank
        self.service = service
        self.opened = False
        self.failure: RankwireError | None = None
        self._board = board
        self._network = board.network
        self._events: list[PortEvent] = []
        self._requests: dict[int, Lane] = {}
        self._requested_nbytes: Counter[int] = Counter()
        self._callers: set[int] = set()
        self._news = threading.Condition(self._network.lock)
        self._woken = False
        self._replies: dict[int, Inbox] = {}
        self._retired: set[Inbox] = set()
        self._dropped_before = 0

    @property
    def dropped(self) -> int:
        """How many replies came after their call was given up."""
        with self._network.changing():
            return self._dropped_before + sum(inbox.dropped for inbox in self._inboxes())

    # -- outgoing ----------------------------------------------------------------------------------

    def call(
        self,
        dst: int,
        request_id: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        on_reply: Callable[[Receive], None] | None = None,
        *,
        hold: bool = False,
    ) -> Receive:
        """See ``CallPort.call``. Nothing is held back. When it raises, ``on_reply`` is not called.

        Raises:
            DeadlineExceededError: The callee's queue of requests was full all the time.
            PeerLostError: The callee is dead.
            ChannelClosedError: This port or the callee's is closed.
        """
        self._check_peer(dst)
        payload = self._joined(buffers, nbytes)
        wanted = Wanted((WORLD_GROUP, Channel.REPLY, request_id), on_done=on_reply)
        with self._network.changing():
            self._raise_failure()
            self._raise_loss(dst)
            port = self._board.port_for(dst, self.service)
            lane = port.requests_from(self.rank)
            self._network.wait_for_room(lane, nbytes, deadline, check=self._raise_failure)
            replies = self._replies_from(dst)
            replies.post(wanted)
            call = IncomingCall(self.rank, request_id, payload, replies)
            self._network.dispatch(lane, nbytes, partial(port.admit, call))
        return wanted

    def wait(self, dst: int, receive: Receive, deadline: Deadline) -> bytearray:
        """See ``CallPort.wait``."""
        with self._network.changing():
            return _home(receive).wait(_wanted(receive), deadline)

    def drive(self, dst: int, receive: Receive, deadline: Deadline) -> bool:
        """See ``CallPort.drive``."""
        with self._network.changing():
            return _home(receive).drive(_wanted(receive), deadline)

    def forget(self, dst: int, receive: Receive) -> bool:
        """See ``CallPort.forget``."""
        with self._network.changing():
            return _home(receive).withdraw(_wanted(receive))

    def abort(self, dst: int, receive: Receive, error: RankwireError) -> bool:
        """See ``CallPort.abort``."""
        with self._network.changing():
            return _home(receive).abort(_wanted(receive), error)

    def cancel(self, dst: int, request_id: int) -> None:
        """See ``CallPort.cancel``."""
        with self._network.changing():
            if self.failure is None and dst in self._replies:
                port = self._board.port_for(dst, self.service)
                cancelled = CallCancelled(self.rank, request_id)
                lane = port.requests_from(self.rank)
                self._network.dispatch(lane, 0, partial(port.admit, cancelled))

    def wait_for_room(self, dst: int, limit: int, deadline: Deadline) -> bool:
        """See ``CallPort.wait_for_room``."""
        with self._network.changing():
            inbox = self._replies.get(dst)
            return inbox is None or inbox.wait_for_fewer(limit, deadline)

    def calls_to(self, dst: int) -> list[int]:
        """See ``CallPort.calls_to``."""
        with self._network.changing():
            return self._replies[dst].tags_wanted() if dst in self._replies else []

    def attend(self, *, patiently: bool = False) -> bool:
        """See ``CallPort.attend``. Replies arrive by themselves, nobody has to look after them."""
        return self.in_flight() > 0

    def in_flight(self) -> int:
        """See ``CallPort.in_flight``."""
        with self._network.changing():
            return sum(inbox.in_flight for inbox in self._inboxes())

    # -- incoming ----------------------------------------------------------------------------------

    def poll(self, deadline: Deadline) -> list[PortEvent]:
        """See ``CallPort.poll``.

        Raises:
            ChannelClosedError: This port is closed.
            PeerLostError: This rank itself was killed.
        """
        with self._network.changing():
            self._raise_failure()
            while not (self._events or self._woken or deadline.expired):
                self._news.wait(deadline.sleep_limit())
                self._raise_failure()
            self._woken = False
            events, self._events = self._events, []
            callers, self._requested_nbytes = self._requested_nbytes, Counter()
            for src in callers:
                self.requests_from(src).room_made()
            return events

    def wake(self) -> None:
        """See ``CallPort.wake``."""
        with self._network.changing():
            self._woken = True
            self._news.notify_all()

    def reply(
        self,
        call: IncomingCall,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: Deadline,
        *,
        hold: bool = False,
    ) -> None:
        """See ``CallPort.reply``. Nothing is held back.

        Raises:
            PeerLostError: The caller is dead.
            ChannelClosedError: This port or the caller's is closed.
        """
        payload = self._joined(buffers, nbytes)
        replies: Inbox = call.origin
        key = (WORLD_GROUP, Channel.REPLY, call.request_id)
        with self._network.changing():
            self._raise_failure()
            self._network.wait_for_room(replies.lane, nbytes, deadline, check=self._raise_failure)
            self._network.dispatch(replies.lane, nbytes, partial(replies.land, key, payload))

    def flush(self) -> None:
        """See ``CallPort.flush``. Nothing is held back."""

    def close(self) -> None:
        """See ``CallPort.close``. A thread in ``poll`` gets ``ChannelClosedError``."""
        with self._network.changing():
            self._board.close(self)

    # -- for the switchboard and other ports, lock held --------------------------------------------

    def requests_from(self, src: int) -> Lane:
        """Return the lane of a rank's requests to this port."""
        lane = self._requests.get(src)
        if lane is None:
            lane = self._network.lane(src, self.rank, f"requests {self.service}")
            lane.kept_nbytes = lambda: self._requested_nbytes[src]
            self._requests[src] = lane
        return lane

    def has_heard_from(self, src: int) -> bool:
        """Whether a rank has ever called here."""
        return src in self._requests

    def admit(self, event: IncomingCall | CallCancelled) -> None:
        """Take what a caller sent. Not after the end: that closed the lane."""
        if isinstance(event, IncomingCall):
            self._callers.add(event.src)
            self._requested_nbytes[event.src] += len(event.payload)
        self._events.append(event)
        self._news.notify_all()

    def caller_gone(self, src: int) -> None:
        """Note that no reply reaches a rank's agent any more, if it has called at all."""
        if src in self._callers and self.failure is None:
            self._callers.remove(src)
            self._events.append(CallerGone(src))
            self._news.notify_all()

    def lose(self, peer: int, error: RankwireError) -> None:
        """Give up calls to and from a rank that is out of reach."""
        self.retire(peer)
        for inbox in [inbox for inbox in self._retired if inbox.lane.src == peer]:
            self.end_replies(inbox, error)
        self.caller_gone(peer)

    def in_flight_to(self, peer: int) -> int:
        """Return how many calls wait for a peer's reply. Lock held."""
        inbox = self._replies.get(peer)
        return 0 if inbox is None else inbox.in_flight

    def retire(self, dst: int) -> Inbox | None:
        """Let later calls have a new inbox; return the one that still gets what is under way."""
        inbox = self._replies.pop(dst, None)
        if inbox is not None:
            self._retired.add(inbox)
        return inbox

    def end_replies(self, inbox: Inbox, error: RankwireError) -> None:
        """Fail the calls whose replies would come to a retired inbox."""
        self._retired.discard(inbox)
        self._dropped_before += inbox.dropped
        inbox.fail(error)

    def end(self, error: RankwireError) -> None:
        """End every wait, now and later."""
        self.failure = error
        self._events.clear()
        for inbox in self._inboxes():
            self.end_replies(inbox, error)
        self._replies.clear()
        self._news.notify_all()

    # -- helpers -----------------------------------------------------------------------------------

    def _inboxes(self) -> list[Inbox]:
        return [*self._replies.values(), *self._retired]

    def _replies_from(self, dst: int) -> Inbox:
        inbox = self._replies.get(dst)
        if inbox is None:
            lane = self._network.lane(dst, self.rank, f"replies {self.service}")
            inbox = self._replies[dst] = Inbox(self._network, lane, Mailbox(keep_unmatched=False))
        return inbox

    def _joined(self, buffers: Sequence[Buffer], nbytes: int) -> bytearray:
        if nbytes > self._board.max_message_nbytes:
            raise MessageTooLargeError(nbytes, self._board.max_message_nbytes)
        return bytearray().join(buffers)

    def _check_peer(self, dst: int) -> None:
        check_rank(dst, self._network.world_size)
        if dst == self.rank:
            raise SelfSendError(self.rank)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()

    def _raise_loss(self, dst: int) -> None:
        loss = self._network.why_lost(self.rank, dst)
        if loss is not None:
            raise loss

    def __repr__(self) -> str:
        state = "open" if self.failure is None else "closed"
        return f"<SimulatedCallPort of service {self.service} at rank {self.rank}, {state}>"


def _closed_at(rank: int) -> ChannelClosedError:
    return ChannelClosedError(f"the agent of rank {rank} is closed").during(peer=rank)


def _wanted(receive: Receive) -> Wanted:
    assert isinstance(receive, Wanted)
    return receive


def _home(receive: Receive) -> Inbox:
    assert isinstance(receive.home, Inbox)
    return receive.home
