"""The ways of a study: each makes a program of a saved training step, stage by stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hil.controller.backends.compilers import tfcompile
from hil.controller.backends.compilers.iree import compile_iree
from hil.controller.backends.compilers.iree_program import PACKAGE
from hil.controller.devices.board_choice import with_target
from hil.controller.models.compiling import Work
from hil.controller.models.importers import import_model
from hil.controller.models.tensorflow.hlo import HLO, write_hlo
from hil.controller.storage.cache import META, Cache
from hil.controller.storage.isolated import Isolated, naming_errors
from hil.controller.storage.packages import needed_version
from hil.controller.storage.runs import storing
from hil.controller.storage.tensor_files import load_tensors
from hil.controller.workloads.study.train_build import MLIR, SIGNATURE, STEP, VALUES, lower_step
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, Model
from hil.core.tensors import Array
from hil.errors import CompileCrashed, CompileFailed, StageError
from hil.formats.xla_program import VALUES as TFCOMPILE_VALUES

# What becomes of an experiment, in this order. A compiler that has no such stage leaves it out.
PREPARE, LOWER = "train in TensorFlow", "lower to StableHLO"
LOAD, RUN, MATCH = "load", "run", "match"
TIMEOUT_S = 1800.0
_OUTSIDE = "--variables=outside"


@dataclass(frozen=True)
class Program:
    """A compiled training step."""

    artifact: Artifact
    inputs: tuple[str, ...]  # the names of its inputs in order: those of a batch, then variables as ``variable NAME``
    outputs: tuple[str, ...]  # the names of its outputs in order, likewise
    values: Mapping[str, Array]  # the variables' first values, by those names


@dataclass(frozen=True)
class Making:
    """What a way works with."""

    saved: Path
    config: BoardConfig
    machine: Mapping[str, Any]
    folder: Path
    cache: Cache
    isolated: Isolated
    # called with a stage's name and what it does; tells how long it took and what went wrong.
    stage: Callable[[str, Callable[[], Any]], Any]

    @property
    def log(self) -> Path:
        """Where compilers print."""
        return self.folder / "compile.log"

    def keep(self, made: Path) -> None:
        """Keep what a stage made, which the cache may lose; without first values, for each step brings its own."""
        with storing(self.folder):
            shutil.copytree(made, self.folder, ignore=lambda *_: (TFCOMPILE_VALUES, META), dirs_exist_ok=True)

    @property
    def work(self) -> Work:
        """How compilers work. Nothing comes from the cache: a study measures."""
        return {
            "cache": self.cache,
            "isolated": self.isolated,
            "recompute": True,
            "timeout": TIMEOUT_S,
            "log": self.log,
        }


def by_tfcompile(making: Making) -> Program:
    """Through tfcompile: its own three steps."""
    # The board was opened for IREE's sake.
    config, _ = with_target(making.config, tfcompile.RUNTIME, making.machine)
    flags = (*config.compile_flags.get("tfcompile", ()), _OUTSIDE)
    tfcompile.target_of(flags)

    def generated() -> tuple[Model, tfcompile.Steps, Path]:
        model = import_model(making.saved, function=STEP, isolated=making.isolated, cache=making.cache)
        steps = tfcompile.Steps(model, flags, making.work, making.folder / HLO)
        return model, steps, steps.generate()

    model, steps, graph = making.stage(tfcompile.GENERATE, generated)
    making.keep(graph)
    made = making.stage(tfcompile.COMPILE, lambda: steps.compile(graph))
    making.keep(made)
    library = making.stage(tfcompile.LINK, lambda: steps.link(graph, made))
    artifact = steps.artifact(graph, library)
    signature = tfcompile.signature_of(model.function, graph)
    values = signature.values((graph / TFCOMPILE_VALUES).read_bytes())
    return Program(
        artifact,
        _names([spec.name for spec in artifact.inputs or ()], len(signature.inputs(variables=False))),
        tuple(spec.name for spec in artifact.outputs or ()),
        {f"variable {name}": value for name, value in values.items()},
    )


def by_iree(making: Making) -> Program:
    """Through StableHLO and IREE."""

    def lowered() -> Path:
        folder = making.folder / "lowered"
        folder.mkdir(parents=True, exist_ok=True)
        arguments = {"saved": str(making.saved), "folder": str(folder)}
        call(making.isolated, lower_step, arguments, making.log)
        return folder

    folder = making.stage(LOWER, lowered)
    # What XLA itself would make of the same step: none of the stages that are measured.
    seen = {"path": str(making.saved), "function": STEP, "dims": {}}
    call(making.isolated, write_hlo, {**seen, "folder": str(making.folder), "log": str(making.log)}, making.log)

    def compiled() -> Artifact:
        model = import_model(folder / MLIR, isolated=making.isolated, cache=making.cache)
        flags = making.config.compile_flags.get("iree", ())
        failure = making.folder / "compile-failure"
        return compile_iree(model, runtime="iree", flags=flags, debug_ir=None, failure=failure, **making.work)

    artifact = making.stage(tfcompile.COMPILE, compiled)
    described = json.loads((folder / SIGNATURE).read_text())
    state = [one["spec"]["name"] for one in described["state"]]
    assigned = sorted((one for one in described["state"] if one["result"] is not None), key=lambda one: one["result"])
    return Program(
        artifact,
        _names([*described["inputs"], *state], len(described["inputs"])),
        _names([*described["outputs"], *(one["spec"]["name"] for one in assigned)], len(described["outputs"])),
        {f"variable {name}": value for name, value in load_tensors(folder / VALUES).items()},
    )


@dataclass(frozen=True)
class Way:
    """A compiler, its name with version (UsageError where it is missing), its programs' runtime, its stages before
    loading."""

    make: Callable[[Making], Program]
    compiler: Callable[[], str]
    runtime: str
    stages: tuple[str, ...]

    @property
    def all_stages(self) -> tuple[str, ...]:
        """All that an experiment goes through."""
        return (PREPARE, *self.stages, LOAD, RUN, MATCH)


_TFCOMPILE = (tfcompile.GENERATE, tfcompile.COMPILE, tfcompile.LINK)
WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "tfcompile": Way(by_tfcompile, tfcompile.compiler, tfcompile.RUNTIME, _TFCOMPILE),
        "iree": Way(by_iree, lambda: f"iree {needed_version(PACKAGE)}", "iree", (LOWER, tfcompile.COMPILE)),
    }
)


def call(
    isolated: Isolated,
    function: Callable[..., None],
    arguments: Mapping[str, Any],
    log: Path,
    *,
    failure: type[StageError] = CompileFailed,
    crash: type[StageError] = CompileCrashed,
) -> None:
    """Call a function of TensorFlow's in a process of its own; a StageTimeout, or what is named, where it fails."""
    with naming_errors("compile", "TensorFlow", failure, "", crash=crash, died="TensorFlow"):
        isolated.call(function, arguments, timeout=TIMEOUT_S, log=log)


def _names(names: Sequence[str], plain: int) -> tuple[str, ...]:
    return tuple(name if number < plain else f"variable {name}" for number, name in enumerate(names))
