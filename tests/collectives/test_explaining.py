"""Errors that leave a collective say which one it was, and where."""

from types import SimpleNamespace

import pytest

from rankwire.collectives.explaining import explained
from rankwire.errors import ConfigurationError

THIRD = SimpleNamespace(rank=3)


@explained
def add(backend, a, *, b=1):
    """Add."""
    if b is None:
        raise ConfigurationError("no b")
    if b < 0:
        raise ConfigurationError("negative").during(op="inside", rank=9)
    return a / b


def test_what_returns_is_not_touched():
    assert add(THIRD, 6, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")


def test_our_errors_get_operation_and_rank():
    with pytest.raises(ConfigurationError) as caught:
        add(THIRD, 1, b=None)
    assert (caught.value.op, caught.value.rank) == ("add", 3)
    assert str(caught.value) == "no b [op add, rank 3]"


def test_what_is_known_better_inside_stays():
    with pytest.raises(ConfigurationError) as caught:
        add(THIRD, 1, b=-1)
    assert (caught.value.op, caught.value.rank) == ("inside", 9)


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError):
        add(THIRD, 1, b=0)


def test_the_error_about_swapped_arguments_is_not_hidden():
    with pytest.raises(ConfigurationError, match="no b") as caught:
        add(object(), 1, b=None)
    assert (caught.value.op, caught.value.rank) == ("add", None)


def test_the_group_may_be_given_by_name_as_the_signature_says():
    assert add(backend=THIRD, a=6, b=2) == 3
