"""The coordinator: who is let in, who is told what, and when."""

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rankwire.clock import REAL_TIME
from rankwire.errors import ChannelClosedError, PeerLostError, RendezvousError
from rankwire.links.acceptor import Acceptor
from rankwire.links.connection import Connection
from rankwire.rendezvous import coordinator as coordinator_module
from rankwire.rendezvous import reports
from rankwire.rendezvous.coordinator import Coordinator
from rankwire.rendezvous.reports import Told
from rankwire.rendezvous.runtime_dir import host_id
from rankwire.transports.byte_stream import wait_for
from rankwire.wire.control_messages import (
    DEFAULT_PATIENCE,
    Answer,
    Failed,
    Fallen,
    Gone,
    Join,
    Joined,
    Key,
    Known,
    Member,
    Notice,
    Question,
    Waiting,
    World,
    pack,
    unpack,
)
from rankwire.wire.frames import Channel
from rankwire.wire.handshake import Hello, Purpose, Status, job_id
from rankwire.wire.keys import rank_key, unwrap
from real_time import Deadline
from worlds import PATIENCE, SECRET, Running, eventually


def member(rank: int, pid: int | None = None) -> Member:
    pid = 1000 + rank if pid is None else pid
    return Member(rank, pid, "127.0.0.1", 4000 + rank, "", host_id())


def without_keys(world: World) -> World:
    return msgspec.structs.replace(world, keys=b"")


def key_of(rank: int) -> bytes:
    return rank_key(SECRET, rank)


def hello(rank: int, world_size: int) -> Hello:
    return Hello(Purpose.JOIN, job_id("test"), 0, world_size, rank, 0)


