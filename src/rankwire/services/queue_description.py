"""Say what the requests of a queue wait for."""

from __future__ import annotations

from rankwire.services.queue_state import QueueState
from rankwire.services.queue_users import Ticket
from rankwire.texts import name_ranks


def describe_wait(state: QueueState, ticket: Ticket) -> str:
    """Return what a request waits for, or what the queue has if it does not wait."""
    if (put := state.puts.get(ticket)) is not None:
        return _describe_put(state, "a slot" if put.is_slot else "the put")
    if ticket in state.gets:
        return _describe_get(state, state.gets[ticket].least)
    stats, activity = state.stats(), state.activity
    found = f"the queue has {stats.queued} of {state.settings.capacity} items"
    found += f": {stats.produced} inserted, {stats.consumed} consumed"
    silent = f"{activity.describe_producers()}; {activity.describe_consumers()}"
    return f"{found}; {silent}"


def _describe_get(state: QueueState, least: int) -> str:
    stats, ratio = state.stats(), state.settings.ratio
    if stats.queued == 0:
        found = f"it is empty: {stats.produced} inserted, {stats.consumed} consumed"
    elif ratio is not None and ratio * state.supply.inserted - stats.sampled < least:
        found = f"ratio {ratio:g}: {state.supply.inserted} inserted, {stats.sampled} sampled"
    else:
        found = f"{stats.queued} of {least} items are there"
    if stats.stale:
        found += f", {stats.stale} stale"
    if stats.leased:
        found += f", {stats.leased} leased to {_holders(state)}"
    if stats.slots:
        found += f", {stats.slots} slots taken by {name_ranks(_ranks(state.slots))}"
    return f"{found}; {state.activity.describe_producers()}"


def _describe_put(state: QueueState, what: str) -> str:
    stats, settings = state.stats(), state.settings
    if what == "the put" and state.supply.runs_ahead:
        found = (
            f"ratio {settings.ratio:g}: {state.supply.inserted} inserted, {stats.sampled} sampled"
        )
    else:
        found = f"it is full: {stats.queued} of {settings.capacity} items, {stats.nbytes} bytes"
        if stats.slots:
            found += f", {stats.slots} slots taken by {name_ranks(_ranks(state.slots))}"
    return f"{found}; {state.activity.describe_consumers()}"


def _holders(state: QueueState) -> str:
    held = {ticket: None for ticket, delivery in state.deliveries.items() if delivery.is_lease}
    return name_ranks(_ranks(held))


def _ranks(tickets: dict[Ticket, None]) -> list[int]:
    return sorted({ticket.user[0] for ticket in tickets})
