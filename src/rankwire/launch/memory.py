"""Whether the kernel killed something for want of memory, as far as it tells.

It counts such kills: for the memory cgroup of this process, which its ranks share, or, where that
cannot be read, for the whole host. A count tells that it happened, not to whom: the caller has seen
one of its own die by SIGKILL.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomCounter:
    """Counts from its construction on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = _counter_files(root)
        self._seen = self._count()

    def has_grown(self) -> bool:
        """Whether the kernel has killed a process since the last look."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for path in self._files:
            with suppress(OSError):
                if found := _COUNT.search(path.read_text()):
                    return int(found[1])
        return 0


def _counter_files(root: Path) -> list[Path]:
    """Return the files to ask, the nearest first."""
    files = []
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Inside a container the path may be the host's, and the mount begins at our own group.
            for folder in (path.lstrip("/"), ""):
                if "memory" in controllers.split(","):
                    files.append(mounted / "memory" / folder / "memory.oom_control")
                elif not controllers:
                    files.append(mounted / folder / "memory.events")
    return [*files, root / "proc/vmstat"]
