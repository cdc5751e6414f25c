"""Operations in words, and the tags made of them."""

from hypothesis import given
from hypothesis import strategies as st

from rankwire.collectives.exchange import describe, tag_of

WORDS = st.text(max_size=30)
NUMBERS = st.integers(0, 2**40)


def test_an_operation_in_words():
    assert describe("all_reduce", "sum", "float32", (1024,)) == "all_reduce(sum, float32, (1024,))"
    assert describe("barrier") == "barrier()"


def test_whatever_ranks_can_disagree_on_is_in_the_words():
    base = ("all_reduce", "sum", "float32", (4,))
    others = [
        ("reduce", "sum", "float32", (4,)),
        ("all_reduce", "max", "float32", (4,)),
        ("all_reduce", "sum", "float64", (4,)),
        ("all_reduce", "sum", "float32", (2, 2)),
        ("all_reduce", "sum", "float32", ()),
    ]
    assert len({describe(*words) for words in [base, *others]}) == 6
    assert len({tag_of(describe(*words), 0) for words in [base, *others]}) == 6


def test_tags_are_the_same_in_every_process():
    # Not Python's hash, which differs from one process to the next.
    assert tag_of("barrier()", 0) == tag_of("barrier()", 0)
    assert f"{tag_of('barrier()', 0):#x}" == "0x897668ae7b720000"
    assert f"{tag_of('barrier()', 1):#x}" == "0x27ade267fabd0000"


@given(WORDS, NUMBERS)
def test_a_tag_leaves_room_for_the_steps(words, number):
    tag = tag_of(words, number)
    assert 0 <= tag <= tag + 0xFFFE < 2**64
    assert tag & 0xFFFF == 0


@given(WORDS, NUMBERS, st.integers(1, 2**40))
def test_two_operations_of_one_kind_never_share_a_tag(words, number, distance):
    assert tag_of(words, number) != tag_of(words, number + distance)


def test_before_and_after_a_failure_an_operation_has_different_tags():
    tags = {tag_of("barrier()", n, epoch) for n in range(200) for epoch in range(n + 1)}
    assert len(tags) == 200 * 201 // 2


def test_many_operations_of_many_kinds_do_not_share_tags():
    tags = {tag_of(f"kind {kind}", number) for kind in range(100) for number in range(1000)}
    assert len(tags) == 100_000
