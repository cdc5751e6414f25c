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
MAX_SILENT = 4096  # a longer list of ranks that missed a beat helps no reader
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
    """Seconds of silence after which a rank is suspected, and after which it is lost."""

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
# A lower limit would lose ranks that are alive, and one rank could end the world by it.
SHORTEST_FAIL_AFTER = 0.1
_SHORTEST_BEAT = 0.01


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Member to coordinator: where this rank is, and its patience."""

    member: Member
    patience: Patience = DEFAULT_PATIENCE


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Coordinator to members: these ranks have not joined yet."""

    missing: list[int]


class World(msgspec.Struct, frozen=True, tag="world"):
    """Coordinator to members: all ranks have joined."""

    epoch: int  # the incarnation of the job; connections of other incarnations are refused
    members: list[Member]
    patience: Patience = DEFAULT_PATIENCE  # the shortest of all members
    coordinator: int = 0  # its rank, or -1 for the launcher
    keys: bytes = b""  # of the receiving rank with every other, wrapped for it (``wire.keys``)
    late: list[int] = []  # the ranks that were restarted and have joined since the world formed
    are_restarted: bool = False  # lost ranks are, by the launcher


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Coordinator to members: the world will not form. ``cause`` is the rank that caused it."""

    reason: str
    missing: list[int]
    cause: int | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat, either way; the coordinator lists the ranks that missed one, with seconds."""

    silent: list[tuple[int, float]] = []


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """Coordinator to members: a rank has been silent for so many seconds; 0 if it is back."""

    rank: int
    seconds: float


class Fallen(msgspec.Struct, frozen=True, tag="fallen"):
    """Member to coordinator: this rank leaves because of an error."""

    reason: str  # the error, in one line
    traceback: str
    cause: int | None = None  # the rank whose failure caused it; None for an error of its own
    exit_code: int = 1  # of its process, as expected
    waited_for: list[int] = []  # the ranks that it was waiting for, if its timeout expired


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Coordinator to members: a rank was lost, or has left without an error."""

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
    """Member to coordinator: this rank knows of the restarted rank."""

    rank: int
    incarnation: int


class Key(NamedTuple):
    """A call, by world ranks."""

    rank: Annotated[int, msgspec.Meta(ge=0)]  # the callee
    src: Annotated[int, msgspec.Meta(ge=0)]  # the caller
    request_id: Annotated[int, msgspec.Meta(ge=0)]


class Question(msgspec.Struct, frozen=True, tag="question", omit_defaults=True):
    """Asks a rank what it is doing, directly or through the coordinator."""

    number: Annotated[int, msgspec.Meta(ge=0)]  # chosen by the asker; the answer repeats it
    rank: int  # the rank that is asked
    asker: int = -1  # the rank that asks, set by the receiver; -1 for the launcher's summary
    service: Annotated[int, msgspec.Meta(ge=0)] = 0  # the agent that serves ``calls``
    calls: tuple[Key, ...] = ()  # to describe; if empty, the calls in service are listed
    wants_stacks: bool = False  # whether the answer includes whole stacks


class ActiveCall(msgspec.Struct, frozen=True, array_like=True):
    """The callee's report of a call in service; a call that is only listed has five fields."""

    key: Key
    name: str
    age: float  # seconds since it arrived
    ran: float = 0.0  # seconds since its function began; its age if no worker runs it
    workers: int = 0  # the number of workers, if the call waits until one is free
    depth: int = 0
    doing: str = ""  # in words that follow the name
    needs: tuple[Key, ...] = ()  # one of these has to end before it continues; empty if it runs
    wait: int = 0  # identifies the wait of its thread; 0 if it does not wait


class Answer(msgspec.Struct, frozen=True, tag="answer", omit_defaults=True):
    """What a rank is doing.

    ``calls`` are those of the question and those here that they need. If the question names none,
    they are all calls in service, but of those that wait for a worker only each agent's oldest.
    Each call that waits for a worker needs ``needs``, which is sent once, as it may be long.
    """

    number: int = 0  # as in the question, like ``asker``
    asker: int = -1
    places: tuple[str, ...] = ()  # where its threads are in the user's program, one line each
    stacks: str = ""  # of its threads, if the question wants them
    waits_for: list[int] = []  # the ranks that it expects messages or replies from
    blocked_on: list[int] = []  # those of them that a thread is waiting for
    calls: tuple[ActiveCall, ...] = ()
    queued: int = 0  # how many calls wait for a worker
    needs: tuple[Key, ...] = ()


class Notice(msgspec.Struct, frozen=True, tag="notice", omit_defaults=True):
    """A report of a rank about a collective, or the coordinator's notice about such reports.

    A rank reports an operation in which it waits or fails; the coordinator compares the reports
    (``rendezvous.roll``). Ranks are numbered as in the group, except ``src`` and ``members``, which
    are world ranks. Ranks with different epochs ignore each other's messages.

    Attributes:
        state: From a rank: it is *waiting*, or waiting and *asking* which ranks are missing. From
            the coordinator: which ranks are *missing*, or how another rank describes the operation
            (*waiting*). From both: how the operation failed; *refused* if the arguments were wrong,
            and then ``description`` is only the name of the function.
        before: Number and description of the last operations that succeeded for the sender.
        descriptions: The descriptions of the operation, if ranks disagree.
        members: The ranks of the group; empty for the whole world.
    """

    group: Annotated[int, msgspec.Meta(ge=0)]  # its id
    sequence: Annotated[int, _NUMBER]  # the number of the operation in the group
    description: str
    state: Literal[
        "waiting", "asking", "missing", "mismatch", "lost", "left", "failed", "refused"
    ] = "waiting"
    text: str = ""  # what went wrong
    culprit: int = -1  # the rank that caused it
    epoch: Annotated[int, _NUMBER] = 0  # the number after the sender's last failed operation
    missing: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MOST_MEMBERS)] = ()
    where: str = ""  # the line of the program that called the operation, if known
    before: Annotated[
        tuple[tuple[Annotated[int, _NUMBER], str], ...], msgspec.Meta(max_length=MOST_BEFORE)
    ] = ()
    descriptions: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST_DESCRIPTIONS)] = ()
    members: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MOST_MEMBERS)] = ()
    src: int = -1  # the rank that reported it, set by the coordinator

    @property
    def is_failure(self) -> bool:
        """Whether the operation has failed."""
        return self.state in _FAILURES


class AgentState(IntEnum):
    """The state of a rank's agent of one name."""

    OPEN = 0
    SERVING = 1  # it only serves, and calls no other rank
    LEAVING = 2  # it is done, and serves until the other agents are done too
    CLOSED = 3


class AgentSays(msgspec.Struct, frozen=True, tag="agent"):
    """Member to coordinator: an agent of this rank has entered this state."""

    service: int  # the number that agents of one name share
    number: int  # of this message, unique in its process
    state: AgentState
    owner: int = 0  # identifies the thread that uses the agent, across all processes
    stopped: list[int] = []  # the ranks that this agent has stopped, if it leaves


class AgentAnswer(msgspec.Struct, frozen=True, tag="agent_answer"):
    """Coordinator to member: the answer to the agent's message of this number.

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

Report = Notice | AgentSays | Question  # what the coordinator accepts from its own rank too

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
    """Return a notice with short, printable texts."""
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
