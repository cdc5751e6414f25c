"""The job's own certificate authority, which lives in memory and signs what a job needs.

The only module that imports ``cryptography``, which comes with the extra ``rankwire[tls]``. Keys
are EC P-256. Knows nothing of ranks, launchers and files: names in, PEM out.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of hosts differ; a certificate is good from a little before it was made.
_TOLERANCE = datetime.timedelta(hours=1)


class Authority:
    """Signs certificates for as long as it exists.

    Args:
        lifetime: How long they are good.
    """

    def __init__(self, lifetime: datetime.timedelta) -> None:
        self._begin = datetime.datetime.now(datetime.UTC) - _TOLERANCE
        self._end = self._begin + _TOLERANCE + lifetime
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name_of("rankwire job")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key(), constraints)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    def certificate_pem(self) -> bytes:
        """Return its own certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Return a new certificate of that name and its private key, both in PEM form."""
        key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=False, path_length=None)
        # Every rank dials and listens; of launchers, that of node 0 listens.
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
        """Return what all certificates have, the authority's own too."""
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
