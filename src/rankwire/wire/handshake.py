"""The handshake: four messages of fixed size in which both ends prove that they have the same key.

::

    I -> R  HELLO      128 bytes  the dialling rank, its purpose, its job; a nonce
    R -> I  CHALLENGE   64 bytes  a nonce; nothing that depends on the secret
    I -> R  PROOF       32 bytes  HMAC-SHA256(key, "I" | transcript)
    R -> I  VERDICT     40 bytes  status | HMAC-SHA256(key, "R" | transcript | status)

The transcript is HELLO, CHALLENGE, and inside TLS the SHA-256 of the listener's certificate, which
excludes a man in the middle with another certificate. The letters stop a reflected proof. The MAC
covers all fields of HELLO, so none can be changed or moved to another connection. Before the proof
is verified, the listener reads nothing of variable size and gives no reason. It answers a wrong
proof with a VERDICT without a MAC, because a MAC would let the peer try secrets offline. A peer may
retry a connection that ends without any VERDICT. HELLO says how frames will be protected; the
listener accepts that or refuses. ``wire.keys`` says which key it is.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import IntEnum
from hashlib import sha256

from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    NoConnectionError,
    OverloadedError,
    ProtocolError,
    RankwireError,
    RendezvousError,
    VersionMismatchError,
)
from rankwire.wire.seals import Protection, Seals, make_seals

PROTOCOL_VERSION = 4
NONCE_NBYTES = 32
LAUNCHER = 0xFFFFFFFF  # instead of a rank

_MAGIC = b"rankwire"
_MAX_DETAIL = (1 << 56) - 1
_HELLO = struct.Struct("<8sHH16sIIIIQ32sI40x")
_CHALLENGE = struct.Struct("<8sH22x32s")
_VERDICT = struct.Struct("<Q32s")
HELLO_NBYTES = _HELLO.size
CHALLENGE_NBYTES = _CHALLENGE.size
PROOF_NBYTES = 32
VERDICT_NBYTES = _VERDICT.size
_WRONG_PROOF = _VERDICT.pack(11, bytes(32))  # not in ``Status``: the peer is unauthenticated
_RESERVED_NBYTES = 40
_KNOWN_PROTECTION = (Protection.NONE, Protection.SEALED, Protection.SEALED | Protection.FULL_MAC)


class Purpose(IntEnum):
    """The purpose of a connection."""

    JOIN = 1
    MESSAGES = 2
    CALLS = 3
    LAUNCH = 4  # from a launcher on another host; ranks are then nodes
    INQUIRY = 5  # asks what a rank is doing, if the coordinator does not pass that on


BETWEEN_RANKS = frozenset({Purpose.MESSAGES, Purpose.CALLS, Purpose.INQUIRY})


class Status(IntEnum):
    """The verdict on an authenticated peer."""

    WELCOME = 0
    DUPLICATE_RANK = 1
    WRONG_WORLD_SIZE = 2
    OTHER_JOB = 3
    OTHER_EPOCH = 4
    INVALID_RANK = 5
    NOT_EXPECTED = 6
    CLOSED = 7
    TOO_LITTLE_PROTECTION = 8
    WRONG_CERTIFICATE = 9
    TOO_MANY_CONNECTIONS = 10


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialling rank and the purpose of the connection."""

    purpose: Purpose
    job: bytes  # of ``job_id``
    epoch: int  # the incarnation of the world; 0 when joining
    world_size: int  # as the dialling rank was configured
    rank: int  # the dialling rank
    peer: int  # the listening rank, or ``LAUNCHER``
    service: int = 0  # for calls: the agent's number
    protection: Protection = Protection.NONE

    @property
    def dialler(self) -> int:
        """The dialling rank, or ``LAUNCHER``."""
        return LAUNCHER if self.purpose is Purpose.LAUNCH else self.rank

    @property
    def listener(self) -> int:
        """The listening rank, or ``LAUNCHER``."""
        return LAUNCHER if self.purpose is Purpose.LAUNCH else self.peer

    def pack(self, nonce: bytes) -> bytes:
        """Return the HELLO message."""
        *others, protection = astuple(self)
        return _HELLO.pack(_MAGIC, PROTOCOL_VERSION, *others, nonce, protection)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Parse a HELLO; raise ``ProtocolError`` or ``VersionMismatchError``."""
        magic, version, purpose, *others, _, protection = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError("the connection did not begin with a rankwire greeting")
        if version != PROTOCOL_VERSION:
            raise VersionMismatchError(PROTOCOL_VERSION, version)
        if any(data[-_RESERVED_NBYTES:]):
            raise ProtocolError("a greeting has reserved bytes set")
        if purpose not in list(Purpose):
            raise ProtocolError(f"a greeting names the unknown purpose {purpose}")
        if protection not in _KNOWN_PROTECTION:
            raise ProtocolError(f"a greeting names the unknown protection {protection}")
        fields = [Purpose(purpose), *others, Protection(protection)]
        return cls(*fields)


class StillConnectedError(NoConnectionError):
    """The peer is alive, and still has an earlier connection of this rank."""


def job_id(name: str) -> bytes:
    """Return the 16 bytes that identify a job of this name."""
    return sha256(b"rankwire job " + name.encode()).digest()[:16]


def handshake_key(secret: bytes) -> bytes:
    """Derive the key for connections between launchers from the secret."""
    return hmac.digest(secret, b"rankwire v3 handshake", sha256)


def refusal(status: int, detail: int, hello: Hello) -> RankwireError:
    """Return the error for a dialling rank that was refused."""
    offered = f"this one offers {_described(hello.protection)}"
    protection = f"the other end wants {_described(detail)}, {offered}: give all"
    texts = {
        Status.DUPLICATE_RANK: f"rank {hello.rank} is taken by another process (pid {detail})",
        Status.WRONG_WORLD_SIZE: (
            f"the job has a world size of {detail}, this rank was told {hello.world_size}"
        ),
        Status.OTHER_JOB: "another job listens at this address",
        Status.INVALID_RANK: f"rank {hello.rank} is not one of the {detail} ranks of the job",
        Status.NOT_EXPECTED: "the world has formed already and takes no more ranks",
        Status.TOO_LITTLE_PROTECTION: f"{protection} ranks the same security= and integrity=",
    }
    if status == Status.WRONG_CERTIFICATE:
        who = "a launcher" if hello.dialler == LAUNCHER else f"rank {hello.rank}"
        return AuthenticationError(f"the certificate of this end is not that of {who}")
    if status == Status.TOO_MANY_CONNECTIONS:
        return OverloadedError(
            f"rank {hello.peer} has {detail} connections of rank {hello.rank}, and takes no more"
        ).during(peer=hello.peer)
    if hello.purpose is Purpose.LAUNCH:  # its ranks are nodes
        texts |= {
            Status.WRONG_WORLD_SIZE: (
                f"the job has --nnodes {detail}, this launcher was told --nnodes {hello.world_size}"
            ),
            Status.INVALID_RANK: (
                f"--node-rank {hello.rank} is not one of 1 to {detail - 1} (--nnodes {detail})"
            ),
            Status.TOO_LITTLE_PROTECTION: f"{protection} launchers the same --master and --tls",
        }
    if status == Status.OTHER_EPOCH:
        return NoConnectionError("the peer belongs to another incarnation of the job")
    if status == Status.CLOSED:
        who = "rank" if hello.purpose is Purpose.MESSAGES else "the agent of rank"
        return ChannelClosedError(f"{who} {hello.peer} has left").during(peer=hello.peer)
    is_joining = hello.purpose in (Purpose.JOIN, Purpose.LAUNCH)
    if status == Status.DUPLICATE_RANK and not is_joining:
        return StillConnectedError(
            f"rank {hello.peer} still has an earlier connection of rank {hello.rank}"
        )
    text = texts.get(status, f"refused with status {status}")  # type: ignore[call-overload]
    return RendezvousError(text) if is_joining else NoConnectionError(text)


def _described(protection: int) -> str:
    if not protection & Protection.SEALED:
        return "frames without seals"
    bulk = "the MAC" if protection & Protection.FULL_MAC else "a CRC"
    return f"sealed frames with {bulk} of bulk"


class Initiator:
    """The dialling end. Call ``hello``, ``proof``, ``finish`` and ``seals`` in this order."""

    def __init__(self, hello: Hello, *, key: bytes, nonce: bytes, binding: bytes = b"") -> None:
        self._hello = hello
        self._key = key
        self._binding = binding
        self._greeting = hello.pack(nonce)
        self._transcript = b""

    def hello(self) -> bytes:
        """Return the first message to send."""
        return self._greeting

    def proof(self, challenge: bytes) -> bytes:
        """Consume CHALLENGE, return PROOF."""
        magic, version, _ = _CHALLENGE.unpack(challenge)
        if magic != _MAGIC:
            raise AuthenticationError(
                "another program listens at this address: it does not speak rankwire"
            )
        if version != PROTOCOL_VERSION:
            raise VersionMismatchError(PROTOCOL_VERSION, version)
        self._transcript = self._greeting + challenge + self._binding
        return hmac.digest(self._key, b"I" + self._transcript, sha256)

    def finish(self, verdict: bytes) -> None:
        """Consume VERDICT; raise ``refusal`` or ``AuthenticationError`` unless it is a welcome."""
        status, mac = _VERDICT.unpack(verdict)
        expected = hmac.digest(self._key, b"R" + self._transcript + verdict[:8], sha256)
        if not hmac.compare_digest(mac, expected):
            is_joining = self._hello.purpose in (Purpose.JOIN, Purpose.LAUNCH)
            other = f"is not rank {self._hello.peer} of this world"
            if verdict == _WRONG_PROOF:
                cause = "the secrets differ" if is_joining else f"it {other}"
                raise AuthenticationError(f"the other end refused our proof: {cause}")
            cause = f"{other}: it does not have the key of the two ranks"
            if is_joining:
                cause = "does not know the job's secret"
            raise AuthenticationError(f"the other end {cause}")
        if status & 0xFF != Status.WELCOME:
            raise refusal(status & 0xFF, status >> 8, self._hello)

    def seals(self) -> Seals | None:
        """Return the seals for the frames of this end; None if frames are not sealed."""
        return make_seals(self._key, self._transcript, self._hello.protection, dialled=True)


class Responder:
    """The listening end. Call ``challenge``, ``verify``, ``verdict``, ``seals`` in this order."""

    def __init__(
        self, *, key: bytes | Callable[[Hello], bytes], nonce: bytes, binding: bytes = b""
    ) -> None:
        self._find_key = key if callable(key) else lambda hello: key
        self._key = b""
        self._binding = binding
        self._challenge = _CHALLENGE.pack(_MAGIC, PROTOCOL_VERSION, nonce)
        self._transcript = b""
        self.hello: Hello | None = None

    def challenge(self, greeting: bytes) -> bytes:
        """Consume HELLO, return CHALLENGE; raise ``ProtocolError`` if it is not a HELLO.

        A HELLO of another version is answered too, so that the other end learns both versions.
        """
        try:
            self.hello = Hello.unpack(greeting)
            self._key = self._find_key(self.hello)
        except VersionMismatchError:
            self.hello = None
        self._transcript = greeting + self._challenge + self._binding
        return self._challenge

    def verify(self, proof: bytes) -> Hello:
        """Consume PROOF; return the HELLO of the other end, or raise ``AuthenticationError``."""
        expected = hmac.digest(self._key, b"I" + self._transcript, sha256)
        if self.hello is None or not hmac.compare_digest(proof, expected):
            raise AuthenticationError("a connection did not prove that it has the key")
        return self.hello

    def verdict(self, status: Status, detail: int = 0) -> bytes:
        """Return VERDICT; ``detail`` becomes part of the text of a refusal."""
        packed = int(status | (detail & _MAX_DETAIL) << 8).to_bytes(8, "little")
        return packed + hmac.digest(self._key, b"R" + self._transcript + packed, sha256)

    def refusal(self) -> bytes:
        """Return the VERDICT for a proof that ``verify`` did not accept."""
        return _WRONG_PROOF

    def seals(self) -> Seals | None:
        """Return the seals for the frames of this end; None if frames are not sealed."""
        assert self.hello is not None
        return make_seals(self._key, self._transcript, self.hello.protection, dialled=False)
