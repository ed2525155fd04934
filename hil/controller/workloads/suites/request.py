"""What a suite run was asked to do. Stored with it, so that it can be gone on with."""

from __future__ import annotations

import fnmatch
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.links.link import is_lent
from hil.controller.models.flows import Flow, quantum_atol
from hil.controller.pipeline.case import Case, Workshop
from hil.controller.pipeline.options import CaseSettings, Options, flag_of, specs_of, stored_settings
from hil.controller.pipeline.runner import Runner
from hil.controller.storage.runs import storing
from hil.controller.workloads.suites.spec import CaseData, CaseSpec
from hil.core.results import Stage
from hil.errors import (
    CompileFailed,
    HilError,
    ImportFailed,
    ReferenceFailed,
    RunFailed,
    StorageError,
    UsageError,
    VacuousTolerance,
)


@dataclass(frozen=True)
class Settings(CaseSettings):
    """How a suite's cases are to be run, whatever the flow.

    Attributes:
        profile: run a second time under the runtime's profiler.
    """

    profile: bool = False


# What bad usage that a stage finds is in a suite.
_KINDS: Mapping[Stage, type[HilError]] = {
    Stage.IMPORT: ImportFailed,
    Stage.COMPILE: CompileFailed,
    Stage.REFER: ReferenceFailed,
    Stage.COMPARE: ReferenceFailed,
}


def suite_runner(shop: Workshop) -> Runner:
    """The runner of a suite's cases: what a user of `hil run` typed wrongly, a suite found in a model or a flow."""
    return Runner(shop, of_usage=_outcome)


def begin_case(spec: CaseSpec, flow: Flow, runner: Runner, folder: Path, settings: Settings, name: str = "") -> Case:
    """Make a case's data and import its model. Whatever fails is the outcome of the case.

    Args:
        spec: the case.
        flow: how it is compiled and judged.
        runner: imports the model.
        folder: the case's own; it is made anew, with ``logs`` in it: a run that was killed may have left something.
        settings: how it is run.
        name: the case's; "" is its id.
    """
    with storing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    name = name or spec.id
    try:
        data = spec.make(runner.shop, folder)
        if data.program is not None:
            return data.program.begin(options_for(data, flow, settings, spec.id), folder, name)
        quantum = quantum_atol(flow, data.path, runner.shop, folder / "logs" / "import.log")
        if quantum is not None:
            data = replace(data, atol=max(quantum, data.atol or 0.0))
        return runner.begin(data.path, options_for(data, flow, settings, spec.id), folder, name=name)
    except StorageError:
        raise
    except HilError as error:
        case = Case(name, folder / "unread", Options(runtime=flow.runtime), folder)
        told = _outcome(error, Stage.IMPORT) if isinstance(error, UsageError) else error
        return case.ended(told, Stage.IMPORT)


def _outcome(error: UsageError, stage: Stage) -> HilError:
    """The error that ends a case in place of bad usage.

    A tolerance that cannot judge one case may suit all the others: that is an outcome as well.
    """
    if isinstance(error, VacuousTolerance):
        return error
    return _KINDS.get(stage, RunFailed)(error.message, hint=error.hint, detail=error.detail)


def options_for(data: CaseData, flow: Flow, settings: Settings, case_id: str) -> Options:
    """The pipeline's options for a case: its data, its flow, and how it is to be run."""
    # A tolerance that the user typed goes before the flow's, and that before the case's own.
    chosen: dict[str, Any] = {
        name: next(
            (one for one in (getattr(settings, name), getattr(flow, name)) if one is not None), getattr(data, name)
        )
        for name in ("rtol", "atol")
    }
    chosen["debug_ir"] = settings.debug_ir / case_id if settings.debug_ir else None
    shared = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return Options(
        **{**shared, **chosen},
        runtime=flow.runtime,
        compiler=flow.compiler,
        compile_flags=flow.compile_flags,
        dims=data.dims,
        inputs=data.inputs,
        expected=data.expected,
        plain_model=data.plain_path,
        plain_expected=data.plain_expected,
        min_sqnr_db=flow.min_sqnr_db,
        # A flow, or a case, has one tolerance for many outputs; what the user typed is never replaced.
        replace_blind_tolerance=settings.rtol is None and settings.atol is None,
    )


