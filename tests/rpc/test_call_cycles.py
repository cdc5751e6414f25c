"""Cycles of calls: from what ranks tell, with a model that lets calls end one after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwire.rpc.call_cycles import find_cycle, still_to_ask
from rankwire.wire.control_messages import ActiveCall, Key


def key(number):
    return Key(number % 3, number % 2, number)


def call(*needs, depth=0, wait=1):
    waits = {"needs": tuple(map(key, needs)), "wait": wait if needs else 0}
    return ActiveCall(key(0), "f", 1.5, depth=depth, doing="is running", **waits)


def picture(**calls):
    return {key(int(name[1:])): value for name, value in calls.items()}


def test_two_calls_that_wait_for_each_other_are_a_cycle():
    both = picture(c0=call(1), c1=call(0, depth=1))
    cycle = find_cycle(both, key(0))
    assert set(cycle.members) == {key(0), key(1)}
    assert cycle.gives_up == key(1)


def test_every_rank_finds_the_same_cycle():
    three = picture(c0=call(1), c1=call(2, depth=2), c2=call(0, depth=1))
    cycles = [find_cycle(three, key(start)) for start in range(3)]
    assert cycles[0] == cycles[1] == cycles[2]
    assert cycles[0].gives_up == key(1)


def test_a_call_that_runs_frees_all_that_wait_for_it():
    chain = picture(c0=call(1), c1=call(2), c2=call())
    assert find_cycle(chain, key(0)) is None


def test_one_free_place_is_enough():
    places = picture(c0=call(1, 2), c1=call(0), c2=call())
    assert find_cycle(places, key(0)) is None
    assert find_cycle(places, key(1)) is None


def test_a_call_that_waits_for_a_cycle_is_stuck_but_does_not_give_up():
    into = picture(c0=call(1, depth=9), c1=call(2), c2=call(1))
    cycle = find_cycle(into, key(0))
    assert key(0) not in cycle.members
    assert cycle.gives_up != key(0)


def test_what_is_not_known_is_asked_for_and_counts_as_going_on():
    partly = picture(c0=call(1), c1=call(2))
    assert still_to_ask(partly, key(0)) == {key(2)}
    assert find_cycle(partly, key(0)) is None
    assert find_cycle({**partly, key(2): None}, key(0)) is None
    assert still_to_ask({**partly, key(2): None}, key(0)) == set()
    assert still_to_ask({}, key(0)) == {key(0)}


def test_nothing_more_is_asked_once_a_call_is_known_to_go_on():
    partly = picture(c0=call(1, 2), c1=call())
    assert still_to_ask(partly, key(0)) == set()


def test_another_wait_for_the_same_call_is_another_cycle():
    first = find_cycle(picture(c0=call(1, wait=1), c1=call(0)), key(0))
    second = find_cycle(picture(c0=call(1, wait=2), c1=call(0)), key(0))
    assert first.members == second.members
    assert first.evidence != second.evidence


numbers = st.integers(0, 7)
pictures = st.dictionaries(
    numbers.map(key),
    st.builds(
        ActiveCall,
        key=numbers.map(key),
        name=st.just("f"),
        age=st.floats(0, 100),
        depth=st.integers(0, 3),
        needs=st.lists(numbers.map(key), unique=True, max_size=3).map(tuple),
        wait=st.integers(1, 5),
    ),
)


def ends(calls, start):
    """Whether a call can end: let all that can end do so, until nothing changes."""
    left = dict(calls)
    while True:
        ending = [k for k, c in left.items() if not c.needs or any(n not in left for n in c.needs)]
        if not ending:
            return start not in left
        for k in ending:
            del left[k]


@given(pictures, numbers.map(key))
def test_a_cycle_is_found_exactly_where_no_call_can_ever_end(calls, start):
    cycle = find_cycle(calls, start)
    assert (cycle is not None) == (not ends(calls, start))
    if cycle is not None:
        following = (*cycle.members[1:], cycle.members[0])
        for member, successor in zip(cycle.members, following, strict=True):
            assert successor in calls[member].needs
            assert not ends(calls, member)
        assert cycle.gives_up in cycle.members


@given(pictures, numbers.map(key))
def test_asking_step_by_step_finds_the_same_as_knowing_everything(calls, start):
    known = {}
    while missing := still_to_ask(known, start):
        asked = min(missing)
        known[asked] = calls.get(asked)
    assert find_cycle(known, start) == find_cycle(calls, start)


@pytest.mark.parametrize("is_ring", [True, False])
def test_a_long_account_takes_time_in_proportion_to_its_length(is_ring):
    """By steps, not by time: each call is looked at a few times, and not once for each other."""
    looks = []

    class Counted:
        depth, wait = 0, 1

        def __init__(self, *needs):
            self._needs = needs

        @property
        def needs(self):
            looks.append(1)
            return self._needs

    count = 2000
    calls = {Key(0, 1, n): Counted(Key(0, 1, (n + 1) % count)) for n in range(count)}
    if not is_ring:
        calls[Key(0, 1, count - 1)] = Counted()
    assert (find_cycle(calls, Key(0, 1, 0)) is not None) is is_ring
    assert len(looks) < 20 * count
