"""What pytest calls where the ini setting ``hil_models`` is set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from hil.core.scratch import new_folder
from hil.core.text import visible
from hil.errors import UsageError
from hil.testing.pytest_plugin.collecting import ModelCase, ModelFile
from hil.testing.pytest_plugin.options import TAKEN, absolute, writes_reports
from hil.testing.pytest_plugin.reporting import Reporting, attach
from hil.testing.pytest_plugin.running import RUN
from hil.testing.pytest_plugin.session import BENCH, TURNS, Bench


def begin(config: pytest.Config) -> None:
    """Look at options and settings, and have models collected whatever folder pytest is called in.

    Raises:
        pytest.UsageError: an option or setting is wrong.
    """
    try:
        bench = Bench(config)
    except UsageError as error:
        raise pytest.UsageError(visible(str(error))) from None
    config.stash[BENCH] = bench
    config.pluginmanager.register(Hooks(bench), "hil-hooks")
    if writes_reports(config) and not bench.is_worker:
        config.pluginmanager.register(Reporting(bench), "hil-reports")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        here = config.invocation_params.dir
        searched = [absolute(here / argument) for argument in config.args]
        config.args += [
            str(folder.path)
            for folder in bench.folders
            if not any(folder.path.is_relative_to(path) for path in searched)
        ]


class Hooks:
    """Hooks of a process whose options are right."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._turns: Path | None = None
        self._below = {
            parent
            for folder in bench.folders
            for file in folder.models
            for parent in file.parents
            if parent.is_relative_to(folder.path)
        }

    def pytest_report_header(self) -> list[str]:
        """What is run on what."""
        bench = self._bench
        boards = ", ".join(
            board if board == hw_type else f"{board} ({hw_type})"
            for hw_type, desk in bench.desks.items()
            for board in desk.choices
        )
        taken = [f"{name} belongs to another plugin here: use --hil{name[1:]}" for name in bench.config.stash[TAKEN]]
        return [f"hil: flow {bench.flow.name} on {boards}", *taken]

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Folders of models are looked into, whatever they are called."""
        return False if collection_path in self._below else None

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """A model's file."""
        if self._bench.folder_of(file_path) is None:
            return None
        # pytest's own id of a file outside the root folder is its mere name.
        nodeid = Path(os.path.relpath(file_path, parent.config.rootpath)).as_posix()
        return ModelFile.from_parent(parent, path=file_path, nodeid=nodeid)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """--hil-only-expected-failures."""
        if not self._bench.request.only_expected_failures:
            return
        left_out = [item for item in items if not self._expected_to_fail(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """What failed says how to go on."""
        report = yield
        run = item.stash.get(RUN, None)
        if run is not None:
            if report.failed:
                report.sections.append(("hil", run.told()))
            if report.when == "teardown":
                if run.record is not None and isinstance(item, ModelCase):
                    attach(report, item.case, run.record)
                # The test's tensors are not kept until the session ends.
                del item.stash[RUN]
        return report

    def pytest_report_collectionfinish(self) -> list[str]:
        """Cases that are left out; expected failures that nothing is called like, or whose day is over."""
        flow = self._bench.flow
        left_out = [f"hil: left out: {line}" for folder in self._bench.folders for line in folder.left_out]
        return left_out + [
            f"hil: {line}"
            for folder in self._bench.folders
            if folder.models.keys() == folder.specs.keys()
            for line in folder.expectations.remarks(
                [spec.id for specs in folder.specs.values() for spec in specs], flow=flow.name, runtime=flow.runtime
            )
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Where xdist's workers take turns on boards."""
        if self._turns is None:
            self._turns = new_folder("hil-turns-")
        node.workerinput[TURNS] = str(self._turns)

    def pytest_unconfigure(self) -> None:
        """Give the boards back."""
        self._bench.close()
        if self._turns is not None:
            shutil.rmtree(self._turns, ignore_errors=True)

    def _expected_to_fail(self, item: pytest.Item) -> bool:
        return isinstance(item, ModelCase) and self._bench.expected_to_fail(item.case)
