"""Connect the launchers of one job on several hosts.

Launchers report to that of node 0, which directs all ranks. If one disconnects, the job fails.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from rankwire.clock import Clock
from rankwire.deadline import Deadline
from rankwire.errors import ChannelClosedError, InvalidMessageError, PeerLostError, RankwireError
from rankwire.links.connection import Connection
from rankwire.links.dialer import HANDSHAKE_LIMIT, authenticate
from rankwire.texts import one_line, printable
from rankwire.transports.byte_stream import ByteStream
from rankwire.transports.security import Policy
from rankwire.transports.tcp_stream import TcpAddress, connect_tcp, expect_prompt_reading
from rankwire.wire.control_messages import CONTROL
from rankwire.wire.frames import whole_of
from rankwire.wire.handshake import Hello, Purpose, handshake_key, job_id
from rankwire.wire.seals import Seals

# ``Start`` contains the job's name; before that, only the secret tells jobs apart.
LAUNCH_JOB = "rankwire run"
_MAX_LAUNCHER_NBYTES = 16 << 20
_TELLING_PATIENCE = 0.5
_MAX_LINES = 100  # the last lines of a rank's stderr


class Here(msgspec.Struct, frozen=True, tag="here"):
    """To node 0: this launcher is ready to start ranks of these roles, in this order."""

    roles: list[str]
    host: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """From node 0: start your ranks."""

    world_size: int  # total of all hosts
    first_rank: int
    job: str  # differs in each attempt
    attempt: int  # how often the ranks were started before
    stays: bool = False  # wait after all its ranks have ended, because one may be restarted
    roles: list[str] = []  # of all ranks of the world


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """From node 0: restart one of your ranks; ``incarnation`` counts its restarts."""

    rank: int
    incarnation: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """From node 0: kill one of your ranks, which all ranks gave up."""

    rank: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """From node 0: no rank will be restarted; send ``Over`` when yours have ended."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """To node 0: one of my ranks has ended."""

    rank: int
    code: int | None
    signal: int | None
    is_oom: bool  # the kernel killed it for lack of memory
    by_itself: bool  # no launcher asked it to end


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """From node 0: send this signal to your ranks, and SIGKILL after the grace."""

    number: int


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """From node 0: kill your ranks now."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """To node 0: all ranks of this launcher have ended, some after being stopped or killed."""

    stopped: list[int]
    killed: list[int]
    errors: dict[int, list[str]]  # the last lines that failed ranks wrote to stderr


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """To node 0: this launcher received a signal for the job."""

    number: int


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """To node 0: the job cannot continue here; exit with this code."""

    text: str
    code: int


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """From node 0: the job is over; exit with this code and print this text, if any."""

    code: int
    text: str
    was_asked: bool = False  # the user ended the job: do not wait for blocked readers of output


Order = Start | Restart | End | Release | Stop | Kill
Message = Order | Here | Ended | Over | Asked | Trouble | Finish

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def _harmless(message: Message) -> Message:
    match message:
        case Here(host=host):
            return replace(message, host=one_line(host))
        case Start(job=job):
            return replace(message, job=one_line(job))
        case Over():
            errors = {
                rank: [one_line(line) for line in lines[-_MAX_LINES:]]
                for rank, lines in message.errors.items()
            }
            return replace(message, errors=errors)
        case Finish(text=text) | Trouble(text=text):
            return replace(message, text=printable(text))
    return message


class LauncherLink:
    """Connects two launchers. For one thread. It owns its stream."""

    def __init__(self, stream: ByteStream, node: int, clock: Clock, seals: Seals | None) -> None:
        expect_prompt_reading(stream)
        self._connection = Connection(
            stream, peer=node, max_nbytes=_MAX_LAUNCHER_NBYTES, clock=clock, seals=seals
        )
        self._clock = clock

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._connection.fileno()

    def tell(self, message: Message) -> None:
        """Send a message; on an error, the next ``receive`` raises it."""
        payload, patience = _encode(message), Deadline(_TELLING_PATIENCE, self._clock)
        try:
            self._connection.send(CONTROL, ([payload], len(payload)), patience)
        except RankwireError as error:
            self._connection.fail(error)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; raise RankwireError on loss or an invalid one."""
        if self._connection.failure is not None:
            raise _of_a_launcher(self._connection.failure)
        try:
            frames = self._connection.read_ready() or []
        except (PeerLostError, ChannelClosedError) as error:
            raise _of_a_launcher(error) from error
        try:
            return [_harmless(_decoder.decode(whole_of(frame.payload))) for frame in frames]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidMessageError(f"a launcher's message does not decode: {error}") from error

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()


def _of_a_launcher(error: RankwireError) -> RankwireError:
    twin = error.copy()
    twin.peer = None
    if isinstance(error, PeerLostError):
        twin.message = error.reason
    elif isinstance(error, ChannelClosedError) and error.peer is not None:
        twin.message = "it has left"
    twin.args = (twin.message,)
    return twin


def dial_launcher(
    address: str,
    *,
    secret: bytes,
    node: int,
    nodes: int,
    policy: Policy,
    deadline: Deadline,
    check: Callable[[], None],
) -> LauncherLink:
    """Connect once to the launcher of node 0.

    It calls ``check`` repeatedly while it waits; an exception from it ends the wait. Raises
    NoConnectionError if no launcher listens yet, AuthenticationError, RendezvousError if node 0
    refuses this node, and DeadlineExceededError.
    """
    limit = deadline.sooner(HANDSHAKE_LIMIT)
    where = TcpAddress.parse(address)
    sock = connect_tcp(where, limit, check=check)
    try:
        hello = Hello(Purpose.LAUNCH, job_id(LAUNCH_JOB), 0, nodes, node, 0)
        stream, seals = authenticate(
            sock, hello, key=handshake_key(secret), deadline=limit, check=check, policy=policy
        )
        return LauncherLink(stream, 0, deadline.clock, seals)
    except BaseException:
        sock.close()
        raise
