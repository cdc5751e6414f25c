"""Reachability: whether a rank can be reached where it says it listens.

A rank advertises the address that reached the coordinator, which is right unless something
between them translates addresses, or forbids connections the other way. Then the rank is told at
once, instead of the first rank that needs it. A connection is opened and closed, no more: who
listens is proved by the handshake of every connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.sockets import TcpAddress, connect_tcp
from rankwire.rendezvous.control_messages import Member

__all__ = ["call_back"]

_LIMIT = 5.0


def call_back(member: Member, tell: Callable[[str], None]) -> None:
    """Try to reach a member, on a thread of its own; tell why not, or an empty text."""

    def attempt() -> None:
        trouble = ""
        try:
            connect_tcp(TcpAddress(member.host, member.port), Deadline(_LIMIT)).close()
        except DeadlineExceededError as error:
            trouble = f"{error.detail} within {_LIMIT:g} s"
        except RankwireError as error:
            trouble = error.message
        tell(trouble)

    threading.Thread(target=attempt, name="rankwire-call-back", daemon=True).start()
