"""Show what the threads of this process are doing, by the functions that they call."""

from __future__ import annotations

import dis
import gc
import itertools
import linecache
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, CoroutineType, FrameType, FunctionType
from typing import Any, TypeAlias, cast

from rankwire import runtime

Frames: TypeAlias = "deque[FrameType]"  # of one thread, innermost first

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_NOT_THE_USERS = (_PACKAGE, "<frozen ")
_STARTER = "<string>"  # the code that starts a multiprocessing process
_MAIN = runtime.main_thread()
_MOST_THREADS = 8
_MOST_FRAMES = 20  # innermost frames of a thread, after folding
_RUNS = "runs"
_WAITS = {
    "acquire": "waits for a lock",
    "sleep": "sleeps",
    **dict.fromkeys(("wait", "join", "get", "result", "select", "poll"), "waits"),
    **dict.fromkeys(("recv", "recv_into", "read", "readinto", "readline", "accept"), "waits"),
}
_ENTERS_BLOCK = {"BEFORE_WITH", "LOAD_SPECIAL"}  # before Python 3.14, and since then


def show_as(name: str, wrapper: Any) -> None:
    """Set the name under which stacks and tracebacks show a function."""
    function = cast(FunctionType, wrapper)
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)


def is_ours(path: str) -> bool:
    """Return whether a file belongs to rankwire."""
    return path.startswith(_PACKAGE)


def is_users(path: str) -> bool:
    """Return whether a file belongs to the user's program or its packages."""
    is_library = path.startswith(_LIBRARY) and f"{os.sep}site-packages{os.sep}" not in path
    return not is_library and not path.startswith(_NOT_THE_USERS)


def stacks(*, only: Collection[int] | None = None, but: Collection[int] = ()) -> str:
    """Return the stacks of this process's threads, each under its name, the main thread first.

    Frames of rankwire and the standard library are folded. ``only`` has identifiers of the threads
    to show, by default all that run the user's program; ``but`` has those to leave out.
    """
    parts: list[str] = []
    hidden = 0
    for thread, frames in _threads():
        if thread.ident in but or (only is not None and thread.ident not in only):
            continue
        summary = traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(frames))
        lines = _shown(summary)
        if not lines and only is None:
            continue
        if len(parts) < _MOST_THREADS:
            parts.append(f"{thread.name}:\n{''.join(lines or summary.format())}")
        else:
            hidden += 1
    if hidden:
        parts.append(f"and {hidden} more thread{'s'[: hidden > 1]}\n")
    return "".join(parts)


def places(*, only: Collection[str] | None = None) -> list[str]:
    """Return where each thread is in the user's program; ``only`` has names of threads."""
    found = []
    for thread, frames in _threads():
        if (only is None or thread.name in only) and (place := _place(frames)):
            found.append(f"{thread.name} {place}")
    return found


def place_of(ident: int) -> str:
    """Return where a thread is in the user's program, or ""."""
    return _place(_frames().get(ident, ()))


def line_of_program() -> str:
    """Return the innermost line of the user's program in this thread as ``file:line``, or ""."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if _is_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def methods_entered(methods: Collection[CodeType]) -> list[object]:
    """Return ``self`` of the outermost of these methods in each thread that runs one."""
    found = []
    for frames in _frames().values():
        entered = [frame for frame in frames if frame.f_code in methods]
        if entered:
            found.append(entered[-1].f_locals["self"])
    return found


def _threads() -> list[tuple[runtime.Thread, Frames]]:
    frames = _frames()
    threads = sorted(runtime.list_threads(), key=lambda each: each is not _MAIN)
    return [(each, frames[each.ident]) for each in threads if each.ident in frames]


def _frames() -> dict[int, Frames]:
    """Return the frames of each thread, with garbage collection off.

    ``_current_frames`` holds the interpreter's lock of the thread list. If a collection ran Python
    code inside it, another thread could take the interpreter lock, start or end a thread, and wait
    for the list: a deadlock.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return {ident: _with_callers(frame) for ident, frame in sys._current_frames().items()}
    finally:
        if collects:
            gc.enable()


def _with_callers(frame: FrameType) -> Frames:
    """Return a frame and its callers, by one call of C functions: no other thread runs meanwhile.

    A thread that runs on between two steps leaves some of the frames. The stack would mix two
    moments, and Python 3.11 may crash when it looks for the caller of a frame that was left.
    """
    frames: Frames = deque()
    with suppress(AttributeError):  # the outermost frame's caller is None, which has none
        frames.extend(itertools.accumulate(itertools.repeat("f_back"), getattr, initial=frame))
    frames.pop()
    return frames


def place_awaited(coroutine: object) -> str:
    """Return where a coroutine awaits in the user's program, or ""."""
    place = ""
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        if frame is not None and _is_program(path := frame.f_code.co_filename):
            place = f"awaits in {frame.f_code.co_name} ({path}:{frame.f_lineno})"
        coroutine = coroutine.cr_await
    return place


def _place(frames: Iterable[FrameType]) -> str:
    called, doing = "", None
    for frame in frames:
        path = frame.f_code.co_filename
        doing = _doing(frame) if doing is None else doing  # of the innermost frame
        if _is_program(path):
            doing = f"is in {called}(), called" if called else doing
            return f"{doing} in {frame.f_code.co_name} ({path}:{frame.f_lineno})"
        if is_ours(path):
            called = _operation(frame.f_code) or called  # the outermost one
    return ""


def _operation(code: CodeType) -> str:
    if code.co_name == "__init__":
        return code.co_qualname.split(".")[-2]
    return code.co_name if code.co_name.isidentifier() and code.co_name[0] != "_" else ""


def _doing(frame: FrameType) -> str:
    code = frame.f_code
    if frame.f_lasti < 0:  # the frame has not started
        return _RUNS
    instruction = dis.opname[code.co_code[frame.f_lasti]]
    if instruction in _ENTERS_BLOCK:
        return _WAITS["acquire"]
    first, last, begin, end = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    if "CALL" not in instruction or first is None or last is None:
        return _RUNS
    lines = [linecache.getline(code.co_filename, number) for number in range(first, last + 1)]
    lines[-1] = lines[-1].encode()[:end].decode(errors="replace")
    lines[0] = lines[0].encode()[begin:].decode(errors="replace")
    return _WAITS.get(_called("".join(lines)), _RUNS)


def _called(source: str) -> str:
    depth = 0
    for place in range(len(source) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(source[place], 0)
        if not depth:
            name = re.search(r"\w*$", source[:place].rstrip())
            return name[0] if name else ""
    return ""


def _shown(frames: Iterable[FrameSummary]) -> list[str]:
    own = itertools.dropwhile(lambda each: not _is_program(each.filename), frames)
    return _folded(own)[-_MOST_FRAMES:]


def _is_program(path: str) -> bool:
    return is_users(path) and path != _STARTER


def _folded(frames: Iterable[FrameSummary]) -> list[str]:
    """Return the text of the program's frames, and one line for each run of other frames."""
    texts: list[str] = []
    for is_program, run in itertools.groupby(frames, lambda each: _is_program(each.filename)):
        found = list(run)
        if is_program:
            texts += traceback.format_list(found)
        else:
            path = found[0].filename
            owner = "rankwire" if is_ours(path) else Path(path).stem
            texts.append(f"  [{len(found)} frame{'s'[: len(found) > 1]} of {owner}]\n")
    return texts
