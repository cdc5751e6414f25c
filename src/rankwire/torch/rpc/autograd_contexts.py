"""The autograd contexts of this rank, each thread's current context, and messages in contexts.

While a call or result is encoded, the codec's tensor hook numbers the tensors that require
gradients (``sent``). The *seal* is the last part of the message, when all are known: they become
the inputs of one autograd node, ``Sent``. At the receiver they are the outputs of one node,
``Received``. A backward pass leaves one rank and enters another at these nodes.

A context's id has the creating rank in its upper 16 bits; the others are random, so a rank that
knows the id was called in it. It ends with its creator or the creator's ``with`` block.

Locks: those of the table and of each context are both innermost; no callback runs under them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rankwire import runtime
from rankwire.codec.codec import Codec
from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import InvalidMessageError, OverloadedError
from rankwire.torch.rpc.autograd_pass import ANCHOR, HERE, LocalPass, Received, Sent

T = TypeVar("T")

COUNTER_BITS = 48
MAX_COUNT = (1 << COUNTER_BITS) - 1
MOST_KEPT = 131_072  # for each rank; no known program makes so many calls in one step
_NUMBERED = "numbered tensors"  # a key of a message's notes
_REMEMBERED = 4096  # ended contexts

# The context of calls made here; a thread that continues a served call inherits it.
CONTEXT: ContextVar[Context | None] = ContextVar("rankwire autograd context", default=None)


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
        """Note a rank to notify of the end; return False if the context has already ended."""
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
        """Add the gradients of a pass. Tensors returned earlier do not change."""
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
        # The last contexts that ended; and those that ended on a rank before they were known here.
        self._ended: dict[int, None] = {}
        self._ended_for: dict[tuple[int, int], None] = {}
        self._lost: set[int] = set()
        self._kept: Counter[int] = Counter()
        self.message_numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[Context]:
        """Return the known contexts."""
        with self._lock:
            return list(self._known.values())

    def make(self) -> Context:
        """Return a new context."""
        context = Context((self.rank << COUNTER_BITS) + runtime.randbits(COUNTER_BITS))
        with self._lock:
            self._known[context.id] = context
        return context

    def meet(self, number: int, caller: int) -> Context | None:
        """Return a call's context, or None if it ended; raise ``OverloadedError`` if too many."""
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
        """Drop a context; return it if it was known. Later calls run without it."""
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
        """Reject further calls of a rank in an unknown context that has ended there."""
        with self._lock:
            _remember(self._ended_for, (number, caller))

    def lose(self, rank: int) -> list[Context]:
        """Reject further contexts of a lost rank; return those that it created or called here."""
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


@dataclass(slots=True)
class TrackedCall:
    """A call in a context; the context is None if it has already ended here."""

    context: Context | None
    name: str
    args: Any
    kwargs: Any


@dataclass(slots=True)
class TrackedResult:
    """The result of a call in a context. It is decoded as the value itself."""

    context: Context
    value: Any


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that is being encoded, with its tensors so far. Also its seal."""

    context: Context
    number: int
    peer: int
    is_result: bool
    tensors: list[Tensor] = field(default_factory=list)

    def seal(self) -> None:
        """Create a node for the tensors, if any."""
        HERE.outgoing = None
        if self.tensors and not self.context.is_released:
            with torch.enable_grad():  # also inside the user's no_grad
                handle = Sent.apply(self.number, *self.tensors)
            self.context.sent[self.number] = self.peer, handle

    def withdraw(self) -> None:
        """Drop the message, which is not sent."""
        if HERE.outgoing is self:
            HERE.outgoing = None
        self.context.sent.pop(self.number, None)


@dataclass(slots=True)
class Incoming:
    """A decoded seal: the message's number, and the number of its tensors."""

    number: int
    count: int


def sent(tensor: Tensor) -> int | None:
    """Return a tensor's number in the message being encoded, or None outside a context."""
    outgoing = HERE.outgoing
    if outgoing is None:
        return None
    outgoing.tensors.append(tensor)
    return len(outgoing.tensors) - 1


def received(tensor: Tensor, number: int, receiving: BuildContext) -> Tensor:
    """Record a numbered tensor that nothing else uses; return the one to hand out."""
    # An output of a node must not be a view; a tensor from the codec may be one.
    kept = tensor.data if tensor._is_view() else tensor
    receiving.notes.setdefault(_NUMBERED, {})[number] = kept
    return kept


