"""Introductions: a rank connects to everyone, because the coordinator is gone.

It would have told who dies. Now each rank hears of the others' ends on its own connections, and for
that every two must have one. Not at once: mostly everyone leaves by now.

Threads: one that waits and ends with the others, and one a peer while it connects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rankwire import runtime
from rankwire.clock import Clock
from rankwire.errors import ChannelClosedError, PeerLostError, RankwireError
from rankwire.mesh.peers import Peer

_log = logging.getLogger("rankwire")

_DELAY = 0.2  # seconds
# For introductions under way to notice that this rank has closed. One that looks up a name does
# not; it is left to end by itself.
_PATIENCE = 2.0


@dataclass(eq=False)
class Introductions:
    """``begin`` once the coordinator is gone, and ``end`` when this rank leaves.

    Attributes:
        peers: All other ranks; looked at when it begins.
        greet: Connects to one, and says so.
        clock: By which it waits.
    """

    peers: Callable[[], Iterable[Peer]]
    greet: Callable[[Peer], None]
    clock: Clock

    def __post_init__(self) -> None:
        self._is_ending = runtime.Event()
        self._thread = runtime.Thread(target=self._run, name="rankwire-introductions", daemon=True)

    def begin(self) -> None:
        """Connect to all, in a moment."""
        self._thread.start()

    def cancel(self) -> None:
        """Do not begin any more."""
        self._is_ending.set()

    def join(self) -> None:
        """Wait for those that are under way, but not for ever."""
        if self._thread.ident is not None:
            self.clock.join(self._thread, _PATIENCE)

    def _run(self) -> None:
        if self.clock.wait(self._is_ending, _DELAY):
            return
        # All at once: one that is out of reach must not keep the others from being noticed.
        threads = [
            runtime.Thread(
                target=self._introduce, args=(peer,), name="rankwire-introduction", daemon=True
            )
            for peer in self.peers()
            if peer.failure is None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            self.clock.join(thread)

    def _introduce(self, peer: Peer) -> None:
        try:
            self.greet(peer)
        except PeerLostError as error:
            peer.fail(error)
        except ChannelClosedError as error:
            peer.leave(error)
        except RankwireError as error:
            _log.debug("rank %d was not greeted: %s", peer.member.rank, error)
