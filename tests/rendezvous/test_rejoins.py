"""The way of a rank back into its world: the table, without a connection."""

import random

from rankwire.rendezvous.roster import Rejoins
from rankwire.wire.control_messages import Member


def member(rank, incarnation=1):
    return Member(rank, 1000 + rank, "127.0.0.1", 4000 + rank, "", "here", incarnation)


def came(returning, rank, incarnation=1):
    returning.expect(rank)
    returning.enter(rank)
    returning.queue(member(rank, incarnation))


def test_nobody_is_expected_who_was_not_started_anew():
    returning = Rejoins()
    assert not returning.is_expected(1)
    returning.expect(1)
    assert returning.is_expected(1)
    assert not returning.is_expected(2)


def test_a_rank_is_a_member_when_all_members_know_it():
    returning = Rejoins()
    came(returning, 1)
    assert returning.is_under_way(1)
    assert returning.announce([0, 2]) == member(1)
    assert returning.complete() is None
    returning.know(0, 1, 1)
    returning.know(0, 1, 1)
    assert returning.complete() is None
    returning.know(2, 1, 1)
    assert returning.complete() == member(1)
    assert not returning.is_under_way(1)
    assert not returning.is_expected(1)
    assert returning.complete() is None


def test_a_word_about_an_earlier_incarnation_does_not_count():
    returning = Rejoins()
    came(returning, 1, incarnation=2)
    assert returning.announce([0]) == member(1, 2)
    returning.know(0, 1, 1)
    returning.know(0, 2, 2)
    assert returning.complete() is None
    returning.know(0, 1, 2)
    assert returning.complete() == member(1, 2)


def test_a_member_that_is_lost_meanwhile_is_not_waited_for():
    returning = Rejoins()
    came(returning, 1)
    returning.announce([0, 2])
    returning.know(0, 1, 1)
    returning.excuse(2)
    assert returning.complete() == member(1)


def test_with_nobody_there_a_rank_is_a_member_at_once():
    returning = Rejoins()
    came(returning, 1)
    assert returning.announce([]) == member(1)
    assert returning.complete() == member(1)


def test_ranks_come_back_one_after_the_other():
    returning = Rejoins()
    came(returning, 1)
    came(returning, 2)
    assert returning.announce([0]) == member(1)
    assert returning.announce([0]) is None
    returning.know(0, 1, 1)
    assert returning.complete() == member(1)
    assert returning.announce([0, 1]) == member(2)


def test_who_goes_on_the_way_back_may_begin_again():
    returning = Rejoins()
    returning.expect(1)
    returning.enter(1)
    assert not returning.fall_back(1)  # it had not said where it is
    came(returning, 2)
    came(returning, 1)
    assert returning.announce([0]) == member(2)
    assert not returning.fall_back(1)  # it waited for its turn, and nobody was told
    assert returning.fall_back(2)  # of this one, all were told
    assert returning.announce([0]) is None
    for rank in (1, 2):
        assert returning.is_expected(rank)
        assert not returning.is_under_way(rank)
    came(returning, 2)
    assert returning.announce([]) == member(2)


def test_in_whatever_order_things_happen_everyone_is_let_in_once_and_alone():
    """A model of kills and words in random order; whoever is left at the end comes in."""
    for seed in range(200):
        chance = random.Random(seed)
        returning, members, told = Rejoins(), {0, 1, 2, 3}, None
        awaited: set[int] = set()
        for _ in range(60):
            rank = chance.randrange(4)
            if rank in members and chance.random() < 0.4:
                members.discard(rank)
                returning.excuse(rank)
                awaited.discard(rank)
                returning.expect(rank)
            elif rank in members and told is not None and rank in awaited:
                returning.know(rank, told.rank, told.incarnation)
                awaited.discard(rank)
            elif rank not in members and returning.is_under_way(rank):
                if chance.random() < 0.3:
                    was_told = returning.fall_back(rank)
                    assert was_told == (told is not None and told.rank == rank)
                    told = None if was_told else told
            elif rank not in members and returning.is_expected(rank):
                came(returning, rank)
            while True:
                announced = returning.announce(members)
                if announced is not None:
                    assert told is None
                    told, awaited = announced, set(members)
                done = returning.complete()
                assert (done is not None) == (told is not None and not awaited)
                if done is None:
                    break
                assert done == told
                assert done.rank not in members
                members.add(done.rank)
                told = None
