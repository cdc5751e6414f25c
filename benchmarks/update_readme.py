"""Rewrite the measured blocks in the README from the saved results.

Usage: ``python -m benchmarks.update_readme``. What is between ``<!-- bench:rpc -->`` and
``<!-- /bench:rpc -->`` is replaced, and likewise for ``collectives``; everything else stays as it
is.
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

__all__ = ["BLOCKS", "main", "replace_block"]

BLOCKS: dict[str, Callable[[Path], str]] = {
    "rpc": lambda path: report.markdown(results.load(path)),
    "collectives": lambda path: collectives_report.markdown(collectives_results.load(path)),
}
"""What each block shows, from the file of its name among the results."""


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
        prog="python -m benchmarks.update_readme",
        description="Rewrite the measured blocks in the README from the saved results.",
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
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file to rewrite")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the README is out of date"
    )
    arguments = parser.parse_args()
    for name in arguments.blocks:
        if name not in BLOCKS:
            parser.error(f"no block {name!r}; there are {', '.join(BLOCKS)}")
    try:
        before = after = arguments.readme.read_text()
        for name in arguments.blocks or BLOCKS:
            after = replace_block(after, name, BLOCKS[name](arguments.results / f"{name}.json"))
    except FileNotFoundError as error:
        parser.error(f"{error.filename} does not exist; run `make bench` first?")
    except ValueError as error:
        parser.error(f"{arguments.readme}: {error}")
    if arguments.check:
        if before != after:
            print(f"{arguments.readme} is out of date: run python -m benchmarks.update_readme")
        return int(before != after)
    arguments.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
