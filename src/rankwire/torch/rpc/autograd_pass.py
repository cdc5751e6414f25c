"""One rank's part of a backward pass over several ranks.

It begins at the roots and at messages whose receivers send gradients back (``Sent``), and ends at
leaves and at received messages (``Received``). ``reach`` finds the messages in the pass; then
torch's engine runs the part once. The engine blocks inside a node while gradients are missing, and
must not wait for nodes behind that one:

- Messages are awaited in a chain of nodes (``Awaited``), the last sent first. The gradient of a
  message depends only on messages that this rank sent after it.
- A waiting node runs only if no other is ready. The engine runs ready nodes by sequence number,
  highest first. Waiting nodes have 0; other nodes that have 0 are raised to 1.

One thread calls ``run``, any thread ``arrive`` and ``fail``. No callback runs under the condition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from rankwire import runtime
from rankwire.clock import SafeCondition
from rankwire.override import override

if TYPE_CHECKING:
    from rankwire.torch.rpc.autograd_contexts import Context, Outgoing

Gradients = Sequence[Tensor | None]
# ``deliver(sender, number, gradients)`` sends the gradients of a message's tensors to its sender.
Deliver = Callable[[int, int, Gradients], Future[None] | None]

_LEAF = torch._C._functions.AccumulateGrad
_WAITS = 0  # the sequence number of waiting nodes


class AutogradThread(runtime.local):
    """The message in a context that a thread is encoding, and the pass whose part it runs."""

    outgoing: Outgoing | None = None
    running: LocalPass | None = None


HERE = AutogradThread()

# torch records no node without an input that requires a gradient.
ANCHOR = torch.empty(0, requires_grad=True)


class Sent(Function):  # type: ignore[misc]
    """An autograd node whose inputs are the tensors of a sent message."""

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


class Awaited(Function):  # type: ignore[misc]
    """Blocks the nodes behind it until the gradients of a message arrive."""

    @staticmethod
    @override
    def forward(ctx: Any, number: int, earlier: Tensor, message: Tensor) -> Tensor:
        ctx.number = number
        return torch.empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        HERE.running.await_gradients(ctx.number)  # type: ignore[union-attr]
        return None, gradient, gradient


class LocalPass:
    """This rank's part of one pass in one context."""

    def __init__(self, context: Context, deliver: Deliver, roots: Sequence[Tensor] = ()) -> None:
        self._context = context
        self._deliver = deliver
        self._roots = roots
        self._seen: set[Any] = set()
        self._leaves: list[Tensor] = []
        self._awaited: dict[int, Tensor] = {}  # messages in the pass, with their node's output
        self._deliveries: list[Future[None]] = []
        self._changed = SafeCondition()
        self._arrived: dict[int, Gradients] = {}
        self._unanswered: set[int] = set()  # awaited messages without gradients
        self._is_begun = False
        self._failure: BaseException | None = None

    def reach_from_roots(self) -> list[tuple[int, int]]:
        """Return the messages that gradients of the roots reach, by sender and number."""
        return self._reach([root.grad_fn for root in self._roots])

    def reach_from(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Expect gradients for these messages; return the new messages that they reach."""
        nodes = []
        for number in numbers:
            handle = self._context.message(number)[1]
            self._awaited[number] = handle
            self._unanswered.add(number)
            nodes.append(handle.grad_fn)
        return self._reach(nodes)

    def _reach(self, nodes: list[Any]) -> list[tuple[int, int]]:
        found = []
        while nodes:
            node = nodes.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            if node._sequence_nr() == _WAITS:
                node._set_sequence_nr(_WAITS + 1)
            if isinstance(node, Received._backward_cls):
                found.append((node.peer, node.number))
            elif isinstance(node, _LEAF):
                self._leaves.append(node.variable)
            else:
                nodes.extend(after for after, _ in node.next_functions if after is not None)
        return found

    def run(self, *, retain_graph: bool) -> None:
        """Run this rank's part and add the gradients of leaves to the context's."""
        with self._changed:
            if self._is_begun:
                raise RuntimeError("this part of the backward pass was begun before")
            self._is_begun = True
        outputs = [*self._roots]
        seeds = [torch.ones_like(root) for root in self._roots]
        if self._awaited:
            outputs.append(self._chain())
            seeds.append(torch.empty(0))
        inputs = [*self._leaves, ANCHOR]
        HERE.running = self
        try:
            gradients = torch.autograd.grad(
                outputs, inputs, seeds, retain_graph=retain_graph, allow_unused=True
            )
        finally:
            HERE.running = None
        for delivery in self._deliveries:  # before the user can change the memory
            delivery.result()
        found = {
            leaf: gradient
            for leaf, gradient in zip(self._leaves, gradients, strict=False)
            if gradient is not None
        }
        self._context.accumulate(_unshared(found))

    def _chain(self) -> Tensor:
        chain = ANCHOR
        for number, handle in sorted(self._awaited.items()):
            with torch.enable_grad():
                chain = Awaited.apply(number, chain, handle)
            chain.grad_fn._set_sequence_nr(_WAITS)
        return chain

    def await_gradients(self, number: int) -> None:
        """Wait until the gradients of a message arrive; raise if the pass has failed."""
        with self._changed:
            while number not in self._arrived and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def gradients_of(self, number: int) -> Gradients:
        """Return the gradients of an awaited message."""
        return self._arrived.pop(number)

    def leave(self, peer: int, number: int, gradients: Gradients) -> None:
        """Send the gradients of a message back to its sender."""
        delivery = self._deliver(peer, number, gradients)
        if delivery is not None:  # to another rank
            self._deliveries.append(delivery)

    def arrive(self, number: int, gradients: Gradients) -> None:
        """Store the gradients that arrived for a message; raise if none are awaited."""
        with self._changed:
            if number not in self._unanswered:
                raise RuntimeError(f"no gradients are awaited for message {number}")
            self._unanswered.discard(number)
            self._arrived[number] = gradients
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail the pass. Only the first error counts."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()


def _unshared(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Copy gradients that share memory with another or within themselves, as in ``a + b``."""
    places = Counter(_memory(gradient).data_ptr() for gradient in gradients.values())
    return {
        leaf: gradient.clone()
        if places[_memory(gradient).data_ptr()] > 1 or _repeats(gradient)
        else gradient
        for leaf, gradient in gradients.items()
    }


def _memory(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _repeats(gradient: Tensor) -> bool:
    return 0 in _memory(gradient).stride() and gradient.numel() > 1
