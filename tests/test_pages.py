"""The pages of the site show only what runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from listings import listings_of

PAGES = Path(__file__).parents[1] / "docs"
HAVE_TESTS_OF_THEIR_OWN = {"fault-tolerance", "what-can-i-send"}
LISTINGS = [
    pytest.param(listing, id=f"{page.stem}: {listing}")
    for page in sorted(PAGES.glob("*.md"))
    if page.stem not in HAVE_TESTS_OF_THEIR_OWN
    for listing in listings_of(page)
]


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_prints_what_is_shown(listing, tmp_path):
    listing.run(tmp_path)


def test_there_are_listings():
    assert len(LISTINGS) >= 10


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_the_snippets_about_tests_and_notebooks_run(number):
    done = subprocess.run(
        [sys.executable, "-"],
        input=snippets("testing.md")[number],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr


def test_no_snippet_is_left_out():
    assert len(snippets("testing.md")) == 3


def test_the_locks_of_the_thread_model_exist():
    """Locks are named ``Class.attribute``."""
    table = (
        (PAGES / "thread-model.md").read_text().partition("## Locks")[2].partition("## Rules")[0]
    )
    sources = [path.read_text() for path in (PAGES.parent / "src").rglob("*.py")]
    named = set(re.findall(r"`(\w+)\.(\w+)`", table))
    assert len(named) > 30
    for cls, attribute in named:
        pattern = rf"^class {cls}\b[\s\S]*?\b{attribute}\b.* = .*(?:Lock|Condition)\("
        found = any(re.search(pattern, source, re.MULTILINE) for source in sources)
        assert found, f"{cls}.{attribute}"
