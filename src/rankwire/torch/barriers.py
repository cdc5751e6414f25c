"""Monitored barriers: all ranks meet, and who does not come in time is named.

torch has this for Gloo only, by name. The function of the same name here is for groups of either.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

import rankwire
from rankwire.backends.base import Backend
from rankwire.errors import DeadlineExceededError
from rankwire.torch.translation import as_torch
from rankwire.torch.works import seconds_of


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Meet; whoever does not come in time is named. In place of torch's, which is for Gloo only.

    Args:
        group: A process group; None is the default one. One of another backend is passed to torch.
        timeout: For all of it; None is the group's.
        wait_all_ranks: On rankwire all ranks that are missing are named, on all ranks, either way.

    Raises:
        DistBackendError: Some ranks did not come; the text and ``__cause__.waiting_for`` say which.
    """
    chosen = dist.group.WORLD if group is None else group
    ranks = getattr(chosen, "ranks", None)
    if isinstance(ranks, Backend):
        meet_monitored(ranks, timeout)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def meet_monitored(ranks: Backend, timeout: timedelta | None) -> None:
    """Meet, with an error in the words of Gloo."""
    with as_torch:
        try:
            rankwire.barrier(ranks, timeout=seconds_of(timeout))
        except DeadlineExceededError as error:
            late = ", ".join(map(str, error.waiting_for))
            text = f"[Rank {ranks.rank}]: Ranks {late} failed to pass monitoredBarrier: {error}"
            raise dist.DistBackendError(text) from error
