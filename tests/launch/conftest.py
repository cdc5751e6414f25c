"""Real launchers: started as a user starts them, watched from outside."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from children import Child, Ended
from launched import COMMAND, PREAMBLE, Launched


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + body)
        return str(path)

    return write


@pytest.fixture
def run(script) -> Callable[..., Ended]:
    """Run a script to its end."""

    def run_to_end(
        body: str,
        *options: str,
        ranks: int = 2,
        args: tuple[str, ...] = (),
        launcher: Sequence[str] = COMMAND,
        **where,
    ):
        command = [*launcher, "-n", str(ranks), *options, script(body), *args]
        return Child(command, **where).result(timeout=30)

    return run_to_end


@pytest.fixture
def start(script) -> Iterator[Callable[..., Launched]]:
    """Start a script and go on when every rank is ready."""
    with contextlib.ExitStack() as stack:
        # A pytest in the background of a shell ignores SIGINT, and so would what it starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGINT, before)

        def start_until_ready(body: str, *options: str, ranks: int = 2, pids: int | None = None):
            launched = Launched([*COMMAND, "-n", str(ranks), *options, script(body)])
            stack.callback(launched.close)
            launched.read_pids(ranks if pids is None else pids)
            return launched

        yield start_until_ready
