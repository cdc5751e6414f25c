"""The functions of a rank: every attribute is one, and nothing else."""

import copy
import pickle

import pytest

from rankwire.rpc.proxies import AsyncRemoteRank, RemoteRank

KINDS = [RemoteRank, AsyncRemoteRank]


def noted(kind):
    """Return the functions of a rank, and the calls that are made of them."""
    calls = []

    def make_call(function, args, kwargs):
        calls.append((function, args, kwargs))
        return len(calls)

    return kind(make_call, "rank 1"), calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_called_by_attribute_by_name_or_as_itself(kind):
    functions, calls = noted(kind)
    assert functions.add(2, b=3) == 1
    assert functions("add", 2, b=3) == 2
    assert functions(len, 2, b=3) == 3
    assert calls == [(name, (2,), {"b": 3}) for name in ("add", "add", len)]


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_an_object_are_attributes_of_attributes(kind):
    functions, calls = noted(kind)
    functions.server.pull()
    functions.server.replies.newest(1)
    assert [name for name, *_ in calls] == ["server.pull", "server.replies.newest"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["function", "self", "args", "kwargs", "name", "timeout"])
def test_no_keyword_of_a_function_is_taken(kind, name):
    functions, calls = noted(kind)
    functions.f(**{name: 1})
    functions("f", **{name: 1})
    assert calls == [("f", (), {name: 1})] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_no_function_is_hidden_by_an_attribute(kind):
    functions, _ = noted(kind)
    assert not [name for name in dir(functions) if not name.startswith("_")]
    assert not [name for name in dir(functions.add) if not name.startswith("_")]


@pytest.mark.parametrize("kind", KINDS)
def test_what_python_checks_for_by_itself_is_no_function(kind):
    functions, calls = noted(kind)
    for thing in (functions, functions.add):
        assert not hasattr(thing, "_repr_html_")
        with pytest.raises(AttributeError, match="underscore"):
            thing.__wrapped__  # noqa: B018
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            pickle.dumps(thing)
        copy.copy(thing)
    functions("_private", 1)
    assert calls == [("_private", (1,), {})]


def test_repr_tells():
    assert repr(noted(RemoteRank)[0]) == "<functions of rank 1>"
    assert repr(noted(AsyncRemoteRank)[0]) == "<functions of rank 1, asynchronously>"
    assert repr(noted(RemoteRank)[0].a.b) == "<remote function 'a.b'>"
