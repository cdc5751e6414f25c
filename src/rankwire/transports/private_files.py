"""Reads files that only this user may read: secrets and private keys.

In a folder that others can write, a name can mean another file a moment later. So a file is opened
once, and ``fstat`` checks the descriptor. A symbolic link is followed if it belongs to this user or
to root, as in the folders of Kubernetes and certbot. Another user's link could lead to a file whose
content others know.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from rankwire.errors import ConfigurationError

# Much more than any secret or key has.
MAX_PRIVATE_NBYTES = 1 << 20
_MAX_LINKS = 8
# Follow no link, wait for no writer of a FIFO, leave it to no child, take no terminal.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@contextmanager
def open_private(path: str | os.PathLike[str], *, named: str) -> Iterator[int]:
    """Open a file that belongs to this user and is closed to others; yield its descriptor.

    Raises ``ConfigurationError``, with the name ``named``, for any other file or one too large.
    """
    try:
        descriptor = _open(os.fspath(path), _MAX_LINKS)
    except OSError as error:
        raise ConfigurationError(f"{named}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{named} is not a regular file")
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigurationError(
                f"{named} must belong to this user and be closed to others (mode 0600)"
            )
        if status.st_size > MAX_PRIVATE_NBYTES:
            raise ConfigurationError(f"{named} has more than {MAX_PRIVATE_NBYTES} bytes")
        yield descriptor
    finally:
        os.close(descriptor)


def name_of_open(descriptor: int) -> str:
    """Return a path to an open file, for functions that need one."""
    return f"/proc/self/fd/{descriptor}"


def read_private(path: str | os.PathLike[str], *, named: str) -> bytes:
    """Return the content of a private file; raises as ``open_private`` does."""
    with (
        open_private(path, named=named) as descriptor,
        open(descriptor, "rb", closefd=False) as file,
    ):
        return file.read()


def _open(path: str, links: int) -> int:
    """Open a file, through links that this user or root has made."""
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            return os.open(path, _FLAGS)
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(0, "it is a symbolic link that another user has made")
        if not links:
            raise OSError(0, "too many symbolic links")
        target = os.readlink("", dir_fd=link)
    finally:
        os.close(link)
    return _open(os.path.join(os.path.dirname(path), target), links - 1)
