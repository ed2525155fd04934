"""For tests that compare traces, add a row for every backend to JUnit XML, and report skipped backends."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pytest

from hil.core.text import escape_controls

if TYPE_CHECKING:
    from hil.controller.records.suite import CaseRecord
    from hil.core.results import Outcome


class BackendResult(Protocol):
    """Result of a trace on one backend."""

    @property
    def record(self) -> CaseRecord:
        """The record, with outcome and reason."""

    @property
    def outcome(self) -> Outcome:
        """The record's outcome."""

    @property
    def backend_id(self) -> str:
        """Name of the backend, with a number if the backend was requested multiple times."""

    def lines(self) -> list[str]:
        """Return the problems as lines of text."""


# Attribute in a test's last report with the backends' rows. The rows are JSON values, which xdist can transfer.
_ROWS = "hil_backends"
_KEPT = pytest.StashKey[list[dict[str, Any]]]()
_PASSED: Literal["passed"] = "passed"
_FAILED, _SKIPPED = "failed", "skipped"


def add_rows(item: pytest.Item, results: Iterable[BackendResult]) -> None:
    """Store the results of a trace on all backends with the test."""
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
    """Hooks that transfer rows from the test process to the reporting process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._missing: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the rows to the test's last report."""
        report = yield
        if report.when == "teardown" and (rows := item.stash.get(_KEPT, None)):
            vars(report)[_ROWS] = rows
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the rows to JUnit XML, if enabled."""
        rows = getattr(report, _ROWS, ())
        if not rows or hasattr(self._config, "workerinput"):
            return
        for row in rows:
            if row["missing"]:
                self._missing.setdefault(row["reason"], []).append(report.nodeid)
        # JUnit's plugin is registered without a name, and its class is internal to pytest.
        for plugin in self._config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "LogXML":
                for row in rows:
                    for part in _make_reports(report, row):
                        plugin.pytest_runtest_logreport(part)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report skipped backends, because the result of a test shows only the other backends."""
        for reason, tests in self._missing.items():
            terminalreporter.write_line(
                escape_controls(f"hil: {reason} ({len(tests)} trace{'s' if len(tests) > 1 else ''})")
            )


def _make_reports(of: pytest.TestReport, row: dict[str, Any]) -> Iterator[pytest.TestReport]:
    longrepr: Any = {_PASSED: None, _FAILED: row["text"]}.get(row["outcome"], ("", 0, row["reason"]))
    name = f"{of.nodeid}[{row['id']}]"
    call = pytest.TestReport(name, of.location, {}, row["outcome"], longrepr, "call", duration=row["seconds"])
    for report in (call, pytest.TestReport(name, of.location, {}, _PASSED, None, "teardown")):
        if hasattr(of, "node"):  # the report is from an xdist worker
            vars(report)["node"] = of.node
        yield report
