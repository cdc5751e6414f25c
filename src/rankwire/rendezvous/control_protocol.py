"""Send control messages, and check which of them a rank may send to the coordinator.

A rank may report only about itself, or that the coordinator was silent, if its clock confirms that.
After any other message, the coordinator gives the rank up. Ranks trust the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.wire.control_messages import (
    CONTROL,
    SHORTEST_FAIL_AFTER,
    AgentAnswer,
    AgentSays,
    Answer,
    Beat,
    Failed,
    Fallen,
    Gone,
    Join,
    Joined,
    Known,
    Message,
    Notice,
    Question,
    Suspected,
    Waiting,
    World,
    pack,
)


class Standing(NamedTuple):
    """The sender of a control message. ``coordinator`` is a rank or -1."""

    rank: int
    has_joined: bool
    is_formed: bool
    coordinator: int
    was_absent: bool
    has_fallen: bool


def objection(message: Message, by: Standing) -> str:
    """Return why a rank may not send this message now, or ""."""
    return _RIGHTS[type(message)](message, by)


def _join(message: Join, by: Standing) -> str:
    if message.member.rank != by.rank:
        return f"that it is rank {message.member.rank}"
    suspect_after, fail_after = message.patience.suspect_after, message.patience.fail_after
    if not (0 < suspect_after <= fail_after and fail_after >= SHORTEST_FAIL_AFTER):  # also NaN
        return "invalid limits of silence"
    return "twice that it joins" if by.has_joined or by.is_formed else ""


def _fallen(message: Fallen, by: Standing) -> str:
    if not by.is_formed:
        return "that it falls, before there is a world"
    return "twice that it falls" if by.has_fallen else ""  # each is sent to all ranks


def _gone(message: Gone, by: Standing) -> str:
    if message.rank != by.coordinator:
        return f"that rank {message.rank} is gone"
    if by.is_formed and by.was_absent and message.silent and not message.orderly:
        return ""
    return "that the coordinator is gone, which is not"


def _notice(message: Notice, by: Standing) -> str:
    if not by.is_formed:
        return "where it waits, before it is in the world"
    if message.members and by.rank not in message.members:
        return "what happens in a group that it is not in"
    if len(set(message.members)) != len(message.members):
        return "that a rank is in a group twice"  # it would be notified twice
    return "which ranks are missing" if message.state == "missing" else ""


def _once_formed(words: str) -> Callable[[Any, Standing], str]:
    return lambda message, by: "" if by.is_formed else f"{words}, before it is in the world"


def _never(words: str) -> Callable[[Any, Standing], str]:
    return lambda message, by: words


_RIGHTS: dict[type, Callable[[Any, Standing], str]] = {
    Join: _join,
    Beat: lambda message, by: "which other ranks are silent" if message.silent else "",
    Fallen: _fallen,
    Gone: _gone,
    Known: _once_formed("which ranks it knows"),
    Question: _once_formed("a question"),
    Answer: _once_formed("what it does"),
    Notice: _notice,
    AgentSays: _once_formed("what its agents do"),
    Joined: _never("that a rank is back"),
    Waiting: _never("which ranks are missing"),
    World: _never("which ranks the world has"),
    Failed: _never("that the world will not form"),
    AgentAnswer: _never("what has become of agents"),
    Suspected: _never("that a rank is suspected"),
}


def tell(connection: Connection, message: Message, deadline: Deadline = AT_ONCE) -> None:
    """Send a control message, by default without waiting; on an error, fail the connection.

    On a timeout, drop the messages that are useless later: another beat follows, a rank repeats its
    report before its deadline, and no rank waits long for an answer.
    """
    payload = pack(message)
    try:
        connection.send(CONTROL, ([payload], len(payload)), deadline)
    except RankwireError as error:
        may_drop = isinstance(message, Beat | Notice | Question | Answer)
        if not (may_drop and isinstance(error, DeadlineExceededError)):
            connection.fail(error)