@dataclass(frozen=True)
class Request:
    """What `hil suite run` was asked to do.

    Attributes:
        source: the suite: see :func:`hil.controller.workloads.suites.sources.open_suite`.
        flow: its name, or a file.
        boards: what ``--board`` named, in order; empty is the simulator.
        hw_type: what ``--runtime-hw-type`` named.
        ssh: ``identity``, ``known_hosts``, ``accept_new_host_key`` where they were given.
        filters: shell patterns over case ids, of which one must match; one without wildcards matches a part of the id,
            one after an equals sign the id itself.
        layers: also a case for each layer of a model.
        group, layer_inputs, merge: what layers are, what they are run on, and which of them are one case.
        dims: values of symbolic dimensions.
        only_expected_failures: leave out what is expected to pass.
        confirm: how often a mismatch is run again.
        keep_all: keep the tensors of cases that passed as well.
        jobs: how many compile at a time, None is one a core; with boards of a farm, how many of those run at a time.
        faults: of a simulator.
        wait_s: how long to wait for a busy board.
        settings: how each case is run.
    """

    source: str
    flow: str = "iree"
    boards: tuple[str, ...] = ()
    hw_type: str = ""
    ssh: Mapping[str, Any] = field(default_factory=dict)
    filters: tuple[str, ...] = ()
    layers: bool = True
    group: str = "node"
    layer_inputs: str = "real"
    merge: str = "content"
    dims: Mapping[str, int] = field(default_factory=dict)
    only_expected_failures: bool = False
    confirm: int = 0
    keep_all: bool = False
    jobs: int | None = None
    faults: tuple[str, ...] = ()
    wait_s: float = 60.0
    settings: Settings = field(default_factory=Settings)

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Request:
        """The request of a stored run."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in dict(values).items()
        }
        settings = stored_settings(dict(plain.pop("settings")), Settings)
        return cls(**plain, settings=Settings(**settings))

    @property
    def on_farm(self) -> bool:
        """Whether it runs on boards that a farm lends."""
        return any(is_lent(board) for board in self.boards)

    def selects(self, spec: CaseSpec) -> bool:
        """Whether the filters let a case through."""
        return not self.filters or any(_matches(spec.id, pattern) for pattern in self.filters)

    def command(self, case_id: str) -> str:
        """The command that runs one of the cases again."""
        words = ["hil", "suite", "run", self.source, "--flow", self.flow, "--filter", f"={case_id}"]
        for name, value in self._options():
            words += [name] if value is True else [name, str(value)]
        return shlex.join(words)

    def _options(self) -> list[tuple[str, Any]]:
        """The options that decide what a case comes to, where they are not as usual."""
        usual, settings = Request(self.source), self.settings
        named: list[tuple[str, Any, Any]] = [
            *(("--board", board, "") for board in self.boards),
            ("--runtime-hw-type", self.hw_type, ""),
            ("--identity", self.ssh.get("identity"), None),
            ("--known-hosts", self.ssh.get("known_hosts"), None),
            ("--group", self.group, usual.group),
            ("--layer-inputs", self.layer_inputs, usual.layer_inputs),
            ("--merge", self.merge, usual.merge),
            *(("--dim", f"{name}={size}", "") for name, size in self.dims.items()),
            *(("--fault", fault, "") for fault in self.faults),
        ]
        for name, spec in specs_of(CaseSettings).items():
            value, without = getattr(settings, name), getattr(usual.settings, name)
            if spec.decides:
                named += [(flag_of(name, spec), one, without) for one in (value if spec.repeats else (value,))]
        return [(name, value) for name, value, without in named if value is not None and value != without]


def _matches(case_id: str, pattern: str) -> bool:
    if pattern.startswith("="):
        return case_id == pattern[1:]
    if not any(char in pattern for char in "*?["):
        return pattern in case_id
    return fnmatch.fnmatchcase(case_id, pattern)
