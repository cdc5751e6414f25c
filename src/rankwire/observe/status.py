"""Describe what a rank knows about its peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rankwire.errors import ChannelClosedError, RankwireError
from rankwire.wire.frames import Channel, Envelope

PeerState = Literal["up", "suspected", "left", "lost"]
_WANTED: dict[int, str] = {
    Channel.MESSAGE: "a message with tag {}",
    Channel.COLLECTIVE: "a collective",
}


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Shows one peer as this rank sees it.

    Attributes:
        rank: The peer's rank.
        state: ``"up"``, ``"suspected"`` (silent, but not lost yet), ``"left"`` or ``"lost"``.
        reason: Why it is lost; else empty.
        silent_for: Seconds since its last heartbeat; 0 if it missed none.
        link: The connection to it, ``"unix"`` or ``"tcp"``; empty before the first message.
        queued_nbytes: Bytes sent to it that it has not read.
        in_flight: Calls to it without a reply.
        waiting_for: What this rank is waiting to receive from it.
        incarnation: How many times its process was restarted alone.
        unreceived: Its messages that the program has not received.
        serving: Functions that this rank runs for it.
    """

    rank: int
    state: PeerState
    reason: str = ""
    silent_for: float = 0.0
    link: str = ""
    queued_nbytes: int = 0
    in_flight: int = 0
    waiting_for: tuple[str, ...] = ()
    incarnation: int = 0
    unreceived: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (
            (True, f"rank {self.rank}: {self.state}"),
            (self.incarnation, f"incarnation {self.incarnation}"),
            (self.link, f"by {self.link}"),
            (self.silent_for, f"silent for {self.silent_for:.1f} s"),
            (self.queued_nbytes, f"{self.queued_nbytes} bytes queued"),
            (self.in_flight, f"{self.in_flight} calls in flight"),
            (self.waiting_for, f"waited for: {', '.join(self.waiting_for)}"),
            (self.unreceived, f"unreceived: {', '.join(self.unreceived)}"),
            (self.serving, f"serving: {', '.join(self.serving)}"),
            (self.reason, self.reason),
        )
        return ", ".join(text for is_known, text in parts if is_known)


@dataclass(frozen=True, slots=True)
class WorldStatus:
    """Shows a rank's view of all peers; ``print`` it.

    Attributes:
        rank: The rank whose view this is.
        world_size: The number of ranks.
        peers: The status of each peer, by rank.
        operation: The collective that the rank is in; else empty.
    """

    rank: int
    world_size: int
    peers: Mapping[int, PeerStatus]
    operation: str = ""

    @property
    def waiting_on(self) -> list[int]:
        """The ranks that this rank is waiting for."""
        return [peer.rank for peer in self.peers.values() if peer.waiting_for or peer.in_flight]

    def __str__(self) -> str:
        head = f"rank {self.rank} of {self.world_size}"
        head += f", in {self.operation}" if self.operation else ""
        return "\n  ".join([head, *map(str, self.peers.values())])


def state_of(failure: RankwireError | None, *, is_suspected: bool) -> PeerState:
    """Return the state of a peer from its failure, if any."""
    if failure is not None:
        return "left" if isinstance(failure, ChannelClosedError) else "lost"
    return "suspected" if is_suspected else "up"


def describe_unreceived(counts: Mapping[Envelope, int]) -> tuple[str, ...]:
    """Describe the messages that the program has not received, by tag."""
    tags: Counter[int] = Counter()
    for (_, channel, tag), count in counts.items():
        if channel == Channel.MESSAGE:
            tags[tag] += count
    return tuple(f"{count} with tag {tag}" for tag, count in sorted(tags.items()))


def describe_wanted(keys: Iterable[Envelope]) -> tuple[str, ...]:
    """Describe the pending receives."""
    return tuple(sorted({_WANTED.get(channel, "a reply").format(tag) for _, channel, tag in keys}))
