"""The roll: what the coordinator answers to the reports of ranks that wait or fail."""

import random

import pytest
from msgspec.structs import replace

from rankwire.rendezvous.roll import Roll
from rankwire.wire.control_messages import Notice

SUM, GATHER = "all_reduce(sum, float64, (4,))", "all_gather(float64, (4,))"


def waits(number, description=SUM, *, state="waiting", group=0, **rest):
    return Notice(group, number, description, state, **rest)


def fails(number, *, state="failed", group=0, culprit=-1, **rest):
    return Notice(group, number, SUM, state, "because", culprit, **rest)


def hear(roll, src, notice):
    return list(roll.hear(src, notice))


def told_to(told):
    return [rank for rank, _ in told]


# -- waiting


def test_ranks_that_wait_in_one_operation_are_told_nothing():
    roll = Roll(400)
    for rank in range(1, 400):
        assert hear(roll, rank, waits(7)) == []


def test_who_is_missing_is_told_to_the_rank_that_asks_and_to_no_other():
    roll = Roll(6)
    for rank in (0, 2, 5):
        hear(roll, rank, waits(7))
    hear(roll, 3, waits(8, GATHER))  # it is done with 7
    hear(roll, 4, waits(6))
    ((rank, answer),) = hear(roll, 2, waits(7, state="asking"))
    assert rank == 2
    assert (answer.state, answer.sequence, answer.missing) == ("missing", 7, (1, 4))


def test_in_a_group_ranks_are_numbered_as_the_group_does():
    roll = Roll(9)
    members = (8, 2, 5)
    assert hear(roll, 5, waits(0, group=3, members=members)) == []
    ((_, answer),) = hear(roll, 5, waits(0, group=3, state="asking", members=members))
    assert answer.missing == (0, 1)
    told = hear(roll, 8, waits(0, GATHER, group=3, members=members))
    assert "on rank 2 and" in told[0][1].text
    assert f"{GATHER} on rank 0;" in told[0][1].text
    assert told_to(told) == [2, 5, 8]


def test_groups_are_kept_apart_also_by_their_members():
    """A rank that says it is in a group of this number, with other members, reaches only them."""
    roll = Roll(4)
    for rank in (0, 1):
        assert hear(roll, rank, waits(0, group=3, members=(0, 1))) == []
    assert hear(roll, 2, waits(0, GATHER, group=3, members=(0, 1, 2))) == []
    assert hear(roll, 2, waits(0, GATHER)) == []


# -- disagreements


def test_two_descriptions_of_one_operation_are_told_to_all_with_the_lines_of_the_program():
    roll = Roll(4)
    assert hear(roll, 0, waits(7, where="train.py:31")) == []
    assert hear(roll, 2, waits(7, where="train.py:31")) == []
    told = hear(roll, 1, waits(7, GATHER, where="train.py:33"))
    assert told_to(told) == [0, 2, 3, 1], "the one that differs may leave upon it: it is the last"
    for _, notice in told:
        assert notice.state == "mismatch"
        assert (notice.src, notice.culprit) == (0, 1)
        assert notice.descriptions == (SUM, GATHER)
        assert notice.text == (
            f"collective number 7 of this group is {SUM} on rank 0 and {GATHER} on rank 1; all "
            "ranks must call the same ones in the same order (rank 0 at train.py:31, rank 1 at "
            "train.py:33)"
        )


def test_one_line_of_the_program_is_named_once():
    roll = Roll(2)
    hear(roll, 0, waits(7, where="train.py:31"))
    (_, notice), _ = hear(roll, 1, waits(7, GATHER, where="train.py:31"))
    assert notice.text.endswith("in the same order (both are at train.py:31)")


def test_a_disagreement_is_told_once_and_to_those_who_come_later():
    roll = Roll(4)
    hear(roll, 0, waits(7))
    assert told_to(hear(roll, 1, waits(7, GATHER))) == [0, 2, 3, 1]
    ((rank, notice),) = hear(roll, 2, waits(7))
    assert (rank, notice.state) == (2, "mismatch")
    assert hear(roll, 3, fails(7)) == []


def test_a_third_description_is_passed_on_so_that_its_messages_can_be_dropped():
    roll = Roll(4)
    hear(roll, 0, waits(7))
    hear(roll, 1, waits(7, GATHER))
    told = hear(roll, 2, waits(7, "barrier()"))
    assert told_to(told) == [0, 1, 3]
    assert {(notice.state, notice.description) for _, notice in told} == {("waiting", "barrier()")}


def test_a_rank_that_went_on_from_another_operation_is_found():
    roll = Roll(3)
    hear(roll, 0, waits(7))
    told = hear(roll, 1, waits(9, before=((7, "nothing()"), (8, SUM))))
    assert told_to(told) == [0, 2, 1]
    assert f"is {SUM} on rank 0 and nothing() on rank 1;" in told[0][1].text
    assert told[0][1].sequence == 7


