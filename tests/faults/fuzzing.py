"""Fuzzing of everything that reads bytes from the wire. Run as a script, by ``test_fuzz.py``::

    python tests/faults/fuzzing.py TARGET SEED COUNT [hard]

Inputs are damaged valid ones, or with ``hard`` such as are meant to take long. Only the errors that
a reader promises may come out. Each input is watched: one that takes longer than a second, or
memory above the limit, ends the run with the input in hex. The limit on address space makes an
allocation by a lying length fail at once. A hard input may take so much processor time for each of
its bytes, and no more. Prints what happened as JSON.
"""

import dataclasses
import datetime
import enum
import json
import resource
import signal
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID

if __name__ == "__main__":  # a script has its own folder on the path, not the one above
    sys.path[0] = str(Path(__file__).parents[1])

import msgspec
import numpy as np

from faults.adversary import Adversary
from faults.mutator import Mutator
from headers import bytes_received, pack_header
from rankwire import errors
from rankwire.codec.codec import Codec
from rankwire.links.memory import allocate
from rankwire.rpc import messages as rpc
from rankwire.wire import control_messages as control
from rankwire.wire.array_messages import pack_array, unpack_head
from rankwire.wire.control_messages import Notice
from rankwire.wire.frames import LOAN, Channel
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    HELLO_NBYTES,
    PROOF_NBYTES,
    VERDICT_NBYTES,
    Hello,
    Initiator,
    Purpose,
    Responder,
    Status,
    job_id,
)
from rankwire.wire.loans import pack_loan, unpack_loan
from rankwire.wire.parser import FrameParser

ADDRESS_SPACE = 1 << 30  # beyond what the process has at the start
MEMORY_LIMIT = 64 << 20
SLOW = 1.0  # seconds of the processor for one input
_WATCH_EVERY = 256  # inputs
# Of processor time, for a hard input. The slowest honest ones, many small arrays, take 0.5 us for
# a byte on an idle machine; what the limits of equal hashes allow takes 1 us.
SLOW_BYTE = 4e-6
SLOW_START = 0.1

KEY, NONCE = bytes(range(32)), bytes(range(32, 64))
JOB = job_id("fuzz")


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    y: float


class Pair(msgspec.Struct):
    first: Any
    second: Any


class Option(enum.IntFlag):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Label:
    """Hashes by one field, compares by all."""

    name: Any
    content: Any = dataclasses.field(hash=False)
    number: Any = dataclasses.field(hash=False)


class Step(NamedTuple):
    number: Any
    loss: Any = None


class Handle:
    """Has hooks."""

    def __init__(self, key: Any) -> None:
        self.key = key


STATE: OrderedDict[str, Any] = OrderedDict(w=1)
STATE._metadata = {"version": 1}  # type: ignore[attr-defined]
CODEC = Codec([Color, Point, Pair, Option, Label, Step])
CODEC.register(Handle, take=lambda value, _: value.key, build=lambda key, _: Handle(key))
VALUES: list[Any] = [
    None, True, 7, -(1 << 40), 1 << 80, 1.5, 2j, "text", "äöü", b"bytes", b"x" * 3000,
    bytearray(b"y"), [1, [2, [3]]], (1, "two", 3.0), {"a": 1, 2: [None]}, {1, 2}, frozenset("ab"),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), datetime.date(2024, 1, 1),
    datetime.time(1, 2), datetime.timedelta(days=3), Color.RED, Point(1, 2.0),
    Pair([1], {"k": b""}),
    np.arange(6, dtype="<i4").reshape(2, 3), np.zeros((0, 4)), np.float32(3), np.array("abc"),
    np.array([True, False]), np.arange(3, dtype=">f8"), np.datetime64("2024-01-01"),
    np.array([1 + 2j]), np.asfortranarray(np.ones((3, 2))), [np.arange(2), (np.ones(1), "x")],
    list(range(100)), {str(n): n for n in range(50)}, [0.5] * 200,
    Decimal("-1.5E+10"), Decimal("sNaN1"), Fraction(-22, 7), UUID(int=5), range(3, 9, 2),
    slice(1, 2),
    PurePosixPath("/a/b"), PureWindowsPath("c:/x"), STATE, defaultdict(list, {1: [2]}),
    Counter("hello"), deque([1, (2,)], 5), Step(1, 2.5), Handle([1, {"k": Handle(2)}]),
    np.zeros(3, "i4,?,U2"), np.zeros((2, 2), [("a", "i1"), ("b", [("c", "f8", (2,))])]),
]  # fmt: skip


