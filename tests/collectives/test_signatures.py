"""What type checkers are told of a collective agrees with the function."""

import inspect
import re
from typing import get_overloads

import pytest

import rankwire
from rankwire.collectives import signatures

COLLECTIVES = {
    name: function
    for name, function in ((name, getattr(rankwire, name)) for name in rankwire.__all__)
    if inspect.isfunction(function) and "async_op" in inspect.signature(function).parameters
}


def parameters_of(overload):
    """Return the names of an overload's parameters, with those of its TypedDict."""
    found = inspect.signature(overload).parameters
    named = {name for name in found if name != "how"}
    if "how" in found:
        kind = re.match(r"Unpack\[(\w+)", found["how"].annotation)[1]
        named |= getattr(signatures, kind).__annotations__.keys()
    return named


@pytest.mark.parametrize("name", COLLECTIVES)
def test_type_checkers_know_all_parameters_and_no_others(name):
    real = inspect.signature(COLLECTIVES[name]).parameters.keys()
    told = [parameters_of(overload) for overload in get_overloads(COLLECTIVES[name])]
    assert set().union(*told) == real
    assert all({"backend", "async_op", "timeout"} <= each for each in told)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_result_is_told_blocking_and_in_the_background(name):
    results = [
        inspect.signature(overload).return_annotation
        for overload in get_overloads(COLLECTIVES[name])
    ]
    assert {f"Work[{each}]" for each in results if not each.startswith(("Work", "Any"))} == {
        each for each in results if each.startswith("Work")
    }
