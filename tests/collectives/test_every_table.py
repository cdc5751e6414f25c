"""Each collective is in every table whose rows show a promise for all of them, and in the pages."""

import inspect
from pathlib import Path

import pytest

import rankwire
from collectives.sums import COLLECTIVES
from faults.meetings import MEETINGS
from random_collectives import KINDS

DOCS = Path(__file__).parents[2] / "docs"
# The forms for objects are built on those for arrays, and those for lists too.
BUILT_ON_OTHERS = ("_object", "_coalesced")
NAMES = [
    name
    for name in rankwire.__all__
    if inspect.isfunction(function := getattr(rankwire, name))
    and "async_op" in inspect.signature(function).parameters
]
ON_ARRAYS = [name for name in NAMES if not name.endswith(BUILT_ON_OTHERS)]


@pytest.mark.parametrize("table", [COLLECTIVES, KINDS, MEETINGS], ids=["sums", "random", "kills"])
@pytest.mark.parametrize("name", ON_ARRAYS)
def test_a_collective_has_a_row(table, name):
    if name == "barrier" and table is COLLECTIVES:
        pytest.skip("a barrier computes nothing")
    assert any(row.split(",")[0].split(" ")[-1].startswith(name) for row in table), sorted(table)


@pytest.mark.parametrize("page", ["collectives.md", "collective-algorithms.md"])
@pytest.mark.parametrize("name", ON_ARRAYS)
def test_a_collective_is_on_the_page(page, name):
    assert name in (DOCS / page).read_text()