def test_a_rank_that_waits_in_an_operation_that_another_knows_otherwise_is_found():
    roll = Roll(3)
    assert hear(roll, 1, waits(9, before=((7, "nothing()"), (8, SUM)))) == []
    assert hear(roll, 2, waits(8)) == []
    told = hear(roll, 0, waits(7))
    assert [notice.state for _, notice in told] == ["mismatch"] * 3


def test_a_rank_that_is_ahead_is_no_disagreement():
    roll = Roll(3)
    for rank, number in ((0, 7), (1, 9), (2, 8)):
        history = tuple((n, SUM) for n in range(number - 4, number))
        assert hear(roll, rank, waits(number, before=history)) == []


# -- failures


def test_a_failure_is_told_to_all_others_once():
    roll = Roll(4)
    told = hear(roll, 2, fails(7, culprit=0))
    assert told_to(told) == [1, 3, 0]
    for rank in (0, 1, 3):
        assert hear(roll, rank, fails(7)) == []


def test_a_failure_is_told_again_if_telling_it_was_interrupted():
    roll = Roll(4)
    next(roll.hear(2, fails(7))), "and no more"
    assert told_to(hear(roll, 2, fails(7))) == [0, 1, 3]


def test_a_rank_that_waits_where_another_has_failed_is_told():
    roll = Roll(3)
    hear(roll, 2, fails(7))
    ((rank, notice),) = hear(roll, 0, waits(7))
    assert (rank, notice.state, notice.src) == (0, "failed", 2)


def test_a_rank_that_has_not_heard_of_an_earlier_failure_is_told():
    roll = Roll(3)
    hear(roll, 2, fails(7))
    ((rank, notice),) = hear(roll, 0, waits(8))
    assert (rank, notice.sequence) == (0, 7)
    assert hear(roll, 1, waits(8, epoch=8)) == [], "it knows"


def test_ranks_that_do_not_agree_on_a_failure_that_was_not_reported_fail():
    roll = Roll(3)
    assert hear(roll, 0, waits(8)) == []
    told = hear(roll, 1, waits(8, epoch=6))
    assert told_to(told) == [0, 2, 1]
    text = "collective number 5 of this group failed on rank 1, and went well on rank 0"
    assert told[0][1].text == text


def test_a_rank_that_refused_is_told_what_the_others_have_called():
    roll = Roll(3)
    hear(roll, 0, waits(7))
    told = hear(roll, 2, replace(fails(7, state="refused"), description="all_reduce"))
    assert told_to(told) == [0, 1, 2]
    assert (told[-1][1].state, told[-1][1].description) == ("waiting", SUM)
    told = hear(roll, 1, replace(fails(7), description=GATHER))
    assert [(rank, notice.description) for rank, notice in told] == [(0, GATHER), (2, GATHER)]


# -- what is kept


def test_what_is_kept_is_bounded_for_each_rank():
    roll = Roll(3)
    for group in range(500):
        hear(roll, 1, waits(group, group=group))
    assert len(roll._groups) <= 64
    for number in range(5000):
        hear(roll, 2, waits(number, f"words {number}"))
        hear(roll, 2, fails(number))
        for way in range(10):
            hear(roll, 1, waits(number, f"way {way}"))
    group = roll._groups[0, (0, 1, 2)]
    assert len(group._described) <= 16
    assert all(len(ways) <= 4 for ways in group._described.values())
    assert len(group._failed) <= 64


def test_what_a_rank_reported_is_dropped_when_it_is_gone():
    roll = Roll(3)
    for rank in range(3):
        hear(roll, rank, waits(7))
        hear(roll, rank, waits(7, group=5, members=(0, 1, 2)))
    roll.forget(1)
    ((_, answer),) = hear(roll, 0, waits(7, state="asking"))
    assert answer.missing == (1,)
    for rank in range(3):
        roll.forget(rank)
    assert not roll._groups
    assert not roll._of_rank


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_call_the_same_are_never_told_that_they_differ(seed):
    """Whatever they report, and in whatever order; and only who asks is answered."""
    rng = random.Random(seed)
    words = [rng.choice([SUM, GATHER, "barrier()"]) for _ in range(40)]
    roll, at = Roll(6), [0] * 6
    for _ in range(200):
        rank = rng.randrange(6)
        at[rank] = min(at[rank] + rng.randrange(3), 39)
        number = at[rank]
        before = tuple((n, words[n]) for n in range(max(0, number - 8), number))
        state = rng.choice(["waiting", "asking"])
        told = hear(roll, rank, waits(number, words[number], state=state, before=before))
        expected = [other for other in range(6) if other != rank and seen(roll, other) < number]
        if state == "waiting":
            assert told == []
        else:
            assert [(to, notice.missing) for to, notice in told] == [(rank, tuple(expected))]


def seen(roll, rank):
    return roll._groups[0, tuple(range(6))].last.get(rank, -1)
