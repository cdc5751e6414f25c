"""Find this user's runtime folder on this host, for socket files and secrets.

A folder is safe if this user owns it, no other user can enter or replace it, and it is no link.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankwire import runtime
from rankwire.errors import ConfigurationError

# The folder to use; a launcher sets it for its ranks if it chose another.
RUNTIME_DIR = "RANKWIRE_RUNTIME_DIR"
WHAT_TO_SET = f"Set {RUNTIME_DIR} to a folder of yours with mode 0700"
_SHARED = Path("/tmp")
# A socket address has room for 107 bytes, and a socket file's name takes 33 of them.
_LONGEST_FOLDER = 107 - 1 - 33

_log = logging.getLogger("rankwire")
_said: set[str] = set()  # warnings that this process has logged


def host_id() -> str:
    """Return a text that identifies this host and network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{namespace('net')}"
    except OSError:
        return f"{os.uname().nodename}/{os.uname().sysname}"  # not Linux


def runtime_folder() -> Path:
    """Return the runtime folder or raise ConfigurationError; warn once about a second choice."""
    folder, trouble = find_runtime_folder()
    if trouble and trouble not in _said:
        _said.add(trouble)
        _log.warning("%s; %s is used instead. %s", trouble, folder, WHAT_TO_SET)
    return folder


def find_runtime_folder() -> tuple[Path, str]:
    """Return the first safe folder, and why the preceding ones are not safe.

    In this order: ``RANKWIRE_RUNTIME_DIR``; ``rankwire`` in ``XDG_RUNTIME_DIR``; ``rankwire-UID``
    in ``/tmp``, which another user can create first; a folder for this host in this user's home.
    The folder is created if necessary. Raises ConfigurationError if none is safe.
    """
    troubles: list[str] = []
    for candidate in _candidates():
        try:
            return _checked(candidate, may_be_made=True), "; ".join(troubles)
        except ConfigurationError as error:
            troubles.append(error.message)
    raise ConfigurationError(f"{'; '.join(troubles)}. {WHAT_TO_SET}")


def runtime_folders() -> Iterator[Path]:
    """Yield every safe folder that exists: another process may have chosen another one."""
    for candidate in _candidates():
        with suppress(ConfigurationError):
            yield _checked(candidate, may_be_made=False)


class _Candidate(NamedTuple):
    base: Path  # must exist and be safe
    folders: tuple[Path, ...]  # below it, for this user alone; the last is to be used
    named: str = ""  # how the user specified it, for error texts


def _candidates() -> Iterator[_Candidate]:
    if asked := os.environ.get(RUNTIME_DIR):
        path = Path(os.path.abspath(asked))
        yield _Candidate(path.parent, (path,), f"{RUNTIME_DIR}={asked}")
    if asked := os.environ.get("XDG_RUNTIME_DIR"):
        base = Path(os.path.abspath(asked))
        yield _Candidate(base, (base / "rankwire",), f"XDG_RUNTIME_DIR={asked}")
    user = os.geteuid()
    yield _Candidate(_SHARED, (_SHARED / f"rankwire-{user}",))
    with suppress(KeyError):  # a user without a passwd entry, as in containers
        # Not $HOME: after sudo it may be another user's. Several hosts may share a home.
        host = hashlib.sha256(host_id().encode()).hexdigest()[:8]
        home = Path(pwd.getpwuid(user).pw_dir)
        yield _Candidate(home, (home / ".rankwire", home / ".rankwire" / host))


def _checked(candidate: _Candidate, *, may_be_made: bool) -> Path:
    asked = candidate.named or candidate.base
    try:
        _check_base(candidate.base, asked)
        for folder in candidate.folders if may_be_made else ():
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        for folder in candidate.folders:
            status = folder.lstat()
            mode, user = status.st_mode, status.st_uid
            if not stat.S_ISDIR(mode) or user != os.geteuid() or mode & 0o077 or ~mode & 0o700:
                raise ConfigurationError(
                    f"{folder} must be a folder of this user that no other user can enter"
                    " (mode 0700)"
                )
    except OSError as error:
        raise ConfigurationError(f"{asked}: {error.strerror}") from error
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise ConfigurationError(f"{asked}: the path is too long for socket files")
    return folder


def _check_base(base: Path, asked: Path | str) -> None:
    """Raise an error if another user can replace a folder in ``base``."""
    status = base.stat()
    if status.st_uid not in (os.geteuid(), *_system_users()):
        raise ConfigurationError(f"{asked}: it belongs to another user")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise ConfigurationError(f"{asked}: others can write there")


def _system_users() -> tuple[int, ...]:
    """Return root's user id, and the id that stands for root in a user namespace."""
    try:
        return 0, int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return (0,)


def new_socket_path() -> str:
    """Return a path for a socket file whose name contains this process's id."""
    name = f"{namespace('pid')}-{runtime.getpid()}-{runtime.token_hex(4)}.sock"
    return str(runtime_folder() / name)


def has_removed(path: str) -> bool:
    """Return whether the owner of a socket file removed it, as a process does when it leaves."""
    file = Path(path)  # a file of another container may not be visible
    return file.name.startswith(f"{namespace('pid')}-") and not file.exists()


def remove_socket_file(path: str) -> None:
    """Remove the socket file of another process of this user."""
    file = Path(path)  # another process sent the path, so check it
    if file.suffix == ".sock" and file.parent in runtime_folders():
        file.unlink(missing_ok=True)


def sweep_socket_files() -> None:
    """Remove the socket files of killed processes."""
    ours = str(namespace("pid"))
    for path in (path for one in runtime_folders() for path in one.glob(f"{ours}-*-*.sock")):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def namespace(kind: str) -> int:
    """Return the number of this process's namespace of a kind; 0 without namespaces."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0
