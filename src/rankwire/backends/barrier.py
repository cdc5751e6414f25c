"""The barrier: the steps of ``Backend.barrier``.

Every rank tells every other that it has entered, so a rank that waits in vain knows exactly who is
missing. It knows of a backend only how messages are sent and received.
"""

from __future__ import annotations

from rankwire.backends.transport import Transport
from rankwire.deadline import AT_ONCE, Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.wire.frames import Channel

# Seconds between two looks at all ranks; more if they are many, for who looks holds others up.
_LOOK, _LOOK_OF_ONE = 0.05, 0.001


def meet(ranks: Transport, epoch: int, deadline: Deadline) -> None:
    """Return once every rank has entered the barrier of this number.

    Raises:
        DeadlineExceededError: ``waiting_for`` lists the ranks that did not.
    """
    look = max(_LOOK, ranks.world_size * _LOOK_OF_ONE)
    others = [(ranks.rank + step) % ranks.world_size for step in range(1, ranks.world_size)]
    untold, missing = others, others
    while True:
        untold = _tell_entered(ranks, untold, epoch, deadline)
        if missing and _has_entered(ranks, missing[0], epoch, deadline.sooner(look)):
            missing = missing[1:]
        elif missing:
            # While one is late another one may die: that ends the barrier too.
            missing = _still_missing(ranks, missing, epoch)
        if not missing and not untold:
            return
        if deadline.expired:
            missing = _still_missing(ranks, missing, epoch)
            if missing or untold:
                raise DeadlineExceededError(deadline.limit, waiting_for=sorted(missing or untold))


def _tell_entered(ranks: Transport, untold: list[int], epoch: int, deadline: Deadline) -> list[int]:
    """Tell ranks that this one has entered; return those that are slow to take it."""
    still_untold, failure = [], None
    for dst in untold:  # all of them, also when one is lost: no rank must wait for us in vain
        patience = deadline.sooner(_LOOK)
        try:
            ranks.transmit(dst, (ranks.group, Channel.BARRIER, epoch), ((), 0), patience)
        except DeadlineExceededError:
            still_untold.append(dst)
        except RankwireError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return still_untold


def _still_missing(ranks: Transport, missing: list[int], epoch: int) -> list[int]:
    """Return those of the missing that have not entered by now; raises if one is gone."""
    heard = set(ranks.sources((ranks.group, Channel.BARRIER, epoch)))
    return [
        src for src in missing if src not in heard or not _has_entered(ranks, src, epoch, AT_ONCE)
    ]


def _has_entered(ranks: Transport, src: int, epoch: int, deadline: Deadline) -> bool:
    try:
        ranks.receive(src, (ranks.group, Channel.BARRIER, epoch), deadline, nbytes=0)
    except DeadlineExceededError:
        return False
    return True
