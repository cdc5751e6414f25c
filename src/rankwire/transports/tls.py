"""TLS around a TCP connection, as a stream, and the certificates that it accepts.

TLS 1.3 only, certificates required of both ends, no tickets. The handshake inside
(``wire.handshake``) says which rank each end is, and has the listener's certificate in its MAC.

OpenSSL's objects are not thread-safe, and one thread may read a connection while another writes it.
So the socket stays outside: bytes pass through memory (``ssl.MemoryBIO``), and one short lock is
held while they are encrypted or decrypted, never while waiting. An interrupt while it is held fails
the connection: the bytes in OpenSSL at that moment are lost.

Two things differ from a socket:

- Decrypted bytes may be here although the socket has nothing to read (``has_pending``). During the
handshakes, ``receive`` takes single records from the socket, so that nothing is left over.
- Encrypted bytes may be here although the socket takes no more. Then the last byte counts as not
sent; the sender repeats it, as after any partial send, and so sends the rest.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    ProtocolError,
    RankwireError,
)
from rankwire.override import override
from rankwire.transports.byte_stream import join_first
from rankwire.transports.private_files import name_of_open, open_private
from rankwire.transports.sockets import wait_patiently
from rankwire.transports.tcp_stream import TcpStream
from rankwire.wire.handshake import LAUNCHER

if TYPE_CHECKING:
    from rankwire.transports.security import Tls
    from rankwire.wire.frames import Buffer

_LAUNCHER_NAME = "launcher"
_ANY_NAME = "any"
# Encrypted or read in one go: long enough to be efficient, short enough for the lock.
_CHUNK_NBYTES = 256 << 10
_RECORD_HEAD_NBYTES = 5
_RECORD_NBYTES = 1 << 14
_VERSION = "TLSv1.3"
# A fatal alert, "protocol version". OpenSSL does not answer other protocols; a rank without TLS
# learns from this that it needs TLS.
_NOT_TLS = bytes.fromhex("15 0303 0002 0246")


class TlsStream(TcpStream):
    """A TCP connection inside TLS."""

    def __init__(self, sock: runtime.Socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(sock)
        self.recv_into = self.send = None  # there is no C function that does it
        self._received = ssl.MemoryBIO()
        self._encrypted = ssl.MemoryBIO()
        self.session = context.wrap_bio(self._received, self._encrypted, server_side=server_side)
        self._lock = runtime.Lock()  # guards everything below
        self._unsent = memoryview(b"")  # encrypted, and not taken by the socket
        self._owes_a_byte = False  # the last byte sent is not reported yet, see above
        self._decrypted = bytearray()  # and not read yet
        self._end: str | None = None  # empty at the end of the stream, else why it has failed
        self._under_way = _UnderWay()
        self._records: _Records | None = _Records()  # until the first read

    @override
    def shake_hands(self) -> bool:
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
                self._flush()  # the alert that gives the other end the reason
                # Closing with unread input would reset the connection, and the alert with it.
                self.sock.recv(_CHUNK_NBYTES)
            raise AuthenticationError(f"the TLS handshake failed: {_reason(error)}") from error
        self._flush()
        if self._unsent:
            raise ConnectionError("the other end does not take part in the TLS handshake")
        return is_done

    # -- reading -----------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:  # type: ignore[override]
        """Whether there are decrypted bytes to read."""
        return bool(self._decrypted)

    @override
    def receive(self, nbytes: int) -> bytes:
        seen = self.peek(nbytes)
        with self._lock:
            del self._decrypted[: len(seen)]
        return seen

    @override
    def peek(self, nbytes: int) -> bytes:
        """Return the beginning of the input; raise ``AuthenticationError`` if TLS has failed."""
        buffer = bytearray(nbytes)
        with self._lock:
            try:
                if not self._decrypted:
                    count = self._read(memoryview(buffer))
                    self._decrypted[:0] = buffer[:count]
                    self._under_way.decrypting = False
                return bytes(self._decrypted[:nbytes])
            except _TlsError as error:  # the other end can refuse this certificate only now
                raise AuthenticationError(f"TLS: {error}") from error

    @override
    def read(self, buffer: memoryview, counts: list[int]) -> None:
        """Fill the beginning of a buffer; raise ``ProtocolError`` if the records are forged."""
        with self._lock:
            self._records = None
            try:
                count = self._read(buffer)
            except _TlsError as error:
                raise ProtocolError(f"TLS: {error}") from error
            counts.append(count)
            self._under_way.decrypting = False

    def _read(self, buffer: memoryview) -> int:
        if self._decrypted:
            self._begin_decrypting()
            count = min(len(buffer), len(self._decrypted))
            buffer[:count] = self._decrypted[:count]
            del self._decrypted[:count]
            return count
        while True:
            if self._end:
                raise _TlsError(self._end)
            count = self._decrypt(buffer)
            if count or self._end == "":
                return count
            if self._end is None and not self._fill():
                self._end = ""

    def _decrypt(self, buffer: memoryview) -> int:
        """Decrypt all records into the buffer and then into ``_decrypted``; set ``_end``."""
        filled = 0
        self._begin_decrypting()
        try:
            while self._end is None:
                rest = buffer[filled:]
                if rest:
                    count: Any = self.session.read(len(rest), rest)
                    filled += count
                else:
                    piece = self.session.read(_RECORD_NBYTES)
                    count = len(piece)
                    self._decrypted += piece
                if not count:
                    self._end = ""
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._end = ""
        except ssl.SSLError as error:
            self._end = _reason(error)
            self.shut_down()  # wakes a thread that sleeps until there is more
        if self._encrypted.pending:
            with suppress(OSError):  # the next send raises it
                self._flush()  # an answer of TLS itself, or an alert
        self._under_way.decrypting = filled > 0
        return filled

    def _begin_decrypting(self) -> None:
        if self._under_way.decrypting:
            raise ConnectionError("reading from it was interrupted")
        self._under_way.decrypting = True

    def _fill(self) -> bool:
        """Read from the socket; False at its end, BlockingIOError if it has nothing now."""
        if self._records is None:
            # One call of a C function: no interrupt stops it between the read and the write.
            return any(map(self._received.write, map(self.sock.recv, (_CHUNK_NBYTES,))))
        piece = self.sock.recv(self._records.wanted_nbytes())
        if not piece:
            return False
        self._records.count(piece)
        self._received.write(piece)
        return True

    # -- writing -----------------------------------------------------------------------------------

    @override
    def write(self, pieces: Sequence[Buffer], counts: list[int]) -> None:
        with self._lock:
            count = self._encrypt(pieces)
            counts.append(count)
            self._under_way.encrypting = False

    def _encrypt(self, pieces: Sequence[Buffer]) -> int:
        if self._unsent:
            self._flush()
            if self._unsent:
                raise BlockingIOError
        if self._under_way.encrypting:
            raise ConnectionError("sending to it was interrupted")
        self._under_way.encrypting = True
        if self._owes_a_byte:
            self._owes_a_byte = False
            return 1
        chunk = join_first(pieces, _CHUNK_NBYTES)
        if not chunk:
            return 0
        try:
            self.session.write(chunk)
        except ssl.SSLError as error:
            raise OSError(f"TLS: {_reason(error)}") from error
        self._flush()
        self._owes_a_byte = bool(self._unsent)
        return len(chunk) - self._owes_a_byte

    def _flush(self) -> None:
        if self._under_way.flushing:
            raise ConnectionError("sending to it was interrupted")
        self._under_way.flushing = True
        if self._encrypted.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._encrypted.read())
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        self._under_way.flushing = False


@dataclass(slots=True)
class _UnderWay:
    """Whether bytes are between OpenSSL and the caller or the socket, or were lost there."""

    decrypting: bool = False
    encrypting: bool = False
    flushing: bool = False


class _Records:
    """Finds the ends of records, for a reader that takes no more than one at a time."""

    def __init__(self) -> None:
        self._left = 0  # of the current record
        self._head = b""  # the received part of the next record's head

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
    """An error of OpenSSL, until a caller translates it."""


def _reason(error: ssl.SSLError) -> str:
    detail = getattr(error, "verify_message", "")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return f"{reason} ({detail})" if detail else reason


class TlsContexts:
    """A rank's certificate and accepted authority; ``ConfigurationError`` for unusable files."""

    def __init__(self, files: Tls) -> None:
        self._names = files.names
        if "{rank}" not in files.names and files.names != _ANY_NAME:
            raise ConfigurationError(
                f'the names of ranks in certificates have a {{rank}}, or are "{_ANY_NAME}" if they '
                f"are not to be checked: names={files.names!r}"
            )
        try:
            self._dialling = _make_context(ssl.PROTOCOL_TLS_CLIENT, files)
            self._accepting = _make_context(ssl.PROTOCOL_TLS_SERVER, files)
            self._certificate = _first_certificate(files.cert)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"the TLS files cert={files.cert}, key={files.key}, ca={files.ca} "
                f"cannot be used: {reason}"
            ) from error

    def dial(
        self, sock: runtime.Socket, deadline: Deadline, check: Callable[[], None]
    ) -> TlsStream:
        """Open TLS on a connected, non-blocking socket; the stream owns it once this returns.

        Calls ``check`` as ``sockets.connect`` does. Raises ``AuthenticationError`` if one end
        refuses the other's certificate or version, ``NoConnectionError`` if the other end closed
        the connection, ``DeadlineExceededError`` if it did not answer in time.
        """
        stream = TlsStream(sock, self._dialling, server_side=False)
        while True:
            try:
                if stream.shake_hands():
                    break
            except RankwireError:
                raise  # some of our own errors are also OSErrors
            except OSError as error:
                raise NoConnectionError(
                    f"the TLS handshake ended ({error.strerror or error}): have all ranks tls=,"
                    " all launchers --tls?"
                ) from error
            if not wait_patiently(sock, runtime.POLLIN, deadline, check):
                raise DeadlineExceededError(deadline.limit, detail="no answer in the TLS handshake")
        certificate = stream.session.getpeercert(binary_form=True)
        if not certificate:
            raise AuthenticationError("the other end has shown no certificate")
        stream.binding = sha256(certificate).digest()
        return stream

    def accept(self, sock: runtime.Socket) -> TlsStream:
        """Begin TLS on an accepted socket; the caller then calls ``shake_hands``."""
        stream = TlsStream(sock, self._accepting, server_side=True)
        stream.binding = sha256(self._certificate).digest()
        return stream

    def objection_to(self, stream: TlsStream, who: int) -> str:
        """Return why the peer is not this rank or ``LAUNCHER``; empty if it is."""
        if self._names == _ANY_NAME:
            return ""
        is_launcher = who == LAUNCHER
        wanted = _LAUNCHER_NAME if is_launcher else self._names.replace("{rank}", str(who))
        shown = names_of_peer(stream)
        if wanted in shown:
            return ""
        return (
            f"its certificate is of {' and '.join(map(repr, shown)) or 'no name'}, and that "
            f"of {'a launcher' if is_launcher else f'rank {who}'} is of {wanted!r} (Tls(names=))"
        )


def names_of_peer(stream: TlsStream) -> list[str]:
    """Return the DNS names and URIs in the peer's certificate."""
    found: Any = stream.session.getpeercert() or {}
    names = found.get("subjectAltName", ())
    return [name for kind, name in names if kind in ("DNS", "URI")]


def _make_context(protocol: int, files: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names are those of ranks, see objection_to
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.load_verify_locations(cafile=os.fspath(files.ca))
    with open_private(files.key, named=f"the TLS key {os.fspath(files.key)}") as key:
        # This path means the checked file, whatever its name means by now. A function, or OpenSSL
        # would ask the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(files.cert, name_of_open(key), password=_no_passphrase)
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def _first_certificate(path: str | os.PathLike[str]) -> bytes:
    with open(path) as file:
        text = file.read()
    start, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER)
    return ssl.PEM_cert_to_DER_cert(text[start : end + len(ssl.PEM_FOOTER)] + "\n")
