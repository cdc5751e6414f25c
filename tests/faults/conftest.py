"""What tests of faults share: a runtime folder for each test, and hosts where there can be some."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import netns
from worlds import runtime_folder_of_its_own


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with runtime_folder_of_its_own() as path:
        yield path


@pytest.fixture(scope="session")
def several_hosts() -> None:
    """Skip where there cannot be several hosts on this machine."""
    reason = netns.why_not()
    if reason:
        pytest.skip(reason)
