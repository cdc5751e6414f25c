"""Send and receive tensors that require gradients, inside a context.

While a call or result is encoded, the codec's tensor hook numbers these tensors (``sent``). The
*seal* is the last part of the message: by then all are known, and become the inputs of one autograd
node, ``Sent``. At the receiver they are the outputs of one node, ``Received``. A backward pass
leaves one rank and enters another at these nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rankwire.codec.codec import Codec
from rankwire.codec.hooks import BuildContext, TakeContext
from rankwire.errors import InvalidMessageError
from rankwire.override import override
from rankwire.torch.rpc.autograd_contexts import HERE, Context, Contexts, inside

_NUMBERED = "numbered tensors"  # a key of a message's notes

# torch records no node without an input that requires a gradient.
ANCHOR = torch.empty(0, requires_grad=True)


class Sent(Function):  # type: ignore[misc]
    """An autograd node whose inputs are the tensors of a message that was sent."""

    @staticmethod
    @override
    def forward(ctx: Any, number: int, *tensors: Tensor) -> Tensor:
        ctx.number = number
        return torch.empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return None, *HERE.running.gradients_of(ctx.number)  # type: ignore[union-attr]


class Received(Function):  # type: ignore[misc]
    """An autograd node whose outputs are the tensors of a received message."""

    @staticmethod
    @override
    def forward(ctx: Any, peer: int, number: int, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.peer, ctx.number = peer, number
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)  # modified in place: they stay in the message
        return tensors

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if HERE.running is None:
            raise RuntimeError(
                f"a gradient reached a tensor from rank {ctx.peer}: run the backward pass by "
                "torch.distributed.autograd.backward(context_id, [loss]), not by loss.backward()"
            )
        HERE.running.leave(ctx.peer, ctx.number, gradients)
        return (None, None, None, *(None for _ in gradients))


# Tools that draw graphs and torch's tests know the node by this name.
Received._backward_cls.__name__ = "torch::distributed::autograd::RecvRpcBackward"


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


class Outgoing:
    """A message that is being encoded, with its tensors so far. Also its seal."""

    def __init__(self, context: Context, number: int, peer: int, is_result: bool) -> None:
        self.context = context
        self.number = number
        self.peer = peer
        self.is_result = is_result
        self.tensors: list[Tensor] = []

    def seal(self) -> None:
        """Create a node for the tensors, if there are any."""
        HERE.outgoing = None
        if self.tensors and not self.context.is_released:
            with torch.enable_grad():  # also inside the user's no_grad
                handle = Sent.apply(self.number, *self.tensors)
            self.context.sent[self.number] = self.peer, handle

    def withdraw(self) -> None:
        """Forget the message: it is not sent."""
        if HERE.outgoing is self:
            HERE.outgoing = None
        self.context.sent.pop(self.number, None)


@dataclass(slots=True)
class Incoming:
    """A decoded seal: the message's number, and how many tensors are numbered."""

    number: int
    count: int


def sent(tensor: Tensor) -> int | None:
    """Return the number of a tensor in the message being encoded; None outside a context."""
    outgoing = HERE.outgoing
    if outgoing is None:
        return None
    outgoing.tensors.append(tensor)
    return len(outgoing.tensors) - 1


def received(tensor: Tensor, number: int, receiving: BuildContext) -> Tensor:
    """Note a tensor that its sender numbered and nothing else uses; return the one to hand out."""
    # No output of a node may be a view; a tensor from the codec may be one.
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
        number = self._contexts.next_message()
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
    """Return a future of the tracked result; cancelling it cancels the original."""
    tracked: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        if done.cancelled() or not tracked.set_running_or_notify_cancel():
            tracked.cancel()
        elif (error := done.exception()) is not None:
            tracked.set_exception(error)
        else:
            tracked.set_result(TrackedResult(context, done.result()))

    tracked.add_done_callback(lambda done: result.cancel() if done.cancelled() else None)
    result.add_done_callback(settle)
    return tracked