class Meeting:
    """A coordinator with a real acceptor, and the far ends of its control connections."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.worlds: list[World] = []
        self.gone: list[Gone] = []
        self.doing: list[tuple[int, Answer]] = []
        self.answers: list[Answer] = []
        self.told_before_formed: list[int] = []
        self._members: list[tuple[int, Connection]] = []
        self._backlog: dict[Connection, list[Any]] = {}
        self.acceptor = Acceptor(None, REAL_TIME, key=b"")  # nobody dials here
        self.coordinator = Coordinator(
            member(0),
            world_size,
            self.acceptor,
            key_of=key_of,
            told=Told(
                on_formed=self._formed,
                on_gone=self.gone.append,
                on_doing=lambda rank, doing: self.doing.append((rank, doing)),
                on_question=lambda q: Answer(q.number, q.asker, places=("rank 0",)),
                on_answer=self.answers.append,
            ),
        )
        self.acceptor.start()

    def _formed(self, world: World) -> None:
        self.told_before_formed = [
            rank
            for rank, member in self._members
            if member.fileno() >= 0 and wait_for(member.stream.sock, select.POLLIN, 0.0)
        ]
        self.worlds.append(world)

    def on_thread(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call where the acceptor would."""
        done = threading.Event()
        result: list[Any] = []

        def act() -> None:
            result.append(action(*args))
            done.set()

        self.acceptor.call_soon(act)
        assert done.wait(PATIENCE), "the acceptor's thread has died or hangs"
        return result[0]

    def admit(self, rank: int, world_size: int | None = None) -> tuple[Status, int]:
        return self.on_thread(self.coordinator.admit, hello(rank, world_size or self.world_size))

    def enter(self, rank: int) -> Connection:
        """Connect as ``rank`` without a word."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        far = Connection(theirs, peer=0, max_nbytes=1 << 20, clock=REAL_TIME)
        self._members.append((rank, far))
        self.on_thread(self.coordinator.enter, rank, ours, None)
        return far

    def join(self, rank: int) -> Connection:
        """Connect as ``rank`` and say so."""
        connection = self.enter(rank)
        say(connection, Join(member(rank)))
        return connection

    def hear(self, connection: Connection) -> Any:
        """Return the next message to a member."""
        heard = self._backlog.setdefault(connection, [])
        deadline = Deadline(PATIENCE)
        while not heard:
            heard += [unpack(frame.payload) for frame in connection.read(deadline)]
            assert not deadline.expired, "it was told nothing"
        return heard.pop(0)

    def hear_until(self, connection: Connection, kind: type) -> Any:
        """Return the next message of a kind."""
        while not isinstance(message := self.hear(connection), kind):
            pass
        return message

    def close(self) -> None:
        self.acceptor.close()
        self.coordinator.close()
        for _, connection in self._members:
            connection.close()


def say(connection: Connection, message: Any) -> None:
    payload = message if isinstance(message, bytes) else pack(message)
    connection.send((0, Channel.CONTROL, 0), ([payload], len(payload)), Deadline(PATIENCE))


@pytest.fixture
def meet():
    with contextlib.ExitStack() as stack:

        def make(world_size: int) -> Meeting:
            meeting = Meeting(world_size)
            stack.callback(meeting.close)
            return meeting

        yield make


# -- who is let in


def test_every_rank_but_0_is_welcome_once(meet):
    meeting = meet(3)
    assert meeting.admit(1) == meeting.admit(2) == (Status.WELCOME, 0)


def test_another_world_size_is_refused_with_the_right_one(meet):
    meeting = meet(3)
    assert meeting.admit(1, 4) == (Status.WRONG_WORLD_SIZE, 3)
    assert meeting.admit(1, 2) == (Status.WRONG_WORLD_SIZE, 3)


def test_a_second_rank_0_is_refused_with_the_process_of_the_first(meet):
    assert meet(3).admit(0) == (Status.DUPLICATE_RANK, 1000)


@pytest.mark.parametrize("rank", [3, 4, 2**32 - 1])
def test_a_rank_outside_the_world_is_refused(meet, rank):
    assert meet(3).admit(rank) == (Status.INVALID_RANK, 3)


def test_a_duplicate_is_refused_with_the_process_of_the_holder(meet, caplog):
    meeting = meet(3)
    first = meeting.join(1)
    assert meeting.hear(first) == Waiting([2])
    assert meeting.admit(1) == (Status.DUPLICATE_RANK, 1001)
    assert "a second process says that it is rank 1; process 1001 was first" in caplog.text


def test_a_place_is_taken_even_before_its_holder_has_said_where_it_listens(meet):
    meeting = meet(3)
    meeting.enter(1)
    assert meeting.admit(1) == (Status.DUPLICATE_RANK, 0)


def test_nobody_is_welcome_once_the_world_has_formed(meet):
    meeting = meet(3)
    one, two = meeting.join(1), meeting.join(2)
    for connection in (one, two):
        meeting.hear_until(connection, World)
    two.close()
    eventually(lambda: meeting.gone)
    assert meeting.admit(2) == (Status.NOT_EXPECTED, 0)
    assert meeting.admit(1) == (Status.DUPLICATE_RANK, 1001)


# -- forming


def test_everybody_present_is_told_who_is_missing(meet):
    meeting = meet(4)
    two = meeting.join(2)
    assert meeting.hear(two) == Waiting([1, 3])
    three = meeting.join(3)
    assert meeting.hear(two) == meeting.hear(three) == Waiting([1])


def test_those_present_are_told_of_many_joins_at_once(meet, monkeypatch):
    """At most one message a second; one for each join would be half a million for 1,000 ranks."""
    monkeypatch.setattr(coordinator_module, "_WAITING_EVERY", 3600.0)
    meeting = meet(60)
    first = meeting.join(1)
    assert meeting.hear(first) == Waiting(list(range(2, 60)))
    for rank in range(2, 50):
        assert meeting.hear(meeting.join(rank)) == Waiting(list(range(rank + 1, 60)))
    meeting.on_thread(meeting.coordinator._tell_missing)
    meeting.on_thread(meeting.coordinator._tell_missing)
    assert meeting.hear(first) == Waiting(list(range(50, 60)))
    assert not wait_for(first.stream.sock, select.POLLIN, 0.0), "nothing has changed since"


def test_all_get_the_same_world_in_rank_order_whatever_the_order_of_joining(meet):
    meeting = meet(4)
    connections = [meeting.join(rank) for rank in (3, 1, 2)]
    worlds = [without_keys(meeting.hear_until(connection, World)) for connection in connections]
    assert worlds == [without_keys(meeting.worlds[0])] * 3
    assert worlds[0].members == [member(rank) for rank in range(4)]
    assert 0 < worlds[0].epoch < 2**32


def test_every_two_ranks_are_handed_a_key_of_their_own_and_nobody_else_can_read_it(meet):
    meeting = meet(4)
    connections = [meeting.join(rank) for rank in (1, 2, 3)]
    worlds = [meeting.hear_until(connection, World) for connection in connections]
    wrapped = [world.keys for world in (*meeting.worlds, *worlds)]
    keys = [unwrap(key_of(rank), wrapped[rank], rank, 4) for rank in range(4)]
    assert all(keys[a][b] == keys[b][a] for a, b in itertools.combinations(range(4), 2))
    assert len({key for of_one in keys for key in of_one.values()}) == 6
    for rank, other in itertools.permutations(range(4), 2):
        guessed = unwrap(key_of(other), wrapped[rank], rank, 4)
        assert not set(guessed.values()) & set(keys[rank].values())


def test_a_world_that_no_socket_takes_at_once_arrives(meet):
    """As that of 400 ranks between hosts."""
    ranks = range(1, 64)
    meeting = meet(64)
    connections = [meeting.enter(rank) for rank in ranks]
    reading = [Running(meeting.hear_until, connection, World) for connection in connections]
    for rank, connection in zip(ranks, connections, strict=True):
        if rank == 63:
            # Who is missing was told to all, in sockets that had room for it.
            eventually(lambda: len(meeting.coordinator._roster.members) == 63)
            for near in (1, 2):
                sock = meeting.coordinator.watch.controls[near].stream.sock
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        say(connection, Join(msgspec.structs.replace(member(rank), host="h" * 200)))
    assert {len(each.result().members) for each in reading} == {64}
    assert meeting.gone == []


def test_two_worlds_have_different_epochs(meet):
    epochs = set()
    for _ in range(2):
        meeting = meet(2)
        meeting.join(1)
        meeting.coordinator.wait_formed(Deadline(PATIENCE))
        epochs.add(meeting.worlds[0].epoch)
    assert len(epochs) == 2


def test_rank_0_knows_its_peers_before_any_other_rank_can_dial_it(meet):
    meeting = meet(2)
    one = meeting.join(1)
    meeting.hear_until(one, World)
    assert len(meeting.worlds) == 1
    assert meeting.told_before_formed == []


def test_rank_0_goes_on_when_all_have_joined(meet):
    meeting = meet(2)
    waiting = Running(meeting.coordinator.wait_formed, Deadline(PATIENCE))
    one = meeting.enter(1)
    assert not waiting.done
    say(one, Join(member(1)))
    waiting.result()
    assert isinstance(meeting.hear(one), World), "told before rank 0 goes on"


def test_a_rank_that_hangs_up_frees_its_place_and_can_come_back(meet):
    meeting = meet(3)
    first = meeting.join(1)
    assert meeting.hear(first) == Waiting([2])
    first.close()
    eventually(lambda: meeting.admit(1) == (Status.WELCOME, 0))
    again, two = meeting.join(1), meeting.join(2)
    assert meeting.hear_until(again, World).epoch == meeting.hear_until(two, World).epoch
    assert meeting.gone == []


def test_a_rank_that_joins_again_and_again_is_called_back_once_at_a_time(meet, monkeypatch):
    """Each try has a thread and a socket for seconds, if nobody answers."""
    tries = []
    monkeypatch.setattr(
        "rankwire.rendezvous.reachability.call_back",
        lambda member, tell, clock: tries.append((member.pid, tell)),
    )
    meeting = meet(2)
    for pid in range(5):
        connection = meeting.enter(1)
        far = msgspec.structs.replace(member(1, pid), host_id="elsewhere")
        say(connection, Join(far))
        eventually(lambda: 1 in meeting.coordinator._joining)
        if pid < 4:
            connection.close()
            eventually(lambda: 1 not in meeting.coordinator.watch.controls)
    assert [pid for pid, _ in tries] == [0]
    tries[0][1]("nobody answers")  # of the first, which is gone
    eventually(lambda: len(tries) == 2)
    assert tries[1][0] == 4
    tries[1][1]("")
    assert meeting.hear_until(connection, World).members[1].pid == 4


def test_the_others_are_told_when_a_rank_hangs_up_while_forming(meet):
    """Otherwise their own timeout names the wrong ranks."""
    meeting = meet(4)
    one, two = meeting.join(1), meeting.join(2)
    while meeting.hear(one) != Waiting([3]):
        pass
    two.close()
    eventually(lambda: meeting.admit(2) == (Status.WELCOME, 0))
    assert meeting.hear(one) == Waiting([2, 3])


@pytest.mark.parametrize(
    "words",
    [
        Waiting([]),
        Gone(2, "", orderly=True),
        Join(member(2)),
        b"no message at all",
        b"",
    ],
    ids=["not its part", "denunciation", "another rank", "garbage", "nothing"],
)
def test_a_rank_that_says_anything_but_its_name_loses_its_place(meet, words):
    meeting = meet(3)
    one = meeting.enter(1)
    say(one, words)
    eventually(lambda: meeting.admit(1) == (Status.WELCOME, 0))
    with pytest.raises((PeerLostError, ChannelClosedError)):
        one.read(Deadline(PATIENCE))
    again, two = meeting.join(1), meeting.join(2)
    assert meeting.hear_until(again, World).epoch == meeting.hear_until(two, World).epoch


def test_a_broken_frame_costs_only_the_rank_that_sent_it(meet):
    meeting = meet(3)
    one = meeting.enter(1)
    one.stream.sock.send(b"\xff" * 64)
    eventually(lambda: meeting.admit(1) == (Status.WELCOME, 0))
    again, two = meeting.join(1), meeting.join(2)
    assert meeting.hear_until(again, World).epoch == meeting.hear_until(two, World).epoch


# -- failing to form


def test_a_missing_rank_is_named_to_rank_0_and_to_all_others(meet):
    meeting = meet(4)
    one = meeting.join(1)
    with pytest.raises(RendezvousError) as caught:
        meeting.coordinator.wait_formed(Deadline(0.05))
    assert caught.value.missing == [2, 3]
    assert "0.05 s" in str(caught.value)
    failed = meeting.hear_until(one, Failed)
    assert failed.missing == [2, 3]
    assert "0.05 s" in failed.reason


def test_a_rank_that_connected_but_never_said_who_it_is_counts_as_missing(meet):
    meeting = meet(3)
    meeting.enter(1)
    with pytest.raises(RendezvousError) as caught:
        meeting.coordinator.wait_formed(Deadline(0.05))
    assert caught.value.missing == [1, 2]


def test_nobody_joins_a_world_that_has_failed(meet):
    meeting = meet(3)
    with pytest.raises(RendezvousError):
        meeting.coordinator.wait_formed(Deadline(0.0))
    assert meeting.admit(1)[0] is not Status.WELCOME
    late = meeting.enter(1)
    say(late, Join(member(1)))
    meeting.on_thread(lambda: None)
    assert meeting.worlds == []


def test_the_missing_are_logged_now_and_then(meet, caplog, monkeypatch):
    monkeypatch.setattr(coordinator_module, "_REPORT_EVERY", 0.02)
    meeting = meet(3)
    meeting.join(2)
    with pytest.raises(RendezvousError):
        meeting.coordinator.wait_formed(Deadline(0.2))
    lines = [record.getMessage() for record in caplog.records]
    assert any("waiting for rank 1 (" in line for line in lines)
    assert len(lines) <= 11


# -- afterwards


@pytest.mark.parametrize("orderly", [True, False])
def test_who_has_gone_and_how_is_reported_to_rank_0_and_to_all_others(meet, orderly):
    meeting = meet(4)
    connections = {rank: meeting.join(rank) for rank in (1, 2, 3)}
    for connection in connections.values():
        meeting.hear_until(connection, World)
    if orderly:
        connections[2].farewell(Deadline(PATIENCE))
    connections[2].close()
    told = [meeting.hear(connections[rank]) for rank in (1, 3)]
    assert told == meeting.gone * 2
    assert (told[0].rank, told[0].orderly) == (2, orderly)
    assert told[0].reason


def test_every_death_is_reported_once(meet):
    meeting = meet(4)
    connections = {rank: meeting.join(rank) for rank in (1, 2, 3)}
    for connection in connections.values():
        meeting.hear_until(connection, World)
    connections[1].close()
    connections[2].close()
    assert {meeting.hear(connections[3]).rank for _ in range(2)} == {1, 2}
    eventually(lambda: len(meeting.gone) == 2)
    meeting.on_thread(lambda: None)
    assert sorted(gone.rank for gone in meeting.gone) == [1, 2]


def test_a_member_that_takes_nothing_does_not_keep_the_others_from_being_told(meet):
    meeting = meet(4)
    connections = {rank: meeting.join(rank) for rank in (1, 2, 3)}
    for connection in connections.values():
        meeting.hear_until(connection, World)
    stuffed = meeting.coordinator.watch.controls[1]
    with contextlib.suppress(BlockingIOError):
        while True:
            stuffed.stream.sock.send(b"\0" * 4096)
    connections[2].close()
    assert meeting.hear(connections[3]).rank == 2
    # As good as gone itself, and said so.
    assert meeting.hear(connections[3]).rank == 1


def test_who_leaves_or_falls_at_the_same_moment_as_the_coordinator_is_still_told_of(meet):
    meeting = meet(5)
    connections = {rank: meeting.join(rank) for rank in (1, 2, 3, 4)}
    for connection in connections.values():
        meeting.hear_until(connection, World)
    meeting.acceptor.close()
    connections[2].farewell(Deadline(PATIENCE))
    connections[2].close()
    say(connections[3], Fallen("it raised ValueError", "a traceback"))
    connections[4].close()
    meeting.coordinator.close(Fallen("so did rank 0", ""))
    told = [meeting.hear(connections[1]) for _ in range(4)]
    assert [(gone.rank, gone.orderly) for gone in told] == [
        (2, True),
        (3, False),
        (4, False),
        (0, False),
    ]
    assert told[1].reason == "it raised ValueError"


def test_a_coordinator_that_a_member_has_given_up_tells_all_others_and_blames_nobody(meet):
    meeting = meet(4)
    connections = {rank: meeting.join(rank) for rank in (1, 2, 3)}
    for connection in connections.values():
        meeting.hear_until(connection, World)
    given_up = Gone(0, "it was silent", silent=True)

    def give_up() -> None:  # while the coordinator does nothing else, and for long
        meeting.coordinator.watch._silence._judged -= DEFAULT_PATIENCE.fail_after
        for rank in (1, 2):
            say(connections[rank], given_up)
            connections[rank].close()

    meeting.on_thread(give_up)
    assert meeting.hear(connections[3]) == given_up
    with pytest.raises(ChannelClosedError):
        meeting.hear(connections[3])
    assert meeting.gone == [given_up]


def test_a_coordinator_that_was_never_silent_does_not_believe_a_member_that_says_so(meet):
    meeting = meet(4)
    connections = {rank: meeting.join(rank) for rank in (1, 2, 3)}
    for connection in connections.values():
        meeting.hear_until(connection, World)
    say(connections[1], Gone(0, "it was silent", silent=True))
    told = [meeting.hear_until(connections[rank], Gone) for rank in (2, 3)]
    assert told == meeting.gone * 2
    assert (told[0].rank, told[0].orderly, told[0].silent) == (1, False, False)
    say(connections[2], Fallen("it raised", ""))
    assert meeting.hear_until(connections[3], Gone).rank == 2, "the world stands"


def test_a_rank_joins_once(meet):
    """Each time, the coordinator would call back on a thread of its own."""
    meeting = meet(3)
    one = meeting.join(1)
    assert meeting.hear(one) == Waiting([2])
    say(one, Join(member(1)))
    with pytest.raises((PeerLostError, ChannelClosedError)):
        meeting.hear(one)
    eventually(lambda: meeting.admit(1) == (Status.WELCOME, 0))


def test_closing_says_farewell(meet):
    meeting = meet(2)
    one = meeting.join(1)
    meeting.hear_until(one, World)
    meeting.acceptor.close()
    meeting.coordinator.close()
    with pytest.raises(ChannelClosedError, match="rank 0 has left"):
        one.read(Deadline(PATIENCE))


# -- coming back


def formed(meeting: Meeting) -> list[Connection]:
    members = [meeting.join(rank) for rank in range(1, meeting.world_size)]
    for connection in members:
        meeting.hear_until(connection, World)
    return members


def lose(meeting: Meeting, rank: int, connection: Connection) -> None:
    connection.close()
    eventually(lambda: rank in [gone.rank for gone in meeting.gone])


def is_told_nothing(connection: Connection, kind: type) -> bool:
    frames = connection.read(Deadline(0.1))
    return not any(isinstance(unpack(frame.payload), kind) for frame in frames)


def test_a_lost_rank_is_welcome_only_after_its_new_process_was_started(meet):
    meeting = meet(3)
    one, _ = formed(meeting)
    assert meeting.admit(1) == (Status.DUPLICATE_RANK, 1001)
    lose(meeting, 1, one)
    assert meeting.admit(1) == (Status.NOT_EXPECTED, 0)
    meeting.on_thread(meeting.coordinator.expect_again, 1)
    assert meeting.admit(1) == (Status.WELCOME, 0)
    assert meeting.admit(2)[0] == Status.DUPLICATE_RANK
    meeting.enter(1)
    assert meeting.admit(1)[0] == Status.DUPLICATE_RANK


def test_a_rank_that_is_back_is_told_the_world_once_all_members_know_it(meet):
    meeting = meet(4)
    one, two, three = formed(meeting)
    lose(meeting, 1, one)
    meeting.on_thread(meeting.coordinator.expect_again, 1)
    back = meeting.join(1)
    for member_of_it in (two, three):
        joined = meeting.hear_until(member_of_it, Joined)
        assert joined.member.rank == 1
    say(two, Known(1, 0))
    assert is_told_nothing(back, World)
    say(three, Known(1, 0))
    world = meeting.hear_until(back, World)
    assert world.late == [1]
    assert world.epoch == meeting.worlds[0].epoch


def test_a_member_that_dies_meanwhile_is_not_waited_for_and_is_told_as_gone(meet):
    meeting = meet(4)
    one, two, three = formed(meeting)
    lose(meeting, 1, one)
    meeting.on_thread(meeting.coordinator.expect_again, 1)
    back = meeting.join(1)
    for connection in (two, three):
        meeting.hear_until(connection, Joined)
    say(two, Known(1, 0))
    three.close()
    meeting.hear_until(back, World)
    assert meeting.hear_until(back, Gone).rank == 3


def test_two_ranks_come_back_one_after_the_other(meet):
    meeting = meet(4)
    one, two, three = formed(meeting)
    for rank, connection in ((1, one), (2, two)):
        lose(meeting, rank, connection)
        meeting.on_thread(meeting.coordinator.expect_again, rank)
    first, second = meeting.join(1), meeting.join(2)
    assert meeting.hear_until(three, Joined).member.rank == 1
    assert is_told_nothing(three, Joined)
    say(three, Known(1, 0))
    meeting.hear_until(first, World)
    assert meeting.hear_until(first, Gone).rank == 2  # as it is for now
    for connection in (first, three):
        assert meeting.hear_until(connection, Joined).member.rank == 2
        say(connection, Known(2, 0))
    assert meeting.hear_until(second, World).late == [1, 2]


def test_a_connection_that_outlives_its_process_does_not_keep_its_place(meet):
    """A child of the rank may hold it open."""
    meeting = meet(3)
    formed(meeting)
    meeting.on_thread(meeting.coordinator.expect_again, 1)
    assert [gone.rank for gone in meeting.gone] == [1]
    assert "its process has ended" in meeting.gone[0].reason
    assert meeting.admit(1) == (Status.WELCOME, 0)


def test_a_rank_that_is_back_may_fall_again_and_is_judged_by_its_silence(meet):
    meeting = meet(3)
    one, two = formed(meeting)
    say(one, Fallen("it raised", ""))
    meeting.hear_until(two, Gone)
    meeting.on_thread(meeting.coordinator.expect_again, 1)
    back = meeting.join(1)
    meeting.hear_until(two, Joined)
    say(two, Known(1, 0))
    meeting.hear_until(back, World)
    say(back, Fallen("and again", ""))
    assert meeting.hear_until(two, Gone).reason == "and again"


# -- what a rank does for which others wait


def test_who_was_waited_for_is_asked_before_anyone_hears_of_the_fall(meet):
    meeting = meet(4)
    one, two, three = formed(meeting)
    say(one, Fallen("its time was up", "", waited_for=[2, 99, -1, 1]))
    question = meeting.hear_until(two, Question | Answer)
    assert isinstance(question, Question)
    assert question.wants_stacks
    gone = meeting.hear_until(two, Gone)
    assert gone.waited_for == [2, 1]  # ranks that there are
    answer = Answer(question.number, question.asker, stacks="MainThread:", waits_for=[3, 2])
    for _ in range(2):  # the second one is dropped
        say(two, answer)
    assert isinstance(meeting.hear_until(three, Question), Question)
    say(two, Notice(0, 1, "barrier()", "asking"))
    meeting.hear_until(two, Notice)
    assert meeting.doing == [(2, answer)]


# -- questions between ranks


def test_a_question_is_passed_on_with_its_true_asker_and_the_answer_comes_back(meet):
    meeting = meet(4)
    one, two, three = formed(meeting)
    say(one, Question(7, 2, asker=3, service=5, calls=(Key(2, 1, 99),)))
    question = meeting.hear_until(two, Question | Answer)
    assert question == Question(7, 2, asker=1, service=5, calls=(Key(2, 1, 99),))
    say(two, Answer(7, question.asker, places=("in the program",)))
    assert meeting.hear_until(one, Question | Answer).places == ("in the program",)
    say(three, Question(8, 3, asker=2))  # the next that it hears is its own question
    assert meeting.hear_until(three, Question | Answer) == Question(8, 3, asker=3)


@pytest.mark.parametrize("answer", [Answer(8, 1), Answer(7, 2), Answer(7, 0), Answer(7, -1)])
def test_an_answer_to_a_question_of_no_rank_is_dropped(meet, answer):
    meeting = meet(4)
    one, two, three = formed(meeting)
    say(one, Question(7, 2))
    meeting.hear_until(two, Question | Answer)
    say(three, Answer(7, 1, places=("it was not asked",)))
    say(two, answer)
    say(two, Answer(7, 1, places=("this is it",)))
    assert meeting.hear_until(one, Question | Answer).places == ("this is it",)
    assert meeting.doing == meeting.answers == meeting.gone == []


def test_the_coordinators_own_rank_asks_and_answers_by_function_calls(meet):
    meeting = meet(2)
    (one,) = formed(meeting)
    say(one, Question(3, 0))
    assert meeting.hear_until(one, Question | Answer) == Answer(3, 1, places=("rank 0",))
    meeting.on_thread(meeting.coordinator.watch.take_report, 0, Question(4, 1))
    assert meeting.hear_until(one, Question | Answer) == Question(4, 1, asker=0)
    say(one, Answer(4, 0))
    eventually(lambda: meeting.answers == [Answer(4, 0)])


def test_a_flood_of_questions_is_bounded(meet):
    meeting = meet(3)
    one, two = formed(meeting)
    for number in range(1000):
        say(one, Question(number, 2))
    say(one, Question(1000, 0))  # taken after all others
    meeting.hear_until(one, Answer)
    say(two, Question(0, 2))
    heard = iter(lambda: meeting.hear_until(two, Question | Answer), Question(0, 2, asker=2))
    numbers = [question.number for question in heard]
    assert numbers == [*range(64)]
    for number in numbers:
        say(two, Answer(number, 1))
    assert [meeting.hear_until(one, Question | Answer).number for _ in numbers] == numbers
    say(one, Question(2000, 2))
    assert meeting.hear_until(two, Question | Answer).number == 2000


def test_questions_that_nobody_answered_make_room_after_a_while(meet, monkeypatch):
    monkeypatch.setattr(reports, "_OPEN_FOR", 0.0)
    meeting = meet(3)
    one, two = formed(meeting)
    for number in range(200):
        say(one, Question(number, 2))
        assert meeting.hear_until(two, Question | Answer).number == number


def test_nobody_is_told_of_a_question_to_a_rank_that_is_not_there(meet):
    meeting = meet(3)
    one, _ = formed(meeting)
    for rank in (99, -7, 2**62):
        say(one, Question(1, rank))
    say(one, Question(2, 0))
    assert meeting.hear_until(one, Question | Answer).number == 2


def test_a_rank_that_reads_nothing_for_a_while_misses_notices_and_is_not_lost(meet):
    """Another rank fails in thousands of operations; what the socket does not take is left out."""
    meeting = meet(3)
    failing, busy = meeting.join(1), meeting.join(2)
    meeting.hear_until(failing, World)
    for number in range(5000):
        say(failing, Notice(0, number, "barrier()", "failed", "text " * 20, culprit=1))
    say(failing, Notice(0, 5000, "barrier()", "asking", epoch=5000))
    assert meeting.hear_until(failing, Notice).state == "missing", "all reports are processed"
    meeting.hear_until(busy, World)
    assert meeting.hear(busy).sequence == 0
    assert meeting.gone == []
