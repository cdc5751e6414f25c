"""What coordinator and members say to each other on a control connection. Pure: values and bytes.

``pack`` and ``unpack`` are mirrors; a message travels as the payload of one frame on the control
channel.
"""

from __future__ import annotations

import msgspec

from rankwire.errors import InvalidMessageError

__all__ = ["Failed", "Gone", "Join", "Member", "Message", "Waiting", "World", "pack", "unpack"]


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


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Member to coordinator: I am here."""

    member: Member


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Coordinator to members: these ranks have not joined yet."""

    missing: list[int]


class World(msgspec.Struct, frozen=True, tag="world"):
    """Coordinator to members: everyone has joined.

    Attributes:
        epoch: Which incarnation of the job this is; connections of another one are refused.
        members: All ranks, in order.
    """

    epoch: int
    members: list[Member]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Coordinator to members: the world will not form."""

    reason: str
    missing: list[int]


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Coordinator to members: a rank has died, or has left in good order."""

    rank: int
    reason: str
    orderly: bool


Message = Join | Waiting | World | Failed | Gone

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
