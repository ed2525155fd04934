"""What the tests of one process share: the models and their cases, the cache, and the boards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hil.controller.cache import Cache
from hil.controller.choice import BoardChoice, choose
from hil.controller.flows import Flow, load_flow
from hil.controller.isolated import Isolated
from hil.controller.opening import AnyBoard, open_board
from hil.controller.pipeline import Options, Workshop, check_options
from hil.controller.runs import storing
from hil.controller.suite.expected import Expectations
from hil.controller.suite.folder import models_at
from hil.controller.suite.model_cases import LayerChoice, SuiteModel, cases_of
from hil.controller.suite.request import Request
from hil.controller.suite.sources import EXPECTED
from hil.controller.suite.spec import CaseSpec
from hil.controller.suite.store import SuiteRun
from hil.controller.suite.tasks import Task
from hil.errors import UsageError
from hil.testing.pytest_plugin.desk import Desk
from hil.testing.pytest_plugin.options import MODELS, OUT, absolute, out_folder, request_of
from hil.testing.pytest_plugin.turns import Turns

if TYPE_CHECKING:
    from hil.testing.pytest_plugin.ahead import Ahead

BENCH = pytest.StashKey["Bench"]()
# What xdist's controller tells its workers: the folder in which they take turns on boards.
TURNS = "hil_turns"


@dataclass
class ModelFolder:
    """A folder of models: a suite, of which only those models are read that tests are made from.

    Attributes:
        path: the folder.
        out: where what its failures leave behind goes.
        models: by file.
        expectations: what its cases are expected to end in.
        specs: file -> its cases, for the models that were read.
    """

    path: Path
    out: Path
    models: Mapping[Path, SuiteModel]
    expectations: Expectations
    specs: dict[Path, tuple[CaseSpec, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class HilCase:
    """A case on a kind of hardware.

    Attributes:
        spec: the case.
        folder: where its model is.
        hw_type: the hardware's.
    """

    spec: CaseSpec
    folder: ModelFolder
    hw_type: str

    @property
    def id(self) -> str:
        """What tests call it."""
        return f"{self.spec.id}-{self.hw_type}"


class Bench:
    """What the tests of one process share.

    Args:
        config: pytest's.

    Attributes:
        request: what the options ask for.
        flow: how models are compiled and run.
        folders: where models are.
        desks: hardware type -> where boards of that type are had.
        work: for files that tests need while they run.

    Raises:
        UsageError: an option or setting is wrong, or what is said of expected failures.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._worker: Mapping[str, Any] = getattr(config, "workerinput", {})
        self.request: Request = request_of(config)
        self.flow: Flow = load_flow(self.request.flow)
        request, settings = self.request, self.request.settings
        names = ("rtol", "atol", "timeout")
        options = Options(runtime=self.flow.runtime, **{name: getattr(settings, name) for name in names})
        kinds: dict[str, list[BoardChoice]] = defaultdict(list)
        for board in request.boards or ("",):
            choice = choose(board, request.hw_type, **request.ssh)
            check_options(options, choice)
            kinds[choice.config.hw_type].append(choice)
        self.folders = [self._folder(named) for named in dict.fromkeys(config.getini(MODELS))]
        self.desks = {
            hw_type: Desk(alike, self.flow.runtime, self._connect, self._turns(alike))
            for hw_type, alike in kinds.items()
        }
        self._isolated: Isolated | None = None
        self._aheads: dict[tuple[Path, str], Ahead] = {}
        self.work = Path(tempfile.mkdtemp(prefix="hil-pytest-"))

    @cached_property
    def shop(self) -> Workshop:
        """The cache, and processes for what may crash: as many as this process' share of the machine."""
        share = max(1, (os.cpu_count() or 1) // self._worker.get("workercount", 1))
        self._isolated = Isolated(share)
        return Workshop(Cache(), self._isolated)

    def folder_of(self, file: Path) -> ModelFolder | None:
        """The folder whose model a file is; None where it is none."""
        return next((folder for folder in self.folders if file in folder.models), None)

    def cases(self, folder: ModelFolder, files: Iterable[Path]) -> list[HilCase]:
        """The cases of some of a folder's models, on each kind of hardware; models are read side by side."""
        files = list(files)
        unread = [file for file in files if file not in folder.specs]
        request = self.request
        if unread:
            layers = LayerChoice(request.group, request.layer_inputs) if request.layers else None
            models = [folder.models[file] for file in unread]
            specs = cases_of(models, self.flow, self.shop, layers=layers, seed=request.settings.seed)
            for file, model in zip(unread, models, strict=True):
                folder.specs[file] = tuple(spec for spec in specs if spec.model == model.name)
        return [
            HilCase(spec, folder, hw_type) for file in files for hw_type in self.desks for spec in folder.specs[file]
        ]

    def ahead(self, case: HilCase, coming: Callable[[], Iterable[HilCase]]) -> Task | None:
        """The case as the host prepared it while other tests ran; None where nobody does so.

        Args:
            case: the case.
            coming: tells it and those of the tests after it.
        """
        config = self.desks[case.hw_type].config
        # xdist's workers share the machine, and none of them knows which tests will be its own.
        if config is None or self._worker:
            return None
        key = (case.folder.path, case.hw_type)
        if key not in self._aheads:
            from hil.testing.pytest_plugin.ahead import Ahead

            specs = [one.spec for one in coming() if (one.folder.path, one.hw_type) == key]
            run = SuiteRun(self.work / str(len(self._aheads)), {})
            self._aheads[key] = Ahead(specs, self.flow, self.request.settings, self.shop, config, run)
        return self._aheads[key].take(case.spec.id)

    def expected_to_fail(self, case: HilCase) -> bool:
        """Whether the case is expected to fail on one of the boards that may run it."""
        return any(
            case.folder.expectations.selects(
                case.spec.id, self.flow.name, board, self.flow.runtime, choice.config.hw_type
            )
            for board, choice in self.desks[case.hw_type].choices.items()
        )

    def request_for(self, folder: ModelFolder) -> Request:
        """What `hil suite run` would be asked for."""
        return replace(self.request, source=str(folder.path))

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
            for desk in self.desks.values():
                desk.close()
        finally:
            if self._isolated is not None:
                self._isolated.close()
            for ahead in self._aheads.values():
                ahead.close()
            shutil.rmtree(self.work, ignore_errors=True)

    def _folder(self, named: Path) -> ModelFolder:
        path = absolute(named)
        if not path.is_dir():
            raise UsageError(f"there is no folder {named}", hint=f"the ini setting {MODELS} names it")
        inside = path.is_relative_to(self.config.rootpath)
        out = out_folder(self.config) / (path.relative_to(self.config.rootpath) if inside else path.name)
        models = {model.path: model for model in models_at(path)}
        return ModelFolder(path, out, models, Expectations.load(path / EXPECTED))

    def _connect(self, choice: BoardChoice) -> AnyBoard:
        return open_board(choice, runtime=self.flow.runtime, purpose="pytest", wait_s=self.request.wait_s, say=print)

    def _turns(self, choices: list[BoardChoice]) -> Turns | None:
        folder = self._worker.get(TURNS)
        # Of simulators everybody starts one of his own.
        if folder is None or all(choice.config.is_simulator for choice in choices):
            return None
        return Turns(Path(folder), [choice.name for choice in choices])
