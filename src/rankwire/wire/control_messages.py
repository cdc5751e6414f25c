"""The messages between coordinator and members on a control connection.

Each travels as the payload of one frame on the control channel. A member's messages are short; the
coordinator's grow with the world. No message is a map whose keys the sender chooses. ``unpack``
makes texts short and printable, whatever the peer wrote.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

import msgspec
from msgspec.structs import asdict, replace

from rankwire.errors import InvalidMessageError
from rankwire.texts import MAX_REASON, NAME, one_line, printable
from rankwire.wire.frames import WORLD_GROUP, Channel

# The envelope of all control messages.
CONTROL = (WORLD_GROUP, int(Channel.CONTROL), 0)
# A member's longest message has a traceback: 32768 characters of at most four bytes.
MAX_MEMBER_NBYTES = 256 << 10
# The coordinator's longest message has a ``Member`` for every rank: 150 bytes mostly, 600 with the
# longest names (255 for a host, 107 for a socket file).
_NBYTES_PER_MEMBER = 1024
# A longer list of ranks that missed a beat tells the reader nothing more.
MAX_SILENT = 4096
# Of the ranks that a rank was waiting for, one is enough to find the cause.
MAX_WAITED_FOR = 64
MOST_BEFORE = 8  # earlier operations that a report lists
_MOST_MEMBERS = 16384
_MOST_DESCRIPTIONS = 2
# Characters; descriptions have about 1,000. A shortened one would count as another operation.
_MAX_DESCRIPTION = 2000
_MAX_TEXT = 4000
_MAX_WHERE = 300
_NUMBER = msgspec.Meta(ge=-(1 << 62), le=1 << 62)
_FAILURES = ("mismatch", "lost", "left", "failed", "refused")


def max_coordinator_nbytes(world_size: int) -> int:
    """Return how long a message of the coordinator of ``world_size`` ranks can be."""
    return MAX_MEMBER_NBYTES + _NBYTES_PER_MEMBER * world_size


def _meta(longest: int) -> msgspec.Meta:
    """Return the constraint for a text that is printed: short and printable."""
    return msgspec.Meta(max_length=longest, pattern=NAME)


class Member(msgspec.Struct, frozen=True):
    """Where one rank is."""

    rank: int
    pid: int  # on its own host
    host: Annotated[str, _meta(255)]  # the address at which others reach it
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    unix_path: Annotated[str, _meta(107)]  # its socket file, or an empty string
    host_id: Annotated[str, _meta(255)]  # equal if two ranks can reach each other's socket files
    incarnation: int = 0  # how often this rank alone was restarted; set by the coordinator


class Patience(msgspec.Struct, frozen=True):
    """Seconds of silence until members are told that a rank is suspected, and until it is lost."""

    suspect_after: float
    fail_after: float

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats: several fit into the shorter limit."""
        return max(_SHORTEST_BEAT, min(1.0, self.suspect_after / 4, self.fail_after / 4))

    def shorter(self, other: Patience) -> Patience:
        """Return the shorter of each limit."""
        return Patience(
            min(self.suspect_after, other.suspect_after), min(self.fail_after, other.fail_after)
        )


DEFAULT_PATIENCE = Patience(5.0, 30.0)
# With a lower limit, ranks that are alive would count as lost, and one rank could end the world by
# asking for it.
SHORTEST_FAIL_AFTER = 0.1
_SHORTEST_BEAT = 0.01


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Member to coordinator: I am here, and this is my patience."""

    member: Member
    patience: Patience = DEFAULT_PATIENCE


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Coordinator to members: these ranks have not joined yet."""

    missing: list[int]


class World(msgspec.Struct, frozen=True, tag="world"):
    """Coordinator to members: everyone has joined."""

    epoch: int  # which incarnation of the job this is; connections of others are refused
    members: list[Member]
    patience: Patience = DEFAULT_PATIENCE  # the shortest of all members
    coordinator: int = 0  # its rank, or -1 for the launcher
    keys: bytes = b""  # of the receiving rank with every other, wrapped for it (``wire.keys``)
    late: list[int] = []  # the ranks that were restarted and have joined since the world formed


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Coordinator to members: the world will not form. ``cause`` is the rank that caused it."""

    reason: str
    missing: list[int]
    cause: int | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat, either way; the coordinator's lists ranks that missed one, and their seconds."""

    silent: list[tuple[int, float]] = []


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """Coordinator to members: a rank has been silent for so many seconds; 0 if it is back."""

    rank: int
    seconds: float


class Fallen(msgspec.Struct, frozen=True, tag="fallen"):
    """Member to coordinator: I leave because of an error."""

    reason: str  # the error, in one line
    traceback: str
    cause: int | None = None  # the rank whose failure caused it; None for an error of its own
    exit_code: int = 1  # of its process, as expected
    waited_for: list[int] = []  # the ranks that it was waiting for, if its timeout expired


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Coordinator to members: a rank has died, or has left without an error."""

    rank: int
    reason: str  # how this was noticed, or what the rank reported
    orderly: bool = False  # whether it has left without an error
    silent: bool = False  # whether it was silent for too long while its connection was open
    # As in ``Fallen``, like the rest; empty or None if it reported nothing.
    traceback: str = ""
    cause: int | None = None
    exit_code: int | None = None
    waited_for: list[int] = []


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Coordinator to members: a restarted rank has joined. ``key`` is wrapped for the receiver."""

    member: Member
    key: bytes = b""


