"""Decide whom TLS trusts: a rank's own certificate, the authority, and the name of each rank."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rankwire import runtime
from rankwire.deadline import Deadline
from rankwire.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    NoConnectionError,
    RankwireError,
)
from rankwire.transports.private_files import name_of_open, open_private
from rankwire.transports.sockets import wait_patiently
from rankwire.transports.tls import TlsStream
from rankwire.wire.handshake import LAUNCHER

if TYPE_CHECKING:
    from rankwire.transports.security import Tls

_LAUNCHER_NAME = "launcher"
_ANY_NAME = "any"


class TlsContexts:
    """The certificate and the trust that the connections of one rank share.

    Raises:
        ConfigurationError: The files cannot be used.
    """

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

        Calls ``check`` repeatedly while waiting; an exception from it ends the wait.

        Raises:
            AuthenticationError: One end does not accept the other's certificate or version, or the
                other does not speak TLS.
            NoConnectionError: The other end closed the connection.
            DeadlineExceededError: It did not answer in time.
        """
        stream = TlsStream(sock, self._dialling, server_side=False)
        while True:
            try:
                if stream.shake_hands():
                    break
            except RankwireError:
                raise  # some of ours are also OSErrors
            except OSError as error:
                raise NoConnectionError(
                    f"the TLS handshake ended ({error.strerror or error}): have all ranks tls=,"
                    " all launchers --tls?"
                ) from error
            if not wait_patiently(sock, runtime.POLLIN, deadline, check):
                raise DeadlineExceededError(deadline.limit, detail="no answer in the TLS handshake")
        stream.binding = sha256(_certificate_of_peer(stream)).digest()
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
            f"its certificate is of {' and '.join(map(repr, shown)) or 'nobody by name'}, and that "
            f"of {'a launcher' if is_launcher else f'rank {who}'} is of {wanted!r} (Tls(names=))"
        )


def _certificate_of_peer(stream: TlsStream) -> bytes:
    certificate = stream.session.getpeercert(binary_form=True)
    if not certificate:
        raise AuthenticationError("the other end has shown no certificate")
    return certificate


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
        # OpenSSL wants a name: this one means the file that was checked, whatever its own one means
        # by now. A function, or it would ask the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(files.cert, name_of_open(key), password=_no_passphrase)
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def _first_certificate(path: str | os.PathLike[str]) -> bytes:
    with open(path) as file:
        text = file.read()
    start, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER)
    return ssl.PEM_cert_to_DER_cert(text[start : end + len(ssl.PEM_FOOTER)] + "\n")
