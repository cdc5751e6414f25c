"""Sleeping until a word of shared memory changes: the kernel's futex (Linux on x86-64).

Unlike an eventfd it needs no descriptor a pair of processes, and whoever changes the word without
anybody asleep makes no system call. See futex(2); the call is made by number, because the C library
has no function for it. Knows nothing of what the words mean.
"""

from __future__ import annotations

import ctypes
import math

_FUTEX = 202  # of the system call, on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF

_library = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while four bytes have a value; until somebody wakes us, a signal comes, or so long.

    That the value is looked at and the thread put to sleep is one step for the kernel.

    Args:
        address: Of the bytes, a multiple of four.
        value: What they must have.
        seconds: At most.
    """
    fraction, whole = math.modf(seconds)
    limit = _Timespec(int(whole), int(fraction * 1e9))
    _library.syscall(
        _FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), 0, 0
    )


def wake_all(address: int) -> None:
    """Wake all, in any process, that sleep because of the four bytes at an address."""
    _library.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL, 0, 0, 0)
