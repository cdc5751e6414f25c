"""What is made of an answer: words in an error, and calls that may be stuck."""

import pytest
from msgspec.structs import replace

from rankwire.errors import DeadlineExceededError
from rankwire.observe.inquiry import (
    calls_of,
    describe_calls,
    explain_unreceived,
    fit,
    list_calls,
    text_of,
)
from rankwire.wire.control_messages import (
    MAX_ANSWER_NBYTES,
    MAX_MEMBER_NBYTES,
    ActiveCall,
    Answer,
    Key,
    Question,
    pack,
    unpack,
)


def call(number, **fields):
    return ActiveCall(Key(0, 1, number), f"f{number}", 2.0, 1.0, **fields)


def received(answer):
    return unpack(bytearray(pack(answer)))


def test_much_is_summed_up():
    places = tuple(f"thread {number}" for number in range(10))
    answer = replace(list_calls([[call(n) for n in range(10)]]), places=places)
    text = text_of(answer, 2)
    assert text.startswith("thread 0; thread 1; ")
    assert text.endswith("it has served 'f3' of rank 1 for 1 s; and 12 more")


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ({7: 1}, "1 message is waiting to be received from rank 1: 1 with tag 7"),
        ({9: 2, 7: 1}, "3 messages are waiting to be received from rank 1: 1 with tag 7, 2 with"),
    ],
)
def test_messages_that_wait_to_be_received_are_counted(tags, text):
    late = DeadlineExceededError(1.0, waiting_for=[1])
    explain_unreceived({1: tags}.__getitem__, late)
    assert text in str(late)


def test_an_answer_that_says_nothing_has_no_text_and_no_answer_an_empty_one():
    assert text_of(Answer(), 2) is None
    assert text_of(None, 2) == ""


def test_only_the_rank_that_is_waited_for_hears_that_the_two_wait_for_each_other():
    answer = Answer(places=("somewhere",), blocked_on=[1])
    assert text_of(answer, 1).startswith("it waits for the rank that asks")
    assert text_of(answer, 2) == "somewhere"


def test_calls_that_wait_for_a_worker_are_counted_and_the_oldest_is_told():
    waiting = [replace(call(n, workers=2), age=float(n)) for n in range(1, 4097)]
    answer = list_calls([[call(0), *waiting[:1000]], [], waiting[1000:]])
    assert (len(answer.calls), answer.queued) == (3, 4096)
    told = "it has served 'f0' of rank 1 for 1 s; 4096 calls wait for one of 2 workers, up to 4"
    assert text_of(answer, 2).startswith(told)
    alone = list_calls([[replace(waiting[0], workers=1)]])
    assert text_of(alone, 2) == "1 call waits for the one worker, up to 1 s now"


def test_described_calls_come_back_with_what_they_need():
    needs = tuple(Key(0, 1, n) for n in range(16))
    other = call(5, doing="waits for rank 2 'g'", needs=(Key(2, 0, 9),), wait=3)
    calls = [call(n, workers=16, doing="waits", needs=needs) for n in range(900)] + [other]
    answer = fit(describe_calls(calls))
    assert len(pack(answer)) <= MAX_ANSWER_NBYTES
    assert calls_of(received(answer), 0, range(3)) == {each.key: each for each in calls}


def test_more_calls_than_fit_are_left_out():
    answer = fit(describe_calls([call(n, doing="x" * 500) for n in range(8192)]))
    assert len(pack(answer)) <= MAX_ANSWER_NBYTES
    assert len(answer.calls) > 50


@pytest.mark.parametrize(
    "answer",
    [
        Answer(places=("\U0001f600" * 500,) * 10_000),
        Answer(needs=(Key(1, 1, 2**63),) * 100_000),
        Answer(calls=(call(1, needs=(Key(1, 1, 2**63),) * 100_000),)),
    ],
)
def test_no_answer_is_too_long_to_be_sent(answer):
    assert len(pack(fit(answer))) <= MAX_ANSWER_NBYTES


def test_a_question_names_a_limited_number_of_calls():
    asked = tuple(Key(2**31, 2**31, 2**63 + n) for n in range(100_000))
    packed = pack(Question(1, 2, calls=asked))
    assert len(packed) < MAX_MEMBER_NBYTES / 2
    assert unpack(bytearray(packed)).calls == asked[:4096]


def test_a_rank_describes_only_its_own_calls_which_need_calls_of_ranks_that_there_are():
    own = Answer(calls=(call(1, needs=(Key(2, 0, 1),)),))
    assert calls_of(own, 0, range(3)) is not None
    assert calls_of(own, 1, range(3)) is None
    assert calls_of(own, 0, range(2)) is None
    assert calls_of(Answer(calls=(call(1, workers=1),), needs=(Key(7, 0, 1),)), 0, range(3)) is None


def test_what_a_rank_says_of_its_calls_may_be_printed():
    hostile = replace(call(1), name="f\x1b[2J", doing="x\n" * 10_000)
    told = calls_of(received(Answer(calls=(hostile,))), 0, range(3))[hostile.key]
    assert told.name == "f\\x1b[2J"
    assert told.doing.isprintable()
    assert len(told.doing) <= 500


def test_needs_without_end_count_as_none():
    endless = Answer(calls=(call(1, workers=1),), needs=(Key(0, 1, 2),) * 5000)
    assert calls_of(endless, 0, range(3))[Key(0, 1, 1)].needs == ()
