"""What all collectives share: how they are called, and what their errors say."""

import pytest

from rankwire.collectives.sequence import collective
from rankwire.errors import ConfigurationError
from rankwire.testing import simulated_world


@collective
def divide(backend, a, *, b=1):
    """Divide."""
    if b is None:
        raise ConfigurationError("no b")
    if b < 0:
        raise ConfigurationError("negative").during(op="inside", rank=9)
    quotient = a / b
    return f"divide({a}, {b})", lambda x: quotient


@pytest.fixture
def alone():
    with simulated_world(1) as (backend,):
        yield backend


def test_it_returns_what_its_steps_return(alone):
    assert divide(alone, 6, b=2) == 3
    assert (divide.__name__, divide.__doc__) == ("divide", "Divide.")


def test_our_errors_get_operation_and_rank(alone):
    with pytest.raises(ConfigurationError) as caught:
        divide(alone, 1, b=None)
    assert (caught.value.op, caught.value.rank) == ("divide", 0)
    assert str(caught.value) == "no b [op divide, rank 0]"


def test_what_is_known_better_inside_stays(alone):
    with pytest.raises(ConfigurationError) as caught:
        divide(alone, 1, b=-1)
    assert (caught.value.op, caught.value.rank) == ("inside", 9)


def test_other_errors_pass(alone):
    with pytest.raises(ZeroDivisionError):
        divide(alone, 1, b=0)
    assert divide(alone, 6, b=2) == 3


def test_swapped_arguments_are_told():
    with pytest.raises(ConfigurationError, match="of divide is a backend, not int") as caught:
        divide(6, 1, b=None)
    assert (caught.value.op, caught.value.rank) == ("divide", None)


def test_the_group_may_be_given_by_name_as_the_signature_says(alone):
    assert divide(backend=alone, a=6, b=2) == 3
