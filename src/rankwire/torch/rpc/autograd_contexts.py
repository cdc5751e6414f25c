"""The autograd contexts of this rank, and which one a thread is in.

A context's id has the creating rank in its upper 16 bits; the others are random, so a rank that
knows the id was called in the context. It ends with its creator's ``with`` block, or with its
creator; each rank notifies the ranks that it called in it (``autograd_engine``).

Locks: the table's and each context's own, both innermost; nothing is called while one is held.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from rankwire import runtime
from rankwire.errors import OverloadedError

if TYPE_CHECKING:
    from rankwire.torch.rpc.autograd_pass import LocalPass
    from rankwire.torch.rpc.autograd_tracking import Outgoing

T = TypeVar("T")

COUNTER_BITS = 48
MAX_COUNT = (1 << COUNTER_BITS) - 1
MOST_KEPT = 131_072  # for each rank; no known program makes so many calls in one step
# A call that arrives after the end of its context must not bring the context back.
_REMEMBERED = 4096


# The context of calls made here; a thread that continues a served call inherits it.
CONTEXT: ContextVar[Context | None] = ContextVar("rankwire autograd context", default=None)


class AutogradThread(runtime.local):
    """The message in a context that a thread is encoding, and the pass whose part it runs."""

    outgoing: Outgoing | None = None
    running: LocalPass | None = None


HERE = AutogradThread()


@contextmanager
def inside(context: Context | None) -> Iterator[None]:
    """Set the thread's context, or none, during the block."""
    before = CONTEXT.set(context)
    try:
        yield
    finally:
        CONTEXT.reset(before)


class Context:
    """One rank's state of one context. Safe from any thread."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.peers: set[int] = set()  # to notify of its end
        self.callers: set[int] = set()
        self.kept: Counter[int] = Counter()  # contexts and messages, by calling rank
        self.sent: dict[int, tuple[int, Tensor]] = {}  # receiver and its node's output, by number
        self.received: dict[tuple[int, int], Any] = {}  # nodes, by sender and number
        self.passes: dict[int, LocalPass] = {}  # in progress here, by number
        self.is_released = False  # then nothing is added
        self._lock = runtime.Lock()
        self._gradients: dict[Tensor, Tensor] = {}

    @property
    def maker(self) -> int:
        """The rank that created it."""
        return self.id >> COUNTER_BITS

    def enlist(self, rank: int) -> bool:
        """Notify a rank of the end later; return False if the context has already ended."""
        self.peers.add(rank)
        return not self.is_released  # the ending thread sets this before it reads ``peers``

    def message(self, number: int) -> tuple[int, Tensor]:
        """Return the receiver of a message, and the output of its autograd node."""
        found = self.sent.get(number)
        if found is None:
            raise RuntimeError(f"no message {number} with tensors was sent in context {self.id}")
        return found

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients so far, by leaf."""
        with self._lock:
            return dict(self._gradients)

    def accumulate(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add the gradients of a pass. Tensors that were returned before do not change."""
        with self._lock:
            for leaf, gradient in gradients.items():
                known = self._gradients.get(leaf)
                self._gradients[leaf] = gradient if known is None else known + gradient

    # torch's names, for its tests and for tools that draw graphs.

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return {number: handle.grad_fn for number, (_, handle) in list(self.sent.items())}

    def _recv_functions(self) -> dict[tuple[int, int], Any]:
        return dict(self.received)

    def _known_worker_ids(self) -> set[int]:
        return set(self.peers)


class Contexts:
    """The contexts that this rank knows. Safe from any thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = runtime.Lock()
        self._known: dict[int, Context] = {}
        # The contexts that ended last, in order; and those that ended on one rank before they
        # were known here.
        self._ended: dict[int, None] = {}
        self._ended_for: dict[tuple[int, int], None] = {}
        self._lost: set[int] = set()
        self._kept: Counter[int] = Counter()
        self._messages = itertools.count(1)

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[Context]:
        """Return the known contexts."""
        with self._lock:
            return list(self._known.values())

    def next_message(self) -> int:
        """Return the number of the next message."""
        return next(self._messages)

    def make(self) -> Context:
        """Return a new context."""
        context = Context((self.rank << COUNTER_BITS) + runtime.randbits(COUNTER_BITS))
        with self._lock:
            self._known[context.id] = context
        return context

    def meet(self, number: int, caller: int) -> Context | None:
        """Return the context of a call from another rank, or raise ``OverloadedError``.

        None if it has ended or its creator or caller is lost: a late call must not bring it back.
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
        """Count a message that is kept for a rank, or raise ``OverloadedError``."""
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
        """Return a known context, or None."""
        return self._known.get(number)

    def find(self, number: int) -> Context:
        """Return a known context, or raise torch's error."""
        context = self._known.get(number)
        if context is None:
            raise RuntimeError(f"Could not find autograd context with id: {number}")
        return context

    def end(self, number: int) -> Context | None:
        """Forget a context and its data; return it if it was known. Later calls run without it."""
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
        """Accept no more calls of a rank in an unknown context that has ended there."""
        with self._lock:
            _remember(self._ended_for, (number, caller))

    def lose(self, rank: int) -> list[Context]:
        """Accept no more contexts of a lost rank; return those that it created or called here."""
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
