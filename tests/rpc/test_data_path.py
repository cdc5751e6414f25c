"""The way of a call as docs/data-path.md draws it is the way that a call takes."""

import re
from contextlib import closing
from difflib import unified_diff
from pathlib import Path

import pytest

from rankwire import RpcAgent
from rpc.callee import world_of_two
from rpc.walk import walk_of_a_caller
from worlds import PATIENCE, runtime_folder_of_its_own

PAGE = Path(__file__).parents[2] / "docs" / "data-path.md"
MOST_HOPS = {"caller": 28, "server": 25}
# Some of them meet the standby, or a function that was slow; the plain way is the shortest.
CALLS = 300


def drawn():
    """Return the lines of the drawing without their words, for the caller and for the server."""
    drawing = re.search(r"^```walk\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert drawing, f"{PAGE.name} has no drawing"
    parts = re.split(r"^~~~.*\n", drawing[1], flags=re.MULTILINE)
    assert len(parts) == 3, "the drawing is of a caller, a server, and the caller again"
    before, server, after = (
        [re.sub(r"(?<=\S)  .*", "", line) for line in part.splitlines()] for part in parts
    )
    return {"caller": before + after, "server": server}


@pytest.fixture(scope="module")
def walked():
    """How calls went in a world of two processes, at both ends: the shortest way of each."""
    with runtime_folder_of_its_own(), world_of_two("unix", spin=PATIENCE) as (near, far):
        far.call("eval", "globals().update(server=__import__('rpc.walk').walk.Server(backend))")
        with closing(RpcAgent(near)) as agent:  # the server ends after it
            for _ in range(50):
                agent.rpc_sync(1, "add", 2, 3)
            caller = [walk_of_a_caller(agent) for _ in range(CALLS)]
            server = far.call("eval", "server.walks()")
    assert server
    return {
        side: ["  " * depth + name for depth, name in min(walks, key=len)]
        for side, walks in (("caller", caller), ("server", server))
    }


@pytest.mark.parametrize("side", ["caller", "server"])
def test_the_page_draws_the_way_that_a_call_takes(walked, side):
    difference = unified_diff(
        drawn()[side], walked[side], f"as drawn in docs/{PAGE.name}", f"as the {side} goes", "", "",
        n=100, lineterm="",
    )  # fmt: skip
    assert drawn()[side] == walked[side], "\n".join(["", *difference])


@pytest.mark.parametrize("side", ["caller", "server"])
def test_the_way_of_a_call_is_short(walked, side):
    assert len(walked[side]) <= MOST_HOPS[side], "\n".join(walked[side])


def test_every_step_has_its_words():
    drawing = PAGE.read_text().split("```walk\n")[1].split("```")[0]
    steps = [line for line in drawing.splitlines() if not line.startswith("~~~")]
    assert all(re.fullmatch(r" *\S.*\S  +\S.*", line) for line in steps)
