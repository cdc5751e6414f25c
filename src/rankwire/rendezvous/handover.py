"""How a rank gets the secret from its launcher, and no other process does.

A rank is started with one end of a socket pair, and whatever it starts before it connects may
inherit that, by ``fork`` or past ``exec``. So nothing lies in it to be read. The rank asks: it
sends one end of a new pair along, and the kernel tells the launcher which process asked. If that is
the process which the launcher started, and no child of it, the secret is written into that new
pair, which no other process has. It is told once.

A program that replaces itself (``exec``) stays the same process and can ask afterwards.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct

from rankwire import runtime
from rankwire.errors import ConfigurationError

_QUESTION = b"rankwire: the secret?"
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_DESCRIPTOR = struct.Struct("i")
_ANCILLARY_NBYTES = runtime.CMSG_SPACE(_CREDENTIALS.size) + runtime.CMSG_SPACE(_DESCRIPTOR.size)
_MAX_SECRET_NBYTES = 4096
# A launcher answers in its loop, which never waits for long.
_PATIENCE = 30.0


class Handover:
    """The launcher's end, for one rank. One thread.

    Attributes:
        theirs: The other end, for the rank to inherit; to be closed here once it has.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._ours, self.theirs = runtime.socketpair(runtime.AF_UNIX, runtime.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ours.setsockopt(runtime.SOL_SOCKET, runtime.SO_PASSCRED, 1)
        self._selector: runtime.BaseSelector | None = None
        self._process = 0

    def serve(self, selector: runtime.BaseSelector, process: int) -> None:
        """Answer this process, and no other, from now on."""
        self._process = process
        selector.register(self._ours, runtime.EVENT_READ, self._answer)
        self._selector = selector

    def close(self) -> None:
        """Answer no more. Idempotent."""
        if self._selector is not None:
            self._selector.unregister(self._ours)
            self._selector = None
        self._ours.close()
        self.theirs.close()

    def _answer(self) -> None:
        try:
            question, ancillary, _, _ = self._ours.recvmsg(
                len(_QUESTION), _ANCILLARY_NBYTES, runtime.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            question, ancillary = b"", []
        process, answers = _unpacked(ancillary)
        try:
            if not question:  # all who had the other end are gone, or have closed it
                self.close()
            elif question == _QUESTION and process == self._process and len(answers) == 1:
                with contextlib.suppress(OSError):  # it did not wait
                    os.set_blocking(answers[0], False)
                    os.write(answers[0], self._secret)
                self.close()
        finally:
            for descriptor in answers:
                os.close(descriptor)


def ask_for_secret(fd: int, *, named: str) -> bytes:
    """Return the secret from the launcher at the other end of ``fd``, and close that.

    Args:
        fd: What this process inherited.
        named: How it was told which, for the text of an error.

    Raises:
        ConfigurationError: There is no launcher, or it did not start this process itself.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            # Some other file that got this number: it is not ours to use or close.
            raise ConfigurationError(
                f"{named} is not a launcher's socket;"
                " this process inherited the variable but not the socket"
            )
        with runtime.Socket(fileno=fd) as launcher:
            secret = _asked(launcher)
    except OSError as error:
        raise ConfigurationError(
            f"the job's secret cannot be had from {named}: {error.strerror or error}."
            " Only a process that `rankwire run` itself started can join the world"
        ) from error
    if not secret:
        raise ConfigurationError(
            f"the launcher does not tell the job's secret by {named}: it tells it once, and only to"
            " the process that it started itself"
        )
    return secret


def _asked(launcher: runtime.Socket) -> bytes:
    launcher.settimeout(_PATIENCE)
    answer, theirs = runtime.socketpair()
    with answer:
        with theirs:
            runtime.send_fds(launcher, [_QUESTION], [theirs.fileno()])
        answer.settimeout(_PATIENCE)
        return answer.recv(_MAX_SECRET_NBYTES)


def _unpacked(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, list[int]]:
    """Return who sent something, and the descriptors that came along."""
    process, descriptors = 0, []
    for level, kind, data in ancillary:
        if level != runtime.SOL_SOCKET:
            continue
        if kind == runtime.SCM_CREDENTIALS:
            process = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
        elif kind == runtime.SCM_RIGHTS:
            whole = len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size
            descriptors += [found for (found,) in _DESCRIPTOR.iter_unpack(data[:whole])]
    return process, descriptors
