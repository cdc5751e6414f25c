"""Messages of a group that are under way: those of the mesh, with ranks of the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwire.deadline import Deadline
from rankwire.mesh.transport import Expected, ExpectedFromAny, Offer
from rankwire.wire.frames import Envelope, Payload

if TYPE_CHECKING:
    from rankwire.backends.sub import SubBackend


class SubOffer(Offer):
    """A message to a rank of a group that may still be reading it."""

    def __init__(self, group: SubBackend, dst: int, offer: Offer) -> None:
        self.group = group
        self._dst = dst
        self._offer = offer

    def wait(self, deadline: Deadline) -> bool:
        """Wait until it has been read; errors name ranks of the group."""
        with self.group.translating(self._dst):
            return self._offer.wait(deadline)

    def is_over(self) -> bool:
        """Whether nothing of it is needed here any more."""
        return self._offer.is_over()

    def revoke(self) -> bool:
        """Be done with it."""
        return self._offer.revoke()


class SubExpected(Expected):
    """A message of a rank of a group that is waited for."""

    def __init__(self, group: SubBackend, src: int, envelope: Envelope, expected: Expected) -> None:
        self._group = group
        self._src = src
        self._envelope = envelope
        self._expected = expected

    def post(self) -> None:
        """Ask for it."""
        with self._group.translating(self._src):
            self._expected.post()

    def take(self, deadline: Deadline) -> Payload:
        """Return it; errors name ranks of the group."""
        return self._group.take(self._src, self._envelope, deadline, self._expected.take)

    def give_up(self) -> None:
        """Expect it no more."""
        self._expected.give_up()


class SubExpectedFromAny(ExpectedFromAny):
    """A message that ranks of a group may send."""

    def __init__(self, group: SubBackend, envelope: Envelope, expected: ExpectedFromAny) -> None:
        self._group = group
        self._envelope = envelope
        self._expected = expected

    def post(self) -> None:
        """Ask for it."""
        with self._group.translating(None):
            self._expected.post()

    def take(self, deadline: Deadline) -> Payload:
        """Return it; errors name ranks of the group."""
        take = self._expected.take
        payload = self._group.take(None, self._envelope, deadline, take)
        source = self._expected.source
        self.source = self._group.ranks.find(source)
        return payload

    def give_up(self) -> None:
        """Expect it no more."""
        self._expected.give_up()
