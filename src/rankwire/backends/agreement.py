"""Agreement of a group's members on the member list and the group's id.

A disagreement is found at once, and named; otherwise all members compute the same id.

Lock: one for each parent, held while a group of it is made (by one thread at a time, in the order
of the program). Under it, the parent's own locks are taken.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from rankwire import runtime
from rankwire.backends.payloads import take_posted
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import (
    DeadlineExceededError,
    InvalidMessageError,
    MembershipError,
    PeerLostError,
)
from rankwire.wire.frames import Channel, whole_of

if TYPE_CHECKING:
    from rankwire.backends.base import Backend

_AGREEMENT_TAG = 0


class _Announcement(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a member sends the others; ``ordinal`` counts earlier groups of these members."""

    members: list[int]
    ordinal: int
    incarnations: list[int] = []


_DECODER = msgspec.msgpack.Decoder(_Announcement)


class _Attempt(msgspec.Struct):
    """What this rank sent another member about a group to be made, and what it heard."""

    payload: bytes
    heard: _Announcement | None = None


class Agreement:
    """Makes the groups of one parent, on this rank.

    Each member sends each other one announcement for every group. An attempt that fails, because a
    member is late or lost, keeps what was sent and received for the next attempt at the same group,
    which does not repeat it. So all members are in step afterwards, whenever each of them gave up.

    An announcement is void if it names a lost member, or the old process of a restarted one: its
    sender's attempt fails too, and it will send another.
    """

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._made: Counter[tuple[int, ...]] = Counter()
        self._attempts: dict[int, _Attempt] = {}  # with each member

    def reach(self, parent: Backend, members: list[int], deadline: Deadline) -> int:
        """Return the ordinal of a new group, the same on all members. Safe from any thread."""
        grip: list[bool] = []
        try:
            if not deadline.take(self._lock, grip):
                detail = "another thread is making a group"
                raise DeadlineExceededError(deadline.limit, detail=detail)
            incarnations = [parent.incarnation_of(member) for member in members]
            ordinal = self._made[tuple(members)]
            ours = _Announcement(members, ordinal, incarnations if any(incarnations) else [])
            others = [rank for rank in members if rank != parent.rank]
            self._announce(parent, ours, others, deadline)
            ordinal = max([ours.ordinal, *self._collect(parent, ours, others, deadline)])
            self._made[tuple(members)] = ordinal + 1
            return ordinal
        finally:
            if grip[-1:] == [True]:
                self._lock.release()

    def _announce(
        self, parent: Backend, ours: _Announcement, others: list[int], deadline: Deadline
    ) -> None:
        payload = msgspec.msgpack.encode(ours)
        for dst in others:
            attempt = self._attempts.get(dst)
            if attempt is None or attempt.payload != payload:
                envelope = (parent.group, Channel.CONTROL, _AGREEMENT_TAG)
                parent.check_member(dst)
                message = (payload,), len(payload)
                parent.messages.transmit(parent.world[dst], envelope, message, deadline)
                heard = None if attempt is None else attempt.heard
                is_early = heard is not None and _are_of_one_group(heard, ours)
                self._attempts[dst] = _Attempt(payload, heard if is_early else None)

    def _collect(
        self, parent: Backend, ours: _Announcement, others: list[int], deadline: Deadline
    ) -> list[int]:
        """Return the others' ordinals; ask all first, so that an error names all."""
        heard: dict[int, _Announcement] = {}
        differing: list[str] = []
        missing: list[int] = []
        for src in others:
            try:
                # after a certain disagreement, wait for no other member
                theirs = self._hear(parent, src, ours, AT_ONCE if differing else deadline)
            except DeadlineExceededError:
                missing.append(src)
                continue
            if theirs.members == ours.members and not _are_of_one_group(theirs, ours):
                raise _not_heard_of_yet(theirs, ours)
            heard[src] = theirs
            if theirs.members != ours.members:
                differing.append(f"rank {src} says {theirs.members}")
        if missing and not differing:
            late = DeadlineExceededError(
                deadline.limit, waiting_for=missing, detail=f"to confirm the group {ours.members}"
            )
            late.is_local = True
            raise late
        for src in heard:  # this attempt has ended, with or without success
            self._attempts.pop(src, None)
        if differing:
            views = [f"rank {parent.rank} says {ours.members}", *differing]
            raise MembershipError(f"the members disagree: {', '.join(views)}")
        return [theirs.ordinal for theirs in heard.values()]

    def _hear(
        self, parent: Backend, src: int, ours: _Announcement, deadline: Deadline
    ) -> _Announcement:
        attempt = self._attempts.get(src)
        if attempt is not None and attempt.heard is not None:
            return attempt.heard
        envelope = (parent.group, Channel.CONTROL, _AGREEMENT_TAG)
        while True:
            theirs = _decoded(take_posted(parent, src, envelope, deadline, whole_of), src)
            if _are_of_one_group(theirs, ours) or not _is_void(parent, theirs):
                break
        if attempt is not None:
            attempt.heard = theirs
        return theirs


def _are_of_one_group(one: _Announcement, other: _Announcement) -> bool:
    return (one.members, one.incarnations) == (other.members, other.incarnations)


def _not_heard_of_yet(theirs: _Announcement, ours: _Announcement) -> PeerLostError:
    """Return the error of a group with an old process, while another member knows the new one.

    That member's announcement stays for the next attempt.
    """
    before = ours.incarnations or [0] * len(ours.members)
    after = theirs.incarnations or [0] * len(ours.members)
    pairs = zip(ours.members, before, after, strict=False)
    rank = next((member for member, old, new in pairs if old != new), ours.members[0])
    reason = "its process was started anew, as another member says; try again"
    error = PeerLostError(rank, reason)
    error.is_local = True
    return error


def _is_void(parent: Backend, said: _Announcement) -> bool:
    """Whether an announcement names a lost member, or a process that was restarted since."""
    known = [member for member in said.members if 0 <= member < parent.world_size]
    if any(
        member != parent.rank and isinstance(parent.failure_of(member), PeerLostError)
        for member in known
    ):
        return True
    incarnations = said.incarnations or [0] * len(said.members)
    return any(
        incarnation < parent.incarnation_of(member)
        for member, incarnation in zip(known, incarnations, strict=False)
    )


def group_id(parent_group: int, members: list[int], ordinal: int) -> int:
    """Return an id that differs from the world's, which is 0, and from that of any other group."""
    return _digest("group", (parent_group, members, ordinal)) or 1


def service_of_group(group: int, service: int) -> int:
    """Return the number that the parent uses for a service of a group."""
    return _digest("service", (group, service))


def _decoded(payload: bytearray, src: int) -> _Announcement:
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        invalid = InvalidMessageError(f"not an announcement of a group: {error}")
        invalid.is_local = True
        raise invalid.during(peer=src) from error


def _digest(purpose: str, value: object) -> int:
    return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode((purpose, value))).digest()[:8])
