"""The end of the interpreter: what the program has not closed leaves in good order.

Peers then hear a farewell, and not the sudden end of a connection, which means a death; unless the
program ends by an error that it did not catch, which they are told with its traceback. Agents and
backends put themselves on the list; they are closed in reverse order, so that an agent goes before
its backend. A process that ends without the interpreter's help (``os._exit``, a signal) says no
farewell, and its peers report it as lost: that is what happened.

Threads of the user's that do not keep the process alive (daemons) may still be in a call. They get
its error, but the program that would read its traceback is gone, so none is printed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from rankwire.errors import ChannelClosedError
from rankwire.finalizers import finish

_log = logging.getLogger("rankwire")


class Leaving(Protocol):
    """What is closed when the interpreter ends.

    Where that would be one more method for users to see, ``close_at_exit`` is given a function.
    """

    def leave_at_exit(self, error: BaseException | None) -> None:
        """Close, without waiting for long. If it is closed already, do nothing.

        Args:
            error: What the program ends by, if it did not catch that.
        """


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
    """Have something closed at the end of the interpreter, if it still exists then."""
    _leaving[thing] = leave


def _close_at_exit() -> None:
    threading.excepthook = _without_farewells(threading.excepthook)
    error = _uncaught()
    for thing, leave in reversed(list(_leaving.items())):
        try:
            leave(thing, error)
        except Exception as trouble:  # the others leave all the same
            _log.warning("something went wrong while leaving: %s", trouble)
    finish()


def _uncaught() -> BaseException | None:
    """Return the error that the program ends by; at a prompt, the last one was seen and is over."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _without_farewells(
    hook: Callable[[threading.ExceptHookArgs], Any],
) -> Callable[[threading.ExceptHookArgs], Any]:
    """Return a hook for uncaught errors of threads that leaves out what closing has caused."""

    def report(args: threading.ExceptHookArgs) -> None:
        is_daemon = args.thread is not None and args.thread.daemon
        if not (is_daemon and isinstance(args.exc_value, ChannelClosedError)):
            hook(args)

    return report


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_leaving.clear)
