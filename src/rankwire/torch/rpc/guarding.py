"""Guarding: what runs in place of a function of torch or Python that another rank calls by name.

The naming rule decides what a name may be; here the arguments are checked before it runs. A class
of the program whose constructor is that of a layer or container is made under the same check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rankwire.torch.rpc.bounds import Check
from rankwire.torch.rpc.layers import is_layer, make_layer
from rankwire.torch.rpc.listed_functions import check_of
from rankwire.torch.rpc.naming import constructors_of


def guarded(function: Any) -> Callable[..., Any]:
    """Return what a server runs for a function or class: that, or what checks its arguments."""
    if isinstance(function, type):
        owners = constructors_of(function)
        if any(map(is_layer, owners)):
            return partial(make_layer, function)
        check = next(filter(None, map(check_of, owners)), None)
    else:
        check = check_of(function)
    return function if check is None else partial(_run, check, function)


def _run(check: Check, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    check(args, kwargs)
    return function(*args, **kwargs)
