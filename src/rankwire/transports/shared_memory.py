"""Memory that processes share: made by one, opened by the others (Linux on x86).

It has no name in any file system, so nothing is left of it after a crash. The others open the
maker's descriptor by ``/proc``, which the kernel allows to processes of one user that see each
other. It cannot be made smaller, which would kill a reader, and a token in it identifies it.

Where any of this is not possible, sockets carry everything. ``wire.ring`` and ``shared_segment``
use the memory, except the token's word.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any

from rankwire import runtime
from rankwire.interrupts import call_and_note, pop_into

# Rings and segments need stores to be seen in the order in which they were made.
CAN_SHARE = (
    sys.platform == "linux"
    and platform.machine() in ("x86_64", "AMD64")
    and sys.maxsize > 2**32  # else a store of eight bytes is two
    and hasattr(os, "memfd_create")  # not where Python was built with an old library
)

_MAP_SHARED = 1
_FAILED = ctypes.c_void_p(-1).value

_OFFER = struct.Struct("<QQQ")  # the descriptor's number, the size, and the token
_NAME = "rankwire"
_TOKEN = 24  # the index of its word of eight bytes


class SharedMemory:
    """Zeroed memory that others open by its ``offer``; raises ``OSError`` if it is not allowed."""

    def __init__(self, nbytes: int) -> None:
        self._held = _Descriptor()
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = self._held.take(os.memfd_create, _NAME, flags)
        os.ftruncate(descriptor, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        self.view = _mapped(descriptor, nbytes)
        token = runtime.randbits(64)
        self.view.cast("Q")[_TOKEN] = token
        self.offer = _OFFER.pack(descriptor, nbytes, token)

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as a process uses it. Idempotent."""
        self._held.close()


class _Descriptor:
    """A descriptor that is closed with its owner, wherever an interrupt comes."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def take(self, open_one: Callable[..., int], *args: Any) -> int:
        """Open a descriptor by a C function, and keep it in the same step."""
        call_and_note(self._numbers, open_one, *args)
        return self._numbers[0]

    def close(self) -> None:
        while self._numbers:
            pop_into(os.close, self._numbers)

    __del__ = close


def _mapped(descriptor: int, nbytes: int) -> memoryview:
    """Map the memory behind a descriptor for as long as a view of it exists.

    ``mmap.mmap`` would keep a descriptor of its own that long, and an error that refers to its
    frames would keep it open.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = library.mmap(
        None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _MAP_SHARED, descriptor, 0
    )
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    unmap = library.munmap
    unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    weakref.finalize(memory, unmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def open_shared(pid: int, offer: bytes, sizes: range) -> memoryview:
    """Open the memory that process ``pid``, as the kernel reports it, has offered.

    Raises ``OSError`` if the system does not allow it, ``ValueError`` if it is other memory or its
    size is not among ``sizes``.
    """
    try:
        number, nbytes, token = _OFFER.unpack(offer)
    except struct.error as error:
        raise ValueError(str(error)) from error
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise ValueError(f"{path} is something else")
    if nbytes not in sizes:
        raise ValueError(f"it has {nbytes} bytes")
    held = _Descriptor()
    try:
        descriptor = held.take(os.open, path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size != nbytes:
            raise ValueError("it has another size")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("it could be made smaller")
        view = _mapped(descriptor, nbytes)
    finally:
        held.close()
    if view.cast("Q")[_TOKEN] != token:
        raise ValueError("it has another token")
    return view
