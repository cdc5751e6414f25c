"""The control channel: how coordinator and members send what ``control_messages`` has."""

from __future__ import annotations

from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.rendezvous.control_messages import CONTROL, Beat, Message, pack


def tell(connection: Connection, message: Message, deadline: Deadline = AT_ONCE) -> None:
    """Send a control message; without a deadline one that is small, without waiting.

    A member that does not take it is as good as gone, but for a beat, of which one may be left out.
    """
    payload = pack(message)
    try:
        connection.send(CONTROL, ([payload], len(payload)), deadline)
    except RankwireError as error:
        if not (isinstance(message, Beat) and isinstance(error, DeadlineExceededError)):
            connection.fail(error)
