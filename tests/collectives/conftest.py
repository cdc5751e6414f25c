"""What holds for every test of collectives: idle worker threads end at once."""

import pytest

from rankwire.collectives import background, work


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch):
    """No test must wait for them to be gone."""
    monkeypatch.setattr(background, "_IDLE", 0.01)
    monkeypatch.setattr(work, "_IDLE", 0.01)
