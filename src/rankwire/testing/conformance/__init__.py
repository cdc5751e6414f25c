"""The conformance suite: what every backend must do, as plain functions.

A check is a function of the modules ``*_checks`` that takes a world maker and nothing else. It
raises ``AssertionError``, and is named after the behaviour it shows. ``check_backend`` runs all of
them; a test runner can run ``CHECKS`` one by one.
"""

from __future__ import annotations

import inspect
from types import ModuleType

from rankwire.testing.conformance import (
    basic_checks,
    call_checks,
    collective_checks,
    concurrency_checks,
    group_checks,
    nested_call_checks,
    peer_checks,
)
from rankwire.testing.conformance.tools import Check
from rankwire.testing.worlds import MakeWorld

__all__ = ["CHECKS", "check_backend"]


def _checks_of(module: ModuleType) -> dict[str, Check]:
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and [*inspect.signature(function).parameters] == ["make_world"]
    }


CHECKS: dict[str, Check] = {
    **_checks_of(basic_checks),
    **_checks_of(peer_checks),
    **_checks_of(group_checks),
    **_checks_of(collective_checks),
    **_checks_of(concurrency_checks),
    **_checks_of(call_checks),
    **_checks_of(nested_call_checks),
}


def check_backend(make_world: MakeWorld) -> None:
    """Run the whole suite.

    Args:
        make_world: Called as ``make_world(world_size, **options)``; gives the ranks' backends, all
            in this process. It must accept the options ``timeout`` and ``max_message_nbytes``.

    Raises:
        AssertionError: A check failed; a note names it.
    """
    for name, check in CHECKS.items():
        try:
            check(make_world)
        except BaseException as error:
            error.add_note(f"in the conformance check {name!r}")
            raise
