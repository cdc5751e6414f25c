"""What coordinator and members say to each other on a control connection. Pure: values and bytes.

``pack`` and ``unpack`` are mirrors; a message travels as the payload of one frame on the control
channel.
"""

from __future__ import annotations

import msgspec

from rankwire.errors import InvalidMessageError

__all__ = [
    "DEFAULT_PATIENCE",
    "Beat",
    "Failed",
    "Fallen",
    "Gone",
    "Join",
    "Member",
    "Message",
    "Patience",
    "Suspected",
    "Waiting",
    "World",
    "gone_by",
    "pack",
    "unpack",
]


class Member(msgspec.Struct, frozen=True):
    """Where one rank is.

    Attributes:
        rank: Its rank.
        pid: Its process id, on its own host.
        host: The address others reach it at.
        port: Its TCP port there.
        unix_path: Its socket file, or an empty string.
        host_id: Equal for two ranks that can reach each other's socket files.
    """

    rank: int
    pid: int
    host: str
    port: int
    unix_path: str
    host_id: str


class Patience(msgspec.Struct, frozen=True):
    """How long a rank may be silent.

    Attributes:
        suspect_after: Seconds until it is suspected, which is told but changes nothing.
        fail_after: Seconds until it is given up.
    """

    suspect_after: float
    fail_after: float

    @property
    def beat(self) -> float:
        """Seconds between two signs of life: several fit into the shorter limit."""
        return max(_SHORTEST_BEAT, min(1.0, self.suspect_after / 4, self.fail_after / 4))

    def shorter(self, other: Patience) -> Patience:
        """Return the shorter of each limit."""
        return Patience(
            min(self.suspect_after, other.suspect_after), min(self.fail_after, other.fail_after)
        )


DEFAULT_PATIENCE = Patience(5.0, 30.0)
_SHORTEST_BEAT = 0.01


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Member to coordinator: I am here, and this is how long I would wait for others."""

    member: Member
    patience: Patience = DEFAULT_PATIENCE


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Coordinator to members: these ranks have not joined yet."""

    missing: list[int]


class World(msgspec.Struct, frozen=True, tag="world"):
    """Coordinator to members: everyone has joined.

    Attributes:
        epoch: Which incarnation of the job this is; connections of another one are refused.
        members: All ranks, in order.
        patience: The shortest that any of them asked for.
        coordinator: The rank that coordinates, or -1 if that is the launcher.
    """

    epoch: int
    members: list[Member]
    patience: Patience = DEFAULT_PATIENCE
    coordinator: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Coordinator to members: the world will not form.

    Attributes:
        reason: Why not.
        missing: Who has not joined.
        cause: The rank that will not, if it is known to be that one's doing.
    """

    reason: str
    missing: list[int]
    cause: int | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Either way: I am alive.

    Attributes:
        silent: From the coordinator: seconds of silence of the ranks that missed a beat.
    """

    silent: dict[int, float] = {}


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """Coordinator to members: a rank has been silent for so many seconds; 0 if it is back."""

    rank: int
    seconds: float


class Fallen(msgspec.Struct, frozen=True, tag="fallen"):
    """Member to coordinator: I leave because of an error.

    Attributes:
        reason: The error, in one line.
        traceback: Its traceback.
        cause: The rank because of whose failure it falls; None for a reason of its own.
        exit_code: What its process exits with, if nothing else happens.
    """

    reason: str
    traceback: str
    cause: int | None = None
    exit_code: int = 1


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Coordinator to members: a rank has died, or has left in good order.

    Attributes:
        rank: Which.
        reason: How that was noticed, or what the rank said.
        orderly: Whether it has left in good order.
        silent: Whether it was given up although its connection stood.
        traceback: Of the error that it fell by, if it said so.
        cause: The rank because of whose failure it fell, if it said so.
        exit_code: What it said that its process exits with; None if it did not say so.
    """

    rank: int
    reason: str
    orderly: bool = False
    silent: bool = False
    traceback: str = ""
    cause: int | None = None
    exit_code: int | None = None


def gone_by(rank: int, fallen: Fallen) -> Gone:
    """Return what all are told of a rank that has fallen."""
    return Gone(
        rank,
        fallen.reason,
        traceback=fallen.traceback,
        cause=fallen.cause,
        exit_code=fallen.exit_code,
    )


Message = Join | Waiting | World | Failed | Beat | Suspected | Fallen | Gone

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Return a message as bytes."""
    return _encode(message)


def unpack(payload: bytearray) -> Message:
    """Return the message in a payload.

    Raises:
        InvalidMessageError: There is none.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessageError(f"a control message does not decode: {error}") from error
