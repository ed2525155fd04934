"""What the tests of one process share: the models and their cases, the cache, the boards, and cases prepared ahead."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from hil.controller.devices.board_choice import BoardChoice, is_lent
from hil.controller.devices.board_resolver import choose
from hil.controller.models.flows import Flow, load_flow
from hil.controller.pipeline.board_pool import BoardPool
from hil.controller.pipeline.runner import Runner
from hil.controller.storage import live
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import safe_name, storing
from hil.controller.workloads.matrix.targets import targets_of
from hil.controller.workloads.suites.expected import Expectations
from hil.controller.workloads.suites.model_cases import LayerChoice, cases_of, sized_models
from hil.controller.workloads.suites.preparing import check_settings, prepared, suite_runner
from hil.controller.workloads.suites.request import Request, Settings
from hil.controller.workloads.suites.sources import EXPECTED, look
from hil.controller.workloads.suites.spec import CaseSpec, SuiteModel
from hil.controller.workloads.suites.store import SuiteRun
from hil.controller.workloads.suites.tasks import Task
from hil.core.board_config import BoardConfig
from hil.core.scratch import new_folder
from hil.core.text import numbered, visible
from hil.errors import UsageError
from hil.testing.pytest_plugin.boards import BoardLender, BoardLocks
from hil.testing.pytest_plugin.options import MODELS, OUT, absolute, flows_of, out_folder, request_of

# So many that are ready may wait for their tests: their tensors are in memory.
_WAITING = 256
_JOIN_S = 15.0


class Prefetch:
    """Prepares cases in a thread, in the order of their tests."""

    def __init__(
        self,
        specs: Sequence[CaseSpec],
        flow: Flow,
        settings: Settings,
        runner: Runner,
        config: BoardConfig,
        run: SuiteRun,
    ) -> None:
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._coming = {spec.id for spec in specs}
        self._ready: dict[str, Task] = {}
        self._wanted = ""
        self._error: BaseException | None = None
        tasks = prepared(specs, flow, settings, runner, config, run, self._over)
        self._thread = threading.Thread(target=self._work, args=(tasks,), name="hil-prefetch", daemon=True)
        self._thread.start()

    def take(self, case_id: str) -> Task | None:
        """A case that is ready, or has ended before; waits for it. None for one that is not among them any more."""
        with self._changed:
            if case_id not in self._coming:
                return None
            self._wanted = case_id
            self._changed.notify_all()
            while case_id not in self._ready:
                if self._error is not None:
                    raise self._error
                # In slices, so that Ctrl-C is heard on every platform.
                self._changed.wait(0.5)
            self._wanted = ""
            self._coming.remove(case_id)
            return self._ready.pop(case_id)

    def close(self) -> None:
        """Prepare no more; to be called after the processes have been stopped."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _work(self, tasks: Iterator[Task]) -> None:
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
# What xdist's controller tells its workers: the folder in which they take turns on boards.
BOARD_LOCKS = "hil_board_locks"


@dataclass
class ModelFolder:
    """A folder of models: a suite, of which only those models are read that tests are made from."""

    path: Path
    out: Path  # where what its cases leave behind goes, in a folder for each kind of hardware
    models: Mapping[Path, SuiteModel]
    left_out: list[str]  # test cases that lie there and cannot be run, a line for each place
    expectations: Expectations
    # flow, as it was asked for -> file -> its cases, for the models that were read.
    specs: defaultdict[str, dict[Path, tuple[CaseSpec, ...]]] = field(default_factory=lambda: defaultdict(dict))

    def has_read(self, file: Path) -> bool:
        """Whether a model's cases are known."""
        return bool(self.specs) and all(file in found for found in self.specs.values())


@dataclass(frozen=True)
class CaseTarget:
    """What cases are run on and by."""

    # what tests are called after: the kind of hardware, or each board; before it the flow, where there are several.
    name: str
    hw_type: str
    request: Request  # what `hil suite run` would be asked for; its ``source`` is each folder's own
    flow: Flow
    lender: BoardLender


@dataclass(frozen=True)
class HilCase:
    """A case on a target."""

    spec: CaseSpec
    folder: ModelFolder
    target: CaseTarget

    @property
    def hw_type(self) -> str:
        """The kind of hardware."""
        return self.target.hw_type

    @property
    def id(self) -> str:
        """What tests call it."""
        return f"{self.spec.id}-{self.target.name}"

    @property
    def out(self) -> Path:
        """Where what it leaves behind goes: the folder of a suite run on this target."""
        return self.folder.out / safe_name(self.target.name)

    @property
    def request(self) -> Request:
        """What `hil suite run` would be asked for."""
        return replace(self.target.request, source=str(self.folder.path))


