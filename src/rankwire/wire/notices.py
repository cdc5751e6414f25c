"""Notices: what a rank and the coordinator tell each other about the collectives of a group.

A rank that waits in an operation, or fails in one, reports it to the coordinator. The coordinator
compares the reports (``rendezvous.roll``) and sends notices of the same form to the ranks that need
to know. They travel as control messages. Pure.

Ranks are numbered as in the group, except ``src`` and ``members``, which are ranks of the world.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from rankwire.texts import printable

MOST_BEFORE = 8  # earlier operations that a report lists
_MOST_MEMBERS = 16384
_MOST_DESCRIPTIONS = 2
# Characters. A description that was cut would count as another operation; they have about 1,000.
_MAX_DESCRIPTION = 2000
_MAX_TEXT = 4000
_MAX_WHERE = 300
_NUMBER = msgspec.Meta(ge=-(1 << 62), le=1 << 62)
_FAILURES = ("mismatch", "lost", "left", "failed", "refused")


class Notice(msgspec.Struct, frozen=True, tag="notice", omit_defaults=True):
    """One report of a rank, or one notice of the coordinator.

    Attributes:
        group: The id of the group.
        sequence: The number of the operation in its group.
        description: What the operation is.
        state: From a rank: it is *waiting*, or it is waiting and *asking* who is missing. From the
            coordinator: who is *missing*, or how another rank describes the operation (*waiting*).
            From both: how the operation failed; *refused* if the arguments were wrong, and then
            ``description`` is only the name of the function.
        text: What went wrong.
        culprit: The rank that caused the failure.
        epoch: The number after the last operation that failed for the sender. Ranks with different
            epochs do not take each other's messages.
        missing: The ranks that have not come to the operation.
        where: The line of the program that called the operation, if it is known.
        before: Number and description of the last operations that succeeded for the sender.
        descriptions: How ranks describe the operation, if they disagree about it.
        members: The ranks of the group; empty if it is the whole world.
        src: The rank that reported it. The coordinator fills this in.
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


def harmless(notice: Notice) -> Notice:
    """Return a notice whose texts are short and printable, whatever the peer wrote."""
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
