"""TLS around a TCP connection: a stream with the methods of a socket that connections use.

TLS 1.3 and nothing else, certificates required of both ends, no tickets. The handshake inside
(``wire.handshake``) says which rank each end is, and has the listener's certificate in its MAC.
Whose certificates are trusted, and for which rank, is the business of ``tls_contexts``.

OpenSSL's objects are not thread-safe, and one thread may read a connection while another writes it.
So the socket stays outside: bytes pass through memory (``ssl.MemoryBIO``), and one short lock is
held while they are encrypted or decrypted, never while waiting. All calls are non-blocking, as on
the sockets of this package.

Two things are not as with a socket:

- Decrypted bytes may lie here although the socket has nothing to read. After each ``recv_into``
  the owner takes what ``recv_pending`` has before it sleeps. During the handshakes, ``recv`` takes
  single records from the socket, so that nothing is ever left over.
- Encrypted bytes may lie here although the socket takes no more. Then the last byte of what was
  sent counts as not sent; the sender repeats it, as after any partial send, and makes the rest
  leave.

An interrupt (Ctrl-C) that falls between two steps of encrypting or decrypting ends the connection:
what OpenSSL had in hand at that moment is lost. While waiting, it harms nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.errors import AuthenticationError, ProtocolError
from rankwire.transports.stream import DescriptorStream, first_bytes

if TYPE_CHECKING:
    from rankwire.wire.frames import Buffer

# Encrypted or read in one go: long enough to be efficient, short enough for the lock.
_CHUNK_NBYTES = 256 << 10
_RECORD_HEAD_NBYTES = 5
_VERSION = "TLSv1.3"
# A fatal alert, "protocol version". OpenSSL does not answer what is not TLS at all; a rank without
# TLS learns from this that it should have it.
_NOT_TLS = bytes.fromhex("15 0303 0002 0246")


class TlsStream(DescriptorStream):
    """A TCP connection inside TLS.

    Size: six of its attributes are what handshakes use of the socket itself.

    One reader and one writer at a time, in any threads; the handshakes come before both.

    Attributes:
        binding: The SHA-256 of the listener's certificate.
        session: OpenSSL's view of the connection; its certificates, once hands are shaken.
    """

    def __init__(self, sock: runtime.Socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(sock)
        self.family = sock.family
        self.getsockname, self.getpeername = sock.getsockname, sock.getpeername
        self.getsockopt, self.setsockopt = sock.getsockopt, sock.setsockopt
        self.binding = b""
        self._received = ssl.MemoryBIO()
        self._encrypted = ssl.MemoryBIO()
        self.session = context.wrap_bio(self._received, self._encrypted, server_side=server_side)
        self._lock = runtime.Lock()  # guards all that follows
        self._unsent = memoryview(b"")  # encrypted, and the socket does not take it now
        self._owes_a_byte = False  # the last byte sent is not reported yet, see above
        self._peeked = bytearray()  # decrypted, and only looked at
        self._has_ended = False
        self._failure: str | None = None
        # Set while bytes are on their way through OpenSSL to the caller or the socket. If one is
        # found set, a thread was interrupted there, and some bytes are missing.
        self._is_decrypting = False
        self._is_encrypting = False
        self._is_flushing = False
        self._records: _Records | None = _Records()  # until the first recv_into

    # -- the TLS handshake -------------------------------------------------------------------------

    def shake_hands(self) -> bool:
        """Go on with the TLS handshake; False if the other end has to say something first.

        Raises:
            AuthenticationError: One end does not accept the other.
            OSError: The connection has ended.
        """
        with self._lock:
            while not self._advance():
                try:
                    if not self._fill():
                        raise ConnectionError("the other end hung up in the TLS handshake")
                except BlockingIOError:
                    return False
            if self.session.version() != _VERSION:
                raise AuthenticationError(f"the TLS version is {self.session.version()}")
            return True

    def _advance(self) -> bool:
        is_done = True
        try:
            self.session.do_handshake()
        except ssl.SSLWantReadError:
            is_done = False
        except ssl.SSLError as error:
            with suppress(OSError):
                if not self._encrypted.pending:
                    self._encrypted.write(_NOT_TLS)
                self._flush()  # the alert that tells the other end why
                # Closing with input unread would reset the connection, and the alert with it.
                self._sock.recv(_CHUNK_NBYTES)
            raise AuthenticationError(f"the TLS handshake failed: {_reason(error)}") from error
        self._flush()
        if self._unsent:
            raise ConnectionError("the other end does not take part in the TLS handshake")
        return is_done

    # -- reading -----------------------------------------------------------------------------------

    def recv(self, nbytes: int) -> bytes:
        """Return up to ``nbytes``, as a socket does; raises as ``peek`` does."""
        seen = self.peek(nbytes)
        with self._lock:
            del self._peeked[: len(seen)]
        return seen

    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of what is there to read, decrypted, and leave it.

        Raises:
            BlockingIOError: There is nothing to read now.
            AuthenticationError: TLS has failed; mostly the other end refuses our certificate, which
                it can say only now.
        """
        buffer = bytearray(nbytes)
        with self._lock:
            try:
                if not self._peeked:
                    count = self._read(memoryview(buffer))
                    self._peeked += buffer[:count]
                    self._is_decrypting = False
                return bytes(self._peeked[:nbytes])
            except _TlsError as error:
                raise AuthenticationError(f"TLS: {error}") from error

    def recv_into(self, buffer: memoryview) -> int:
        """Read into a buffer, as a socket does; 0 is the end.

        Raises:
            BlockingIOError: There is nothing to read now.
            ProtocolError: What came is not from the other end of this TLS connection.
            OSError: The connection has ended.
        """
        with self._lock:
            self._records = None
            try:
                count = self._read(buffer)
            except _TlsError as error:
                raise ProtocolError(f"TLS: {error}") from error
        self._is_decrypting = False  # after the lock, with nothing between it and the return
        return count

    def recv_pending(self, buffer: memoryview) -> int:
        """Read what has been taken from the socket before.

        Raises:
            BlockingIOError: There is none.
        """
        with self._lock:
            count = self._take_peeked(buffer) if self._peeked else self._decrypt(buffer)
            if not count:
                raise BlockingIOError
        self._is_decrypting = False
        return count

    def _read(self, buffer: memoryview) -> int:
        if self._peeked:
            return self._take_peeked(buffer)
        while True:
            if self._failure is not None:
                raise _TlsError(self._failure)
            count = self._decrypt(buffer)
            if count or self._has_ended:
                return count
            if self._failure is None and not self._fill():
                self._has_ended = True

    def _take_peeked(self, buffer: memoryview) -> int:
        self._begin_decrypting()
        count = min(len(buffer), len(self._peeked))
        buffer[:count] = self._peeked[:count]
        del self._peeked[:count]
        return count

    def _decrypt(self, buffer: memoryview) -> int:
        """Fill the buffer as far as records have come; sets ``_has_ended`` or ``_failure``."""
        filled = 0
        self._begin_decrypting()
        try:
            while filled < len(buffer) and not self._has_ended and self._failure is None:
                rest = buffer[filled:]
                count: Any = self.session.read(len(rest), rest)
                if not count:
                    self._has_ended = True
                filled += count
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._has_ended = True
        except ssl.SSLError as error:
            self._failure = _reason(error)
            self.shut_down()  # a thread that sleeps until there is more wakes up
        if self._encrypted.pending:
            with suppress(OSError):  # the next send says so
                self._flush()  # an answer of TLS itself, or an alert
        self._is_decrypting = filled > 0
        return filled

    def _begin_decrypting(self) -> None:
        if self._is_decrypting:
            raise ConnectionError("reading from it was interrupted")
        self._is_decrypting = True

    def _fill(self) -> bool:
        """Take bytes from the socket; False at its end, BlockingIOError if there are none now."""
        if self._records is None:
            # One call of a C function: no interrupt falls between the two ends of it.
            return any(map(self._received.write, map(self._sock.recv, (_CHUNK_NBYTES,))))
        piece = self._sock.recv(self._records.wanted_nbytes())
        if not piece:
            return False
        self._records.count(piece)
        self._received.write(piece)
        return True

    # -- writing -----------------------------------------------------------------------------------

    def send(self, data: Buffer) -> int:
        """Send what can be sent now; return how much of it has left, as a socket does.

        Raises:
            BlockingIOError: Nothing can be sent now.
        """
        return self.sendmsg((data,))

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        """Send what can be sent now of a message in pieces; return how much of it has left."""
        with self._lock:
            count = self._encrypt(pieces)
        self._is_encrypting = False  # after the lock, with nothing between it and the return
        return count

    def _encrypt(self, pieces: Sequence[Buffer]) -> int:
        if self._unsent:
            self._flush()
            if self._unsent:
                raise BlockingIOError
        if self._is_encrypting:
            raise ConnectionError("sending to it was interrupted")
        self._is_encrypting = True
        if self._owes_a_byte:
            self._owes_a_byte = False
            return 1
        chunk = first_bytes(pieces, _CHUNK_NBYTES)
        if not chunk:
            return 0
        try:
            self.session.write(chunk)
        except ssl.SSLError as error:
            raise OSError(f"TLS: {_reason(error)}") from error
        self._flush()
        self._owes_a_byte = bool(self._unsent)
        return len(chunk) - self._owes_a_byte

    def sendall(self, data: Buffer) -> None:
        """Send a short message all at once, as is possible on a new connection."""
        sent = 0
        while sent < len(data):
            sent += self.send(data[sent:])

    def _flush(self) -> None:
        """Send encrypted bytes as far as the socket takes them."""
        if self._is_flushing:
            raise ConnectionError("sending to it was interrupted")
        self._is_flushing = True
        if self._encrypted.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._encrypted.read())
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        self._is_flushing = False


class _Records:
    """Where the records of a stream end, for a reader that takes no more than one at a time."""

    def __init__(self) -> None:
        self._left = 0  # of the current one
        self._head = b""  # what has come of the next one's

    def wanted_nbytes(self) -> int:
        return self._left or _RECORD_HEAD_NBYTES - len(self._head)

    def count(self, piece: bytes) -> None:
        if self._left:
            self._left -= len(piece)
            return
        self._head += piece
        if len(self._head) == _RECORD_HEAD_NBYTES:
            self._left = int.from_bytes(self._head[3:], "big")
            self._head = b""


class _TlsError(Exception):
    """What OpenSSL says, on its way to where it is known what that means."""


def _reason(error: ssl.SSLError) -> str:
    detail = getattr(error, "verify_message", "")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return f"{reason} ({detail})" if detail else reason
