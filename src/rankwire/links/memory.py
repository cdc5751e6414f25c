"""Allocates memory for messages, and copies memory of other processes.

The kernel lets processes of one user copy from each other, unless Yama's ``ptrace_scope``, a
container's seccomp filter or separate pid namespaces forbid it; ``probe`` finds out.
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
    from rankwire.transports.byte_stream import ByteStream


_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


def allocate(nbytes: int) -> bytearray:
    """Return a bytearray with arbitrary content; pages that are never written take no memory.

    ``bytearray(n)`` writes zeros first: 43 ms for 64 MiB against 0.03 ms here.
    """
    memory: bytearray = _new_bytearray(None, nbytes)
    if nbytes >= _HUGE_FROM:
        _want_huge_pages(memory)
    return memory


# Above 32 MiB malloc takes fresh pages from the system each time. To fill 64 MiB then takes 30 ms
# in pages of 4 KiB and 8 ms in huge ones (5 ms if they exist already).
_HUGE_FROM = 4 << 20
_PAGE_NBYTES = 4096
_MADV_HUGEPAGE = 14
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


def _want_huge_pages(memory: bytearray) -> None:
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = -(-start // _PAGE_NBYTES) * _PAGE_NBYTES
    _madvise(first, (start + len(memory) - first) // _PAGE_NBYTES * _PAGE_NBYTES, _MADV_HUGEPAGE)


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


def probe(stream: ByteStream) -> tuple[int, str]:
    """Return the kernel's id of the peer process if its memory is readable, or 0 and why not."""
    if stream.transport != "unix":
        return 0, "it is not connected by a Unix socket"
    pid = stream.peer_pid()
    if not pid:
        return 0, "its process is not visible here: it is in another pid namespace"
    # The kernel checks permission before the address, so EFAULT means that it permits copying.
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
    """Return the address of a buffer that is not empty, writable or not."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