def joined(encoded: tuple[Any, int]) -> bytes:
    return b"".join(bytes(part) for part in encoded[0])


class Target:
    """What is fuzzed: valid inputs, hard ones, and what to do with either."""

    def __init__(
        self,
        corpus: list[bytes],
        feed: Callable[[bytearray, Mutator], None],
        *expected: type,
        hard: Callable[[Adversary], bytearray] | None = None,
    ) -> None:
        self.corpus, self.feed, self.expected, self.hard = corpus, feed, expected, hard


# -- the handshake: a session is what the other end says, one message after the other


def _hellos() -> list[bytes]:
    hellos = [Hello(p, JOB, 5, 4, rank, 0, 9) for p in Purpose for rank in (0, 1, 3, 2**32 - 1)]
    return [hello.pack(NONCE) for hello in hellos]


def _listener_sessions() -> list[bytes]:
    """Whole sessions of one who dials, with good proofs."""
    sessions = []
    for greeting in _hellos():
        initiator = Initiator(Hello.unpack(greeting), key=KEY, nonce=NONCE)
        challenge = Responder(key=KEY, nonce=NONCE).challenge(greeting)
        sessions.append(greeting + initiator.proof(challenge))
    return sessions


_GOOD_SESSIONS = frozenset(_listener_sessions())


def _feed_listener(data: bytearray, _: Mutator) -> None:
    if len(data) < HELLO_NBYTES + PROOF_NBYTES:
        data += bytes(HELLO_NBYTES + PROOF_NBYTES - len(data))
    session = bytes(data[: HELLO_NBYTES + PROOF_NBYTES])
    responder = Responder(key=KEY, nonce=NONCE)
    responder.challenge(session[:HELLO_NBYTES])
    responder.verify(session[HELLO_NBYTES:])
    if session not in _GOOD_SESSIONS:
        raise AssertionError("let in without a proof")


_HELLO = Hello(Purpose.JOIN, JOB, 0, 4, 1, 0)


def _dialler_sessions() -> list[bytes]:
    """Whole sessions of one who listens: every verdict, well made."""
    sessions = []
    for status in Status:
        responder = Responder(key=KEY, nonce=NONCE)
        challenge = responder.challenge(_HELLO.pack(NONCE))
        sessions.append(challenge + responder.verdict(status, 12345))
    return sessions


_GOOD_ANSWERS = frozenset(_dialler_sessions())


def _feed_dialler(data: bytearray, _: Mutator) -> None:
    if len(data) < CHALLENGE_NBYTES + VERDICT_NBYTES:
        data += bytes(CHALLENGE_NBYTES + VERDICT_NBYTES - len(data))
    session = bytes(data[: CHALLENGE_NBYTES + VERDICT_NBYTES])
    initiator = Initiator(_HELLO, key=KEY, nonce=NONCE)
    initiator.proof(session[:CHALLENGE_NBYTES])
    try:
        initiator.finish(session[CHALLENGE_NBYTES:])
    except errors.AuthenticationError:
        raise
    except errors.RankwireError:
        if session in _GOOD_ANSWERS:
            return  # a refusal that the listener made
        raise AssertionError("a refusal was believed without a proof") from None
    if session not in _GOOD_ANSWERS:
        raise AssertionError("a welcome was believed without a proof")


