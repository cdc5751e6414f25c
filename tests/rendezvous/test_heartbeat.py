"""Silence: who is suspected and given up, and when. Time is a number here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.rendezvous.heartbeat import Silence
from rankwire.wire.control_messages import Gone, Patience, Suspected

PATIENCE = Patience(5.0, 30.0)
BEAT = PATIENCE.beat


def judged(silence, until, *, start=0.0, heard=None):
    """Judge every beat; ``heard`` gives the ranks that are heard at that time."""
    found = []
    for step in range(1, int(until - start) + 1):
        now = start + step * BEAT
        for rank in heard(now) if heard else ():
            silence.heard(rank, now)
        found += [(now, change) for change in silence.judge(now)]
    return found


def test_a_rank_that_is_heard_is_never_suspected():
    silence = Silence(PATIENCE, [1, 2], 0.0)
    assert judged(silence, 1000, heard=lambda now: [1, 2]) == []


def test_a_silent_rank_is_suspected_once_and_then_given_up_once():
    silence = Silence(PATIENCE, [1, 2], 0.0)
    (first, suspected), (second, gone) = judged(silence, 100, heard=lambda now: [1])
    assert (first, suspected) == (5.0, Suspected(2, 5.0))
    assert (second, gone.rank, gone.silent, gone.orderly) == (30.0, 2, True, False)
    assert gone.reason.startswith("its process has been silent for 30 s although its connection")


def test_a_suspected_rank_that_is_heard_again_is_trusted_again():
    silence = Silence(PATIENCE, [1], 0.0)
    changes = judged(silence, 100, heard=lambda now: [1] if now >= 10 else [])
    assert changes == [(5.0, Suspected(1, 5.0)), (10.0, Suspected(1, 0.0))]


def test_a_rank_that_is_gone_is_not_judged():
    silence = Silence(PATIENCE, [1], 0.0)
    judged(silence, 6)
    silence.forget(1)
    silence.heard(1, 7.0)
    assert judged(silence, 100, start=7.0) == []
    assert silence.lengths(100.0) == {}


def test_only_missed_beats_are_told():
    silence = Silence(PATIENCE, [1, 2], 0.0)
    silence.heard(1, 2.0)
    assert silence.lengths(3.0) == {2: 3.0}


@pytest.mark.parametrize("gap", [5.0, 60.0, 1e6])
def test_time_in_which_the_judge_did_not_run_counts_against_nobody(gap):
    silence = Silence(PATIENCE, [1], 0.0)
    judged(silence, 3)
    assert silence.judge(3.0 + gap) == []
    # It still owes a sign of life from then on.
    found = judged(silence, 3.0 + gap + 40, start=3.0 + gap)
    assert [type(change) for _, change in found] == [Suspected, Gone]


@pytest.mark.parametrize(
    ("patience", "beat"),
    [
        (Patience(5.0, 30.0), 1.0),
        (Patience(0.4, 1.0), 0.1),
        (Patience(100.0, 2.0), 0.5),
        (Patience(1e-9, 1.0), 0.01),
        (Patience(float("inf"), float("inf")), 1.0),
    ],
)
def test_several_beats_fit_into_the_shorter_limit(patience, beat):
    assert patience.beat == beat


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.floats(0.0, 4.0)), max_size=200),
    st.floats(0.5, 10.0),
    st.floats(0.0, 50.0),
)
def test_judgements_follow_the_table_whatever_is_heard_when(events, suspect_after, more):
    patience = Patience(suspect_after, suspect_after + more)
    silence = Silence(patience, [1, 2, 3], 0.0)
    state = dict.fromkeys([1, 2, 3], "heard")
    now = 0.0
    for rank, pause in events:
        now += pause
        silence.heard(rank, now)
        for change in silence.judge(now):
            match change:
                case Gone():
                    after = "given up"
                case Suspected(seconds=seconds):
                    after = "suspected" if seconds else "heard"
            assert state[change.rank] not in ("given up", after)
            state[change.rank] = after
        assert state[rank] != "suspected"  # it was heard just now


def test_a_judge_knows_whether_others_may_have_given_it_up():
    silence = Silence(PATIENCE, [1], 0.0)
    judged(silence, 100, heard=lambda now: [1])
    assert not silence.was_absent(100.0)
    assert not silence.was_absent(110.0), "late, but nobody gives it up for that"
    assert silence.was_absent(128.0), "it wakes up, and reads before it judges"
    silence.judge(128.0)
    assert silence.was_absent(129.0), "what the others said then may come a little later"
    judged(silence, 160, start=129, heard=lambda now: [1])
    assert not silence.was_absent(160.0)
