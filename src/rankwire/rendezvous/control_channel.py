"""The control channel: how coordinator and members send what ``control_messages`` has."""

from __future__ import annotations

from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.rendezvous.control_messages import Beat, Message, pack
from rankwire.wire.frames import Channel

__all__ = ["tell"]


def tell(connection: Connection, message: Message, deadline: Deadline | None = None) -> None:
    """Send a control message; without a deadline one that is small, without waiting.

    A member that does not take it is as good as gone, but for a beat, of which one may be left out.
    """
    payload = pack(message)
    try:
        connection.send(Channel.CONTROL, 0, 0, [payload], len(payload), deadline or Deadline(0.0))
    except DeadlineExceededError as error:
        if not isinstance(message, Beat):
            connection.fail(error)
    except RankwireError as error:
        connection.fail(error)
