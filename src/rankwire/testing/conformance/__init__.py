"""The conformance suite: what every backend must do, as plain functions.

A function in the modules ``*_checks`` that takes only a world maker is a check. Its name says what
it shows, and it raises ``AssertionError``. A test runner can run ``CHECKS`` one by one.
"""

from __future__ import annotations

import inspect

from rankwire.testing.conformance import (
    basic_checks,
    call_checks,
    collective_checks,
    group_call_checks,
    group_checks,
    message_checks,
    nested_call_checks,
    pool_checks,
    queue_checks,
    role_checks,
    stream_checks,
)
from rankwire.testing.conformance.tools import Check
from rankwire.testing.ranks import MakeWorld

__all__ = ["CHECKS", "check_backend"]


CHECKS: dict[str, Check] = {
    name: function
    for module in (
        basic_checks,
        message_checks,
        group_checks,
        collective_checks,
        call_checks,
        nested_call_checks,
        queue_checks,
        role_checks,
        stream_checks,
        pool_checks,
        group_call_checks,
    )
    for name, function in vars(module).items()
    if inspect.isfunction(function) and [*inspect.signature(function).parameters] == ["make_world"]
}


def check_backend(make_world: MakeWorld) -> None:
    """Check that a backend behaves as this package requires; run all checks.

    Args:
        make_world: Called as ``make_world(world_size, **options)``; yields the backends of all
            ranks, in this process. It must accept the options ``timeout`` and
            ``max_message_nbytes``.

    Raises:
        AssertionError: A check failed; a note names it.
    """
    for name, check in CHECKS.items():
        try:
            check(make_world)
        except BaseException as error:
            error.add_note(f"in the conformance check {name!r}")
            raise
