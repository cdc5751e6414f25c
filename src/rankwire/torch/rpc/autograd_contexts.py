"""What a rank knows of the autograd contexts that reach it, and which one a thread is in.

A context has an id that all ranks know it by. Its upper 16 bits are the rank that made it, the
others are random: a rank that knows the id has been called in the context, or was told. It comes
into being at a rank with the first call that is made in it there. It ends with its maker's ``with``
block, or with its maker. Each rank tells the ranks that it has called in the context of its end
(``autograd_engine``). Here is only what is kept: which tensors left and came in messages, and the
gradients. How these are followed backwards is ``autograd_pass``; nothing here calls a rank.

Each rank can have ``MOST_KEPT`` contexts and messages with tensors kept here by its calls.

Locks: the table's and each context's own, both innermost; none is held while anything is called.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from rankwire.errors import OverloadedError

if TYPE_CHECKING:
    from rankwire.torch.rpc.autograd_pass import LocalPass
    from rankwire.torch.rpc.autograd_tracking import Outgoing

T = TypeVar("T")

COUNTER_BITS = 48
MAX_COUNT = (1 << COUNTER_BITS) - 1
MOST_KEPT = 131_072  # for each rank; a program that makes so many calls in one step is unknown
# A call may come after the end of its context. It must not bring the context back.
_REMEMBERED = 4096


# The context that calls are made in here. It goes along to a thread that carries on a served call.
CONTEXT: ContextVar[Context | None] = ContextVar("rankwire autograd context", default=None)


class AutogradThread(threading.local):
    """What the thread is about.

    Attributes:
        outgoing: The message in a context that it is encoding.
        running: The backward pass whose part it runs.
    """

    outgoing: Outgoing | None = None
    running: LocalPass | None = None


HERE = AutogradThread()


@contextmanager
def inside(context: Context | None) -> Iterator[None]:
    """Be in a context for a while, or in none."""
    before = CONTEXT.set(context)
    try:
        yield
    finally:
        CONTEXT.reset(before)


class Context:
    """What one rank knows of one context. Safe from any thread.

    Attributes:
        id: Its number on all ranks.
        peers: Ranks that this one tells of its end: it has called them in it, or they have asked.
        callers: Ranks that have called this one in it.
        kept: How much is kept in it because of calls of each rank.
        sent: For each message sent, by its number: the rank that it was for, and what stands for
            its tensors.
        received: The autograd node of each message that came, by sender and number.
        passes: The backward passes under way here, by number.
        is_released: It has ended, and nothing is added any more.
    """

    def __init__(self, number: int) -> None:
        self.id = number
        self.peers: set[int] = set()
        self.callers: set[int] = set()
        self.kept: Counter[int] = Counter()
        self.sent: dict[int, tuple[int, Tensor]] = {}
        self.received: dict[tuple[int, int], Any] = {}
        self.passes: dict[int, LocalPass] = {}
        self.is_released = False
        self._lock = threading.Lock()
        self._gradients: dict[Tensor, Tensor] = {}

    @property
    def maker(self) -> int:
        """The rank that made it."""
        return self.id >> COUNTER_BITS

    def enlist(self, rank: int) -> bool:
        """Have a rank told of the end; return whether the context has not ended already."""
        self.peers.add(rank)
        return not self.is_released  # who ends it sets this first, and then looks who is to be told

    def message(self, number: int) -> tuple[int, Tensor]:
        """Return the rank that a message was for, and what stands for its tensors.

        Raises:
            RuntimeError: This rank has sent no such message with tensors in this context.
        """
        found = self.sent.get(number)
        if found is None:
            raise RuntimeError(f"no message {number} with tensors was sent in context {self.id}")
        return found

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients so far, by the leaf that each is of."""
        with self._lock:
            return dict(self._gradients)

    def accumulate(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add those of a pass. What was returned before is not changed."""
        with self._lock:
            for leaf, gradient in gradients.items():
                known = self._gradients.get(leaf)
                self._gradients[leaf] = gradient if known is None else known + gradient

    # What torch calls these things, for its own tests and for those who look at a graph.

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return {number: handle.grad_fn for number, (_, handle) in list(self.sent.items())}

    def _recv_functions(self) -> dict[tuple[int, int], Any]:
        return dict(self.received)

    def _known_worker_ids(self) -> set[int]:
        return set(self.peers)


class Contexts:
    """The contexts that reach this rank. Safe from any thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._known: dict[int, Context] = {}
        # The latest that have ended, in order; and those of which one rank has said so before it
        # was known here.
        self._ended: dict[int, None] = {}
        self._ended_for: dict[tuple[int, int], None] = {}
        self._lost: set[int] = set()
        self._kept: Counter[int] = Counter()
        self._messages = itertools.count(1)

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[Context]:
        """Return those that are known now."""
        with self._lock:
            return list(self._known.values())

    def next_message(self) -> int:
        """Return a number for a message: greater than that of all before it."""
        return next(self._messages)

    def make(self) -> Context:
        """Return a new context."""
        context = Context((self.rank << COUNTER_BITS) + secrets.randbits(COUNTER_BITS))
        with self._lock:
            self._known[context.id] = context
        return context

    def meet(self, number: int, caller: int) -> Context | None:
        """Return the context that a rank has made a call in.

        Returns:
            None if the context has ended, or if its maker or the caller is lost. The call may have
            been on its way longer than the word of that, and must not bring the context back.

        Raises:
            OverloadedError: Too much is kept because of this rank.
        """
        maker = number >> COUNTER_BITS
        with self._lock:
            if maker in self._lost or caller in self._lost or (number, caller) in self._ended_for:
                return None
            context = self._known.get(number)
            if context is None:
                if number in self._ended or maker == self.rank:
                    return None
                context = Context(number)
                self._charge(context, caller)
                self._known[number] = context
            context.callers.add(caller)
            return context

    def charge(self, context: Context, caller: int) -> None:
        """Count a message that is kept in a context because of a call of a rank.

        Raises:
            OverloadedError: Too much is kept because of this rank.
        """
        with self._lock:
            if not context.is_released:
                self._charge(context, caller)

    def _charge(self, context: Context, caller: int) -> None:
        if caller != self.rank and self._kept[caller] >= MOST_KEPT:
            raise OverloadedError(
                f"{MOST_KEPT} contexts and messages in contexts are kept here because of rank "
                f"{caller}: end contexts in which no backward pass is to come"
            )
        self._kept[caller] += 1
        context.kept[caller] += 1

    def get(self, number: int) -> Context | None:
        """Return a context that is known here, or None."""
        return self._known.get(number)

    def find(self, number: int) -> Context:
        """Return a context that is known here.

        Raises:
            RuntimeError: There is none, as torch says it.
        """
        context = self._known.get(number)
        if context is None:
            raise RuntimeError(f"Could not find autograd context with id: {number}")
        return context

    def end(self, number: int) -> Context | None:
        """Forget a context and all that belongs to it; return it if it was there.

        Calls in it that come later run without it.
        """
        with self._lock:
            _remember(self._ended, number)
            context = self._known.pop(number, None)
            if context is None:
                return None
            context.is_released = True
            self._kept.subtract(context.kept)
        context.sent.clear()
        context.received.clear()
        return context

    def end_for(self, number: int, caller: int) -> None:
        """Take no more calls of a rank in a context that is not known here: it has ended there."""
        with self._lock:
            _remember(self._ended_for, (number, caller))

    def lose(self, rank: int) -> list[Context]:
        """Let a rank make and call no more contexts; return those that it had called this one in.

        The contexts that it made are among them.
        """
        with self._lock:
            self._lost.add(rank)
            found = [
                context
                for context in self._known.values()
                if context.maker == rank or rank in context.callers
            ]
            for context in found:
                context.callers.discard(rank)
            return found


def _remember(latest: dict[T, None], key: T) -> None:
    latest[key] = None
    if len(latest) > _REMEMBERED:
        del latest[next(iter(latest))]