# -- frames


def _streams() -> list[bytes]:
    loan = pack_loan(1, 4096, 4104, [(65536, 100), (131072, 200)], 300)
    frames = [(int(channel), b"p" * size) for channel in Channel for size in (0, 5, 100)]
    frames += [(channel | LOAN, loan) for channel in (Channel.MESSAGE, Channel.CALL, Channel.REPLY)]
    streams = [_stream([frame]) for frame in frames]
    streams += [_stream(frames[n : n + 5]) for n in range(0, len(frames), 3)]
    streams.append(_stream([(1, bytes(70_000)), (1, b"after a large one")]))
    return streams


def _stream(frames: list[tuple[int, bytes]]) -> bytes:
    return b"".join(
        pack_header((0, channel, number), len(payload), number) + payload
        for number, (channel, payload) in enumerate(frames)
    )


def _feed_frames(data: bytearray, mutator: Mutator) -> None:
    parser = FrameParser(allocate=allocate)
    for piece in mutator.split(data):
        while piece:
            buffer = parser.receive_buffer()
            count = min(len(buffer), len(piece))
            buffer[:count] = piece[:count]
            for frame in bytes_received(parser, count):
                if frame.envelope[1] & LOAN:
                    unpack_loan(frame.payload, max_nbytes=1 << 30)
            piece = piece[count:]


# -- payloads


def _feed_codec(data: bytearray, _: Mutator) -> None:
    CODEC.decode(data)


def _feed_array(data: bytearray, _: Mutator) -> None:
    unpack_head(data, len(data)).view(data)


_MEMBER = control.Member(1, 4242, "10.0.0.1", 29500, "/run/x.sock", "boot/ns")
_CONTROL: list[control.Message] = [
    control.Join(_MEMBER),
    control.Waiting([1, 2, 3]),
    control.World(77, [_MEMBER, _MEMBER]),
    control.Failed("nobody came", [2]),
    control.Gone(3, "killed", False),
    control.Beat([(1, 2.5), (300, 0.5)]),
    control.Suspected(2, 7.0),
    control.Fallen("it raised ValueError: no", "Traceback ...\nValueError: no"),
    Notice(5, 3, "barrier()", "asking", before=((2, "all_reduce"),), members=(0, 4), src=4),
    Notice(0, 3, "all_reduce", "failed", "no result", 1, 2, (1, 3), "train.py:3"),
]


def _feed_control(data: bytearray, _: Mutator) -> None:
    control.unpack(data)


def _requests() -> list[bytes]:
    return [
        joined(rpc.encode_request(CODEC, "f", 1.5, [0, "g", 1, "h"], (v, 1), {"k": v}))
        for v in VALUES
    ]


def _feed_request(data: bytearray, _: Mutator) -> None:
    rpc.decode_request(CODEC, data)


def _replies() -> list[bytes]:
    replies = [rpc.encode_result(CODEC, value) for value in VALUES]
    replies += [
        rpc.encode_failure(CODEC, ValueError("no")),
        rpc.encode_reply(CODEC, rpc.Outcome.NOT_FOUND, ["f", ["g", "h"], ""]),
        *(rpc.encode_reply(CODEC, outcome, "text") for outcome in rpc.Outcome),
        rpc.encode_reply(CODEC, rpc.Outcome.TOO_LARGE, [5, 4]),
    ]
    return [joined(reply) for reply in replies]


def _feed_reply(data: bytearray, _: Mutator) -> None:
    rpc.decode_reply(CODEC, data, 1, 5.0)


