"""The soak, for a few seconds by day and for minutes in the nightly run."""

import contextlib
import os

import pytest

from faults.sizes import NIGHTLY, QUICK, time_limit
from faults.soak import WORLD_SIZE, Soak

MINUTES = float(os.environ.get("TESTS_SOAK_MINUTES", "5"))
pytestmark = pytest.mark.timeout(time_limit(90, 120 * MINUTES))

# Those that are killed in turn; rank 0 and the rest live through all rounds.
VICTIMS = (3, 5, 7)


@pytest.mark.fault(
    43, "under kills each call is answered once or fails by a typed error; none runs twice"
)
@pytest.mark.fault(48, "a world is formed again after each kill, and its sums are right")
@pytest.mark.fault(
    24, "what lives through many worlds keeps no memory, descriptor or thread of them"
)
def test_a_world_survives_kills_for_a_long_time(measured):
    rounds, seconds = (int(MINUTES * 6 * NIGHTLY), 9.0) if NIGHTLY else (4, 0.2 if QUICK else 0.5)
    with contextlib.closing(Soak(measured)) as soak:
        for number in range(rounds):
            soak.round(VICTIMS[number % len(VICTIMS)], seconds)
        measured("calls answered", soak.check(), unit="calls")
        measured("ranks killed and started again", rounds, unit="ranks")
        assert len(soak.ranks) == WORLD_SIZE
        # Caches are full, and each victim has been killed once: the same ranks from here on.
        warm = len(VICTIMS) - 1
        lived = soak.belongings[-1]
        before = soak.belongings[warm][-len(lived) :]
        for (memory, files, threads), (memory0, files0, threads0) in zip(
            lived, before, strict=True
        ):
            measured(
                "memory grown, after a collection",
                (memory - memory0) / (1 << 20),
                unit="MiB",
                limit=32,
            )
            assert files <= files0 + 2
            assert threads <= threads0 + 2
