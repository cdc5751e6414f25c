"""Chooses how connections are protected: the modes that users name, as a policy for connections.

The dialling end offers what its policy says, the listening end refuses less than its own demands.
Nothing is negotiated. ``SECURITY.md`` says what each mode protects against.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from rankwire.deadline import Deadline
from rankwire.errors import ConfigurationError
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.sockets import Socket, SocketStream
from rankwire.transports.tcp_stream import TcpAddress
from rankwire.wire.seals import Protection

if TYPE_CHECKING:
    from rankwire.transports.tls import TlsContexts, TlsStream

Security = Literal["auto", "local", "auth", "tls", "insecure"]
Integrity = Literal["crc", "mac"]
CertificateHolder = Literal["launcher"] | int
_Sealing = Literal["never", "off loopback", "always"]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files for TLS, in PEM form.

    Attributes:
        cert: This rank's certificate, followed by intermediate ones, if any.
        key: Its private key, without a passphrase.
        ca: The certificate of the authority whose certificates are accepted; best one for this job
            alone.
        names: The name in the certificate of each rank, with ``{rank}`` for its number: a DNS name
            or URI among its subjectAltNames, compared letter by letter. A launcher's certificate
            has ``launcher``. The holder of one rank's certificate cannot act as another rank.
            ``"any"`` is weaker: names are not checked, and a holder of the secret and any
            certificate of the authority may act as any rank.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    names: str = "rank-{rank}"


def certificate_name(who: CertificateHolder) -> str:
    """Return the name in the certificate of a launcher or a rank, and of its files."""
    return who if who == "launcher" else f"rank-{who}"


def certificate_files(home: Path, who: CertificateHolder) -> Tls:
    """Return the certificate files of a launcher or a rank in a folder."""
    name = certificate_name(who)
    return Tls(cert=home / f"{name}.pem", key=home / f"{name}.key", ca=home / "ca.pem")


def files_of(folder: str | os.PathLike[str], who: CertificateHolder) -> Tls:
    """Return the files of ``who`` in a folder; ``ConfigurationError`` names missing ones."""
    files = certificate_files(Path(folder), who)
    missing = [
        Path(file).name
        for file in (files.ca, files.cert, files.key)
        if not (os.path.isfile(file) and os.access(file, os.R_OK))
    ]
    if missing:
        raise ConfigurationError(
            f"{os.fspath(folder)} has no {' and no '.join(missing)} that can be read; copy what is"
            " missing there from where `rankwire certificates` made it"
        )
    return files


@dataclass(frozen=True, slots=True)
class Policy:
    """How connections are protected. Immutable, safe from any thread.

    Attributes:
        mode: ``"local"``, ``"auth"``, ``"tls"`` or ``"insecure"``.
        sealing: On which TCP connections frames are sealed.
        full_mac: Whether bulk payloads are under the MAC too.
        tls: Wraps TCP connections, if not None.
    """

    mode: str
    sealing: _Sealing = "never"
    full_mac: bool = False
    tls: TlsContexts | None = None

    def protection_of(self, stream: ByteStream) -> Protection:
        """Return how this end's policy protects the frames of a connection."""
        if self.sealing == "never" or stream.exposure == "none":
            return Protection.NONE
        if self.sealing == "off loopback" and stream.exposure == "loopback":
            return Protection.NONE
        return Protection.SEALED | (Protection.FULL_MAC if self.full_mac else Protection.NONE)

    def dial(self, stream: ByteStream, deadline: Deadline, check: Callable[[], None]) -> ByteStream:
        """Wrap a stream that this end has opened in TLS, if the policy requires it."""
        if self.tls is None or stream.exposure == "none":
            return stream
        return self.tls.dial(_socket_of(stream), deadline, check)

    def accept(self, stream: ByteStream) -> ByteStream:
        """Wrap an accepted stream in TLS, if the policy requires it, before its handshake."""
        if self.tls is None or stream.exposure == "none":
            return stream
        return self.tls.accept(_socket_of(stream))

    def objection_to(self, stream: ByteStream, who: int) -> str:
        """Return why the peer's certificate is not that of ``who``; empty if it is, or not used."""
        if self.tls is None or not stream.binding:
            return ""
        return self.tls.objection_to(cast("TlsStream", stream), who)


def _socket_of(stream: ByteStream) -> Socket:
    if not isinstance(stream, SocketStream):
        raise ConfigurationError(f"TLS is for TCP connections, not for {stream.transport!r}")
    return stream.sock


UNPROTECTED = Policy("local")


def choose_policy(
    security: str, address: TcpAddress, *, integrity: str = "crc", tls: Tls | None = None
) -> Policy:
    """Return the policy for the user's settings. Reads the TLS files.

    ``"auto"`` is ``"tls"`` if its files are given, else ``"local"`` or ``"auth"``, by the address
    of the rendezvous. Raises ``ConfigurationError`` if the settings contradict each other, or the
    files cannot be used.
    """
    if security not in get_args(Security):
        raise ConfigurationError(f"security is one of {get_args(Security)}, not {security!r}")
    if integrity not in get_args(Integrity):
        raise ConfigurationError(f'integrity is "crc" or "mac", not {integrity!r}')
    if tls is not None and security not in ("auto", "tls"):
        raise ConfigurationError(f'tls= is given, but security="{security}" does not use it')
    full_mac = integrity == "mac"
    if tls is not None:
        # Most jobs do without, and it loads ssl.
        from rankwire.transports.tls import TlsContexts

        return Policy("tls", tls=TlsContexts(tls))
    if security == "tls":
        raise ConfigurationError('security="tls" needs tls=rankwire.Tls(cert=, key=, ca=)')
    if security == "local" and not address.is_loopback:
        raise ConfigurationError(f'security="local" is for loopback, and {address} is not')
    if security == "insecure":
        return Policy("insecure")
    if security == "auth":  # always: the address may be a tunnel that ends on loopback
        return Policy("auth", "always", full_mac)
    return Policy("local" if address.is_loopback else "auth", "off loopback", full_mac)
