"""One line of progress while the tests run and, at the end, where the time went.

Active with ``--overview``, in one process and under pytest-xdist. On a terminal the line is
rewritten in place; in a log it is a line for each tenth. A test that fails is named at once. This
module knows nothing of rankwire.

Seconds are those of all workers together; the processor's are those of a worker and of its
children: those that have been waited for, and those of its children that live.
"""

import contextlib
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SLOWEST = 10
_REDRAW = 0.2  # seconds between two looks of the line on a terminal
_TENTHS = 10
_TIMES = slice(11, 15)  # of a process and of the children it has waited for, user's and system's


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--overview",
        action="store_true",
        help="show one line of progress, and at the end where the time went",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--overview") and reporter is not None and not _is_worker(config):
        config.pluginmanager.register(Overview(reporter), "overview-of-the-run")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test costs the processor, for the report of its end."""
    item.stash[_BEGAN] = _processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if report.when == "teardown":
        report.processor_seconds = _processor_seconds() - item.stash[_BEGAN]
    return report


_BEGAN = pytest.StashKey[float]()


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + _of_living_children()


def _of_living_children() -> float:
    """Return the processor's seconds of the children, and of those that they have waited for."""
    ticks = 0
    with contextlib.suppress(FileNotFoundError):  # this system tells nothing of them
        for pid in Path("/proc/thread-self/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[_TIMES]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Overview:
    """Takes the place of pytest's dots, and adds two tables to its summary."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        reporter._show_progress_info = False  # the line below says it
        self._live = sys.stdout.isatty()
        self._began = self._drawn = time.monotonic()
        self._total = 0
        self._ended = 0
        self._outcomes: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._processor: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = max(self._total, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._total = max(self._total, len(ids))

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: Any) -> Iterator[Any]:
        """Give pytest nothing to print for a single test."""
        category, _letter, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] += report.duration
        self._processor[report.nodeid] += getattr(report, "processor_seconds", 0.0)
        if report.failed:
            self._outcomes["failed"] += 1
            self._say(f"FAILED {report.nodeid} ({report.when})")
        elif report.when == "call" or report.skipped:
            self._outcomes[report.outcome] += 1
        if report.when == "teardown":
            self._ended += 1
            self._show_progress()

    def pytest_sessionfinish(self) -> None:
        self._erase()

    def _show_progress(self) -> None:
        if self._live:
            if time.monotonic() - self._drawn > _REDRAW:
                self._drawn = time.monotonic()
                self._reporter._tw.write(f"\r{self._line()}\x1b[K", flush=True)
        elif self._total and self._ended * _TENTHS // self._total > self._tenths_before():
            self._say(self._line())

    def _tenths_before(self) -> int:
        return (self._ended - 1) * _TENTHS // self._total

    def _line(self) -> str:
        gone = time.monotonic() - self._began
        share = self._ended / self._total if self._total else 0.0
        outcomes = ", ".join(f"{count:,} {word}" for word, count in sorted(self._outcomes.items()))
        return f"{share:4.0%} of {self._total:,} tests after {gone:.0f} s: {outcomes}"

    def _say(self, line: str) -> None:
        self._erase()
        self._reporter._tw.line(line)

    def _erase(self) -> None:
        if self._live:
            self._reporter._tw.write("\r\x1b[K", flush=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("where the time went")
        for line in self._by_folder() + self._slowest():
            terminalreporter.line(line)

    def _by_folder(self) -> list[str]:
        seconds, processor, tests = Counter[str](), Counter[str](), Counter[str]()
        for test, spent in self._seconds.items():
            folder = _folder(test)
            seconds[folder] += spent
            processor[folder] += self._processor[test]
            tests[folder] += 1
        everything = seconds.total() or 1.0
        return [
            f"{'seconds':>8} {'share':>6} {'processor':>9} {'tests':>6}",
            *(
                f"{spent:8.1f} {spent / everything:6.1%} {processor[folder]:9.1f}"
                f" {tests[folder]:6,}  {folder}"
                for folder, spent in seconds.most_common()
            ),
            f"{everything:8.1f} {1:6.0%} {processor.total():9.1f} {tests.total():6,}  all",
        ]

    def _slowest(self) -> list[str]:
        return [
            "the slowest tests:",
            *(f"{spent:8.1f}  {test}" for test, spent in self._seconds.most_common(_SLOWEST)),
        ]


def _folder(test: str) -> str:
    """Return the folder of a test, or its file if that lies at the top."""
    parts = test.partition("::")[0].split("/")
    return "/".join(parts[:2])