class ModelCase(pytest.Function):
    """One case of a model."""

    case: HilCase

    def reportinfo(self) -> tuple[Path, int, str]:
        """The model, not the lines of ours that test it."""
        # pytest asks for a line where a fixture skips the test.
        return self.path, 0, self.name


class PluginSession:
    """What the tests of one process share. Raises UsageError: an option, a setting or expected.toml is wrong."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        if config.getoption("capture") == "no":
            # pytest -s
            live_output = contextlib.ExitStack()
            live_output.enter_context(live.showing(lambda text: print(visible(text), flush=True)))
            config.add_cleanup(live_output.close)
        self._worker: Mapping[str, Any] = getattr(config, "workerinput", {})
        self.is_worker = bool(self._worker)  # whether xdist started this process
        self.reported: set[tuple[str, str]] = set()  # errors of boards, told by a test already: board, message
        self.request: Request = request_of(config)
        self.folders: list[ModelFolder] = []
        for path in dict.fromkeys(map(absolute, config.getini(MODELS))):
            self.folders.append(self._folder(path))
        self._pool = BoardPool("pytest", wait_s=self.request.wait_s, say=print)
        # Boards -> where they are had; for all flows.
        self._lenders: dict[tuple[tuple[str, str], ...], BoardLender] = {}
        self.targets = self._make_targets()
        self._isolated: Isolated | None = None
        self._prefetches: dict[tuple[Path, str], Prefetch] = {}
        self.work = new_folder("hil-pytest-")  # for files that tests need while they run

    @cached_property
    def context(self) -> RunContext:
        """The cache, and processes for what may crash: as many as this process' share of the machine."""
        share = max(1, (os.cpu_count() or 1) // self._worker.get("workercount", 1))
        self._isolated = Isolated(share)
        return RunContext(Cache(), self._isolated)

    @cached_property
    def runner(self) -> Runner:
        """Takes the cases through their stages."""
        return suite_runner(self.context)

    def folder_of(self, file: Path) -> ModelFolder | None:
        """The folder whose model a file is; None where it is none."""
        return next((folder for folder in self.folders if file in folder.models), None)

    def cases(self, folder: ModelFolder, files: Iterable[Path]) -> list[HilCase]:
        """The cases of some of a folder's models, on each target; models are read side by side."""
        files = list(files)
        request = self.request
        for asked, flow in {target.request.flow: target.flow for target in self.targets}.items():
            known = folder.specs[asked]
            if unread := [file for file in files if file not in known]:
                layers = LayerChoice(request.group, request.layer_inputs, request.merge) if request.layers else None
                models = [model for file in unread for model in self._sized[file]]
                specs = cases_of(models, flow, self.context, layers=layers, settings=request.settings)
                for file in unread:
                    names = {model.name for model in self._sized[file]}
                    known[file] = tuple(spec for spec in specs if spec.model in names)
        return [
            HilCase(spec, folder, target)
            for file in files
            for target in self.targets
            for spec in folder.specs[target.request.flow][file]
        ]

    def make_room(self, lender: BoardLender) -> None:
        """Give back boards of other targets that are going to be used as this one's: a board has one user at a time."""
        for other in self._lenders.values():
            if other is not lender and any(
                name in lender.choices and not choice.config.is_simulator for name, choice in other.choices.items()
            ):
                other.release()

    def prefetched(self, case: HilCase, coming: Callable[[], Iterable[HilCase]]) -> Task | None:
        """The case as prepared ahead, with those of the tests after it (``coming``); None where nobody does so."""
        target = case.target
        config = target.lender.config_for(target.flow.runtime)
        # xdist's workers share the machine, and none of them knows which tests will be its own.
        if config is None or self.is_worker:
            return None
        key = (case.folder.path, target.name)
        if key not in self._prefetches:
            specs = [one.spec for one in coming() if (one.folder.path, one.target.name) == key]
            run = SuiteRun(self.work / str(len(self._prefetches)), {})
            self._prefetches[key] = Prefetch(specs, target.flow, target.request.settings, self.runner, config, run)
        return self._prefetches[key].take(case.spec.id)

    def expected_to_fail(self, case: HilCase) -> bool:
        """Whether the case is expected to fail on one of the boards that may run it."""
        flow = case.target.flow
        return any(
            case.folder.expectations.selects(case.spec.id, flow.name, board, flow.runtime, choice.config.hw_type)
            for board, choice in case.target.lender.choices.items()
        )

    def make_out(self, out: Path) -> None:
        """Make the folder for what a failure leaves behind; hil's own at the root is none of the user's sources."""
        own = self.config.rootpath / OUT
        with storing(out):
            out.mkdir(parents=True, exist_ok=True)
            if out.is_relative_to(own):
                (own / ".gitignore").write_text("*\n")

    def close(self) -> None:
        """Give the boards back, end the processes."""
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
    def _sized(self) -> dict[Path, list[SuiteModel]]:
        """Every model, with those of --hil-dim's sizes that it has; several times where it has a range of sizes.

        Raises:
            UsageError: no model has a dimension that --hil-dim names.
        """
        models = {path: model for folder in self.folders for path, model in folder.models.items()}
        found: dict[Path, list[SuiteModel]] = defaultdict(list)
        request = self.request
        for model in sized_models(list(models.values()), request.dims, self.context, request.settings, "--hil-dim"):
            found[model.path].append(model)
        return found

    def _make_targets(self) -> tuple[CaseTarget, ...]:
        """Every flow on every kind of hardware, or on each board. Raises UsageError: one of them cannot be."""
        boards = self.request.boards
        each = boards if self.config.getoption("hil_each_board") and len(boards) > 1 else ()
        axes = {"flow": flows_of(self.config), "board": each, "hw_type": self.config.getoption("hil_runtime_hw_type")}
        asked = targets_of(axes)
        # Wherever pytest is called, a flows.toml lies beside the ini file. Whoever wrote that runs code here anyway.
        flows = {text: load_flow(text, self.config.rootpath, trusted=True) for text in axes["flow"]}
        runtimes = list(dict.fromkeys(flow.runtime for flow in flows.values()))
        made: list[CaseTarget] = []
        for one in asked:
            flow, board = flows[one.options["flow"]], one.options.get("board", "")
            request = replace(
                self.request,
                flow=one.options["flow"],
                hw_type=one.options.get("hw_type", ""),
                boards=(board,) if board else boards,
            )
            kinds: dict[str, list[BoardChoice]] = defaultdict(list)
            for name in request.boards or ("",):
                choice = choose(name, request.hw_type, **request.ssh)
                check_settings(request.settings, flow, [choice])
                kinds[choice.config.hw_type].append(choice)
            for hw_type, alike in kinds.items():
                parts = [flow.name] if len(flows) > 1 else []
                parts.append(safe_name(board) if board else hw_type)
                made.append(CaseTarget("-".join(parts), hw_type, request, flow, self._lender(alike, runtimes)))
        names = numbered([target.name for target in made])
        return tuple(
            replace(
                target, name=name, request=target.request.for_target(safe_name(name)) if made[1:] else target.request
            )
            for target, name in zip(made, names, strict=True)
        )

    def _lender(self, choices: list[BoardChoice], runtimes: list[str]) -> BoardLender:
        key = tuple((choice.name, choice.config.hw_type) for choice in choices)
        if key not in self._lenders:
            self._lenders[key] = BoardLender(choices, runtimes, self._pool, self._locks_of(choices))
        return self._lenders[key]

    def _folder(self, path: Path) -> ModelFolder:
        if not path.is_dir():
            raise UsageError(f"there is no folder {path}", hint=f"the ini setting {MODELS} names it")
        inside = path.is_relative_to(self.config.rootpath)
        out = out_folder(self.config) / (path.relative_to(self.config.rootpath) if inside else path.name)
        taken = [folder.out for folder in self.folders]
        if out in taken:
            out = out.with_name(f"{out.name}-{len(taken) + 1}")
        found = look(path)
        models = {model.path: model for model in found.models}
        return ModelFolder(path, out, models, found.left_out, Expectations.load(path / EXPECTED))

    def _locks_of(self, choices: list[BoardChoice]) -> BoardLocks | None:
        folder = self._worker.get(BOARD_LOCKS)
        # Of simulators everybody starts one of his own, and of a farm's boards everybody is lent one.
        own = (choice.config.is_simulator or is_lent(choice.config.connection.address) for choice in choices)
        if folder is None or all(own):
            return None
        return BoardLocks(Path(folder), [choice.name for choice in choices])
