"""Register the backend with torch.

This is a module of its own because torch calls ``register`` during its own import (the entry
point), possibly in the middle of the import of this package.
"""

from __future__ import annotations

import torch.distributed as dist

from rankwire.torch.group import create_group
from rankwire.torch.torch_rendezvous import register_launchers


def register() -> None:
    """Register the backend and the rendezvous handlers. Repeating it changes nothing."""
    if not hasattr(dist.Backend, "RANKWIRE"):
        dist.Backend.register_backend("rankwire", create_group, extended_api=True, devices=["cpu"])
    register_launchers()