class Known(msgspec.Struct, frozen=True, tag="known"):
    """Member to coordinator: I know of the restarted rank."""

    rank: int
    incarnation: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Coordinator to a member: other ranks have waited too long for you; what are you doing?"""


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """Member to coordinator: this is what I am doing."""

    stacks: str  # where its threads are in the user's program
    waits_for: list[int] = []  # the ranks that it expects messages or replies from
    blocked_on: list[int] = []  # those of them that a thread is waiting for


class Notice(msgspec.Struct, frozen=True, tag="notice", omit_defaults=True):
    """A report about a collective: of a rank, or a notice of the coordinator about such reports.

    A rank that waits or fails in an operation reports it. The coordinator compares the reports
    (``rendezvous.roll``). Ranks are numbered as in the group, except ``src`` and ``members``, which
    are world ranks.

    Attributes:
        group: The id of the group.
        sequence: The number of the operation in its group.
        description: The operation.
        state: From a rank: it is *waiting*, or waiting and *asking* which ranks are missing. From
            the coordinator: which ranks are *missing*, or how another rank describes the operation
            (*waiting*). From both: how the operation failed; *refused* if the arguments were wrong,
            and then ``description`` is only the name of the function.
        text: What went wrong.
        culprit: The rank that caused the failure.
        epoch: The number after the last operation that failed for the sender. Ranks with different
            epochs ignore each other's messages.
        missing: The ranks that have not come to the operation.
        where: The line of the program that called the operation, if known.
        before: Number and description of the last operations that succeeded for the sender.
        descriptions: The descriptions of the operation, if ranks disagree.
        members: The ranks of the group; empty for the whole world.
        src: The rank that reported it, filled in by the coordinator.
    """

    group: Annotated[int, msgspec.Meta(ge=0)]
    sequence: Annotated[int, _NUMBER]
    description: str
    state: Literal[
        "waiting", "asking", "missing", "mismatch", "lost", "left", "failed", "refused"
    ] = "waiting"
    text: str = ""
    culprit: int = -1
    epoch: Annotated[int, _NUMBER] = 0
    missing: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MOST_MEMBERS)] = ()
    where: str = ""
    before: Annotated[
        tuple[tuple[Annotated[int, _NUMBER], str], ...], msgspec.Meta(max_length=MOST_BEFORE)
    ] = ()
    descriptions: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST_DESCRIPTIONS)] = ()
    members: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MOST_MEMBERS)] = ()
    src: int = -1

    @property
    def is_failure(self) -> bool:
        """Whether the operation has failed."""
        return self.state in _FAILURES


class AgentState(IntEnum):
    """The state of a rank's agent of one name."""

    OPEN = 0
    SERVING = 1  # nothing but serving: it calls no other rank
    LEAVING = 2  # it is done, and serves until the others are done too
    CLOSED = 3


class AgentSays(msgspec.Struct, frozen=True, tag="agent"):
    """Member to coordinator: one of my agents has entered this state."""

    service: int  # the number that agents of one name share
    number: int  # of this message, unique in its process
    state: AgentState
    owner: int = 0  # identifies the thread that uses the agent, across all processes
    stopped: list[int] = []  # the ranks that this agent has told to stop serving, if it leaves


class AgentAnswer(msgspec.Struct, frozen=True, tag="agent_answer"):
    """Coordinator to a member: the answer to the message of an agent with this number.

    After ``OPEN``: all later messages of other ranks find the agent open. After ``LEAVING``: no
    other agent of its name is open any more.
    """

    number: int


def gone_by(rank: int, fallen: Fallen) -> Gone:
    """Return the message to all members about a rank that has reported an error."""
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
    """Return the message in a payload, or raise ``InvalidMessageError``."""
    try:
        message = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessageError(f"a control message does not decode: {error}") from error
    return _sanitize(message)


def _sanitize(message: Message) -> Message:
    """Return the message with short, printable texts and lists of limited length."""
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
            return sanitize_notice(message)
        case Beat(silent) if len(silent) > MAX_SILENT:
            return replace(message, silent=silent[:MAX_SILENT])
    return message


def sanitize_notice(notice: Notice) -> Notice:
    """Return a notice with short, printable texts, whatever the peer wrote."""
    return replace(
        notice,
        description=_described(notice.description),
        text=printable(notice.text, _MAX_TEXT),
        where=printable(notice.where, _MAX_WHERE),
        before=tuple((number, _described(text)) for number, text in notice.before),
        descriptions=tuple(map(_described, notice.descriptions)),
    )


def _described(text: str) -> str:
    return printable(text, _MAX_DESCRIPTION)
