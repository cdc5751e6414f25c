"""Run torch programs on rankwire: ``import rankwire.torch``, ``init_process_group("rankwire")``.

The import registers the backend with ``torch.distributed``. No other part of rankwire needs torch.
"""

from __future__ import annotations

import torch  # noqa: F401  (first: it registers the backend while it is imported)

from rankwire.torch.group import RankwireGroup, register
from rankwire.torch.group_operations import monitored_barrier

__all__ = ["RankwireGroup", "monitored_barrier", "register"]

register()
