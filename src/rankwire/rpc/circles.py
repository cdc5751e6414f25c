"""Circles of calls that wait for each other: what ranks tell in, the circle out. Pure.

Each rank tells of a call that it serves what the call *needs*: other calls, of which one has to end
before this one can go on. A call that runs needs nothing; one that waits for a reply needs the call
it made; one that waits for the event loop needs the call that blocks it; one that waits for a
worker, or for its turn to call, needs any one of those that have the places.

A call is *stuck* if it needs something and all it needs is stuck. What is not known counts as going
on, so that doubt is never reported. Ranks are asked one after the other, so what they tell is not
of one moment; a circle therefore counts only when it is found twice, with the same waits: then
every wait lasted from the first time to the second, and all of them overlapped between the two.

Of the calls in a circle one gives up, the same for all who look: the deepest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rankwire.errors import InvalidMessageError
from rankwire.texts import one_line

_MOST_TOLD = 8192  # calls that one rank tells of; 4096 may wait for its workers
_MAX_NUMBER = 1 << 64  # of wider numbers, as many as one likes have one hash


class Key(NamedTuple):
    """A call, in the whole world."""

    rank: int  # serves it
    src: int  # made it
    request_id: int


class ActiveCall(NamedTuple):
    """What the rank that serves a call tells of it.

    Attributes:
        name: The function's name.
        depth: How many calls it is nested in.
        seconds: Since it arrived.
        doing: In words, to follow the name.
        needs: The calls of which one has to end before this one goes on; none if it goes on.
        wait: A number for this very wait, if its thread waits; else 0.
    """

    name: str
    depth: int
    seconds: float
    doing: str
    needs: tuple[Key, ...] = ()
    wait: int = 0


# What is known of the calls that were asked about; None for those that their rank does not know.
Picture = Mapping[Key, ActiveCall | None]


class Circle(NamedTuple):
    """Calls that wait for each other.

    Attributes:
        members: Each waits for the next one, and the last one for the first.
        calls: What is told of each of them.
        gives_up: The one whose wait is to end.
        evidence: All waits that keep it closed; two circles with the same are the same.
    """

    members: tuple[Key, ...]
    calls: tuple[ActiveCall, ...]
    gives_up: Key
    evidence: frozenset[tuple[Key, int, tuple[Key, ...]]]


def still_to_ask(picture: Picture, start: Key) -> set[Key]:
    """Return the calls about which to ask next, to learn whether ``start`` is stuck."""
    if not _may_be_stuck(picture, start):
        return set()
    return {key for key in _reachable(picture, start) if key not in picture}


def find_circle(picture: Picture, start: Key) -> Circle | None:
    """Return the circle that keeps ``start`` from going on, if there is one."""
    reachable = _reachable(picture, start)
    known = {key: call for key in reachable if (call := picture.get(key)) is not None}
    if len(known) < len(reachable) or not _may_be_stuck(picture, start):
        return None
    following = start
    path: dict[Key, int] = {}  # each with its place
    while following not in path:
        path[following] = len(path)
        following = min(known[following].needs)
    members = list(path)[path[following] :]
    waiting = [key for key in members if known[key].wait]
    if not waiting:
        return None
    gives_up = max(waiting, key=lambda key: (known[key].depth, key))
    first = members.index(min(members))  # so that all who look see the same
    members = [*members[first:], *members[:first]]
    calls = tuple(known[key] for key in members)
    evidence = frozenset((key, call.wait, call.needs) for key, call in known.items())
    return Circle(tuple(members), calls, gives_up, evidence)


def _may_be_stuck(picture: Picture, start: Key) -> bool:
    """Whether ``start`` is stuck if all that is not known is."""
    needed_by: dict[Key, list[Key]] = {}
    for key, call in picture.items():
        for need in call.needs if call is not None else ():
            needed_by.setdefault(need, []).append(key)
    going_on = {key for key, call in picture.items() if call is None or not call.needs}
    return start not in _closure(going_on, needed_by)


def _reachable(picture: Picture, start: Key) -> set[Key]:
    needs = {key: call.needs for key, call in picture.items() if call is not None}
    return _closure({start}, needs)


def _closure(first: set[Key], following: Mapping[Key, Iterable[Key]]) -> set[Key]:
    """Return these calls, and all to which one comes from them."""
    reached = set(first)
    frontier = list(first)
    while frontier:
        new = set(following.get(frontier.pop(), ())) - reached
        reached |= new
        frontier += new
    return reached


# -- how it travels: as the value of an ordinary reply ---------------------------------------------


def pack(calls: Mapping[Key, ActiveCall]) -> list[Any]:
    """Return what a rank tells of its calls as plain values."""
    return [
        [list(key), *call[:4], [list(need) for need in call.needs], call.wait]
        for key, call in calls.items()
    ]


def unpack(value: Any, rank: int, world_size: int) -> dict[Key, ActiveCall]:
    """Return what a rank told of its own calls, which is all that it is asked for.

    Args:
        value: What it told.
        rank: Which rank that is.
        world_size: How many there are; no call needs one of another rank.

    Raises:
        InvalidMessageError: It is not of that form.
    """
    if type(value) is not list or len(value) > _MOST_TOLD:
        raise InvalidMessageError(f"a rank's account is not a list of up to {_MOST_TOLD} calls")
    told = dict(map(_unpack_one, value))
    ranks = range(world_size)
    if any(key.rank != rank or any(n.rank not in ranks for n in told[key].needs) for key in told):
        raise InvalidMessageError("a rank's account is of calls of others, or of no rank")
    return told


def _unpack_one(item: Any) -> tuple[Key, ActiveCall]:
    match item:
        case [list(key), str(name), int(depth), float(seconds), str(doing), list(needs), int(wait)]:
            own = unpack_keys([key])[0]
            name, doing = one_line(name), one_line(doing)
            return own, ActiveCall(name, depth, seconds, doing, tuple(unpack_keys(needs)), wait)
    raise InvalidMessageError("a rank's account of a call is not of the form agreed on")


def unpack_keys(values: Iterable[Any]) -> list[Key]:
    """Return the calls that are named by plain values; raises as ``unpack`` does."""
    keys: list[Key] = []
    for value in values:
        if type(value) is not list or [type(part) for part in value] != [int, int, int]:
            raise InvalidMessageError("a call is not named by [rank, src, request id]")
        if not 0 <= min(value) <= max(value) < _MAX_NUMBER:
            raise InvalidMessageError("a call is named by numbers that none has")
        keys.append(Key(*value))
    return keys
