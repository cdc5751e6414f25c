"""Notify the owners of remote objects which handles this rank has passed on or released.

A handle may become garbage in any thread at any moment. So its update goes into a queue, and a
thread sends the updates to each owner, one message at a time and in order, on which the owner
relies. The thread never waits for an owner: the end of a message comes into the queue too.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from rankwire import runtime
from rankwire.errors import (
    CallCancelledError,
    ChannelClosedError,
    DeadlineExceededError,
    InvalidMessageError,
    OverloadedError,
    PeerLostError,
    RemoteError,
)
from rankwire.rpc.agent import RpcAgent
from rankwire.rpc.future import RpcFuture
from rankwire.torch.rpc.owned_objects import ObjectId, OwnedObjects
from rankwire.torch.rpc.verbs import TELL

_log = logging.getLogger("rankwire")

_RELEASED, _PASSED_ON, _NOT_MADE = 0, 1, 2

# One update: its kind, the object's id, and two more numbers.
Update = tuple[int, int, int, int, int, int]
_STOP = -1

_GONE = (PeerLostError, ChannelClosedError)
# A call that ends with one of these may not have begun. If it has, the owner ignores the update.
_REFUSALS = (InvalidMessageError, OverloadedError, DeadlineExceededError, CallCancelledError)


class HandleUpdates:
    """Notifies owners of the handles of this rank. Every method is safe from any thread.

    The garbage collector may call ``released``, and so at any point of the program.
    """

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._queue: runtime.SimpleQueue[tuple[int, Update | None]] = runtime.SimpleQueue()
        self._unsent: dict[int, list[Update]] = defaultdict(list)
        self._in_flight: set[int] = set()
        self._thread: runtime.Thread | None = None
        self._start_lock = runtime.Lock()
        self.is_closed = False

    @property
    def is_quiet(self) -> bool:
        """Whether all updates have been delivered."""
        return self._queue.empty() and not self._in_flight and not any(self._unsent.values())

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            with self._start_lock:
                if self._thread is None:
                    self._thread = runtime.Thread(
                        target=self._run, name="rankwire handles", daemon=True
                    )
                    self._thread.start()

    def released(self, owner: int, id: ObjectId, giver: int, sent_back: int) -> None:
        """Queue that a handle is garbage; it was sent back to its owner ``sent_back`` times."""
        if not self.is_closed:
            self._queue.put((owner, (_RELEASED, *id, giver, sent_back)))

    def passed_on(self, owner: int, id: ObjectId, rank: int, count: int = 1) -> None:
        """Queue that a handle was sent to a third rank; a count of -1 takes that back."""
        self._queue.put((owner, (_PASSED_ON, *id, rank, count)))

    def watch_making(self, owner: int, id: ObjectId, creation: RpcFuture[Any]) -> None:
        """Notify the owner if the call that creates an object ends before it begins.

        Other ranks may wait for that object there. If the call began, the owner knows its outcome.
        """
        creation.when_ended(partial(self._making_ended, owner, id, [True]))

    def _making_ended(
        self, owner: int, id: ObjectId, untold: list[bool], creation: RpcFuture[Any]
    ) -> None:
        if isinstance(creation.failure, _GONE):
            creation.disregard()
        elif isinstance(creation.failure, _REFUSALS):
            with suppress(IndexError):  # already told
                untold.pop()
                self._queue.put((owner, (_NOT_MADE, *id, 0, 0)))

    def close(self) -> None:
        """Send no more updates."""
        self.is_closed = True
        self._queue.put((_STOP, None))

    def _run(self) -> None:
        while True:
            owner, update = self._queue.get()
            if owner == _STOP:
                return
            if update is None:
                self._in_flight.discard(owner)
            else:
                self._unsent[owner].append(update)
            if self._queue.empty():  # send all updates in one message
                self._send()

    def _send(self) -> None:
        for owner in [owner for owner in self._unsent if owner not in self._in_flight]:
            updates = self._unsent.pop(owner)
            self._in_flight.add(owner)
            told = self._agent.rpc_async(owner, TELL, updates, timeout=math.inf)
            told.add_done_callback(partial(self._told, owner))

    def _told(self, owner: int, call: Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if isinstance(error, RemoteError):
            _log.warning("rank %d refused updates of handles: %s", owner, error)
        elif error is not None:  # the owner is lost, or this rank is closed
            _log.debug("rank %d did not get updates of handles: %s", owner, error)
        self._queue.put((owner, None))


def apply_updates(objects: OwnedObjects, src: int, world_size: int, updates: list[Any]) -> None:
    """Apply another rank's updates; a refused one does not stop the others, and is raised last."""
    refusal: Exception | None = None
    for kind, creator, number, key, first, second in updates:
        if not all(type(part) is int for part in (creator, number, key, first, second)):
            raise ValueError("updates of handles are numbers")
        if kind == _PASSED_ON and not 0 <= first < world_size:
            raise ValueError(f"a handle cannot be passed on to rank {first}")
        try:
            _apply(objects, src, kind, ObjectId(creator, number, key), first, second)
        except (PermissionError, OverloadedError) as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def _apply(
    objects: OwnedObjects, src: int, kind: int, id: ObjectId, first: int, second: int
) -> None:
    if kind == _RELEASED and second >= 0:
        objects.release(id, src, first, second)
    elif kind == _PASSED_ON and second in (-1, 1):
        objects.pass_on(id, src, first, second)
    elif kind == _NOT_MADE and id.creator == src:
        objects.not_made(id)
    else:
        raise ValueError(f"invalid update of a handle: {kind!r}")
