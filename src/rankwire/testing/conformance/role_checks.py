"""Conformance checks of roles, and of waits for ranks that may come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rankwire.backends.arguments import check_ranks
from rankwire.backends.base import Backend
from rankwire.backends.roles import roles_of_world
from rankwire.backends.sub import SubBackend
from rankwire.errors import ChannelClosedError, InvalidRankError, PeerLostError
from rankwire.rpc.call import current_call
from rankwire.services.rpc_agent import RpcAgent
from rankwire.testing.conformance.tools import agents_of, expect, leave, run_all, until
from rankwire.testing.ranks import MakeWorld

ROLES = ["trainer", "rollout", "rollout"]


@contextmanager
def _named_agents(make_world: MakeWorld) -> Iterator[list[RpcAgent]]:
    with agents_of(make_world, 3) as agents:
        for agent in agents:
            agent.backend.roles = roles_of_world(ROLES, 3)
            agent.register("rank", lambda rank=agent.rank: rank)
            agent.register("count", lambda count: (n for n in range(count)))
        yield agents


def names_stand_for_ranks_in_calls(make_world: MakeWorld) -> None:
    with _named_agents(make_world) as (trainer, *_):
        for rank, name in enumerate(["trainer/0", "rollout/0", "rollout/1"]):
            assert trainer.rpc_sync(name, "rank") == rank
            assert trainer.rpc_async(name, "rank").result() == rank
            assert trainer.to(name).rank() == rank
            assert trainer.to_async(name).rank().result() == rank
            assert list(trainer.stream(name, "count", 3)) == [0, 1, 2]
        assert trainer.to("trainer").rank() == 0  # the one rank of its role


def an_unknown_name_is_refused_with_those_that_exist(make_world: MakeWorld) -> None:
    with _named_agents(make_world) as (trainer, *_):
        for call in (
            partial(trainer.rpc_sync, "rolout/0", "rank"),
            partial(trainer.rpc_async, "rolout/0", "rank"),
            partial(trainer.to, "rolout/0"),
            partial(trainer.to_stream, "rolout/0"),
            partial(trainer.backend.wait_for, "rolout/0"),
            partial(trainer.stop, "rolout/0"),
        ):
            error = expect(InvalidRankError, call)
            assert "there are trainer/0, rollout/0 to rollout/1" in str(error)
        expect(InvalidRankError, partial(trainer.to, "rollout"))  # two ranks


def a_role_stops_serving(make_world: MakeWorld) -> None:
    with _named_agents(make_world) as (trainer, *rollouts):
        assert not rollouts[0].serve(until_lost="trainer", timeout=0.0)
        trainer.stop("rollout")
        assert [trainer.stopped, *(rollout.stopped for rollout in rollouts)] == [False, True, True]


def a_role_stands_for_its_ranks_in_group_calls_pools_and_queues(make_world: MakeWorld) -> None:
    with _named_agents(make_world) as agents:
        trainer = agents[0]
        for agent in agents:
            agent.register("square", lambda number=3: number * number)
        assert trainer.call_all("square", ranks="rollout").values == {1: 9, 2: 9}
        with trainer.map("square", range(5), ranks="rollout", ordered=True) as outcomes:
            assert [outcome.value for outcome in outcomes] == [0, 1, 4, 9, 16]
        with trainer.executor("rollout") as executor:
            assert executor.submit("square", 4).result() == 16
        queue = trainer.queue("q", owner="rollout/1", capacity=1)
        assert queue.owner == 2


def an_error_has_the_name_of_its_peer(make_world: MakeWorld) -> None:
    def fail() -> None:
        call = current_call()
        raise ValueError(f"called by {call and call.src}")

    with _named_agents(make_world) as (trainer, _, last):
        last.register("fail", fail)
        error = expect(ValueError, partial(trainer.rpc_sync, 2, "fail"))
        assert "peer 2 (rollout/1)" in str(error)


def members_of_a_group_keep_their_names(make_world: MakeWorld) -> None:
    with make_world(3) as world:

        def check(backend: Backend) -> None:
            backend.roles = roles_of_world(ROLES, 3)
            if backend.rank != 1:
                group = SubBackend(backend, [0, 2])
                assert dict(group.roles) == {"trainer": (0,), "rollout": (1,)}
                assert group.roles.name_of(1) == "rollout/1"
                assert check_ranks("rollout/1", group.world_size, group.roles) == [1]

        run_all(world, check)


def a_wait_for_a_rank_that_is_up_returns(make_world: MakeWorld) -> None:
    with make_world(2) as (first, second):
        first.wait_for(1, timeout=0.0)
        first.wait_for(0, timeout=0.0)  # itself
        second.wait_for(0)
        error = expect(InvalidRankError, partial(first.wait_for, 2))
        assert (error.op, error.rank) == ("wait_for", 0)


def a_wait_for_a_rank_that_cannot_come_back_raises_at_once(make_world: MakeWorld) -> None:
    with make_world(3) as (first, second, third):
        leave(second, ValueError("broken"))
        until(lambda: first.failure_of(1) is not None)
        lost = expect(PeerLostError, partial(first.wait_for, 1))
        assert (lost.op, lost.rank, lost.peer) == ("wait_for", 0, 1)
        assert "broken" in lost.reason
        leave(third)
        until(lambda: first.failure_of(2) is not None)
        left = expect(ChannelClosedError, partial(first.wait_for, 2))
        assert left.op == "wait_for"
