"""The method with which users of ``RpcAgent`` make and use queues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any

from rankwire.backends.arguments import check_rank, check_ranks
from rankwire.errors import ChannelClosedError, ConfigurationError, OverloadedError, RankwireError
from rankwire.override import override
from rankwire.rpc.agent import Agent
from rankwire.services.queue import Queue
from rankwire.services.queue_client import QueueClient
from rankwire.services.queue_owner import QueueOwner
from rankwire.services.queue_requests import QueueRequests
from rankwire.services.queue_settings import QueueSettings
from rankwire.services.queue_users import QueueOutcome


class AgentQueues(Agent):
    """The queues of ``RpcAgent``. Safe from any thread."""

    _queue_owner: QueueOwner
    _queue_owners: dict[int, None]  # of the queues that were opened here
    _queue_client: QueueClient

    def queue(
        self,
        name: str,
        *,
        owner: int | str = 0,
        capacity: int | None = None,
        capacity_nbytes: int = 256 << 20,
        when_full: str = "block",
        order: str = "fifo",
        seed: int = 0,
        uses: int | None = 1,
        ratio: float | None = None,
        tolerance: float = math.inf,
        producers: Sequence[int | str] | str = (),
        timeout: float | None = None,
    ) -> Queue[Any]:
        """Return a queue that one rank owns, and make it if no rank has.

        Any rank may make it, and the others must pass equal settings. Without ``capacity``, this
        takes the settings that another rank has made it with, and waits until one has.

        Args:
            name: Its name at its owner.
            owner: The rank that has the items, or its name.
            capacity: How many items and slots it has room for. It may have more items while a get
                waits for more than that, and after items came back.
            capacity_nbytes: How many bytes of items; one item of any size always fits.
            when_full: What a put to a full queue does: ``"block"`` waits, ``"drop_oldest"`` drops
                the oldest item, ``"drop_newest"`` the new one, ``"refuse"`` raises
                ``OverloadedError``.
            order: Which item is taken next: ``"fifo"``, the oldest; ``"uniform"``, a random one;
                ``"key"``, the one that was put with the lowest key.
            seed: The seed of ``"uniform"``.
            uses: How often an item is taken before it is gone; None: until it is dropped.
            ratio: How often items may be taken for each item put. A get waits while it would take
                more.
            tolerance: With ``ratio``: a put waits if items could then be taken so many times more.
            producers: The ranks, or their names or roles, that end the queue together, each by
                ``end``. If one is lost first, gets from the empty queue raise ``PeerLostError``.
            timeout: Seconds to wait; None is the agent's timeout.

        Raises:
            ConfigurationError: A setting is invalid, or differs from the queue's.
            DeadlineExceededError: No rank has made the queue in time.
        """
        owner = check_rank(owner, self.world_size, self.backend.roles)
        settings = None
        if capacity is not None:
            ranks = []
            if producers:
                ranks = check_ranks(producers, self.world_size, self.backend.roles)
            settings = QueueSettings(
                capacity,
                capacity_nbytes,
                when_full,
                order,
                seed,
                uses,
                ratio,
                tolerance,
                tuple(ranks),
            )
        deadline = self._queue_client.deadline_of(timeout)
        sent = None if settings is None else settings.as_dict()
        try:
            self._queue_owners[owner] = None
            outcome, value = self._queue_client.call(owner, "open", deadline, name, sent)
            if outcome == QueueOutcome.TOO_MANY:
                raise OverloadedError(f"rank {owner} has, or this one waits for, too many queues")
            if outcome != QueueOutcome.DONE:
                raise ChannelClosedError(f"the agent of rank {owner} is closing")
            number, found = value
            there = QueueSettings.of(found)
            if settings is not None and settings != there:
                difference = settings.difference_from(there)
                raise ConfigurationError(f"queue {name!r} on rank {owner} exists: {difference}")
        except RankwireError as error:
            error.op = f"queue {name!r}"
            error.during(rank=self.rank, peer=owner, waited=deadline.waited)
            raise
        requests = QueueRequests(self._queue_client, name, owner, number)
        return Queue(requests, there.as_dict())

    @override
    def _begin_services(self) -> None:
        super()._begin_services()
        self._queue_owners = {}
        self._queue_owner = QueueOwner(self.backend)
        self._queue_client = QueueClient(self)
        self._registry.own.update(self._queue_owner.functions())

    @override
    def _end_services(self) -> None:
        super()._end_services()
        self._queue_client.is_closing = True
        self._queue_owner.close()
        while self._queue_owners:
            rank, _ = self._queue_owners.popitem()
            if rank != self.rank:
                with suppress(RankwireError):  # it is closed or lost
                    Context().run(self._queue_client.leave, rank)
