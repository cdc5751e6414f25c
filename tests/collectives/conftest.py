"""What tests of collectives share: worlds, queues, and worker threads that end soon."""

import pytest
from queued import new_background

from rankwire.collectives import background, work
from rankwire.testing import simulated_world
from worlds import runtime_folder_of_its_own


@pytest.fixture(autouse=True)
def idle_threads_end_soon(monkeypatch):
    """No test must wait for them to be gone."""
    monkeypatch.setattr(background, "_IDLE", 0.01)
    monkeypatch.setattr(work, "_IDLE", 0.01)


@pytest.fixture
def folder():
    """Who is killed leaves the file of its socket here."""
    with runtime_folder_of_its_own() as folder:
        yield folder


@pytest.fixture
def pair():
    with simulated_world(2) as world:
        yield world


@pytest.fixture
def worker():
    return new_background()
