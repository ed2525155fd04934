"""Implement --hil-out: write the same reports as `hil suite run`.

For each kind of hardware, a model directory is a separate suite with its own output directory. If xdist runs tests in
multiple processes, pytest's reports transfer the records to the process that writes the files.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hil.controller.pipeline.settings.project import find_project
from hil.controller.records.outputs import Origin
from hil.controller.records.suite import CaseRecord, SuiteRecord, make_case_record
from hil.controller.storage.runs import convert_write_errors, make_safe_name, seal
from hil.controller.storage.screen.web_link import make_web_link
from hil.controller.storage.sources.origin import find_origin
from hil.controller.workloads.matrix.files import write_targets
from hil.controller.workloads.suites.cases.sources import EXPECTED, choose_common_flow
from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.store import LINES, SuiteRun, collect_versions
from hil.core.results import Outcome, exit_code_of
from hil.core.text import escape_controls
from hil.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RAN, HilError, StorageError
from hil.testing.pytest_plugin import failure_text
from hil.testing.pytest_plugin.options import make_absolute, rename_for_pytest
from hil.testing.pytest_plugin.session import CaseTarget, HilCase, ModelFolder, PluginSession

# Attribute of a test's last report with the output directory and the record. These are JSON values, which xdist can
# transfer.
_RECORD = "hil_record"


def attach(report: pytest.TestReport, case: HilCase, record: CaseRecord) -> None:
    """Attach a case's record to a report, for :class:`Reporting`."""
    kept = Path(record.folder)
    # Relative to the run's directory, as in `hil suite run`.
    folder = str(kept.relative_to(case.out)) if record.folder and kept.exists() else ""
    vars(report)[_RECORD] = [str(case.out), {**record.to_json(), "folder": folder}]


class Reporting:
    """Hooks of the process that writes the directories of suite runs."""

    def __init__(self, plugin: PluginSession) -> None:
        self._plugin = plugin
        self._open = contextlib.ExitStack()
        # Output directory -> run; None until the tests are collected.
        self._runs: dict[str, SuiteRun] | None = None
        self._said: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the runs after collection."""
        self._start_runs([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Start the runs after the first worker's collection: all xdist workers collect the same tests."""
        if self._runs is None:
            self._start_runs(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the record in a test's last report."""
        out, record = getattr(report, _RECORD, ("", {}))
        if self._runs and out in self._runs:
            try:
                self._runs[out].append(make_case_record(record))
            except StorageError as error:
                # The directory is not writable: continue the tests without this report.
                del self._runs[out]
                self._said.append(str(error))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the reports at the end of the session."""
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        with self._open:
            for run in (self._runs or {}).values():
                outcomes = [Outcome(record.outcome) for record in run.read_records()]
                code = exit_code_of(outcomes) if outcomes else EXIT_NOTHING_RAN
                code = EXIT_INTERRUPTED if interrupted else code
                try:
                    run.save(finished=time.time(), interrupted=interrupted, exit_code=code)
                    write_reports(run.folder)
                except HilError as error:
                    self._said.append(str(error))
                else:
                    page = failure_text.format_path(
                        self._plugin.config.invocation_params.dir, str(run.folder / "report.html")
                    )
                    link = make_web_link(run.folder, parts=2)
                    self._said.append(f"{run.head.suite} on {run.folder.name}: open {page}{f' or {link}' * bool(link)}")
            self._write_matrices()
            self._add_to_history()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the paths of the reports."""
        for line in self._said:
            terminalreporter.write_line(escape_controls(f"hil: {line}"))

    def _write_matrices(self) -> None:
        """Write a comparison of targets for model directories with cases on multiple targets."""
        for folder in self._plugin.folders:
            names = [make_safe_name(target.name) for target in self._plugin.targets]
            there = [name for name in names if str(folder.out / name) in (self._runs or {})]
            if len(there) > 1:
                try:
                    page = write_targets(folder.out, folder.path.name, there, self._get_origin())
                except HilError as error:
                    self._said.append(str(error))
                else:
                    shown = failure_text.format_path(self._plugin.config.invocation_params.dir, str(page))
                    self._said.append(f"{folder.path.name} on {len(there)} targets: open {shown}")

    def _add_to_history(self) -> None:
        """Add the results to the history, if the project file enables this."""
        folders = [run.folder for run in (self._runs or {}).values() if run.read_records()]
        start = self._plugin.config.invocation_params.dir
        if folders and find_project(start) is not None:
            from hil.controller.workloads.history.automatic import add_results

            add_results(folders, self._said.append, start=start)

    def _get_origin(self) -> Origin:
        return find_origin(self._plugin.request.settings.labels)

    def _start_runs(self, nodeids: Iterable[str]) -> None:
        """Create the runs' directories.

        Raises:
            pytest.UsageError: a directory is in use by another process, or is not writable.
        """
        self._runs = {}
        root = self._plugin.config.rootpath
        planned = {
            (make_absolute(root / file), name) for file, _, name in (nodeid.partition("::") for nodeid in nodeids)
        }
        try:
            for folder in self._plugin.folders:
                if any(file in folder.models for file, _ in planned):
                    # Import all models: the report also lists the cases that were left out.
                    self._plugin.list_cases(folder, folder.models)
                    for target in self._plugin.targets:
                        if run := self._start_run(folder, target, planned):
                            self._runs[str(run.folder)] = run
        except HilError as error:
            raise pytest.UsageError(rename_for_pytest(str(error))) from error

    def _start_run(self, folder: ModelFolder, target: CaseTarget, planned: set[tuple[Path, str]]) -> SuiteRun | None:
        plugin = self._plugin
        cases = [
            (file, case)
            for file in folder.models
            for case in plugin.list_cases(folder, [file])
            if case.target.name == target.name
        ]
        ids = [case.spec.id for file, case in cases if (file, case.id) in planned]
        if not ids:
            return None
        out, flow = cases[0][1].out, choose_common_flow((case.spec for _, case in cases), target.flow)
        plugin.make_out(out)
        head = SuiteRecord(
            schema=1,
            id=f"{folder.out.name}-{out.name}",
            # Without a source: only pytest can run these cases again.
            request=replace(target.request, source="").to_json(),
            source=str(folder.path),
            suite=folder.path.name,
            flow=flow.name,
            runtime=flow.runtime,
            boards=list(target.lender.choices),
            command=shlex.join(["pytest", *map(str, plugin.config.invocation_params.args)]),
            versions=collect_versions(),
            ids=ids,
            suite_ids=[case.spec.id for _, case in cases],
            expected=str(folder.path / EXPECTED),
            origin=self._get_origin(),
            left_out=list(folder.left_out),
            interrupted=False,
            started=time.time(),
            finished=None,
            exit_code=None,
        )
        run = SuiteRun(out, head)
        self._open.enter_context(run.lock_for_writing())
        # Remove the records of an earlier pytest run.
        with convert_write_errors(out):
            (out / LINES).write_bytes(b"")
            seal(out, head.request)
        run.save()
        return run
