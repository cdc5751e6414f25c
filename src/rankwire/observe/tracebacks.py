"""What a rank of ``rankwire run`` prints when an error ends its program.

All ranks of a job print on one screen, and one failure takes all of them down. So what is printed
there is short: the traceback of a rank that fails by itself, without the frames inside rankwire;
one line of a rank that falls because of another, which prints its own; one line of a rank that is
interrupted. ``RANKWIRE_FULL_TRACEBACK=1`` prints everything; with ``--log-dir`` the rank's log
always has everything.

``connect()`` installs this, under ``rankwire run`` only, and only if the program has not installed
a hook for uncaught errors. What happens before that, and in other threads, is printed by Python.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rankwire.environment import RANK
from rankwire.errors import PeerLostError, RankwireError
from rankwire.observe.blame import CONSEQUENCES, chain
from rankwire.observe.exit_report import describe
from rankwire.observe.stacks import is_ours, is_users
from rankwire.texts import traceback_of

FULL_TRACEBACK = "RANKWIRE_FULL_TRACEBACK"
# Set by the launcher: where this rank's output is written besides.
LOG_FILE = "RANKWIRE_LOG_FILE"

# The message of another rank's error, which that rank prints, up to the context of our own error.
_RAISED = re.compile(r"(\bit raised \w+): .*?(?=( \[op [^\[\]]*\])?$)")
_OUR_ERRORS = "rankwire.errors."
# Also one that is quoted, behind bars.
_FRAME = re.compile(r'(?P<margin>[ |]*)  File "(?P<path>[^"]+)", line \d+, in ')


def install() -> None:
    """Print uncaught errors of this process as described above, from now on. Idempotent."""
    if sys.excepthook is sys.__excepthook__ and not is_everything_printed():
        sys.excepthook = _report


def is_everything_printed() -> bool:
    """Whether the user has asked for all that can be printed of an error."""
    return os.environ.get(FULL_TRACEBACK, "0") not in ("", "0")


def _report(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    try:
        text = brief(error, rank=int(os.environ.get(RANK, "-1")))
        _log_whole(error, text)
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # a user's __str__, a full disk, a closed stderr: then as Python does it
        sys.__excepthook__(kind, error, frames)


def _log_whole(error: BaseException, text: str) -> None:
    """Write all of it to the log, unless what is printed is all of it: that is logged anyway."""
    path, whole = os.environ.get(LOG_FILE), traceback_of(error)
    if not path or whole == text:
        return
    # The launcher has made the file, and appends too: neither overwrites the other. In a folder
    # that others can write, something else may be in its place by now.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "wb", buffering=0) as log:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{path} is no longer the log")
        log.write(whole.encode("utf-8", "backslashreplace"))


def brief(error: BaseException, rank: int = -1) -> str:
    """Return what to print of an uncaught error of a rank."""
    if isinstance(error, KeyboardInterrupt):
        return f"{describe(error)}{_where(error)}\n"
    first, *others = _members(error)
    if all(_is_consequence(member, rank) for member in (first, *others)):
        root = getattr(first, "root", None)
        because = "" if root is None else f" because of rank {root}"
        more = f", and {len(others)} error{'s'[: len(others) > 1]} like it" if others else ""
        text = _RAISED.sub(r"\1", describe(first))
        return f"fell{because}: {text}{_where(first)}{more}\n"
    with _quoting_nobody(error):
        text = traceback_of(error)
    return "\n".join(folded(text.splitlines())) + "\n"


def _members(error: BaseException) -> list[BaseException]:
    """Return the errors that a group is made of, such as a ``TaskGroup`` raises; else the one."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [member for each in error.exceptions for member in _members(each)]


def _is_consequence(error: BaseException, rank: int) -> bool:
    """Whether this very error, and not only one before it, tells of another rank's failure."""
    if not isinstance(error, RankwireError) or error.root == rank:
        return False
    return error.root is not None or isinstance(error, CONSEQUENCES)


@contextmanager
def _quoting_nobody(error: BaseException) -> Iterator[None]:
    """Leave the tracebacks of other ranks out of the texts of an error and those before it."""
    links = [link for member in (error, *_members(error)) for link in chain(member)]
    quoting = [link for link in links if isinstance(link, PeerLostError)]
    quoted = [link.remote_traceback for link in quoting]
    for link in quoting:
        link.remote_traceback = ""
    try:
        yield
    finally:
        for link, text in zip(quoting, quoted, strict=True):
            link.remote_traceback = text


def _where(error: BaseException) -> str:
    """Return the last line of the user's own that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)] or frames
    if not own:
        return ""
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})"


def folded(lines: Sequence[str]) -> list[str]:
    """Return the lines of a traceback with the frames inside rankwire as one line.

    Where an error that is none of rankwire's own came from one of them, that one is shown: it may
    be a fault of rankwire.
    """
    found: list[str] = []
    ours: list[list[str]] = []  # the frames that are folded, as lines
    margin = ""
    for line in [*lines, ""]:
        frame = _FRAME.match(line)
        if frame is not None and is_ours(frame["path"]):
            margin = frame["margin"]
            ours.append([line])
        elif frame is None and ours and line.startswith(f"{margin}    "):
            ours[-1].append(line)
        else:
            is_origin = frame is None and not line.startswith(f"{margin}{_OUR_ERRORS}")
            origin = ours.pop() if ours and is_origin else []
            if ours:
                frames = f"{len(ours)} frame{'s'[: len(ours) > 1]} of rankwire"
                found.append(f"{margin}  [{frames}; {FULL_TRACEBACK}=1 shows]")
            found += [*origin, line]
            ours = []
    return found[:-1]
