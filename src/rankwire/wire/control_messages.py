"""What coordinator and members say to each other on a control connection. Pure: values and bytes.

``pack`` and ``unpack`` are mirrors; a message travels as the payload of one frame on the control
channel. What a frame may hold is limited by who sends it: a member has little to say, and what a
coordinator says grows with the world. No message is a map that the sender chooses the keys of.
Texts are made short and harmless when they are unpacked, as a peer may say anything; they are
short already if the peer is honest.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec.structs import asdict, replace

from rankwire.errors import InvalidMessageError
from rankwire.texts import MAX_REASON, NAME, one_line, printable
from rankwire.wire.frames import WORLD_GROUP, Channel
from rankwire.wire.notices import Notice, sanitize

# What all of them travel under.
CONTROL = (WORLD_GROUP, int(Channel.CONTROL), 0)
# The longest that a member says is the traceback that it falls by: 32768 characters of at most four
# bytes.
MAX_MEMBER_NBYTES = 256 << 10
# The longest that a coordinator says is where every rank is: mostly 150 bytes, with the longest
# names that there are (255 of a host, 107 of a socket file) 600.
_NBYTES_PER_MEMBER = 1024
# Of ranks that missed a beat. Who sees so many silent sees no more in a longer list.
MAX_SILENT = 4096
# Of ranks that one waited for when its time was up: one of them is enough to look into.
MAX_WAITED_FOR = 64


def max_coordinator_nbytes(world_size: int) -> int:
    """Return how long a message of a coordinator of so many ranks can be."""
    return MAX_MEMBER_NBYTES + _NBYTES_PER_MEMBER * world_size


def _meta(longest: int) -> msgspec.Meta:
    """Return what must hold of a text that is told to all and printed: short, printable."""
    return msgspec.Meta(max_length=longest, pattern=NAME)


class Member(msgspec.Struct, frozen=True):
    """Where one rank is.

    Attributes:
        rank: Its rank.
        pid: Its process id, on its own host.
        host: The address others reach it at.
        port: Its TCP port there.
        unix_path: Its socket file, or an empty string.
        host_id: Equal for two ranks that can reach each other's socket files.
        incarnation: How many times it was started anew alone. The coordinator says so, whatever
            the rank does.
    """

    rank: int
    pid: int
    host: Annotated[str, _meta(255)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    unix_path: Annotated[str, _meta(107)]
    host_id: Annotated[str, _meta(255)]
    incarnation: int = 0


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
# Below this, ranks that live would be given up, and one that joins could end the world by asking.
SHORTEST_FAIL_AFTER = 0.1
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
        keys: Those of the receiving rank with every other, wrapped for it (``wire.keys``).
        late: The ranks that were started anew and have joined since the world formed.
    """

    epoch: int
    members: list[Member]
    patience: Patience = DEFAULT_PATIENCE
    coordinator: int = 0
    keys: bytes = b""
    late: list[int] = []


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
        silent: From the coordinator: ranks that missed a beat, each with its seconds of silence; at
            most ``MAX_SILENT``.
    """

    silent: list[tuple[int, float]] = []


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
        waited_for: The ranks that it waited for when its time was up, if that is the reason; at
            most ``MAX_WAITED_FOR``.
    """

    reason: str
    traceback: str
    cause: int | None = None
    exit_code: int = 1
    waited_for: list[int] = []


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
        waited_for: The ranks that it waited for when its time was up, if it said so.
    """

    rank: int
    reason: str
    orderly: bool = False
    silent: bool = False
    traceback: str = ""
    cause: int | None = None
    exit_code: int | None = None
    waited_for: list[int] = []


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Coordinator to members: a rank that was gone was started anew, and is here.

    Attributes:
        member: Where it is now.
        key: That of the receiving rank with it, wrapped for the receiving rank.
    """

    member: Member
    key: bytes = b""


class Known(msgspec.Struct, frozen=True, tag="known"):
    """Member to coordinator: I know of the rank that was started anew."""

    rank: int
    incarnation: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Coordinator to a member: others have waited for you in vain; what are you doing?"""


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """Member to coordinator: this is what I do.

    Attributes:
        stacks: Where its threads are in the user's program.
        waits_for: The ranks that it expects messages or replies of; at most ``MAX_WAITED_FOR``.
        blocked_on: Those of them for whose messages a thread waits; as many at most.
    """

    stacks: str
    waits_for: list[int] = []
    blocked_on: list[int] = []


class AgentState(IntEnum):
    """What a rank does with its agent of one name."""

    OPEN = 0
    SERVING = 1  # nothing but serving: it calls no other rank
    LEAVING = 2  # it is done, and serves until the others are
    CLOSED = 3


class AgentSays(msgspec.Struct, frozen=True, tag="agent"):
    """Member to coordinator: one of my agents has entered this state.

    Attributes:
        service: The number that agents of one name have in common.
        number: Of this message. It tells the messages of one process apart.
        state: The state that it has entered.
        owner: Stands for the thread that uses the agent, different in all processes.
        stopped: The ranks that this agent has told to stop serving, if it leaves.
    """

    service: int
    number: int
    state: AgentState
    owner: int = 0
    stopped: list[int] = []


class AgentAnswer(msgspec.Struct, frozen=True, tag="agent_answer"):
    """Coordinator to a member: the answer to what an agent has said under this number.

    If that was ``OPEN``, all later messages of other ranks find it open. If it was ``LEAVING``, no
    other agent of its name is open any more.
    """

    number: int


def gone_by(rank: int, fallen: Fallen) -> Gone:
    """Return what all are told of a rank that has fallen."""
    return Gone(rank, **asdict(fallen))


Message = (
    Join
    | Waiting
    | World
    | Failed
    | Beat
    | Suspected
    | Fallen
    | Gone
    | Joined
    | Known
    | Ask
    | Doing
    | Notice
    | AgentSays
    | AgentAnswer
)

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Return a message as bytes."""
    return _encode(_sanitize(message))


def unpack(payload: bytearray) -> Message:
    """Return the message in a payload.

    Raises:
        InvalidMessageError: There is none.
    """
    try:
        message = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessageError(f"a control message does not decode: {error}") from error
    return _sanitize(message)


def _sanitize(message: Message) -> Message:
    """Return the message with texts that may be printed, and not too many silent ranks."""
    match message:
        case Fallen(reason, traceback) | Gone(reason=reason, traceback=traceback):
            return replace(
                message,
                reason=one_line(reason),
                traceback=printable(traceback),
                waited_for=message.waited_for[:MAX_WAITED_FOR],
            )
        case Doing(stacks):
            return replace(
                message,
                stacks=printable(stacks),
                waits_for=message.waits_for[:MAX_WAITED_FOR],
                blocked_on=message.blocked_on[:MAX_WAITED_FOR],
            )
        case Failed(reason):
            return replace(message, reason=one_line(reason, 8 * MAX_REASON))
        case Notice():
            return sanitize(message)
        case Beat(silent) if len(silent) > MAX_SILENT:
            return replace(message, silent=silent[:MAX_SILENT])
    return message
