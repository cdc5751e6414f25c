"""The messages between coordinator and members on a control connection.

Each is the payload of a frame. No message is a map whose keys the sender chooses. ``unpack`` makes
texts short and printable, whatever the peer wrote.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from rankwire.errors import InvalidMessageError
from rankwire.texts import MAX_REASON, NAME, one_line, printable
from rankwire.wire.frames import WORLD_GROUP, Channel

CONTROL = (WORLD_GROUP, int(Channel.CONTROL), 0)  # the envelope of all control messages
# A member's longest message has a traceback: 32768 characters of at most four bytes.
MAX_MEMBER_NBYTES = 256 << 10
# A ``Member`` has 150 bytes mostly, 600 with the longest names.
_NBYTES_PER_MEMBER = 1024
MAX_SILENT = 4096  # a longer list of ranks that missed a beat tells the reader nothing more
MAX_ANSWER_NBYTES = 64 << 10  # a new connection between hosts takes 80 kB at once
MAX_WAITED_FOR = 64  # of the ranks that a rank was waiting for, one is enough to find the cause
_MOST_CALLS = 4096  # of which one question may ask
MOST_BEFORE = 8  # earlier operations that a report lists
_MOST_MEMBERS = 16384
_MOST_DESCRIPTIONS = 2
_MAX_DESCRIPTION = 2000  # characters; mostly 1,000. A shortened one would be another operation.
_MAX_TEXT = 4000
_MAX_WHERE = 300
_NUMBER = msgspec.Meta(ge=-(1 << 62), le=1 << 62)
_FAILURES = ("mismatch", "lost", "left", "failed", "refused")


def max_coordinator_nbytes(world_size: int) -> int:
    """Return how long a message of the coordinator of ``world_size`` ranks can be."""
    return MAX_MEMBER_NBYTES + _NBYTES_PER_MEMBER * world_size


def _meta(longest: int) -> msgspec.Meta:
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
# With a lower limit, ranks that live would count as lost, and one rank could end the world by it.
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


class Key(NamedTuple):
    """A call, by world ranks."""

    rank: Annotated[int, msgspec.Meta(ge=0)]  # the callee
    src: Annotated[int, msgspec.Meta(ge=0)]  # the caller
    request_id: Annotated[int, msgspec.Meta(ge=0)]


class Question(msgspec.Struct, frozen=True, tag="question", omit_defaults=True):
    """What are you doing? To the coordinator, which passes it on, or to the asked rank itself.

    Attributes:
        number: Chosen by the asker; the answer repeats it.
        rank: The rank that is asked.
        asker: The rank that asks, filled in by the receiver; -1 for the launcher's summary.
        service: The agent that serves ``calls``.
        calls: The calls to describe; if empty, the calls in service are listed.
        wants_stacks: Whether whole stacks are wanted too.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    rank: int
    asker: int = -1
    service: Annotated[int, msgspec.Meta(ge=0)] = 0
    calls: tuple[Key, ...] = ()
    wants_stacks: bool = False


class ActiveCall(msgspec.Struct, frozen=True, array_like=True):
    """What the callee says of a call in service; of one that is only listed, the first five."""

    key: Key
    name: str
    age: float  # seconds since it arrived
    ran: float = 0.0  # seconds since its function began; its age if no worker runs it
    workers: int = 0  # if it waits for a worker, of how many one has to be free first
    depth: int = 0
    doing: str = ""  # in words that follow the name
    needs: tuple[Key, ...] = ()  # one of these has to end before it continues; empty if it runs
    wait: int = 0  # identifies the wait of its thread; 0 if it does not wait


class Answer(msgspec.Struct, frozen=True, tag="answer", omit_defaults=True):
    """What a rank is doing.

    Attributes:
        number: As in the question, like ``asker``.
        places: Where its threads are in the user's program, one line each.
        stacks: Their stacks, if they were wanted.
        waits_for: The ranks that it expects messages or replies from.
        blocked_on: Those of them that a thread is waiting for.
        calls: The calls that the question names, and those here that they need; or else the calls
            in service, of those that wait for a worker only the oldest of each agent.
        queued: How many calls wait for a worker.
        needs: What each of ``calls`` needs that waits for a worker: once, for it may be long.
    """

    number: int = 0
    asker: int = -1
    places: tuple[str, ...] = ()
    stacks: str = ""
    waits_for: list[int] = []
    blocked_on: list[int] = []
    calls: tuple[ActiveCall, ...] = ()
    queued: int = 0
    needs: tuple[Key, ...] = ()


class Notice(msgspec.Struct, frozen=True, tag="notice", omit_defaults=True):
    """A report about a collective: of a rank, or a notice of the coordinator about such reports.

    A rank that waits or fails in an operation reports it. The coordinator compares the reports
    (``rendezvous.roll``). Ranks are numbered as in the group, except ``src`` and ``members``, which
    are world ranks.

    Attributes:
        group: The id of the group; ``sequence`` is the number of the operation in it.
        state: From a rank: it is *waiting*, or waiting and *asking* which ranks are missing. From
            the coordinator: which ranks are *missing*, or how another rank describes the operation
            (*waiting*). From both: how the operation failed; *refused* if the arguments were wrong,
            and then ``description`` is only the name of the function.
        text: What went wrong, and ``culprit`` is the rank that caused it.
        epoch: The number after the last operation that failed for the sender. Ranks with different
            epochs ignore each other's messages.
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

    After ``OPEN``, all later messages find the agent open. After ``LEAVING``, no other agent of its
    name is open any more.
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
    | Question
    | Answer
    | Notice
    | AgentSays
    | AgentAnswer
)

Report = Notice | AgentSays | Question  # what the coordinator takes of its own rank too

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
        case Question(calls=calls) if len(calls) > _MOST_CALLS:
            return replace(message, calls=calls[:_MOST_CALLS])
        case Answer():
            return replace(
                message,
                places=tuple(map(one_line, message.places)),
                stacks=printable(message.stacks),
                waits_for=message.waits_for[:MAX_WAITED_FOR],
                blocked_on=message.blocked_on[:MAX_WAITED_FOR],
                calls=tuple(map(_sanitize_call, message.calls)),
            )
        case Failed(reason):
            return replace(message, reason=one_line(reason, 8 * MAX_REASON))
        case Notice():
            return sanitize_notice(message)
        case Beat(silent) if len(silent) > MAX_SILENT:
            return replace(message, silent=silent[:MAX_SILENT])
    return message


def _sanitize_call(call: ActiveCall) -> ActiveCall:
    return replace(call, name=one_line(call.name), doing=one_line(call.doing))


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
