"""What a call port tells of calls: those that come in, and those that are being served."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from rankwire.wire.control_messages import ActiveCall, Key

# Describes calls, and those at this rank that they need; given none, all calls in brief.
Describe: TypeAlias = Callable[[Collection[Key]], list[ActiveCall]]
OWN = object()  # the origin of a call of a rank to itself


class IncomingCall(msgspec.Struct, eq=False):
    """A request from another rank, or from this one.

    Attributes:
        src: The rank that calls.
        request_id: Its number for the call.
        payload: The request.
        origin: Where the reply goes and what the request came over, known to the port; its end is
            reported as ``CallerGone``. ``OWN`` for a call of this rank to itself.
        is_wanted: Whether the caller wants the reply, as far as is known here.
    """

    # A Struct is made in C; a frozen dataclass takes 0.63 us, and there is one a call.
    src: int
    request_id: int
    payload: bytearray
    origin: Any
    is_wanted: bool = True

    def __repr__(self) -> str:
        return f"<IncomingCall {self.request_id} from rank {self.src}, {len(self.payload)} bytes>"


@dataclass(frozen=True, slots=True)
class CallCancelled:
    """The caller does not want the reply any more; ``expired`` if its time is up."""

    src: int
    request_id: int
    expired: bool = False


@dataclass(frozen=True, slots=True)
class CallerGone:
    """No reply can reach the calls any more that came over ``origin``."""

    src: int
    origin: Any


@dataclass(frozen=True, slots=True)
class RepliesDue:
    """Replies have come for which somebody asked to be called back; ``call_back`` does that."""

    call_back: Callable[[], None]


PortEvent = IncomingCall | CallCancelled | CallerGone | RepliesDue
