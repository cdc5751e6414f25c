"""The certificates of a job, in a folder: signed by an authority of its own, for TLS.

The authority's private key is never written anywhere and is gone when ``make_certificates``
returns, so further certificates for the job cannot be made. The folder is laid out as
``links.security`` says, whose ``files_of`` finds them again. Needs the extra ``rankwire[tls]``, as
``authority`` does, which is imported only when called. Knows nothing of how ranks start or connect;
a ``Tls`` is all that they get.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from rankwire.errors import ConfigurationError
from rankwire.transports.security import CertificateHolder, Tls, certificate_files, certificate_name

DEFAULT_DAYS = 30.0


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
        from rankwire.launch.authority import Authority
    except ImportError as error:
        raise ConfigurationError(
            "certificates are made with the package cryptography: pip install 'rankwire[tls]'"
        ) from error
    authority = Authority(timedelta(days=days))
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
