"""What a rank may say to the coordinator: the table, row by row."""

import math
from typing import get_args

import pytest

from rankwire.rendezvous import control_protocol as rights
from rankwire.rendezvous.control_protocol import Standing, objection
from rankwire.wire.control_messages import (
    AgentAnswer,
    AgentSays,
    AgentState,
    Answer,
    Beat,
    Failed,
    Fallen,
    Gone,
    Join,
    Joined,
    Known,
    Member,
    Message,
    Notice,
    Patience,
    Question,
    Suspected,
    Waiting,
    World,
)

FORMING = Standing(
    1,
    has_joined=False,
    is_formed=False,
    coordinator=0,
    was_absent=False,
    has_fallen=False,
)
JOINED = FORMING._replace(has_joined=True)
FORMED = JOINED._replace(is_formed=True)
ABSENT = FORMED._replace(was_absent=True)
LAUNCHED = ABSENT._replace(coordinator=-1)
FALLEN = FORMED._replace(has_fallen=True)
EVERYONE = [FORMING, JOINED, FORMED, ABSENT, LAUNCHED, FALLEN]
IN_THE_WORLD = {FORMED, ABSENT, LAUNCHED, FALLEN}


def member(rank):
    return Member(rank, 1, "127.0.0.1", 9, "", "here")


SILENT = {"reason": "it was silent", "silent": True}

ROWS = [
    ("its place", Join(member(1)), {FORMING}),
    ("another's place", Join(member(2)), set()),
    ("short limits", Join(member(1), Patience(0.05, 0.1)), {FORMING}),
    ("limits that nobody can keep", Join(member(1), Patience(1e-9, 1e-9)), set()),
    ("a limit below the shortest", Join(member(1), Patience(0.05, 0.099)), set()),
    ("no time at all", Join(member(1), Patience(0.0, 30.0)), set()),
    ("limits before now", Join(member(1), Patience(-1.0, -1.0)), set()),
    ("limits in the wrong order", Join(member(1), Patience(40.0, 30.0)), set()),
    ("no number", Join(member(1), Patience(math.nan, math.nan)), set()),
    ("no limits", Join(member(1), Patience(math.inf, math.inf)), {FORMING}),
    ("a sign of life", Beat(), set(EVERYONE)),
    ("the silence of others", Beat([(2, 9.0)]), set()),
    ("its own silence", Beat([(1, 9.0)]), set()),
    ("its fall", Fallen("it raised", ""), {FORMED, ABSENT, LAUNCHED}),
    ("whom it knows", Known(2, 1), IN_THE_WORLD),
    ("what it does", Answer(1, 2), IN_THE_WORLD),
    ("that it waits", Notice(0, 3, "barrier()"), IN_THE_WORLD),
    (
        "that it waits in a group",
        Notice(7, 3, "barrier()", members=(1, 4)),
        IN_THE_WORLD,
    ),
    ("that it waits in a group of two of itself", Notice(7, 3, "", members=(1, 1)), set()),
    ("that it waits in a group of others", Notice(7, 3, "barrier()", members=(2, 4)), set()),
    ("who is missing in a group", Notice(0, 3, "", "missing", missing=(2,)), set()),
    (
        "what its agents do",
        AgentSays(5, 1, AgentState.OPEN),
        IN_THE_WORLD,
    ),
    ("an answer to agents", AgentAnswer(1), set()),
    ("who is back", Joined(member(2)), set()),
    ("that it is back itself", Joined(member(1)), set()),
    ("a question", Question(1, 2), IN_THE_WORLD),
    ("rank 0 was silent", Gone(0, **SILENT), {ABSENT}),
    ("the launcher was silent", Gone(-1, **SILENT), {LAUNCHED}),
    ("the coordinator died", Gone(0, "its connection ended"), set()),
    ("the coordinator left", Gone(0, "", orderly=True), set()),
    ("the coordinator left in silence", Gone(0, "", orderly=True, silent=True), set()),
    ("another is gone", Gone(2, "its connection ended"), set()),
    ("another was silent", Gone(2, **SILENT), set()),
    ("another has left", Gone(2, "", orderly=True), set()),
    ("it is itself gone", Gone(1, "I am"), set()),
    ("who is missing", Waiting([2]), set()),
    ("a world", World(7, [member(1)]), set()),
    ("no world", Failed("because I say so", []), set()),
    ("a suspicion", Suspected(2, 9.0), set()),
    ("its own suspicion", Suspected(1, 0.0), set()),
]


@pytest.mark.parametrize(("message", "may"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_who_may_say_it_and_when(message, may):
    assert {by for by in EVERYONE if not objection(message, by)} == may


def test_every_message_has_its_row():
    assert set(rights._RIGHTS) == set(get_args(Message))
    assert {type(row[1]) for row in ROWS} == set(get_args(Message))
