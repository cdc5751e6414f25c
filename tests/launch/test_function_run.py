"""Outcomes: whose failure it was, and what all returned."""

import pytest

from rankwire import PeerLostError, RankFailedError
from rankwire.launch.function_run import RankOutcome, culprit_of, values_of

RETURNED = RankOutcome(0, "value")
RAISED = RankOutcome(1, error=KeyError("x"), remote_traceback="Traceback ...")
FELL = RankOutcome(2, error=PeerLostError(1, "it raised"))
KILLED = RankOutcome(3, killed=True, reason="it was killed")


def test_values_come_in_rank_order():
    assert values_of([RankOutcome(1, "b"), RankOutcome(0, "a")]) == ["a", "b"]


@pytest.mark.parametrize(
    ("ended", "culprit"),
    [
        ([RETURNED], None),
        ([FELL, RETURNED, RAISED], RAISED),
        ([KILLED, RAISED, FELL], RAISED),
        ([FELL, KILLED], KILLED),
        ([FELL, RETURNED], FELL),
    ],
)
def test_the_first_error_that_is_not_a_consequence_is_to_blame(ended, culprit):
    assert culprit_of(ended) is culprit


def test_an_error_has_all_outcomes_and_its_cause():
    with pytest.raises(RankFailedError, match="rank 1 failed: KeyError") as info:
        values_of([FELL, RAISED, RETURNED])
    assert info.value.outcomes == [RETURNED, RAISED, FELL]
    assert info.value.__cause__ is RAISED.error
    assert str(info.value).endswith("traceback on rank 1:\nTraceback ...")


def test_an_outcome_is_readable():
    assert list(map(str, (RETURNED, RAISED, KILLED))) == [
        "rank 0 returned 'value'",
        "rank 1 raised KeyError: 'x'",
        "rank 3: it was killed",
    ]
