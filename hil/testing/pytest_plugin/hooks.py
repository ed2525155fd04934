"""Create tests from models and parametrize user tests, if the ini setting ``hil_models`` is set."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hil.compare.verdict import Verdict
from hil.controller.storage.screen.texts import format_count
from hil.core.results import Relation, RunResult
from hil.core.scratch import make_folder
from hil.core.text import escape_controls
from hil.core.variables import check_variables
from hil.errors import HilError, UsageError
from hil.testing.pytest_plugin.options import TAKEN, make_absolute, must_write_reports, rename_for_pytest
from hil.testing.pytest_plugin.reporting import Reporting, attach
from hil.testing.pytest_plugin.running import RUN
from hil.testing.pytest_plugin.session import BOARD_LOCKS, SESSION, HilCase, ModelCase, ModelFolder, PluginSession

# Name suffixes of references that are not independent.
_WEAK = tuple(f"({one.value})" for one in Relation if one is not Relation.INDEPENDENT)


def begin(config: pytest.Config) -> None:
    """Validate options and settings, and find the models, independent of pytest's working directory.

    Raises:
        pytest.UsageError: invalid option or setting.
    """
    try:
        plugin = PluginSession(config)
        check_variables()
    except UsageError as error:
        raise pytest.UsageError(rename_for_pytest(str(error))) from None
    config.stash[SESSION] = plugin
    config.pluginmanager.register(Hooks(plugin), "hil-hooks")
    if must_write_reports(config) and not plugin.is_worker:
        config.pluginmanager.register(Reporting(plugin), "hil-reports")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        here = config.invocation_params.dir
        searched = [make_absolute(here / argument) for argument in config.args]
        config.args += [
            str(folder.path)
            for folder in plugin.folders
            if not any(folder.path.is_relative_to(path) for path in searched)
        ]


class Hooks:
    """Hooks of a process with valid options."""

    def __init__(self, plugin: PluginSession) -> None:
        self._plugin = plugin
        self._locks_folder: Path | None = None
        self._below = {
            parent
            for folder in plugin.folders
            for file in folder.models
            for parent in file.parents
            if parent.is_relative_to(folder.path)
        }

    def pytest_report_header(self) -> list[str]:
        """Return the flows and boards."""
        plugin = self._plugin
        boards = ", ".join(
            dict.fromkeys(
                board if board == target.hw_type else f"{board} ({target.hw_type})"
                for target in plugin.targets
                for board in target.lender.choices
            )
        )
        used = [flow for target in plugin.targets for flow in plugin.list_model_flows(target.flow_key, target.flow)]
        flows = ", ".join(dict.fromkeys(flow.name for flow in used))
        taken = [f"{name} is used by a different plugin: use --hil{name[1:]}" for name in plugin.config.stash[TAKEN]]
        return [f"hil: flow {flows} on {boards}", *taken]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report tests that passed only because of a reference that is not independent."""
        weak = Counter(
            str(decider)
            for reports in terminalreporter.stats.values()
            for report in reports
            if getattr(report, "when", "") == "teardown"
            for name, decider in report.user_properties
            if name == "hil_decided_by" and str(decider).endswith(_WEAK)
        )
        for decider, count in weak.items():
            text = f"{format_count(count, 'case')} judged only by {decider}, which is not an independent reference"
            terminalreporter.write_line(escape_controls(f"hil: {text}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Collect model directories regardless of their names."""
        return False if collection_path in self._below else None

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Collect a model file."""
        if self._plugin.find_folder(file_path) is None:
            return None
        # For a file outside the root directory, pytest uses only the file name as id.
        nodeid = Path(os.path.relpath(file_path, parent.config.rootpath)).as_posix()
        return ModelFileCollector.from_parent(parent, path=file_path, nodeid=nodeid)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Implement --hil-only-expected-failures."""
        if not self._plugin.request.only_expected_failures:
            return
        left_out = [item for item in items if not self._is_expected_to_fail(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the commands for the next step to failed tests."""
        report = yield
        run = item.stash.get(RUN, None)
        if run is not None:
            if report.failed:
                report.sections.append(("hil", run.describe()))
            if report.when == "teardown":
                if run.record is not None and isinstance(item, ModelCase):
                    attach(report, item.case, run.record)
                # Release the test's tensors before the end of the session.
                del item.stash[RUN]
        return report

    def pytest_report_collectionfinish(self) -> list[str]:
        """Report cases that were left out, and expected failures that have expired or match no case."""
        flows = {target.flow_key: target.flow for target in self._plugin.targets}
        left_out = [f"hil: left out: {line}" for folder in self._plugin.folders for line in folder.left_out]
        remarks = [
            f"hil: {line}"
            for folder in self._plugin.folders
            for key, flow in flows.items()
            if folder.models.keys() == folder.specs[key].keys()
            for line in folder.expectations.list_remarks(
                [spec.id for specs in folder.specs[key].values() for spec in specs],
                flow=flow.name,
                runtime=flow.runtime,
            )
        ]
        return left_out + list(dict.fromkeys(remarks))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass the directory of board locks to xdist's workers."""
        if self._locks_folder is None:
            self._locks_folder = make_folder("hil-board-locks-")
        node.workerinput[BOARD_LOCKS] = str(self._locks_folder)

    def pytest_unconfigure(self) -> None:
        """Release the boards."""
        self._plugin.close()
        if self._locks_folder is not None:
            shutil.rmtree(self._locks_folder, ignore_errors=True)

    def _is_expected_to_fail(self, item: pytest.Item) -> bool:
        return isinstance(item, ModelCase) and self._plugin.is_expected_to_fail(item.case)


# The fixture with a test's case. All other fixtures depend on it.
CASE = "hil_case"


def passes(hil_result: RunResult, hil_reference: RunResult, hil_compare: Callable[[], Verdict]) -> None:
    """Check that the board's outputs match the reference."""
    hil_compare()


class ModelFileCollector(pytest.Module):
    """Collector for a model file.

    The collector is a module without Python code, so that fixtures of all scopes work.
    """

    obj = None

    def collect(self) -> Iterator[ModelCase]:
        """Yield the cases of the model."""
        plugin = self.config.stash[SESSION]
        folder = plugin.find_folder(self.path)
        assert folder is not None
        if not folder.has_read(self.path):
            # Import all requested models in parallel.
            _collect_cases(plugin, folder, {self.path, *filter(self._is_requested, folder.models)})
        for case in _collect_cases(plugin, folder, [self.path]):
            item = ModelCase.from_parent(self, name=case.id, callobj=passes)
            item.case = case
            item.add_marker("hil")
            yield item

    def _is_requested(self, file: Path) -> bool:
        here = self.config.invocation_params.dir
        asked = [here / argument.partition("::")[0] for argument in self.config.args]
        return any(file == path or path in file.parents for path in asked)


def multiply(metafunc: pytest.Metafunc) -> None:
    """Parametrize a user test with the cases that match its marker.

    Raises:
        CollectError: invalid marker.
    """
    plugin = metafunc.config.stash.get(SESSION, None)
    if plugin is None:
        raise pytest.Collector.CollectError(
            f"{metafunc.function.__name__} uses hil's fixtures, but hil_models is not set\n"
            "  hint: set hil_models in the ini file to a directory with models"
        )
    chosen = _make_case_filter(metafunc.definition.iter_markers("hil"))
    cases = [
        case for folder in plugin.folders for case in _collect_cases(plugin, folder, folder.models) if chosen(case)
    ]
    metafunc.parametrize(CASE, cases, indirect=True, ids=[case.id for case in cases])


def _collect_cases(plugin: PluginSession, folder: ModelFolder, files: Iterable[Path]) -> list[HilCase]:
    try:
        return plugin.list_cases(folder, files)
    except HilError as error:
        raise pytest.Collector.CollectError(rename_for_pytest(str(error))) from None


def _make_case_filter(markers: Iterator[pytest.Mark]) -> Callable[[HilCase], bool]:
    """Return a predicate for cases that match all markers of a test."""
    wanted = [_check_marker(marker.args, marker.kwargs) for marker in markers]
    return lambda case: all(_matches_marker(case, one) for one in wanted)


def _check_marker(arguments: tuple[Any, ...], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    wrong = [repr(argument) for argument in arguments]
    kinds = {"models": str, "ops": str, "layers": bool}
    for name, value in wanted.items():
        if not isinstance(value, kinds.get(name, ())):
            wrong.append(f"{name}={value!r}")
    if wrong:
        raise pytest.Collector.CollectError(
            f"invalid pytest.mark.hil argument {wrong[0]}: "
            "expected models=PATTERN, ops=PATTERN, layers=True or layers=False"
        )
    return wanted


def _matches_marker(case: HilCase, wanted: Mapping[str, Any]) -> bool:
    spec = case.spec
    return (
        fnmatch.fnmatchcase(spec.model, wanted.get("models", "*"))
        and fnmatch.fnmatchcase(spec.op, wanted.get("ops", "*"))
        and wanted.get("layers", bool(spec.layer)) == bool(spec.layer)
    )
