"""A test that compares a trace on several backends has a row for each in JUnit's XML; what was skipped is told."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pytest

from hil.core.text import visible

if TYPE_CHECKING:
    from hil.controller.workloads.suites.store import CaseRecord
    from hil.core.results import Outcome


class BackendResult(Protocol):
    """What a trace came to on one backend."""

    @property
    def record(self) -> CaseRecord:
        """The outcome and the reason."""

    @property
    def outcome(self) -> Outcome:
        """The record's."""

    @property
    def backend_id(self) -> str:
        """The backend's name, numbered where there are several of it."""

    def lines(self) -> list[str]:
        """What is wrong, for people."""


# Of a test's last report: a row a backend. xdist hands on whatever JSON can say.
_ROWS = "hil_backends"
_KEPT = pytest.StashKey[list[dict[str, Any]]]()
_PASSED: Literal["passed"] = "passed"
_FAILED, _SKIPPED = "failed", "skipped"


def add_rows(item: pytest.Item, results: Iterable[BackendResult]) -> None:
    """Keep what a trace came to on each backend with the test."""
    rows = item.stash.setdefault(_KEPT, [])
    for result in results:
        record = result.record
        quiet = record.outcome in ("SKIP", "XFAIL")
        outcome = _SKIPPED if quiet else _FAILED if result.outcome.exit_code else _PASSED
        rows.append(
            {
                "backend": record.flow,
                "id": f"{record.id.rpartition('/')[2]}-{result.backend_id}",
                "outcome": outcome,
                "missing": record.outcome == "SKIP",
                "reason": f"{record.outcome}: {record.message}",
                "text": "\n".join(result.lines()),
                "seconds": record.timings.get("run_s") or 0.0,
            }
        )


class BackendRows:
    """Hooks that hand rows on from the process of the test to the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._missing: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The last report has them."""
        report = yield
        if report.when == "teardown" and (rows := item.stash.get(_KEPT, None)):
            vars(report)[_ROWS] = rows
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add them to JUnit's XML, where there is one."""
        rows = getattr(report, _ROWS, ())
        if not rows or hasattr(self._config, "workerinput"):
            return
        for row in rows:
            if row["missing"]:
                self._missing.setdefault(row["reason"], []).append(report.nodeid)
        # JUnit's plugin has no name, and its class is pytest's own.
        for plugin in self._config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "LogXML":
                for row in rows:
                    for part in _reports(report, row):
                        plugin.pytest_runtest_logreport(part)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Tell what was skipped: tests that passed elsewhere say nothing of it."""
        for reason, tests in self._missing.items():
            terminalreporter.write_line(visible(f"hil: {reason} ({len(tests)} trace{'s' if len(tests) > 1 else ''})"))


def _reports(of: pytest.TestReport, row: dict[str, Any]) -> Iterator[pytest.TestReport]:
    longrepr: Any = {_PASSED: None, _FAILED: row["text"]}.get(row["outcome"], ("", 0, row["reason"]))
    name = f"{of.nodeid}[{row['id']}]"
    call = pytest.TestReport(name, of.location, {}, row["outcome"], longrepr, "call", duration=row["seconds"])
    for report in (call, pytest.TestReport(name, of.location, {}, _PASSED, None, "teardown")):
        if hasattr(of, "node"):  # the worker of xdist
            vars(report)["node"] = of.node
        yield report
