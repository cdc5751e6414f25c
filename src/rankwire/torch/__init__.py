"""torch programs on rankwire: ``import rankwire.torch``, then ``init_process_group("rankwire")``.

Importing this registers the backend with ``torch.distributed``. It needs torch
(``pip install 'rankwire[torch]'``), and nothing else of rankwire imports it.
"""

from __future__ import annotations

import torch.distributed as dist

from rankwire.torch.group import RankwireGroup, create_group
from rankwire.torch.launching import register_launchers

__all__ = ["RankwireGroup", "register"]


def register() -> None:
    """Tell torch of the backend; torch does so itself when it is imported, by the entry point."""
    if not hasattr(dist.Backend, "RANKWIRE"):
        dist.Backend.register_backend("rankwire", create_group, extended_api=True, devices=["cpu"])
    register_launchers()


register()
