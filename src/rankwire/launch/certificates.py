"""The job's own certificate authority: certificates for TLS, made for one job and thrown away.

Needs the extra ``rankwire[tls]`` (``cryptography``), which is imported only when called. Keys are
EC P-256. The authority's private key is never written anywhere and is gone when
``make_certificates`` returns, so further certificates for the job cannot be made. A folder of them
is laid out as ``links.security`` says, whose ``files_of`` finds them again. Knows nothing of how
ranks start or connect; a ``Tls`` is all that they get.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwire.errors import ConfigurationError
from rankwire.links.security import CertificateHolder, Tls, certificate_files, certificate_name

DEFAULT_DAYS = 30.0
# Clocks of hosts differ; a certificate is good from a little before it was made.
_TOLERANCE = datetime.timedelta(hours=1)


def make_certificates(
    folder: str | os.PathLike[str], world_size: int, *, days: float = DEFAULT_DAYS
) -> list[Tls]:
    """Make an authority for one job, a certificate for each of its ranks, and one for launchers.

    Args:
        folder: Made here with mode 0700; must not exist.
        world_size: How many ranks.
        days: How long the certificates are good; longer than the job runs.

    Returns:
        The files of each rank, in rank order. Rank r's certificate names it as ``rank-r``, which is
        what makes it good for that rank alone; that of launchers has the name ``launcher``.

    Raises:
        ConfigurationError: ``cryptography`` is not installed, or the folder exists.
    """
    if world_size < 1 or not days > 0:
        raise ConfigurationError("certificates need at least one rank, and a time to be good for")
    try:
        authority = _Authority(datetime.timedelta(days=days))
    except ImportError as error:
        raise ConfigurationError(
            "certificates are made with the package cryptography: pip install 'rankwire[tls]'"
        ) from error
    try:
        home = Path(folder)
        home.mkdir(mode=0o700)
        _write(Path(certificate_files(home, "launcher").ca), authority.certificate_pem())
        everyone: list[CertificateHolder] = ["launcher", *range(world_size)]
        made = [_write_pair(home, who, *authority.issue(certificate_name(who))) for who in everyone]
        return made[1:]
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error


def _write_pair(home: Path, who: CertificateHolder, cert: bytes, key: bytes) -> Tls:
    files = certificate_files(home, who)
    _write(Path(files.cert), cert)
    _write(Path(files.key), key)
    return files


def _write(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read, whatever the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


class _Authority:
    """Signs certificates for as long as it exists."""

    def __init__(self, lifetime: datetime.timedelta) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self._x509, self._hashes, self._serialization, self._ec = x509, hashes, serialization, ec
        self._begin = datetime.datetime.now(datetime.UTC) - _TOLERANCE
        self._end = self._begin + _TOLERANCE + lifetime
        self._key = self._new_key()
        self._name = self._name_of("rankwire job")
        self._certificate = self._sign(
            self._name,
            self._key.public_key(),
            [
                (x509.BasicConstraints(ca=True, path_length=0), True),
                (self._usage(signs_certificates=True), True),
            ],
        )

    def certificate_pem(self) -> bytes:
        """Return its own certificate."""
        return self._pem(self._certificate)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Return a new certificate of that name and its private key, both in PEM form."""
        x509, serialization = self._x509, self._serialization
        key = self._new_key()
        usages = x509.oid.ExtendedKeyUsageOID
        certificate = self._sign(
            self._name_of(name),
            key.public_key(),
            [
                (x509.BasicConstraints(ca=False, path_length=None), True),
                (self._usage(signs_certificates=False), True),
                (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
                # Every rank dials and listens; of launchers, that of node 0 listens.
                (x509.ExtendedKeyUsage([usages.SERVER_AUTH, usages.CLIENT_AUTH]), False),
            ],
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return self._pem(certificate), private

    def _sign(self, name: Any, public_key: Any, extensions: Sequence[Any]) -> Any:
        x509 = self._x509
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False
            )
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, self._hashes.SHA256())

    def _usage(self, *, signs_certificates: bool) -> Any:
        return self._x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    def _new_key(self) -> Any:
        return self._ec.generate_private_key(self._ec.SECP256R1())

    def _name_of(self, name: str) -> Any:
        x509 = self._x509
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])

    def _pem(self, certificate: Any) -> bytes:
        encoded: bytes = certificate.public_bytes(self._serialization.Encoding.PEM)
        return encoded
