"""Close agents and backends that are still open when the interpreter exits.

Peers then get a farewell, or the traceback if the program ends by an uncaught error, and do not
take the process for dead. Objects close in reverse order of creation, so an agent closes before its
backend. After ``os._exit`` or a signal there is no farewell, and peers report the process as lost.

Daemon threads of the user may still be in a call. They get its error, but its traceback is not
printed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from rankwire import runtime
from rankwire.errors import ChannelClosedError
from rankwire.finalizers import finish

_log = logging.getLogger("rankwire")


class Leaving(Protocol):
    """An object that is closed when the interpreter exits."""

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Close quickly, with the uncaught error that ends the program, if any. Idempotent."""


T = TypeVar("T")
Leave = Callable[[T, BaseException | None], None]

_leaving: WeakKeyDictionary[Any, Leave[Any]] = WeakKeyDictionary()  # in the order of their making


def _leave(thing: Leaving, error: BaseException | None) -> None:
    thing.leave_at_exit(error)


@overload
def close_at_exit(thing: Leaving) -> None: ...
@overload
def close_at_exit(thing: T, leave: Leave[T]) -> None: ...
def close_at_exit(thing: Any, leave: Leave[Any] = _leave) -> None:
    """Close an object when the interpreter exits, if it still exists then.

    Pass ``leave`` where a public ``leave_at_exit`` would be one more method for users to see.
    """
    _leaving[thing] = leave


def _close_at_exit() -> None:
    runtime.wrap_thread_excepthook(_without_farewells)
    error = _uncaught()
    for thing, leave in reversed(list(_leaving.items())):
        try:
            leave(thing, error)
        except Exception as trouble:  # close the others too
            _log.warning("something went wrong while leaving: %s", trouble)
    finish()


def _uncaught() -> BaseException | None:
    """Return the error that ends the program; at a prompt the user has seen the last one."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _without_farewells(hook: runtime.ThreadHook) -> runtime.ThreadHook:
    """Return a hook for uncaught errors of threads that ignores those caused by closing."""

    def report(args: runtime.ExceptHookArgs) -> None:
        is_daemon = args.thread is not None and args.thread.daemon
        if not (is_daemon and isinstance(args.exc_value, ChannelClosedError)):
            hook(args)

    return report


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_leaving.clear)
