"""Manage the state that all tests of a process share: models and their cases, cache, boards, and prefetched cases."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from hil.controller.devices.board_choice import BoardChoice, is_provider_address, use_device
from hil.controller.devices.choosing.board_resolver import check_faults, choose
from hil.controller.models.flows.flow import Flow
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.runner import Runner
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import convert_write_errors, make_safe_name
from hil.controller.storage.screen import live
from hil.controller.workloads.matrix.targets import combine_targets
from hil.controller.workloads.suites.cases.model_cases import LayerChoice, choose_model_flow, make_cases, size_models
from hil.controller.workloads.suites.cases.model_scan import scan_models
from hil.controller.workloads.suites.cases.sources import EXPECTED, choose_flow
from hil.controller.workloads.suites.cases.spec import CaseSpec, SuiteModel
from hil.controller.workloads.suites.expected import Expectations
from hil.controller.workloads.suites.preparing import check_settings, iter_prepared, make_suite_runner
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task
from hil.controller.workloads.triage.entries import TriageList
from hil.core.board_config import BoardConfig
from hil.core.scratch import make_folder
from hil.core.text import escape_controls, make_names_unique
from hil.errors import FarmUnreachable, UsageError
from hil.testing.pytest_plugin.boards import BoardLender, BoardLocks
from hil.testing.pytest_plugin.options import (
    MODELS,
    OUT,
    choose_out_folder,
    list_boards,
    list_flows,
    make_absolute,
    make_simulator_settings,
    must_write_reports,
    request_of,
)

# Maximum number of prepared cases that wait for their tests. The limit is necessary because their tensors are in
# memory.
_WAITING = 256
_JOIN_SECONDS = 15.0


class Prefetch:
    """Thread that prepares cases in the order of their tests."""

    def __init__(
        self,
        specs: Sequence[CaseSpec],
        flow: Flow,
        settings: Settings,
        runner: Runner,
        config: BoardConfig,
        run: SuiteDirectory,
    ) -> None:
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._coming = {spec.id for spec in specs}
        self._ready: dict[str, Task] = {}
        self._wanted = ""
        self._error: BaseException | None = None
        tasks = iter_prepared(specs, flow, settings, runner, config, run, self._over)
        self._thread = threading.Thread(target=self._prepare_tasks, args=(tasks,), name="hil-prefetch", daemon=True)
        self._thread.start()

    def take(self, case_id: str) -> Task | None:
        """Wait for a prepared case and return it. Returns None if the case is unknown or was already taken."""
        with self._changed:
            if case_id not in self._coming:
                return None
            self._wanted = case_id
            self._changed.notify_all()
            while case_id not in self._ready:
                if self._error is not None:
                    raise self._error
                # Wait with a timeout, so that Ctrl-C works on every platform.
                self._changed.wait(0.5)
            self._wanted = ""
            self._coming.remove(case_id)
            return self._ready.pop(case_id)

    def close(self) -> None:
        """Stop preparing cases. Call this after stopping the worker processes."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)

    def _prepare_tasks(self, tasks: Iterator[Task]) -> None:
        try:
            for task in tasks:
                with self._changed:
                    self._ready[task.case.name] = task
                    self._changed.notify_all()
                    while len(self._ready) >= _WAITING and not self._wanted and not self._over.is_set():
                        self._changed.wait()
                if self._over.is_set():
                    break
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


SESSION = pytest.StashKey["PluginSession"]()
# Requested flow and runtime. Runtime "" selects the flow's runtime.
FlowKey = tuple[str, str]
# Key of xdist's worker input: the directory with the board locks.
BOARD_LOCKS = "hil_board_locks"


@dataclass
class ModelFolder:
    """Directory of models: a suite. Only models with requested tests are imported."""

    path: Path
    out: Path  # directory for files of failed cases, with a subdirectory for each kind of hardware
    models: Mapping[Path, SuiteModel]
    left_out: list[str]  # test cases in the directory that cannot be run, one line for each place
    expectations: Expectations
    # requested flow and runtime -> file -> cases, for imported models.
    specs: defaultdict[FlowKey, dict[Path, tuple[CaseSpec, ...]]] = field(default_factory=lambda: defaultdict(dict))

    def has_read(self, file: Path) -> bool:
        """Return True if a model's cases are known."""
        return bool(self.specs) and all(file in found for found in self.specs.values())


