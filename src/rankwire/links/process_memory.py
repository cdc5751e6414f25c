"""Memory of other processes: what the kernel allows of it, and the copying.

It allows that between processes of one user, unless told otherwise (Yama's ``ptrace_scope``, a
container's seccomp filter, separate pid namespaces); ``probe`` asks. What the bytes mean, and whose
they are, is not known here: see ``lender`` and ``borrower``.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankwire.wire.frames import Buffer

if TYPE_CHECKING:
    from rankwire.transports.stream import Stream

WORD_NBYTES = 8


class Vector(ctypes.Structure):
    """The kernel's ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call(name: str) -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True)[name]
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    return function


READ = _system_call("process_vm_readv")
WRITE = _system_call("process_vm_writev")


def probe(stream: Stream) -> tuple[int, str]:
    """Ask whether this process may read the memory of the one at the other end of a Unix socket.

    The process id is the kernel's word, not the peer's.

    Returns:
        The peer's process id, or 0 and why not.
    """
    if stream.transport != "unix":
        return 0, "it is not connected by a Unix socket"
    pid = stream.peer_pid()
    if not pid:
        return 0, "its process is not visible here: it is in another pid namespace"
    # Permission is checked before the address: a bad address is the good answer.
    for call in (READ, WRITE):
        number = transfer(call, pid, [(ctypes.addressof(_probe_word), 8)], [(8, 8)])[1]
        if number != errno.EFAULT:
            return 0, f"the kernel refuses to copy memory of process {pid}: {os.strerror(number)}"
    return pid, ""


_probe_word = ctypes.c_uint64()


def transfer(
    call: Callable[..., int],
    pid: int,
    here: Sequence[tuple[int, int]],
    there: Sequence[tuple[int, int]],
) -> tuple[int, int]:
    """Copy between two processes; return the bytes copied, or -1 and the error number."""
    local = (Vector * len(here))(*(Vector(*piece) for piece in here))
    remote = (Vector * len(there))(*(Vector(*piece) for piece in there))
    count = call(pid, local, len(here), remote, len(there), 0)
    return count, ctypes.get_errno() if count < 0 else 0


def address_of(buffer: Buffer | mmap.mmap) -> int:
    """Return where a buffer that is not empty begins, writable or not."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
