"""How handles travel: what is told and counted when one is sent, and when one comes.

The owner counts a handle for the rank that gets it before the message leaves; a rank that passes
one on tells the owner (``held``). If the message certainly does not leave, that is undone.

Lock: ``_sent_back_lock`` guards how often a handle was sent to its owner. A leaf.
"""

from __future__ import annotations

import threading
from typing import Any

from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import ConfigurationError, InvalidMessageError
from rankwire.torch.rpc.owned import ObjectId
from rankwire.torch.rpc.rref import RRef
from rankwire.torch.rpc.session import current

_MAX_NUMBER = 2**63
_sent_back_lock = threading.Lock()


def take_rref(rref: RRef[Any], sending: TakeContext) -> list[int]:
    """Return what travels in place of a handle, and see to it that the owner learns of it."""
    session = rref._usable("Cannot call fork an UserRRef after deletion.")
    peer, id = sending.peer, rref._id
    if peer is None:
        raise ConfigurationError("An RRef can be sent to one rank at a time.")
    if rref._owned is not None:
        session.owned.give(rref._owned, peer)
        sending.undo(lambda: session.owned.release(id, peer, session.me.id))
    elif peer == rref._owner:
        _send_back(rref, 1)
        sending.undo(lambda: _send_back(rref, -1))
    else:
        session.news.passed_on(rref._owner, id, peer)
        sending.undo(lambda: session.news.passed_on(rref._owner, id, peer, -1))
    return [rref._owner, *id]


def build_rref(handle: Any, receiving: BuildContext) -> RRef[Any]:
    """Return a handle of what another rank says."""
    session, peer = current(), receiving.peer
    if type(handle) is not list or len(handle) != 4 or not all(map(_is_number, handle)):
        raise InvalidMessageError("a handle is four numbers")
    owner, id = handle[0], ObjectId(*handle[1:])
    if peer is None or owner >= len(session.workers) or id.creator >= len(session.workers):
        raise InvalidMessageError("a handle of no rank")
    me = session.me.id
    if owner != me:
        return RRef._of(session, owner, id, giver=peer)
    if peer != me:
        return RRef._of(session, me, id, session.owned.came_back(id, peer))
    owned = session.owned.expect(id, me)
    session.owned.release(id, me, me)
    return RRef._of(session, me, id, owned)


def _send_back(rref: RRef[Any], count: int) -> None:
    with _sent_back_lock:
        rref._sent_back += count


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER
