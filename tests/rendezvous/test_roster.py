"""A formed world: what each rank is told of it, when it forms and when a rank is back."""

from rankwire.rendezvous.roster import FormedWorld
from rankwire.wire.control_messages import DEFAULT_PATIENCE, Gone, Member
from rankwire.wire.keys import rank_key, unwrap, unwrap_one
from worlds import SECRET


class Keys:
    """The keys of ranks, by how many times each was started anew."""

    def __init__(self):
        self.incarnations = [0, 0, 0]

    def of(self, rank):
        return rank_key(SECRET, rank, self.incarnations[rank])


def member(rank, incarnation=0):
    return Member(rank, 1000 + rank, "127.0.0.1", 4000 + rank, "", "here", incarnation)


def formed(keys):
    return FormedWorld([member(rank) for rank in range(3)], DEFAULT_PATIENCE, -1, keys.of)


def keys_of(world, rank, keys):
    return unwrap(keys.of(rank), world.as_told_to(rank).keys, rank, 3)


def test_each_rank_gets_the_keys_that_the_others_get():
    keys = Keys()
    world = formed(keys)
    assert keys_of(world, 0, keys)[1] == keys_of(world, 1, keys)[0]
    assert world.without_keys.keys == b""
    assert world.without_keys.late == []


def test_a_rank_that_is_back_has_new_keys_with_all_and_the_others_keep_theirs():
    keys = Keys()
    world = formed(keys)
    before = [keys_of(world, rank, keys) for rank in range(3)]
    world.gone[1] = Gone(1, "killed")
    keys.incarnations[1] = 1
    world.take_back(member(1, 1))
    told = world.as_told_to(1)
    assert told.epoch == world.without_keys.epoch
    assert told.late == [1]
    assert told.members[1].incarnation == 1
    assert world.gone == {}
    after = keys_of(world, 1, keys)
    for other in (0, 2):
        joined = world.joined_as_told_to(other, member(1, 1))
        assert joined.member == member(1, 1)
        assert unwrap_one(keys.of(other), joined.key) == after[other] != before[1][other]
    assert keys_of(world, 0, keys)[2] == before[0][2]


def test_what_a_rank_is_told_only_that_incarnation_can_read():
    keys = Keys()
    world = formed(keys)
    keys.incarnations[1] = 1
    world.take_back(member(1, 1))
    wrapped = world.as_told_to(1).keys
    right, old = rank_key(SECRET, 1, 1), rank_key(SECRET, 1)
    good = unwrap(right, wrapped, 1, 3)
    assert not set(good.values()) & set(unwrap(old, wrapped, 1, 3).values())
