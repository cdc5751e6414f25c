"""This host and this user on it: who can share socket files, and where they are kept."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rankwire.errors import ConfigurationError

__all__ = [
    "has_removed",
    "host_id",
    "new_socket_path",
    "remove_socket_file",
    "runtime_folder",
    "sweep_socket_files",
]


def host_id() -> str:
    """Return a text that is equal for two processes of one host and one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{_namespace('net')}"
    except OSError:
        return f"{os.uname().nodename}/{os.uname().sysname}"  # not Linux


def runtime_folder() -> Path:
    """Return this user's folder for socket files and agreed secrets, which no other user can enter.

    Raises:
        ConfigurationError: It belongs to somebody else or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "rankwire") if base else Path(f"/tmp/rankwire-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder} must be a folder of this user that no other user can enter (mode 0700)"
        )
    return folder


def new_socket_path() -> str:
    """Return a path for a socket file; its name says which process it belongs to."""
    name = f"{_namespace('pid')}-{os.getpid()}-{secrets.token_hex(4)}.sock"
    return str(runtime_folder() / name)


def has_removed(path: str) -> bool:
    """Whether the process to which a socket file belonged has removed it, as one that leaves does.

    False if that cannot be said: a process of another container may have files that are not seen.
    """
    file = Path(path)
    return file.name.startswith(f"{_namespace('pid')}-") and not file.exists()


def remove_socket_file(path: str) -> None:
    """Remove the socket file of another process of this user; a path elsewhere is left alone.

    The path is what that process said, and it may have said anything.
    """
    file = Path(path)
    if file.parent == runtime_folder() and file.suffix == ".sock":
        file.unlink(missing_ok=True)


def sweep_socket_files() -> None:
    """Remove socket files whose processes are dead: one that is killed cannot remove its own."""
    ours = str(_namespace("pid"))
    for path in runtime_folder().glob(f"{ours}-*-*.sock"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0
