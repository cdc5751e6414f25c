"""Rewrite the measured table in the README from the saved results.

Usage: ``python -m benchmarks.update_readme``. The block between ``<!-- bench:rpc -->`` and
``<!-- /bench:rpc -->`` is replaced; everything else stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import markdown
from benchmarks.results import RESULTS_PATH, ROOT, load

__all__ = ["main", "replace_block"]

BEGIN = "<!-- bench:rpc -->"
END = "<!-- /bench:rpc -->"


def replace_block(text: str, block: str) -> str:
    """Put ``block`` between the two markers.

    Raises:
        ValueError: the markers are not there exactly once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected one {BEGIN} and after it one {END}")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{block.strip()}\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.update_readme",
        description="Rewrite the measured table in the README from the saved results.",
    )
    parser.add_argument("--json", type=Path, default=RESULTS_PATH, help="results to read")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file to rewrite")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the README is out of date"
    )
    arguments = parser.parse_args()
    try:
        before = arguments.readme.read_text()
        after = replace_block(before, markdown(load(arguments.json)))
    except FileNotFoundError as error:
        parser.error(f"{error.filename} does not exist; run `python -m benchmarks.run` first?")
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
