"""How the members of a group agree on it: who they are, and by which id its traffic is known.

Each member tells every other who it thinks the members are and how many such groups it has made. A
disagreement is found at once, by name; otherwise all compute the same id from what was said.

Lock: one for each parent, held while a group of it is made (by one thread at a time, in the order
the program makes them). Under it, the parent's own locks are taken.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter

import msgspec

from rankwire.backends.transport import Transport
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, InvalidMessageError, MembershipError
from rankwire.wire.frames import Channel
from rankwire.wire.loans import whole_of

_AGREEMENT_TAG = 0


class _Announcement(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a member tells the others: who it thinks they are, and how many such groups it has."""

    members: list[int]
    ordinal: int


_DECODER = msgspec.msgpack.Decoder(_Announcement)


class Agreement:
    """How the groups of one parent come to be, on this rank.

    An announcement that was sent and not answered in time is not sent again by the next attempt for
    the same group: the late member finds one, not two, and both are in step afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Counter[tuple[int, ...]] = Counter()
        self._unanswered: dict[int, bytes] = {}

    def reach(self, parent: Transport, members: list[int], deadline: Deadline) -> int:
        """Return the ordinal of a new group, the same on all members. Safe from any thread."""
        grip: list[bool] = []
        try:
            if not deadline.take(self._lock, grip):
                detail = "another thread is making a group"
                raise DeadlineExceededError(deadline.limit, detail=detail)
            ours = _Announcement(members, self._made[tuple(members)])
            others = [rank for rank in members if rank != parent.rank]
            self._announce(parent, ours, others, deadline)
            ordinal = max([ours.ordinal, *self._collect(parent, ours, others, deadline)])
            self._made[tuple(members)] = ordinal + 1
            return ordinal
        finally:
            if grip[-1:] == [True]:
                self._lock.release()

    def _announce(
        self, parent: Transport, ours: _Announcement, others: list[int], deadline: Deadline
    ) -> None:
        payload = msgspec.msgpack.encode(ours)
        for dst in others:
            if self._unanswered.get(dst) != payload:
                envelope = (parent.group, Channel.CONTROL, _AGREEMENT_TAG)
                parent.transmit(dst, envelope, ((payload,), len(payload)), deadline)
                self._unanswered[dst] = payload

    def _collect(
        self, parent: Transport, ours: _Announcement, others: list[int], deadline: Deadline
    ) -> list[int]:
        """Return the others' ordinals; all are asked first, so that an error names all."""
        ordinals: list[int] = []
        differing: list[str] = []
        missing: list[int] = []
        for src in others:
            try:
                # Once a disagreement is certain, nobody is waited for any more.
                patience = AT_ONCE if differing else deadline
                envelope = (parent.group, Channel.CONTROL, _AGREEMENT_TAG)
                payload = parent.receive(src, envelope, patience)
            except DeadlineExceededError:
                missing.append(src)
                continue
            self._unanswered.pop(src, None)
            theirs = _decoded(whole_of(payload), src)
            ordinals.append(theirs.ordinal)
            if theirs.members != ours.members:
                differing.append(f"rank {src} says {theirs.members}")
        if differing:
            views = [f"rank {parent.rank} says {ours.members}", *differing]
            raise MembershipError(f"the members disagree: {', '.join(views)}")
        if missing:
            raise DeadlineExceededError(
                deadline.limit, waiting_for=missing, detail=f"to confirm the group {ours.members}"
            )
        return ordinals


def group_id(parent_group: int, members: list[int], ordinal: int) -> int:
    """Return an id that differs from the world's, which is 0, and from that of any other group."""
    return _digest("group", (parent_group, members, ordinal)) or 1


def service_of_group(group: int, service: int) -> int:
    """Return the number by which the parent knows a service of a group."""
    return _digest("service", (group, service))


def _decoded(payload: bytearray, src: int) -> _Announcement:
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise InvalidMessageError(f"not an announcement of a group: {error}").during(
            peer=src
        ) from error


def _digest(purpose: str, value: object) -> int:
    return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode((purpose, value))).digest()[:8])
