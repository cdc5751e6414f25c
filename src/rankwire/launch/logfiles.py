"""Write the log files of ranks, safely in a folder that other users can write to.

In a shared folder such as ``/tmp`` another user may have planted a link to a file of this user, a
file that they can read, or a FIFO. So a log is a new file of mode 0600, created through the
descriptor of the folder, and replaces only a regular file of this user without hard links. The path
may contain links of this user, but not one that another user made where others can write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rankwire.errors import ConfigurationError

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ADVICE = "remove it, or choose another --log-dir"


class Log:
    """Log both streams of a rank. A full disk ends the log, not the job."""

    def __init__(self, file: BinaryIO, named: str, on_end: Callable[[str], None]) -> None:
        self._file: BinaryIO | None = file
        self._named = named
        self._on_end = on_end

    def write(self, data: bytes) -> None:
        """Write all of ``data``; if that fails, end the log."""
        rest = memoryview(data)
        try:
            while rest and self._file is not None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file = None
            self._on_end(f"{self._named} ends here: {error.strerror}")


class LogFolder:
    """Create or open a folder of logs, or raise ConfigurationError. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._files: dict[int, BinaryIO] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_planted_links(path)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"--log-dir {path}: {error.strerror}") from error

    def path_of(self, rank: int) -> Path:
        """Return the absolute path of a rank's log."""
        return self._path / f"rank_{rank}.log"

    def open(self, rank: int) -> BinaryIO:
        """Return the log of a rank, empty at first; the same one after a restart."""
        if rank not in self._files:
            path = self.path_of(rank)
            try:
                descriptor = self._create(path.name)
            except OSError as error:
                raise ConfigurationError(f"the log {path}: {error.strerror}") from error
            self._files[rank] = os.fdopen(descriptor, "wb", buffering=0)
        return self._files[rank]

    def close(self) -> None:
        """Close all logs. Idempotent."""
        for file in self._files.values():
            file.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, name: str) -> int:
        with suppress(FileNotFoundError):
            _check_own(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
            # Not reused: another process may have it open for reading.
            os.unlink(name, dir_fd=self._descriptor)
        return os.open(name, _FLAGS, 0o600, dir_fd=self._descriptor)


def _check_own(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(0, f"it is a symbolic link; {_ADVICE}")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"it is not a regular file; {_ADVICE}")
    if status.st_uid != os.geteuid():
        raise OSError(0, f"it belongs to another user; {_ADVICE}")
    if status.st_nlink != 1:
        raise OSError(0, f"it has another name elsewhere (a hard link); {_ADVICE}")


def _refuse_planted_links(path: Path) -> None:
    way = Path(os.path.abspath(path))
    for place in (*reversed(way.parents), way):
        link, folder = place.lstat(), place.parent.stat()
        is_planted = (
            stat.S_ISLNK(link.st_mode)
            and folder.st_mode & 0o022
            and link.st_uid not in (os.geteuid(), 0, folder.st_uid)
        )
        if is_planted:
            raise OSError(0, f"{place} is a symbolic link that another user has made")
