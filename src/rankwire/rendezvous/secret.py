"""Find the job's secret, and derive a rank's keys from it.

Sources of the secret, in this order: the argument; the file named by ``RANKWIRE_SECRET_FILE``;
``RANKWIRE_SECRET``; on loopback, a file that rank 0 writes into the runtime folder. A launcher
gives each rank only its ``RankKey``. The secret never appears in logs or in a ``repr``.
"""

from __future__ import annotations

import os
import stat
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rankwire import runtime
from rankwire.errors import ConfigurationError
from rankwire.fork import renew_in_child
from rankwire.rendezvous.runtime_dir import namespace, runtime_folder, runtime_folders
from rankwire.transports.private_files import read_private
from rankwire.wire.control_messages import Joined, World
from rankwire.wire.keys import HiddenKey, RankKey, rank_key, unwrap, unwrap_one

MIN_SECRET_NBYTES = 16
_INSECURE = b"rankwire without a secret"  # public, so it proves nothing

_LISTEN = "0A"  # linux/tcp_states.h
# Seconds: far longer than from writing a secret to listening, and than any wait for a world.
_FORMING, _SURELY_OVER = 60.0, 86400.0

_QUESTION = b"rankwire: the secret?"
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_DESCRIPTOR = struct.Struct("i")
_ANCILLARY_NBYTES = runtime.CMSG_SPACE(_CREDENTIALS.size) + runtime.CMSG_SPACE(_DESCRIPTOR.size)
_MAX_SECRET_NBYTES = 4096
_PATIENCE = 30.0  # seconds to wait for the launcher, whose loop never blocks for long

_environment_lock = runtime.Lock()
renew_in_child(_environment_lock)
_from_environment: bytes | None = None


def given_secret(secret: bytes | str | None, *, loopback: bool, insecure: bool) -> bytes | None:
    """Return the user's secret, None if rank 0 writes one, or raise ConfigurationError."""
    found = _given_or_read(secret)
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
        'rankwire runs with security="insecure": any process that reaches it can join, read and'
        " alter",
        stacklevel=5,
    )
    return found or _INSECURE


def is_secret_given() -> bool:
    """Return whether the environment contains a secret."""
    return bool(os.environ.get("RANKWIRE_SECRET_FILE")) or _read_environment() is not None


def read_secret_file(name: str, *, named: str) -> bytes:
    """Return the secret in a file that only this user can read, or raise ConfigurationError."""
    return read_private(name, named=named).strip()