class Tracking:
    """Encodes, decodes and serves calls in contexts."""

    def __init__(self, contexts: Contexts, run: Callable[[str, Any, Any], Any]) -> None:
        self._contexts = contexts
        self._run = run

    def register(self, codec: Codec) -> None:
        """Register the hooks with a codec."""
        codec.register(TrackedCall, take=self._take_call, build=self._build_call)
        codec.register(TrackedResult, take=self._take_result, build=self._build_result)
        codec.register(Outgoing, take=self._take_seal, build=_build_seal)

    def serve(self, call: TrackedCall) -> Any:
        """Serve a call in its context."""
        context = call.context
        with inside(context):
            result = self._run(call.name, call.args, call.kwargs)
        if context is None:
            return result
        if not isinstance(result, Future):
            return TrackedResult(context, result)
        return _tracked_future(context, result)

    def _take_call(self, call: TrackedCall, sending: TakeContext) -> list[Any]:
        context = call.context
        assert context is not None
        outgoing = self._begin(context, sending, is_result=False)
        return [context.id, call.name, call.args, call.kwargs, outgoing]

    def _take_result(self, result: TrackedResult, sending: TakeContext) -> list[Any]:
        outgoing = self._begin(result.context, sending, is_result=True)
        return [result.context.id, result.value, outgoing]

    def _begin(self, context: Context, sending: TakeContext, *, is_result: bool) -> Outgoing:
        assert sending.peer is not None  # calls and results go to one rank
        number = next(self._contexts.message_numbers)
        HERE.outgoing = outgoing = Outgoing(context, number, sending.peer, is_result)
        sending.undo(outgoing.withdraw)
        return outgoing

    def _take_seal(self, outgoing: Outgoing, sending: TakeContext) -> list[int]:
        if outgoing.is_result and outgoing.tensors:
            self._contexts.charge(outgoing.context, outgoing.peer)
        outgoing.seal()
        return [outgoing.number, len(outgoing.tensors)]

    def _build_call(self, state: Any, receiving: BuildContext) -> TrackedCall:
        match state:
            case [int(number), str(name), args, dict(kwargs), Incoming() as seal]:
                peer = receiving.peer
                context = None if peer is None else self._contexts.meet(number, peer)
                if context is not None and peer is not None and seal.count:
                    self._contexts.charge(context, peer)
                _attach(context, seal, receiving)
                return TrackedCall(context, name, args, kwargs)
        raise InvalidMessageError("a call in an autograd context is malformed")

    def _build_result(self, state: Any, receiving: BuildContext) -> Any:
        match state:
            case [int(number), value, Incoming() as seal]:
                _attach(self._contexts.get(number), seal, receiving)
                return value
        raise InvalidMessageError("a result in an autograd context is malformed")


def _build_seal(state: Any, receiving: BuildContext) -> Any:
    match state:
        case [int(number), int(count)]:
            return Incoming(number, count)
    raise InvalidMessageError("the seal of a message in an autograd context is malformed")


def _attach(context: Context | None, seal: Incoming, receiving: BuildContext) -> None:
    numbered = receiving.notes.pop(_NUMBERED, {})
    try:
        tensors = [numbered[number] for number in range(seal.count)]
    except KeyError as missing:
        raise InvalidMessageError(
            f"tensor {missing} of a message in a context is missing"
        ) from None
    peer = receiving.peer
    if not tensors or context is None or peer is None:
        return
    with torch.enable_grad():
        Received.apply(peer, seal.number, ANCHOR, *tensors)
    context.received[peer, seal.number] = tensors[0].grad_fn


def _tracked_future(context: Context, result: Future[Any]) -> Future[Any]:
    tracked: Future[Any] = Future()

    def end(done: Future[Any]) -> None:
        if done.cancelled() or not tracked.set_running_or_notify_cancel():
            tracked.cancel()
        elif (error := done.exception()) is not None:
            tracked.set_exception(error)
        else:
            tracked.set_result(TrackedResult(context, done.result()))

    tracked.add_done_callback(lambda done: result.cancel() if done.cancelled() else None)
    result.add_done_callback(end)
    return tracked
