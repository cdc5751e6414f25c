"""What a queue was made with, and what it counts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from rankwire.errors import ConfigurationError

_WHEN_FULL = ("block", "drop_oldest", "drop_newest", "refuse")
_ORDERS = ("fifo", "uniform", "key")
_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue; described at ``RpcAgent.queue``.

    Raises:
        ConfigurationError: One is invalid.
    """

    capacity: int
    capacity_nbytes: int = _NBYTES
    when_full: str = "block"
    order: str = "fifo"
    seed: int = 0
    uses: int | None = 1
    ratio: float | None = None
    tolerance: float = math.inf
    producers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("capacity", "capacity_nbytes", "uses"):
            value = getattr(self, name)
            is_number = type(value) is int and value >= 1
            self._require(is_number or (name == "uses" and value is None), name, "1 or more")
        self._require(self.when_full in _WHEN_FULL, "when_full", f"one of {_WHEN_FULL}")
        self._require(self.order in _ORDERS, "order", f"one of {_ORDERS}")
        self._require(type(self.seed) is int, "seed", "an int")
        self._require(self.ratio is None or 0.0 < self.ratio < math.inf, "ratio", "above 0")
        self._require(self.tolerance > 0.0, "tolerance", "above 0")

    def _require(self, is_valid: bool, name: str, expected: str) -> None:
        if not is_valid:
            raise ConfigurationError(
                f"{name} of a queue is {expected}, not {getattr(self, name)!r}"
            )

    @property
    def drops(self) -> bool:
        """Whether a full queue drops an item, so that a put does not wait for a place."""
        return self.when_full in ("drop_oldest", "drop_newest")

    def difference_from(self, other: Self) -> str:
        """Return what another has set otherwise, as text; empty if they are equal."""
        here, there = self.as_dict(), other.as_dict()
        return ", ".join(
            f"{name} is {value!r} here and {there[name]!r} there"
            for name, value in here.items()
            if value != there[name]
        )

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Self:
        """Return the settings that were sent."""
        return cls(**{**settings, "producers": tuple(settings["producers"])})

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name, to be sent."""
        return asdict(self)


@dataclass(slots=True)
class QueueStats:
    """The counts of a queue at one moment.

    ``produced`` is always ``consumed + dropped + stale + queued + leased``.

    Attributes:
        produced: Items that were put, those that a full queue dropped at once included.
        consumed: Items that were taken, for the last time if they may be taken several times, and
            acknowledged if the get asked for that.
        dropped: Items that were dropped because the queue was full.
        stale: Items that were dropped because a get asked for a later version.
        queued: Items that are in the queue.
        leased: Items that a get with ``ack`` has taken and not acknowledged.
        sampled: How often an item was taken, and not returned.
        nbytes: Bytes of the queued items.
        slots: Places that are taken for items to come.
        waiting_producers: Puts and slots that wait.
        waiting_consumers: Gets that wait.
        ended: Whether nothing more can be put.
    """

    produced: int = 0
    consumed: int = 0
    dropped: int = 0
    stale: int = 0
    queued: int = 0
    leased: int = 0
    sampled: int = 0
    nbytes: int = 0
    slots: int = 0
    waiting_producers: int = 0
    waiting_consumers: int = 0
    ended: bool = False
