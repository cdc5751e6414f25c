"""Public objects show what is public: what a user sees who presses Tab after a dot."""

import rlcompleter

import numpy as np
import pytest

import rankwire
from rankwire import DeviceMesh, RpcAgent, SubBackend, current_call
from rankwire.public_dir import PublicDir
from rankwire.testing import in_parallel, simulated_world, tcp_world

FUTURE = {
    "add_done_callback", "cancel", "cancelled", "done", "exception", "result", "running",
    "set_exception", "set_result", "set_running_or_notify_cancel",
}  # fmt: skip
BACKEND = {
    "rank", "world_size", "incarnation", "timeout", "max_message_nbytes", "clock", "security",
    "send", "recv", "recv_into", "recv_any", "send_array", "recv_array", "sendrecv",
    "isend", "irecv", "irecv_into", "isend_array", "irecv_array", "barrier", "roles", "wait_for",
    "alive", "status", "on_peer_lost", "on_peer_joined", "on_peer_suspected", "close", "closed",
}  # fmt: skip
SHOWN = {
    "agent": {
        "backend", "codec", "name", "rank", "timeout", "world_size",
        "register", "register_error", "unregister", "functions", "lookup",
        "rpc_sync", "rpc_async", "stream", "to", "to_async", "to_stream",
        "call_all", "to_all", "as_completed",
        "executor", "map", "queue",
        "activity", "serve", "stop", "stopped", "handle_request", "close",
    },
    "future": {*FUTURE, "deadline", "dst", "name"},
    "call": {"cancelled", "chain", "deadline", "depth", "expired", "name", "origin", "src"},
    "work": {*FUTURE, "description", "wait"},
    "handle": {"done", "source", "wait"},
    "functions of a rank": set(),
    "tcp": {*BACKEND, "address", "link_to"},
    "simulated": {*BACKEND, "create_group", "network"},
    "sub": {*BACKEND, "members", "parent", "to_global", "to_local"},
    "mesh": {
        "coords", "groups_along_dim", "names", "ndim", "rank_of", "ranks_along_dim", "shape",
        "size", "subgroup", "subgroups",
    },
}  # fmt: skip


def shown(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


def public_objects():
    """Yield one of each kind that a user gets hold of, with its name."""
    with tcp_world(2) as tcp, simulated_world(2) as simulated:
        yield "tcp", tcp[0]
        yield "simulated", simulated[0]
        subs = in_parallel([lambda rank=rank: SubBackend(rank, [0, 1]) for rank in simulated])
        yield "sub", subs[0]
        agents = [RpcAgent(backend) for backend in simulated]
        yield "agent", agents[0]
        yield "functions of a rank", agents[0].to(1)
        calls = []
        agents[1].register("note", lambda: calls.append(current_call()))
        future = agents[0].rpc_async(1, "note")
        future.result()
        yield "future", future
        yield "call", calls[0]
        handle = simulated[0].isend(b"x", 1)
        yield "handle", handle
        simulated[1].recv(0)
        handle.wait()
        works = [rankwire.all_reduce(rank, np.ones(2), async_op=True) for rank in simulated]
        yield "work", works[0]
        for work in works:
            work.wait()
        yield "mesh", DeviceMesh([2], 2)
        for agent in agents:
            agent.close()


def test_public_objects_show_what_is_public():
    assert {name: shown(thing) for name, thing in public_objects()} == SHOWN


@pytest.mark.parametrize("cls", [rankwire.TcpBackend, rankwire.RpcFuture, rankwire.Work])
def test_a_class_shows_what_its_objects_do(cls):
    assert not {"close_in_child", "transmit", "on_reply", "call_back"} & {*dir(cls)}


def test_what_is_shown_is_there():
    for _, thing in public_objects():
        for name in shown(thing):
            getattr(thing, name)


def test_the_package_shows_its_public_names():
    names = {name for name in dir(rankwire) if not name.startswith("_")}
    assert names - {"testing", "torch"} == {
        name for name in rankwire.__all__ if not name.startswith("_")
    }
    assert "__doc__" in dir(rankwire)


def completions(name, thing):
    """Return what the prompt of Python offers after a dot; it also looks at the class."""
    found = rlcompleter.Completer({name: thing}).attr_matches(f"{name}.")
    words = {match.removeprefix(f"{name}.").rstrip("()") for match in found}
    return {word for word in words if not word.startswith("_")}  # where there is nothing else


def test_the_prompt_offers_what_is_public():
    for name, thing in public_objects():
        if name != "handle":  # one of a class that is not public itself
            assert completions("thing", thing) == SHOWN[name], name
    offered = completions("rankwire", rankwire)
    assert {"all_reduce", "RpcAgent"} <= offered
    assert not {"TYPE_CHECKING", "numpy", "Any", "import_module"} & offered


class Base(PublicDir):
    _SHOWN = ("shown",)

    def shown(self):
        """A user calls this."""

    def used_within(self):
        """Nobody but the package calls this."""


Base.__module__ = "rankwire.anything"


class UsersOwn(Base):
    def own(self):
        """A user has written this."""


def test_a_class_of_the_users_shows_what_it_adds():
    assert shown(Base()) == {"shown"}
    assert shown(UsersOwn()) == {"shown", "own"}
    with pytest.raises(AttributeError):
        UsersOwn().absent  # noqa: B018
