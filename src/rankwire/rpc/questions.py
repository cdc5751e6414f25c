"""What a caller asks a callee about calls that it has made: what became of them.

The answer is given by the thread that polls there, whatever the functions do (``accounts``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwire.backends.base import Backend
from rankwire.codec.codec import Codec
from rankwire.deadline import Deadline
from rankwire.errors import DeadlineExceededError, RankwireError
from rankwire.mesh.calls import CallPort
from rankwire.rpc.accounts import QUESTION
from rankwire.rpc.circles import ActiveCall, Key, unpack
from rankwire.rpc.messages import decode_reply, encode_request

if TYPE_CHECKING:
    from rankwire.rpc.server import Server

_log = logging.getLogger("rankwire")

# Adds to an error what is known of a call, given its number and its function's name.
Explain: TypeAlias = Callable[[DeadlineExceededError, int, str], None]

_ASK_LIMIT = 0.2  # seconds for asking what became of a call whose deadline has passed


@dataclass(frozen=True, slots=True)
class Questions:
    """Asks. Every method is safe from any thread.

    Attributes:
        backend: Whose ranks are asked.
        port: Carries the questions.
        codec: How they travel.
        ids: Numbers for them, shared with the calls.
        server: Answers what this rank asks itself.
    """

    backend: Backend
    port: CallPort
    codec: Codec
    ids: Iterator[int]
    server: Server

    def ask(
        self, rank: int, keys: Iterable[Key], deadline: Deadline
    ) -> dict[Key, ActiveCall] | None:
        """Ask a rank about calls that it serves; None if it does not say."""
        if rank == self.backend.rank:
            return self.server.account(keys)
        try:
            told = self.put(rank, QUESTION, tuple(list(key) for key in keys), deadline)
            return unpack(told, rank, self.backend.world_size)
        except RankwireError as error:
            _log.debug("rank %d did not say what it is doing: %s", rank, error)
            return None

    def put(self, rank: int, name: str, arguments: tuple[Any, ...], deadline: Deadline) -> Any:
        """Put a question to a rank, and return the answer.

        Raises:
            RankwireError: It does not say.
        """
        left = deadline.remaining()
        question = encode_request(self.codec, name, left, [], arguments, {})
        reply = self.port.call(rank, next(self.ids), question, deadline)
        assert reply is not None  # there is no limit on questions
        try:
            return decode_reply(self.codec, reply.wait(deadline), rank, deadline.limit)
        except RankwireError:
            raise
        except BaseException:  # an interrupt, perhaps before anyone waited
            reply.withdraw()
            raise

    def about_late(self, dst: int, request_ids: Sequence[int], limit: float) -> Explain:
        """Ask a callee once about calls whose deadline has passed.

        Args:
            dst: The callee.
            request_ids: The calls.
            limit: How long they were waited for: a short wait is not made much longer by asking.

        Returns:
            What adds to the error of one of them what the callee has said, if it has.
        """
        clock = self.backend.clock
        patience = min(_ASK_LIMIT, limit / 4)
        keys = {number: Key(dst, self.backend.rank, number) for number in request_ids}
        answer: dict[Key, ActiveCall] | None = {}
        if patience > 0.0:
            answer = self.ask(dst, keys.values(), Deadline(patience, clock))
        of_all = DeadlineExceededError(limit, waiting_for=[dst])
        if len(keys) > 1:  # else the backend adds what the rank does when it sees the error
            self.backend.explained(of_all, "rpc_async", Deadline(0.0, clock), dst)

        def explain(error: DeadlineExceededError, request_id: int, name: str) -> None:
            if answer is None:
                error.explain(f"rank {dst} does not say what it is doing")
            # If it does not know the call, its reply is on the way, or the request has not arrived.
            elif (call := answer.get(keys[request_id])) is not None:
                seconds = f"{call.seconds:.3g} s"
                error.explain(f"rank {dst} has had {name!r} for {seconds}; it {call.doing}")
            if of_all.detail:
                error.explain(of_all.detail).is_explained = True

        return explain