_STRANGERS = (errors.ProtocolError, errors.AuthenticationError)
TARGETS = {
    "listener": Target(_listener_sessions(), _feed_listener, *_STRANGERS),
    "dialler": Target(_dialler_sessions(), _feed_dialler, *_STRANGERS),
    "frame": Target(_streams(), _feed_frames, errors.ProtocolError, hard=Adversary.stream),
    "codec": Target(
        [joined(CODEC.encode(v)) for v in VALUES],
        _feed_codec,
        errors.InvalidMessageError,
        hard=Adversary.payload,
    ),
    "array": Target(
        [joined(pack_array(v)) for v in VALUES if isinstance(v, np.ndarray) and not v.dtype.names],
        _feed_array,
        errors.InvalidMessageError,
        hard=Adversary.array,
    ),
    "control": Target(
        [control.pack(m) for m in _CONTROL],
        _feed_control,
        errors.InvalidMessageError,
        hard=Adversary.control,
    ),
    "request": Target(
        _requests(), _feed_request, errors.InvalidMessageError, hard=Adversary.payload
    ),
    "reply": Target(_replies(), _feed_reply, errors.RankwireError, hard=Adversary.payload),
}


def fuzz(
    target: Target, seed: str, count: int, *, watch: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Feed so many inputs; raise at the first one that shows a defect, with the input in a note.

    ``watch`` is called now and then; if it is not called again for long, an input hangs.
    """
    mutator = Mutator(target.corpus, seed)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    memory = _resident()
    data = bytearray()
    original = b""
    try:
        for number in range(count):
            if number % _WATCH_EVERY == 0:
                watch()
            data = mutator.next()
            original = bytes(data)
            began = time.thread_time()  # not the clock: others may have the processor
            try:
                target.feed(data, mutator)
                outcomes["read"] += 1
            except target.expected as error:
                outcomes[type(error).__name__] += 1
            slowest = max(slowest, time.thread_time() - began)
            if slowest > SLOW:
                raise AssertionError(f"an input took {slowest:.3f} s")
        grown = _resident() - memory
        if grown > MEMORY_LIMIT:
            raise AssertionError(f"memory grew by {grown >> 20} MiB")
    except BaseException as error:
        error.add_note(f"seed {seed!r}, input {original.hex()}")
        raise
    return {"outcomes": outcomes, "slowest": slowest, "memory": grown}


def fuzz_hard(target: Target, seed: str, count: int) -> dict[str, Any]:
    """Feed so many inputs that are meant to take long; raise at the first one that does."""
    assert target.hard is not None
    mutator = Mutator(target.corpus, seed)
    records = [("Label", "name,content,number", 3)]
    adversary = Adversary(seed, records, ["Option", "Color"])
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for number in range(count):
        data = target.hard(adversary)
        nbytes = len(data)
        began = time.thread_time()
        try:
            target.feed(data, mutator)
            outcomes["read"] += 1
        except target.expected as error:
            outcomes[type(error).__name__] += 1
        seconds = time.thread_time() - began
        slowest = max(slowest, (seconds - SLOW_START) / nbytes)
        if slowest > SLOW_BYTE:
            what = f"{nbytes} bytes took {seconds:.3f} s"
            raise AssertionError(f"seed {seed!r}, input {number}: {what}; {bytes(data[:200])!r}")
    return {"outcomes": outcomes, "slowest": max(slowest, 0.0)}


def _hung(*_: object) -> None:
    raise AssertionError("hung")


def _resident() -> int:
    """Return the most memory that this program ever had.

    Not ``ru_maxrss``: that survives exec, so a child begins with the peak of the test run that
    started it, and any growth below that is not seen.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def main(name: str, seed: str, count: str, *hard: str) -> None:
    """Fuzz one target with little memory, and print what happened."""
    if hard:
        print(json.dumps(fuzz_hard(TARGETS[name], f"{name} {seed}", int(count))))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, _hung)
    began = time.monotonic()
    result = fuzz(
        TARGETS[name],
        f"{name} {seed}",
        int(count),
        watch=lambda: signal.setitimer(signal.ITIMER_REAL, 10 * SLOW) and None,
    )
    print(json.dumps({**result, "seconds": time.monotonic() - began, "inputs": int(count)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
