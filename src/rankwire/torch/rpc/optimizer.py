"""DistributedOptimizer: each rank steps its own parameters, with its gradients in a context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwire import runtime
from rankwire.torch.rpc.api import rpc_async
from rankwire.torch.rpc.autograd import get_gradients
from rankwire.torch.rpc.call_results import CallFuture
from rankwire.torch.rpc.functions import exposed
from rankwire.torch.rpc.rref import RRef

# torch's optimizers, by the names under which ranks request them.
_OF_TORCH = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
}


class DistributedOptimizer:
    """Optimizes parameters on their ranks. Safe from any thread; each rank does one step at a time.

    Args:
        optimizer_class: A class of torch or of the program.
        params_rref: References to the parameters, on any rank.
        *args: Arguments of the optimizers, after the parameters.
        **kwargs: Keyword arguments of the optimizers.

    Raises:
        Exception: The error of the first optimizer that could not be created.
    """

    def __init__(
        self, optimizer_class: type, params_rref: Iterable[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        by_owner: dict[Any, list[RRef[Any]]] = {}
        for parameter in params_rref:
            by_owner.setdefault(parameter.owner(), []).append(parameter)
        name = optimizer_class.__name__
        asked = name if _OF_TORCH.get(name) is optimizer_class else optimizer_class
        self.remote_optimizers = _all_of(
            [
                rpc_async(owner, make_local_optimizer, args=(asked, parameters, args, kwargs))
                for owner, parameters in by_owner.items()
            ]
        )

    def step(self, context_id: int) -> None:
        """Step all optimizers with a context's gradients; raise the first error after all."""
        _all_of(
            [
                rpc_async(optimizer.owner(), step_local_optimizer, args=(optimizer, context_id))
                for optimizer in self.remote_optimizers
            ]
        )


def _all_of(futures: Sequence[CallFuture]) -> list[Any]:
    results, errors = [], []
    for future in futures:
        try:
            results.append(future.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


class LocalOptimizer:
    """The optimizer of one rank's parameters."""

    # Several trainers may have optimizers of the same parameters.
    _turn = runtime.Lock()

    def __init__(
        self, made_by: type, parameters: list[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._parameters = parameters
        self._optimizer = made_by(parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Step with the gradients of a context, and restore ``.grad`` afterwards."""
        gradients = get_gradients(context_id)
        with self._turn:
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient


@exposed
def make_local_optimizer(
    asked: str | type, parameters: list[RRef[Any]], args: Sequence[Any], kwargs: dict[str, Any]
) -> RRef[Any]:
    """Create an optimizer of this rank's parameters, for another rank."""
    if isinstance(asked, str):
        made_by = _OF_TORCH[asked]
    elif isinstance(asked, type) and issubclass(asked, torch.optim.Optimizer):
        made_by = asked
    else:
        raise TypeError(f"{asked!r} is not an optimizer class")
    tensors = [parameter.local_value() for parameter in parameters]
    return RRef(LocalOptimizer(made_by, tensors, args, kwargs))


@exposed
def step_local_optimizer(optimizer: RRef[Any], context_id: int) -> None:
    """Step an optimizer of this rank, for another rank."""
    local = optimizer.local_value()
    if not isinstance(local, LocalOptimizer):
        raise TypeError(f"{type(local).__name__} is not an optimizer of this rank")
    local.step(context_id)
