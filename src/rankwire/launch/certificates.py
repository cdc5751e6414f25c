"""Make the certificates of one job, signed by an authority that exists only in memory.

Its private key is never written, so no other certificate can be made for the job. Importing this
module without the extra ``rankwire[tls]`` raises.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from rankwire.errors import ConfigurationError
from rankwire.transports.security import CertificateHolder, Tls, certificate_files, certificate_name

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ConfigurationError(
        "certificates are made with the package cryptography: pip install 'rankwire[tls]'"
    ) from error

# Hosts' clocks differ, so a certificate is valid from shortly before its creation.
_TOLERANCE = datetime.timedelta(hours=1)


def make_certificates(
    folder: str | os.PathLike[str], world_size: int, *, days: float = 30.0
) -> list[Tls]:
    """Make a certificate for each rank of a job and one for its launchers, valid for ``days``.

    Return the files of each rank, in rank order. Rank r's certificate is valid only for that rank.
    The folder gets mode 0700. Raise ConfigurationError if it exists or an argument is invalid.
    """
    if world_size < 1 or not days > 0:
        raise ConfigurationError("certificates need at least one rank and more than 0 days")
    authority = _Authority(datetime.timedelta(days=days))
    try:
        home = Path(folder)
        home.mkdir(mode=0o700)
        _write(Path(certificate_files(home, "launcher").ca), authority.certificate)
        everyone: list[CertificateHolder] = ["launcher", *range(world_size)]
        made = [certificate_files(home, who) for who in everyone]
        for who, files in zip(everyone, made, strict=True):
            certificate, key = authority.issue(certificate_name(who))
            _write(Path(files.cert), certificate)
            _write(Path(files.key), key)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    return made[1:]


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


class _Authority:
    def __init__(self, lifetime: datetime.timedelta) -> None:
        self._begin = datetime.datetime.now(datetime.UTC) - _TOLERANCE
        self._end = self._begin + _TOLERANCE + lifetime
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name_of("rankwire job")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key(), constraints)
        self.certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=False, path_length=None)
        # Every rank dials and listens; launchers dial, and node 0's listens.
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(_name_of(name), key.public_key(), constraints)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, constraints: x509.BasicConstraints
    ) -> x509.CertificateBuilder:
        usage = x509.KeyUsage(
            digital_signature=not constraints.ca,
            key_cert_sign=constraints.ca,
            crl_sign=constraints.ca,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(signer, critical=False)
            .add_extension(constraints, critical=True)
            .add_extension(usage, critical=True)
        )


def _name_of(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
