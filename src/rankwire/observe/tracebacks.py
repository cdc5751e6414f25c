"""Print short tracebacks for uncaught errors of ranks that ``rankwire run`` started.

A rank that fails by itself prints its traceback without frames of rankwire. A rank that was
interrupted, or failed because of another rank, prints one line. ``RANKWIRE_FULL_TRACEBACK=1`` and
the logs of ``--log-dir`` show everything. ``connect()`` installs this.
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
from rankwire.observe.blame import CONSEQUENCES, chain, describe
from rankwire.observe.stacks import is_ours, is_users
from rankwire.texts import traceback_of

FULL_TRACEBACK = "RANKWIRE_FULL_TRACEBACK"
# The launcher sets it to the file that logs this rank's output.
LOG_FILE = "RANKWIRE_LOG_FILE"

# The message of another rank's error, which that rank prints, up to our own context.
_RAISED = re.compile(r"(\bit raised \w+): .*?(?=( \[op [^\[\]]*\])?$)")
_OUR_ERRORS = "rankwire.errors."
# The margin has bars in an exception group.
_FRAME = re.compile(r'(?P<margin>[ |]*)  File "(?P<path>[^"]+)", line \d+, in ')


def install() -> None:
    """Install the exception hook, unless the program has its own. Idempotent."""
    if sys.excepthook is sys.__excepthook__ and not is_everything_printed():
        sys.excepthook = _report


def is_everything_printed() -> bool:
    """Return whether ``RANKWIRE_FULL_TRACEBACK`` is set."""
    return os.environ.get(FULL_TRACEBACK, "0") not in ("", "0")


def _report(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    try:
        text = brief(error, rank=int(os.environ.get(RANK, "-1")))
        _log_whole(error, text)
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # from a user's __str__, a full disk or a closed stderr
        sys.__excepthook__(kind, error, frames)


def _log_whole(error: BaseException, text: str) -> None:
    """Write the full traceback to the log, unless stderr gets it: the launcher logs stderr."""
    path, whole = os.environ.get(LOG_FILE), traceback_of(error)
    if not path or whole == text:
        return
    # The launcher created the file and appends to it too. Other users who can write to the folder
    # may have replaced it, so check its type and owner.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "wb", buffering=0) as log:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{path} is no longer the log")
        log.write(whole.encode("utf-8", "backslashreplace"))


def brief(error: BaseException, rank: int = -1) -> str:
    """Return the text to print for an uncaught error of a rank."""
    if isinstance(error, KeyboardInterrupt):
        return f"{describe(error)}{_where(error)}\n"
    first, *others = _members(error)
    if all(_is_consequence(member, rank) for member in (first, *others)):
        root = getattr(first, "root", None)
        because = "" if root is None else f" because of rank {root}"
        more = f", and {len(others)} error{'s'[: len(others) > 1]} like it" if others else ""
        text = _RAISED.sub(r"\1", describe(first))
        return f"failed{because}: {text}{_where(first)}{more}\n"
    with _without_remote_tracebacks(error):
        text = traceback_of(error)
    return "\n".join(folded(text.splitlines())) + "\n"


def _members(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [member for each in error.exceptions for member in _members(each)]


def _is_consequence(error: BaseException, rank: int) -> bool:
    """Return whether this error, without its chain, reports another rank's failure."""
    if not isinstance(error, RankwireError) or error.root == rank:
        return False
    return error.root is not None or isinstance(error, CONSEQUENCES)


@contextmanager
def _without_remote_tracebacks(error: BaseException) -> Iterator[None]:
    links = [link for member in (error, *_members(error)) for link in chain(member)]
    quoted = [(link, link.remote_traceback) for link in links if isinstance(link, PeerLostError)]
    for link, _ in quoted:
        link.remote_traceback = ""
    try:
        yield
    finally:
        for link, text in quoted:
            link.remote_traceback = text


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)] or frames
    if not own:
        return ""
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})"


def folded(lines: Sequence[str]) -> list[str]:
    """Return a traceback's lines with one line for each run of frames inside rankwire.

    Keep a frame that raised an error of another package: it may be our defect.
    """
    found: list[str] = []
    ours: list[list[str]] = []  # the frames to fold, as lines
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
