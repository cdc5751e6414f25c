"""Distributed autograd: gradients across calls, as in ``torch.distributed.autograd``.

    with autograd.context() as context_id:
        loss = rpc.rpc_sync("ps", forward, args=(x,)).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)

Calls in a context, and calls made while serving them, record the tensors that they send
(``autograd_contexts``). ``backward`` follows the tensors back (``autograd_engine``) and adds up the
gradients of leaves in the context, on each leaf's rank. All functions are safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwire.rpc.agent import Agent
from rankwire.torch.rpc.autograd_contexts import (
    CONTEXT,
    COUNTER_BITS,
    MAX_COUNT,
    Context,
    Contexts,
    Tracking,
)
from rankwire.torch.rpc.autograd_engine import Engine
from rankwire.torch.rpc.verbs import CALL_IN_CONTEXT, register

_NO_CONTEXT = -1  # torch's value

_engine: Engine | None = None  # set between ``init_rpc`` and ``shutdown``


def attach(
    agent: Agent, run: Callable[[str, Any, Any], Any], time_limit: Callable[[], float]
) -> None:
    """Send calls in contexts through an agent; ``run(name, args, kwargs)`` serves one."""
    global _engine
    contexts = Contexts(agent.rank)
    _engine = Engine(agent, contexts, time_limit)
    tracking = Tracking(contexts, run)
    tracking.register(agent.codec)
    register(agent, {CALL_IN_CONTEXT: tracking.serve})


def detach() -> None:
    """Cancel passes and drop contexts. Idempotent."""
    global _engine
    if _engine is not None:
        _engine.close()
        _engine = None


def _here() -> Engine:
    if _engine is None:
        raise RuntimeError(
            "RPC has not been initialized, or was shut down. Call rpc.init_rpc first."
        )
    return _engine


def is_available() -> bool:
    """Return True: distributed autograd can always be used."""
    return True


class context:
    """Record calls in this ``with`` block; its value is the id of the new context.

    The context belongs to this thread and to the threads that serve its calls. It ends with the
    block, on all ranks, together with its gradients.
    """

    def __enter__(self) -> int:
        self._context = _new_context()
        return self._context.id

    def __exit__(self, *_: object) -> None:
        _release_context(self._context.id)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Run the backward pass from the roots through all ranks, and add gradients to the context.

    Blocks until the pass ends on all ranks. Sent tensors that did not contribute to the roots get
    no gradient.

    Args:
        context_id: The id of the context.
        roots: Scalars with a history.
        retain_graph: Whether to keep the graph for another pass.

    Raises:
        RuntimeError: There is no such context, a root is invalid, or the pass failed on a rank:
            ``Error on Node 2: ...``.
    """
    if not isinstance(context_id, int) or not isinstance(roots, Sequence):
        raise TypeError(
            "backward(): incompatible function arguments: it takes the id of a context and a "
            f"list of tensors, not {context_id!r} and {type(roots).__name__}"
        )
    engine = _here()
    found = engine.contexts.find(context_id)
    _check_roots(roots)
    engine.backward(found, list(roots), retain_graph=retain_graph)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients on this rank, by leaf. Change them only after the last pass."""
    return _here().contexts.find(context_id).gradients()


def backward_of(value: Any, context_id: int = _NO_CONTEXT, retain_graph: bool = False) -> None:
    """Run the backward pass from a reference's value; without a context on this rank only."""
    if not isinstance(value, Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id == _NO_CONTEXT:
        torch.autograd.backward([value], retain_graph=retain_graph)
    else:
        backward(context_id, [value], retain_graph)


def _check_roots(roots: Sequence[Tensor]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise TypeError(f"root {number} is a {type(root).__name__}, not a tensor")
        if not root.requires_grad:
            raise RuntimeError(f"requires_grad not set on root {number}")
        if root.numel() != 1:
            raise RuntimeError(f"root {number} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(f"root {number} does not have a valid gradient function")


def _new_context() -> Context:
    if CONTEXT.get() is not None:
        raise RuntimeError("Already have an autograd context id for this thread.")
    made = _here().contexts.make()
    CONTEXT.set(made)
    return made


def _release_context(context_id: int) -> None:
    current = CONTEXT.get()
    if current is not None and current.id == context_id:
        CONTEXT.set(None)
    if _engine is not None:  # else RPC was shut down inside the block
        _engine.end(context_id)


def _current_context() -> Context:
    current = CONTEXT.get()
    if current is None:
        raise RuntimeError("This thread has no autograd context: use autograd.context().")
    return current


def _retrieve_context(context_id: int) -> Context:
    return _here().contexts.find(context_id)


def _is_valid_context(context_id: int) -> bool:
    _here().contexts.find(context_id)
    return True


def _get_max_id() -> int:
    return (_here().contexts.rank << COUNTER_BITS) + MAX_COUNT


def _get_debug_info() -> dict[str, int]:
    known = _here().contexts.all()
    return {
        "num_current_backward_passes": sum(len(context.passes) for context in known),
        "num_autograd_contexts": len(known),
    }


# These replace the names of ``torch.distributed.autograd``.
_REPLACING: tuple[Any, ...] = (
    *(context, backward, get_gradients, is_available, _new_context, _release_context),
    *(_current_context, _retrieve_context, _is_valid_context, _get_max_id, _get_debug_info),
)
NAMES = {"DistAutogradContext": Context, **{each.__name__: each for each in _REPLACING}}
