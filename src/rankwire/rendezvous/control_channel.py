"""The control channel: how coordinator and members send what ``control_messages`` has."""

from __future__ import annotations

from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.links.connection import Connection
from rankwire.wire.control_messages import CONTROL, Beat, Message, pack
from rankwire.wire.notices import Notice


def tell(connection: Connection, message: Message, deadline: Deadline = AT_ONCE) -> None:
    """Send a control message; without a deadline one that is small, without waiting.

    If the other end does not take it, the connection fails. Beats and notices are left out instead:
    another beat follows, and a rank asks again before its time is up.
    """
    payload = pack(message)
    try:
        connection.send(CONTROL, ([payload], len(payload)), deadline)
    except RankwireError as error:
        if not (isinstance(message, Beat | Notice) and isinstance(error, DeadlineExceededError)):
            connection.fail(error)
