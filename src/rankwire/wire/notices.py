"""Notices: reports about the collectives of a group between its ranks and the coordinator.

A rank that waits or fails in an operation reports it. The coordinator compares the reports
(``rendezvous.roll``) and sends notices of the same form to the ranks that need them. Ranks are
numbered as in the group, except ``src`` and ``members``, which are world ranks.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from rankwire.texts import printable

MOST_BEFORE = 8  # earlier operations that a report lists
_MOST_MEMBERS = 16384
_MOST_DESCRIPTIONS = 2
# Characters; descriptions have about 1,000. A shortened one would count as another operation.
_MAX_DESCRIPTION = 2000
_MAX_TEXT = 4000
_MAX_WHERE = 300
_NUMBER = msgspec.Meta(ge=-(1 << 62), le=1 << 62)
_FAILURES = ("mismatch", "lost", "left", "failed", "refused")


class Notice(msgspec.Struct, frozen=True, tag="notice", omit_defaults=True):
    """A report of a rank, or a notice of the coordinator.

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


def sanitize(notice: Notice) -> Notice:
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
