"""Errors as torch's programs expect them.

What a function raised on another worker arrives as an error of the same class, if the naming rule
lets that class be named: one of Python's, or of the program's. Every other failure is a
``RuntimeError``, with torch's words where programs look for them. Rankwire's own error is the
``__cause__`` of each.
"""

from __future__ import annotations

import builtins
from functools import cache
from typing import TYPE_CHECKING, Any

from rankwire.errors import (
    DeadlineExceededError,
    RankwireError,
    RemoteError,
    UnsupportedTypeError,
)
from rankwire.torch.rpc.naming import NameRefusedError, NamingRule

if TYPE_CHECKING:
    from rankwire.torch.rpc.session import Session

# These mean something to the interpreter, so they are not for others to raise.
_NOT_RAISED = frozenset(("StopIteration", "StopAsyncIteration", "GeneratorExit"))


class UnsendableError(RuntimeError, TypeError):
    """An argument or a result that is not carried."""


@cache
def _builtin_errors() -> dict[str, type[Exception]]:
    return {
        name: cls
        for name, cls in vars(builtins).items()
        if isinstance(cls, type) and issubclass(cls, Exception) and name not in _NOT_RAISED
    }


def translated(error: Exception, session: Session, rank: int, limit: float) -> Exception:
    """Return the error that a torch program gets in place of rankwire's.

    Args:
        error: What a call ended with.
        session: Knows the workers and the rule for names.
        rank: Who was called.
        limit: The seconds that the call had.
    """
    if isinstance(error, RemoteError):
        made = _remade(error, session, rank)
    elif isinstance(error, DeadlineExceededError):
        made = RuntimeError(
            f"RPC ran for more than set timeout ({round(limit * 1000)} ms) and will now be marked "
            f"with an error: {error}"
        )
    elif isinstance(error, UnsupportedTypeError | NameRefusedError):
        made = UnsendableError(str(error))
    elif isinstance(error, RankwireError):
        made = RuntimeError(f"{session.workers[rank]}: {error}")
    else:
        return error
    made.__cause__ = error
    return made


def _remade(error: RemoteError, session: Session, rank: int) -> Exception:
    """Return the error that a function raised there, as one of its class if that may be."""
    text = (
        f"On {session.workers[rank]}:\n{error.remote_type}: {error.remote_message}\n"
        f"{error.remote_traceback}"
    )
    cls = _class_of(error.remote_type, session.rule)
    if cls is None:
        return RuntimeError(text)
    try:
        return cls(text)
    except Exception as failure:
        return RuntimeError(
            f"Failed to create original exception type. Error msg was {failure}. "
            f"Original exception on remote side was {text}"
        )


def _class_of(name: str, rule: NamingRule) -> type[Exception] | None:
    """Return the class of an error by what the other side calls it; None if it is not for us."""
    if name in _builtin_errors():
        return _builtin_errors()[name]
    module, dot, qualname = name.rpartition(".")
    found: Any = None
    if dot:
        try:
            found = rule.find(f"{module}:{qualname}")
        except NameRefusedError:
            return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
