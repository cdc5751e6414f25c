"""Layers: which of torch's own layers any rank may have another make, and how they are made.

torch's documentation asks for ``RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))``, so a
layer can be made by its name without being of the program. Only made: its class methods are no part
of this, and what can be called on it afterwards is for ``methods`` to say.

A layer is a module that ``torch.nn`` exports under its own name and ``torch.nn.modules`` defines,
and that only computes. Left out are those that

- hold other modules or things by names that they are given: with a ``ParameterDict`` a peer would
  set any attribute of it, its class and hooks among them;
- make their parameters when they are first run, out of memory as it was left;
- talk to a process group, and so into the collectives of the program;
- use memory of their own in Python while they run, which is not looked at here.

In some versions of torch even a layer that is here leaves parameters as the memory was if it is
made of nothing (``Conv1d(0, 9, 1)``), so the memory for them is cleared. A function as an argument
is one that the naming rule has let through; a class is refused, since ``torch.Tensor(9)`` is memory
as it was left.

Pure: it knows no rank and no wire. Safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

_DEFINED_IN = "torch.nn.modules."
_HOLDERS = ("torch.nn.modules.container", "torch.nn.modules.module")
_LEFT_OUT = frozenset(
    (
        *("TransformerDecoder", "TransformerEncoder"),  # of a layer that is given
        "SyncBatchNorm",  # talks to a process group
        "LinearCrossEntropyLoss",  # has memory of its own
    )
)
_ALLOCATING = frozenset((torch.empty, torch.empty_like, torch.empty_permuted, torch.empty_strided))


@cache
def layers() -> dict[str, type]:
    """Return them by the names under which they travel."""
    return {
        f"{found.__module__}:{name}": found
        for name, found in vars(nn).items()
        if isinstance(found, type) and _is_harmless(name, found)
    }


def _is_harmless(name: str, cls: type) -> bool:
    return (
        issubclass(cls, nn.Module)
        and not issubclass(cls, LazyModuleMixin)
        and cls.__module__.startswith(_DEFINED_IN)
        and cls.__module__ not in _HOLDERS
        and cls.__qualname__ == name
        and not name.startswith("_")
        and name not in _LEFT_OUT
    )


@cache
def _ids() -> frozenset[int]:
    return frozenset(id(layer) for layer in layers().values())


def is_layer(target: object) -> bool:
    """Tell whether something is the class of such a layer."""
    return id(target) in _ids()  # and no metaclass of anyone's is asked


def make_layer(layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Make a layer for another rank.

    Raises:
        TypeError: A class is among the arguments.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, type):
            raise TypeError(
                f"{layer.__name__} takes no class ({value.__name__}) from another rank: call a "
                "function of the program that makes it"
            )
    with _Cleared():
        return layer(*args, **kwargs)


class _Cleared(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, the tensors that this thread's code asks torch for are zero."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _ALLOCATING else made