class AgreedSecret:
    """Shares a secret of rank 0 through a file in the runtime folder, named by rank 0's port."""

    def __init__(self, port: int) -> None:
        self._namespace = namespace("net")
        self._path = runtime_folder() / f"secret-{self._namespace}-{port}"

    def publish(self) -> bytes:
        """Write a new secret. Call it before listening: ranks that connect read the file."""
        secret = runtime.token_bytes(32)
        draft = self._path.with_suffix(f".{runtime.getpid()}")
        with open(draft, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(secret)
        _sweep(draft, self._namespace)
        draft.replace(self._path)
        return secret

    def read(self) -> bytes | None:
        """Return the secret, or None if there is no file or another user owns it."""
        # Rank 0 may have chosen another folder.
        for folder in (self._path.parent, *runtime_folders()):
            secret = _read_if_there(folder / self._path.name)
            if secret is not None:
                return secret
        return None

    def remove(self, secret: bytes) -> None:
        """Remove the file, unless another job now uses the port."""
        if _read_if_there(self._path) == secret:
            self._path.unlink(missing_ok=True)


class OwnKeys:
    """The keys of a rank. Without ``secret``, rank 0 writes one to a file."""

    def __init__(self, rank: int, secret: bytes | None) -> None:
        self._rank = rank
        self._secret = secret
        self.own = b""
        self.shared: dict[int, HiddenKey] = {}  # with each other rank

    def coordinate(self, port: int, own_file: Callable[[Callable[[], None]], None]) -> None:
        """Store rank 0's keys; ``own_file`` gets the function that removes a new secret file."""
        if isinstance(self._secret, RankKey):
            raise ConfigurationError("rank 0 coordinates only with the secret that all ranks have")
        if self._secret is None:
            agreed = AgreedSecret(port)
            self._secret = agreed.publish()
            own_file(partial(agreed.remove, self._secret))
        self.own = self.of_rank(self._rank)

    def of_rank(self, rank: int) -> bytes:
        """Return the key with which a rank joins, on the rank that coordinates."""
        assert self._secret is not None
        return rank_key(self._secret, rank)

    def find(self, port: int) -> bytes | None:
        """Return the key with which this rank joins, or None if rank 0 has not written a secret."""
        secret = self._secret or AgreedSecret(port).read()
        if secret is None:
            return None
        self.own = secret if isinstance(secret, RankKey) else rank_key(secret, self._rank)
        return self.own

    def take_all(self, world: World, world_size: int) -> None:
        """Store the keys that this rank shares with the others."""
        if self.own:
            self.shared = dict(unwrap(self.own, world.keys, self._rank, world_size))

    def take(self, joined: Joined) -> None:
        """Replace the key that is shared with a restarted rank."""
        self.shared[joined.member.rank] = unwrap_one(self.own, joined.key)


def _read_if_there(path: Path) -> bytes | None:
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _sweep(newest: Path, namespace: int) -> None:
    """Remove the secrets of killed rank 0 processes.

    In this network namespace, a secret is stale if no process listens at its port a minute after it
    was written; in another, after a day. Ages are relative to a newly written file.
    """
    now = newest.stat().st_mtime
    for path in newest.parent.glob("secret-*"):
        try:
            age = now - path.stat().st_mtime
        except FileNotFoundError:  # another process removed it
            continue
        if age <= _FORMING:
            continue
        place, _, draft = path.name.removeprefix("secret-").partition(".")
        where, _, port = place.partition("-")
        if where == str(namespace) and port.isdecimal():
            is_stale = bool(draft) or int(port) not in _listening_ports()
        else:
            is_stale = age > _SURELY_OVER
        if is_stale:
            path.unlink(missing_ok=True)


def _listening_ports() -> set[int]:
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            if table == "tcp":
                return set(range(65536))  # hidden: any port may be in use
            continue  # a kernel without IPv6
        for line in lines:
            # "0: 0100007F:1F90 00000000:0000 0A ...": local address, remote address, state
            _, local, _, state = line.split()[:4]
            if state == _LISTEN:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def _given_or_read(secret: bytes | str | None) -> bytes | None:
    match secret:
        case str():
            return secret.encode()
        case bytes():
            return secret  # a RankKey keeps its type
        case bytearray() | memoryview():
            return bytes(secret)
        case None:
            if name := os.environ.get("RANKWIRE_SECRET_FILE"):
                return read_secret_file(name, named=f"RANKWIRE_SECRET_FILE={name}")
            return _read_environment()
    raise ConfigurationError(f"a secret is bytes or text, not {type(secret).__name__}")


def _read_environment() -> bytes | None:
    """Read ``RANKWIRE_SECRET`` and remove it, so that child processes do not inherit it."""
    global _from_environment
    with _environment_lock:
        value = os.environ.pop("RANKWIRE_SECRET", None)
        if value is not None:
            _from_environment = value.encode()
        return _from_environment


class SecretServer:
    """Gives a launcher's secret to one rank, and to no other process. For one thread.

    The rank inherits ``theirs``, and its children may too, so the secret is never sent on it. The
    rank sends one end of a new pair, and the kernel identifies the sending process. If the launcher
    started that process, it writes the secret to the new pair, once. A program that replaces itself
    by ``exec`` remains the same process and can still ask.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._ours, self.theirs = runtime.socketpair(runtime.AF_UNIX, runtime.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ours.setsockopt(runtime.SOL_SOCKET, runtime.SO_PASSCRED, 1)
        self._selector: runtime.BaseSelector | None = None
        self._process = 0

    def serve(self, selector: runtime.BaseSelector, process: int) -> None:
        """Start to answer this process, and no other."""
        self._process = process
        selector.register(self._ours, runtime.EVENT_READ, self._answer)
        self._selector = selector

    def close(self) -> None:
        """Stop answering. Idempotent."""
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
            if not question:  # all processes closed the other end
                self.close()
            elif question == _QUESTION and process == self._process and len(answers) == 1:
                with suppress(OSError):  # the rank did not wait
                    os.set_blocking(answers[0], False)
                    os.write(answers[0], self._secret)
                self.close()
        finally:
            for descriptor in answers:
                os.close(descriptor)


def ask_for_secret(fd: int, *, named: str) -> bytes:
    """Ask the launcher at the other end of ``fd`` for the secret, and close ``fd``.

    Raises ConfigurationError, with the variable ``named``, if no launcher of this process answers.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            # Another file has this number: leave it open.
            raise ConfigurationError(
                f"{named} is not a launcher's socket;"
                " this process inherited the variable but not the socket"
            )
        with runtime.Socket(fileno=fd) as launcher:
            secret = _asked(launcher)
    except OSError as error:
        raise ConfigurationError(
            f"the job's secret cannot be read from {named}: {error.strerror or error}."
            " Only a process that `rankwire run` itself started can join the world"
        ) from error
    if not secret:
        raise ConfigurationError(
            f"the launcher did not give the job's secret by {named}: it gives it once, and only to"
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
    """Return the sending process, and the descriptors of a message."""
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
