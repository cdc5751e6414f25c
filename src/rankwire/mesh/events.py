"""Events: call the user's callbacks when a peer is lost, silent, or back.

Callbacks run one at a time, in order, on a thread that exists only while there are some to run: the
thread that notices a loss must not wait for a callback.

Lock: ``_lock`` guards the lists; it is a leaf, callbacks run without it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from rankwire import runtime
from rankwire.errors import PeerLostError

_log = logging.getLogger("rankwire")

OnLost = Callable[[PeerLostError], object]
OnSuspected = Callable[[int, float], object]
OnJoined = Callable[[int, int], object]


class PeerEvents:
    """The callbacks, and their calls that are still to be made. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = runtime.Lock()
        self._on_lost: list[OnLost] = []
        self._on_suspected: list[OnSuspected] = []
        self._on_joined: list[OnJoined] = []
        self._losses: list[PeerLostError] = []  # of ranks that are not back; replaced or appended
        self._joined: dict[int, int] = {}  # the incarnations of ranks that are back
        self._untold: deque[Callable[[], object]] = deque()
        self._is_telling = False

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks that are lost and not back."""
        return [loss.peer for loss in self._losses if loss.peer is not None]

    def on_lost(self, callback: OnLost) -> Callable[[], None]:
        """Add a callback, and call it for the losses so far; return a function that removes it."""
        with self._lock:
            self._on_lost.append(callback)
            losses = [partial(callback, loss.copy()) for loss in self._losses]
        self._tell(losses)
        return partial(self._remove, self._on_lost, callback)

    def on_suspected(self, callback: OnSuspected) -> Callable[[], None]:
        """Add a callback; return a function that removes it."""
        with self._lock:
            self._on_suspected.append(callback)
        return partial(self._remove, self._on_suspected, callback)

    def on_joined(self, callback: OnJoined) -> Callable[[], None]:
        """Add a callback, and call it for the peers that are back; return what removes it."""
        with self._lock:
            self._on_joined.append(callback)
            calls = [partial(callback, *joined) for joined in self._joined.items()]
        self._tell(calls)
        return partial(self._remove, self._on_joined, callback)

    def joined(self, rank: int, incarnation: int) -> None:
        """Report that a peer was restarted."""
        with self._lock:
            self._losses = [loss for loss in self._losses if loss.peer != rank]
            self._joined[rank] = incarnation
            calls = [partial(callback, rank, incarnation) for callback in self._on_joined]
        self._tell(calls)

    def lost(self, error: PeerLostError) -> None:
        """Report that a peer is lost."""
        with self._lock:
            self._losses.append(error)
            self._joined.pop(error.peer, None)
            calls = [partial(callback, error.copy()) for callback in self._on_lost]
        self._tell(calls)

    def suspected(self, rank: int, seconds: float) -> None:
        """Report how long a peer has been silent; 0 when it responds again."""
        with self._lock:
            calls = [partial(callback, rank, seconds) for callback in self._on_suspected]
        self._tell(calls)

    def _remove(self, callbacks: list[Callable[..., object]], callback: object) -> None:
        with self._lock:
            if callback in callbacks:
                callbacks.remove(callback)

    def _tell(self, calls: list[partial[object]]) -> None:
        if not calls:
            return
        with self._lock:
            self._untold.extend(calls)
            if self._is_telling:
                return
            self._is_telling = True
        try:
            runtime.Thread(target=self._run, name="rankwire-events", daemon=True).start()
        except RuntimeError as error:  # the thread that noticed the loss must go on
            _log.warning("callbacks for lost, silent and returned peers must wait: %s", error)
            with self._lock:
                self._is_telling = False  # the next event starts the thread and makes all calls

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._untold:
                    self._is_telling = False
                    return
                call = self._untold.popleft()
            try:
                call()
            except (Exception, SystemExit):  # a user's callback may raise anything
                _log.exception("a callback for a lost, silent or returned peer raised")
