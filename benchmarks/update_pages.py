"""Rewrite the measured blocks in the pages from the saved results.

Usage: ``python -m benchmarks.update_pages``. What is between ``<!-- bench:rpc -->`` and
``<!-- /bench:rpc -->`` in a page is replaced, and likewise for the other blocks; everything else
stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import report, results
from benchmarks.collectives import report as collectives_report
from benchmarks.collectives import results as collectives_results
from benchmarks.results import ROOT


def _rpc(folder: Path) -> str:
    return report.markdown(results.load(folder / "rpc.json"))


def _collectives(folder: Path) -> str:
    return collectives_report.markdown(collectives_results.load(folder / "collectives.json"))


def _table_of_calls(folder: Path) -> str:
    return _rpc(folder).partition("\n\n")[0]


BLOCKS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "rpc": ("docs/benchmarks.md", _rpc),
    "collectives": ("docs/benchmarks.md", _collectives),
    "short": ("README.md", _table_of_calls),
}
"""In which page each block is, and what it shows, from the folder of results."""


def replace_block(text: str, name: str, block: str) -> str:
    """Put ``block`` between the two markers of that name.

    Raises:
        ValueError: the markers are not there exactly once each, in order.
    """
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one {begin} and after it one {end}")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{block.strip()}\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.update_pages",
        description="Rewrite the measured blocks in the pages from the saved results.",
    )
    parser.add_argument(
        "blocks", nargs="*", metavar="BLOCK", help=f"of {', '.join(BLOCKS)} (default: all)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=results.RESULTS_PATH.parent,
        metavar="FOLDER",
        help="where the JSON files are (default: benchmarks/results)",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is out of date"
    )
    arguments = parser.parse_args()
    for name in arguments.blocks:
        if name not in BLOCKS:
            parser.error(f"no block {name!r}; there are {', '.join(BLOCKS)}")
    is_old = False
    for name in arguments.blocks or BLOCKS:
        page = ROOT / BLOCKS[name][0]
        before = page.read_text()
        try:
            after = replace_block(before, name, BLOCKS[name][1](arguments.results))
        except FileNotFoundError as error:
            parser.error(f"{error.filename} does not exist; run `make bench` first?")
        except ValueError as error:
            parser.error(f"{page}: {error}")
        if before != after and arguments.check:
            is_old = True
            print(f"{page} is out of date: run python -m benchmarks.update_pages")
        elif before != after:
            page.write_text(after)
    return int(is_old)


if __name__ == "__main__":
    sys.exit(main())
