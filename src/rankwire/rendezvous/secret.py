"""The job's secret: where it comes from.

In this order: the argument; the file named by ``RANKWIRE_SECRET_FILE``; ``RANKWIRE_SECRET`` (last
resort: the environment of a process can be read by its user; it is removed once read); and on
loopback, without any of these, a file that rank 0 writes into this user's runtime folder, so that
only processes of the same user can join. Elsewhere a missing secret is an error unless
``security="insecure"`` is spelled out.

A launcher keeps the secret to itself and gives each rank, as the argument, the ``RankKey`` of that
rank. The secret is never logged and never in a ``repr``.
"""

from __future__ import annotations

import os
import secrets
import threading
import warnings

from rankwire.errors import ConfigurationError
from rankwire.forking import renew_in_child
from rankwire.links.private_files import read_private
from rankwire.rendezvous.host import runtime_folder
from rankwire.wire.keys import RankKey, rank_key

__all__ = [
    "MIN_SECRET_NBYTES",
    "AgreedSecret",
    "RankKey",
    "given_secret",
    "rank_key",
    "read_secret_file",
]

MIN_SECRET_NBYTES = 16
_INSECURE = b"rankwire without a secret"  # everyone's, so it proves nothing

_environment_lock = threading.Lock()
renew_in_child(_environment_lock)
_from_environment: bytes | None = None


def given_secret(secret: bytes | str | None, *, loopback: bool, insecure: bool) -> bytes | None:
    """Return the secret that the user gave in one way or another.

    None means that one is to be agreed through a file.

    Raises:
        ConfigurationError: None was given where one is needed, or it is too short.
    """
    found = _encoded(secret)
    if found is None:
        found = _read_file()
    if found is None:
        found = _read_environment()
    if found is not None and len(found) < MIN_SECRET_NBYTES:
        raise ConfigurationError(
            f"the secret has {len(found)} bytes, at least {MIN_SECRET_NBYTES} are needed; "
            'make one with: python3 -c "import secrets; print(secrets.token_hex(32))"'
        )
    if found is None and not (insecure or loopback):
        raise ConfigurationError(
            "a secret is needed when the address is not loopback: pass secret=, set "
            "RANKWIRE_SECRET_FILE to a file that only you can read, or spell out "
            'security="insecure"'
        )
    if not insecure:
        return found
    warnings.warn(
        'rankwire runs with security="insecure": whoever reaches it can join, read and alter',
        stacklevel=5,
    )
    return found or _INSECURE


def read_secret_file(name: str, *, named: str) -> bytes:
    """Return the secret in a file that only this user can read.

    Args:
        name: The file.
        named: How the user gave it, for the text of an error.

    Raises:
        ConfigurationError: It cannot be read, or others could.
    """
    return read_private(name, named=named).strip()


class AgreedSecret:
    """A secret that rank 0 makes and lays out in this user's runtime folder.

    The file is named after rank 0's port.
    """

    def __init__(self, port: int) -> None:
        namespace = (
            os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
        )
        self._path = runtime_folder() / f"secret-{namespace}-{port}"

    def publish(self) -> bytes:
        """Make a new one. Called between binding and listening, so whoever connects finds it."""
        secret = secrets.token_bytes(32)
        draft = self._path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        draft.replace(self._path)
        return secret

    def read(self) -> bytes | None:
        """Return it, or None if there is none (another user's rank 0, or none at all)."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, secret: bytes) -> None:
        """Remove it, unless another job has taken the port since."""
        if self.read() == secret:
            self._path.unlink(missing_ok=True)


def _encoded(secret: bytes | str | None) -> bytes | None:
    if secret is None:
        return None
    if isinstance(secret, str):
        return secret.encode()
    if not isinstance(secret, (bytes, bytearray, memoryview)):
        raise ConfigurationError(f"a secret is bytes or text, not {type(secret).__name__}")
    return secret if isinstance(secret, bytes) else bytes(secret)  # a RankKey stays one


def _read_file() -> bytes | None:
    name = os.environ.get("RANKWIRE_SECRET_FILE")
    return read_secret_file(name, named=f"RANKWIRE_SECRET_FILE={name}") if name else None


def _read_environment() -> bytes | None:
    """Read ``RANKWIRE_SECRET`` once and remove it.

    It is removed so that child processes do not inherit it by accident.
    """
    global _from_environment
    with _environment_lock:
        value = os.environ.pop("RANKWIRE_SECRET", None)
        if value is not None:
            _from_environment = value.encode()
        return _from_environment