@dataclass(frozen=True)
class CaseTarget:
    """Flow and boards of cases."""

    # suffix of test names: the hardware type or the board, with the flow or runtime as a prefix if there are several.
    name: str
    hw_type: str
    request: SuiteRequest  # equivalent request of `hil suite run`; ``source`` is set for each model directory
    flow: Flow
    lender: BoardLender

    @property
    def flow_key(self) -> FlowKey:
        """The requested flow and runtime."""
        return self.request.flow, self.request.runtime


@dataclass(frozen=True)
class HilCase:
    """Case on a target."""

    spec: CaseSpec
    folder: ModelFolder
    target: CaseTarget

    @property
    def hw_type(self) -> str:
        """The hardware type."""
        return self.target.hw_type

    @property
    def id(self) -> str:
        """The name in test ids."""
        return f"{self.spec.id}-{self.target.name}"

    @property
    def out(self) -> Path:
        """Directory for the case's files: the directory of a suite run on this target."""
        return self.folder.out / make_safe_name(self.target.name)

    @property
    def request(self) -> SuiteRequest:
        """The equivalent request of `hil suite run`."""
        return replace(self.target.request, source=str(self.folder.path))


class ModelCase(pytest.Function):
    """Test of a model's case."""

    case: HilCase

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the model as the location, not the code of the plugin."""
        # pytest requires a line number if a fixture skips the test.
        return self.path, 0, self.name


class PluginSession:
    """State shared by the tests of a process. Raises UsageError if an option, a setting or expected.toml is invalid."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        if config.getoption("capture") == "no":
            # pytest -s
            live_output = contextlib.ExitStack()
            live_output.enter_context(live.show_output(lambda text: print(escape_controls(text), flush=True)))
            config.add_cleanup(live_output.close)
        settings = pytest.MonkeyPatch()
        for name, value in make_simulator_settings(config).items():
            settings.setenv(name, value)
        config.add_cleanup(settings.undo)
        self._worker: Mapping[str, Any] = getattr(config, "workerinput", {})
        self.is_worker = bool(self._worker)  # True if xdist started this process
        self.reported: set[tuple[str, str]] = set()  # (board, message) of reported board errors
        self.request: SuiteRequest = request_of(config)
        self.known = self._load_known()
        self.folders: list[ModelFolder] = []
        for path in dict.fromkeys(map(make_absolute, config.getini(MODELS))):
            self.folders.append(self._load_folder(path))
        self._pool = BoardPool(
            "pytest",
            wait_s=self.request.wait_s,
            say=print,
            record_folder=choose_out_folder(self.config) if must_write_reports(self.config) else None,
        )
        # Boards with their devices -> lender; shared by all flows with the same devices.
        self._lenders: dict[Hashable, BoardLender] = {}
        self.targets = self._make_targets()
        self._isolated: Isolated | None = None
        self._prefetches: dict[tuple[Path, str, str], Prefetch] = {}
        self.work = make_folder("hil-pytest-")  # for temporary files of running tests

    @cached_property
    def context(self) -> RunContext:
        """Cache and isolated processes. The number of processes is this process's share of the CPU cores."""
        share = max(1, (os.cpu_count() or 1) // self._worker.get("workercount", 1))
        self._isolated = Isolated(share)
        return RunContext(Cache(), self._isolated)

    @cached_property
    def runner(self) -> Runner:
        """Runner of the cases' stages."""
        return make_suite_runner(self.context)

    def find_folder(self, file: Path) -> ModelFolder | None:
        """Return the model directory that contains a model file, or None."""
        return next((folder for folder in self.folders if file in folder.models), None)

    def list_cases(self, folder: ModelFolder, files: Iterable[Path]) -> list[HilCase]:
        """Return the cases of some models in a directory on all targets. Models are imported in parallel."""
        files = list(files)
        request = self.request
        for key, flow in {target.flow_key: target.flow for target in self.targets}.items():
            known = folder.specs[key]
            if unread := [file for file in files if file not in known]:
                layers = LayerChoice(request.group, request.layer_inputs, request.merge) if request.layers else None
                models = [model for file in unread for model in self._sized_models[file]]
                how: dict[str, Any] = {"layers": layers, "settings": request.settings}
                specs = make_cases(models, flow, self.context, is_default_flow=self._yields_flow(key), **how)
                for file in unread:
                    names = {model.name for model in self._sized_models[file]}
                    known[file] = tuple(spec for spec in specs if spec.model in names)
        return [
            HilCase(spec, folder, replace(target, flow=spec.flow or target.flow))
            for file in files
            for target in self.targets
            for spec in folder.specs[target.flow_key][file]
        ]

    def list_model_flows(self, key: FlowKey, flow: Flow) -> list[Flow]:
        """Return the flows of the models: the requested flow, and those of models with another runtime."""
        paths = [path for folder in self.folders for path in folder.models]
        if not paths:
            return [flow]
        settings, yields = self.request.settings, self._yields_flow(key)
        flows = (choose_model_flow(flow, path, settings, is_default_flow=yields) for path in paths)
        found = {own.name: own for own in flows}
        return sorted(found.values(), key=lambda own: own != flow)

    def _yields_flow(self, key: FlowKey) -> bool:
        """Return True if the flow of a target is the default, and models with only one runtime run on that runtime."""
        return self.request.is_default_flow and not key[1]

    def make_room(self, lender: BoardLender) -> None:
        """Release the boards that this target needs from other targets, because a board has only one user at a time."""
        for other in self._lenders.values():
            if other is not lender and any(
                name in lender.choices and not choice.config.is_simulator for name, choice in other.choices.items()
            ):
                other.release()

    def get_prefetched(self, case: HilCase, coming: Callable[[], Iterable[HilCase]]) -> Task | None:
        """Return the prefetched case, or None if prefetching is disabled.

        Args:
            coming: Returns this case and the cases of later tests.
        """
        target = case.target
        config = target.lender.choose_config(target.flow.runtime)
        # Do not prefetch in xdist workers: they share the machine, and a worker does not know its next tests.
        if config is None or self.is_worker:
            return None
        key = (case.folder.path, target.name, target.flow.name)
        if key not in self._prefetches:
            specs = [one.spec for one in coming() if (one.folder.path, one.target.name, one.target.flow.name) == key]
            run = SuiteDirectory(self.work / str(len(self._prefetches)))
            self._prefetches[key] = Prefetch(specs, target.flow, target.request.settings, self.runner, config, run)
        return self._prefetches[key].take(case.spec.id)

    def is_expected_to_fail(self, case: HilCase) -> bool:
        """Return True if the case is expected to fail on one of the boards that may run it."""
        flow = case.target.flow
        return any(
            case.folder.expectations.selects(case.spec.id, flow.name, board, flow.runtime, choice.config.hw_type)
            for board, choice in case.target.lender.choices.items()
        )

    def make_out(self, out: Path) -> None:
        """Create the directory for files of a failure. hil's directory in the project root is ignored by git."""
        own = self.config.rootpath / OUT
        with convert_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            if out.is_relative_to(own):
                (own / ".gitignore").write_text("*\n")

    def close(self) -> None:
        """Release the boards and end the processes."""
        try:
            for lender in self._lenders.values():
                lender.close()
        finally:
            if self._isolated is not None:
                self._isolated.close()
            for prefetch in self._prefetches.values():
                prefetch.close()
            shutil.rmtree(self.work, ignore_errors=True)

    @cached_property
    def _sized_models(self) -> dict[Path, list[SuiteModel]]:
        """All models with the sizes of --hil-dim. A range of sizes creates multiple models.

        Raises:
            UsageError: no model has a dimension in --hil-dim.
        """
        models = {path: model for folder in self.folders for path, model in folder.models.items()}
        found: dict[Path, list[SuiteModel]] = defaultdict(list)
        request = self.request
        for model in size_models(list(models.values()), request.dims, self.context, request.settings, "--hil-dim"):
            found[model.path].append(model)
        return found

    def _make_targets(self) -> tuple[CaseTarget, ...]:
        """Return the combinations of flows with hardware types or boards. Raises UsageError if one is invalid."""
        boards = self.request.boards
        each = boards if self.config.getoption("hil_each_board") and len(boards) > 1 else ()
        flow_names, runtime_names = list_flows(self.config), self.config.getoption("hil_runtime") or [""]
        _, hw_types = list_boards(self.config)
        axes = {"flow": flow_names, "runtime": runtime_names, "board": each, "hw_type": hw_types}
        asked = combine_targets(axes)
        # Use the flows.toml in the ini file's directory, independent of the working directory. Trust it, because pytest
        # also runs the project's code.
        flows = {
            key: choose_flow(replace(self.request, flow=key[0], runtime=key[1]), self.config.rootpath, trusted=True)
            for key in itertools.product(flow_names, runtime_names)
        }
        own_flows = [own for key, flow in flows.items() for own in self.list_model_flows(key, flow)]
        runtimes = list(dict.fromkeys(flow.runtime for flow in own_flows))
        made: list[CaseTarget] = []
        for one in asked:
            key, board = (one.options["flow"], one.options["runtime"]), one.options.get("board", "")
            flow = flows[key]
            request = replace(
                self.request,
                flow=key[0],
                runtime=key[1],
                hw_type=one.options.get("hw_type", ""),
                boards=(board,) if board else boards,
            )
            kinds: dict[str, list[BoardChoice]] = defaultdict(list)
            for name in request.boards or ("",):
                choice = use_device(choose(name, request.hw_type, **request.ssh), flow.runtime, flow.device)
                check_settings(request.settings, flow, [choice])
                check_faults(choice, request.faults)
                kinds[choice.config.hw_type].append(choice)
            for hw_type, alike in kinds.items():
                parts = [flow.name] * (len(flow_names) > 1) + [flow.runtime] * (len(runtime_names) > 1)
                parts.append(make_safe_name(board) if board else hw_type)
                made.append(CaseTarget("-".join(parts), hw_type, request, flow, self._get_lender(alike, runtimes)))
        names = make_names_unique([target.name for target in made])
        return tuple(
            replace(
                target,
                name=name,
                request=target.request.for_target(make_safe_name(name)) if made[1:] else target.request,
            )
            for target, name in zip(made, names, strict=True)
        )

    def _get_lender(self, choices: list[BoardChoice], runtimes: list[str]) -> BoardLender:
        key = tuple((choice.name, choice.config.hw_type, choice.devices) for choice in choices)
        if key not in self._lenders:
            self._lenders[key] = BoardLender(
                choices, runtimes, self._pool, self._make_locks(choices), self.request.faults
            )
        return self._lenders[key]

    def _load_known(self) -> TriageList:
        """Return the triage of --hil-known. Raises UsageError if it is invalid, or the server does not respond."""
        text = self.config.getoption("hil_known")
        if not text:
            return TriageList()
        from hil.controller.web.publish.known_failures import load_known

        try:
            return load_known(text if "://" in text else str(self.config.invocation_params.dir / text))
        except FarmUnreachable as error:
            raise UsageError(error.message, hint=error.hint) from error

    def _load_folder(self, path: Path) -> ModelFolder:
        if not path.is_dir():
            raise UsageError(f"directory {path} not found", hint=f"check the ini setting {MODELS}")
        inside = path.is_relative_to(self.config.rootpath)
        out = choose_out_folder(self.config) / (path.relative_to(self.config.rootpath) if inside else path.name)
        taken = [folder.out for folder in self.folders]
        if out in taken:
            out = out.with_name(f"{out.name}-{len(taken) + 1}")
        found = scan_models(path)
        models = {model.path: model for model in found.models}
        return ModelFolder(path, out, models, found.left_out, Expectations.load(path / EXPECTED))

    def _make_locks(self, choices: list[BoardChoice]) -> BoardLocks | None:
        folder = self._worker.get(BOARD_LOCKS)
        # These boards need no locks: each process starts a separate simulator, and a farm lends each process a separate
        # board.
        own = (
            choice.config.is_simulator or is_provider_address(choice.config.connection.address) for choice in choices
        )
        if folder is None or all(own):
            return None
        return BoardLocks(Path(folder), [choice.name for choice in choices])
